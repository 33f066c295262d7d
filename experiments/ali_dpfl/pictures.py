"""The picture of experiments.ali_dpfl besides accuracy against rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxfl.analysis import plots
from jaxfl.frame import Finished

_STEPS = plots.Panel("num_steps", "local iterations τ of a round\n(mean since the evaluation before)")


def finish(finished: Finished) -> Sequence[Path]:
    """Draw τ against rounds or a cost."""
    folder, x = finished.run.path, next(iter(finished.rows.values())).config.run.x
    lines = plots.read_lines(folder).having(_STEPS.metric)
    return [plots.plot_panels(folder, lines, [_STEPS], "local_iterations.png", x)] if lines else []
