"""Pictures of where variants end: a final metric against the setting in which they differ, over seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxfl.analysis.plots import (
    Panel,
    line_style,
    privacy_notes,
    read_lines,
    run_title,
    seeds_curve,
    style_axes,
    wrapped_notes,
)

_X = {  # setting -> label of its axis, in the order in which they are taken for the horizontal one
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
}
_PANELS = (
    Panel("test_loss", "test loss at the end"),  # a training loss is a mean over rounds, not that of the end
    Panel("test_accuracy", "test accuracy at the end", is_accuracy=True),
)
_MATCHED = "K matched to ε"


class Point(NamedTuple):
    """Where one variant ended."""

    x: float
    values: np.ndarray  # (seeds,), float64


def plot_final(run_dir: str | os.PathLike[str], settings: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Draw final loss and accuracy against the setting in which the variants differ, into `<run_dir>/plots`.

    Args:
        run_dir: a run directory whose run has ended.
        settings: variant -> its settings: "method", and any of those that can be an axis.

    Returns:
        plots/final.png where some series has three points or more; plots/speedup.png (test loss and accuracy against
        iterations times nodes) where the variants differ in their number of nodes; else nothing.
    """
    run_dir = Path(run_dir)
    lines = read_lines(run_dir / "metrics.jsonl")
    pictures = []
    axis = _horizontal(settings)
    if axis is not None and max(map(len, series(settings, axis).values())) >= 3:
        pictures.append(_draw_final(run_dir, lines, settings, axis))
    if len({row.get("nodes") for row in settings.values()}) > 1:
        pictures.append(_draw_speedup(run_dir, lines, settings))
    return pictures


def _horizontal(settings: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The setting for the horizontal axis: the first that takes three values or more; nodes have a picture of their
    own."""
    for name in _X:
        values = {row.get(name) for row in settings.values()}
        if name != "nodes" and len(values) >= 3 and None not in values:
            return name
    return None


def series(settings: Mapping[str, Mapping[str, Any]], axis: str) -> dict[str, list[str]]:
    """Label -> the variants that are joined by a line: those that differ in nothing but the axis.

    Iterations that go with one value of the axis alone (K chosen for each epsilon) are one line, too.

    Example:
        >>> rows = {"a": (1.0, 10), "b": (2.0, 40), "c": (1.0, 20), "d": (2.0, 20)}
        >>> settings = {k: {"method": "VR", "target_epsilon": e, "iterations": n} for k, (e, n) in rows.items()}
        >>> series(settings, "target_epsilon")
        {'K matched to ε': ['a', 'b'], 'K = 20': ['c', 'd']}
    """
    differing = [name for name in _LABEL if name != axis and len({row.get(name) for row in settings.values()}) > 1]
    places: dict[Any, set[Any]] = {}
    for row in settings.values():
        places.setdefault(row.get("iterations"), set()).add(row[axis])
    found: dict[str, list[str]] = {}
    for variant, row in settings.items():
        matched = axis == "target_epsilon" and len(places[row.get("iterations")]) == 1
        parts = [
            _MATCHED if name == "iterations" and matched else _LABEL[name].format(row[name])
            for name in differing
            if row.get(name) is not None
        ]
        found.setdefault(", ".join(parts) or row["method"], []).append(variant)
    return found


def _draw_final(
    run_dir: Path, lines: Sequence[Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]], axis: str
) -> Path:
    """One line a series, with a bar from the smallest to the largest seed."""
    groups = series(settings, axis)
    figure, all_axes, foot = _figure(run_dir, len(groups))
    last = {(line["variant"], line["seed"]): line for line in lines}
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes, _PANELS, strict=True):
        for number, (label, variants) in enumerate(groups.items()):
            points = []
            for variant in variants:
                found = [line.get(panel.metric) for (name, _), line in last.items() if name == variant]
                values = np.array([value for value in found if value is not None], dtype=np.float64)
                if values.size:
                    points.append(Point(float(settings[variant][axis]), values))
            points.sort(key=lambda point: point.x)
            mean = np.array([point.values.mean() for point in points])
            spread = [
                [m - point.values.min() for m, point in zip(mean, points, strict=True)],
                [point.values.max() - m for m, point in zip(mean, points, strict=True)],
            ]
            style = line_style(number)
            handles[label] = axes.errorbar(
                [point.x for point in points], mean, yerr=spread, marker="o", capsize=3, linewidth=1.8, **style
            )
        style_axes(axes, panel, _X[axis])
        if axis in ("iterations", "noise_std"):
            axes.set_xscale("log")
            ticks = sorted({float(row[axis]) for row in settings.values()})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    return _save(figure, run_dir, "final.png", handles, [*foot, "mean over seeds; bar: smallest to largest seed"])


def _draw_speedup(run_dir: Path, lines: Sequence[Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]]) -> Path:
    """Curves against iterations times nodes: linear speed-up puts them on top of each other."""
    figure, all_axes, foot = _figure(run_dir, len(settings))
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes, _PANELS, strict=True):
        for number, (variant, row) in enumerate(settings.items()):
            curve = seeds_curve([line for line in lines if line["variant"] == variant], panel.metric)
            work = curve.rounds * row["nodes"]
            style = line_style(number)
            axes.fill_between(work, curve.low, curve.high, color=style["color"], alpha=0.18, linewidth=0)
            (handles[variant],) = axes.plot(work, curve.mean, linewidth=1.8, **style)
        style_axes(axes, panel._replace(label=panel.label.removesuffix(" at the end")), "iterations times nodes")
    return _save(figure, run_dir, "speedup.png", handles, [*foot, "mean over seeds; band: smallest to largest seed"])


def _figure(run_dir: Path, num_handles: int) -> tuple[Figure, list[Axes], list[str]]:
    """A figure with a panel each for loss and accuracy, and the lines with the privacy statements for its foot."""
    foot = wrapped_notes(privacy_notes(run_dir), 10.4)
    height = 4.4 + 0.25 * -(-num_handles // 3) + 0.17 * len(foot)
    figure = Figure(figsize=(10.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run_title(run_dir / "config.json"))
    return figure, [figure.add_subplot(1, 2, index + 1) for index in range(2)], foot


def _save(figure: Figure, run_dir: Path, name: str, handles: Mapping[str, Any], notes: Sequence[str]) -> Path:
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(3, len(handles)),
        title="\n".join(notes),
        title_fontsize=8,
        frameon=False,
    )
    path = run_dir / "plots" / name
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
