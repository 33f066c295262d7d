"""Laplace noise in gradient tracking, at a delta above 0: costs composed as zero-concentrated DP, not added up.

Given everything broadcast before, the noisy state x~_k is eps_k-DP with eps_k = |x_k - x'_k|_1 / b_k, where b_k is the
scale of its noise; so is the noisy tracker y~_k. So each is eps_k^2 / 2-zCDP, and these numbers add up, however the
gradients depend on what was broadcast (`jaxfl.privacy.concentrated`). The proof needs worst cases of single broadcasts
only. A joint bound would not help here: with a coordinate of its own for each iteration's change, all worst cases of
L1 norms are reached at once.

With `num_local_samples` D, batches count as well. Which iterations hold the changed sample, a set S, does not depend
on the data. Given S the change of x_k is at most sum_{l in S} |h_x[k - l]| (h: `impulse_responses`), so that the run is
rho(S)-zCDP with

    2 rho(S) = sum_{l, l' in S} A[l, l'],
    A[l, l'] = sum_k |h_x[k - l] h_x[k - l']| / b_x,k^2 + |h_y[k - l] h_y[k - l']| / b_y,k^2.

For |S| = n take in each row of A the sum of its n largest entries: 2 rho(S) is at most the sum of the n largest of
these sums. |S| is binomial (K + 1, m_K / D). The bound averages over n <= N, and P(|S| > N) is a part of delta. The
best of several N is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy

from jaxfl.core import check
from jaxfl.privacy import binomial
from jaxfl.privacy.accountant import Bound
from jaxfl.privacy.concentrated import concentrated_epsilon
from jaxfl.privacy.tracking.joint_bound import LARGEST, each_agent
from jaxfl.privacy.tracking.schedules import PerNode, TrackingSchedule
from jaxfl.privacy.tracking.sensitivities import (
    TrackingAgent,
    cumulative_epsilon,
    impulse_responses,
    noise_scales,
    participation_epsilon,
    proven_sensitivities,
)

DRAWN = "a sample is in a binomial number of batches, whose unlikely values are part of delta"
_SHARES_OF_DELTA = (0.5, 0.1, 0.01, 0.001)  # largest shares to spend on more than N participations


def laplace_epsilon_at_delta(
    schedule: TrackingSchedule, agent: TrackingAgent, *, dp_delta: float, num_local_samples: PerNode | None = None
) -> Callable[[float], np.ndarray]:
    """Make factor on all noise (above 0) -> epsilon at a delta above 0, for gradients taken at the broadcast state.

    Args:
        schedule: the run, of Laplace noise; infinite noise where nothing is broadcast.
        agent: whose data change; numbers, or arrays (n,) for all agents at once.
        dp_delta: in (0, 1).
        num_local_samples: D, samples of each agent, at least m_K, () or (n,); None: a sample is in every batch.

    Returns:
        The function; its dp_epsilon is () or (n,), neighboring relation "replace_one".

    Raises:
        ArgumentError: a delta outside (0, 1), fewer samples than m_K, noise that is not positive, a change of gradient
            that is not positive, or a negative weight.

    Guarantees:
        - no sequence of gradients that change in at most N iterations has a larger rho than is taken for N.
        - more samples never cost more.

    Examples:
        >>> from jaxfl.privacy.tracking import polynomial_schedule
        >>> schedule = polynomial_schedule(2000, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> agent = TrackingAgent(gradient_l1_change=1.0, state_in_weight=1.0, tracker_out_weight=1.0)
        >>> print(round(float(laplace_epsilon_at_delta(schedule, agent, dp_delta=1e-5)(1.0)), 2))  # 70.43 at delta 0
        5.38
    """
    check.open_unit(dp_delta=dp_delta)
    if num_local_samples is not None:
        check.at_least(schedule.num_samples, num_local_samples=np.min(num_local_samples))
    sizes = np.asarray(num_local_samples, float)  # NaN where none are given

    def curve(run: TrackingSchedule, one: TrackingAgent, size: np.ndarray) -> Callable[[float], float]:
        ways: list[tuple[Any, float, np.ndarray | None]] = [(_rho_of_all(run, one), dp_delta, None)]
        if num_local_samples is not None:
            ways += _sampled(run, one, float(size), dp_delta)
        return lambda factor: min(concentrated_epsilon(rho / factor**2, delta, chances) for rho, delta, chances in ways)

    curves = each_agent(curve, schedule, agent, sizes, dtype=object)
    return lambda factor: np.vectorize(lambda curve: curve(factor), otypes=[float])(curves)


def smallest_at_delta(
    schedule: TrackingSchedule, agent: TrackingAgent, *, dp_delta: float, num_local_samples: PerNode | None = None
) -> Callable[[float], Bound]:
    """Make factor on all noise (above 0) -> each agent's smallest proven bound at a delta; words are the worst one's.

    The bounds add costs up or compose them as zero-concentrated DP, over all iterations or over the sample's.

    Args:
        schedule, agent, dp_delta, num_local_samples: as for `laplace_epsilon_at_delta`.

    Raises:
        ArgumentError: as for `laplace_epsilon_at_delta`.
    """
    accountant = "Laplace mechanisms as zero-concentrated DP (eps^2 / 2 each)"
    pure = cumulative_epsilon(schedule, proven_sensitivities(schedule, agent))
    everywhere = laplace_epsilon_at_delta(schedule, agent, dp_delta=dp_delta)
    curves: list[tuple[Callable[[float], np.ndarray], str, tuple[str, ...]]] = [
        (lambda factor: pure / factor, "Laplace mechanisms added up", ()),
        (everywhere, accountant, ()),
    ]
    if num_local_samples is not None:
        counted = {"dp_delta": dp_delta, "num_local_samples": num_local_samples}
        part = participation_epsilon(schedule, agent, **counted)
        sampled = laplace_epsilon_at_delta(schedule, agent, **counted)
        curves += [
            (
                lambda factor: part / factor,
                "Laplace mechanisms added up, of the iterations in which a sample takes part",
                (counted_note(dp_delta),),
            ),
            (
                sampled,
                f"{accountant}, averaged over how often a sample takes part, of the iterations that cost most",
                (DRAWN,),
            ),
        ]

    def smallest(factor: float) -> Bound:
        epsilons = np.array([np.atleast_1d(curve(factor)) for curve, _, _ in curves])
        smallest, best = epsilons.min(axis=0), epsilons.argmin(axis=0)
        notes = dict.fromkeys(note for way in np.unique(best) for note in curves[way][2])
        return Bound(smallest, curves[best[smallest.argmax()]][1], notes=tuple(notes))

    return smallest


def counted_note(dp_delta: float) -> str:
    """State the assumption of a bound that counts the iterations in which a sample takes part."""
    return (
        "the changed sample is in a binomial number of batches, and in more than are counted with probability at most"
        f" {dp_delta:g}, which is delta"
    )


def participation_rhos(schedule: TrackingSchedule, agent: TrackingAgent, counts: np.ndarray) -> np.ndarray:
    """rho for each largest number of participations of the changed sample, one agent.

    Args:
        schedule, agent: of one agent: noise scales (K + 1,), weights ().
        counts: N, each 0 ... K + 1.
    """
    overlap = np.zeros((len(schedule.state_noise_scale),) * 2)
    for response, scale in zip(impulse_responses(schedule, agent), noise_scales(schedule), strict=True):
        moved = scipy.linalg.toeplitz(np.abs(response), np.zeros(len(response))) / np.asarray(scale)[:, None]
        overlap += moved.T @ moved
    largest = np.cumsum(-np.sort(-overlap, axis=1), axis=1)  # sums of the N largest entries of each row
    return np.array([-np.sort(-largest[:, count - 1])[:count].sum() / 2 if count else 0.0 for count in counts])


def _rho_of_all(schedule: TrackingSchedule, agent: TrackingAgent) -> float:
    """rho where the sample may be in every batch."""
    moves = zip(proven_sensitivities(schedule, agent), noise_scales(schedule), strict=True)
    return float(sum(np.square(change / scale).sum() for change, scale in moves)) / 2


def _sampled(
    schedule: TrackingSchedule, agent: TrackingAgent, num_local_samples: float, dp_delta: float
) -> list[tuple[np.ndarray, float, np.ndarray]]:
    """rhos of 0 ... N participations, the delta that is left to them, and their chances, for several N."""
    num_rounds = len(schedule.state_noise_scale)
    # The last state is returned after the last gradient: a round more in the binomial only loosens the bound.
    rate = schedule.num_samples / num_local_samples
    tails = binomial.above(np.arange(num_rounds + 1), num_rounds, rate)
    most = [int(np.argmax(tails <= share * dp_delta)) for share in _SHARES_OF_DELTA]
    if not most[0] < num_rounds <= LARGEST:
        return []
    counts = np.arange(most[-1] + 1)
    rhos, chances = participation_rhos(schedule, agent, counts), binomial.chances(counts, num_rounds, rate)
    return [(rhos[: n + 1], dp_delta - float(tails[n]), chances[: n + 1]) for n in set(most)]
