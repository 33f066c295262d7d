"""Proven bounds on what a node's releases cost.

In every round a node releases a mean gradient with Gaussian noise, and all its messages follow from these releases and
from what it received. So the guarantee of a node is the guarantee of K releases composed. Let G be the bound on a
sample's gradient, b and J the entries of a batch and of the node, q = b / J and z = noise_std b / G. Proven are

- `mini_batch`, Poisson batches, zero_out (a sample's gradient replaced by 0): the Poisson-sampled Gaussian, composed.
  J and b are public and stay, so adding or removing a sample means zeroing its gradient. At deltas below what grids
  resolve it is Renyi DP (Mironov, Talwar, Zhang 2019, arXiv:1908.10530: Theorem 5 has the larger direction);
- `mini_batch`, Poisson batches, replace_one: (1 - q) N(0, 1) + q N(1 / z, 1) against (1 - q) N(0, 1) + q N(-1 / z, 1),
  composed, which dominates every pair of samples (proof in `jaxfl.privacy.dominating_pairs`, "exchanged");
- `mini_batch`, batches of fixed size, replace_one: the profile q delta_Gauss(log(1 + (exp(e) - 1) / q); 2 / z) for
  e >= 0, mirrored below. Uniform draws with b > 1 can hold a sample c times, which moves the release c times as far:
  the mean over c of such profiles (Balle, Barthe, Gaboardi 2018, arXiv:1807.01647, Theorem 10). A gradient of 0 is
  one of those that may replace the sample's, so the bound holds for zero_out, too;
- `mini_batch`, batches that hold a sample at most once, zero_out: the sample pushes out a partner, which moves the
  release by 2 / z, and the gradient of 0 by 1 / z only (proof in `jaxfl.privacy.dominating_pairs`, "zeroed");
- `saga`, Poisson batches, one sample an entry, zero_out (a sample's gradient, fresh and stored, replaced by 0) and
  replace_one: the worst pair of a fresh and a stored gradient, and of two such pairs, composed. Given the others'
  participation, which depends on no data, and what was released, only the sample's own past draws are hidden: a release
  is a mean over them of releases with one stored gradient each. Divergences are jointly convex, so the worst past of
  each data set counts (`jaxfl.privacy.stored_gradients`; the whole proof is in docs/stored_gradients.md). Dominating
  pairs compose adaptively (Zhu, Dong, Wang 2022, arXiv:2106.08567). Under zero_out Renyi divergences that keep the
  stored gradient hidden take the place of the larger direction where they are smaller (same place);
- `saga`, any sampler: given all draws, which depend on no data, every release is Gaussian with one of two
  sensitivities (`sensitivities`), so the curve is at most the mean over how often a sample was drawn. For batches of
  fixed size nothing better is known here: drawing the sample keeps another entry from being refreshed, so that the
  others' table depends on the secret draws in both data sets.

Where a node wakes at random, n K events each wake it with probability 1 / n, which depends on no data. Given when it
woke, its releases compose as above. The curve is at most the mean over how often it woke: a binomial number, for which
an event without a release has the loss 0 (`jaxfl.privacy.dominating_pairs`, "at times"). How often a sample was drawn
is then binomial, too, with the rate q / n of n K events.

An entry of several samples (a per_batch table) is refreshed as one. It counts as one sample whose gradient is as large
as all of its samples' together; where one of them is replaced or removed, the entry is replaced. Kept in bfloat16 such
an entry is rounded as a sum, so that one sample moves the rounding of the others: its change exceeds `sensitivities`
(by 1 % in a test), and nothing is proven.

The smallest bound that holds is returned, with its name. Everything is NumPy, float64, on the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import binomial
from jaxfl.privacy.accountant import Bound
from jaxfl.privacy.clients.local_iterations import ORDERS, converted_epsilon, renyi_divergences
from jaxfl.privacy.composition import curve_epsilon, rounding_error, sum_of_draws
from jaxfl.privacy.dominating_pairs import (
    composed_curves,
    exchanged,
    gaussian_epsilon,
    grid_step,
    mixed_gaussian_epsilon,
    replaced,
    sampled,
    unresolved_delta,
    zeroed,
)
from jaxfl.privacy.grid import Grid
from jaxfl.privacy.shared import Secrets
from jaxfl.privacy.stored_gradients import hidden_epsilon, is_resolved, stored, stored_exchanged

PROVEN_RELATIONS = ("zero_out", "replace_one")  # with a proof, the main one first
_UNLIKELY = 1e-20  # probability of the counts of draws that are left out; they count as an infinite loss
_UNLIKELY_COUNT = 1e-25  # the same for the counts of one batch
_MORE_RELEASES = 1e-6  # probability of more releases than are counted of a table, at most delta / 10
_UNRESOLVED = "; the secrecy of the draws counts for nothing: delta is below the probability that its grid leaves out"
_HIDDEN = "Renyi DP of Poisson-sampled Gaussian releases with a hidden stored gradient in each, integer orders 2 to 10"
_TOO_SMALL = "none: delta is below the probability that grids and counts of draws leave out"
_KEPT_FOR_SAMPLER = 1e-3  # share of delta, kept for the distance of noise on a grid from its stated distribution
_LARGEST_SHIFT = 500.0  # in units of the noise; beyond it sampling hides nothing that a grid could show


class Release(NamedTuple):
    """Release of one node in every round: Gaussian noise on a mean gradient."""

    estimator: str  # "mini_batch" or "saga"
    sampler: str  # "poisson", "fixed" or "uniform"
    batch_size: int  # b, in entries
    num_entries: int  # J, entries of the node: samples, or batches of a per_batch table
    clip_norm: float | None  # L2 bound on what one sample contributes to one entry's gradient; None: unclipped
    noise_std: float  # per coordinate, on the mean gradient; the effective one where noise is shared
    entry_size: int = 1  # samples of one entry, each of which contributes at most clip_norm
    storage: str = "float32"  # or "bfloat16": type of the table's entries
    assumed: bool = False  # clip_norm is assumed of unclipped gradients, not enforced
    grid: Grid | None = None  # grid to which gradient and noise are rounded; None: they stay in float32
    secrets: Secrets | None = None  # of noise that pairs of nodes share; None: noise is a node's own


class Changes(NamedTuple):
    """L2 change of one release, given all draws."""

    absent: float  # when the sample is not in the batch
    present: float  # when it is, once


def sensitivities(release: Release, neighboring_relation: str) -> Changes:
    """L2 change of one release, given all draws, when the changed sample is not in the batch and when it is, once.

    | estimator | zero_out | replace_one |
    |---|---|---|
    | mini_batch | 0 and G / b | 0 and 2 G / b |
    | saga | G / J and G (2 / b - 1 / J) | 2 G / J and 2 G (2 / b - 1 / J) |

    On a grid every change but 0 is larger by noise_std 2^-bits sqrt(d).

    Raises:
        ArgumentError: an unknown relation, or a release that is not clipped.
    """
    check.one_of(PROVEN_RELATIONS, neighboring_relation=neighboring_relation)
    if release.clip_norm is None:
        raise ArgumentError("clip_norm", "must bound each sample's gradient", "got None", "Clip the gradients.")
    return Changes(*(_change(release, neighboring_relation, count) for count in (0, 1)))


def _change(release: Release, relation: str, count: int) -> float:
    """L2 change of one release when the changed sample is in the batch `count` times."""
    assert release.clip_norm is not None
    bound = release.clip_norm * (2 if relation == "replace_one" else 1)
    share = count / release.batch_size  # of the fresh gradient
    # SAGA subtracts the stored gradient as often and adds it once over J.
    stored = abs(share - 1 / release.num_entries) if release.estimator == "saga" else 0.0
    moved = bound * (share + stored)
    return moved if release.grid is None or moved == 0 else moved + release.noise_std * release.grid.rounding


def constant_gradient_epsilon(release: Release, relation: str, num_releases: int, dp_delta: float) -> float:
    """Compute the epsilon that constant gradients leak, whatever is drawn. No guarantee can be smaller.

    With a table, fresh and stored gradients cancel and every release moves by `Changes.absent`: N(mu, 1) against
    N(0, 1) with mu = absent sqrt(K) / noise_std. Without a table the result is 0, which says nothing. Rounding to a
    grid, which may hide as much as it adds, is not counted.
    """
    moved = sensitivities(release._replace(grid=None), relation).absent * math.sqrt(num_releases)
    return gaussian_epsilon(moved / release.noise_std, dp_delta)


def proven_bound(release: Release, relation: str, num_releases: int, dp_delta: float, chance: float = 1.0) -> Bound:
    """The smallest of the proven bounds; the release is clipped and noisy, num_releases at least 1.

    Each of num_releases is made with this chance, independently of data and of others.

    Noise on a grid is rounded Gaussian noise, up to a distance in total variation. With a distance of t over all
    releases delta(eps) is at most that of Gaussian noise plus (1 + exp(eps)) t: a thousandth of delta is kept for it.
    """
    if release.grid is None:
        return _gaussian_bound(release, relation, num_releases, dp_delta, chance)
    kept = dp_delta * _KEPT_FOR_SAMPLER
    bound = _gaussian_bound(release, relation, num_releases, dp_delta - kept, chance)
    spent = math.log(2 * num_releases * chance * release.grid.distance) + bound.dp_epsilon
    return bound if dp_delta > 0 and spent <= math.log(kept) else bound._replace(dp_epsilon=math.inf)


def _gaussian_bound(release: Release, relation: str, num_releases: int, dp_delta: float, chance: float) -> Bound:
    """`proven_bound` of Gaussian noise."""
    counts = Bound(
        _counts_epsilon(release, relation, num_releases, dp_delta, chance),
        "Gaussian releases given how often a sample is drawn, averaged over that",
    )
    sampled = _sampled_bound(release, relation, num_releases, dp_delta, chance)
    if sampled is None or counts.dp_epsilon <= sampled.dp_epsilon:
        unresolved = sampled is not None and math.isinf(sampled.dp_epsilon) and math.isfinite(counts.dp_epsilon)
        return counts._replace(accountant=counts.accountant + _UNRESOLVED) if unresolved else counts
    return sampled


def _counts_epsilon(release: Release, relation: str, num_releases: int, dp_delta: float, chance: float) -> float:
    """epsilon from the distribution of how often a sample is drawn, which depends on no data."""
    once = release.sampler != "uniform" or release.batch_size == 1
    counts, chances = _counts_in_a_batch(release)
    squares = np.array([_change(release, relation, count) for count in counts]) ** 2
    if once:
        rate = chance * min(1.0, release.batch_size / release.num_entries)
        number = _likely_counts(num_releases, rate)
        probabilities = binomial.chances(number, num_releases, rate)
        missing = _UNLIKELY
    else:
        # Squared counts add up: v(c) <= v(0) + slope c^2.
        lattice = np.zeros(counts[-1] ** 2 + 1)
        lattice[counts**2] = chance * chances
        lattice[0] += 1 - chance
        total = sum_of_draws(lattice, num_releases)
        if total is None:
            return math.inf
        number = total[0] + np.arange(len(total[1]))
        probabilities = total[1]
        missing = rounding_error(num_releases) + num_releases * _UNLIKELY_COUNT
    slope = float(np.max((squares[1:] - squares[0]) / counts[1:] ** 2))
    if chance < 1 and squares[0]:  # what moves every release moves as many as are likely
        missing += (failure := min(_MORE_RELEASES, dp_delta / 10))
        num_releases = binomial.least_count(failure, num_releases, chance)
    mus = np.sqrt(number * slope + num_releases * squares[0]) / release.noise_std
    return mixed_gaussian_epsilon(mus, probabilities, dp_delta - missing)


def _likely_counts(num_releases: int, rate: float) -> np.ndarray:
    """List the likely counts of a sample's draws.

    Other counts have a probability below `_UNLIKELY` (2 exp(-50), by Bernstein's inequality).
    """
    spread = 10 * math.sqrt(num_releases * rate * (1 - rate)) + 60
    low = max(0, math.floor(num_releases * rate - spread))
    return np.arange(low, min(num_releases, math.ceil(num_releases * rate + spread)) + 1)


def _counts_in_a_batch(release: Release) -> tuple[np.ndarray, np.ndarray]:
    """Compute how often a sample is in one batch: counts 0 ... m and their probabilities; more are unlikely."""
    if release.sampler != "uniform" or release.batch_size == 1:
        rate = min(1.0, release.batch_size / release.num_entries)
        return np.arange(2), np.array([1 - rate, rate])
    import scipy.stats  # takes half a second; it is exact for probabilities as small as these

    counts = np.arange(release.batch_size + 1)
    more = scipy.stats.binom.sf(counts, release.batch_size, 1 / release.num_entries)
    counts = counts[: np.argmax(more <= _UNLIKELY_COUNT) + 1]
    return counts, scipy.stats.binom.pmf(counts, release.batch_size, 1 / release.num_entries)


def _sampled_bound(release: Release, relation: str, num_releases: int, dp_delta: float, chance: float) -> Bound | None:
    """epsilon amplified by the secrecy of the draws; None where no proof is known or nothing is secret."""
    assert release.clip_norm is not None
    rate, bound = release.batch_size / release.num_entries, release.clip_norm * release.entry_size
    if release.sampler != "poisson":
        return None if release.estimator == "saga" else _fixed_bound(release, relation, num_releases, dp_delta, chance)
    multiplier = release.noise_std * release.batch_size / bound
    rounding = 0.0 if release.grid is None else release.grid.rounding
    if release.estimator == "saga":
        name = "Poisson-sampled Gaussian releases with a stored gradient in each, for the worst pair of gradients"
        pair = stored if relation == "zero_out" and release.entry_size == 1 else stored_exchanged
        arguments = (rate, multiplier, rounding)
        shift = (2 - rate) / multiplier
        if not is_resolved(*arguments):
            return None
    else:
        name = "Poisson-sampled Gaussian releases"
        pair = sampled if relation == "zero_out" else exchanged
        shift = sensitivities(release, "zero_out").present / release.noise_std
        arguments = (rate, shift)
    if rate >= 1 or shift > _LARGEST_SHIFT:
        return None
    if dp_delta <= unresolved_delta(num_releases * chance):
        if pair is sampled:
            return _renyi_bound(rate, shift, num_releases, dp_delta, chance)
        return Bound(math.inf, _TOO_SMALL)
    step = grid_step(rate, multiplier, shift)
    curves = composed_curves(pair, arguments, step, num_releases, dp_delta, chance)
    changed = {exchanged: " of one sample or the other", stored_exchanged: ", of one sample or the other"}
    name = f"privacy loss distribution of {name}{changed.get(pair, '')}"
    epsilons = [float(curve_epsilon(curve, dp_delta)) for curve in curves]
    if pair is stored and epsilons[0] > epsilons[1]:
        hidden = hidden_epsilon(rate, multiplier, rounding, num_releases, dp_delta, chance)
        if epsilons[1] < hidden < epsilons[0]:
            return Bound(hidden, _HIDDEN)
        epsilons[0] = min(hidden, epsilons[0])
    return Bound(max(epsilons), name)


def _renyi_bound(rate: float, shift: float, num_releases: int, dp_delta: float, chance: float) -> Bound:
    """epsilon of `sampled` at a delta that no grid resolves.

    exp((alpha - 1) D) of an event that is a release with a chance is the mean of that of the release and of 1.
    """
    excess = ORDERS - 1
    once = excess * renyi_divergences(sampling_rate=rate, noise_multiplier=1 / shift)
    if chance < 1:
        once = np.logaddexp(math.log1p(-chance), math.log(chance) + once)
    name = "Renyi DP of Poisson-sampled Gaussian releases, integer orders 2 to 64"
    return Bound(converted_epsilon(num_releases * once / excess, dp_delta), name)


def _fixed_bound(release: Release, relation: str, num_releases: int, dp_delta: float, chance: float) -> Bound | None:
    """epsilon of batches of fixed size; where they may hold a sample several times, that of replace_one."""
    counts, chances = _counts_in_a_batch(release)
    rate = float(chances[1:].sum())
    shifts = [_change(release, "replace_one", count) / release.noise_std for count in counts[1:]]
    if rate >= 1 or max(shifts) > _LARGEST_SHIFT:
        return None
    if dp_delta <= unresolved_delta(num_releases * chance):
        return Bound(math.inf, _TOO_SMALL)
    assert release.clip_norm is not None
    step = grid_step(rate, release.noise_std * release.batch_size / release.clip_norm, max(shifts))
    pair, arguments = replaced, (rate, tuple(shifts), tuple((chances[1:] / rate).tolist()))
    if relation == "zero_out" and len(shifts) == 1:
        pair, arguments = zeroed, (rate, shifts[0], _change(release, relation, 1) / release.noise_std)
    curves = composed_curves(pair, arguments, step, num_releases, dp_delta, chance)
    name = "privacy loss distribution of Gaussian releases of batches of fixed size"
    left = dp_delta - num_releases * _UNLIKELY_COUNT
    return Bound(float(max(curve_epsilon(curve, left) for curve in curves)), name)
