"""Privacy curves: delta as a function of epsilon, for Gaussian noise with and without sampling, composed over releases.

Noise has standard deviation 1 here: a shift is a change of what is released over `noise_std`.

- Gaussian: one release shifted by mu, N(mu, 1) against N(0, 1), also the composition of releases with shifts mu_k,
  mu^2 = sum_k mu_k^2 (Balle and Wang 2018, arXiv:1805.06530; Dong, Roth, Su 2019, arXiv:1905.02383).
- Participation: shifts that depend on how often a sample was drawn. Given the draws, which depend on no data, every
  release is Gaussian however adaptive, and divergences are jointly convex: the curve is at most the mean over counts.
- Sampled: (1 - q) N(low, 1) + q N(high, 1) against N(0, 1), both directions. low = 0 is Poisson sampling; low > 0 is
  a table of stored gradients, which shows a sample in every release (see `jaxfl.privacy.gossip.proven`).
- Replaced: delta(e) = q delta_Gauss(log(1 + (exp(e) - 1) / q)) for e >= 0, mirrored for e < 0: a batch of fixed size
  and one sample exchanged for another (Balle, Barthe, Gaboardi 2018, arXiv:1807.01647; Zhu, Dong, Wang 2022,
  arXiv:2106.08567, whose Theorem 10 also lets dominating pairs be composed adaptively).

Sampled and replaced losses are put on the grid 0, +-h, +-2h, ...: what falls between two points is divided between them
such that its probability is kept under both distributions ("connect the dots", Doroshenko et al. 2022,
arXiv:2207.04380), which can only raise every delta. Masses come from differences of normal tails, never from
differences of deltas, so that no probability is lost to rounding. Composition is one power of a Fourier transform.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
import scipy.fft
import scipy.optimize
import scipy.signal
import scipy.stats
from scipy.special import log_ndtr, ndtr

_TAIL = 9.5  # normal quantile; the 1e-21 beyond it counts as an infinite loss
_MAX_BINS = 2**19  # of one release: a wider grid gets a larger step, which only loosens the bound
_MAX_COMPOSED_BINS = 2**21
_WINDOW_TAIL = 1e-15  # mass that composition may lose at each end; it counts as an infinite loss
_ROUNDING = 1e-15  # of a Fourier transform, per composed release; taken out of delta


class Losses(NamedTuple):
    """A privacy loss on a grid, rounded such that no delta is too small."""

    step: float  # h
    lowest: int  # the first loss is lowest * step
    probabilities: np.ndarray  # (m,), float64
    infinite: float  # probability of an infinite loss


class Curve(NamedTuple):
    """delta at the epsilons 0, h, 2h, ...; linear in exp(epsilon) between them."""

    step: float
    deltas: np.ndarray  # (m,), float64, falling
    slack: float  # part of delta that belongs to rounding errors


def gaussian_delta(dp_epsilon: float, mu: float | np.ndarray) -> np.ndarray:
    """delta of N(mu, 1) against N(0, 1), elementwise in mu >= 0; for dp_epsilon >= 0.

    Example:
        >>> round(float(gaussian_delta(1.0, 1.0)), 8)
        0.12693674
    """
    mu = np.asarray(mu, np.float64)
    shift = np.where(mu > 0, mu, 1.0)
    upper = log_ndtr(shift / 2 - dp_epsilon / shift)
    gap = dp_epsilon + log_ndtr(-shift / 2 - dp_epsilon / shift) - upper
    return np.where(mu > 0, -np.exp(upper) * np.expm1(np.minimum(gap, 0.0)), 0.0)


def gaussian_epsilon(mu: float, dp_delta: float) -> float:
    """epsilon of N(mu, 1) against N(0, 1), from above.

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 6)
        4.377178
    """
    return participation_epsilon(np.array([mu]), np.ones(1), dp_delta)


def participation_epsilon(mus: np.ndarray, probabilities: np.ndarray, dp_delta: float) -> float:
    """Smallest epsilon with sum_j probabilities[j] delta_Gauss(epsilon; mus[j]) <= dp_delta, from above.

    Args:
        mus: (m,), shift of all releases together, at least 0.
        probabilities: (m,), sum at most 1; what is missing to 1 is counted as an infinite loss by the caller.
        dp_delta: in (0, 1).
    """
    largest = float(mus.max())
    if dp_delta <= 0 or not math.isfinite(largest):
        return math.inf

    def log_ratio(dp_epsilon: float) -> float:
        found = float(np.sum(probabilities * gaussian_delta(dp_epsilon, mus)))
        return math.log(max(found, 1e-300) / dp_delta)

    if largest == 0 or log_ratio(0.0) <= 0:
        return 0.0
    # Above it even the largest shift alone meets dp_delta: Chernoff's bound on a normal tail.
    highest = largest**2 / 2 + largest * math.sqrt(2 * math.log(1 / dp_delta))
    root = cast(float, scipy.optimize.brentq(log_ratio, 0.0, highest + 1e-9, xtol=1e-10 * highest))
    return root + 1e-9 * highest  # above the root, which is found to within xtol


def grid_step(sampling_rate: float, noise_multiplier: float, high: float) -> float:
    """h for `sampled` and `replaced`: q / (20 z), or up to q / (5 z) where that keeps one release below 65,536 bins.

    Losses of small releases are spread over about q / z. A grid that is coarse against this, such as 1e-4 for q / z =
    4e-5, overstates epsilon many times over.
    """
    coarsest = sampling_rate / (5 * noise_multiplier)
    highest_loss = float(_loss(np.array([high + _TAIL]), sampling_rate, 0.0, high)[0])
    return min(coarsest, max(coarsest / 4, highest_loss / 2**16))


def sampled(sampling_rate: float, low: float, high: float, step: float) -> tuple[Losses, Losses]:
    """Losses of (1 - q) N(low, 1) + q N(high, 1) against N(0, 1), and of N(0, 1) against that.

    Args:
        sampling_rate: q, in (0, 1).
        low: shift of a release without the sample, at least 0.
        high: shift of a release with it, above `low`.
        step: of the grid; larger where the grid would exceed the bins allowed.
    """
    top = high + _TAIL
    lowest_loss, highest_loss = _loss(np.array([-_TAIL, top]), sampling_rate, low, high)
    step = max(step, (highest_loss - lowest_loss) / _MAX_BINS)
    first, last = math.floor(lowest_loss / step), math.ceil(highest_loss / step)
    inner = _inverse(step * np.arange(first + 1, last), sampling_rate, low, high)
    edges = np.concatenate([[-_TAIL], np.clip(inner, -_TAIL, top), [top]])
    with_sample, without = _masses(edges, sampling_rate, low, high)
    forward = _divide(with_sample, without, step * first, step)
    backward = _divide(without[::-1], with_sample[::-1], -step * last, step)
    tail_without = 2 * ndtr(-_TAIL)  # both ends together, more than enough
    return (
        Losses(step, first, forward, tail_without),
        Losses(step, -last, backward, tail_without),
    )


def replaced(sampling_rate: float, shifts: np.ndarray, weights: np.ndarray, step: float) -> Losses:
    """Losses of the profile sum_j weights[j] q delta_Gauss(log(1 + (exp(e) - 1) / q); shifts[j]), mirrored below 0.

    For e >= 0 this is the profile of `sampled` with low = 0, below 0 that of its other direction.

    Args:
        sampling_rate: q, in (0, 1), probability that the sample is in the batch.
        shifts: (m,), above 0: change of the release over noise_std when the sample is in it j times.
        weights: (m,), their probabilities given that it is in; what is missing to 1 counts as an infinite loss.
        step: of the grid; larger where the grid would exceed the bins allowed.
    """
    top = shifts.max() + _TAIL
    highest_loss = float(_loss(np.array([top]), sampling_rate, 0.0, shifts.max())[0])
    step = max(step, 2 * highest_loss / _MAX_BINS)
    last = math.ceil(highest_loss / step)
    losses = step * np.arange(last + 1)
    probabilities = np.zeros(2 * last + 1)
    infinite = sampling_rate * max(0.0, 1 - float(weights.sum()))
    for shift, weight in zip(shifts, weights, strict=True):
        edges = np.minimum(_inverse(losses, sampling_rate, 0.0, shift), top)
        with_sample, without = _masses(edges, sampling_rate, 0.0, shift)
        probabilities[last:] += weight * _divide(with_sample, without, 0.0, step)
        probabilities[: last + 1] += weight * _divide(without[::-1], with_sample[::-1], -step * last, step)
        # What is left has no loss at all. Beyond the last edge both distributions count as an infinite loss.
        probabilities[last] += weight * max(0.0, 1 - float(with_sample.sum() + without.sum()) - 2 * ndtr(-_TAIL))
        infinite += weight * 2 * ndtr(-_TAIL)
    return Losses(step, -last, probabilities, infinite)


def compose(losses: Losses, num_times: int) -> Curve | None:
    """The curve of `num_times` releases of which each has these losses; None when the grid would be too large.

    Args:
        losses: of one release.
        num_times: at least 1.
    """
    found = sum_of_draws(losses.probabilities, num_times)
    if found is None:
        return None
    lowest, composed = found
    infinite = 2 * _WINDOW_TAIL - math.expm1(num_times * math.log1p(-min(losses.infinite, 0.5)))
    return _curve(composed, lowest + num_times * losses.lowest, losses.step, infinite, rounding_error(num_times))


def sum_of_draws(p: np.ndarray, num_times: int) -> tuple[int, np.ndarray] | None:
    """First index and probabilities of the sum of `num_times` independent indices drawn from p.

    What lies outside has probability at most 2e-15 and is missing, or in a wrong place besides; None when the result
    would be too large.
    """
    lowest, highest = _window(p, num_times)
    length = max(highest - lowest + 1, len(p))
    if length > _MAX_COMPOSED_BINS:
        return None
    size = cast(int, scipy.fft.next_fast_len(length, real=True))
    folded = np.fft.irfft(np.fft.rfft(p, size) ** num_times, size)
    return lowest, np.maximum(np.roll(folded, -(lowest % size))[: highest - lowest + 1], 0.0)


def rounding_error(num_times: int) -> float:
    """Bound on the error of a probability of `sum_of_draws`."""
    return (num_times + 10) * _ROUNDING


def curve_epsilon(curve: Curve, dp_delta: float | np.ndarray) -> np.ndarray:
    """Smallest epsilon >= 0 whose delta is at most dp_delta, elementwise; infinite where the grid knows none."""
    wanted = np.asarray(dp_delta, np.float64) - curve.slack
    after = np.searchsorted(-curve.deltas, -wanted)  # first grid point whose delta is small enough
    right = np.clip(after, 1, len(curve.deltas) - 1)
    upper, lower = curve.deltas[right - 1], curve.deltas[right]
    fraction = np.clip((upper - wanted) / np.maximum(upper - lower, 1e-300), 0.0, 1.0)
    inside = curve.step * (right - 1) + np.log1p(fraction * np.expm1(curve.step))
    return np.where(after == 0, 0.0, np.where(after == len(curve.deltas), np.inf, inside))


def curve_delta(curve: Curve, dp_epsilon: float) -> float:
    """delta at one epsilon >= 0, from above."""
    index = dp_epsilon / curve.step
    left = min(int(index), len(curve.deltas) - 1)
    right = min(left + 1, len(curve.deltas) - 1)
    fraction = min(1.0, math.expm1((index - left) * curve.step) / math.expm1(curve.step))
    return float(curve.deltas[left] + fraction * (curve.deltas[right] - curve.deltas[left]) + curve.slack)


def triangle_epsilon(forward: Curve, backward: Curve, dp_delta: float) -> float:
    """Smallest epsilon found of D against D', when `forward` is D against Z and `backward` Z against D'.

    P(S) <= exp(e1) Z(S) + d1 and Z(S) <= exp(e2) P'(S) + d2 give P(S) <= exp(e1 + e2) P'(S) + d1 + exp(e1) d2 for
    every e1: delta is shared out in many ways, each of which is a bound.
    """
    shares = 1 / (1 + np.exp(np.linspace(-7, 7, 57)))
    first = curve_epsilon(forward, shares * dp_delta)
    second = curve_epsilon(backward, (1 - shares) * dp_delta * np.exp(-first))
    return float(np.min(first + second))


def _loss(x: np.ndarray, q: float, low: float, high: float) -> np.ndarray:
    """log of the density ratio at x."""
    return np.logaddexp(np.log1p(-q) + low * x - low**2 / 2, math.log(q) + high * x - high**2 / 2)


def _inverse(losses: np.ndarray, q: float, low: float, high: float) -> np.ndarray:
    """x at which the loss is so large; minus infinity where it never is so small."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if low == 0:
            excess = losses + np.log(-np.expm1(np.log1p(-q) - losses))  # log(exp(loss) - (1 - q))
            return np.where(losses > np.log1p(-q), (excess - math.log(q)) / high + high / 2, -np.inf)
    # The loss is convex and rising, so Newton's method falls to the root from any point above it, such as the smaller
    # of the roots that the two Gaussians would have alone.
    x = np.minimum((losses - np.log1p(-q)) / low + low / 2, (losses - math.log(q)) / high + high / 2)
    for _ in range(50):
        absent = np.log1p(-q) + low * x - low**2 / 2
        present = math.log(q) + high * x - high**2 / 2
        value = np.logaddexp(absent, present)
        change = (value - losses) / (low + (high - low) * np.exp(present - value))
        x = x - change
        if np.max(np.abs(change), initial=0.0) < 1e-11:
            break
    return x


