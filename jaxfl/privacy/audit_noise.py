"""Statistics of a run's noise and batches, each with the law that a right run gives it.

Noise is the difference of two rounds from the same state, one with noise and one without. In units of the claimed
standard deviation it is a set of independent normal numbers z[round, node, coordinate] in every layer:

- noise of layers: the sum of squares of any part of the run (a layer, there a node, a round, a coordinate) is
  chi-square. So is that of sums over rounds;
- repeated noise: nodes, rounds, releases and coordinates are vectors of such numbers. The squared correlation of two of
  N numbers is 1 / N on average, with variance 2 (N - 1) / (N^2 (N + 2)), and different pairs are uncorrelated. Noise
  that is used twice, in whatever order, makes the sum over all pairs too large. Coordinates at one distance from each
  other, within a layer or across two, have a correlation of their own;
- shape of the noise: the mean fourth power is 3, and the distribution is normal (Kolmogorov and Smirnov).

Batches show in rounds without noise, with all canaries in the data. A Poisson batch holds each of them with probability
q, independently of all others, of rounds and of nodes. So much is known of counts in any part of the run, of their
variance, and of the correlations of rounds and nodes. The largest visit is what a sample adds at most.

A check has a list of tests and reports the one with the smallest p-value, which it multiplies by their number, and the
smallest error that any of them sees. Sums of squares are taken for gamma variables of their mean and variance.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy

POWER = 0.95  # probability with which the smallest error named is detected
_ROUNDED = 1.01  # float32 rounding may let a sample add this many times its share
_LEAST = 500  # products from which on their sum counts as normal
_LEAST_VARIANCE = 25  # of a binomial count that counts as normal
_SHORTEST = 8  # numbers of a vector whose correlations are looked at
_AXES = ("round", "node", "coordinate")


class Mechanism(NamedTuple):
    """Facts that an accountant was told of the mechanism, as they are seen in one canary's coordinate."""

    noise_std: float  # of one release
    signal: float  # mean over the draws of what an included canary adds over all releases
    num_releases: int  # K
    visit: float | None = None  # most that a batch with the canary adds to one release; None: not looked at
    rate: float | None = None  # probability that a Poisson batch has the canary; None: batches are not looked at
    stored: bool = False  # a gradient table shows an included canary in every release, and so hides its batches


class Check(NamedTuple):
    """One number of a mechanism, measured and claimed."""

    name: str
    measured: float
    claimed: float
    limit: float  # confidence limit of `measured`, on the side of what is claimed
    refuted: bool
    smallest_error: float  # an error by this factor is detected with probability 0.95; infinite where no error is


Make = Callable[[float], Check]
"""Share of the significance -> the check."""


class _Tests(NamedTuple):
    """Tests of one kind."""

    chances: np.ndarray  # p-values, any shape
    check: Callable[[tuple[int, ...], float], Check]  # (number of a test, significance of one) -> the test as a check


def noise_check(name: str, sum_of_squares: float, degrees: int, claimed_std: float, significance: float) -> Check:
    """Check the standard deviation of centred normal numbers by the sum of their squares, on both sides.

    Args:
        name: of the check.
        sum_of_squares: of the numbers.
        degrees: how many.
        claimed_std: their standard deviation.
        significance: in (0, 1); half of it for each side.
    """
    result = _gamma_check(name, sum_of_squares / claimed_std**2, degrees, 2 * degrees, 0.5, significance)
    return result._replace(
        measured=claimed_std * result.measured, claimed=claimed_std, limit=claimed_std * result.limit
    )


def noise_checks(noise: Mapping[str, np.ndarray], claimed_std: float, counts: np.ndarray) -> list[Make]:
    """Checks of noise that is known number by number.

    Args:
        noise: name of a layer -> (K, n, *leaf), noise in every message, or in the first ones.
        claimed_std: standard deviation of one release.
        counts: (K,), releases that each message adds up; messages without any are left out.
    """
    layers = {}
    for name, leaf in noise.items():
        sent = counts[: len(leaf)] > 0
        scale = claimed_std * np.sqrt(counts[: len(leaf)][sent])
        if sent.any():
            layers[name] = leaf[sent].reshape(len(scale), leaf.shape[1], -1) / scale[:, None, None]
    if not layers:
        return []
    longest = max(map(len, layers.values()))
    whole = np.concatenate([leaf for leaf in layers.values() if len(leaf) == longest], axis=2)
    parts, repeated, fourth = [], [*_lags(layers)], np.square(np.square(whole)).sum()
    shapes = [_gamma_tests("fourth moment", fourth, 3 * whole.size, 96 * whole.size, 1.0)]
    for name, leaf in {**layers, "all layers": whole}.items():
        rounds, nodes, width = leaf.shape
        parts += [_squares(name, leaf, kept) for kept in ((), (0,), (1,), (0, 1), (2,), (1, 2))]
        parts.append(_squares(f"{name}, all rounds together", leaf.sum(0, keepdims=True) / math.sqrt(rounds), (1,)))
        releases = leaf.reshape(-1, width)
        repeated += _pairs(f"{name}, nodes", leaf.swapaxes(0, 1).reshape(nodes, -1))
        repeated += _pairs(f"{name}, rounds", leaf.reshape(rounds, -1))
        repeated += _pairs(f"{name}, releases", releases) + _pairs(f"{name}, coordinates", releases.T)
        shapes.append(_distribution(name, leaf))
    return [_worst("noise of layers", parts), _worst("repeated noise", repeated), _worst("shape of the noise", shapes)]


