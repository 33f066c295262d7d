"""Privacy of experiments.dp_gradient_tracking: spending, noise for a budget, conditions that a case breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfl import privacy
from jaxfl.core import ArgumentError
from jaxfl.core.conditions import Condition, violated
from jaxfl.frame import override
from jaxfl.graphs import tracking_conditions as theory
from jaxfl.privacy import tracking
from jaxfl.privacy.tracking import Sensitivities, TrackingAgent, TrackingSchedule

from .options import QUANTIZED, Configuration


def privacy_of(config: Configuration, sizes: Sequence[int]) -> Callable[[int], list[dict[str, Any]]]:
    """Function from the rounds that really ran to the statements of summary.json; noise is a number.

    `sizes` has every agent's number of samples, the smallest over seeds: a sample then takes part most often.
    """
    account = _account(config, sizes)

    def stated(rounds: int) -> list[dict[str, Any]]:
        rows = [statement._asdict() for statement in account.statements(rounds)]
        if not config.has_budget:
            return rows
        held = [row for row in rows if (row["bound"] == "proven") == (config.noise.bound == "proven")][-1]  # at delta
        return [{**held, "asked": True}, *(row for row in rows if row is not held)]

    return stated


def calibrated(config: Configuration, sizes: Sequence[int]) -> Configuration:
    """The configuration with the least noise that meets its budget in all rounds; itself without a budget.

    One factor is on the noise of all agents where numbers of samples differ by one at most. Elsewhere each agent has a
    factor of its own: what an agent's broadcasts cost depends on its own samples and noise.
    """
    noise, nodes = config.noise, config.agents.nodes
    if not config.has_budget:
        return config
    unit, target = override(config, {"noise_gain": 1.0}), noise.target_epsilon
    one_by_one = max(sizes) - min(sizes) > 1 and not noise.agent_gains
    parts = [[agent] for agent in range(nodes)] if one_by_one else [list(range(nodes))]
    accounts = [_account(unit, sizes, agents) for agents in parts]
    rounding = 1 + 1e-9  # what multiplying in another order rounds away
    gains = [account.calibrate(config.num_rounds, target, noise.bound) * rounding for account in accounts]
    gain = max(gains)
    own = tuple(each / gain for each in gains) if one_by_one else noise.agent_gains
    result = override(config, {"noise_gain": gain, "agent_gains": own})
    ends = [end(result.schedule().state_noise_scale) for end in (np.min, np.max)]
    if not np.finfo(np.float32).tiny < ends[0] <= ends[1] < np.finfo(np.float32).max:
        found = f"got {target:g}, which needs about {ends[1]:.2g}"
        raise ArgumentError("target_epsilon", "must need noise that float32 holds", found, "Pass another.")
    return result


def _account(config: Configuration, sizes: Sequence[int], agents: Sequence[int] | None = None) -> privacy.Account:
    """Account for some agents or all, as the learner says; a bound may be assumed in place of clipping."""
    learning, releases = config.learning, privacy.releases_of(config.settled().algorithm(), sizes)
    each = [one._replace(clip_norm=learning.clip_norm, assumed=learning.assume_bounded) for one in releases.each]
    settings: dict[str, Any] = {} if learning.method in QUANTIZED else {"dp_delta": config.noise.dp_delta}
    return releases.account(each, **settings, **({} if agents is None else {"agents": agents}))


def _quantization_step(config: Configuration) -> float:
    """Distance of neighboring values in messages."""
    learning = config.learning
    return learning.ternary_threshold if learning.method == "ternary-states" else learning.quantization_step


def broken_conditions(config: Configuration, smoothness: float) -> tuple[list[Condition], str]:
    """List the paper's conditions that a case of DP-GT breaks, and state the rate that they give.

    Those on a budget count only with Laplace noise.
    """
    learning, noise = config.learning, config.agent_noise()
    pair = config.weights.pair(config.agents.nodes)
    steps = theory.StepSizes(learning.state_mixing, learning.tracker_mixing, learning.step_size)
    laplace = config.noise.distribution == "laplace"
    if learning.scheme == "S1":
        exponents = theory.PolynomialExponents(state_noise=noise, tracker_noise=noise)
        conditions = theory.assumption_4(pair, steps, exponents, smoothness=smoothness)
        rate = f"Theorem 2: |grad F|^2 = O((K + 1)^-x), x = {theory.theorem_2(exponents):.3g}"
        return violated([*conditions, *(theory.theorem_4(pair, steps, exponents) if laplace else ())]), rate
    bases, mu = theory.ExponentialBases(state_noise=noise, tracker_noise=noise), config.theory.gradient_dominance
    conditions = theory.assumption_5(pair, steps, bases, smoothness=smoothness, gradient_dominance=mu)
    rate = f"Theorem 3: |grad F|^2 = O(r^K), r = max({theory.theorem_3(bases):.6g}, rho(A_K))"
    return violated([*conditions, *(theory.theorem_5(pair, steps, bases) if laplace else ())]), rate


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
        pair = config.weights.pair(config.agents.nodes)
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
