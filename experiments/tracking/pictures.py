"""Pictures of experiments.dp_gradient_tracking besides accuracy: convergence, and what a run spends of privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.tracking.build import make_pair, make_schedule
from experiments.tracking.config import QUANTIZED, Resolved, Variant
from jaxfl.analysis.plots import Panel, draw_panels, line_style, privacy_notes, read_lines, run_title, style_axes
from jaxfl.privacy.perturbed_states import (
    cumulative_delta_curve,
    output_sensitivities,
    perturbed_state_sensitivities,
    quantization_deltas,
    states_only,
)
from jaxfl.privacy.tracking import (
    Sensitivities,
    TrackingAgent,
    TrackingSchedule,
    cumulative_epsilon_curve,
    proven_sensitivities,
    published_sensitivities,
)

_HORIZONS = 60  # maximum iteration numbers K at which the budget of a whole run is computed


def plot_convergence(run_dir: Path) -> Path:
    """Consensus distance and |grad F|^2 of the average model, and its accuracy on training data, against iterations."""
    panels = [
        Panel("gradient_norm_squared_average_model", "|grad F|² at the average model"),
        Panel("consensus_distance", "consensus distance"),
        Panel("train_accuracy_average_model", "training accuracy, average model", is_accuracy=True),
        Panel("test_accuracy_average_model", "test accuracy, average model", is_accuracy=True),
    ]
    lines = read_lines(run_dir / "metrics.jsonl")
    figure = draw_panels(lines, panels, title=run_title(run_dir / "config.json"), notes=privacy_notes(run_dir))
    path = run_dir / "plots" / "convergence.png"
    figure.savefig(path, dpi=120)
    return path


def plot_budgets(run_dir: Path, config: Resolved, variants: Mapping[str, Variant]) -> list[Path]:
    """What has been spent after k iterations, published and proven, and what a whole run of K iterations spends.

    Epsilon is that of the agent who has spent most. The last panel is the published budget against the maximum
    iteration number, which fixes steps and samples; where states are only quantized it is their delta against k + 1.
    Gaussian noise, and runs with none, have no such curves: where nothing else runs there is no picture.
    """
    noisy = {name: variant for name, variant in variants.items() if _has_epsilon(config, variant)}
    quantized = {name: variant for name, variant in variants.items() if variant.method in QUANTIZED}
    if not noisy and not quantized:
        return []
    formula = "published formula" + (", C assumed" if config.assume_bounded else "")
    in_run = [(f"ε so far, {formula}", published)]
    if not config.assume_bounded:
        in_run.append(("ε so far, proven (gradients at broadcast states)", proven))
    num_columns = (len(in_run) + 1 if noisy else 0) + bool(quantized)
    figure = Figure(figsize=(5.2 * num_columns, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run_title(run_dir / "config.json"))
    styles = {name: line_style(number) for number, name in enumerate(variants)}
    handles = {}

    def axes_of(column: int, x_label: str, y_label: str) -> Axes:
        axes = figure.add_subplot(1, num_columns, column)
        style_axes(axes, Panel("", y_label), x_label)
        return axes

    if noisy:
        for column, (label, bound) in enumerate(in_run, start=1):
            axes = axes_of(column, "iteration k", label)
            for name, variant in noisy.items():
                schedule = make_schedule(config, variant, config.iterations)
                curve = bound(config, variant, schedule)
                (handles[name],) = axes.plot(np.arange(len(curve)), curve, linewidth=1.8, **styles[name])
            axes.set_yscale("log")
        axes = axes_of(len(in_run) + 1, "maximum iteration number K", f"ε of a whole run, {formula}")
        horizons = np.unique(np.geomspace(min(10, config.iterations), config.iterations, _HORIZONS).round().astype(int))
        for name, variant in noisy.items():
            ends = [published(config, variant, make_schedule(config, variant, int(k)))[-1] for k in horizons]
            axes.plot(horizons, ends, linewidth=1.8, **styles[name])
        axes.set_yscale("log")
    if quantized:
        axes = axes_of(num_columns, "broadcasts k + 1", f"δ so far, ε = 0, {formula}")
        axes.set_xscale("log")
        for name, variant in quantized.items():
            curve = deltas(config, variant, make_schedule(config, variant, config.iterations))
            (handles[name],) = axes.plot(np.arange(1, len(curve) + 1), curve, linewidth=1.8, **styles[name])
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    path = run_dir / "plots" / "budgets.png"
    figure.savefig(path, dpi=120)
    return [path]


def _has_epsilon(config: Resolved, variant: Variant) -> bool:
    """Whether all that is broadcast carries Laplace noise; p^K of S2 may be too small for any."""
    if variant.method in QUANTIZED or config.distribution != "laplace":
        return False
    return bool(np.all(make_schedule(config, variant, config.iterations).state_noise_scale > 0))


def published(config: Resolved, variant: Variant, schedule: TrackingSchedule) -> np.ndarray:
    """(K + 1,): the published epsilon of what has been broadcast up to iteration k, of the worst agent."""
    return _curve(config, variant, schedule, published_sensitivities)


def proven(config: Resolved, variant: Variant, schedule: TrackingSchedule) -> np.ndarray:
    """(K + 1,): the epsilon that is proven where gradients are taken at the broadcast state."""
    return _curve(config, variant, schedule, proven_sensitivities)


def deltas(config: Resolved, variant: Variant, schedule: TrackingSchedule) -> np.ndarray:
    """(K + 1,): the delta, added up, of states that are only quantized."""
    step = config.ternary_threshold if variant.method == "ternary-states" else config.quantization_step
    sensitivities = perturbed_state_sensitivities(schedule, 2 * config.clip_norm)
    return cumulative_delta_curve(quantization_deltas(sensitivities, quantization_step=step))


def _curve(
    config: Resolved,
    variant: Variant,
    schedule: TrackingSchedule,
    tracking: Callable[[TrackingSchedule, TrackingAgent], Sensitivities],
) -> np.ndarray:
    change = 2 * config.clip_norm
    if variant.method == "DP-GT":
        pair = make_pair(config, variant.graph)
        agents = TrackingAgent(change, pair.state_weights.sum(axis=1), pair.tracker_weights.sum(axis=0))
        return cumulative_epsilon_curve(schedule, tracking(schedule, agents)).max(axis=0)
    of_method = output_sensitivities if variant.method == "noisy-outputs" else perturbed_state_sensitivities
    schedule = states_only(schedule)
    return cumulative_epsilon_curve(schedule, of_method(schedule, change)).max(axis=0)
