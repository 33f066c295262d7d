"""Composition of privacy losses, and epsilon from a curve of deltas, without losing a small delta to rounding.

The privacy loss of an outcome is the log of how much likelier the outcome is on one data set than on its neighbor. A
loss on a grid is composed by one power of a Fourier transform. Each probability is off by about 1e-15, so that a delta
of that size would drown. For a small delta the losses are tilted first: probabilities times exp(theta loss), divided by
their sum M(theta), which moves the mass to where the tail is. Composed and tilted back,

    delta(e) = M^K sum over losses l > e of T(l) exp(-theta l) (1 - exp(e - l)),

and an error of T counts M^K exp(-theta e) max_x exp(-theta x) (1 - exp(-x)) times: Chernoff's bound on delta(e) itself,
times 1e-15. Any theta gives a bound; the one whose Chernoff bound meets the wanted delta first is taken.

R. Gruebel, R. Hermesmeier, "Computation of compound distributions I: aliasing errors and exponential tilting", ASTIN
Bulletin 1999; W. Alghamdi et al., "The saddle-point method in differential privacy", ICML 2023 (the same theta).
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np
import scipy

_MAX_COMPOSED_BINS = 2**21
_WINDOW_TAIL = 1e-15  # mass that composition may lose at each end; it counts as an infinite loss
_ROUNDING = 1e-15  # of a Fourier transform, per composed release; taken out of delta
_SMALL = 1e3  # times what composition may lose: a delta below that is a small one


class Losses(NamedTuple):
    """A privacy loss on a grid, rounded such that no delta is too small."""

    step: float  # h
    lowest: int  # the first loss is lowest * step
    probabilities: np.ndarray  # (m,), float64
    infinite: float  # probability of an infinite loss


class Curve(NamedTuple):
    """Upper bounds on delta at the epsilons 0, h, 2h, ...; linear in exp(epsilon) between them."""

    step: float
    deltas: np.ndarray  # (m,), float64, falling


def compose(losses: Losses, num_times: int, dp_delta: float | None = None) -> Curve | None:
    """Compose `num_times` releases, each with these losses, to a curve; None when the grid would be too large.

    Args:
        losses: of one release.
        num_times: at least 1.
        dp_delta: the delta that the curve is wanted for. Where it `is_small` the losses are tilted; by default not.
    """
    tilt = 0.0 if dp_delta is None or not is_small(dp_delta, num_times) else _tilt(losses, num_times, dp_delta)
    tilted, log_moment = _tilted(losses, tilt)
    total = sum_of_draws(tilted, num_times)
    if total is None:
        return None
    lowest, composed = total
    lowest += num_times * losses.lowest
    # The part of all losses above 0, at the grid points 0, 1, ...
    above = np.concatenate([np.zeros(lowest - 1), composed]) if lowest > 0 else composed[1 - lowest :]
    # At the point i: sums over losses l above of p exp(tilt (e_i - l)), and of that times exp(e_i - l), from the top.
    mass, discounted = (_discounted(above, rate * losses.step) for rate in (tilt, 1 + tilt))
    lost = (2 * _WINDOW_TAIL + rounding_error(num_times)) * math.exp(_log_worst(tilt))
    epsilons = losses.step * np.arange(len(mass))
    with np.errstate(over="ignore"):  # far from the tail a tilted curve says nothing
        deltas = np.exp(num_times * log_moment - tilt * epsilons) * (np.maximum(mass - discounted, 0.0) + lost)
    infinite = -math.expm1(num_times * math.log1p(-min(losses.infinite, 0.5)))
    return Curve(losses.step, np.minimum(np.minimum.accumulate(deltas + infinite), 1.0))


def is_small(dp_delta: float, num_times: int) -> bool:
    """True if what composition may lose matters to so small a delta."""
    return dp_delta < _SMALL * (2 * _WINDOW_TAIL + rounding_error(num_times))


def sum_of_draws(p: np.ndarray, num_times: int) -> tuple[int, np.ndarray] | None:
    """First index and probabilities of the sum of `num_times` independent indices drawn from p.

    Sums outside the returned range have probability at most 2e-15; they are missing, or counted at a wrong index. None
    when the result would be too large.
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
    """Smallest epsilon >= 0 whose delta is at most dp_delta, elementwise; infinite where the grid has none."""
    wanted = np.asarray(dp_delta, np.float64)
    after = np.searchsorted(-curve.deltas, -wanted)  # first grid point whose delta is small enough
    right = np.clip(after, 1, len(curve.deltas) - 1)
    upper, lower = curve.deltas[right - 1], curve.deltas[right]
    fraction = np.clip((upper - wanted) / np.maximum(upper - lower, 1e-300), 0.0, 1.0)
    inside = curve.step * (right - 1) + np.log1p(fraction * np.expm1(curve.step))
    return np.where(after == 0, 0.0, np.where(after == len(curve.deltas), np.inf, inside))


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


