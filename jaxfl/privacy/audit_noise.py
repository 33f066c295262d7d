"""Statistics of a run's noise and batches, each with the law that a right run gives it.

Noise is the difference of two rounds from the same state, one with noise and one without. In units of the claimed
standard deviation it is a set of independent normal numbers z[round, node, coordinate] in every layer:

- squares: their sum over any part of the run (a node, a round, a layer, a coordinate) is chi-square. So is that of
  the sums over rounds;
- pairs: nodes, rounds, releases and coordinates are vectors of such numbers. The squared correlation of two of N
  numbers is 1 / N on average, with variance 2 (N - 1) / (N^2 (N + 2)), and different pairs are uncorrelated. Noise that
  is used twice, in whatever order, makes the sum over all pairs too large;
- lags: the correlation of coordinates at each distance from each other, within a layer and across two;
- shape: the mean fourth power is 3, and the distribution is normal (Kolmogorov and Smirnov).

Batches show in rounds without noise, with all canaries in the data. A Poisson batch holds each of them with probability
q, independently of all others, of rounds and of nodes: counts in any part of the run are binomial, and the variance of
a count and the correlations of rounds and nodes are those of independent draws.

A check has a list of tests and reports the one with the smallest p-value, which it multiplies by their number. Sums of
squares follow a gamma distribution, or are taken for one with the same mean and variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy

from jaxfl.privacy import binomial

POWER = 0.95  # probability with which the smallest error named is detected
_ROUNDED = 1.01  # float32 rounding may let a sample add this many times its share
_LEAST = 500  # products from which on their sum counts as normal


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
    found = _gamma_check(name, sum_of_squares / claimed_std**2, degrees, 2 * degrees, 0.5, significance)
    return found._replace(
        measured=claimed_std * found.measured, claimed=claimed_std, limit=claimed_std * found.limit
    )


def noise_checks(noise: Mapping[str, np.ndarray], claimed_std: float, counts: np.ndarray) -> list[Make]:
    """Checks of noise that is known number by number.

    Args:
        noise: name of a layer -> (K, n, *leaf), noise in every message, or in the first ones.
        claimed_std: standard deviation of one release.
        counts: (K,), releases that each message adds up; messages without any are left out.
    """
    if not noise:
        return []
    layers = {}
    for name, leaf in noise.items():
        number = counts[: len(leaf)]
        scaled = leaf[number > 0] / (claimed_std * np.sqrt(number[number > 0]))[:, *[None] * (leaf.ndim - 1)]
        layers[name] = scaled.reshape(*scaled.shape[:2], -1)
    longest = max(map(len, layers.values()))
    whole = np.concatenate([leaf for leaf in layers.values() if len(leaf) == longest], axis=2)
    groups = {**layers, "all layers": whole}

    def pairs(vectors: Callable[[np.ndarray], np.ndarray]) -> Iterable[_Tests]:
        return (_pairs(name, vectors(leaf)) for name, leaf in groups.items())

    def nodes(leaf):
        return leaf.swapaxes(0, 1).reshape(leaf.shape[1], -1)

    checks = {
        "noise by node": [_squares("", whole, (1,))],
        "noise by round": [_squares("", whole, (0,))],
        "noise of layers": [
            *(_squares(name, leaf, kept) for name, leaf in layers.items() for kept in ((), (0,), (1,), (0, 1))),
            *(
                _squares(f"{name}, sum of rounds", leaf.sum(axis=0, keepdims=True) / math.sqrt(len(leaf)), (1,))
                for name, leaf in layers.items()
            ),
        ],
        "noise of coordinates": [
            _squares(name, leaf, kept) for name, leaf in layers.items() for kept in ((2,), (1, 2))
        ],
        "noise between nodes": pairs(nodes),
        "noise between rounds": pairs(lambda leaf: leaf.reshape(len(leaf), -1)),
        "noise between releases": pairs(lambda leaf: leaf.reshape(-1, leaf.shape[2])),
        "noise between coordinates": pairs(lambda leaf: leaf.reshape(-1, leaf.shape[2]).T),
        "noise at a distance": _lags(layers),
        "shape of the noise": [_fourth(whole), *(_distribution(name, leaf) for name, leaf in groups.items())],
    }
    return [make for name, tests in checks.items() for make in _worst(name, tests)]


def batch_checks(added: np.ndarray, claimed: Mechanism, counts: np.ndarray) -> list[Make]:
    """Checks of Poisson batches by what canaries add to messages without noise.

    Args:
        added: (K, n, c), of each canary; NaN where a table hides it.
        claimed: with `visit` and `rate`.
        counts: (K,), releases that each message adds up.
    """
    assert claimed.visit is not None
    assert claimed.rate is not None
    added, counts, rate = added[counts > 0], counts[counts > 0, None, None], claimed.rate
    visits, shown = added / claimed.visit, ~np.isnan(added[0])
    largest = float(np.nanmax(np.abs(visits) / counts))
    unit = np.nan_to_num((visits - counts * rate) / np.sqrt(counts * rate * (1 - rate)))
    drawn, trials = np.nan_to_num(visits), np.broadcast_to(counts * shown, visits.shape)
    # Of a binary number in units of its deviation; of sums of them, it is that many times smaller.
    excess, number = 1 / (rate * (1 - rate)) - 6, int(shown.sum())
    sizes = unit.sum(axis=2) / np.sqrt(np.maximum(shown.sum(axis=1), 1))
    of_sizes = excess * shown.shape[0] / number
    checks = {
        "batches": [
            *(_counts(drawn, trials, kept, rate) for kept in ((), (0,), (1,), (0, 1))),
            _gamma_tests("sizes", np.square(sizes).sum(), sizes.size, sizes.size * (2 + of_sizes)),
            _gamma_tests("visits", np.square(unit).sum(), len(unit) * number, len(unit) * number * (2 + excess)),
        ],
        "batches between nodes": [_pairs("", unit.swapaxes(0, 1).reshape(len(shown), -1), excess)],
        "batches between rounds": [_pairs("", unit[:, shown], excess)],
    }
    visit = Check("largest visit", largest, 1.0, largest, largest > _ROUNDED, _ROUNDED)
    return [lambda share: visit, *(make for name, tests in checks.items() for make in _worst(name, tests))]


def quantile(tail: float) -> float:
    """Compute the number that a standard normal variable exceeds with this probability."""
    return -float(scipy.special.ndtri(tail))


def _worst(name: str, tests: Iterable[_Tests]) -> list[Make]:
    """The check that reports the test with the smallest p-value; none where there are no tests."""
    several = [one for one in tests if one.chances.size]
    if not several:
        return []
    worst = min(several, key=lambda one: one.chances.min())
    place = np.unravel_index(int(worst.chances.argmin()), worst.chances.shape)
    count = sum(one.chances.size for one in several)

    def make(share: float) -> Check:
        found = worst.check(tuple(map(int, place)), share / count)
        return found._replace(name=f"{name} ({found.name})" if found.name else name)

    return [make]


def _gamma_check(name: str, total: float, mean: float, variance: float, root: float, share: float) -> Check:
    """Check a sum of squares, on both sides; the root of its ratio to the mean is shown."""
    shape, scale = mean**2 / variance, variance / mean
    low, high, missed, seen = (
        float(scipy.special.gammaincinv(shape, tail)) * scale for tail in (share / 2, 1 - share / 2, 1 - POWER, POWER)
    )
    lower, upper = total / high, math.inf if low == 0 else total / low
    limit = upper if total < mean else lower
    smallest = math.inf if low == 0 else max(seen / low, high / missed) ** root
    return Check(name, (total / mean) ** root, 1.0, limit**root, not lower <= 1 <= upper, smallest)


def _gamma_tests(
    where: str, totals: np.ndarray | float, mean: float, variance: float, root: float = 0.5, axes: Sequence[str] = ()
) -> _Tests:
    """Tests of sums of squares of equal law, on both sides."""
    totals = np.asarray(totals)
    shape, at = mean**2 / variance, totals * mean / variance
    lower, upper = scipy.special.gammainc(shape, at), scipy.special.gammaincc(shape, at)

    def check(place, share):
        return _gamma_check(_where(where, axes, place), float(totals[place]), mean, variance, root, share)

    return _Tests(np.minimum(1.0, 2 * np.minimum(lower, upper)), check)


def _where(name: str, axes: Sequence[str], place: tuple[int, ...]) -> str:
    """Words for a place in a run."""
    return ", ".join([name] * bool(name) + [f"{axis} {number}" for axis, number in zip(axes, place, strict=True)])


def _squares(name: str, values: np.ndarray, kept: tuple[int, ...]) -> _Tests:
    """Tests of the sums of squares in each cell of the axes that are kept."""
    others = tuple(axis for axis in range(3) if axis not in kept)
    degrees = math.prod(values.shape[axis] for axis in others)
    axes = [("round", "node", "coordinate")[axis] for axis in kept]
    return _gamma_tests(name, np.square(values).sum(axis=others), degrees, 2 * degrees, axes=axes)


def _pairs(name: str, vectors: np.ndarray, excess: float = 0.0) -> _Tests:
    """Test of the squared correlations of all pairs of vectors (s, N), of numbers with an excess kurtosis."""
    count, size = vectors.shape
    number = count * (count - 1) // 2
    if number == 0 or size < 8:
        return _Tests(np.zeros(0), lambda place, share: Check("", 1, 1, 1, False, math.inf))
    norms = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    unit = vectors / np.where(norms > 0, norms, 1)
    gram = unit @ unit.T if count <= size else unit.T @ unit  # of equal sums of squares
    total = (np.square(gram).sum() - np.count_nonzero(norms)) / 2
    of_one = 2 * (size - 1) / (size**2 * (size + 2)) + excess**2 / size**3
    return _gamma_tests(name, max(total, 0.0), number / size, number * of_one)


def _lags(layers: Mapping[str, np.ndarray]) -> Iterable[_Tests]:
    """Tests of the correlation at each distance of coordinates, within each layer and across each two."""
    names, length = list(layers), 2 * max(leaf.shape[2] for leaf in layers.values())
    waves = {name: np.fft.rfft(leaf, length) for name, leaf in layers.items()}
    for i, one in enumerate(names):
        for other in names[i:]:
            rounds = min(len(layers[one]), len(layers[other]))
            products = (waves[one][:rounds].conj() * waves[other][:rounds]).sum(axis=(0, 1))
            own, others = layers[one].shape[2], layers[other].shape[2]
            distances = np.arange(1 if one == other else 1 - own, others)
            overlap = np.minimum(own, others - distances) - np.maximum(0, -distances)
            sizes = overlap * rounds * layers[one].shape[1]
            found = np.fft.irfft(products, length)[distances][sizes >= _LEAST]
            where = one if one == other else f"{one} and {other}"
            yield _correlations(where, found, sizes[sizes >= _LEAST], distances[sizes >= _LEAST])


def _correlations(where: str, sums: np.ndarray, sizes: np.ndarray, distances: np.ndarray) -> _Tests:
    """Tests of sums of products of independent standard normal numbers; 1 + their mean is shown."""

    def check(place, share):
        (at,) = place
        mean, error = float(sums[at] / sizes[at]), 1 / math.sqrt(sizes[at])
        width = quantile(share / 2) * error
        smallest = 1 + width + quantile(1 - POWER) * error
        limit = 1 + mean - math.copysign(width, mean)
        return Check(f"{where}, {distances[at]} apart", 1 + mean, 1.0, limit, abs(mean) > width, smallest)

    return _Tests(2 * scipy.special.ndtr(-np.abs(sums) / np.sqrt(sizes)), check)


def _fourth(values: np.ndarray) -> _Tests:
    """Test of the mean fourth power of standard normal numbers, which is 3; its ratio to 3 is shown."""
    return _gamma_tests("fourth moment", np.square(np.square(values)).sum(), 3 * values.size, 96 * values.size, 1.0)


def _distribution(name: str, values: np.ndarray) -> _Tests:
    """Kolmogorov's test of standard normal numbers; 1 + the largest distance of the distributions is shown."""
    below, size = scipy.special.ndtr(np.sort(values, axis=None)), values.size
    steps = np.arange(size + 1) / size
    distance = float(max((steps[1:] - below).max(), (below - steps[:-1]).max()))

    def check(place, share):
        width = float(scipy.special.kolmogi(share)) / math.sqrt(size)
        smallest = 1 + width + float(scipy.special.kolmogi(1 - POWER)) / math.sqrt(size)
        return Check(f"distribution, {name}", 1 + distance, 1.0, 1 + distance - width, distance > width, smallest)

    return _Tests(np.asarray(scipy.special.kolmogorov(math.sqrt(size) * distance)), check)


def _counts(drawn: np.ndarray, trials: np.ndarray, kept: tuple[int, ...], rate: float) -> _Tests:
    """Tests of binomial counts of canaries in batches, in each cell of the axes that are kept."""
    others = tuple(axis for axis in range(3) if axis not in kept)
    counts, numbers = np.rint(drawn.sum(axis=others)), trials.sum(axis=others)
    counts = np.clip(counts, 0, numbers)
    upper, lower = binomial.above(counts - 1, numbers, rate), 1 - binomial.above(counts, numbers, rate)
    axes = [("round", "node")[axis] for axis in kept]

    def check(place, share):
        mean, number = float(counts[place] / numbers[place]), float(numbers[place])
        error = math.sqrt(rate * (1 - rate) / number) / rate
        width = quantile(share / 2) * error
        ratio = mean / rate
        refuted = float(np.minimum(lower, upper)[place]) < share / 2
        limit, smallest = ratio - math.copysign(width, ratio - 1), 1 + width + quantile(1 - POWER) * error
        return Check(_where("rate", axes, place), ratio, 1.0, limit, refuted, smallest)

    return _Tests(np.minimum(1.0, 2 * np.minimum(lower, upper)), check)
