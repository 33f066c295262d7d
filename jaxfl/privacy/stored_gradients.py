"""Privacy losses of releases that show a stored gradient: Poisson batches with a SAGA table.

Let G be the clip norm, b the batch size, q the sampling rate and z the noise multiplier. In units of G / b the noise of
one release has standard deviation z. Without the sample the mean of the release is 0. With it the mean is q h where the
sample is not drawn and g - (1 - q) h where it is, with one fresh gradient g and one stored gradient h of norms at most
1. Which h is in the table depends on secret draws, so that a bound must hold for every pair (g, h).

Theorem (docs/stored_gradients.md has the proof). Every such release is post-processing of one with |g| = |h| = 1. With
the share lambda = |g + h|^2 / 4 of the part that g and h have in common, that one is two independent numbers:

    N(sqrt(lambda) q / z, 1), whether the sample is drawn or not, and
    (1 - q) N(-q s, 1) + q N((2 - q) s, 1) with s = sqrt(1 - lambda) / z, against N(0, 1) for both.

So the largest delta at an epsilon is a maximum over one number, lambda in [0, 1]. A smaller shift is post-processing of
a larger one: all lambda of a cell [a, b] are bounded by the share 1 - a of the second number with the share b of the
first. The maximum over the cells is an upper bound. It exceeds the true maximum by no more than noise smaller by half
of a cell's width would (0.4 % for 128 cells).

Rounding to a grid moves both means by at most r in units of the noise. The proof splits the noise into two independent
parts of variances c and 1 - c. The first hides the gradients: z sqrt(c) takes the place of z. The second hides the
movement by rounding, which is worst where it is the same vector of length r whether the sample is drawn or not: a
further common shift of r / sqrt(1 - c). Any c gives a bound; c = 1 / (1 + r z / q) adds r to the shift q / z that
lambda = 1 has.

One sample exchanged for another, with gradients (g, h) and (g', h'): for every epsilon_1

    delta(epsilon) <= forward(epsilon_1) + exp(epsilon_1) backward(epsilon - epsilon_1),

by way of the release without either sample, for one release; the smallest of these is taken at every epsilon, and then
releases are composed.

Deltas at the points of a grid belong to losses on that grid, and the largest of several curves of deltas is one again
(both are convex in exp(epsilon)). All masses are sums and differences that keep their digits, and so do small
deltas.

All this tells the observer the stored gradient in every round. `hidden_epsilon` does not. The moment of an integer
order of the likelihood ratio of all releases is a mean over as many independent patterns of draws. In one round it
grows at most by a factor that holds for all stored gradients, one of each pattern (theorem 3 in the same place).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import scipy

from jaxfl.privacy.composition import Losses, decaying_sums
from jaxfl.privacy.dominating_pairs import TAIL, interval_masses, mixture_loss

THEOREM = "worst pair of a fresh and a stored gradient, or a hidden stored gradient"  # its name in the records of runs
_CELLS = 128  # of lambda
_FEWEST_CELLS = 8  # where the grid is so fine that losses are large against q / z, which lambda changes
_MAX_WORK = 2**20  # cells times bins
_MAX_BINS = 2**19
_LEFT_TAIL = 30.0  # normal quantile. There losses against the sample are largest; it costs few bins to see them
_POINTS = 8192  # of x, at most, besides those of the left tail
_SPACING = 0.01  # of x, at most where _POINTS allow it
_ROUNDED_UP = 1 + 1e-11  # times every delta: what float64 may have lost
_LARGEST_LOSS = 700.0  # against the sample; float64 holds exp(-loss)
_ORDERS = range(2, 11)  # of moments; where larger ones are better noise is large, and the worst pair costs little
_LARGEST_EXPONENT = 300.0  # of such a moment
_LARGEST_GROWTH = 0.3  # of its log in a release; orders above one that exceeds it are left out
_SEARCH_CELLS, _HIDDEN_CELLS = 24, 48  # of the length of a sum of stored gradients: to choose a weight, to bound


def is_resolved(sampling_rate: float, noise_multiplier: float, rounding: float) -> bool:
    """True if float64 holds the probabilities of all losses under both distributions; arguments as for `stored`.

    With less noise every release tells the data sets apart, and the secrecy of the draws hides next to nothing.
    """
    common = sampling_rate / noise_multiplier + rounding
    return common * (_LEFT_TAIL + common + 2 * (2 - sampling_rate) / noise_multiplier) < _LARGEST_LOSS


def stored(sampling_rate: float, noise_multiplier: float, rounding: float, step: float) -> tuple[Losses, Losses]:
    """Losses of a release with the sample against one without it, and the other way round.

    Args:
        sampling_rate: q, in (0, 1), probability that the sample is in the batch.
        noise_multiplier: z, deviation of the noise over the clip norm, both of the batch's sum.
        rounding: r, how far rounding to a grid may move a release, over the noise's deviation; 0 without a grid.
        step: of the grid; larger where the grid would exceed the bins allowed.
    """
    step, forward, backward = _deltas(sampling_rate, noise_multiplier, rounding, step)
    decay = math.exp(-step)
    with_sample, without = _masses(forward, step), _masses(backward, step)  # of losses above 0, and below 0
    paired = (
        with_sample * decay ** np.arange(1, len(with_sample) + 1),
        without * decay ** np.arange(1, len(without) + 1),
    )
    at_zero = max(0.0, 1 - forward[-1] - with_sample.sum() - paired[1].sum())
    first, last = -len(without), len(with_sample)
    return (
        Losses(step, first, np.concatenate([paired[1][::-1], [at_zero], with_sample]), forward[-1]),
        Losses(step, -last, np.concatenate([paired[0][::-1], [at_zero], without]), backward[-1]),
    )


def stored_exchanged(sampling_rate: float, noise_multiplier: float, rounding: float, step: float) -> Losses:
    """Losses of a release with one sample against one with another, the same both ways; arguments as for `stored`."""
    step, forward, backward = _deltas(sampling_rate, noise_multiplier, rounding, step)
    reach, decay = len(backward) - 1, math.exp(-step)
    # At epsilons below 0 a delta follows from the other direction: at -e it is 1 - exp(-e) (1 - the other's at e).
    shrunk = decay ** np.arange(reach, 0, -1)
    ahead = np.concatenate([1 - shrunk * (1 - backward[:0:-1]), forward])  # from -reach on
    there = np.pad(forward, (0, max(0, reach + 1 - len(forward))), mode="edge")[reach:0:-1]
    back = np.concatenate([1 - shrunk * (1 - there), backward])  # from -reach to reach
    deltas = np.ones(len(forward) + reach)
    with np.errstate(over="ignore"):  # an infinite delta bounds nothing, and another is smaller
        scale = np.exp(step * np.arange(-reach, len(forward)))
        for second, delta in enumerate(back, -reach):  # its epsilon; the first one's index in `ahead` is reach more
            begin = max(0, second - reach)
            bound = (ahead + scale * delta)[max(0, reach - second) :]
            np.minimum(deltas[begin : begin + len(bound)], bound, out=deltas[begin : begin + len(bound)])
    deltas = np.minimum.accumulate(deltas)  # where float64 has no bound, the bound at a smaller epsilon holds
    masses = _masses(deltas, step)
    paired = masses * decay ** np.arange(1, len(masses) + 1)
    at_zero = max(0.0, 1 - deltas[-1] - masses.sum() - paired.sum())
    return Losses(step, -len(masses), np.concatenate([paired[::-1], [at_zero], masses]), deltas[-1])


def hidden_epsilon(
    sampling_rate: float,
    noise_multiplier: float,
    rounding: float,
    num_releases: int,
    dp_delta: float,
    chance: float = 1.0,
) -> float:
    """epsilon of all releases with the sample against those without it, the stored gradient hidden; not the other way.

    Args:
        sampling_rate, noise_multiplier, rounding: as for `stored`.
        num_releases: at least 1.
        dp_delta: in (0, 1).
        chance: with which each of `num_releases` is made, independently of data and of others.

    Returns:
        dp_epsilon, at least 0; infinite where noise is so small that no order has a moment that float64 holds.

    Examples:
        >>> print(round(hidden_epsilon(0.053, 2.0, 0.0, 300, 1e-3), 2))  # 3.06 by `stored`
        2.6
    """
    best = math.inf
    for order, growth, once in hidden_moments(sampling_rate, noise_multiplier, rounding):
        moment = num_releases * math.log1p(chance * math.expm1(growth)) + once
        best = min(best, (moment - math.log(dp_delta * order)) / (order - 1) + math.log1p(-1 / order))
    return max(best, 0.0)


@lru_cache(maxsize=64)  # the search for a number of rounds asks many times
def hidden_moments(
    sampling_rate: float, noise_multiplier: float, rounding: float
) -> tuple[tuple[int, float, float], ...]:
    """Bound moments of the likelihood ratio of all releases; arguments as for `stored`.

    Returns:
        (order, growth, once) for each order: without the sample, the ratio to this power has a mean of at most
        exp(number of releases * growth + once).
    """
    q, (grown, rounded) = sampling_rate, _parts(sampling_rate, noise_multiplier, rounding)
    z, moments = noise_multiplier / math.sqrt(grown), []
    for order in _ORDERS:
        if 2 * order * (order - 1) * (1 / z**2 + rounded) > _LARGEST_EXPONENT:
            break
        search = scipy.optimize.minimize_scalar(
            lambda log_weight, order=order: _growth(q, z, order, math.exp(log_weight), _SEARCH_CELLS),
            bounds=(math.log(1e-3 * q), 0.0),
            method="bounded",
            options={"xatol": 1e-4},
        )
        weight = math.exp(search.x)
        growth = _growth(q, z, order, weight, _HIDDEN_CELLS) + order * (order - 1) / 2 * rounded
        moments.append((order, growth, weight * order**2 / 2))
        if growth > _LARGEST_GROWTH:
            break
    return tuple(moments)


def _growth(q: float, z: float, order: int, weight: float, num_cells: int) -> float:
    """log of the factor by which one round multiplies a moment at most, whatever the gradients.

    A cell bounds |s|^2 and <g, s>, with the sum s of the stored gradients of all patterns. Where the patterns that
    draw the sample have stored gradients of the sum A, the exponent is X(A): `low` to `high`, with a known mean over
    all choices of as many patterns. A chord lies above exp(X).
    """
    drawn = np.arange(order + 1)
    kept = order - drawn
    signal, both = 1 / z**2, 1 / z**2 + weight
    ends = np.linspace(0, order, num_cells + 1) ** 2
    sides = np.linspace(-order, order, 2 * num_cells + 1)
    longest = np.sqrt(ends[1:, None])
    cells = np.broadcast_arrays(
        ends[:-1, None], ends[1:, None], np.maximum(sides[:-1], -longest), np.minimum(sides[1:], longest)
    )
    shortest, longest, left, right = (bound[cells[2] <= cells[3]][:, None] for bound in cells)
    squared = np.stack([shortest, shortest, longest, longest])  # at the corners of each cell
    along = np.stack([left, right, left, right])
    low, high, mean = -np.inf, np.inf, 0.0
    fixed = signal * (drawn**2 - q**2 * kept - (1 + (1 - q) ** 2) * drawn) / 2 + weight * drawn**2 / 2
    for share in (0 * drawn, 0 * drawn + 1, drawn / order):  # A lies in a ball around share * s
        center = (
            fixed
            + (signal * (q - share) ** 2 + weight * (share**2 - 2 * share)) / 2 * squared
            + (signal * (drawn * (q - share) + (1 - q) * share) + weight * drawn * (1 - share)) * along
        )
        fresh, stored_sum = both * drawn - (1 - q) * signal, q * signal + weight - both * share
        slope = np.max(fresh**2 + stored_sum**2 * squared + 2 * fresh * stored_sum * along, axis=0)
        slope = np.sqrt(np.maximum(slope, 0.0))
        radius = np.sqrt(np.maximum((1 - share) * drawn**2 + share * kept**2 - share * (1 - share) * shortest, 0.0))
        on_sphere = (drawn == 1) & (share == 0) | (kept == 1) & (share == 1) | (radius == 0)
        fall = np.where(on_sphere, radius, np.minimum(radius, slope / both))
        high = np.minimum(high, center.max(axis=0) + both * radius**2 / 2 + slope * radius)
        low = np.maximum(low, center.min(axis=0) + both * fall**2 / 2 - slope * fall)
        mean = center + both * drawn * kept * (1 - squared / order**2) / (2 * (order - 1))  # the last one counts
    width = high - low
    share_of_high = np.where(width > 1e-9, (mean - low) / np.maximum(width, 1e-9), 1.0)
    chord = (1 - share_of_high) * np.exp(low) + share_of_high * np.exp(high)
    chances = scipy.special.binom(order, drawn) * q**drawn * (1 - q) ** kept
    return math.log(float((chord * chances).sum(axis=-1).max()) * _ROUNDED_UP)


def _parts(q: float, z: float, rounding: float) -> tuple[float, float]:
    """1 / c and r^2 / (1 - c): noise is split into a part that hides gradients and one that hides rounding."""
    grown = 1 + rounding * z / q
    return grown, rounding**2 * grown / (grown - 1) if rounding else 0.0


def _deltas(q: float, z: float, rounding: float, step: float) -> tuple[float, np.ndarray, np.ndarray]:
    """The step, and the largest deltas over lambda at the epsilons 0, step, 2 step, ..., forward and backward.

    The last delta of each is the probability of an infinite loss.
    """
    grown, rounded = _parts(q, z, rounding)
    largest = (2 - q) / z * math.sqrt(grown)
    top = max(largest, q / z + rounding) + TAIL
    highest = float(mixture_loss(np.array([top]), q, -largest, largest)[0]) + (q / z + rounding) * top
    step = max(step * grown, highest / _MAX_BINS)  # losses are spread over q / z + r
    num_cells = max(_FEWEST_CELLS, min(_CELLS, math.floor(_MAX_WORK * step / highest)))
    forward = backward = np.zeros(1)
    for cell in range(num_cells):
        opposed = math.sqrt((1 - cell / num_cells) * grown) / z
        common = math.sqrt((cell + 1) / num_cells * grown * (q / z) ** 2 + rounded)
        first, masses = _losses(q, -q * opposed, (2 - q) * opposed, top, step)
        first_common, masses_common = _losses(q, common, common, top, step)
        first, masses = first + first_common, np.convolve(masses, masses_common)
        # Under N(0, I) a loss has exp(-loss) times its probability. Beyond the edges both count as infinite losses.
        zero = -first
        without = masses[:zero] * np.exp(step * np.arange(zero, 0, -1))
        forward = _larger(forward, _curve(masses[zero + 1 :], step, 2 * scipy.special.ndtr(-TAIL)))
        beyond = 2 * scipy.special.ndtr(-top) + 2 * scipy.special.ndtr(-_LEFT_TAIL)
        backward = _larger(backward, _curve(without[::-1], step, beyond))
    return step, forward * _ROUNDED_UP, backward * _ROUNDED_UP


def _losses(q: float, low: float, high: float, top: float, step: float) -> tuple[int, np.ndarray]:
    """Index of the first loss on the grid, and masses of all, of (1 - q) N(low, 1) + q N(high, 1) against N(0, 1).

    Between two edges the loss rises or falls, so that what lies there is divided between the edges, and then between
    the points of the grid around each, such that its probability is kept under both distributions.
    """
    bottom = min(low, 0.0) - TAIL
    spacing = max((top - bottom) / _POINTS, min(_SPACING, step / high))
    edges = np.concatenate([np.linspace(bottom - _LEFT_TAIL + TAIL, bottom, 256)[:-1], np.arange(bottom, top, spacing)])
    if low < 0:  # the loss falls up to one point and rises behind it
        turn = (math.log((1 - q) * -low) - math.log(q * high)) / (high - low) + (low + high) / 2
        edges = np.insert(edges, np.searchsorted(edges, turn), turn) if edges[0] < turn < edges[-1] else edges
    edges = np.append(edges, top)
    losses = mixture_loss(edges, q, low, high)
    with_sample, without = interval_masses(edges, q, low, high)
    smaller, width = np.minimum(losses[:-1], losses[1:]), np.abs(np.diff(losses))
    exact = (without > 1e-290) & (width > 0)  # elsewhere all goes to the larger loss
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        upper = (with_sample - np.exp(np.log(without) + smaller)) / -np.expm1(-width)
    upper = np.where(exact, np.clip(upper, 0.0, with_sample), with_sample)
    rising = losses[1:] >= losses[:-1]
    at_edges = np.append(np.where(rising, with_sample - upper, upper), 0.0)
    at_edges[1:] += np.where(rising, upper, with_sample - upper)
    index = np.floor(losses / step).astype(int)
    to_right = at_edges * np.clip(np.expm1(step * index - losses) / math.expm1(-step), 0.0, 1.0)
    first = min(int(index.min()), -1)
    length = max(int(index.max()), 0) + 2 - first
    masses = np.bincount(index - first, at_edges - to_right, length)
    return first, masses + np.bincount(index + 1 - first, to_right, length)


def _curve(masses: np.ndarray, step: float, infinite: float) -> np.ndarray:
    """Deltas at the epsilons 0, step, ..., m step from the masses (m,) of the losses step, ..., m step."""
    # s[i] = sum_{l >= i} masses[l] exp((i - l) step); a delta is (1 - exp(-step)) times the sum of all s above it.
    s = decaying_sums(masses[::-1], math.exp(-step))
    return infinite - math.expm1(-step) * np.append(np.cumsum(s)[::-1], 0.0)


def _masses(deltas: np.ndarray, step: float) -> np.ndarray:
    """The inverse of `_curve`; where rounding would make a mass negative it is 0, which can only raise a delta."""
    s = np.append((deltas[:-1] - deltas[1:]) / -math.expm1(-step), 0.0)
    return np.maximum(s[:-1] - math.exp(-step) * s[1:], 0.0)


def _larger(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Take the elementwise maximum; behind its end a curve keeps its last delta."""
    size = max(len(first), len(second))
    return np.maximum(*(np.pad(curve, (0, size - len(curve)), mode="edge") for curve in (first, second)))
