"""Pictures of experiments.similarity: SVCCA against iterations, by layer and by scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfl.analysis.plots import (
    Panel,
    draw_curve,
    line_style,
    new_figure,
    read_lines,
    run_title,
    save_picture,
    seeds_curve,
    style_axes,
)
from jaxfl.frame import Finished

from .options import STATISTICS, metric_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAND = "line: mean over seeds, band: smallest to largest"
Curves = Mapping[str, tuple[str, str]]
"""Name of a curve -> (line, layer)."""


def finish(finished: Finished) -> list[Path]:
    """Draw figure 1 (a curve for each layer) and, if schemes are compared, figure 3 (a panel for each layer).

    The upper row is the maximum over pairs, the paper's measure; the lower row is the mean. A sweep has none.
    """
    if {name for row in finished.rows.values() for name in row.settings} - {"scheme"}:
        return []
    directory, first = finished.run.path, next(iter(finished.rows.values())).config
    words = {name: f"{name.replace('_', ' ')} averaged" for name in finished.rows} | {"nothing": "independent"}
    names = {name: words[name] for name in finished.rows}
    forms: dict[str, dict[str, Curves]] = {
        "layers": {text: {layer: (name, layer) for layer in first.layers()} for name, text in names.items()}
    }
    if len(names) > 1:
        forms["schemes"] = {layer: {text: (name, layer) for name, text in names.items()} for layer in first.layers()}
    lines, title = read_lines(directory), run_title(directory / "config.json")
    (directory / "plots").mkdir(exist_ok=True)
    paths = []
    for form, panels in forms.items():
        figure, handles = _draw(lines, panels, first.steps.local_steps)
        note = _BAND if len(finished.summary["seeds"]) > 1 else "one seed"
        paths.append(save_picture(figure, directory / "plots" / f"{form}.png", title, handles, note, 5))
    return paths


def _draw(
    lines: Sequence[Mapping[str, Any]], panels: Mapping[str, Curves], local_steps: int
) -> tuple[Figure, dict[str, Any]]:
    """A column for each panel, a row for each statistic; the handles of the curves."""
    figure, handles = new_figure(max(3.3 * len(panels), 6.0), 6.6), {}
    for row, statistic in enumerate(STATISTICS):
        for column, (heading, curves) in enumerate(panels.items()):
            axes = figure.add_subplot(len(STATISTICS), len(panels), row * len(panels) + column + 1)
            for number, (text, (name, layer)) in enumerate(curves.items()):
                case_lines = [line for line in lines if line["case"] == name]
                curve = seeds_curve(case_lines, metric_name(statistic, layer))
                handles[text] = draw_curve(axes, curve, line_style(number), x_unit=local_steps)
            style_axes(axes, Panel("", f"SVCCA, {statistic} over pairs" if column == 0 else ""), "iteration")
            axes.set_ylim(0, 1.02)
            axes.set_yticks(np.linspace(0, 1, 6))
            axes.set_title(heading if row == 0 else "", fontsize=10)
    return figure, handles
