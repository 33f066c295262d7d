"""Privacy of gradient tracking with Laplace noise: the published bound, and a proven one.

Algorithm 1 of the paper, for agent i, with a = alpha sum_j R_ij (`state_mixing` times `state_in_weight`) and
b = beta sum_j C_ji (`tracker_mixing` times `tracker_out_weight`), apart from what arrives from others:

    x_{k+1} = (1 - a) x_k - gamma y_k + ...,    y_{k+1} = (1 - b) y_k + g_{k+1} - g_k + ...,    y_0 = g_0.

It broadcasts x_k + Laplace(`state_noise_scale[k]`) and y_k + Laplace(`tracker_noise_scale[k]`), k = 0, ..., K.
Neighboring data sets differ in one sample, whose gradients differ by at most C in L1 norm (`gradient_l1_change`;
per-sample L1 clipping at C / 2 makes it so). g_k is a mean over m_K = `num_samples` samples, drawn without replacement
within an iteration, so that at one point it changes by at most C / m_K.

- Published (Lemmas 3 and 4): |y_k - y'_k|_1 and |x_k - x'_k|_1 by recursions of norms, with C / m_K twice in every
  step. It is no bound for Algorithm 1 as printed, which takes the gradient at x_k: the un-noised x_k itself differs
  between the two runs, and so does every sample's gradient.
- Proven, for gradients taken at the *broadcast* state: given everything broadcast, the map from the changes d_l of g_l
  to those of x_k and y_k is linear, with impulse responses h. Hence |x_k - x'_k|_1 <= sum_l |h[k - l]| |d_l|_1, and
  the same holds for y, where g_{k+1} - g_k telescopes. In the paper's runs this bound is 100 to 270 times smaller.

Neither bound covers x_{K+1}, which Algorithm 1 returns without noise: return the last broadcast state instead. Numbers
of an agent may be arrays (n,), one entry per agent; results (NumPy, float64) then have one entry per agent, too.

References:
    J. Chen, J. Wang, J.-F. Zhang, "Differentially Private Gradient-Tracking-Based Distributed Stochastic Optimization
    over Directed Graphs": Lemmas 3 and 4. Gaussian noise (`gaussian_shift`) is an option beyond the paper.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxfl.core import check
from jaxfl.privacy import binomial, dominating_pairs
from jaxfl.privacy.tracking.schedules import PerNode, TrackingSchedule


class TrackingAgent(NamedTuple):
    """Numbers that determine an agent's epsilon besides the schedule; arrays (n,) for all agents at once."""

    gradient_l1_change: float  # C, the most by which one sample's gradients on neighboring data differ, L1
    state_in_weight: PerNode  # sum_j R_ij, of all that it receives
    tracker_out_weight: PerNode  # sum_j C_ji, of all that it sends


class Sensitivities(NamedTuple):
    """Largest L1 changes of what one agent broadcasts, given all that was broadcast before."""

    state: np.ndarray  # (K + 1,) or (n, K + 1), |x_k - x'_k|_1
    tracker: np.ndarray  # (K + 1,) or (n, K + 1), |y_k - y'_k|_1


def published_sensitivities(schedule: TrackingSchedule, agent: TrackingAgent) -> Sensitivities:
    """Lemma 3, by its recursions (311) and (328). Not a bound for Algorithm 1 as printed (see above).

    Arguments, shapes and errors are those of `impulse_responses`.
    """
    state_factor, tracker_factor, one_gradient = _linear_system(schedule, agent)
    state, tracker = [np.zeros_like(state_factor)], [np.full_like(tracker_factor, one_gradient)]
    for _ in range(_num_iterations(schedule)):
        state.append(np.abs(state_factor) * state[-1] + schedule.step_size * tracker[-1])
        tracker.append(np.abs(tracker_factor) * tracker[-1] + 2 * one_gradient)
    return Sensitivities(state=np.stack(state, axis=-1), tracker=np.stack(tracker, axis=-1))


