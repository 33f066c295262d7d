"""Standard normal numbers in pairs: a hash of threefry, a logarithm and a square root serve two of them.

    x + i y = sqrt(-2 log u) exp(i a),    u uniform in (0, 1), a uniform on the circle

The inverse distribution function takes all three for each number, and a CPU hashes twice for it. Here u has 32 bits and
ends at 2^-33 and 1 - 2^-33, so that |x + i y| lies between 1.5e-5 and 6.76; the 23 bits of `jax.random.normal` end at
5.4.

Source: Box, Muller, "A note on the generation of random normal deviates" (1958).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.core.platform import is_cpu, platform
from jaxfl.core.threefry import hashes
from jaxfl.core.types import Array

_SPACE = 1
"""High word of the counters. `jax.random` hashes counters with 0 there: no key gives related numbers in both ways."""

# Minimax polynomials, lowest power first, and their largest relative errors.
_LOG = (-1.44269478, 0.721400261, -0.478776574, 0.392774522, -0.05484844, 1.13313758, 1.56033063, 1.70949483)
"""-log2(1 + f) / f, f in [-1/2, 0]: 1.5e-7."""
_SINE = (1.0, -0.1666665, 0.0083320165, -0.00019501822)
"""sin(a) / a by powers of a^2, |a| up to pi / 4: 3.2e-9."""
_COSINE = (1.0, -0.49999842, 0.04165442, -0.001357941)
"""cos(a) by powers of a^2, |a| up to pi / 4: 3.3e-8."""


def normals(key: Array, size: int) -> Array:
    """Draw standard normal numbers in pairs.

    Args:
        key: typed threefry key, shape ().
        size: how many, static.

    Returns:
        (size,), float32.

    Raises:
        ArgumentError: a key of another generator.

    Guarantees:
        - number k depends on the key and k only.
        - independent of all numbers that `jax.random` draws from the key.
        - on a CPU the same bits by itself, in a compiled program and vmapped.

    Examples:
        >>> numbers = normals(jax.random.key(0), 100_001)
        >>> round(float(numbers.mean()), 1), round(float(numbers.std()), 2)
        (0.0, 1.0)
    """
    words = jax.random.key_data(key)
    if words.shape != (2,):
        found = f"got a {jax.random.key_impl(key)} key of shape {key.shape}"
        raise ArgumentError("key", "must be one threefry key", found, "Make it with jax.random.key(seed).")
    return _normals(words, size)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _normals(words: Array, size: int) -> Array:
    shape = (2, -(-size // 4))  # of pairs. XLA makes a loop over one axis of them without vectors: 14 ns a number for 2
    if is_cpu():
        # A kernel has one result on a CPU, and each number would make its pair anew. A branch keeps pairs in memory, as
        # complex numbers, if XLA cannot see that it is always taken. Its predicate has no axis of lanes, for which vmap
        # would compute both branches, and in the kernels of whoever takes the numbers.
        always = jax.lax.optimization_barrier(jnp.array(True))
        made = functools.partial(_pairs, shape=shape)
        pairs = jax.lax.cond(always, made, lambda words: jnp.full(shape, words[0].astype(jnp.complex64)), words)
    else:
        pairs = _pairs(words, shape)
        if platform() == "gpu":  # kept, or XLA may keep words of the hash in their place, half as many bytes again
            pairs = jax.lax.optimization_barrier(pairs)
    twice = jnp.repeat(pairs.ravel(), 2)
    is_second = jnp.arange(len(twice), dtype=jnp.uint32) % np.uint32(2) == 1
    return jnp.where(is_second, twice.imag, twice.real)[:size]


def _pairs(words: Array, shape: tuple[int, int]) -> Array:
    """Make pairs from a key's words (2,), uint32: complex64."""
    return jax.lax.complex(*_pair(*hashes(words, shape, _SPACE)))


def _pair(high: Array, low: Array) -> tuple[Array, Array]:
    """Make two normal numbers of two random words, uint32: u of the first, the angle of the second."""
    # v = min(u, 1 - u), exact to a float's rounding at both ends: log u is log v, or log(1 - v).
    signed = jax.lax.bitcast_convert_type(high, jnp.int32)
    is_small = signed >= 0
    v = ((signed ^ (signed >> 31)).astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    bits = jax.lax.bitcast_convert_type(v, jnp.uint32)  # v = 2^-halvings (1 + f) with f in [-1/2, 0)
    one_plus = jax.lax.bitcast_convert_type((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F000000), jnp.float32)
    halvings = np.int32(126) - (bits >> np.uint32(23)).astype(jnp.int32)
    f = jnp.where(is_small, one_plus - np.float32(1), -v)
    # A sum has one product, so that a compiler that fuses the two has no choice and every program has the same bits.
    minus_log2 = f * _polynomial(_LOG, f) + jnp.where(is_small, halvings, 0).astype(jnp.float32)
    square = minus_log2 * np.float32(2 * np.log(2))
    # A bit for a sign of both numbers, a bit that swaps them and 30 bits of an angle in (-pi / 4, pi / 4), never 0.
    sign = low & np.uint32(1 << 31)
    radius = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(jnp.sqrt(square), jnp.uint32) | sign, jnp.float32
    )
    steps = jax.lax.bitcast_convert_type((low << np.uint32(2)) | np.uint32(2), jnp.int32)
    angle = steps.astype(jnp.float32) * np.float32(np.pi / 4 / 2**31)
    sine, cosine = angle * _polynomial(_SINE, angle**2), _polynomial(_COSINE, angle**2)
    is_swapped = (low & np.uint32(1 << 30)) != 0
    return radius * jnp.where(is_swapped, sine, cosine), radius * jnp.where(is_swapped, cosine, sine)


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    """A polynomial by its coefficients, lowest power first."""
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + np.float32(coefficient)
    return total
