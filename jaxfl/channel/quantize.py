"""Unbiased stochastic quantisers: fewer bits a number, and randomness that some methods rely on instead of noise.

A number x is rounded at random to one of its two neighbors on a grid, so that E[Q(x)] = x. `Quantizer` documents what
the four kinds have in common, their errors included, and shows an example.

A value beyond the range becomes the range's end, which biases it; such values are counted. An infinite value counts,
too; it stays infinite if the grid has no end or the format has an infinity. NaN stays NaN and is not counted.

References:
    Wang and Basar ([41] of `jaxfl.perturbed_gossip`): ternary quantisation of the states that nodes exchange.
    D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017:
    stochastic rounding to a uniform grid.
    DZOFL (`jaxfl.dzofl`): Assumption IV.5, variance in proportion to x^2, which `float_quantizer` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxfl.core import ArgumentError, Array, check
from jaxfl.core.reprs import short_repr


class Quantizer(NamedTuple):
    """A way to round numbers at random.

    Raises:
        ArgumentError: a number out of range; on use of a `float_quantizer`, values neither float32 nor float64.

    Guarantees:
        - unbiased for values in the range, up to the resolution of the uniform numbers.
        - all values are on the grid and in the range; zero stays zero.
        - in equal steps, a zero tells no sign.
        - in equal steps, the error is below a step and the variance at most step^2 / 4 a coordinate.
        - in equal steps, distributions of x and x' are at most |x - x'| / step apart, in total variation a coordinate.

    Examples:
        >>> values, uniform = jnp.array([0.3, -0.7, 7.0]), jnp.array([0.59, 0.61, 0.9])
        >>> even, signs = uniform_quantizer(0.5, levels=4), ternary_quantizer(1.0)
        >>> for quantizer in (even, signs, dithered_quantizer(3, 1.5), float_quantizer(3, 2)):
        ...     print(round(quantizer.bits, 3), quantizer.apply(values, uniform).tolist(), quantizer.overflows(values))
        2.0 [0.5, -1.0, 0.5] 1
        1.585 [0.0, -1.0, 1.0] 1
        3.0 [0.5, -1.0, 1.5] 1
        6.0 [0.3125, -0.625, 7.0] 0
    """

    bits: float  # sent per number: log2 of the number of values, a fraction unless that number is a power of 2
    # (values, uniform on [0, 1) and independent) -> quantised values, all three of one shape and dtype
    apply: Callable[[Array, Array], Array]
    overflows: Callable[[Array], Array]  # values -> (), int32: how many lie beyond the range
    step: float | Array | None = None  # distance of neighboring values; None where it is not the same everywhere

    __repr__ = short_repr


def uniform_quantizer(step: float | Array, levels: int | None = None) -> Quantizer:
    """Stochastic rounding to the grid k * step, with k an integer.

    Args:
        step: distance of neighboring values, positive; may be traced.
        levels: how many values there are, at least 2: k from -floor(levels / 2) to floor((levels - 1) / 2), as in two's
            complement. None sends k as an integer of 32 bits; 2^31 steps and more are beyond the range.
    """
    check.scalar(step=step)
    check.positive(step=step)
    if levels is None:
        most = 2.0**31 - 128  # the largest float32 below 2^31
        return Quantizer(
            32.0, partial(_to_grid, 1, step, -math.inf, math.inf), partial(_num_beyond, step, -most, most), step
        )
    check.at_least(2, levels=levels)
    steps = step, -(levels // 2), (levels - 1) // 2
    return Quantizer(math.log2(levels), partial(_to_grid, 1, *steps), partial(_num_beyond, *steps), step)


def ternary_quantizer(threshold: float | Array) -> Quantizer:
    """threshold * sign(x) with probability |x| / threshold, else 0: log2(3) bits, or 1.6 with 5 numbers in a byte.

    Args:
        threshold: the step and the range's end, positive; may be traced.

    Guarantees:
        - variance |x| (threshold - |x|); the result never has the opposite sign of x.
    """
    check.scalar(threshold=threshold)
    check.positive(threshold=threshold)

    def apply(values, uniform):
        size = _to_grid(1, threshold, 0, 1, jnp.abs(values), uniform)
        return jnp.where(size == 0, 0.0, jnp.copysign(size, values))  # a zero with a sign would tell that of x

    return Quantizer(math.log2(3), apply, partial(_num_beyond, threshold, -1, 1), threshold)


def dithered_quantizer(bits: int, limit: float | Array) -> Quantizer:
    """Non-subtractive dither: stochastic rounding to 2^bits - 1 values in equal steps, from -limit to limit.

    Args:
        bits: sent per number, 2 to 24; a float32 resolves no more. One of 2^bits values stays unused.
        limit: positive; may be traced. A step is limit / (2^(bits - 1) - 1).
    """
    check.at_least(2, bits=bits)
    check.one_of(tuple(range(2, 25)), bits=bits)
    check.scalar(limit=limit)
    check.positive(limit=limit)
    parts = 2 ** (bits - 1) - 1
    apply = partial(_to_grid, parts, limit, -1, 1)
    return Quantizer(float(bits), apply, partial(_num_beyond, limit, -1, 1), limit / parts)


def float_quantizer(exponent_bits: int, mantissa_bits: int) -> Quantizer:
    """Stochastic rounding to a small float: a sign, an exponent, a mantissa, as IEEE 754 lays them out.

    With E exponent and m mantissa bits: 2^-m between neighbors of [1, 2), twice that in [2, 4), and so on up to the
    largest value (2 - 2^-m) 2^(2^(E-1) - 1), where larger numbers saturate. Below the smallest normal number
    2^(2 - 2^(E-1)) neighbors stay as far apart as above it (subnormal numbers). (4, 3) has a byte and ends at 240. If
    the values have no more exponent bits than E (E = 8 for float32), XLA takes subnormal numbers for 0 on a CPU.

    Args:
        exponent_bits: E, 2 to 8.
        mantissa_bits: m, 0 to 23.

    Guarantees:
        - variance at most s x^2 from the smallest normal number on, s = 2^-2m / (4 + 4 * 2^-m): 0.125 for m = 0,
          1.514e-5 for m = 7, 2.382e-7 for m = 10.
        - variance at most a quarter of their squared distance among the subnormal numbers.
        - infinities and NaN stay.
    """
    check.at_least(2, exponent_bits=exponent_bits)
    check.at_least(0, mantissa_bits=mantissa_bits)
    check.one_of(tuple(range(2, 9)), exponent_bits=exponent_bits)
    check.one_of(tuple(range(24)), mantissa_bits=mantissa_bits)
    bias = 2 ** (exponent_bits - 1) - 1
    largest = (2 - 2.0**-mantissa_bits) * 2.0**bias

    def apply(values, uniform):
        if values.dtype not in (jnp.float32, jnp.float64):
            raise ArgumentError("values", "must be float32 or float64", f"got {values.dtype}", "Convert them first.")
        info = jnp.finfo(values.dtype)
        size = jnp.minimum(jnp.abs(values), largest)
        # The power of two at or below a number, but not a subnormal one, and 2 / it: a GPU's quotients may be inexact.
        exponent = lax.bitcast_convert_type(jnp.maximum(size, 2.0 ** (1 - bias)), f"uint{info.bits}") >> info.nmant
        power = lax.bitcast_convert_type(exponent << info.nmant, values.dtype)
        twice_inverse = lax.bitcast_convert_type((2 * info.maxexp - 1 - exponent) << info.nmant, values.dtype)
        magnitude = power * (_round(size * twice_inverse * 2.0 ** (mantissa_bits - 1), uniform) * 2.0**-mantissa_bits)
        return jnp.where(jnp.isfinite(values), jnp.copysign(magnitude, values), values)

    return Quantizer(1.0 + exponent_bits + mantissa_bits, apply, overflows=partial(_num_beyond, largest, -1, 1))


def _to_grid(parts: int, unit: float | Array, lowest: float, highest: float, values: Array, uniform: Array) -> Array:
    """Stochastic rounding to the multiples of unit / parts, from lowest * unit to highest * unit."""
    width = jnp.asarray(unit, values.dtype)
    multiple = jnp.clip(values / width, lowest, highest) * parts
    return width * (_round(multiple, uniform) / parts)


def _round(multiple: Array, uniform: Array) -> Array:
    """Round up with a probability equal to the distance from the integer below, else down to that integer."""
    below = jnp.floor(multiple)
    return below + (uniform < multiple - below).astype(multiple.dtype)


def _num_beyond(unit: float | Array, lowest: float, highest: float, values: Array) -> Array:
    """Count the values below lowest * unit or above highest * unit, (), int32."""
    width = jnp.asarray(unit, values.dtype)
    return jnp.sum((values < lowest * width) | (values > highest * width), dtype=jnp.int32)