def _masses(edges: np.ndarray, q: float, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Probability of each interval between edges under the mixture and under N(0, 1), both (len(edges) - 1,)."""

    def between(shift: float) -> np.ndarray:
        # From the nearer tail: a difference of numbers near 1 would lose the small ones.
        x = edges - shift
        left, right = ndtr(x), ndtr(-x)
        return np.maximum(np.where(x[:-1] > 0, right[:-1] - right[1:], left[1:] - left[:-1]), 0.0)

    return (1 - q) * between(low) + q * between(high), between(0.0)


def _divide(upper: np.ndarray, lower: np.ndarray, first_loss: float, step: float) -> np.ndarray:
    """Masses on the m + 1 grid points around m intervals, the same under both distributions as in the intervals.

    a + b = upper and a exp(-e) + b exp(-e - h) = lower for an interval [e, e + h].
    """
    losses = first_loss + step * np.arange(len(upper))
    exact = lower > 1e-290  # below, float64 loses digits: all goes to the larger loss
    scaled = np.exp(np.where(exact, np.log(np.where(exact, lower, 1.0)) + losses, -np.inf))
    right = np.clip(np.where(exact, (upper - scaled) / -math.expm1(-step), upper), 0.0, upper)
    return np.append(upper - right, 0.0) + np.append(0.0, right)


def _window(p: np.ndarray, num_times: int) -> tuple[int, int]:
    """First and last index of the sum of `num_times` draws from p that matter, by Chernoff's bound."""
    lowest, highest = 0, (len(p) - 1) * num_times
    needed = -math.log(_WINDOW_TAIL)
    # Blocks of indices at their last (first) index: an upper (lower) sum, at a cost that does not grow with the grid.
    block = -(-len(p) // 4096)
    starts = np.arange(0, len(p), block)
    masses = np.add.reduceat(p, starts)
    ends = np.minimum(starts + block, len(p)) - 1
    for order in 2.0 ** np.arange(-6, 10) / max(len(p) - 1, 1):
        last = len(p) - 1  # the largest exponent is taken out, so that nothing overflows
        rise = math.log(float(masses @ np.exp(order * (ends - last)))) + order * last
        fall = math.log(float(masses @ np.exp(-order * starts)))
        highest = min(highest, math.ceil((num_times * rise + needed) / order))
        lowest = max(lowest, math.floor(-(num_times * fall + needed) / order))
    return lowest, max(highest, lowest)


def _curve(p: np.ndarray, lowest: int, step: float, infinite: float, slack: float) -> Curve:
    """delta at 0, h, 2h, ... of the losses (lowest + j) h with probabilities p."""
    if lowest > 0:
        p = np.concatenate([np.zeros(lowest), p])
    above = p[max(-lowest, 0) + 1 :] if lowest <= 0 else p[1:]
    # At the grid point i: A_i = sum over losses above of p, B_i = that of p exp(e_i - loss), by recursion from the top.
    mass = np.append(np.cumsum(above[::-1])[::-1], 0.0)
    decay = math.exp(-step)
    discounted = np.append(scipy.signal.lfilter([decay], [1.0, -decay], above[::-1])[::-1], 0.0)
    deltas = np.maximum(mass - discounted, 0.0) + infinite
    return Curve(step, np.minimum.accumulate(deltas), slack)


@lru_cache(maxsize=4)
def sampled_curves(sampling_rate: float, low: float, high: float, step: float, num_times: int) -> tuple[Curve, Curve]:
    """`sampled`, composed, in both directions. A grid too large to compose is made coarser."""
    forward, backward = _sampled(sampling_rate, low, high, step)
    curves = compose(forward, num_times), compose(backward, num_times)
    if curves[0] is None or curves[1] is None:
        return sampled_curves(sampling_rate, low, high, 2 * forward.step, num_times)
    return curves[0], curves[1]


@lru_cache(maxsize=4)
def replaced_curve(
    sampling_rate: float, shifts: tuple[float, ...], weights: tuple[float, ...], step: float, num_times: int
) -> Curve:
    """`replaced`, composed. A grid too large to compose is made coarser."""
    losses = _replaced(sampling_rate, shifts, weights, step)
    curve = compose(losses, num_times)
    if curve is None:
        return replaced_curve(sampling_rate, shifts, weights, 2 * losses.step, num_times)
    return curve


# The search for a number of rounds composes the same release many times.
_sampled = lru_cache(maxsize=4)(sampled)


@lru_cache(maxsize=4)
def _replaced(q: float, shifts: tuple[float, ...], weights: tuple[float, ...], step: float) -> Losses:
    return replaced(q, np.asarray(shifts), np.asarray(weights), step)
