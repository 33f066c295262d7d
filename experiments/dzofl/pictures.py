"""Accuracy against joules and simulated seconds, as counted and as the paper charges them: figures 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxfl.analysis.plots import (
    Panel,
    draw_curve,
    legend_below,
    line_style,
    new_figure,
    read_lines,
    run_title,
    save_figure,
    seeds_curve,
    style_axes,
)
from jaxfl.frame import Finished

from .costs import READINGS, round_costs, write_costs

_MOST_LINES = 12
_ACCURACY = Panel("test_accuracy", "test accuracy", is_accuracy=True)
_TITLES = {"joules": "joules, all devices", "seconds": "simulated seconds"}
_OF_READING = {"counted": "as counted", "published": "as the paper charges"}


def finish(finished: Finished, costs: Sequence[str] = ("joules", "seconds")) -> Sequence[Path]:
    """Write and print what rounds cost; draw accuracy against joules, seconds or both, a column for each reading."""
    from matplotlib.ticker import NullFormatter

    write_costs(finished)
    folder, cases = finished.run.path, finished.summary["cases"]
    names = [name for name in finished.rows if cases[name]["rounds"]]
    if not names or len(names) > _MOST_LINES:
        return []
    lines = read_lines(folder)
    figure = new_figure(9.6, 3.6 * len(costs) + 0.6, run_title(folder / "config.json"))
    handles = {}
    for place, (cost, reading) in enumerate([(cost, reading) for cost in costs for reading in READINGS]):
        axes = figure.add_subplot(len(costs), len(READINGS), place + 1)
        for number, name in enumerate(names):
            of_round = getattr(round_costs(finished.rows[name].config, cases[name])[reading], cost)
            curve = seeds_curve([line for line in lines if line["case"] == name and line["round"]], "test_accuracy")
            handles[name] = draw_curve(axes, curve._replace(x=of_round * curve.x), line_style(number))
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())  # over less than two decades its labels would overlap
        style_axes(axes, _ACCURACY, f"{_TITLES[cost]}, {_OF_READING[reading]}")
    legend_below(figure, handles, [])
    return [save_figure(figure, folder / "plots" / "costs.png")]
