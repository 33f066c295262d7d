"""The picture of experiments.similarity: SVCCA against rounds, a panel for each layer and statistic."""

from __future__ import annotations

from pathlib import Path

from jaxfl.analysis import plots
from jaxfl.frame import Finished

from .options import STATISTICS, metric_name


def finish(finished: Finished) -> list[Path]:
    """Draw figures 1 and 3: the maximum over pairs, the paper's measure, and the mean."""
    folder, first = finished.run.path, next(iter(finished.rows.values())).config
    panels = [
        plots.Panel(metric_name(statistic, layer), f"SVCCA of {layer}, {statistic} over pairs")
        for layer in first.layers()
        for statistic in STATISTICS
    ]
    return [plots.plot_panels(folder, plots.read_lines(folder), panels, "layers.png", first.run.x)]
