"""Checks that a mechanism does what its accountant was told: noise, signal and releases, measured on canaries.

An epsilon rests on a few numbers: the noise of a release, what one sample adds to it, how many releases there are. The
values released in a canary's coordinate show errors in these numbers far better than guesses do (`jaxfl.privacy.audit`
has the guesses and the canaries), because the noise is claimed to be Gaussian and not just any noise:

- releases: whoever sees all messages counts them;
- noise of one release: the coordinate of a canary that was left out shows noise alone, m canaries times K rounds of it.
  The sum of squares over claimed variances is chi-square with as many degrees;
- noise of all releases, over nodes, over coordinates: the same test on sums over rounds, which an attack uses, and on
  sums of these over the nodes or over eight coordinates. Noise that cancels makes them too small. Noise that
  repeats in every round, at every node or in every coordinate makes them too large: whoever sees it can take it off.
  Both are refused;
- noise of layers: the difference of two first rounds, with noise and without, in every layer of the model;
- signal: what all rounds together release, its mean over included canaries less its mean over the others. It is at most
  K G / J, for a mini-batch (drawn q K times, G / b each) as for a table (K times G / J). The interval is Welch's. No
  clipping, more rounds and a higher chance to be drawn all enlarge the signal;
- Gaussian epsilon: signal over noise is mu of a Gaussian mechanism, from below, and epsilon at delta follows (Nasr et
  al. 2023, arXiv:2302.07956, section 5). This check assumes Gaussian noise, and is a statement about epsilon where the
  others are statements about the mechanism.

Each check gets an equal share of the probability that a right run is refused. A check also says which error it would
have detected with probability 0.95: a noise that many times too small, a signal that many times too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
import tree

from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, PyTree, check
from jaxfl.privacy import binomial
from jaxfl.privacy.dominating_pairs import gaussian_epsilon

POWER = 0.95  # probability with which the smallest error named is detected
_TOGETHER = 8  # coordinates that are added up


class Mechanism(NamedTuple):
    """Facts that an accountant was told of the mechanism, as they are seen in one canary's coordinate."""

    noise_std: float  # of one release
    signal: float  # mean over the draws of what an included canary adds over all releases
    num_releases: int  # K


class Check(NamedTuple):
    """One number of a mechanism, measured and claimed."""

    name: str
    measured: float
    claimed: float
    limit: float  # confidence limit of `measured`, on the side of what is claimed
    refuted: bool
    smallest_error: float  # an error by this factor is detected with probability 0.95; infinite where no error is


def check_mechanism(
    sums: np.ndarray,
    squares: np.ndarray,
    included: np.ndarray,
    num_releases: int,
    claimed: Mechanism,
    *,
    dp_epsilon: float,
    dp_delta: float,
    significance: float,
    num_messages: int | None = None,
    groups: Mapping[str, Sequence[np.ndarray]] | None = None,
    of_layers: Mapping[str, np.ndarray] | None = None,
) -> tuple[Check, ...]:
    """The checks, in the order of this module's docstring.

    Args:
        sums: (m,), what is released in each canary's coordinate, summed over rounds.
        squares: (m,), its squares, summed over rounds; a message that adds up tau releases counts with 1 / tau.
        included: (m,), bool.
        num_releases: number of releases that were seen.
        claimed: what the accountant was told.
        dp_epsilon: the epsilon that is claimed.
        dp_delta: of the claim.
        significance: in (0, 1), largest probability that any of the checks refuses a run that is right.
        num_messages: number of messages that held the releases, smaller where a message adds up several; by default
            `num_releases`.
        groups: name of a check -> groups of canaries, by number; releases of those left out are added up in each group.
        of_layers: name of a layer -> the noise of one release in it, any shape.

    Raises:
        ArgumentError: a probability outside (0, 1), fewer than two canaries included or left out, or numbers that are
            not finite.

    Guarantees:
        - a run that is what was claimed is refused with probability at most significance.
        - an error of `smallest_error` is refused with probability 0.95.

    Examples:
        >>> rng, included = np.random.default_rng(0), np.arange(2000) % 2 == 0
        >>> released = 0.5 * rng.normal(size=(4, 2000)) + 0.05 * included  # noise 0.5 where 1 is claimed
        >>> claim = Mechanism(noise_std=1.0, signal=0.2, num_releases=4)
        >>> found = check_mechanism(released.sum(0), (released**2).sum(0), included, 4, claim,
        ...     dp_epsilon=1.0, dp_delta=1e-5, significance=0.05)
        >>> for one in found:
        ...     print(one.name, round(one.measured / one.claimed, 1), one.refuted)
        releases 1.0 False
        noise of one release 0.5 True
        noise of all releases 0.5 True
        signal 1.0 False
        Gaussian epsilon 0.7 False
    """
    check.open_unit(dp_delta=dp_delta, significance=significance)
    check.positive(noise_std=claimed.noise_std, signal=claimed.signal, dp_epsilon=dp_epsilon)
    sums, squares, included = np.asarray(sums, float), np.asarray(squares, float), np.asarray(included, bool)
    for name, values in (("sums", sums), ("squares", squares)):
        if not np.isfinite(values).all():
            found = f"{int((~np.isfinite(values)).sum())} of {values.size} are not"
            raise ArgumentError(name, "must be finite", found, "Take a smaller step size: the run has diverged.")
    if not 2 <= included.sum() <= included.size - 2:
        found = f"{int(included.sum())} of {included.size} are included"
        raise ArgumentError("included", "must have two canaries of True and two of False", found, "Take more canaries.")
    groups, of_layers = groups or {}, of_layers or {}
    # Counting releases cannot go wrong.
    share = significance / (4 + len(groups) + bool(of_layers))
    out = ~included
    degrees = int(out.sum())
    of_all = claimed.noise_std * math.sqrt(claimed.num_releases)
    of_seen = claimed.noise_std * math.sqrt(num_releases)  # a run may stop before its budget is spent
    messages = num_releases if num_messages is None else num_messages
    return (
        _counted(num_releases, claimed.num_releases),
        noise_check("noise of one release", squares[out].sum(), messages * degrees, claimed.noise_std, share),
        noise_check("noise of all releases", np.square(sums[out]).sum(), degrees, of_seen, share),
        *(_of_groups(name, sums, [own[out[own]] for own in each], of_seen, share) for name, each in groups.items()),
        *([_of_layers(of_layers, claimed.noise_std, share)] if of_layers else []),
        _signal(sums, included, claimed, of_all, share),
        _gaussian(sums, included, claimed, of_all, dp_epsilon, dp_delta, share),
    )