def _discounted(above: np.ndarray, rate: float) -> np.ndarray:
    """sum_{j > i} above[j] exp(rate (i - j)) for i = 0, 1, ..., where above[0] belongs to j = 1."""
    decay = math.exp(-rate)
    return np.append(decaying_sums(decay * above[::-1], decay)[::-1], 0.0)


def decaying_sums(values: np.ndarray, decay: float) -> np.ndarray:
    """y[i] = values[i] + decay y[i - 1], where y[-1] = 0: a triangular system with one band.

    Examples:
        >>> decaying_sums(np.ones(4), 0.5).tolist()
        [1.0, 1.5, 1.75, 1.875]
    """
    band = np.empty((2, len(values)), order="F")
    band[0], band[1] = 1.0, -decay
    return scipy.linalg.blas.dtbsv(1, band, values, lower=1, diag=1) if len(values) else values


def convolved(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Probabilities of the sum of two independent indices, each off by a transform's rounding."""
    length = len(first) + len(second) - 1
    size = cast(int, scipy.fft.next_fast_len(length, real=True))
    return np.maximum(np.fft.irfft(np.fft.rfft(first, size) * np.fft.rfft(second, size), size)[:length], 0.0)


def _log_worst(tilt: float) -> float:
    """log of max over x >= 0 of exp(-tilt x) (1 - exp(-x)) = tilt^tilt / (1 + tilt)^(1 + tilt)."""
    return 0.0 if tilt == 0 else -tilt * math.log1p(1 / tilt) - math.log1p(tilt)


def _tilted(losses: Losses, tilt: float) -> tuple[np.ndarray, float]:
    """Probabilities times exp(tilt loss), made to sum to 1, and the log of their sum M(tilt)."""
    if tilt == 0:
        return losses.probabilities, 0.0
    with np.errstate(divide="ignore"):
        logs = np.log(losses.probabilities) + tilt * losses.step * (
            losses.lowest + np.arange(len(losses.probabilities))
        )
    log_moment = float(np.asarray(scipy.special.logsumexp(logs)))
    return np.exp(logs - log_moment), log_moment


def _tilt(losses: Losses, num_times: int, dp_delta: float) -> float:
    """theta whose Chernoff bound, log delta <= K log M - theta e + log worst, meets dp_delta at the smallest e."""
    block = -(-len(losses.probabilities) // 4096)  # as in `_window`
    starts = np.arange(0, len(losses.probabilities), block)
    coarse = losses._replace(
        step=block * losses.step,
        lowest=0,
        probabilities=np.add.reduceat(losses.probabilities, starts),
    )

    def needed(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        log_moment = _tilted(coarse, tilt)[1] + tilt * losses.step * losses.lowest
        return (num_times * log_moment + _log_worst(tilt) - math.log(dp_delta)) / tilt

    grid = np.linspace(-3.0, 20.0, 93)
    return math.exp(grid[int(np.argmin([needed(x) for x in grid]))])