def impulse_responses(schedule: TrackingSchedule, agent: TrackingAgent) -> tuple[np.ndarray, np.ndarray]:
    """Change of x_{l+k} and y_{l+k}, signed, for a change of C / m_K in g_l alone, given everything broadcast.

    Args:
        schedule: the run.
        agent: whose data change; numbers, or arrays (n,) for all agents at once.

    Returns:
        (state, tracker), (K + 1,) or (n, K + 1): C / m_K times (0, -gamma, ...) and (1, -b, -b (1 - b), ...).

    Raises:
        ArgumentError: a change of gradient that is not positive, or a negative weight.
    """
    state_factor, tracker_factor, one_gradient = _linear_system(schedule, agent)
    state, tracker = [np.zeros_like(state_factor)], [np.full_like(tracker_factor, one_gradient)]
    for k in range(_num_iterations(schedule)):
        state.append(state_factor * state[-1] - schedule.step_size * tracker[-1])
        # The gradient that enters y_l leaves it again in y_{l+1}, which holds g_{l+1} - g_l.
        tracker.append(tracker_factor * tracker[-1] - (one_gradient if k == 0 else 0))
    return np.stack(state, axis=-1), np.stack(tracker, axis=-1)


def proven_sensitivities(schedule: TrackingSchedule, agent: TrackingAgent) -> Sensitivities:
    """sum_{l <= k} |h[l]|, with h of `impulse_responses`, for gradients taken at the broadcast state.

    Arguments, shapes and errors are those of `impulse_responses`.

    Guarantees:
        - no sequence of gradients exceeds either bound, and for each bound and k one attains it.
        - the tracker's is (C / m_K) (2 - (1 - b)^k) for 0 <= b <= 1.
        - neither is above the published one.
    """
    state, tracker = (np.cumsum(np.abs(response), axis=-1) for response in impulse_responses(schedule, agent))
    return Sensitivities(state=state, tracker=tracker)


def cumulative_epsilon(schedule: TrackingSchedule, sensitivities: Sensitivities) -> np.ndarray:
    """Lemma 4: sum_{k=0..K} |x_k - x'_k|_1 / state_noise_scale[k] + |y_k - y'_k|_1 / tracker_noise_scale[k].

    Args:
        schedule: the run, of which the noise scales count; infinite where nothing is broadcast.
        sensitivities: published or proven, of the same K.

    Returns:
        dp_epsilon for the data of each agent, () or (n,), dp_delta 0, neighboring relation "replace_one".

    Raises:
        ArgumentError: noise that is not positive.

    Examples:
        >>> from jaxfl.privacy.tracking import polynomial_schedule
        >>> schedule = polynomial_schedule(2000, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> agent = TrackingAgent(gradient_l1_change=1.0, state_in_weight=1.0, tracker_out_weight=1.0)
        >>> print(round(cumulative_epsilon(schedule, published_sensitivities(schedule, agent)), 1))
        15422.1
        >>> print(round(cumulative_epsilon(schedule, proven_sensitivities(schedule, agent)), 2))
        70.43
    """
    return cumulative_epsilon_curve(schedule, sensitivities).take(-1, axis=-1)


def cumulative_epsilon_curve(schedule: TrackingSchedule, sensitivities: Sensitivities) -> np.ndarray:
    """`cumulative_epsilon` of what iterations 0, ..., k broadcast, for every k: (K + 1,) or (n, K + 1), float64."""
    state_scale, tracker_scale = noise_scales(schedule)
    return np.cumsum(sensitivities.state / state_scale + sensitivities.tracker / tracker_scale, axis=-1)


def participation_epsilon(
    schedule: TrackingSchedule, agent: TrackingAgent, *, num_local_samples: PerNode, dp_delta: float
) -> np.ndarray:
    """The proven bound, counting only the iterations whose batch holds the changed sample.

    A sample is in Binomial(K + 1, m_K / D) batches, drawn independently of the data. With probability 1 - dp_delta
    it is in at most N, and then costs no more than the N iterations in which one gradient costs most.

    Args:
        schedule, agent: the run, and the owner of the data.
        num_local_samples: D, samples of the agent, at least m_K; () or (n,).
        dp_delta: in (0, 1].

    Returns:
        dp_epsilon at dp_delta, () or (n,), neighboring relation "replace_one".

    Raises:
        ArgumentError: fewer samples than m_K, a delta outside (0, 1], noise that is not positive.

    Guarantees:
        - no sequence of gradients that change in at most N iterations costs more.
        - it is the proven bound where every batch holds every sample.
    """
    check.positive(dp_delta=dp_delta)
    check.probability(dp_delta=dp_delta)
    check.at_least(schedule.num_samples, num_local_samples=np.min(num_local_samples))
    state_scale, tracker_scale = noise_scales(schedule)
    state, tracker = (np.abs(response) for response in impulse_responses(schedule, agent))
    num_rounds, costs = _num_iterations(schedule) + 1, []  # costs of a change of g_l alone, for every l
    for start in range(num_rounds):
        cost = state[..., : num_rounds - start] / state_scale[..., start:]
        costs.append((cost + tracker[..., : num_rounds - start] / tracker_scale[..., start:]).sum(axis=-1))
    rates = schedule.num_samples / np.asarray(num_local_samples, float)
    tails = binomial.above(np.arange(num_rounds + 1), num_rounds, rates[..., None])
    most = np.argmax(tails <= dp_delta, axis=-1)  # the first N with P(more than N) <= dp_delta
    worst_first = -np.sort(-np.stack(costs, axis=-1), axis=-1)
    return np.where(np.arange(num_rounds) < most[..., None], worst_first, 0.0).sum(axis=-1)


