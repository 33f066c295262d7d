"""Privacy curves: delta as a function of epsilon, for Gaussian noise with and without sampling, composed over releases.

"P against Q" stands for the curve delta(e) = sup over events S of P(S) - exp(e) Q(S). P and Q are a dominating pair
of a mechanism when this curve is never below the mechanism's own on neighboring data. Noise has standard deviation 1
here: a shift is the change of a release divided by `noise_std`.

- Gaussian: one release shifted by mu, N(mu, 1) against N(0, 1), also the composition of releases with shifts mu_k,
  mu^2 = sum_k mu_k^2 (Balle and Wang 2018, arXiv:1805.06530; Dong, Roth, Su 2019, arXiv:1905.02383).
- Participation: shifts that depend on how often a sample was drawn. Given the draws, which do not depend on the data,
  every release is Gaussian, even where it depends on earlier ones. Divergences are jointly convex, so that the curve is
  at most the mean over counts.
- Sampled: (1 - q) N(0, 1) + q N(shift, 1) against N(0, 1), both directions: Poisson sampling.
- Replaced: delta(e) = q delta_Gauss(log(1 + (exp(e) - 1) / q)) for e >= 0, mirrored for e < 0: a batch of fixed size
  and one sample exchanged for another (Balle, Barthe, Gaboardi 2018, arXiv:1807.01647; Zhu, Dong, Wang 2022,
  arXiv:2106.08567, whose Theorem 10 also lets dominating pairs be composed adaptively).
- Zeroed: a batch of fixed size b, and one sample whose gradient is replaced by 0. Draw b of the other samples and one
  of these, the partner, evenly; with probability q = b / J the sample takes the partner's place. That gives every batch
  the same chance. Partner and others depend on no data, so let the observer see them. With g and x the gradients of the
  sample and the partner (norms at most 1 / z), moved to where the partner's release is at 0, M(w) = (1 - q) N(0, I) +
  q N(w, I) and near = 1 / z, far = 2 / z, the release is M(u) against M(v): u = g - x, v = -x, |u| <= far, |v| <= near,
  |u - v| = |g| <= near. For a >= 1 take the argument of "exchanged": H_a(M(u) | M(v)) is the mean under N(u, I) of a
  convex function of two lognormals of log standard deviations |u| and |u - v|, and is largest for the numbers u = far,
  v = far - near. H_a(M(v) | M(u)) has |v| and |v - u| and is largest for v = near, u = 0; that also is the worst case
  of H_a(M(u) | M(v)) for a < 1, which is 1 - a + a H_{1/a}(M(v) | M(u)). The larger profile of all u and v,
      M(far) against M(far - near) for a >= 1, M(0) against M(near) for a < 1,
  is convex as a supremum, and so it is the profile of a pair; the other direction is that pair's mirror image. In
  every round the parameters follow from what was released, and the draw is independent of earlier ones, so that for
  every past u and v are within these bounds, whoever the partner is: copies of the pair compose adaptively.
- At times: in each of M events a release is made with probability w, which depends on no data (a node wakes at
  random). The observer sees in which, so that the curve is the mean over the binomial number of releases. That is M
  events, each with the pair's loss with probability w, else with the loss 0: one more mass at 0 composes exactly.
- Exchanged: (1 - q) N(0, 1) + q N(shift, 1) against (1 - q) N(0, 1) + q N(-shift, 1), its mirror image: Poisson
  sampling and one sample exchanged for another. Given the others' participation a release is a mixture of N(0, I) and
  N(v, I) against one of N(0, I) and N(v', I), with |v| and |v'| at most the shift. For a >= 1 the divergence
  H_a of these is q H_b(N(v, I) | (1 - c) N(0, I) + c N(v', I)), b = 1 + q (a - 1), c = b / a (Balle, Barthe, Gaboardi
  2018, Theorem 2). That is the mean under N(v, I) of the convex function max(1 - b L, 0) of a sum L of two lognormals
  of fixed means, of log standard deviations |v| and |v' - v|. Lognormals of fixed mean grow in convex order with these,
  and for given marginals a sum is largest in convex order where both rise together (Kaas, Dhaene, Goovaerts 2000).
  v' = -v of full length gives both at once. For a < 1 exchange the two: H_a(P | Q) = 1 - a + a H_{1/a}(Q | P).

Losses are put on the grid 0, +-h, +-2h, ...: what falls between two points is divided between them such that its
probability is kept under both distributions ("connect the dots", Doroshenko et al. 2022, arXiv:2207.04380), which can
only raise every delta. Masses come from differences of normal tails, never from differences of deltas, so that no
probability is lost to rounding. `jaxfl.privacy.composition` composes them. The pair of a table of stored gradients
stands in `jaxfl.privacy.stored_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
import scipy

from jaxfl.privacy.composition import Curve, Losses, compose, is_small

TAIL = 9.5  # normal quantile; the 1e-21 beyond it counts as an infinite loss
_ROUNDED_MU = 1e6  # beyond it delta drowns in the rounding of epsilon, and a bound that is 1e-5 larger is given
_LARGEST_MU = 1e150  # float64 holds its epsilon, 5e299; beyond it none is given
_NEWTON_STEPS = 12
_MAX_BINS = 2**19  # of one release: a wider grid gets a larger step, which only loosens the bound


def unresolved_delta(num_times: float) -> float:
    """Bound from below the probability that grids of this module count as an infinite loss in `num_times` releases.

    A delta up to it has no finite epsilon on a grid, whatever the noise.

    Examples:
        >>> f"{unresolved_delta(1):.1e} {unresolved_delta(1000):.1e}"
        '2.1e-21 2.1e-18'
    """
    return -math.expm1(num_times * math.log1p(-2 * float(scipy.special.ndtr(-TAIL))))


def gaussian_delta(dp_epsilon: float, mu: float | np.ndarray) -> np.ndarray:
    """delta of N(mu, 1) against N(0, 1), elementwise in mu >= 0; for dp_epsilon >= 0.

    Examples:
        >>> round(float(gaussian_delta(1.0, 1.0)), 8)
        0.12693674
    """
    mu = np.asarray(mu, np.float64)
    shift = np.where(mu > 0, mu, 1.0)
    upper = scipy.special.log_ndtr(shift / 2 - dp_epsilon / shift)
    gap = dp_epsilon + scipy.special.log_ndtr(-shift / 2 - dp_epsilon / shift) - upper
    return np.where(mu > 0, -np.exp(upper) * np.expm1(np.minimum(gap, 0.0)), 0.0)


def gaussian_epsilon(mu: float, dp_delta: float) -> float:
    """epsilon of N(mu, 1) against N(0, 1), rounded up.

    Examples:
        >>> round(gaussian_epsilon(1.0, 1e-5), 6)
        4.377178
    """
    return mixed_gaussian_epsilon(np.array([mu]), np.ones(1), dp_delta)


def mixed_gaussian_epsilon(mus: np.ndarray, probabilities: np.ndarray, dp_delta: float) -> float:
    """Smallest epsilon with sum_j probabilities[j] delta_Gauss(epsilon; mus[j]) <= dp_delta, from above.

    Args:
        mus: (m,), shift of all releases together, at least 0.
        probabilities: (m,), sum at most 1; what is missing to 1 is counted as an infinite loss by the caller.
        dp_delta: in (0, 1).

    Returns:
        epsilon; infinite from a shift of 1e150 on.
    """
    largest = float(mus.max())
    if dp_delta <= 0 or not largest < _LARGEST_MU:
        return math.inf

    def log_ratio(dp_epsilon: float) -> float:
        delta = float(np.sum(probabilities * gaussian_delta(dp_epsilon, mus)))
        return math.log(max(delta, 1e-300) / dp_delta)

    if largest == 0 or log_ratio(0.0) <= 0:
        return 0.0
    # Above it even the largest shift alone meets dp_delta: Chernoff's bound on a normal tail.
    highest = largest**2 / 2 + largest * math.sqrt(2 * math.log(1 / dp_delta))
    if largest > _ROUNDED_MU:
        return highest
    root = cast(float, scipy.optimize.brentq(log_ratio, 0.0, highest + 1e-9, xtol=1e-10 * highest))
    return root + 1e-9 * highest  # above the root, which is found to within xtol


def grid_step(sampling_rate: float, noise_multiplier: float, high: float) -> float:
    """h for `sampled` and `replaced`: q / (20 z), or up to q / (5 z) where that keeps one release below 65,536 bins.

    Losses of small releases are spread over about q / z. A grid that is coarse against this, such as 1e-4 for q / z =
    4e-5, overstates epsilon many times over.
    """
    coarsest = sampling_rate / (5 * noise_multiplier)
    highest_loss = float(mixture_loss(np.array([high + TAIL]), sampling_rate, 0.0, high)[0])
    return min(coarsest, max(coarsest / 4, highest_loss / 2**16))


def sampled(sampling_rate: float, shift: float, step: float) -> tuple[Losses, Losses]:
    """Losses of (1 - q) N(0, 1) + q N(shift, 1) against N(0, 1), and of N(0, 1) against that.

    Args:
        sampling_rate: q, in (0, 1].
        shift: above 0.
        step: of the grid; larger where the grid would exceed the bins allowed.
    """
    top = shift + TAIL
    lowest_loss, highest_loss = mixture_loss(np.array([-TAIL, top]), sampling_rate, 0.0, shift)
    step = max(step, (highest_loss - lowest_loss) / _MAX_BINS)
    first, last = math.floor(lowest_loss / step), math.ceil(highest_loss / step)
    inner = _inverse(step * np.arange(first + 1, last), sampling_rate, shift)
    edges = np.concatenate([[-TAIL], np.clip(inner, -TAIL, top), [top]])
    with_sample, without = interval_masses(edges, sampling_rate, 0.0, shift)
    forward = _divide(with_sample, without, step * first, step)
    backward = _divide(without[::-1], with_sample[::-1], -step * last, step)
    tail_without = 2 * scipy.special.ndtr(-TAIL)  # both ends together, more than enough
    return (
        Losses(step, first, forward, tail_without),
        Losses(step, -last, backward, tail_without),
    )


def replaced(sampling_rate: float, shifts: tuple[float, ...], weights: tuple[float, ...], step: float) -> Losses:
    """Losses of the profile sum_j weights[j] q delta_Gauss(log(1 + (exp(e) - 1) / q); shifts[j]), mirrored below 0.

    For e >= 0 this is the profile of `sampled`, below 0 that of its other direction.

    Args:
        sampling_rate: q, in (0, 1), probability that the sample is in the batch.
        shifts: (m,), above 0: change of the release over noise_std when the sample is in it j times.
        weights: (m,), their probabilities given that it is in; what is missing to 1 counts as an infinite loss.
        step: of the grid; larger where the grid would exceed the bins allowed.
    """
    top = max(shifts) + TAIL
    highest_loss = float(mixture_loss(np.array([top]), sampling_rate, 0.0, max(shifts))[0])
    step = max(step, 2 * highest_loss / _MAX_BINS)
    last = math.ceil(highest_loss / step)
    losses = step * np.arange(last + 1)
    probabilities = np.zeros(2 * last + 1)
    infinite = sampling_rate * max(0.0, 1 - float(np.sum(weights)))
    tails = 2 * scipy.special.ndtr(-TAIL)
    for shift, weight in zip(shifts, weights, strict=True):
        edges = np.minimum(_inverse(losses, sampling_rate, shift), top)
        with_sample, without = interval_masses(edges, sampling_rate, 0.0, shift)
        probabilities[last:] += weight * _divide(with_sample, without, 0.0, step)
        probabilities[: last + 1] += weight * _divide(without[::-1], with_sample[::-1], -step * last, step)
        # The remaining probability has loss 0. Beyond the last edge both distributions count as an infinite loss.
        probabilities[last] += weight * max(0.0, 1 - float(with_sample.sum() + without.sum()) - tails)
        infinite += weight * tails
    return Losses(step, -last, probabilities, infinite)


def zeroed(sampling_rate: float, far: float, near: float, step: float) -> tuple[Losses, Losses]:
    """Losses of a sample in a batch of fixed size against a gradient of 0 in its place, and of that against the sample.

    Args:
        sampling_rate: q, in (0, 1).
        far: above `near`: change of the release over noise_std when the sample takes another's place.
        near: above 0: the same when it loses its gradient.
        step: of the grid; larger where the grid would exceed the bins allowed.
    """
    base = far - near
    tops = np.array([far, near]) + TAIL
    highest = mixture_loss(tops, sampling_rate, 0.0, np.array([far, near]))
    highest_loss = max(highest[0] - float(mixture_loss(tops[0], sampling_rate, 0.0, base)), highest[1])
    step = max(step, 2 * highest_loss / _MAX_BINS)
    last = math.ceil(highest_loss / step)
    losses = step * np.arange(last + 1)
    edges = _inverse_between(losses, sampling_rate, base, far)
    up, down = (interval_masses(edges, sampling_rate, 0.0, shift)[0] for shift in (far, base))
    edges = np.minimum(_inverse(losses, sampling_rate, near), tops[1])
    with_sample, without = interval_masses(edges, sampling_rate, 0.0, near)
    tails = 2 * float(scipy.special.ndtr(-TAIL))  # beyond both tops, which counts as an infinite loss

    def joined(positive: tuple[np.ndarray, np.ndarray], negative: tuple[np.ndarray, np.ndarray]) -> Losses:
        probabilities = np.zeros(2 * last + 1)
        probabilities[last:] += _divide(*positive, 0.0, step)
        probabilities[: last + 1] += _divide(negative[0][::-1], negative[1][::-1], -step * last, step)
        probabilities[last] += max(0.0, 1 - float(positive[0].sum() + negative[0].sum()) - tails)  # the rest is 0
        return Losses(step, -last, probabilities, tails)

    return joined((up, down), (without, with_sample)), joined((with_sample, without), (down, up))


def exchanged(sampling_rate: float, shift: float, step: float) -> Losses:
    """Losses of (1 - q) N(0, 1) + q N(shift, 1) against (1 - q) N(0, 1) + q N(-shift, 1), the same both ways.

    Args:
        sampling_rate: q, in (0, 1).
        shift: above 0.
        step: of the grid; larger where the grid would exceed the bins allowed.
    """
    top = shift + TAIL
    highest_loss = float(mixture_loss(np.array([top]), sampling_rate, 0.0, shift)[0])
    highest_loss -= float(mixture_loss(np.array([-top]), sampling_rate, 0.0, shift)[0])
    step = max(step, 2 * highest_loss / _MAX_BINS)
    last = math.ceil(highest_loss / step)
    inner = np.minimum(_exchanged_inverse(step * np.arange(1, last), sampling_rate, shift), top)
    right = np.append(inner, top)
    edges = np.concatenate([-right[::-1], [0.0], right])
    upper, _ = interval_masses(edges, sampling_rate, 0.0, shift)
    return Losses(step, -last, _divide(upper, upper[::-1], -step * last, step), 2 * scipy.special.ndtr(-TAIL))


def mixture_loss(x: Any, q: float, low: float, high: Any) -> np.ndarray:
    """log of the density of (1 - q) N(low, 1) + q N(high, 1) over that of N(0, 1), at x."""
    return np.logaddexp(np.log1p(-q) + low * x - low**2 / 2, math.log(q) + high * x - high**2 / 2)


def _inverse(losses: np.ndarray, q: float, shift: float) -> np.ndarray:
    """x at which the loss of `sampled` equals each of `losses`; minus infinity for losses that it never reaches."""
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = losses + np.log(-np.expm1(np.log1p(-q) - losses))  # log(exp(loss) - (1 - q))
        return np.where(losses > np.log1p(-q), (excess - math.log(q)) / shift + shift / 2, -np.inf)


def _inverse_between(losses: np.ndarray, q: float, low: float, high: float) -> np.ndarray:
    """x in [(low + high) / 2, high + TAIL] at which M(high) has each of these losses, from 0 on, against M(low).

    There the loss rises: both its shift and the chance that x belongs to it are larger than those of M(low).
    """

    def loss(x: np.ndarray) -> np.ndarray:
        return mixture_loss(x, q, 0.0, high) - mixture_loss(x, q, 0.0, low)

    points = np.linspace((low + high) / 2, high + TAIL, 4097)
    known = np.maximum.accumulate(loss(points))
    after = np.clip(np.searchsorted(known, losses), 1, len(points) - 1)
    left, right = points[after - 1], points[after]
    x = np.clip(np.interp(losses, known, points), left, right)
    for _ in range(_NEWTON_STEPS):  # kept between the two points, half of which is left where it leaves them
        missing = loss(x) - losses
        left, right = np.where(missing <= 0, x, left), np.where(missing >= 0, x, right)
        chances = [scipy.special.expit(math.log(q) - np.log1p(-q) + w * x - w**2 / 2) for w in (low, high)]
        moved = x - missing / (high * chances[1] - low * chances[0])
        x = np.where((moved >= left) & (moved <= right), moved, (left + right) / 2)
    return np.maximum.accumulate(x)


def _exchanged_inverse(losses: np.ndarray, q: float, shift: float) -> np.ndarray:
    """x at which the loss of `exchanged` equals each of `losses`, which are above 0.

    With c = q exp(-shift^2 / 2) the loss is log((1 - q + c exp(shift x)) / (1 - q + c exp(-shift x))), so that
    shift x = loss / 2 + arsinh((1 - q) / c sinh(loss / 2)).
    """
    log_c = math.log(q) - shift**2 / 2
    log_ratio = np.log1p(-q) - log_c + losses / 2 + np.log(-np.expm1(-losses)) - math.log(2)
    large = log_ratio > 300  # there arsinh(exp(t)) = t + log 2
    arsinh = np.where(large, log_ratio + math.log(2), np.arcsinh(np.exp(np.minimum(log_ratio, 300.0))))
    return (losses / 2 + arsinh) / shift


def interval_masses(edges: np.ndarray, q: float, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the intervals between edges under the mixture of `mixture_loss` and under N(0, 1).

    Args:
        edges: (m + 1,), rising.
        q, low, high: of the mixture.

    Returns:
        Two arrays (m,), each number with a relative error of rounding alone.
    """

    def between(shift: float) -> np.ndarray:
        # From the nearer tail: a difference of numbers near 1 would lose the small ones.
        x = edges - shift
        left, right = scipy.special.ndtr(x), scipy.special.ndtr(-x)
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


