"""Pictures of runs: accuracy curves of each comparison, and the methods against the share of weaker clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.partial import paper
from experiments.partial.results import METRIC, Result
from experiments.partial.tables import TITLES, gaps
from jaxfl.analysis.plots import Panel, line_style, seeds_curve, style_axes

_KINDS = {"moderate alone": (2, 3, 4), "weak alone": (5, 6, 7), "moderate and weak": (8, 9, 10)}
_BAND = "line: mean over seeds, band: smallest to largest"


def plot_curves(results: Sequence[Result], path: Path) -> Path:
    """Test accuracy against rounds, a panel for each comparison, a line for each method: figure 4.

    FedAvg has no clients but the strong ones, and is in all panels with as many.
    """
    compared = [result for result in results if result.method != "fed_avg"] or list(results)
    keys = sorted({(result.case or 11, result.counts) for result in compared})
    styles = _styles(results)
    num_columns = min(4, len(keys))
    num_rows = -(-len(keys) // num_columns)
    figure = Figure(figsize=(max(6.4, 3.4 * num_columns + 0.6), 2.9 * num_rows + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    handles = {}
    first = None
    for number, (_, counts) in enumerate(keys):
        axes = figure.add_subplot(num_rows, num_columns, number + 1, sharey=first)
        first = first or axes
        own = [result for result in compared if result.counts == counts]
        own += [r for r in results if r.method == "fed_avg" and r.counts[0] == counts[0] and r not in own]
        for result in own:
            title = _title(result, results)
            curve = seeds_curve(result.lines, METRIC)
            if curve.num_seeds > 1:
                axes.fill_between(
                    curve.rounds, curve.low, curve.high, alpha=0.15, linewidth=0, color=styles[title]["color"]
                )
            (handles[title],) = axes.plot(curve.rounds, curve.mean, linewidth=1.6, **styles[title])
        style_axes(axes, Panel(METRIC, "test accuracy" if number % num_columns == 0 else "", is_accuracy=True), "round")
        strong, moderate, weak = counts
        axes.set_title(f"{own[0].label}: {strong} + {moderate} + {weak}" if own[0].case else own[0].label, fontsize=9)
    figure.suptitle(f"{results[0].dataset}, accuracy by comparison (strong + moderate + weak clients)", fontsize=11)
    several = any(len(result.seeds) > 1 for result in results)
    _legend(figure, handles, _BAND if several else "one seed")
    figure.savefig(path, dpi=120)
    return path


def plot_gaps(results: Sequence[Result], path: Path) -> Path | None:
    """Accuracy, and by how much EmbracingFL is ahead of width reduction, against the share of clients not strong.

    Bars are standard deviations over seeds, numbers beside points are cases. None where no case has both methods.
    """
    of_case: dict[int, dict[str, Result]] = {}
    for result in results:
        suits = result.batch_norm == ("static" if result.method == "width_reduction" else "global")
        if result.case is not None and sum(result.counts) == result.nodes and (suits or result.batch_norm == "global"):
            own = of_case.setdefault(result.case, {})
            if suits or result.method not in own:
                own[result.method] = result
    pairs = {case: own for case, own in of_case.items() if {"embracing", "width_reduction"} <= set(own)}
    if not any(case > 1 for case in pairs):
        return None
    figure = Figure(figsize=(11.2, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    handles = {}
    for number, (kind, cases) in enumerate(_KINDS.items()):
        color = line_style(number)["color"]
        here = [case for case in cases if case in pairs]
        if not here:
            continue
        # Beside each other, where kinds have the same share.
        shares = [1 - paper.CASES[case][0] / paper.NUM_CLIENTS + 0.008 * (number - 1) for case in here]
        for method, marker, dashes in (("embracing", "o", "solid"), ("width_reduction", "s", (0, (4, 2)))):
            values = [pairs[case][method].last() for case in here]
            handles[f"{TITLES[method]}, {kind}"] = _points(left, shares, values, marker, dashes, color)
        found = [gaps(pairs[case]["embracing"], pairs[case]["width_reduction"]) for case in here]
        handles[f"gap, {kind}"] = _points(right, shares, found, "D", "solid", color)
        for case, share, values in zip(here, shares, found, strict=True):
            right.annotate(
                str(case), (share, values.mean()), (6, 3), textcoords="offset points", fontsize=8, color=color
            )
        if results[0].dataset == "cifar10":
            table = paper.TABLES_BY_DATASET["cifar10"].accuracy
            published = [table[case][0] - paper.WIDTH_REDUCTION[case][0] for case in here]
            (line,) = right.plot(shares, published, marker="D", mfc="white", ls=(0, (1, 1.5)), color=color, lw=1.2)
            handles[f"gap in the paper, {kind}"] = line
    if 1 in of_case and "embracing" in of_case[1]:
        value = of_case[1]["embracing"].last().mean()
        handles["all clients strong"] = left.axhline(value, color="0.4", linewidth=1.2, linestyle=(0, (6, 3)))
    right.axhline(0.0, color="0.4", linewidth=1.0)
    for axes, label in ((left, "test accuracy at the end, %"), (right, "EmbracingFL less width reduction, points")):
        style_axes(axes, Panel("", label), "share of clients that are not strong")
        axes.set_xlim(0.45, 0.92)
    figure.suptitle(f"{results[0].dataset}: EmbracingFL and width reduction; bars: standard deviation over seeds")
    _legend(figure, handles, None)
    figure.savefig(path, dpi=120)
    return path


def plot_added(results: Sequence[Result], path: Path) -> Path | None:
    """Accuracy against the share of weak clients added to the strong ones (Table 2); None without such runs."""
    if not any(sum(result.counts) < result.nodes for result in results if result.method != "fed_avg"):
        return None
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    handles = {}
    nodes = results[0].nodes
    for number, method in enumerate(("embracing", "width_reduction")):
        own = sorted((r for r in results if r.method == method and not r.counts[1]), key=lambda r: r.counts[2])
        if not own:
            continue
        color = line_style(number)["color"]
        shares = [result.counts[2] / nodes for result in own]
        handles[TITLES[method]] = _points(axes, shares, [result.last() for result in own], "o", "solid", color)
        if results[0].dataset == "cifar10":
            weak = list(paper.ADDED_WEAK)
            published = [paper.ADDED_WEAK[count][1 - number][0] for count in weak]
            shares = [count / paper.NUM_CLIENTS for count in weak]
            (line,) = axes.plot(shares, published, marker="o", mfc="white", ls=(0, (1, 1.5)), color=color, lw=1.2)
            handles[f"{TITLES[method]}, the paper (16 of 128 strong)"] = line
    style_axes(axes, Panel("", "test accuracy at the end, %"), f"weak clients beside the strong, as a share of {nodes}")
    _legend(figure, handles, "bars: standard deviation over seeds")
    figure.savefig(path, dpi=120)
    return path


def _points(axes: Axes, x: Sequence[float], values: Sequence[np.ndarray], marker: str, dashes, color: str):
    """Means with standard deviations over seeds; the handle of the line."""
    means = [found.mean() for found in values]
    bars = [found.std(ddof=1) if len(found) > 1 else 0.0 for found in values]
    return axes.errorbar(x, means, bars, marker=marker, linestyle=dashes, color=color, capsize=3, linewidth=1.5)


def _title(result: Result, results: Sequence[Result]) -> str:
    """The method, and its batch normalization where there are several."""
    several = len({other.batch_norm for other in results if other.method == result.method}) > 1
    return TITLES[result.method] + (f", {result.batch_norm}" if several else "")


def _styles(results: Sequence[Result]) -> dict[str, dict]:
    """A line style for each method, the same in every picture."""
    titles = sorted(
        {_title(result, results) for result in results},
        key=lambda title: [*map(title.startswith, TITLES.values())],
        reverse=True,
    )
    return {title: line_style(number) for number, title in enumerate(titles)}


def _legend(figure: Figure, handles: dict, title: str | None) -> None:
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(3, len(handles)),
        title=title,
        title_fontsize=8,
        fontsize=8,
        frameon=False,
    )
