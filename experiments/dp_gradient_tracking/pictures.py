"""Pictures of experiments.dp_gradient_tracking besides accuracy: convergence, and the privacy that a run spends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxfl.analysis import plots
from jaxfl.analysis.pictures import Mark, Picture, Plot, save_picture
from jaxfl.analysis.plots import Panel, run_title
from jaxfl.frame import Finished, override
from jaxfl.training.json_files import write_json

from .budgets import deltas, has_epsilon, proven, published
from .options import STEPS, Configuration, scheme_steps

_HORIZONS = 60  # maximum iteration numbers K at which the budget of a whole run is computed
_MOST_LINES = 28  # lines that look different
_PANELS = [
    Panel("gradient_norm_squared_average_model", "|grad F|² at the average model"),
    Panel("consensus_distance", "consensus distance"),
    Panel("train_accuracy_average_model", "training accuracy, average model", is_accuracy=True),
    Panel("test_accuracy_average_model", "test accuracy, average model", is_accuracy=True),
]


def finish(finished: Finished) -> Sequence[Path]:
    """Write conditions.json; draw the quantities that the theory bounds against iterations, and the budgets."""
    folder = finished.run.path
    # Not in config.json: an estimated L has other last digits on another machine, which may resume the run.
    failures = finished.context.failures
    write_json(folder / "conditions.json", {name: list(map(str, rows)) for name, rows in failures.items()})
    lines, x = plots.read_lines(folder), next(iter(finished.rows.values())).config.run.x
    convergence = plots.plot_panels(folder, lines, _PANELS, "convergence.png", x)
    return [convergence, *plot_budgets(folder, finished.context.configs)]


def plot_budgets(run_dir: Path, configs: Mapping[str, Configuration]) -> list[Path]:
    """Draw the budget spent after k iterations, published and proven, and the budget of a whole run of K iterations.

    Epsilon belongs to the agent who has spent most. The last panel is the published budget against the maximum
    iteration number, which fixes steps and samples; where states are only quantized it is their delta against k + 1.
    Runs with Gaussian noise, or with none, have no such curves. Without any curve, or with more lines than can be told
    apart, there is no picture.
    """
    noisy = {name: config for name, config in configs.items() if has_epsilon(config)}
    without_noise = {name: config for name, config in configs.items() if not config.is_noisy}
    panels: list[tuple[str, str, Mapping[str, Configuration], Callable[[Configuration], tuple]]] = []
    is_assumed = any(config.learning.assume_bounded for config in configs.values())
    formula = "published formula" + (", C assumed" if is_assumed else "")
    if noisy:
        panels.append((f"ε so far, {formula}", "iteration k", noisy, lambda config: _from(0, published(config))))
        if not is_assumed:
            label = "ε so far, proven (gradients at broadcast states)"
            panels.append((label, "iteration k", noisy, lambda config: _from(0, proven(config))))
        panels.append((f"ε of a whole run, {formula}", "maximum iteration number K", noisy, _whole_runs))
    if without_noise:
        label = f"δ so far, ε = 0, {formula}"
        panels.append((label, "broadcasts k + 1", without_noise, lambda config: _from(1, deltas(config))))
    if not panels or len(configs) > _MOST_LINES:
        return []
    plots = []
    for label, x_label, lines, curve in panels:
        marks = []
        for name, config in lines.items():
            x, y = curve(config)
            marks.append(Mark(name, list(map(float, x)), list(map(float, y))))
        plots.append(Plot(label, x_label, marks, log="x" if lines is without_noise else "y"))
    title = run_title(run_dir / "config.json")
    return [save_picture(run_dir, Picture("budgets", title, plots, num_columns=len(plots), shares_y=False))]


def _from(first: int, curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(first, first + len(curve)), curve


def _whole_runs(config: Configuration) -> tuple[np.ndarray, list[float]]:
    """Published budgets of whole runs: the scheme's numbers follow K, the user's stay."""
    learning = config.learning
    here, horizons = scheme_steps(learning.scheme, learning.iterations), min(10, learning.iterations)
    horizons = np.unique(np.geomspace(horizons, learning.iterations, _HORIZONS).round().astype(int))
    budgets = []
    for count in horizons.tolist():
        there = scheme_steps(learning.scheme, count)
        rows = [(option, getattr(learning, option), getattr(here, name), name) for option, name in STEPS.items()]
        changes = {option: getattr(there, name) for option, value, default, name in rows if value == default}
        budgets.append(published(override(config, {"iterations": count, **changes}))[-1])
    return horizons, budgets
