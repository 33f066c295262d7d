"""Pictures of final results: a metric at the end against the numbers in which the cases differ, over seeds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfl.analysis.pictures import Mark, Picture, Plot, curve_mark, draw_picture
from jaxfl.analysis.plots import (
    Panel,
    epsilon_label,
    new_figure,
    percents,
    privacy_notes,
    read_lines,
    run_title,
    save_figure,
    seeds_curve,
    statements_of,
    style_axes,
    wrapped_notes,
)
from jaxfl.core.lines import Lines
from jaxfl.core.outputs import read_csv

if TYPE_CHECKING:
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_X = {  # setting -> label of its axis, in order of preference for the horizontal axis
    "target_epsilon": "privacy budget ε",
    "iterations": "iterations K",
    "noise_std": "noise standard deviation",
    "batch_size": "batch size",
    "nodes": "nodes n",
}
_LABEL = {
    "method": "{}",
    "nodes": "{} nodes",
    "batch_size": "batch {}",
    "iterations": "K = {}",
    "noise_std": "noise {:g}",
    "target_epsilon": "ε = {:g}",
    "bound": "{} bound",
    "baseline": "{}",
    "how": "{}",
}
_PANELS = (
    Panel("test_loss", "test loss at the end"),  # a training loss is a mean over rounds, not that of the end
    Panel("test_accuracy", "test accuracy at the end", is_accuracy=True),
)
_LOG_COLORS_FROM_RATIO = 30.0
_MATCHED = "K matched to ε"
_LOG_FROM_RATIO = 8.0  # numbers that span less are easier to read on a linear axis
_MOST_TICKS = 10  # labels that fit side by side
_SCATTERED = 5  # a number with at least this many values is an axis of a scatter plot
_MOST_PAIRS = 6  # pairs of numbers in a scatter plot
Settings = Mapping[str, Mapping[str, Any]]


def plot_final(run_dir: str | os.PathLike[str], settings: Settings) -> list[Path]:
    """Draw the figures of `final_figures` into `<run_dir>/plots`; returns their paths."""
    figures = final_figures(Path(run_dir), settings)
    return [save_figure(figure, Path(run_dir) / "plots" / f"{name}.png") for name, figure in figures.items()]


def final_figures(run_dir: Path, settings: Settings) -> dict[str, Figure]:
    """Draw final loss and accuracy against the numbers in which the cases differ.

    Args:
        run_dir: a run directory whose run has ended.
        settings: case -> its values of the options that vary.

    Returns:
        heat_map where exactly two numbers vary and every pair of their values ran; else final where some series of a
        number has three points or more; else scatter where two numbers or more have five values each, as sampled
        numbers have. Also speedup (test loss and accuracy against iterations times nodes) where the cases differ in
        their number of nodes. Diverged runs are left out, and counted in the caption.
    """
    lines = read_lines(run_dir)
    figures = {}
    axis, pair = _horizontal(settings), _pair(settings)
    if pair is not None:
        figures["heat_map"] = _draw_heat_map(run_dir, lines, settings, *pair)
    elif axis is not None and max(map(len, series(settings, axis).values())) >= 3:
        figures["final"] = _draw_final(run_dir, lines, settings, axis)
    elif len(sampled := [name for name, values in _numbers(settings).items() if len(values) >= _SCATTERED]) > 1:
        figures["scatter"] = _draw_scatter(run_dir, lines, settings, sampled)
    if len({row.get("nodes") for row in settings.values()}) > 1:
        figures["speedup"] = _draw_speedup(run_dir, lines, settings)
    return figures


def _numbers(settings: Settings, words: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Option -> its values, for options that are numbers or one of the words in every case; known options first."""
    names = dict.fromkeys([*_X, *(name for row in settings.values() for name in row)])
    values = {name: sorted({row[name] for row in settings.values() if name in row}, key=str) for name in names}
    return {
        name: numbers
        for name, numbers in values.items()
        if all(name in row for row in settings.values())
        and all(_is_number(value) or value in words for value in numbers)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _horizontal(settings: Settings) -> str | None:
    """The setting for the horizontal axis: the first with three values or more; nodes have a picture of their own."""
    return next((name for name, values in _numbers(settings).items() if name != "nodes" and len(values) >= 3), None)


def _pair(settings: Settings) -> tuple[str, str] | None:
    """The two numbers that vary, if there are exactly two and all pairs of their values ran; `auto` is a value, too."""
    varying = {name: values for name, values in _numbers(settings, ("auto",)).items() if len(values) > 1}
    if len(varying) != 2:
        return None
    x, y = varying
    cells = {(row[x], row[y]) for row in settings.values()}
    return (x, y) if len(cells) == len(varying[x]) * len(varying[y]) else None


def series(settings: Settings, *axes: str) -> dict[str, list[str]]:
    """Label -> the cases that belong together: those that differ in nothing but the axes.

    Cases whose K was chosen for each epsilon, so that every K goes with one epsilon alone, are one line, too.

    Examples:
        >>> rows = {"a": (1.0, 10), "b": (2.0, 40), "c": (1.0, 20), "d": (2.0, 20)}
        >>> settings = {k: {"method": "VR", "target_epsilon": e, "iterations": n} for k, (e, n) in rows.items()}
        >>> series(settings, "target_epsilon")
        {'K matched to ε': ['a', 'b'], 'K = 20': ['c', 'd']}
    """
    names = dict.fromkeys([*_LABEL, *(name for row in settings.values() for name in row)])
    differing = [n for n in names if n not in axes and len({row.get(n) for row in settings.values()}) > 1]
    places: dict[Any, set[Any]] = {}
    for row in settings.values():
        places.setdefault(row.get("iterations"), set()).add(row[axes[0]])
    groups: dict[str, list[str]] = {}
    for case, row in settings.items():
        is_matched = axes[0] == "target_epsilon" and len(places[row.get("iterations")]) == 1
        parts = [
            _MATCHED
            if name == "iterations" and is_matched
            else _LABEL.get(name, name.replace("_", " ") + " {}").format(row[name])
            for name in differing
            if row.get(name) is not None
        ]
        groups.setdefault(", ".join(parts) or str(row.get("method", "all")), []).append(case)
    return groups


def _ends(run_dir: Path, lines: Lines) -> tuple[dict[tuple[str, int], Mapping[str, Any]], int]:
    """(case, seed) -> last line, without runs that diverged; and the number of those."""
    path, failures = run_dir / "results.csv", set()
    if path.exists():
        failures = {(row["case"], int(row["seed"])) for row in read_csv(path) if row["status"] == "diverged"}
    return {part: line for part, line in lines.ends().items() if part not in failures}, len(failures)


def _values(ends: Mapping[tuple[str, int], Mapping[str, Any]], case: str, metric: str) -> np.ndarray:
    """(seeds,), float64: final values of a case's seeds."""
    values = [line.get(metric) for (name, _), line in ends.items() if name == case]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def ladder(settings: Settings, axis: str, panel: Panel, x_label: str, values: Callable[[str], Any]) -> Plot:
    """A line for each series against a number, with a bar from the smallest to the largest seed.

    `values` gives a case's final values of the panel's metric, (seeds,); a case without any is left out.
    """
    marks = []
    for label, cases in series(settings, axis).items():
        known = {name: own for name in cases if len(own := values(name))}
        points = sorted((float(settings[name][axis]), float(np.mean(v)), min(v), max(v)) for name, v in known.items())
        if points:
            marks.append(Mark(label, *np.array(points, np.float64).T.tolist(), is_points=True))
    places = sorted({float(row[axis]) for row in settings.values()})
    is_log = (axis in ("iterations", "noise_std") and places[0] > 0) or _is_log(places)
    ticks = places if is_log and len(places) <= _MOST_TICKS else []
    return Plot(panel.label, x_label, marks, panel.is_accuracy, log="x" if is_log else "", ticks=ticks)


def _draw_final(run_dir: Path, lines: Lines, settings: Settings, axis: str) -> Figure:
    """Loss and accuracy against a number."""
    ends, num_diverged = _ends(run_dir, lines)
    label = _axis_label(run_dir, axis, settings)
    plots = [ladder(settings, axis, panel, label, partial(_values, ends, metric=panel.metric)) for panel in _PANELS]
    notes = [
        *privacy_notes(run_dir, settings),
        *_omissions(num_diverged),
        _over(ends, "; bar: smallest to largest seed"),
    ]
    return draw_picture(Picture("final", run_title(run_dir / "config.json"), plots, notes, shares_y=False))


def _draw_heat_map(run_dir: Path, lines: Lines, settings: Settings, x: str, y: str) -> Figure:
    """One cell, the mean over seeds, for each pair of values; a row of loss and accuracy for each series."""
    groups = series(settings, x, y)
    ends, num_diverged = _ends(run_dir, lines)
    foot = [*wrapped_notes(privacy_notes(run_dir, settings), 11.0), *_omissions(num_diverged), _over(ends)]
    figure = new_figure(11.0, 4.0 * len(groups) + 0.17 * len(foot), run_title(run_dir / "config.json"))
    columns, rows = (
        sorted({row[name] for row in settings.values()}, key=lambda value: (not _is_number(value), value))
        for name in (x, y)
    )
    all_axes = figure.subplots(len(groups), 2, squeeze=False)
    for panel, panel_axes in zip(_PANELS, all_axes.T, strict=True):
        means = _means(ends, settings, panel)
        scale = _color_scale(panel, means.values())
        for (label, cases), axes in zip(groups.items(), panel_axes, strict=True):
            cells = np.full((len(rows), len(columns)), np.nan)
            for name in cases:
                cells[rows.index(settings[name][y]), columns.index(settings[name][x])] = means[name]
            axes.imshow(cells, origin="lower", aspect="auto", cmap=scale.cmap, norm=scale.norm)
            for (row, column), value in np.ndenumerate(cells):
                text = "diverged" if np.isnan(value) else f"{100 * value:.1f}%" if panel.is_accuracy else f"{value:.3g}"
                color = "white" if not np.isnan(value) and sum(scale.to_rgba(value)[:3]) < 1.5 else "black"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
            axes.set_xticks(range(len(columns)), [f"{value:g}" if _is_number(value) else value for value in columns])
            axes.set_yticks(range(len(rows)), [f"{value:g}" if _is_number(value) else value for value in rows])
            axes.set_xlabel(_axis_label(run_dir, x, settings))
            axes.set_ylabel(_axis_label(run_dir, y, settings))
            axes.set_title(panel.label if len(groups) == 1 else f"{label}: {panel.label}", fontsize=10)
        figure.colorbar(scale, ax=list(panel_axes), format=percents() if panel.is_accuracy else None)
    figure.supxlabel("\n".join(foot), fontsize=8)
    return figure


def _draw_scatter(run_dir: Path, lines: Lines, settings: Settings, names: Sequence[str]) -> Figure:
    """One point for each case, colored by the mean over seeds; a row of panels for each series and pair of numbers."""
    ends, num_diverged = _ends(run_dir, lines)
    rows = list(itertools.product(series(settings, *names).items(), itertools.combinations(names, 2)))
    drawn = rows[:_MOST_PAIRS]
    left = [f"{len(rows) - len(drawn)} more pairs of numbers are not drawn"] if len(rows) > len(drawn) else []
    means = {panel: _means(ends, settings, panel) for panel in _PANELS}
    panels = [panel for panel in _PANELS if not np.isnan([*means[panel].values()]).all()]
    text = f"{_over(ends)}; ring: best case; cross: diverged, or without this metric"
    foot = [*wrapped_notes(privacy_notes(run_dir, settings), 11.0), *_omissions(num_diverged), *left, text]
    figure = new_figure(11.0, 3.6 * len(drawn) + 0.17 * len(foot), run_title(run_dir / "config.json"))
    all_axes = figure.subplots(len(drawn), max(1, len(panels)), squeeze=False)
    for panel, panel_axes in zip(panels, all_axes.T, strict=False):
        of_case = means[panel]
        scale = _color_scale(panel, of_case.values())
        best = (np.nanmax if panel.is_accuracy else np.nanmin)([*of_case.values()])
        for ((label, cases), pair), axes in zip(drawn, panel_axes, strict=True):
            places = np.array([[settings[name][option] for option in pair] for name in cases], float)
            values = np.array([of_case[name] for name in cases])
            known = ~np.isnan(values)
            axes.scatter(*places[~known].T, color="0.6", marker="x", linewidth=1)
            axes.scatter(*places[known].T, c=values[known], cmap=scale.cmap, norm=scale.norm, s=40)
            axes.scatter(*places[values == best].T, s=160, facecolors="none", edgecolors="#D55E00", linewidth=1.8)
            style_axes(
                axes,
                panel._replace(label=_axis_label(run_dir, pair[1], settings), is_accuracy=False),
                _axis_label(run_dir, pair[0], settings),
            )
            axes.set_xscale("log" if _is_log(sorted(places[:, 0])) else "linear")
            axes.set_yscale("log" if _is_log(sorted(places[:, 1])) else "linear")
            axes.set_title(panel.label if len(rows) == 1 else f"{label}: {panel.label}", fontsize=10)
        figure.colorbar(scale, ax=list(panel_axes), format=percents() if panel.is_accuracy else None)
    figure.supxlabel("\n".join(foot), fontsize=8)
    return figure


def _is_log(numbers: Sequence[float]) -> bool:
    """Tell whether ascending numbers are easier to read on a logarithmic axis."""
    return numbers[0] > 0 and numbers[-1] / numbers[0] > _LOG_FROM_RATIO


def _means(ends: Mapping[tuple[str, int], Mapping[str, Any]], settings: Settings, panel: Panel) -> dict[str, float]:
    """Case -> mean over seeds at the end; NaN without any."""
    values = {name: _values(ends, name, panel.metric) for name in settings}
    return {name: float(own.mean()) if own.size else np.nan for name, own in values.items()}


def _color_scale(panel: Panel, values: Iterable[float]) -> ScalarMappable:
    """One scale for all panels of a metric: bright is good; logarithmic where the values span much."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    known = [value for value in values if not np.isnan(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    norm = LogNorm if low > 0 and high / low > _LOG_COLORS_FROM_RATIO else Normalize
    return ScalarMappable(norm(low, high), "viridis" if panel.is_accuracy else "viridis_r")


def _draw_speedup(run_dir: Path, lines: Lines, settings: Settings) -> Figure:
    """Curves against iterations times nodes: linear speed-up puts them on top of each other."""
    plots, by_case = [], lines.by_case()
    for panel in _PANELS:
        curves = {case: seeds_curve(by_case.get(case, Lines()), panel.metric) for case in settings}
        marks = [
            curve_mark(case, own._replace(x=settings[case]["nodes"] * own.x))
            for case, own in curves.items()
            if own.x.size
        ]
        label = panel.label.removesuffix(" at the end")
        plots.append(Plot(label, "iterations times nodes", marks, panel.is_accuracy))
    notes = [*privacy_notes(run_dir, settings), _over(_ends(run_dir, lines)[0], "; band: smallest to largest seed")]
    return draw_picture(Picture("speedup", run_title(run_dir / "config.json"), plots, notes, shares_y=False))


def _axis_label(run_dir: Path, name: str, settings: Settings) -> str:
    """The option in words; a budget with what the epsilons of the drawn cases rest on."""
    if name == "target_epsilon":
        return epsilon_label(statements_of(run_dir, settings).values())
    return _X.get(name, name.replace("_", " "))


def _over(ends: Iterable[tuple[str, int]], spread: str = "") -> str:
    """What a point is of the seeds, and how far they spread where there are several."""
    return f"mean over seeds{spread}" if len({seed for _, seed in ends}) > 1 else "one seed"


def _omissions(num_diverged: int) -> list[str]:
    return [f"left out: {num_diverged} runs that diverged"] if num_diverged else []
