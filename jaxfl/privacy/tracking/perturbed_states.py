"""Privacy of the methods that gradient tracking is compared with, which broadcast states and no trackers.

For agent i, with alpha = `state_mixing`, gamma = `step_size` and m = `num_samples` of a `TrackingSchedule`, and weights
a_ij that sum to 1 over j:

    perturbed states     x_{k+1} = (1 - alpha) x_k + alpha sum_j a_ij x~_j - gamma g_k,  x~ = x + noise, or Q(x + noise)
    quantized states     the same with x~ = Q(x): unbiased stochastic rounding is the only source of privacy
    perturbed output     o~_k = x_k - gamma g_k + noise,  where x_k is a function of earlier o~ alone

Laplace noise of scale b_k = `state_noise_scale[k]` costs d_k / b_k, with d_k the largest L1 change of what it is added
to, given everything broadcast before. The agent's own x enters with the factor 1 - alpha, while a_ii x~_i is known, so

    perturbed and quantized states   d_{k+1} = |1 - alpha| d_k + gamma C / m,  d_0 = 0
    perturbed output                 d_k = gamma C / m

where one sample's gradients on neighboring data differ by at most C. The first line is proven for gradients taken at
x~, where it is the sum of an impulse response; for gradients taken at x it has the flaw of Lemma 3 (see
`sensitivities`). The second is proven: there, x is known. Quantizing what is noisy costs nothing.

Quantization alone moves a distribution by at most |x - x'|_1 / step in total variation: a coordinate rounded up or down
to a grid of that step changes its odds at the rate 1 / step, and so does a ternary one whose threshold is that step;
distances of independent coordinates add up. So broadcast k is (0, delta_k)-DP with delta_k = min(1, d_k / step).

All agents have the same d_k. Results are NumPy, float64.

References:
    Chen, Wang, Zhang (see `jaxfl.privacy.tracking.sensitivities`), section 4.3, figure 8, with the numbers of its list
    of references: [46] perturbed, [47] perturbed and quantized states, [41] and [42] quantized states, [38] perturbed
    output. The kinds of mechanism are those of these references. Their own accounting could not be obtained: the
    reconstructed bound is Lemma 3's argument for these mechanisms.
"""

from __future__ import annotations

import numpy as np

from jaxfl.core import check
from jaxfl.privacy.tracking.schedules import TrackingSchedule
from jaxfl.privacy.tracking.sensitivities import Sensitivities


def perturbed_state_sensitivities(schedule: TrackingSchedule, gradient_change: float) -> Sensitivities:
    """d_k of perturbed and of quantized states, for `cumulative_epsilon` of `jaxfl.privacy.tracking`.

    Args:
        schedule: the run; the number of its noise scales counts, and not their size.
        gradient_change: C, positive; the norm of the result is the one that C is measured in.

    Returns:
        state: (K + 1,), the same for all agents; tracker: zeros, since none is broadcast.

    Raises:
        ArgumentError: a change of gradient that is not positive.

    Guarantees:
        - with gradients at the broadcast state no sequence of gradients exceeds it, and for each k one attains it.

    Examples:
        >>> numbers = TrackingSchedule(0.5, 0.1, 0.2, 4, np.ones(4), np.ones(4))
        >>> perturbed_state_sensitivities(numbers, 20.0).state.tolist()
        [0.0, 1.0, 1.5, 1.75]
    """
    one_gradient = _one_gradient(schedule, gradient_change)
    state = [0.0]
    for _ in range(_num_broadcasts(schedule) - 1):
        state.append(abs(1 - schedule.state_mixing) * state[-1] + one_gradient)
    return Sensitivities(state=np.array(state), tracker=np.zeros(len(state)))


def output_sensitivities(schedule: TrackingSchedule, gradient_change: float) -> Sensitivities:
    """d_k of a perturbed output, gamma C / m at every k, for `cumulative_epsilon` of `jaxfl.privacy.tracking`.

    Arguments, shapes and errors are those of `perturbed_state_sensitivities`.

    Guarantees:
        - no gradient exceeds it, and one attains it.
    """
    state = np.full(_num_broadcasts(schedule), _one_gradient(schedule, gradient_change))
    return Sensitivities(state=state, tracker=np.zeros_like(state))


def states_only(schedule: TrackingSchedule) -> TrackingSchedule:
    """The schedule of a method without trackers: their noise is infinite, which stands for what is not broadcast."""
    return schedule._replace(tracker_noise_scale=np.full_like(schedule.state_noise_scale, np.inf, dtype=float))


def quantization_deltas(sensitivities: Sensitivities, *, quantization_step: float) -> np.ndarray:
    """delta_k = min(1, d_k / step) of every quantized broadcast, given the earlier ones.

    Args:
        sensitivities: of the states, in L1 norm.
        quantization_step: distance of neighboring grid points, or the threshold of a ternary quantizer; positive.

    Returns:
        dp_delta of each broadcast at dp_epsilon 0, (K + 1,), in [0, 1], neighboring relation "replace_one".

    Raises:
        ArgumentError: a step that is not positive.

    Guarantees:
        - stochastic rounding to a grid, and ternary quantization, are never further apart in total variation.
    """
    check.positive(quantization_step=quantization_step)
    return np.minimum(1.0, sensitivities.state / quantization_step)


def cumulative_delta_curve(deltas: np.ndarray, *, composition: str = "sum") -> np.ndarray:
    """dp_delta, at dp_epsilon 0, of broadcasts 0, ..., k together, for every k.

    Args:
        deltas: of each broadcast given the earlier ones, (K + 1,), in [0, 1].
        composition: "sum" adds them up to at most 1. "coupling" gives 1 - prod (1 - delta_k), which is never larger:
            two runs that agreed so far can be coupled so that they agree once more with probability 1 - delta_k.

    Returns:
        (K + 1,), in [0, 1].

    Raises:
        ArgumentError: a delta outside [0, 1], or another composition.

    Examples:
        >>> cumulative_delta_curve(np.array([0.0, 0.5, 0.75])).tolist()
        [0.0, 0.5, 1.0]
        >>> cumulative_delta_curve(np.array([0.0, 0.5, 0.75]), composition="coupling").round(3).tolist()
        [0.0, 0.5, 0.875]
    """
    check.probability(deltas=deltas)
    check.one_of(("sum", "coupling"), composition=composition)
    if composition == "sum":
        return np.minimum(1.0, np.cumsum(deltas))
    with np.errstate(divide="ignore"):  # a delta of 1 stays 1
        return -np.expm1(np.cumsum(np.log1p(-np.asarray(deltas, float))))


def exhausted_at(delta_curve: np.ndarray) -> int | None:
    """First k at which delta reaches 1, to rounding: from there on nothing is guaranteed. None where it never does.

    Examples:
        >>> exhausted_at(np.array([0.0, 0.5, 1.0])), exhausted_at(np.array([0.0, 0.5]))
        (2, None)
    """
    reached = np.flatnonzero(np.asarray(delta_curve) >= 1)
    return int(reached[0]) if len(reached) else None


def _one_gradient(schedule: TrackingSchedule, gradient_change: float) -> float:
    """gamma C / m, by which one changed gradient moves a state."""
    check.positive(gradient_change=gradient_change)
    return schedule.step_size * gradient_change / schedule.num_samples


def _num_broadcasts(schedule: TrackingSchedule) -> int:
    """K + 1."""
    return np.shape(schedule.state_noise_scale)[-1]
