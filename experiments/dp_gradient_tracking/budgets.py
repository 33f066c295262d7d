"""Privacy spending in experiments.dp_gradient_tracking, and the theorems' conditions that a case breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfl.graphs import tracking_conditions as theory
from jaxfl.privacy import tracking
from jaxfl.privacy.tracking import Sensitivities, TrackingAgent, TrackingRelease, TrackingSchedule

from .options import QUANTIZED, Configuration, tracking_pair


def privacy_of(config: Configuration, sizes: Sequence[int]) -> Callable[[int], list[dict[str, Any]]]:
    """Function from the rounds that really ran to the statements of summary.json.

    Sizes are every agent's samples, of several seeds the smallest, with which a sample takes part most often.
    """
    learning, noise, nodes = config.learning, config.noise, config.agents.nodes
    schedule = config.schedule()
    release = TrackingRelease(
        clip_norm=learning.clip_norm,
        assumed=learning.assume_bounded,
        gradient_at=learning.gradient_at,
        distribution=noise.distribution,
    )

    def stated(rounds: int) -> list[dict[str, Any]]:
        run, settings = (schedule, rounds, release), {"num_nodes": nodes, "dp_delta": noise.dp_delta}
        if learning.method == "DP-GT":
            pair = tracking_pair(config.weights.graph, nodes)
            statements = tracking.gradient_tracking_statements(
                *run,
                state_in_weights=pair.state_weights.sum(axis=1),
                tracker_out_weights=pair.tracker_weights.sum(axis=0),
                num_local_samples=sizes,
                dp_delta=noise.dp_delta,
            )
        elif learning.method == "noisy-outputs":
            statements = tracking.output_perturbation_statements(*run, **settings)
        elif learning.method in QUANTIZED:
            step = _quantization_step(config)
            statements = tracking.quantization_statements(*run, num_nodes=nodes, quantization_step=step)
        else:
            statements = tracking.perturbed_state_statements(*run, **settings)
        return [statement._asdict() for statement in statements]

    return stated


def _quantization_step(config: Configuration) -> float:
    """Distance of neighboring values in messages."""
    learning = config.learning
    return learning.ternary_threshold if learning.method == "ternary-states" else learning.quantization_step


def broken_conditions(config: Configuration, smoothness: float) -> list[theory.Condition]:
    """List the paper's conditions that a case of DP-GT breaks; those on a budget count with Laplace noise alone."""
    learning, noise = config.learning, config.agent_noise()
    pair = tracking_pair(config.weights.graph, config.agents.nodes)
    steps = theory.StepSizes(learning.state_mixing, learning.tracker_mixing, learning.step_size)
    laplace = config.noise.distribution == "laplace"
    if learning.scheme == "S1":
        exponents = theory.PolynomialExponents(state_noise=noise, tracker_noise=noise)
        conditions = theory.assumption_4(pair, steps, exponents, smoothness=smoothness)
        return theory.violated([*conditions, *(theory.theorem_4(pair, steps, exponents) if laplace else ())])
    bases, mu = theory.ExponentialBases(state_noise=noise, tracker_noise=noise), config.theory.gradient_dominance
    conditions = theory.assumption_5(pair, steps, bases, smoothness=smoothness, gradient_dominance=mu)
    return theory.violated([*conditions, *(theory.theorem_5(pair, steps, bases) if laplace else ())])


def has_epsilon(config: Configuration) -> bool:
    """True if all that is broadcast has Laplace noise. False under S2 when p^K underflows to 0."""
    laplace = config.is_noisy and config.noise.distribution == "laplace"
    return laplace and bool(np.all(config.schedule().state_noise_scale > 0))


def published(config: Configuration) -> np.ndarray:
    """(K + 1,): the published epsilon of what has been broadcast up to iteration k, of the worst agent."""
    return _curve(config, tracking.published_sensitivities)


def proven(config: Configuration) -> np.ndarray:
    """(K + 1,): the epsilon that is proven where gradients are taken at the broadcast state."""
    return _curve(config, tracking.proven_sensitivities)


def _curve(
    config: Configuration, of_tracking: Callable[[TrackingSchedule, TrackingAgent], Sensitivities]
) -> np.ndarray:
    change, schedule, method = 2 * config.learning.clip_norm, config.schedule(), config.learning.method
    if method == "DP-GT":
        pair = tracking_pair(config.weights.graph, config.agents.nodes)
        agents = TrackingAgent(change, pair.state_weights.sum(axis=1), pair.tracker_weights.sum(axis=0))
        sensitivities = of_tracking(schedule, agents)
    else:
        schedule = tracking.states_only(schedule)
        outputs = method == "noisy-outputs"
        of_states = tracking.output_sensitivities if outputs else tracking.perturbed_state_sensitivities
        sensitivities = of_states(schedule, change)
    return tracking.cumulative_epsilon_curve(schedule, sensitivities).max(axis=0)


def deltas(config: Configuration) -> np.ndarray:
    """(K + 1,): the delta, added up, of states that are only quantized."""
    sensitivities = tracking.perturbed_state_sensitivities(config.schedule(), 2 * config.learning.clip_norm)
    step = _quantization_step(config)
    return tracking.cumulative_delta_curve(tracking.quantization_deltas(sensitivities, quantization_step=step))
