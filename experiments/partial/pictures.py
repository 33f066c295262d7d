"""Pictures of runs: accuracy curves of each comparison, the methods case by case, and with weak clients added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.partial import paper
from experiments.partial.results import METRIC, Result
from experiments.partial.tables import TITLES, added_clients, gaps, paper_added
from jaxfl.analysis.plots import Panel, line_style, seeds_curve, style_axes
from jaxfl.core import ArgumentError

_KINDS = {"moderate alone": (2, 3, 4), "weak alone": (5, 6, 7), "moderate and weak": (8, 9, 10)}
_BAND = "line: mean over seeds, band: smallest to largest"
_BARS = "bars: standard deviation over seeds"


def plot_curves(results: Sequence[Result], path: Path) -> Path:
    """Test accuracy against rounds, a panel for each comparison, a line for each method: figure 4.

    FedAvg has no clients but the strong ones, and is in all panels with as many.
    """
    compared = [result for result in results if result.method != "fed_avg"] or list(results)
    keys = sorted({result.comparison for result in compared})
    styles = _styles(results)
    num_rows = -(-len(keys) // 4)
    num_columns = -(-len(keys) // num_rows)
    figure = Figure(figsize=(max(6.4, 3.4 * num_columns + 0.6), 2.9 * num_rows + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    handles = {}
    first = None
    for number, comparison in enumerate(keys):
        axes = figure.add_subplot(num_rows, num_columns, number + 1, sharey=first)
        first = first or axes
        strong, moderate, weak = comparison[1]
        own = [result for result in compared if result.comparison == comparison]
        own += [r for r in results if r.method == "fed_avg" and r.counts[0] == strong and r not in own]
        for result in own:
            title = _title(result, results)
            curve = seeds_curve(result.lines, METRIC)
            if curve.num_seeds > 1:
                axes.fill_between(
                    curve.rounds, curve.low, curve.high, alpha=0.15, linewidth=0, color=styles[title]["color"]
                )
            (handles[title],) = axes.plot(curve.rounds, curve.mean, linewidth=1.6, **styles[title])
        style_axes(axes, Panel(METRIC, "test accuracy" if number % num_columns == 0 else "", is_accuracy=True), "round")
        clients = f"{own[0].label}: {strong} + {moderate} + {weak}" if own[0].case else own[0].label
        axes.set_title(f"{clients}, {own[0].num_active} active", fontsize=9)
    figure.suptitle(f"{results[0].dataset}, accuracy by comparison (strong + moderate + weak clients)", fontsize=11)
    several = any(len(result.seeds) > 1 for result in results)
    in_order = {title: handles[title] for title in styles if title in handles}
    _legend(figure, in_order, _BAND if several else "one seed", 2 if len(handles) == 4 else 3)
    figure.savefig(path, dpi=120)
    return path


def plot_gaps(results: Sequence[Result], path: Path) -> Path | None:
    """Accuracy, and by how much EmbracingFL is ahead of width reduction, case by case; strong clients grow fewer.

    Lines join cases with the same kinds of clients. None where no case has both methods.
    """
    of_case: dict[tuple, dict[str, Result]] = {}
    for result in results:
        suits = result.batch_norm == ("static" if result.method == "width_reduction" else "global")
        if result.case is not None and sum(result.counts) == result.nodes and (suits or result.batch_norm == "global"):
            own = of_case.setdefault(result.comparison, {})
            if suits or result.method not in own:
                own[result.method] = result
    both = [(key, own) for key, own in of_case.items() if {"embracing", "width_reduction"} <= set(own)]
    pairs = {key[0]: own for key, own in both}
    if len(pairs) < len(both):
        case, *_ = next(key for key, own in both if pairs[key[0]] is not own)
        requirement = "must hold each case with both methods once"
        found = f"got case {case} several times, with other numbers of active clients"
        raise ArgumentError("collect", requirement, found, "Collect them apart.")
    if not any(case > 1 for case in pairs):
        return None
    figure = Figure(figsize=(12.0, 4.9), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    handles, ticks = {}, {}
    published = paper.TABLES_BY_DATASET["cifar10"].accuracy if results[0].dataset == "cifar10" else {}
    for kind, cases in _KINDS.items():
        here = [case for case in cases if case in pairs]
        if not here:
            continue
        ticks |= {case: f"{case}\n{'+'.join(map(str, pairs[case]['embracing'].counts))}" for case in here}
        for axes in (left, right):
            axes.annotate(kind, (np.mean(here), 1.0), (0, 3), ("data", "axes fraction"), "offset points", ha="center")
        for method, marker, number in (("embracing", "o", 0), ("width_reduction", "s", 1)):
            values = [pairs[case][method].last() for case in here]
            handles[TITLES[method]] = _points(left, here, values, marker, **line_style(number))
        found = [gaps(pairs[case]["embracing"], pairs[case]["width_reduction"]) for case in here]
        color = line_style(2)["color"]
        handles["gap"] = _points(right, here, found, "D", color=color)
        if published:
            of_paper = [published[case][0] - paper.WIDTH_REDUCTION[case][0] for case in here]
            handles["gap in the paper"] = _paper_line(right, here, of_paper, "D", color)
    whole = [own["embracing"] for (case, *_), own in of_case.items() if case == 1 and "embracing" in own]
    if whole:
        value = whole[-1].last().mean()
        handles["all clients strong"] = left.axhline(value, color="0.4", linewidth=1.2, linestyle=(0, (6, 3)))
    right.axhline(0.0, color="0.4", linewidth=1.0)
    for axes, label in ((left, "test accuracy at the end, %"), (right, "EmbracingFL less width reduction, points")):
        style_axes(axes, Panel("", label), "case, and its strong + moderate + weak clients")
        axes.set_xticks(list(ticks), ticks.values(), fontsize=8)
    figure.suptitle(f"{results[0].dataset}: EmbracingFL and width reduction", fontsize=11)
    _legend(figure, handles, _BARS, 5)
    figure.savefig(path, dpi=120)
    return path


def plot_added(results: Sequence[Result], path: Path) -> Path | None:
    """Accuracy against the share of weak clients added to strong ones, and what they gain; None without such runs."""
    chosen = added_clients(results)
    if not chosen:
        return None
    figure = Figure(figsize=(11.2, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    handles = {}
    for number, (method, marker) in enumerate((("embracing", "o"), ("width_reduction", "s"))):
        style = line_style(number)
        for strong in sorted({result.counts[0] for result in chosen if result.method == method}):
            own = [result for result in chosen if result.method == method and result.counts[0] == strong]
            own.sort(key=lambda result: result.counts)
            shares = [result.counts[2] / result.nodes for result in own]
            handles[TITLES[method]] = _points(left, shares, [result.last() for result in own], marker, **style)
            _points(right, shares, [gaps(result, own[0]) for result in own], marker, **style)
            published = [numbers[1 - number][0] for result in own if (numbers := paper_added(result)) is not None]
            if len(published) == len(own):
                gained = [value - published[0] for value in published]
                handles[f"{TITLES[method]}, gain in the paper"] = _paper_line(
                    right, shares, gained, marker, style["color"]
                )
    fewest = min(result.counts[2] for result in chosen)
    right.axhline(0.0, color="0.4", linewidth=1.0)
    for axes, label in (
        (left, "test accuracy at the end, %"),
        (right, f"points gained over {fewest} weak clients, seed by seed"),
    ):
        style_axes(axes, Panel("", label), "weak clients beside the strong, as a share of all")
    strong = " or ".join(map(str, sorted({result.counts[0] for result in chosen})))
    title = f"{results[0].dataset}: {strong} of {chosen[0].nodes} clients strong, and more and more weak ones"
    figure.suptitle(title, fontsize=11)
    _legend(figure, handles, _BARS, 4)
    figure.savefig(path, dpi=120)
    return path


def _points(axes: Axes, x: Sequence[float], values: Sequence[np.ndarray], marker: str, **style: Any):
    """Means with standard deviations over seeds; the handle of the line."""
    means = [found.mean() for found in values]
    bars = [found.std(ddof=1) if len(found) > 1 else 0.0 for found in values]
    return axes.errorbar(x, means, bars, marker=marker, capsize=3, linewidth=1.5, **style)


def _paper_line(axes: Axes, x: Sequence[float], values: Sequence[float], marker: str, color: str):
    """The paper's numbers, hollow and dotted; the handle of the line."""
    (line,) = axes.plot(x, values, marker=marker, mfc="white", ls=(0, (1, 1.5)), color=color, lw=1.2)
    return line


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


def _legend(figure: Figure, handles: dict, title: str, num_columns: int = 3) -> None:
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(num_columns, len(handles)),
        title=title,
        title_fontsize=8,
        fontsize=8,
        frameon=False,
    )