def gaussian_shift(schedule: TrackingSchedule, sensitivities: Sensitivities) -> np.ndarray:
    """Compute the shift mu of one Gaussian release that costs as much as all broadcasts, each at its worst case.

    Given everything broadcast before, a broadcast x~_k moves by at most dx_k / s_x,k standard deviations, and y~_k
    too. Such mechanisms compose adaptively to that of N(mu, 1) against N(0, 1) with
    mu^2 = sum_k (dx_k / s_x,k)^2 + (dy_k / s_y,k)^2.

    Args:
        schedule: the run; its noise scales are standard deviations.
        sensitivities: in L2 norm, that is, found for a C that bounds L2 changes of one sample's gradient.

    Returns:
        mu, () or (n,), neighboring relation "replace_one"; `shifted_epsilon` has its epsilon.

    Raises:
        ArgumentError: noise that is not positive.

    Examples:
        >>> numbers = TrackingSchedule(0.5, 0.1, 0.2, 4, np.full(2, 0.5), np.full(2, 2.0))
        >>> moves = Sensitivities(state=np.array([0.0, 0.3]), tracker=np.array([1.6, 0.0]))
        >>> mu = gaussian_shift(numbers, moves)
        >>> print(round(float(mu), 6), round(float(shifted_epsilon(mu, 1e-5)), 6))
        1.0 4.377178

    References:
        J. Dong, A. Roth, W. Su, "Gaussian Differential Privacy", 2022, arXiv:1905.02383, section 3 (composition).
    """
    squared = schedule._replace(
        state_noise_scale=np.square(schedule.state_noise_scale),
        tracker_noise_scale=np.square(schedule.tracker_noise_scale),
    )
    return np.sqrt(cumulative_epsilon(squared, Sensitivities(*(np.square(change) for change in sensitivities))))


def shifted_epsilon(mu: np.ndarray, dp_delta: float) -> np.ndarray:
    """epsilon of N(mu, 1) against N(0, 1) for every mu; ArgumentError for a delta outside (0, 1)."""
    check.open_unit(dp_delta=dp_delta)
    return np.vectorize(dominating_pairs.gaussian_epsilon, otypes=[float])(mu, dp_delta)


def _linear_system(schedule: TrackingSchedule, agent: TrackingAgent) -> tuple[np.ndarray, np.ndarray, float]:
    """1 - a and 1 - b, of one shape, and C / m_K."""
    check.positive(gradient_l1_change=agent.gradient_l1_change)
    check.non_negative(state_in_weight=agent.state_in_weight, tracker_out_weight=agent.tracker_out_weight)
    state = 1 - schedule.state_mixing * np.asarray(agent.state_in_weight, float)
    tracker = 1 - schedule.tracker_mixing * np.asarray(agent.tracker_out_weight, float)
    state, tracker = np.broadcast_arrays(state, tracker)
    return state, tracker, agent.gradient_l1_change / schedule.num_samples


def noise_scales(schedule: TrackingSchedule) -> tuple[np.ndarray, np.ndarray]:
    """State noise and tracker noise, which must be positive; infinite noise stands for what is not broadcast."""
    for name in ("state_noise_scale", "tracker_noise_scale"):
        scale = getattr(schedule, name)
        check.positive(**{name: np.where(np.isposinf(scale), 1.0, scale)})
    return schedule.state_noise_scale, schedule.tracker_noise_scale


def _num_iterations(schedule: TrackingSchedule) -> int:
    """K: the schedule holds K + 1 noise scales."""
    return np.shape(schedule.state_noise_scale)[-1] - 1
