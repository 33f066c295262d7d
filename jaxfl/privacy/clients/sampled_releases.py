"""Epsilon of Poisson-sampled Gaussian releases, of one kind or of several kinds together.

In a release of one kind every sample (or client) takes part independently with probability q. It moves the result by at
most 1 / z in units of the noise. Each kind has num_releases releases. Kinds may come in any order, and each release
may depend on what the others released: their dominating pairs compose. The pair of distributions for one sample is

- taken away, q < 1: (1 - q) N(0, 1) + q N(1 / z, 1) against N(0, 1), both directions;
- exchanged for another, q < 1: (1 - q) N(0, 1) + q N(1 / z, 1) against (1 - q) N(0, 1) + q N(-1 / z, 1);
- q = 1: N(mu, 1) against N(0, 1) with mu = sqrt(num_releases) / z, or twice that where it is exchanged.

A smaller q gives a smaller epsilon: the pair of q' < q is that of q, with N(0, 1) in its place with probability
1 - q' / q. In particular the bound for q = 1 holds for every q.

The first two compose as in `jaxfl.privacy.dominating_pairs`. For several kinds the losses of each are composed by
themselves, on a common grid, and convolved. Everything is NumPy, float64, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxfl.privacy.composition import (
    Losses,
    compose,
    convolved,
    curve_epsilon,
    rounding_error,
    sum_of_draws,
)
from jaxfl.privacy.dominating_pairs import (
    composed_curves,
    exchanged,
    gaussian_epsilon,
    grid_step,
    sampled,
    unresolved_delta,
)

_LARGEST_SHIFT = 500.0  # in units of the noise; beyond it sampling hides nothing that a grid could show
_SMALLEST_LOSS = 1e-12  # q / z; the numbers that it is made of are off by 1e-16
_LOST = 2e-15  # probability that `sum_of_draws` may lose
_FINER = 16  # steps of a Gaussian's grid in one of `grid_step`: it has few, and costs next to nothing
_SHARE = 0.004  # most that the grid may add to the variance of all losses, as a share of it
_MAX_DOUBLINGS = 30


class SampledReleases(NamedTuple):
    """Releases of one kind."""

    sampling_rate: float  # q, in (0, 1]
    noise_multiplier: float  # z, standard deviation of the noise over the L2 sensitivity, positive
    num_releases: int  # at least 0


def sampled_epsilon(kinds: Sequence[SampledReleases], dp_delta: float, *, exchange: bool = False) -> tuple[float, bool]:
    """Epsilon of all releases of all kinds together.

    Args:
        kinds: at least one.
        dp_delta: in (0, 1).
        exchange: whether one sample is exchanged for another; by default it is taken away.

    Returns:
        (epsilon, whether it rests on the secrecy of the draws). Without releases epsilon is 0.

    Guarantees:
        - it is an upper bound within 0.1 % of dp-accounting's.
        - more releases, a larger rate or less noise never lower it.

    Examples:
        >>> kinds = [SampledReleases(0.015, 1.1, 317), SampledReleases(0.015, 8.0, 60)]
        >>> [round(sampled_epsilon(kinds[:number], 1e-5)[0], 3) for number in (1, 2)]
        [1.357, 1.358]
    """
    kinds = tuple(_resolved(kind) for kind in kinds if kind.num_releases)
    if not kinds:
        return 0.0, False
    mu = math.sqrt(sum(_shift(kind, exchange) ** 2 * kind.num_releases for kind in kinds))
    plain = gaussian_epsilon(mu, dp_delta)
    if all(kind.sampling_rate == 1 for kind in kinds) or max(map(_largest_shift, kinds)) > _LARGEST_SHIFT:
        return plain, False
    if dp_delta <= unresolved_delta(max(kind.num_releases for kind in kinds if kind.sampling_rate < 1)):
        return plain, False
    # Each kind by itself, too: bounds on other grids differ in the fourth digit, and more releases must not lower it.
    secret = max(_single(kind, dp_delta, exchange) for kind in kinds)
    if len(kinds) > 1:
        secret = max(secret, _several(kinds, dp_delta, exchange))
    return (secret, True) if secret < plain else (plain, False)


def _resolved(kind: SampledReleases) -> SampledReleases:
    """Return the kind, with a rate of 1 where the losses of sampled releases are too small for float64."""
    is_lost = kind.sampling_rate / kind.noise_multiplier < _SMALLEST_LOSS
    return kind._replace(sampling_rate=1.0) if is_lost else kind


def _shift(kind: SampledReleases, exchange: bool) -> float:
    """Change of one release in units of the noise."""
    return (2 if exchange else 1) / kind.noise_multiplier


def _largest_shift(kind: SampledReleases) -> float:
    """Compute the largest shift of a release, or of all releases where they count as one."""
    return (math.sqrt(kind.num_releases) if kind.sampling_rate == 1 else 1) / kind.noise_multiplier


def _step(kind: SampledReleases) -> float:
    """Compute the step of the grid that this kind needs."""
    shift = _largest_shift(kind)
    if kind.sampling_rate == 1:
        return 1 / (5 * _FINER * max(shift, 1 / shift))
    return grid_step(kind.sampling_rate, kind.noise_multiplier, shift)


def _single(kind: SampledReleases, dp_delta: float, exchange: bool) -> float:
    """Epsilon of one kind."""
    if kind.sampling_rate == 1:
        return gaussian_epsilon(_shift(kind, exchange) * math.sqrt(kind.num_releases), dp_delta)
    q, shift, step = kind.sampling_rate, 1 / kind.noise_multiplier, _step(kind)
    curves = composed_curves(exchanged if exchange else sampled, (q, shift), step, kind.num_releases, dp_delta)
    return float(max(curve_epsilon(curve, dp_delta) for curve in curves))


def _several(kinds: tuple[SampledReleases, ...], dp_delta: float, exchange: bool) -> float:
    """Epsilon of several kinds; infinite where the grid does not resolve this delta."""
    steps = [_step(kind) for kind in kinds]
    # A grid coarser than the losses of a kind, about q / z, adds about step q / z to the variance of each release.
    sizes = [kind.sampling_rate / kind.noise_multiplier for kind in kinds]
    added, variance = (sum(k.num_releases * size**p for k, size in zip(kinds, sizes, strict=True)) for p in (1, 2))
    step = max(min(steps), min(max(steps), _SHARE * variance / added))
    for _ in range(_MAX_DOUBLINGS):
        parts = [_composed(kind, exchange, step) for kind in kinds]
        known = [part for part in parts if part is not None]
        coarsest = max((part[0].step for part in known), default=2 * step)
        if len(known) == len(parts) and coarsest == step:
            curves = [compose(_together([part[way] for part in known]), 1) for way in range(len(known[0]))]
            if all(curve is not None for curve in curves):
                return float(max(curve_epsilon(curve, dp_delta) for curve in curves if curve is not None))
            coarsest = 2 * step
        step = max(coarsest, 2 * step) if len(known) < len(parts) else coarsest
    return math.inf


def _together(parts: Sequence[Losses]) -> Losses:
    """Losses of independent parts on one grid, added up."""
    total = parts[0]
    for part in parts[1:]:
        total = Losses(
            step=total.step,
            lowest=total.lowest + part.lowest,
            probabilities=convolved(total.probabilities, part.probabilities),
            infinite=total.infinite + part.infinite + rounding_error(1),
        )
    return total


@lru_cache(maxsize=32)
def _composed(kind: SampledReleases, exchange: bool, step: float) -> tuple[Losses, ...] | None:
    """Losses of all releases of a kind, in each direction in which they differ; None where the grid is too large.

    Where one release needs a larger step than asked for, its losses come back as they are, on that grid.
    """
    q, num = kind.sampling_rate, kind.num_releases
    if q == 1:  # Gaussian, all releases as one, the same in both directions
        num, shift = 1, _shift(kind, exchange) * math.sqrt(kind.num_releases)
        with np.errstate(divide="ignore"):  # log(1 - q)
            ways = sampled(1.0, shift, step)
    else:
        shift = 1 / kind.noise_multiplier
        ways = (exchanged(q, shift, step),) * 2 if exchange else sampled(q, shift, step)
    if ways[0].step != step:
        return ways
    composed = []
    for losses in ways if ways[0] is not ways[1] else ways[:1]:
        draws = sum_of_draws(losses.probabilities, num)
        if draws is None:
            return None
        infinite = -math.expm1(num * math.log1p(-min(losses.infinite, 0.5))) + _LOST + rounding_error(num)
        composed.append(Losses(step, draws[0] + num * losses.lowest, draws[1], infinite))
    return tuple(composed) * (2 // len(composed))