def composed_curves(
    pair: Callable[..., Losses | tuple[Losses, ...]],
    arguments: tuple[Any, ...],
    step: float,
    num_times: int,
    dp_delta: float,
    chance: float = 1.0,
) -> tuple[Curve, ...]:
    """Curves of `num_times` releases for this delta, one for each direction of the pair.

    Args:
        pair: `sampled`, `replaced`, `exchanged`, or one of `jaxfl.privacy.stored_gradients`.
        arguments: arguments of `pair` in front of its step; hashable, since losses and curves are cached.
        step: of the grid. A grid too large to compose is made coarser.
        num_times: at least 1.
        dp_delta: the delta of interest. A small one changes how `compose` works; all others share their curves.
        chance: w, in (0, 1], with which each of the `num_times` is a release, independently of data and of others.
    """
    return _composed(pair, arguments, step, num_times, dp_delta if is_small(dp_delta, num_times) else None, chance)


@lru_cache(maxsize=8)
def _composed(
    pair: Callable[..., Losses | tuple[Losses, ...]],
    arguments: tuple[Any, ...],
    step: float,
    num_times: int,
    dp_delta: float | None,
    chance: float,
) -> tuple[Curve, ...]:
    directions = [_at_times(losses, chance) for losses in _losses(pair, arguments, step)]
    curves = [compose(losses, num_times, dp_delta) for losses in directions]
    known = tuple(curve for curve in curves if curve is not None)
    if len(known) < len(curves):
        return _composed(pair, arguments, 2 * directions[0].step, num_times, dp_delta, chance)
    return known


def _at_times(losses: Losses, chance: float) -> Losses:
    """Losses of an event that is a release with this chance, and has the loss 0 otherwise."""
    probabilities = chance * losses.probabilities
    probabilities[-losses.lowest] += 1 - chance
    return losses._replace(probabilities=probabilities, infinite=chance * losses.infinite)


@lru_cache(maxsize=8)  # the search for a number of rounds composes the same release many times
def _losses(
    pair: Callable[..., Losses | tuple[Losses, ...]], arguments: tuple[Any, ...], step: float
) -> tuple[Losses, ...]:
    losses = pair(*arguments, step)
    return (losses,) if isinstance(losses, Losses) else losses