def noise_check(name: str, sum_of_squares: float, degrees: int, claimed_std: float, significance: float) -> Check:
    """Check the standard deviation of centred normal numbers by the sum of their squares, on both sides.

    Args:
        name: of the check.
        sum_of_squares: of the numbers.
        degrees: how many.
        claimed_std: their standard deviation.
        significance: in (0, 1); half of it for each side.
    """
    tails = [significance / 2, 1 - significance / 2, 1 - POWER, POWER]
    low, high, missed, seen = map(float, _chi_square_quantiles(tails, degrees))
    measured = math.sqrt(sum_of_squares / degrees)
    lower, upper = math.sqrt(sum_of_squares / high), math.sqrt(sum_of_squares / low)
    limit = upper if measured < claimed_std else lower
    refuted = not lower <= claimed_std <= upper
    return Check(name, measured, claimed_std, limit, refuted, math.sqrt(max(seen / low, high / missed)))


def _of_groups(name: str, sums: np.ndarray, groups: Sequence[np.ndarray], claimed_std: float, share: float) -> Check:
    """Check that sums over groups of canaries vary as independent noise does; each counts with the variance of one."""
    of_each = [sums[own].sum() ** 2 / own.size for own in groups if own.size]
    return noise_check(name, float(np.sum(of_each)), len(of_each), claimed_std, share)


def _of_layers(of_layers: Mapping[str, np.ndarray], claimed_std: float, share: float) -> Check:
    """The check of the layer that is refuted, or else of the layer whose noise is farthest from the claim."""
    squares, part = (
        {name: np.square(noise, dtype=float).sum() for name, noise in of_layers.items()},
        share / len(of_layers),
    )
    each = [
        noise_check(f"noise of layers ({name})", float(squares[name]), noise.size, claimed_std, part)
        for name, noise in of_layers.items()
    ]
    return max(each, key=lambda one: (one.refuted, abs(math.log(max(one.measured, 1e-9) / claimed_std))))


def smallest_guessed_error(mu: float, correct_needed: int, num_guesses: int, guessed_share: float) -> float:
    """Factor on mu from which the guesses of an attack refute an epsilon with probability 0.95; infinite beyond 100.

    Args:
        mu: distance of included from left-out scores, in standard deviations, of a right run.
        correct_needed: right guesses that refute it.
        num_guesses: how many of them it guesses, the surest.
        guessed_share: their share of all canaries.
    """
    if correct_needed > num_guesses:
        return math.inf

    def seen(factor: float) -> bool:
        half = factor * mu / 2
        # P(|x| > t) = guessed_share for x = +-half + noise.
        high = -scipy.special.ndtri(guessed_share / 4) + half
        low = 0.0
        for _ in range(60):
            middle = (low + high) / 2
            beyond = scipy.special.ndtr(half - middle) + scipy.special.ndtr(-half - middle)
            low, high = (middle, high) if beyond > guessed_share else (low, middle)
        right = min(1.0, float(scipy.special.ndtr(half - high)) / guessed_share)
        return bool(binomial.above(correct_needed - 1, num_guesses, right) > POWER)

    return _least_factor(seen)


def _counted(num_releases: int, claimed: int) -> Check:
    """Check the number of releases. Whoever sees the messages counts them, so a single extra one refutes the claim."""
    return Check("releases", num_releases, claimed, num_releases, num_releases > claimed, (claimed + 1) / claimed)


