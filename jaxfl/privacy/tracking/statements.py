"""Statements about runs of gradient tracking, and of the methods that it is compared with.

What counts is what has left an agent after r rounds. With gradients at the broadcast state that is x~_0, ..., x~_r, the
last of which it returns, and y~_0, ..., y~_{r-1}; with gradients at its own state, which is then what it returns, the
first r of both; of a perturbed output the first r. The proofs are in `sensitivities` and
`perturbed_states`. The neighboring relation is "replace_one" throughout: the gradients of the changed
sample, each of norm at most `clip_norm`, differ by at most C = 2 `clip_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy.statements import Statement
from jaxfl.privacy.tracking.joint_bound import joint_gaussian_epsilon
from jaxfl.privacy.tracking.laplace_at_delta import counted_note, smallest_at_delta
from jaxfl.privacy.tracking.perturbed_states import (
    cumulative_delta_curve,
    exhausted_at,
    output_sensitivities,
    perturbed_state_sensitivities,
    quantization_deltas,
    states_only,
)
from jaxfl.privacy.tracking.runs import Budget, Run, TrackingRelease, checked, reason_against, required, run_statement
from jaxfl.privacy.tracking.schedules import TrackingSchedule
from jaxfl.privacy.tracking.sensitivities import (
    Sensitivities,
    TrackingAgent,
    cumulative_epsilon,
    gaussian_epsilon,
    proven_sensitivities,
    published_sensitivities,
)

_MECHANISM = "the cited papers' own accounting was not at hand: this is Lemma 3's argument for their mechanism"


def gradient_tracking_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    state_in_weights: np.ndarray,
    tracker_out_weights: np.ndarray,
    dp_delta: float | None = None,
    num_local_samples: Sequence[int] | None = None,
) -> list[Statement]:
    """List the privacy statements on a run of gradient tracking: the published one, then the proven ones.

    Args:
        schedule: of the whole run, k = 0, ..., K.
        num_rounds: rounds that really ran, at most K + 1.
        release: what the algorithm was told.
        state_in_weights, tracker_out_weights: (n,), sum_j R_ij and sum_j C_ji of every agent.
        dp_delta: in (0, 1), for Gaussian noise. With Laplace noise, whose delta is 0, it adds a proven statement at
            this delta: the smallest of all that hold.
        num_local_samples: D of every agent, at least m_K; needs a dp_delta. With Laplace noise the added statement then
            counts the iterations in which a sample takes part.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - dp_epsilon is that of the worst agent, of what has left it in the rounds that ran.
        - where nothing is clipped or some noise is absent there is a reason and no epsilon; nothing is proven for
          bounds that are assumed, or for gradients taken at the own state.
        - nothing is spent in 0 rounds.

    Example:
        >>> from jaxfl.privacy.tracking import polynomial_schedule
        >>> schedule = polynomial_schedule(2000, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> options = {"state_in_weights": np.ones(5), "tracker_out_weights": np.ones(5)}
        >>> options |= {"dp_delta": 1e-5, "num_local_samples": [12_000] * 5}
        >>> for found in gradient_tracking_statements(schedule, 2000, TrackingRelease(clip_norm=0.5), **options):
        ...     print(found.bound, found.dp_delta, round(found.dp_epsilon, 1))
        published 0.0 15418.6
        proven 0.0 70.4
        proven 1e-05 0.2
    """
    received, sent = np.asarray(state_in_weights, float), np.asarray(tracker_out_weights, float)
    if received.ndim != 1 or not received.size or received.shape != sent.shape:
        found, remedy = f"got shapes {received.shape} and {sent.shape}", "Pass R.sum(axis=1) and C.sum(axis=0)."
        raise ArgumentError("state_in_weights", "must hold one number per agent, as tracker_out_weights", found, remedy)
    run = checked(schedule, num_rounds, release, len(received), dp_delta)

    def agents(change: float) -> TrackingAgent:
        return TrackingAgent(gradient_l1_change=change, state_in_weight=received, tracker_out_weight=sent)

    published, proven = _noise_statements(
        run,
        lambda change: published_sensitivities(run.sent, agents(change)),
        lambda change: proven_sensitivities(run.sent, agents(change)),
        accountants=("Lemmas 3 and 4 of the paper", "sums of impulse responses, given everything broadcast"),
        notes=(),
        jointly=lambda change, delta: joint_gaussian_epsilon(run.sent, agents(change), dp_delta=delta),
    )
    if release.distribution != "laplace" or (dp_delta is None and num_local_samples is None):
        return [published, proven]
    delta, sizes = required(dp_delta), None if num_local_samples is None else np.asarray(num_local_samples)
    if sizes is not None:
        check.per_node(len(received), num_local_samples=num_local_samples)
        check.at_least(schedule.num_samples, num_local_samples=sizes.min())
    return [published, proven, _at_delta(run, agents, delta, sizes)]


def perturbed_state_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
) -> list[Statement]:
    """List the privacy statements on perturbed states, quantized afterwards or not: published, then proven.

    Args:
        schedule: of the whole run, k = 0, ..., K; nothing of trackers counts.
        num_rounds: rounds that really ran, at most K + 1.
        release: what the algorithm was told.
        num_nodes: n; the weights of each agent sum to 1.
        dp_delta: in (0, 1), for Gaussian noise.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - as for `gradient_tracking_statements`.
    """
    run = checked(states_only(schedule), num_rounds, release, num_nodes, dp_delta)

    def sensitivities(change: float) -> Sensitivities:
        return perturbed_state_sensitivities(run.sent, change)

    accountants = ("sums of norms", "sum of the impulse response, given everything broadcast")
    return _noise_statements(run, sensitivities, sensitivities, accountants=accountants, notes=(_MECHANISM,))


def output_perturbation_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
) -> list[Statement]:
    """List the privacy statements on perturbed outputs. Published and proven are the same.

    Args:
        schedule, num_rounds, num_nodes, dp_delta: as for `perturbed_state_statements`.
        release: what the algorithm was told. Where gradients are taken does not matter: the own state is known.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - as for `gradient_tracking_statements`.
    """
    run = checked(states_only(schedule), num_rounds, release, num_nodes, dp_delta, output=True)

    def sensitivities(change: float) -> Sensitivities:
        return output_sensitivities(run.sent, change)

    accountants = ("one gradient a broadcast", "one gradient a broadcast")
    return _noise_statements(run, sensitivities, sensitivities, accountants=accountants, notes=(_MECHANISM,))


def quantization_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    quantization_step: float,
) -> list[Statement]:
    """List the privacy statements on states that quantization alone protects: (0, delta), published, then proven.

    Args:
        schedule, num_rounds, num_nodes: as for `perturbed_state_statements`; noise does not count.
        release: what the algorithm was told; gradients are clipped in L1 norm, as for Laplace noise.
        quantization_step: distance of neighboring grid points, or the threshold of a ternary quantizer.

    Raises:
        ArgumentError: an argument out of range, or Gaussian noise.

    Guarantees:
        - the published delta adds up those of all broadcasts; the proven one couples them and is never larger.
        - at delta 1 there is a reason, which says when it is reached, and no epsilon.
        - nothing is spent in 0 rounds.
    """
    if release.distribution != "laplace":
        remedy = "Clip in L1 norm."
        raise ArgumentError("distribution", "must be laplace: L1 norms count", f"got {release.distribution}", remedy)
    check.at_least(0, num_rounds=num_rounds)
    unlimited = states_only(schedule._replace(state_noise_scale=np.ones(num_rounds + 1)))
    run = checked(unlimited, num_rounds, release, num_nodes, None)

    def budget(composition: str) -> Callable[[float], Budget]:
        def of(change: float) -> Budget:
            sensitivities = perturbed_state_sensitivities(run.sent, change)
            deltas = quantization_deltas(sensitivities, quantization_step=quantization_step)
            curve = cumulative_delta_curve(deltas, composition=composition)
            if curve[-1] < 1:
                return Budget(0.0, float(curve[-1]))
            return Budget(
                None, 1.0, f"delta reaches 1 with broadcast {exhausted_at(curve)}, so that nothing is guaranteed."
            )

        return of

    accountant = "total variation of unbiased rounding; deltas"
    return [
        run_statement(run, "reconstructed", budget("sum"), 1.0, f"{accountant} added up", (_MECHANISM,)),
        run_statement(run, "proven", budget("coupling"), 1.0, f"{accountant} composed by coupling", ()),
    ]


def _at_delta(run: Run, agents: Callable[[float], TrackingAgent], delta: float, sizes: np.ndarray | None) -> Statement:
    """The smallest of the proven bounds for Laplace noise at a delta above 0, by name."""
    reason = reason_against(run, "proven")
    if run.num_rounds == 0 or reason is not None:
        notes = () if sizes is None else (counted_note(delta),)
        return run_statement(run, "proven", lambda change: Budget(None, delta, reason), delta, "none", notes)
    assert run.release.clip_norm is not None
    best = smallest_at_delta(run.sent, agents(2 * run.release.clip_norm), dp_delta=delta, num_local_samples=sizes)
    accountant = f"sums of impulse responses, given everything broadcast; {best.accountant}"
    return run_statement(run, "proven", lambda change: Budget(best.dp_epsilon, delta), delta, accountant, best.notes)


def _noise_statements(
    run: Run,
    published: Callable[[float], Sensitivities],
    proven: Callable[[float], Sensitivities],
    *,
    accountants: tuple[str, str],
    notes: tuple[str, ...],
    jointly: Callable[[float, float], np.ndarray] | None = None,
) -> list[Statement]:
    """The published statement, or with `notes` the reconstructed one, and the proven one.

    Both take C and give sensitivities. `jointly` takes C and delta and gives what Gaussian noise costs when all
    broadcasts are bounded together.
    """
    gaussian = run.release.distribution == "gaussian"
    delta = required(run.dp_delta) if gaussian else 0.0

    def of_published(change: float) -> Budget:
        return Budget(cumulative_epsilon(run.sent, published(change)), 0.0)

    def of_proven(change: float) -> Budget:
        if jointly is not None and gaussian:
            return Budget(jointly(change, delta), delta)
        if gaussian:
            return Budget(gaussian_epsilon(run.sent, proven(change), dp_delta=delta), delta)
        return Budget(cumulative_epsilon(run.sent, proven(change)), 0.0)

    stated = "reconstructed" if notes else "published"
    noise = "Gaussian mechanisms composed" if gaussian else "Laplace mechanisms added up"
    if jointly is not None and gaussian:
        noise = "Gaussian mechanisms, all broadcasts bounded together by their Gram matrix"
    return [
        run_statement(run, stated, of_published, delta, f"{accountants[0]}; Laplace mechanisms added up", notes),
        run_statement(run, "proven", of_proven, delta, f"{accountants[1]}; {noise}", ()),
    ]
