"""Pictures of experiments.ali_dpfl besides accuracy against rounds, and the paper's numbers beside a run's."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.analysis.plots import (
    X_AXES,
    Curve,
    Panel,
    draw_curve,
    finish_x,
    legend_below,
    line_style,
    new_figure,
    privacy_notes,
    read_lines,
    run_title,
    save_figure,
    seeds_curve,
    style_axes,
    wrapped_notes,
)
from jaxfl.frame import Finished

from .options import ALI, FIXED, Configuration
from .paper import ACCURACIES

_MOST_LINES = 28  # lines that look different
_ACCURACY = Panel("test_accuracy", "test accuracy", is_accuracy=True)
_STEPS = Panel("num_steps", "local iterations τ of a round\n(mean since the evaluation before)")
_SHARED = ("target_epsilon", "round_ratio", "step_size", "noise_multiplier")  # options whose values stand in the legend
PAPER = "paper.csv"


def finish(finished: Finished) -> Sequence[Path]:
    """Draw τ against rounds and accuracy against local iterations; write the paper's numbers beside the run's."""
    write_paper(finished)
    lines = read_lines(finished.run.path)
    return [*_plot_iterations(finished.run.path, lines), *_plot_fixed(finished)]


def write_paper(finished: Finished) -> None:
    """paper.csv: for each case that a table of the paper has, its accuracy there and here."""
    rows = []
    for name, row in finished.rows.items():
        theirs = ACCURACIES.get(_place(row.config))
        if theirs is not None:
            ours = finished.summary["cases"][name]["test_accuracy"]
            rows.append([name, theirs / 100, ours["mean"], ours["std"]])
    if rows:
        with open(finished.run.path / PAPER, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("case", "paper", "test_accuracy", "std_over_seeds"), *rows])


def _place(config: Configuration) -> tuple[Any, ...]:
    """Position of this configuration in the paper's tables."""
    learning, is_fixed = config.learning, config.learning.method == FIXED
    steps = learning.local_steps if is_fixed else 0 if learning.method == ALI else None
    return config.data.dataset, learning.round_ratio, config.budget.target_epsilon, steps


def _plot_iterations(folder: Path, lines: Sequence[Mapping[str, Any]]) -> list[Path]:
    """τ against rounds, and accuracy against the local iterations that a client has made."""
    names = list(dict.fromkeys(line["case"] for line in lines))
    if len(names) > _MOST_LINES:
        return []
    notes = wrapped_notes(privacy_notes(folder), 10.4)
    figure = new_figure(10.4, 4.6 + 0.17 * len(notes), run_title(folder / "config.json"))
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    handles = {}
    for number, name in enumerate(names):
        own, style = [line for line in lines if line["case"] == name], line_style(number)
        steps = seeds_curve([line for line in own if line["round"]], _STEPS.metric)
        if steps.x.size:
            draw_curve(left, steps, style)
        accuracy = seeds_curve(own, _ACCURACY.metric, ("total_local_iterations",))
        if accuracy.x.size:
            handles[name] = draw_curve(right, accuracy, style)
    style_axes(left, _STEPS, X_AXES["rounds"].label)
    finish_x(left, X_AXES["rounds"])
    style_axes(right, _ACCURACY, "local iterations of a client")
    if not handles:
        return []
    legend_below(figure, handles, notes)
    return [save_figure(figure, folder / "plots" / "local_iterations.png")]


def _plot_fixed(finished: Finished) -> list[Path]:
    """Final accuracy against a fixed τ, a curve for each value of the other options; ALI-DPFL has level lines."""
    curves: dict[str, dict[int, str]] = {}
    levels: dict[str, list[str]] = {}
    for name, row in finished.rows.items():
        rest = [f"{key.replace('_', ' ')} {value:g}" for key, value in row.settings.items() if key in _SHARED]
        label, learning = ", ".join([FIXED, *rest]), row.config.learning
        if learning.method == FIXED:
            curves.setdefault(label, {})[learning.local_steps] = name
        elif learning.method == ALI:
            levels.setdefault(label, []).append(name)
    curves = {label: names for label, names in curves.items() if len(names) > 1}
    if not curves or len(finished.rows) > _MOST_LINES:
        return []
    folder, cases = finished.run.path, finished.summary["cases"]
    notes = wrapped_notes(privacy_notes(folder), 7.0)
    figure = new_figure(7.0, 5.0 + 0.17 * len(notes), run_title(folder / "config.json"))
    axes, handles = figure.add_subplot(), {}
    for number, (label, names) in enumerate(curves.items()):
        taus, style = sorted(names), line_style(number)
        rows = [cases[names[tau]]["test_accuracy"]["per_seed"] for tau in taus]
        mean, low, high = (np.array([function(row) for row in rows]) for function in (np.mean, np.min, np.max))
        handles[label] = draw_curve(axes, Curve(np.array(taus), mean, low, high, max(map(len, rows))), style)
        for place, name in enumerate(levels.get(label, ())):
            own = line_style(place + 1) if len(curves) == 1 else {**line_style(place + 1), "color": style["color"]}
            handles[name] = axes.axhline(cases[name]["test_accuracy"]["mean"], linewidth=1.0, **own)
    style_axes(axes, _ACCURACY, "fixed number of local iterations τ (level: ALI-DPFL)")
    legend_below(figure, handles, notes, 2)
    return [save_figure(figure, folder / "plots" / "tau.png")]