def batch_checks(added: np.ndarray, visit: float, rate: float, counts: np.ndarray) -> list[Make]:
    """Checks of Poisson batches by what canaries add to messages without noise.

    Args:
        added: (K, n, c), of each canary; NaN where a table hides it.
        visit, rate: as in `Mechanism`.
        counts: (K,), releases that each message adds up.
    """
    added, counts, shown = added[counts > 0], counts[counts > 0, None, None], ~np.isnan(added[0])
    visits, variance = added / visit, rate * (1 - rate)
    largest = float(np.nanmax(np.abs(visits) / counts))
    unit = np.nan_to_num((visits - counts * rate) / np.sqrt(counts * variance))
    sums, sizes = unit.sum(axis=2), np.broadcast_to(shown.sum(axis=1), unit.shape[:2])
    excess, number = 1 / variance - 6, int(sizes.sum())  # kurtosis of a binary number; sums of them have less
    tests = [
        _gamma_tests("sizes", np.square(sums).sum(), number, 2 * np.square(sizes).sum() + excess * number),
        _gamma_tests("visits", np.square(unit).sum(), number, number * (2 + excess)),
        *_pairs("nodes", unit.swapaxes(0, 1).reshape(len(shown), -1), excess),
        *_pairs("rounds", unit[:, shown], excess),
    ]
    for kept in ((), (0,), (1,), (0, 1)):
        others = tuple({0, 1} - set(kept))
        if variance * sizes.sum(axis=others).min() >= _LEAST_VARIANCE:
            label = functools.partial(_where, "rate", [_AXES[axis] for axis in kept])
            tests.append(_means(label, sums.sum(axis=others), sizes.sum(axis=others)))
    most = Check("largest visit", largest, 1.0, largest, largest > _ROUNDED, _ROUNDED)
    return [lambda share: most, _worst("batches", tests)]


def quantile(tail: float) -> float:
    """Compute the number that a standard normal variable exceeds with this probability."""
    return -float(scipy.special.ndtri(tail))


def _worst(name: str, tests: Sequence[_Tests]) -> Make:
    """The check that reports the test with the smallest p-value."""
    worst = min(tests, key=lambda one: one.chances.min())
    place = np.unravel_index(int(worst.chances.argmin()), worst.chances.shape)
    count = sum(one.chances.size for one in tests)

    def make(share: float) -> Check:
        result = worst.check(tuple(map(int, place)), share / count)
        smallest = min(one.check((0,) * one.chances.ndim, share / count).smallest_error for one in tests)
        return result._replace(name=f"{name} ({result.name})", smallest_error=smallest)

    return make


def _gamma_check(name: str, total: float, mean: float, variance: float, root: float, share: float) -> Check:
    """Check a sum of squares, on both sides; the root of its ratio to the mean is shown."""
    shape, scale = mean**2 / variance, variance / mean
    tails = np.array([share / 2, 1 - share / 2, 1 - POWER, POWER])
    low, high, missed, seen = map(float, scipy.special.gammaincinv(shape, tails) * scale)
    lower, upper = (total / high) ** root, (total / max(low, 1e-300)) ** root
    ratio, smallest = (total / mean) ** root, max(seen / max(low, 1e-300), high / missed) ** root
    return Check(name, ratio, 1.0, upper if ratio < 1 else lower, not lower <= 1 <= upper, smallest)


