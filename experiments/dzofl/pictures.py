"""Accuracy against bits, and against joules and simulated seconds, as counted and as the paper charges them: figures 1
and 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfl.analysis.plots import (
    Panel,
    draw_curve,
    legend_below,
    new_figure,
    read_lines,
    run_title,
    save_figure,
    seeds_curve,
    style_axes,
)
from jaxfl.analysis.styles import line_style
from jaxfl.core.lines import Lines
from jaxfl.frame import Finished
from jaxfl.training.summary import with_prefix

from .costs import READINGS, round_costs, write_costs

_MOST_LINES = 12
_ACCURACY = Panel("test_accuracy", "test accuracy", is_accuracy=True)
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
    figure = new_figure(9.6, 3.6 * len(costs) + 0.6, run_title(folder / "config.json"))
    pictures, handles = [_plot_bits(finished, names, by_case)], {}
    for place, (cost, reading) in enumerate([(cost, reading) for cost in costs for reading in READINGS]):
        axes = figure.add_subplot(len(costs), len(READINGS), place + 1)
        for number, name in enumerate(names):
            of_round = getattr(round_costs(finished.rows[name].config, cases[name])[reading], cost)
            curve = seeds_curve(by_case[name], "test_accuracy")
            handles[name] = draw_curve(axes, curve._replace(x=of_round * curve.x), line_style(number))
        _log_x(axes, f"{_TITLES[cost]}, {_OF_READING[reading]}")
    legend_below(figure, handles, [])
    return [*pictures, save_figure(figure, folder / "plots" / "costs.png")]


def _plot_bits(finished: Finished, names: Sequence[str], by_case: Mapping[str, Lines]) -> Path:
    """Accuracy against the bits that all devices have sent, the subject of the paper."""
    folder, handles = finished.run.path, {}
    figure = new_figure(7.2, 4.4, run_title(folder / "config.json"))
    axes = figure.add_subplot()
    curves = {name: seeds_curve(by_case[name], "test_accuracy", ("total_bits_sent",)) for name in names}
    level = min(max(curve.mean) for curve in curves.values())  # which every method reaches
    for number, (name, curve) in enumerate(curves.items()):
        style, first = line_style(number), next(at for at, mean in enumerate(curve.mean) if mean >= level)
        label = f"{name}: {with_prefix(curve.x[first], 'bit')} to {level:.1%}"
        handles[label] = draw_curve(axes, curve, style)
        axes.plot(curve.x[first], curve.mean[first], marker="o", color=style["color"])
    _log_x(axes, "bits sent, all devices")
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    legend_below(figure, handles, [], 2)
    return save_figure(figure, folder / "plots" / "bits.png")


def _log_x(axes: Any, label: str) -> None:
    """Finish axes of accuracies against a cost."""
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())  # over less than two decades its labels would overlap
    style_axes(axes, _ACCURACY, label)