def _signal(sums: np.ndarray, included: np.ndarray, claimed: Mechanism, of_all: float, share: float) -> Check:
    """Check that included canaries stand out no further than claimed."""
    measured, error = _difference(sums, included)
    limit = measured - _quantile(share) * error
    # Of a right run: the interval's width with the claimed noise.
    width = of_all * math.sqrt(1 / included.sum() + 1 / (~included).sum())
    smallest = 1 + (_quantile(share) + _quantile(1 - POWER)) * width / claimed.signal
    return Check("signal", measured, claimed.signal, limit, limit > claimed.signal, smallest)


def _gaussian(
    sums: np.ndarray,
    included: np.ndarray,
    claimed: Mechanism,
    of_all: float,
    dp_epsilon: float,
    dp_delta: float,
    share: float,
) -> Check:
    """Check that a lower bound on mu costs no more than the claim; half of the share for signal, half for noise."""
    measured, error = _difference(sums, included)
    degrees = int((~included).sum())
    noise = math.sqrt(np.square(sums[~included]).sum() / degrees)
    # The largest factor that the noise may have.
    widest = math.sqrt(degrees / float(_chi_square_quantiles(share / 2, degrees)))
    quantile = _quantile(share / 2)
    lowest = max(0.0, (measured - quantile * error) / (noise * widest))
    limit = gaussian_epsilon(lowest, dp_delta)
    width = math.sqrt(1 / included.sum() + 1 / degrees)
    # The least mu that costs more than the claim, and the factor that a right run's mu needs to be seen above it.
    low, high = 0.0, 1.0
    while gaussian_epsilon(high, dp_delta) <= dp_epsilon:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(middle, dp_delta) <= dp_epsilon else (low, middle)
    smallest = (high * widest + (quantile + _quantile(1 - POWER)) * width) * of_all / claimed.signal
    found = gaussian_epsilon(max(0.0, measured / noise), dp_delta)
    return Check("Gaussian epsilon", found, dp_epsilon, limit, limit > dp_epsilon, max(1.0, smallest))


def _difference(sums: np.ndarray, included: np.ndarray) -> tuple[float, float]:
    """Mean over included less mean over others, and its standard error."""
    own, others = sums[included], sums[~included]
    error = math.sqrt(own.var(ddof=1) / own.size + others.var(ddof=1) / others.size)
    return float(own.mean() - others.mean()), error


def _quantile(tail: float) -> float:
    """Compute the number that a standard normal variable exceeds with this probability."""
    return -float(scipy.special.ndtri(tail))


def _chi_square_quantiles(shares: float | Sequence[float], degrees: int) -> np.ndarray:
    """Compute the numbers that a chi-square variable stays below with these probabilities."""
    return 2 * scipy.special.gammaincinv(degrees / 2, shares)


def _least_factor(seen: Callable[[float], bool]) -> float:
    """The least factor of at least 1 that is seen, to 1 %; infinite beyond 100."""
    low, high = 1.0, 1.0
    while not seen(high):
        low, high = high, 1.3 * high
        if high > 100:
            return math.inf
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high


def canary_groups(nodes: np.ndarray, coordinates: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Canaries of one coordinate at several nodes, and of adjacent coordinates, as `check_mechanism` adds them up."""
    in_order = np.lexsort((coordinates, nodes))
    groups = {"noise over coordinates": [in_order[at : at + _TOGETHER] for at in range(0, len(in_order), _TOGETHER)]}
    by_coordinate = np.argsort(coordinates, kind="stable")
    ends = np.flatnonzero(np.diff(coordinates[by_coordinate])) + 1
    of_nodes = np.split(by_coordinate, ends)
    return groups if len(of_nodes) == len(in_order) else {"noise over nodes": of_nodes, **groups}


def noise_of_layers(
    algorithm: Algorithm,
    silent: Algorithm,
    released: Callable[[Any, Any], PyTree],
    data: FederatedData,
    key: Array,
    rows: slice = slice(None),
) -> dict[str, np.ndarray]:
    """Compute the noise added to the first release in each leaf of the model, (rows, *leaf) each.

    Args:
        algorithm, released, data, key: as for `canary_scores`.
        silent: the same algorithm with noise of scale 0: it starts from the same parameters and draws the same batch.
        rows: the rows of `released` whose noise is independent.
    """

    sizes = data.sizes  # concrete, so that the algorithm can check them

    @jax.jit
    def first(key, data):
        def release(learner):
            before = learner.init(key, data._replace(sizes=sizes))
            return released(before, learner.round(key, before, data._replace(sizes=sizes))[0])

        return jax.tree.map(jnp.subtract, release(algorithm), release(silent))

    found = first(key, data)
    named = {"/".join(map(str, path)): np.asarray(leaf)[rows] for path, leaf in tree.flatten_with_path(found)}
    return {name: leaf for name, leaf in named.items() if name.split("/")[0] != "canary"}
