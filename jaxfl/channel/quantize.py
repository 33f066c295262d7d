"""Unbiased stochastic quantisers: fewer bits a number, and randomness that some methods rely on instead of noise.

A number x is rounded at random to one of its two neighbors on a grid, so that E[Q(x)] = x. The random numbers come from
outside, so that quantising itself is deterministic. What privacy it buys is not this file's business, beyond the total
variation that each quantiser states.

References:
    Y. Wang, T. Basar, "Quantization Enabled Privacy Protection in Decentralized Stochastic Optimization", IEEE
    Transactions on Automatic Control 68(7), 2023: ternary quantisation of the states that nodes exchange.
    D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding", NeurIPS 2017: stochastic rounding to a uniform grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxfl.core import Array, check


class Quantizer(NamedTuple):
    """A way to round numbers at random.

    Attributes:
        bits: sent per number; log2 of the number of values, so a fraction unless that is a power of 2.
        apply: (values, uniform) -> quantised values, of the same shape and dtype; `uniform` are independent and uniform
            on [0, 1), in the shape and dtype of the values. NaN stays NaN.
    """

    bits: float
    apply: Callable[[Array, Array], Array]


def uniform_quantizer(step: float | Array, levels: int | None = None) -> Quantizer:
    """Stochastic rounding to the grid k * step: x goes up with the probability of its distance to the point below.

    A change from x to x' changes the distribution of a coordinate by a total variation of at most |x - x'| / step.

    Args:
        step: distance of neighboring values, positive; may be traced.
        levels: how many values there are, at least 2: k from -floor(levels / 2) to floor((levels - 1) / 2), as in two's
            complement. Values beyond the last one saturate there, and are then biased. None sends k as an integer of
            32 bits, which holds values up to 2^31 steps; nothing saturates.

    Returns:
        A quantiser of log2(levels) bits, or 32.

    Raises:
        ArgumentError: a step that is not positive, fewer than 2 levels, or levels that are not a static integer.

    Guarantees:
        - unbiased for values in the range, up to the resolution of the uniform numbers.
        - variance at most step^2 / 4 a coordinate; the error is below step.
        - all values are on the grid and in the range; zero stays zero.

    Example:
        >>> values = jnp.array([0.3, -0.05, 7.0])
        >>> quantizer = uniform_quantizer(0.5, levels=4)
        >>> quantizer.apply(values, jnp.array([0.59, 0.95, 0.9])).tolist(), quantizer.bits
        ([0.5, -0.5, 0.5], 2.0)
    """
    check.scalar(step=step)
    check.positive(step=step)
    if levels is not None:
        check.at_least(2, levels=levels)

    def apply(values, uniform):
        width = jnp.asarray(step, values.dtype)
        scaled = values / width
        if levels is not None:
            scaled = jnp.clip(scaled, -(levels // 2), (levels - 1) // 2)
        below = jnp.floor(scaled)
        return width * (below + (uniform < scaled - below).astype(values.dtype))

    return Quantizer(bits=32.0 if levels is None else math.log2(levels), apply=apply)


def ternary_quantizer(threshold: float | Array) -> Quantizer:
    """threshold * sign(x) with probability |x| / threshold, else 0.

    A change from x to x' changes the distribution of a coordinate by a total variation of at most |x - x'| / threshold.

    Args:
        threshold: positive; may be traced. Values beyond it saturate there, and are then biased.

    Returns:
        A quantiser of log2(3) bits, which packing many numbers together reaches (5 in a byte: 1.6).

    Raises:
        ArgumentError: a threshold that is not positive.

    Guarantees:
        - unbiased for |x| at most the threshold, up to the resolution of the uniform numbers.
        - variance |x| (threshold - |x|), at most threshold^2 / 4 a coordinate.
        - all values are minus threshold, 0 or threshold, never of the other sign than x.

    Example:
        >>> ternary_quantizer(2.0).apply(jnp.array([0.5, -0.5, 3.0]), jnp.array([0.3, 0.2, 0.9])).tolist()
        [0.0, -2.0, 2.0]
    """
    check.scalar(threshold=threshold)
    check.positive(threshold=threshold)

    def apply(values, uniform):
        largest = jnp.asarray(threshold, values.dtype)
        rounded = jnp.where(uniform < jnp.abs(values) / largest, jnp.copysign(largest, values), 0)
        return jnp.where(jnp.isnan(values), values, rounded)  # a comparison alone would send 0 for it

    return Quantizer(bits=math.log2(3), apply=apply)
