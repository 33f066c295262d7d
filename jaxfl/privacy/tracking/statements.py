"""Accounts of runs of gradient tracking, and of the methods that it is compared with.

`runs` says what has been sent. The proofs are in `sensitivities` and `perturbed_states`. The neighboring relation is
"replace_one" throughout: the gradients of the changed sample, each of norm at most `clip_norm`, differ by at most C = 2
`clip_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.core.calls import by_name
from jaxfl.privacy.accountant import Account, Bound
from jaxfl.privacy.tracking.joint_bound import joint_epsilon
from jaxfl.privacy.tracking.laplace_at_delta import DRAWN, counted_note, smallest_at_delta
from jaxfl.privacy.tracking.perturbed_states import (
    cumulative_delta_curve,
    exhausted_at,
    output_sensitivities,
    perturbed_state_sensitivities,
    quantization_deltas,
    states_only,
)
from jaxfl.privacy.tracking.runs import Cost, Run, TrackingRelease, account_of, checked, required_delta
from jaxfl.privacy.tracking.schedules import TrackingSchedule
from jaxfl.privacy.tracking.sensitivities import (
    Sensitivities,
    TrackingAgent,
    cumulative_epsilon,
    gaussian_shift,
    proven_sensitivities,
    published_sensitivities,
    shifted_epsilon,
)

_GIVEN = "sums of impulse responses, given everything broadcast"


@by_name
def gradient_tracking_account(
    schedule: TrackingSchedule,
    release: TrackingRelease,
    *,
    state_in_weights: np.ndarray,
    tracker_out_weights: np.ndarray,
    dp_delta: float | None = None,
    num_local_samples: Sequence[int] | None = None,
) -> Account:
    """Account for a run of gradient tracking: the published bound, then the proven ones.

    Args:
        schedule: of the whole run, k = 0, ..., K.
        release: the clipping and noise that the algorithm was given.
        state_in_weights, tracker_out_weights: (n,), sum_j R_ij and sum_j C_ji of every agent.
        dp_delta: in (0, 1), for Gaussian noise. With Laplace noise, whose delta is 0, it adds a proven claim at this
            delta: the smallest of all that hold.
        num_local_samples: D of every agent, at least m_K; needs a dp_delta. With Gaussian noise the proven claim,
            with Laplace noise the added one, then counts the iterations in which a sample takes part.

    Returns:
        An account of at most K + 1 rounds, with one factor on the noise of all agents and iterations.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - what has left an agent in the rounds that ran counts.
        - where nothing is clipped or some noise is absent there is no epsilon; nothing is proven for bounds that are
          assumed, or for gradients taken at an agent's own state.

    Examples:
        >>> from jaxfl.privacy.tracking import polynomial_schedule
        >>> schedule = polynomial_schedule(2000, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> options = {"state_in_weights": np.ones(5), "tracker_out_weights": np.ones(5)}
        >>> options |= {"dp_delta": 1e-5, "num_local_samples": [12_000] * 5}
        >>> account = gradient_tracking_account(schedule, TrackingRelease(clip_norm=0.5), **options)
        >>> for one in account.statements(2000):
        ...     print(one.bound, one.dp_delta, round(one.dp_epsilon, 1))
        published 0.0 15418.6
        proven 0.0 70.4
        proven 1e-05 0.2
    """
    received, sent = np.asarray(state_in_weights, float), np.asarray(tracker_out_weights, float)
    if received.ndim != 1 or not received.size or received.shape != sent.shape:
        found, remedy = f"got shapes {received.shape} and {sent.shape}", "Pass R.sum(axis=1) and C.sum(axis=0)."
        raise ArgumentError("state_in_weights", "must hold one number per agent, as tracker_out_weights", found, remedy)
    delta, sizes = dp_delta, None if num_local_samples is None else np.asarray(num_local_samples)
    is_counted = release.distribution == "laplace" and not (dp_delta is None and sizes is None)
    if is_counted:
        delta = required_delta(dp_delta)
    if sizes is not None and (is_counted or release.distribution == "gaussian"):
        check.per_node(len(received), num_local_samples=num_local_samples)
        check.at_least(schedule.num_samples, num_local_samples=sizes.min())

    def agents(change: float) -> TrackingAgent:
        return TrackingAgent(gradient_l1_change=change, state_in_weight=received, tracker_out_weight=sent)

    def runs(schedule: TrackingSchedule, num_rounds: int) -> list[Run]:
        run = checked(schedule, num_rounds, release, len(received), dp_delta, num_local_samples=num_local_samples)

        def jointly(change: float) -> Cost:
            how = f"{_GIVEN}; Gaussian mechanisms, all broadcasts bounded together by their Gram matrix"
            epsilon = joint_epsilon(run.sent, agents(change), dp_delta=run.dp_delta, num_local_samples=sizes)
            if sizes is None:
                return lambda factor: Bound(epsilon(factor), how)
            how = f"{how}, averaged over how often a sample takes part"
            return lambda factor: Bound(epsilon(factor), how, notes=(DRAWN,))

        def at_delta(change: float) -> Cost:
            best = smallest_at_delta(run.sent, agents(change), dp_delta=required_delta(delta), num_local_samples=sizes)

            def cost(factor: float) -> Bound:
                least = best(factor)
                return least._replace(accountant=f"{_GIVEN}; {least.accountant}")

            return cost

        published = _noise(
            run, lambda change: published_sensitivities(run.sent, agents(change)), "Lemmas 3 and 4 of the paper"
        )
        singly = _noise(run, lambda change: proven_sensitivities(run.sent, agents(change)), _GIVEN)
        costs = {"published": published, "proven": jointly if release.distribution == "gaussian" else singly}
        if not is_counted:
            return [run._replace(costs=costs)]
        counted = {"dp_delta": delta, "notes": () if sizes is None else (counted_note(required_delta(delta)),)}
        return [run._replace(costs=costs), run._replace(costs={"proven": at_delta}, **counted)]

    return account_of(runs, schedule)


@by_name
def perturbed_state_account(
    schedule: TrackingSchedule,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
    num_local_samples: Sequence[int] | None = None,
) -> Account:
    """Account for perturbed states, quantized afterwards or not: reconstructed, then proven.

    Args:
        schedule: of the whole run, k = 0, ..., K; what it says of trackers does not count.
        release: the clipping and noise that the algorithm was given.
        num_nodes: n; the weights of each agent sum to 1.
        dp_delta: in (0, 1), for Gaussian noise.
        num_local_samples: D of every agent; a statement then says whether its delta is too large for so many.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - as for `gradient_tracking_account`.
    """
    how = ("sums of norms", "sum of the impulse response, given everything broadcast")
    return _of_states(
        schedule, perturbed_state_sensitivities, how, release, num_nodes, dp_delta, num_local_samples=num_local_samples
    )


@by_name
def output_perturbation_account(
    schedule: TrackingSchedule,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
    num_local_samples: Sequence[int] | None = None,
) -> Account:
    """Account for perturbed outputs: reconstructed, then proven, with the same sensitivities.

    Args:
        schedule, num_nodes, dp_delta, num_local_samples: as for `perturbed_state_account`.
        release: the clipping and noise that the algorithm was given. Its `gradient_at` does not matter: an observer
            knows the agent's own state.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - as for `gradient_tracking_account`.
    """
    settings: dict[str, Any] = {"output": True, "num_local_samples": num_local_samples}
    return _of_states(
        schedule, output_sensitivities, ("one gradient a broadcast",) * 2, release, num_nodes, dp_delta, **settings
    )


@by_name
def quantization_account(
    schedule: TrackingSchedule,
    release: TrackingRelease,
    *,
    num_nodes: int,
    quantization_step: float,
    num_local_samples: Sequence[int] | None = None,
) -> Account:
    """Account for states that only quantization protects: (0, delta), reconstructed, then proven.

    Args:
        schedule, num_nodes, num_local_samples: as for `perturbed_state_account`; noise does not count.
        release: the clipping that the algorithm was given; gradients are clipped in L1 norm, as for Laplace noise.
        quantization_step: distance of neighboring grid points, or the threshold of a ternary quantizer.

    Raises:
        ArgumentError: an argument out of range, or Gaussian noise.

    Guarantees:
        - the reconstructed delta adds up the deltas of all broadcasts; the proven one couples them and is never larger.
        - at delta 1 there is a reason, which says when it is reached, and no epsilon.
    """
    if release.distribution != "laplace":
        remedy = "Clip in L1 norm."
        raise ArgumentError("distribution", "must be laplace: L1 norms count", f"got {release.distribution}", remedy)

    def runs(schedule: TrackingSchedule, num_rounds: int) -> list[Run]:
        unlimited = states_only(schedule._replace(state_noise_scale=np.ones(num_rounds + 1)))
        run = checked(unlimited, num_rounds, release, num_nodes, None, num_local_samples=num_local_samples)

        def cost(composition: str, how: str) -> Callable[[float], Cost]:
            def of(change: float) -> Cost:
                sensitivities = perturbed_state_sensitivities(run.sent, change)
                deltas = quantization_deltas(sensitivities, quantization_step=quantization_step)
                curve = cumulative_delta_curve(deltas, composition=composition)
                accountant = f"total variation of unbiased rounding; deltas {how}"
                if curve[-1] < 1:
                    return lambda factor: Bound(0.0, accountant, float(curve[-1]))
                reason = f"delta reaches 1 with broadcast {exhausted_at(curve)}, so that nothing is guaranteed."
                return lambda factor: Bound(np.inf, accountant, 1.0, reason=reason)

            return of

        costs = {"reconstructed": cost("sum", "added up"), "proven": cost("coupling", "composed by coupling")}
        return [run._replace(dp_delta=1.0, costs=costs)]

    return account_of(runs, schedule)


def _of_states(
    schedule: TrackingSchedule,
    sensitivities: Callable[[TrackingSchedule, float], Sensitivities],
    accountants: tuple[str, ...],
    *arguments: Any,
    **settings: Any,
) -> Account:
    """Account by the reconstructed cost and the proven one, on the same sensitivities; the rest as for `checked`."""

    def runs(schedule: TrackingSchedule, num_rounds: int) -> list[Run]:
        run = checked(schedule, num_rounds, *arguments, **settings)
        deltas = {"reconstructed": 0.0, "proven": run.dp_delta}
        costs = {
            name: _noise(run, lambda change: sensitivities(run.sent, change), how, dp_delta=deltas[name])
            for name, how in zip(deltas, accountants, strict=True)
        }
        return [run._replace(costs=costs)]

    return account_of(runs, states_only(schedule))


def _noise(
    run: Run, sensitivities: Callable[[float], Sensitivities], accountant: str, dp_delta: float = 0.0
) -> Callable[[float], Cost]:
    """Make C -> the cost of noise on changes of these sensitivities: Gaussian at a delta above 0, else Laplace."""
    if dp_delta:
        how = f"{accountant}; Gaussian mechanisms composed"
        return lambda change: _gaussian(gaussian_shift(run.sent, sensitivities(change)), dp_delta, how)

    def laplace(change: float) -> Cost:
        spent = cumulative_epsilon(run.sent, sensitivities(change))
        return lambda factor: Bound(spent / factor, f"{accountant}; Laplace mechanisms added up")

    return laplace


def _gaussian(shift: np.ndarray, dp_delta: float, accountant: str) -> Cost:
    """Cost of Gaussian noise under a shift, in units of the noise."""
    return lambda factor: Bound(shifted_epsilon(shift / factor, dp_delta), accountant)
