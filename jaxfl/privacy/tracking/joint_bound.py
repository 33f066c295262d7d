"""Gaussian noise in gradient tracking: all broadcasts together move less far than the sum of their worst cases.

Given everything broadcast, the changes d_l of one agent's gradients (in units of C / m_K, so |d_l| <= 1 in L2 norm)
move its state x_k by sum_l h_x[k - l] d_l and its tracker y_k by sum_l h_y[k - l] d_l (`impulse_responses`). With noise
of standard deviation s_x,k and s_y,k on them, the squares of all shifts in units of the noise sum to

    sum_{l, l'} G[l, l'] <d_l, d_l'>,
    G[l, l'] = sum_k h_x[k - l] h_x[k - l'] / s_x,k^2 + h_y[k - l] h_y[k - l'] / s_y,k^2.

`gaussian_shift` of `sensitivities` takes the worst case of every broadcast instead. No gradient is the worst for all
broadcasts: what enters a tracker leaves it again, so that most entries of G are negative. For any prices p with
diag(p) - G positive semidefinite the sum is at most mu^2 = sum_l p[l] <d_l, d_l> <= sum_l p[l]. Two p are tried:

- p[l] = sum_{l'} |G[l, l']|, for which the diagonal dominates;
- the dual of a semidefinite program (Goemans and Williamson 1995), whose own solution is a worst sequence of gradients:
  p[l] is the length of row l of G V, where V holds unit vectors d_l that an ascent finds. p is then scaled up until a
  Cholesky factor of diag(p) - G exists. However good V is, the bound holds.

The run costs as much as N(mu, 1) against N(0, 1), however d_l depends on what was broadcast before. Along every
transcript the squared shifts sum to at most mu^2. Let a last release use up what is left to exactly mu^2. Given the
past each release adds to the log density ratio a normal number of mean shift^2 / 2 and variance shift^2: a Brownian
motion with drift, read at the times that the squared shifts sum up to. It ends at the time mu^2 whatever the past was,
so that its end has the distribution of one release with shift mu. Leaving out the last release costs nothing.

With `num_local_samples` D, batches count as well. Which iterations hold the changed sample, a set S, does not depend on
the data, and each is in S with probability m_K / D, independently of the others. Given S, d_l = 0 for all other l, so
that the same prices give mu^2(S) = sum_{l in S} p[l] along every transcript. Divergences are jointly convex, and the
curve is at most the mean over S of that of N(mu(S), 1) against N(0, 1). The distribution of mu^2(S) is computed on a
grid to which each price is rounded up; sets of more iterations than are likely are a part of delta.

References:
    A. Smith, A. Thakurta, "Fully Adaptive Composition for Gaussian Differential Privacy", 2022, arXiv:2210.17520
    (budgets that the past chooses, under a total that holds along every transcript).
    S. Denisov, H. B. McMahan, K. Rush, A. Smith, A. Thakurta, "Improved Differential Privacy for SGD via Optimal
    Private Linear Operators on Adaptive Streams", NeurIPS 2022, arXiv:2202.08312, Theorem 2.1 (the linear case).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxfl.core import check
from jaxfl.privacy import binomial
from jaxfl.privacy.dominating_pairs import mixed_gaussian_epsilon
from jaxfl.privacy.tracking.schedules import PerNode, TrackingSchedule
from jaxfl.privacy.tracking.sensitivities import TrackingAgent, impulse_responses, noise_scales

_ROUNDING = 1e-8  # of mu^2, relative: what sums and Cholesky factors in float64 may lose
LARGEST = 4096  # rows of a G that is held, 128 MiB; beyond it the first bound only
_ASCENTS, _RANK = 150, 6
_UNLIKELY = 1e-3  # share of delta: the probability of more participations than are counted
_CELLS = 2**16  # of the grid of mu^2, about; 64 to the mean price at most and 4 at least
_SHIFTS = 2048  # that the grid is thinned to


def joint_shift(schedule: TrackingSchedule, agent: TrackingAgent) -> np.ndarray:
    """An upper bound on mu: the most by which all broadcasts together move, in units of the noise.

    Takes some seconds for each agent at K = 2,000, and a hundredth of a second at K = 200.

    Args:
        schedule: the run; its noise scales are standard deviations, infinite where nothing is broadcast. Gradients are
            taken at the broadcast state.
        agent: the agent whose data change, with C in L2 norm; numbers, or arrays (n,) for all agents at once.

    Returns:
        () or (n,), float64.

    Raises:
        ArgumentError: noise that is not positive, a change of gradient that is not positive, or a negative weight.

    Guarantees:
        - no sequence of gradients exceeds it, and `worst_changes` comes close to it.
        - it is never above the worst cases of single broadcasts added up, but for rounding (1e-8).

    Examples:
        >>> from jaxfl.privacy.tracking import TrackingAgent, polynomial_schedule, shifted_epsilon
        >>> schedule = polynomial_schedule(50, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> agent = TrackingAgent(gradient_l1_change=0.1, state_in_weight=1.0, tracker_out_weight=1.0)
        >>> print(round(float(shifted_epsilon(joint_shift(schedule, agent), 1e-5)), 2))
        11.44
    """
    return np.sqrt(each_agent(lambda run, one: _prices(run, one).sum(), schedule, agent) * (1 + _ROUNDING))


def joint_epsilon(
    schedule: TrackingSchedule, agent: TrackingAgent, *, dp_delta: float, num_local_samples: PerNode | None = None
) -> Callable[[float], np.ndarray]:
    """Make factor on all noise (above 0) -> epsilon of all broadcasts together.

    Args:
        schedule, agent: as for `joint_shift`.
        dp_delta: in (0, 1).
        num_local_samples: D, samples of each agent, at least m_K, () or (n,); None: a sample is in every batch.

    Returns:
        The function; its dp_epsilon is () or (n,), neighboring relation "replace_one".

    Raises:
        ArgumentError: a delta outside (0, 1), fewer samples than m_K, or as for `joint_shift`.

    Guarantees:
        - it is at least the epsilon of the mean over all sets of iterations that may hold the sample.
        - more samples never cost more than a sample in every batch.

    Examples:
        >>> from jaxfl.privacy.tracking import TrackingAgent, polynomial_schedule
        >>> schedule = polynomial_schedule(50, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> agent = TrackingAgent(gradient_l1_change=0.1, state_in_weight=1.0, tracker_out_weight=1.0)
        >>> epsilon = joint_epsilon(schedule, agent, dp_delta=1e-5, num_local_samples=100 * schedule.num_samples)
        >>> print(round(float(epsilon(1.0)), 2))  # 11.44 with a sample in every batch
        1.69
    """
    check.open_unit(dp_delta=dp_delta)
    if num_local_samples is not None:
        check.at_least(schedule.num_samples, num_local_samples=np.min(num_local_samples))

    def curve(run: TrackingSchedule, one: TrackingAgent, size: float) -> Callable[[float], float]:
        prices = _prices(run, one) * (1 + _ROUNDING)
        ways = [(np.sqrt(prices.sum(keepdims=True)), np.ones(1), dp_delta)]
        if size > run.num_samples:  # not where it is NaN
            ways.append((*_drawn_shifts(prices, run.num_samples / size, dp_delta), dp_delta * (1 - _UNLIKELY)))
        return lambda factor: min(mixed_gaussian_epsilon(mus / factor, chances, left) for mus, chances, left in ways)

    curves = each_agent(curve, schedule, agent, np.asarray(num_local_samples, float), dtype=object)
    return lambda factor: np.vectorize(lambda curve: curve(factor), otypes=[float])(curves)


def _drawn_shifts(prices: np.ndarray, rate: float, dp_delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Shifts mu(S), rounded up, and their probabilities, for sets S of as many iterations as are likely."""
    most = max(1, binomial.least_count(_UNLIKELY * dp_delta, len(prices), rate))
    step = prices.mean() / min(64, max(4, _CELLS // most)) or 1.0
    cells = np.ceil(prices / step).astype(int)
    chances = np.zeros(int(np.sort(cells)[-most:].sum()) + 1)  # larger sums belong to larger sets only
    chances[0] = 1.0
    for cell in cells.tolist():
        drawn = rate * chances[: len(chances) - cell]
        chances *= 1 - rate
        chances[cell:] += drawn
    block = -(-len(chances) // _SHIFTS)
    last = np.append(0, np.arange(len(chances) - 1, 0, -block)[::-1])  # the last cell of each block; of the first, 0
    return np.sqrt(step * last), np.add.reduceat(chances, np.append(0, last[:-1] + 1))


def each_agent(
    bound: Callable[..., Any],
    schedule: TrackingSchedule,
    agent: TrackingAgent,
    *others: np.ndarray,
    dtype: type = float,
) -> np.ndarray:
    """Apply `bound` to each agent alone; equal agents share one computation.

    Args:
        bound: (schedule with noise scales (K + 1,), agent with weights (), a number of each of `others`) -> a number,
            or an object.
        schedule, agent: of all agents.
        others: () or (n,) each.
        dtype: type of the results of `bound`.

    Returns:
        () or (n,).
    """
    scales = noise_scales(schedule)
    weights = (agent.state_in_weight, agent.tracker_out_weight, *others)
    count = np.broadcast_shapes(*(np.shape(s)[:-1] for s in scales), *map(np.shape, weights))
    of_scales = [np.broadcast_to(s, (*count, np.shape(s)[-1])) for s in scales]
    of_weights = [np.broadcast_to(np.asarray(w, float), count) for w in weights]
    known: dict[bytes, Any] = {}
    values = np.zeros(count, dtype)
    for node in np.ndindex(count):
        states, trackers = (np.asarray(part[node], float) for part in of_scales)
        numbers = np.array([part[node] for part in of_weights])
        key = b"".join(part.tobytes() for part in (states, trackers, numbers))
        if key not in known:
            run = schedule._replace(state_noise_scale=states, tracker_noise_scale=trackers)
            alone = TrackingAgent(agent.gradient_l1_change, float(numbers[0]), float(numbers[1]))
            known[key] = bound(run, alone, *numbers[2:])
        values[node] = known[key]
    return values


def worst_changes(gram: np.ndarray) -> np.ndarray:
    """Unit vectors d_l that make sum G[l, l'] <d_l, d_l'> large, (K + 1, 6): a local maximum.

    Args:
        gram: G, (K + 1, K + 1), positive semidefinite.

    Guarantees:
        - no smaller than at the random start: each step maximizes a linear function below a convex one.
    """
    vectors = np.random.default_rng(0).normal(size=(len(gram), min(_RANK, len(gram))))
    for _ in range(_ASCENTS):
        vectors = gram @ vectors
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
    return vectors


def gram_rows(schedule: TrackingSchedule, agent: TrackingAgent) -> Iterator[np.ndarray]:
    """G[l, :l + 1] for l = K, K - 1, ..., 0, in time and memory of K each.

    Args:
        schedule, agent: of one agent: noise scales (K + 1,), weights ().

    Guarantees:
        - it is H_x' diag(1 / s_x^2) H_x + H_y' diag(1 / s_y^2) H_y, with H[k, l] = h[k - l] for k >= l.
    """
    state, tracker = impulse_responses(schedule, agent)
    state_worth, tracker_worth = (1 / np.square(scale, dtype=float) for scale in noise_scales(schedule))
    # G[l, l - j] = sum_i h[j + i] h[i] worth[l + i]. From i = 1 on v = (h_x, h_y) follows one linear recursion,
    # v[i + 1] = A v[i] with A = [[p, -gamma], [0, q]]. The sum from i = 1 on is v[j + 1]' P v[1] with
    # P = sum_{i >= 0} (A^i)' diag(worth[l + 1 + i]) A^i.
    p = 1 - schedule.state_mixing * agent.state_in_weight
    q = 1 - schedule.tracker_mixing * agent.tracker_out_weight
    gamma = schedule.step_size
    square = mixed = last = 0.0  # P[0, 0], P[0, 1], P[1, 1]
    for index in reversed(range(len(state))):
        row = tracker[: index + 1] * (tracker[0] * tracker_worth[index])
        if index + 1 < len(state):
            later = slice(1, index + 2)
            row = row + state[later] * (square * state[1] + mixed * tracker[1])
            row = row + tracker[later] * (mixed * state[1] + last * tracker[1])
        yield row[::-1]
        last = gamma**2 * square - 2 * gamma * q * mixed + q**2 * last + tracker_worth[index]
        mixed = p * (q * mixed - gamma * square)
        square = p**2 * square + state_worth[index]


def _prices(schedule: TrackingSchedule, agent: TrackingAgent) -> np.ndarray:
    """p, (K + 1,), of the smaller sum of the two."""
    num_rows = len(schedule.state_noise_scale)
    sums = np.zeros(num_rows)
    gram = np.zeros((num_rows, num_rows)) if num_rows <= LARGEST else None
    for index, row in zip(reversed(range(num_rows)), gram_rows(schedule, agent), strict=True):
        sums[: index + 1] += np.abs(row)
        sums[index] += np.abs(row[:-1]).sum()
        if gram is not None:
            gram[index, : index + 1] = gram[: index + 1, index] = row
    dual = None if gram is None else _dual_prices(gram)
    return sums if dual is None or sums.sum() <= dual.sum() else dual


def _dual_prices(gram: np.ndarray) -> np.ndarray | None:
    """A p with diag(p) - G positive definite; None where none is found."""
    least = 1e-9 * np.trace(gram) / len(gram)  # p[l] stays above 0 for a gradient that moves nothing, too
    prices = np.linalg.norm(gram @ worst_changes(gram), axis=1) + least
    for excess in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        raised = (1 + excess) * prices
        scale = 1 / np.sqrt(raised)
        # Scaled so that diag(p) is I: a factor exists only if the least eigenvalue is above about -1e-12.
        try:
            np.linalg.cholesky(np.eye(len(gram)) - scale[:, None] * gram * scale)
        except np.linalg.LinAlgError:
            continue
        return raised
    return None