def _gamma_tests(
    where: str, totals: np.ndarray | float, mean: float, variance: float, root: float = 0.5, axes: Sequence[str] = ()
) -> _Tests:
    """Tests of sums of squares of equal law, on both sides."""
    totals = np.asarray(totals)
    shape, at = mean**2 / variance, totals * mean / variance
    smaller = np.minimum(scipy.special.gammainc(shape, at), scipy.special.gammaincc(shape, at))

    def check(place, share):
        return _gamma_check(_where(where, axes, place), float(totals[place]), mean, variance, root, share)

    return _Tests(np.minimum(1.0, 2 * smaller), check)


def _where(name: str, axes: Sequence[str], place: tuple[int, ...]) -> str:
    """Words for a place in a run."""
    return ", ".join([name, *(f"{axis} {number}" for axis, number in zip(axes, place, strict=True))])


def _squares(name: str, values: np.ndarray, kept: tuple[int, ...]) -> _Tests:
    """Tests of the sums of squares in each cell of the axes that are kept."""
    others = tuple({0, 1, 2} - set(kept))
    degrees = math.prod(values.shape[axis] for axis in others)
    axes = [_AXES[axis] for axis in kept]
    return _gamma_tests(name, np.square(values).sum(axis=others), degrees, 2 * degrees, axes=axes)


def _pairs(name: str, vectors: np.ndarray, excess: float = 0.0) -> list[_Tests]:
    """Test of the squared correlations of all pairs of vectors (s, N), of numbers with an excess kurtosis."""
    count, size = vectors.shape
    number = count * (count - 1) // 2
    if number == 0 or size < _SHORTEST:
        return []
    norms = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    unit = vectors / np.where(norms > 0, norms, 1)
    gram = unit @ unit.T if count <= size else unit.T @ unit  # of equal sums of squares
    total = (np.square(gram).sum() - np.count_nonzero(norms)) / 2
    of_one = 2 * (size - 1) / (size**2 * (size + 2)) + excess**2 / size**3
    return [_gamma_tests(name, max(total, 0.0), number / size, number * of_one)]


def _lags(layers: Mapping[str, np.ndarray]) -> Iterator[_Tests]:
    """Tests of the correlation at each distance of coordinates, within each layer and across each two."""
    length = 2 * max(leaf.shape[2] for leaf in layers.values())
    waves = {name: np.fft.rfft(leaf, length) for name, leaf in layers.items()}
    for one, other in itertools.combinations_with_replacement(layers, 2):
        rounds = min(len(layers[one]), len(layers[other]))
        products = (waves[one][:rounds].conj() * waves[other][:rounds]).sum(axis=(0, 1))
        own, others = layers[one].shape[2], layers[other].shape[2]
        distances = np.arange(1 if one == other else 1 - own, others)
        overlap = np.minimum(own, others - distances) - np.maximum(0, -distances)
        sizes = overlap * rounds * layers[one].shape[1]
        distances, sizes = distances[sizes >= _LEAST], sizes[sizes >= _LEAST]
        if sizes.size:
            names = one if one == other else f"{one} and {other}"
            label = functools.partial(lambda names, apart, place: f"{names}, {apart[place]} apart", names, distances)
            yield _means(label, np.fft.irfft(products, length)[distances], sizes)


def _means(label: Callable[[tuple[int, ...]], str], sums: np.ndarray, sizes: np.ndarray) -> _Tests:
    """Tests of sums of uncorrelated numbers of mean 0 and variance 1, taken for normal; 1 + their mean is shown."""

    def check(place, share):
        mean, error = float(sums[place] / sizes[place]), 1 / math.sqrt(sizes[place])
        width, seen = quantile(share / 2) * error, quantile(1 - POWER) * error
        limit = 1 + mean - math.copysign(width, mean)
        return Check(label(place), 1 + mean, 1.0, limit, abs(mean) > width, 1 + width + seen)

    return _Tests(np.asarray(2 * scipy.special.ndtr(-np.abs(sums) / np.sqrt(sizes))), check)


def _distribution(name: str, values: np.ndarray) -> _Tests:
    """Kolmogorov's test of standard normal numbers; 1 + the largest distance of the distributions is shown."""
    below, size = scipy.special.ndtr(np.sort(values, axis=None)), values.size
    steps, root = np.arange(size + 1) / size, math.sqrt(size)
    distance = float(max((steps[1:] - below).max(), (below - steps[:-1]).max()))

    def check(place, share):
        width, seen = (float(scipy.special.kolmogi(tail)) / root for tail in (share, 1 - POWER))
        limit = 1 + distance - width
        return Check(f"{name}, distribution", 1 + distance, 1.0, limit, limit > 1, 1 + width + seen)

    return _Tests(np.asarray(scipy.special.kolmogorov(root * distance)), check)
