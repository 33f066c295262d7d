"""Checks that a mechanism does what its accountant was told: noise, batches, signal and releases.

An epsilon rests on a few numbers: the noise of a release, what one sample adds to it, how often it does, how many
releases there are. The values released in a canary's coordinate show errors in these numbers far better than guesses
do (`jaxfl.privacy.audit` has the guesses and the canaries), because the noise is claimed to be Gaussian and not just
any noise:

- releases: whoever sees all messages counts them;
- noise of one release: the coordinate of a canary that was left out shows noise only, m canaries times K rounds of it.
  The sum of squares over claimed variances is chi-square with as many degrees;
- noise of all releases: the same test on sums over rounds, which an attack uses. Noise that cancels makes them too
  small, and noise that repeats makes them too large: whoever sees it can take it off. Both are refused;
- the noise number by number, and the batches: `jaxfl.privacy.audit_noise`, from rounds with noise and without;
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
from collections.abc import Callable, Mapping

import numpy as np
import scipy

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import binomial
from jaxfl.privacy.audit_noise import POWER, Check, Make, Mechanism, batch_checks, noise_check, noise_checks, quantile
from jaxfl.privacy.dominating_pairs import gaussian_epsilon


def check_mechanism(
    releases: np.ndarray,
    included: np.ndarray,
    claimed: Mechanism,
    *,
    dp_epsilon: float,
    dp_delta: float,
    significance: float,
    counts: np.ndarray | None = None,
    noise: Mapping[str, np.ndarray] | None = None,
    added: np.ndarray | None = None,
) -> tuple[Check, ...]:
    """The checks, in the order of this module's docstring.

    Args:
        releases: (K, m), what each message releases in each canary's coordinate.
        included: (m,), bool.
        claimed: what the accountant was told.
        dp_epsilon: the epsilon that is claimed.
        dp_delta: of the claim.
        significance: in (0, 1), largest probability that any of the checks refuses a run that is right.
        counts: (K,), int, releases that each message adds up; by default 1 each.
        noise: name of a layer -> its noise in every message (K, n, *leaf), or in the first ones; None where it is not
            known number by number.
        added: (K, n, c), what a message without noise holds of each canary, all being included; None where that is not
            known, or where `claimed.rate` is None.

    Raises:
        ArgumentError: a probability outside (0, 1), fewer than two canaries included or left out, or numbers that are
            not finite.

    Guarantees:
        - a run that is what was claimed is refused with probability at most significance.
        - an error of `smallest_error` is refused with probability 0.95.
        - releases without noise are refused in words.

    Examples:
        >>> rng, included = np.random.default_rng(0), np.arange(2000) % 2 == 0
        >>> released = 0.5 * rng.normal(size=(4, 2000)) + 0.05 * included  # noise 0.5 where 1 is claimed
        >>> claim = Mechanism(noise_std=1.0, signal=0.2, num_releases=4)
        >>> for one in check_mechanism(released, included, claim, dp_epsilon=1.0, dp_delta=1e-5, significance=0.05):
        ...     print(one.name, round(one.measured / one.claimed, 1), one.refuted)
        releases 1.0 False
        noise of one release 0.5 True
        noise of all releases 0.5 True
        signal 1.0 False
        Gaussian epsilon 0.7 False
    """
    check.open_unit(dp_delta=dp_delta, significance=significance)
    check.positive(noise_std=claimed.noise_std, signal=claimed.signal, dp_epsilon=dp_epsilon)
    releases, included = np.asarray(releases, float), np.asarray(included, bool)
    counts = np.ones(len(releases)) if counts is None else np.asarray(counts)
    noise = {name: np.asarray(leaf, float) for name, leaf in (noise or {}).items()}
    for name, values in (("releases", releases), *noise.items()):
        if not np.isfinite(values).all():
            found = f"{int((~np.isfinite(values)).sum())} of {values.size} are not"
            raise ArgumentError(name, "must be finite", found, "Take a smaller step size: the run has diverged.")
    if not 2 <= included.sum() <= included.size - 2:
        found = f"{int(included.sum())} of {included.size} are included"
        raise ArgumentError("included", "must have two canaries of True and two of False", found, "Take more canaries.")
    sent, sums, left_out = counts > 0, releases.sum(axis=0), releases[:, ~included]
    std, visit, rate, num_releases = claimed.noise_std, claimed.visit, claimed.rate, int(counts.sum())
    squares = float((np.square(left_out[sent]) / counts[sent, None]).sum())
    of_seen = std * math.sqrt(max(num_releases, 1))  # a run may stop before its budget is spent
    one, every = "noise of one release", "noise of all releases"
    if not left_out.any():
        one += " (none: left-out canaries release exactly 0)"
    makers: list[Make] = [
        lambda share: noise_check(one, squares, left_out[sent].size, std, share),
        lambda share: noise_check(every, np.square(sums[~included]).sum(), left_out.shape[1], of_seen, share),
        *noise_checks(noise, std, counts),
        *([] if added is None or visit is None or rate is None else batch_checks(added, visit, rate, counts)),
        lambda share: _signal(sums, included, claimed, share),
        lambda share: _gaussian(sums, included, claimed, dp_epsilon, dp_delta, share),
    ]
    # Counting releases cannot go wrong.
    return (_counted(num_releases, claimed.num_releases), *(make(significance / len(makers)) for make in makers))


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


def _signal(sums: np.ndarray, included: np.ndarray, claimed: Mechanism, share: float) -> Check:
    """Check that included canaries stand out no further than claimed."""
    measured, error = _difference(sums, included)
    limit = measured - quantile(share) * error
    # Of a right run: the interval's width with the claimed noise.
    width = claimed.noise_std * math.sqrt(claimed.num_releases * (1 / included.sum() + 1 / (~included).sum()))
    smallest = 1 + (quantile(share) + quantile(1 - POWER)) * width / claimed.signal
    return Check("signal", measured, claimed.signal, limit, limit > claimed.signal, smallest)


def _gaussian(
    sums: np.ndarray, included: np.ndarray, claimed: Mechanism, dp_epsilon: float, dp_delta: float, share: float
) -> Check:
    """Check that a lower bound on mu costs no more than the claim; half of the share for signal, half for noise."""
    measured, error = _difference(sums, included)
    degrees = int((~included).sum())
    noise = math.sqrt(np.square(sums[~included]).sum() / degrees)
    noise = max(noise, 1e-9 * claimed.noise_std)  # where there is none, epsilon is a large number
    # The largest factor that the noise may have.
    widest = math.sqrt(degrees / 2 / float(scipy.special.gammaincinv(degrees / 2, share / 2)))
    deviations = quantile(share / 2)
    lowest = max(0.0, (measured - deviations * error) / (noise * widest))
    limit = gaussian_epsilon(lowest, dp_delta)
    width = math.sqrt(1 / included.sum() + 1 / degrees)
    # The least mu that costs more than the claim, and the factor that a right run's mu needs to be seen above it.
    low, high = 0.0, 1.0
    while gaussian_epsilon(high, dp_delta) <= dp_epsilon:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(middle, dp_delta) <= dp_epsilon else (low, middle)
    of_all = claimed.noise_std * math.sqrt(claimed.num_releases)
    smallest = (high * widest + (deviations + quantile(1 - POWER)) * width) * of_all / claimed.signal
    measured_epsilon = gaussian_epsilon(max(0.0, measured / noise), dp_delta)
    return Check("Gaussian epsilon", measured_epsilon, dp_epsilon, limit, limit > dp_epsilon, max(1.0, smallest))


def _difference(sums: np.ndarray, included: np.ndarray) -> tuple[float, float]:
    """Mean over included less mean over others, and its standard error."""
    own, others = sums[included], sums[~included]
    error = math.sqrt(own.var(ddof=1) / own.size + others.var(ddof=1) / others.size)
    return float(own.mean() - others.mean()), error


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
