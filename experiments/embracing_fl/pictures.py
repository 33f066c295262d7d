"""Pictures of runs: accuracy curves of each comparison, the methods case by case, and with weak clients added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfl.analysis.plots import (
    X_AXES,
    Panel,
    draw_curve,
    finish_x,
    line_style,
    new_figure,
    save_picture,
    seeds_curve,
    style_axes,
)
from jaxfl.core import ArgumentError

from . import paper
from .results import METRIC, Result, gaps, grouped, usual
from .tables import BOTH, TITLES, added_clients, paper_added

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {"moderate alone": (2, 3, 4), "weak alone": (5, 6, 7), "moderate and weak": (8, 9, 10)}
_MARKERS = ("o", "s")  # of the methods in BOTH
BAND = "line: mean over seeds, band: smallest to largest"
_BARS = "bars: standard deviation over seeds"


def plot_curves(results: Sequence[Result], path: Path, x: str = "rounds") -> Path:
    """Test accuracy against rounds or a cost, a panel for each comparison, a line for each method: figure 4.

    FedAvg trains strong clients alone, and stands in all panels with equally many of them.
    """
    rivals = [result for result in results if result.method != "fed_avg"] or list(results)
    keys = list(grouped(rivals))
    styles, handles, first = _styles(results), {}, None
    num_rows = -(-len(keys) // 4)
    num_columns = -(-len(keys) // num_rows)
    figure = new_figure(max(6.4, 3.4 * num_columns + 0.6), 2.9 * num_rows + 1.3)
    for number, (_, (strong, moderate, weak), num_active) in enumerate(keys):
        axes = first = figure.add_subplot(num_rows, num_columns, number + 1, sharey=first)
        lines = [result for result in rivals if result.comparison == keys[number]]
        label = lines[0].label + (f": {strong} + {moderate} + {weak}" if lines[0].case else "")
        lines += [r for r in results if r.method == "fed_avg" and r.counts[0] == strong and r not in lines]
        for result in lines:
            title = _title(result, results)
            handles[title] = draw_curve(axes, seeds_curve(result.lines, METRIC, X_AXES[x].totals), styles[title])
        panel = Panel(METRIC, "test accuracy" if number % num_columns == 0 else "", is_accuracy=True)
        style_axes(axes, panel, X_AXES[x].label)
        finish_x(axes, X_AXES[x])
        axes.set_title(f"{label}, {num_active} active", fontsize=9)
    in_order = {title: handles[title] for title in styles if title in handles}
    band = BAND if any(len(result.seeds) > 1 for result in results) else "one seed"
    title = f"{results[0].dataset}, accuracy by comparison (strong + moderate + weak clients)"
    return save_picture(figure, path, title, in_order, band, 2 if len(handles) == 4 else 3)


def plot_gaps(results: Sequence[Result], path: Path) -> Path | None:
    """Accuracy, and EmbracingFL's lead over width reduction, for each case, with fewer and fewer strong clients.

    Lines join cases with the same kinds of clients. None where no case has both methods.
    """
    rows = grouped(result for result in usual(results) if result.case is not None and result.has_all)
    both = [(key[0], row) for key, row in rows.items() if {*BOTH} <= {*row}]
    pairs = dict(both)
    if len(pairs) < len(both):
        case = next(case for case, row in both if pairs[case] is not row)
        requirement = "must hold each case with both methods once"
        found = f"got case {case} several times, with other numbers of active clients"
        raise ArgumentError("collect", requirement, found, "Collect them apart.")
    if not any(case > 1 for case in pairs):
        return None
    figure, (left, right) = _two_axes(
        "EmbracingFL less width reduction, points", "case, and its strong + moderate + weak clients"
    )
    handles, ticks, published = {}, {}, paper.ACCURACY.get(results[0].dataset, {})
    for kind, cases in _KINDS.items():
        here = [case for case in cases if case in pairs]
        if not here:
            continue
        ticks |= {case: f"{case}\n{'+'.join(map(str, pairs[case][BOTH[0]].counts))}" for case in here}
        for axes in (left, right):
            axes.annotate(kind, (np.mean(here), 1.0), (0, 3), ("data", "axes fraction"), "offset points", ha="center")
        for number, method in enumerate(BOTH):
            values = [pairs[case][method].last for case in here]
            handles[TITLES[method]] = _points(left, here, values, _MARKERS[number], **line_style(number))
        color = line_style(2)["color"]
        ahead = [gaps(*map(pairs[case].__getitem__, BOTH)) for case in here]
        handles["gap"] = _points(right, here, ahead, "D", color=color)
        if {*BOTH} <= {*published}:
            of_paper = [published[BOTH[0]][case][0] - published[BOTH[1]][case][0] for case in here]
            handles["gap in the paper"] = _paper_line(right, here, of_paper, "D", color)
    strong = [row["embracing"] for (case, *_), row in rows.items() if case == 1 and "embracing" in row]
    if strong:
        value = strong[-1].last.mean()
        handles["all clients strong"] = left.axhline(value, color="0.4", linewidth=1.2, linestyle=(0, (6, 3)))
    for axes in (left, right):
        axes.set_xticks(list(ticks), ticks.values(), fontsize=8)
    return save_picture(figure, path, f"{results[0].dataset}: EmbracingFL and width reduction", handles, _BARS, 5)


def plot_added(results: Sequence[Result], path: Path) -> Path | None:
    """Accuracy, and its gain, against the share of weak clients added to strong ones; None without such runs."""
    runs = sorted(added_clients(results), key=lambda result: result.counts)
    if not runs:
        return None
    fewest = min(result.counts[2] for result in runs)
    figure, (left, right) = _two_axes(
        f"points gained over {fewest} weak clients, seed by seed", "weak clients beside the strong, as a share of all"
    )
    handles, strong = {}, sorted({result.counts[0] for result in runs})
    for number, (method, marker) in enumerate(zip(BOTH, _MARKERS, strict=True)):
        style = line_style(number)
        for count in strong:
            line = [result for result in runs if (result.method, result.counts[0]) == (method, count)]
            shares = [result.counts[2] / result.nodes for result in line]
            handles[TITLES[method]] = _points(left, shares, [result.last for result in line], marker, **style)
            _points(right, shares, [gaps(result, line[0]) for result in line], marker, **style)
            published = [numbers[1 - number][0] for result in line if (numbers := paper_added(result)) is not None]
            if line and len(published) == len(line):
                gains = [value - published[0] for value in published]
                title = f"{TITLES[method]}, gain in the paper"
                handles[title] = _paper_line(right, shares, gains, marker, style["color"])
    clients = f"{' or '.join(map(str, strong))} of {runs[0].nodes} clients strong"
    title = f"{results[0].dataset}: {clients}, and more and more weak ones"
    return save_picture(figure, path, title, handles, _BARS, 4)


def _two_axes(label: str, x_label: str) -> tuple[Figure, list[Axes]]:
    """A picture with axes for accuracies, and beside them axes for the quantity that `label` names."""
    figure = new_figure(12.0, 4.9)
    left, right = (figure.add_subplot(1, 2, number) for number in (1, 2))
    right.axhline(0.0, color="0.4", linewidth=1.0)
    style_axes(left, Panel("", "test accuracy at the end, %"), x_label)
    style_axes(right, Panel("", label), x_label)
    return figure, [left, right]


def _points(axes: Axes, x: Sequence[float], values: Sequence[np.ndarray], marker: str, **style: Any):
    """Means with standard deviations over seeds; the handle of the line."""
    bars = [seeds.std(ddof=1) if len(seeds) > 1 else 0.0 for seeds in values]
    means = [seeds.mean() for seeds in values]
    return axes.errorbar(x, means, bars, marker=marker, capsize=3, linewidth=1.5, **style)


def _paper_line(axes: Axes, x: Sequence[float], values: Sequence[float], marker: str, color: str):
    """The paper's numbers, hollow and dotted; the handle of the line."""
    (line,) = axes.plot(x, values, marker=marker, mfc="white", ls=(0, (1, 1.5)), color=color, lw=1.2)
    return line


def _title(result: Result, results: Sequence[Result]) -> str:
    """The method, and its batch normalization where there are several."""
    several = len({other.batch_norm for other in results if other.method == result.method}) > 1
    return TITLES[result.method] + (f", {result.batch_norm}" if several else "")


def _styles(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """A line style for each method, the same in every picture."""
    order = list(TITLES)
    titles = {(order.index(result.method), _title(result, results)) for result in results}
    return {title: line_style(number) for number, (_, title) in enumerate(sorted(titles))}
