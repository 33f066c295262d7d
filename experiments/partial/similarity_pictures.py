"""Pictures of experiments.partial.similarity: SVCCA against iterations, by layer and by scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxfl.analysis.plots import Panel, line_style, read_lines, run_title, seeds_curve, style_axes

STATISTICS: dict[str, Callable[[np.ndarray], Any]] = {"maximum": np.max, "mean": np.mean}
Curves = Mapping[str, tuple[str, str]]
"""What a line is called -> (variant, layer)."""


def metric_name(statistic: str, layer: str) -> str:
    """Name in metrics.jsonl of a statistic over pairs of clients."""
    return f"svcca_{statistic}_{layer}"


def plot_similarity(run_dir: Path, schemes: Sequence[str], layers: Sequence[str], local_steps: int) -> list[Path]:
    """Draw figure 1's form, one line a layer, and where schemes are compared figure 3's, one panel a layer.

    The upper row is the maximum over pairs of clients, which is the paper's measure, the lower one the mean.

    Args:
        run_dir: with metrics.jsonl.
        schemes: variants of the run.
        layers: input side first.
        local_steps: iterations in a round.

    Returns:
        Paths of the pictures.
    """
    lines = read_lines(run_dir / "metrics.jsonl")
    title = run_title(run_dir / "config.json")
    forms: dict[str, dict[str, Curves]] = {
        "layers": {shown(scheme): {layer: (scheme, layer) for layer in layers} for scheme in schemes}
    }
    if len(schemes) > 1:
        forms["schemes"] = {layer: {shown(scheme): (scheme, layer) for scheme in schemes} for layer in layers}
    paths = []
    for name, panels in forms.items():
        path = run_dir / "plots" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        _draw(lines, panels, title, local_steps).savefig(path, dpi=120)
        paths.append(path)
    return paths


def shown(scheme: str) -> str:
    """A scheme in words."""
    return "independent" if scheme == "nothing" else f"{scheme.replace('_', ' ')} averaged"


def _draw(lines: Sequence[Mapping[str, Any]], panels: Mapping[str, Curves], title: str, local_steps: int) -> Figure:
    """A column for each panel, a row for each statistic, one legend."""
    figure = Figure(figsize=(max(3.3 * len(panels), 6.0), 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    num_seeds = 1
    for row, statistic in enumerate(STATISTICS):
        for column, (heading, curves) in enumerate(panels.items()):
            axes = figure.add_subplot(len(STATISTICS), len(panels), row * len(panels) + column + 1)
            for number, (name, (variant, layer)) in enumerate(curves.items()):
                own = [line for line in lines if line["variant"] == variant]
                curve = seeds_curve(own, metric_name(statistic, layer))
                iterations, style = local_steps * curve.rounds, line_style(number)
                num_seeds = max(num_seeds, curve.num_seeds)
                if curve.num_seeds > 1:
                    axes.fill_between(iterations, curve.low, curve.high, color=style["color"], alpha=0.18, linewidth=0)
                (handles[name],) = axes.plot(iterations, curve.mean, linewidth=1.8, **style)
            style_axes(axes, Panel("", f"SVCCA, {statistic} over pairs" if column == 0 else ""), "iteration")
            axes.set_ylim(0, 1.02)
            axes.set_yticks(np.linspace(0, 1, 6))
            if row == 0:
                axes.set_title(heading, fontsize=10)
    figure.suptitle(title)
    band = f"line: mean over {num_seeds} seeds, band: smallest to largest seed" if num_seeds > 1 else "one seed"
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(5, len(handles)),
        title=band,
        title_fontsize=8,
        frameon=False,
    )
    return figure
