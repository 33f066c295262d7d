"""Accuracy against bits, and against joules and simulated seconds, as counted and as the paper charges them: figures 1
and 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxfl.analysis.pictures import Mark, Picture, Plot, curve_mark, save_picture
from jaxfl.analysis.plots import read_lines, run_title, seeds_curve
from jaxfl.core.lines import Lines
from jaxfl.frame import Finished
from jaxfl.training.summary import with_prefix

from .costs import READINGS, round_costs, write_costs

_MOST_LINES = 12
_TITLES = {"joules": "joules, all devices", "seconds": "simulated seconds"}
_OF_READING = {"counted": "as counted", "published": "as the paper charges"}


def finish(finished: Finished, costs: Sequence[str] = ("joules", "seconds")) -> Sequence[Path]:
    """Write and print what rounds cost; draw accuracy against bits, and against costs, a column for each reading."""
    write_costs(finished)
    folder, cases = finished.run.path, finished.summary["cases"]
    sent = {name: cases[name]["costs"]["bits_sent"]["mean"] for name in finished.rows if cases[name]["rounds"]}
    names = [name for name, bits in sent.items() if bits]  # a case that sends nothing has no place on an axis of bits
    if not names or len(names) > _MOST_LINES:
        return []
    by_case = read_lines(folder).after(0).by_case()
    title, plots = run_title(folder / "config.json"), list[Plot]()
    for cost, reading in [(cost, reading) for cost in costs for reading in READINGS]:
        marks = []
        for name in names:
            of_round = getattr(round_costs(finished.rows[name].config, cases[name])[reading], cost)
            curve = seeds_curve(by_case[name], "test_accuracy")
            marks.append(curve_mark(name, curve._replace(x=of_round * curve.x)))
        x_label = f"{_TITLES[cost]}, {_OF_READING[reading]}"
        plots.append(Plot("test accuracy", x_label, marks, is_accuracy=True, log="x"))
    pictures = [_bits(title, names, by_case), Picture("costs", title, plots, num_columns=len(READINGS), shares_y=False)]
    return [save_picture(folder, picture) for picture in pictures]


def _bits(title: str, names: Sequence[str], by_case: Mapping[str, Lines]) -> Picture:
    """Accuracy against the bits that all devices have sent, the subject of the paper."""
    curves = {name: seeds_curve(by_case[name], "test_accuracy", ("total_bits_sent",)) for name in names}
    level = min(max(curve.mean) for curve in curves.values())  # which every method reaches
    marks = []
    for name, curve in curves.items():
        first = next(at for at, mean in enumerate(curve.mean) if mean >= level)
        label = f"{name}: {with_prefix(curve.x[first], 'bit')} to {level:.1%}"
        reached = Mark(label, [float(curve.x[first])], [float(curve.mean[first])], is_points=True)
        marks += [reached, curve_mark(label, curve)]
    plot = Plot("test accuracy", "bits sent, all devices", marks, is_accuracy=True, log="x")
    return Picture("bits", title, [plot], num_columns=1)
