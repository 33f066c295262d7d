"""What a variant of experiments.dp_gradient_tracking spends, and the theorems' conditions that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from experiments.tracking.build import agent_noise, make_pair, make_schedule
from experiments.tracking.config import Resolved, Variant
from jaxfl.graphs.tracking_conditions import (
    Condition,
    ExponentialBases,
    PolynomialExponents,
    StepSizes,
    assumption_4,
    assumption_5,
    theorem_4,
    theorem_5,
    violated,
)
from jaxfl.privacy.tracking_statements import (
    TrackingRelease,
    gradient_tracking_statements,
    output_perturbation_statements,
    perturbed_state_statements,
    quantization_statements,
)


def privacy_of(config: Resolved, variant: Variant, sizes: Sequence[int]) -> Callable[[int], list[dict[str, Any]]]:
    """Function from the rounds that really ran to the statements of summary.json.

    Args:
        config: the options.
        variant: its settings.
        sizes: (n,), samples of every agent; of several seeds the smallest, with which a sample takes part most often.
    """
    schedule = make_schedule(config, variant, config.iterations)
    release = TrackingRelease(
        clip_norm=config.clip_norm,
        assumed=config.assume_bounded,
        gradient_at=variant.gradient_at,
        distribution=config.distribution,
    )

    def stated(rounds: int) -> list[dict[str, Any]]:
        delta = {"dp_delta": config.dp_delta}
        if variant.method == "DP-GT":
            pair = make_pair(config, variant.graph)
            found = gradient_tracking_statements(
                schedule,
                rounds,
                release,
                state_in_weights=pair.state_weights.sum(axis=1),
                tracker_out_weights=pair.tracker_weights.sum(axis=0),
                num_local_samples=sizes,
                **delta,
            )
        elif variant.method == "noisy-outputs":
            found = output_perturbation_statements(schedule, rounds, release, num_nodes=config.nodes, **delta)
        elif variant.method in ("ternary-states", "quantized-states"):
            ternary = variant.method == "ternary-states"
            step = config.ternary_threshold if ternary else config.quantization_step
            found = quantization_statements(schedule, rounds, release, num_nodes=config.nodes, quantization_step=step)
        else:
            found = perturbed_state_statements(schedule, rounds, release, num_nodes=config.nodes, **delta)
        return [statement._asdict() for statement in found]

    return stated


def broken_conditions(config: Resolved, variant: Variant, smoothness: float) -> list[Condition]:
    """Those conditions of the paper's theorems that a variant of DP-GT does not meet: on convergence, and on a finite
    budget where noise is Laplace's, as there."""
    laplace = config.distribution == "laplace"
    pair, schedule = make_pair(config, variant.graph), make_schedule(config, variant, config.iterations)
    steps = StepSizes(schedule.state_mixing, schedule.tracker_mixing, schedule.step_size)
    noise = agent_noise(config, variant)
    if variant.scheme == "S1":
        exponents = PolynomialExponents(state_noise=noise, tracker_noise=noise)
        return violated(
            [
                *assumption_4(pair, steps, exponents, smoothness=smoothness),
                *(theorem_4(pair, steps, exponents) if laplace else ()),
            ]
        )
    bases = ExponentialBases(state_noise=noise, tracker_noise=noise)
    mu = config.gradient_dominance
    return violated(
        [
            *assumption_5(pair, steps, bases, smoothness=smoothness, gradient_dominance=mu),
            *(theorem_5(pair, steps, bases) if laplace else ()),
        ]
    )
