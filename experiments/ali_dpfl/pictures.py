"""The picture of experiments.ali_dpfl besides accuracy against rounds, and the condition that only a run can show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxfl.analysis import plots
from jaxfl.core.conditions import conditions, warnings
from jaxfl.frame import Finished

from .options import ALI

_STEPS = plots.Panel("num_steps", "local iterations τ of a round\n(mean since the evaluation before)")


def finish(finished: Finished) -> Sequence[Path]:
    """Draw τ against rounds or a cost; name cases whose step size was too large for the estimated beta."""
    by_case, of_cases = finished.run.read_metrics().by_case(), {}
    for name, row in finished.rows.items():
        if row.config.learning.method == ALI:
            beta = float(np.nanmax(by_case[name].columns("beta")[0], initial=0.0))  # of means between evaluations
            eta = row.config.learning.step_size
            of_cases[name] = conditions("Theorem 2", ("eta beta <= 1", eta * beta, 1.0))
            phi = f"phi = omega (1 - eta beta / 2) fell to {1 - eta * beta / 2:.3g} omega, and kappa stayed"
            Console(markup=False).print(f"{name}: {phi}", soft_wrap=True)
    for line in warnings(of_cases):
        Console(markup=False).print(line, soft_wrap=True)
    folder, x = finished.run.path, next(iter(finished.rows.values())).config.run.x
    lines = plots.read_lines(folder).having(_STEPS.metric)
    return [plots.plot_panels(folder, lines, [_STEPS], "local_iterations.png", x)] if lines else []
