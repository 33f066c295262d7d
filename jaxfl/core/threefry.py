"""The bits of JAX's threefry generator, made by one kernel.

On a CPU, `jax.random` walks through the twenty rounds of the hash in a loop that keeps its words in memory. Written
out, all of it fuses with the use of the bits. A million normal numbers took 3.6 ns each instead of 10.8, with the same
values (one core, AVX-512, jax 0.10.2); private training spends much of its time on them.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), Threefry-2x32 with 20 rounds;
how keys and counters make bits: `jax.random` with `jax_threefry_partitionable`, its default.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.core.types import Array

_DEFAULT = "threefry2x32"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def one_kernel(key: Array) -> Array:
    """The same threefry key, to be used at once: what `jax.random` draws from it has the same bits, made faster.

    Args:
        key: typed key of any shape. A key of another generator is returned as it is, as are all keys where
            `jax_threefry_partitionable` is off.

    Returns:
        Keys of the same shape and of another dtype. Do not store them: keep the original.

    Guarantees:
        - the numbers are those of jax.random with the key itself.
        - no loop in the compiled program.

    Examples:
        >>> key = jax.random.key(0)
        >>> bool((jax.random.normal(one_kernel(key), (5,)) == jax.random.normal(key, (5,))).all())
        True
    """
    # An option with a context manager is an attribute, which the type checker does not know.
    if not is_threefry(key) or not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_implementation())


def fold_in(key: Array, data: int | Array) -> Array:
    """`jax.random.fold_in`, for a threefry key made faster.

    Args:
        key: typed key, shape ().
        data: what to fold in, an integer, shape ().

    Guarantees:
        - the key is that of jax.random.fold_in.

    Examples:
        >>> bool(fold_in(jax.random.key(0), 7) == jax.random.fold_in(jax.random.key(0), 7))
        True
    """
    if not is_threefry(key) or jnp.ndim(key) or jnp.ndim(data):
        return jax.random.fold_in(key, data)  # which refuses arrays
    word = np.uint32(data) if isinstance(data, int) else jnp.uint32(data)
    return jax.random.wrap_key_data(_fold(jax.random.key_data(key), word), impl=jax.random.key_impl(key))


def is_threefry(key: Array) -> bool:
    """True for a typed key of JAX's default generator."""
    return jax.random.key_impl(key) == _DEFAULT


def _hash(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 of 64-bit counters, each in two words of uint32, under one key, (2,), uint32."""
    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    high, low = high + words[0], low + words[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            high = high + low
            low = ((low << np.uint32(distance)) | (low >> np.uint32(32 - distance))) ^ high
        high, low = high + words[(group + 1) % 3], low + words[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def hashes(key: Array, shape: tuple[int, ...], space: int = 0) -> tuple[Array, Array]:
    """Hash the positions in an array of this shape, in row-major order, under a key's words (2,), uint32.

    Numbers of another `space`, the counters' high word, are independent. `jax.random` has space 0.
    """
    if math.prod(shape) > 2**32:
        remedy = "Draw it in parts, each with a key of its own."
        raise ArgumentError("shape", "must hold at most 2^32 random numbers", f"got {shape}", remedy)
    positions = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return _hash(key, jnp.full_like(positions, space), positions)


def _bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    high, low = hashes(key, shape)
    if bit_width == 64:
        return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{bit_width}")


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.stack(hashes(key, shape), axis=-1)


def _fold_in(key: Array, data: int | Array) -> Array:
    return jnp.stack(_hash(key, jnp.uint32(0), jnp.uint32(data)))


_fold = jax.jit(_fold_in, inline=True)  # one call where nothing else is compiled, and part of the caller elsewhere


def _seed(seed: Array) -> Array:
    return jax.random.key_data(jax.random.key(seed, impl=_DEFAULT))


@functools.cache
def _implementation() -> Hashable:
    """The generator of `one_kernel` as JAX takes it, registered once."""
    from jax.extend.random import define_prng_impl  # all of jax.extend, which takes 0.2 s

    return define_prng_impl(
        key_shape=(2,), seed=_seed, split=_split, random_bits=_bits, fold_in=_fold_in, name="one_kernel", tag="1k"
    )
