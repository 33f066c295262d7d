"""Gaussian noise on a grid: releases are integers times a public step, so that no float gives a state away.

Noise in float32 takes 2^23 values. Added to a state of float32 it reaches only some numbers, and which ones depends on
the state: a released number that a neighboring state cannot give tells the two apart for certain
(docs/finite_precision.md). Here, with the step h = noise_std 2^-bits, values v are released as

    h (round(v / h) + k),    P(k) = Phi((k + 1/2) h / noise_std) - Phi((k - 1/2) h / noise_std)

in integers. For n ~ Normal(0, noise_std^2) the sum round(v / h) + k has the distribution of
round(round(v / h) + n / h): the release is what a Gaussian mechanism gives on the rounded values, rounded. So every
bound on that mechanism holds, with the L2 change of the rounded values: at most the old change plus h sqrt(d), and none
where the values are the same.

k is found exactly, by inverting the distribution of |k| at 127 random bits; one more gives the sign. The thresholds
P(|k| >= j) 2^127 are rounded to integers on the host, so that a coordinate is off by at most 2^(bits - 124) in total
variation. 64 bits would be too few: for the 11e6 coordinates of a ResNet-18 over 3,120 rounds the distances add up to
more than the usual delta of 1e-5.

Does not claim: that the values are exact before they are rounded. They are sums in float32, off by about 1e-7 of their
norm, and clipped to their norm as exactly as float32 adds up its square.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import Array, check, leaf_key, one_kernel
from jaxfl.core.tree import along_nodes, copied
from jaxfl.privacy.grid import check_bits
from jaxfl.privacy.mechanisms import NoiseMechanism, standard_noise

_RANDOM_BITS = 127  # of |k|
_DIGITS = 256  # binary digits of the numbers that thresholds are made of
_REACH = 14  # in noise_std: P(|x| > 14) = 2^-146 counts as 0
_INDEXED_BITS = 13  # most bits after a number's leading bit by which the index finds its cell
_LARGEST = 2.0**30  # in steps: larger rounded values count as this one, so that sums stay below 2^31


def grid_gaussian(noise_std: float | Array, bits: int = 12) -> NoiseMechanism:
    """Gaussian noise, rounded to the grid of step noise_std 2^-bits, on values rounded to the same grid.

    Args:
        noise_std: () or (n,), at least 0; may be traced.
        bits: static, 8 ... 16. One more bit halves what rounding adds (`Grid.rounding`) and doubles a table of 0.9 MB.

    Returns:
        A mechanism whose draws are int32, in steps.

    Raises:
        ArgumentError: noise_std below 0 or not finite, bits out of range, or a step that is 0 in float32.

    Guarantees:
        - releases are integers times the step of their node, as float32 rounds them.
        - the integers have the distribution given above.
        - neighboring values have the same releases.
        - noise_std 0 releases the values as they are, and values that are not finite stay visible.
        - values beyond 2^30 steps are released as 2^30 steps: privacy holds for them, too.

    Examples:
        >>> import jax
        >>> noise = grid_gaussian(2.0, bits=8)
        >>> values = jnp.full((1, 4), 0.3)
        >>> steps = noise.release(values, noise.draw(jax.random.key(0), values)) / (2.0 / 256)
        >>> bool((steps == jnp.round(steps)).all())
        True
    """
    check.non_negative(noise_std=noise_std)
    check.in_float32(noise_std=noise_std)
    check_bits(bits=bits)
    check.in_float32(grid_step=noise_std if check.is_traced(noise_std) else np.asarray(noise_std) * 2.0**-bits)
    noise_std = copied(noise_std)

    def draw(key, params):
        return standard_noise(key, params, lambda node_key, size: integers(node_key, size, bits))

    def release(values, noise):
        step = jnp.asarray(noise_std, jnp.float32) * np.float32(2.0**-bits)
        return jax.tree.map(lambda leaf, drawn: on_grid(leaf, drawn, along_nodes(step, leaf)), values, noise)

    return NoiseMechanism("grid_gaussian", noise_std, draw, release, lambda scale: grid_gaussian(scale, bits), bits)


def on_grid(values: Array, noise: Array, step: Array) -> Array:
    """step (round(values / step) + noise); the values themselves where the step is 0 or they are not finite."""
    silent = step == 0
    steps = jnp.clip(jnp.round(values / jnp.where(silent, 1.0, step)), -_LARGEST, _LARGEST)
    released = (steps.astype(jnp.int32) + noise).astype(jnp.float32) * step
    return jnp.where(silent | ~jnp.isfinite(values), values, released)


def integers(key: Array, size: int, bits: int) -> Array:
    """k, (size,), int32."""
    table = _table(bits)
    # In a loop: a hash in one kernel with the look-ups is made number by number, at eight times its time.
    # `split` makes no keys here: it gives both words of every hash, where jax.random.bits gives one.
    halves = jnp.stack([leaf_key(key, half) for half in range(2)])
    pairs = jax.lax.map(lambda half: jax.random.key_data(jax.random.split(one_kernel(half), (size,))), halves)
    negative = pairs[0, :, 0] >> 31
    words = (pairs[0, :, 0] & np.uint32(2**31 - 1), pairs[0, :, 1], pairs[1, :, 0], pairs[1, :, 1])

    def at(column: np.ndarray, index: Array) -> Array:
        return jnp.asarray(column).at[index].get(mode="promise_in_bounds")

    # |k| is the number of thresholds above the random number. The index knows it up to those in the number's own cell.
    def search(step: Array, place: Array) -> Array:
        further = place + (1 << (table.steps - 1 - step))
        less = jnp.zeros(size, bool)
        for word, column in zip(words[::-1], table.thresholds[::-1], strict=True):
            threshold = at(column, further)
            less = (word < threshold) | ((word == threshold) & less)
        return jnp.where(less, further, place)

    place = jax.lax.fori_loop(0, table.steps, search, at(table.above, _cell(words, table.indexed_bits)))
    return jnp.where(negative == 1, -place, place)


def _cell(words: tuple[Array, ...], indexed_bits: int) -> Array:
    """The cell of a 128-bit number in the index: by its leading bit, then by the bits that follow; 0 counts as 1."""
    first, after, zeros = words[3], jnp.zeros_like(words[3]), jnp.full(words[3].shape, 96, jnp.int32)
    for place in (2, 1, 0):
        used = words[place] != 0
        first = jnp.where(used, words[place], first)
        after = jnp.where(used, words[place + 1], after)
        zeros = jnp.where(used, np.int32(32 * place), zeros)
    shift = jax.lax.clz(jnp.maximum(first, np.uint32(1)))
    leading = (first << shift) | jnp.where(shift > 0, after >> (np.uint32(32) - jnp.maximum(shift, np.uint32(1))), 0)
    following = (leading << 1) >> np.uint32(32 - indexed_bits)
    exponent = np.int32(127) - zeros - shift.astype(jnp.int32)
    return (exponent << indexed_bits) + following.astype(jnp.int32)


class _Table(NamedTuple):
    """The distribution of |k|."""

    thresholds: tuple[np.ndarray, ...]  # of |k| >= j, at j, from high to low, four words of uint32; zeros at the end
    above: np.ndarray  # (cells,), int32, thresholds in cells of larger numbers
    indexed_bits: int
    steps: int  # of the search in a cell


@lru_cache(maxsize=4)
def _table(bits: int) -> _Table:
    indexed_bits = min(bits, _INDEXED_BITS)
    numbers = _thresholds(bits)
    cells = [
        ((number.bit_length() - 1) << indexed_bits)
        + ((number << indexed_bits) >> (number.bit_length() - 1))
        - (1 << indexed_bits)
        for number in numbers
    ]
    in_cell = np.bincount(cells, minlength=_RANDOM_BITS << indexed_bits)
    # A threshold that is the least number of its cell is above none of that cell.
    above_some = [
        cell
        for cell, number in zip(cells, numbers, strict=True)
        if number % (1 << max(0, number.bit_length() - 1 - indexed_bits))
    ]
    steps = int(np.bincount(above_some).max()).bit_length()
    padded = [0, *numbers, *[0] * 2**steps]
    columns = [np.array([number >> shift & 0xFFFFFFFF for number in padded], np.uint32) for shift in (96, 64, 32, 0)]
    above = (len(numbers) - np.cumsum(in_cell)).astype(np.int32)
    return _Table(tuple(columns), above, indexed_bits, steps)


def _thresholds(bits: int) -> list[int]:
    """P(|k| >= j) 2^127, rounded, for j = 1, 2, ... as far as it is above 1: a random number of 0 counts as 1.

    With a = h / 2 the mass of |k| = j is 2 phi(x) 2 a (1 + He_2(x) a^2 / 3! + He_4(x) a^4 / 5! + ...) at x = j h, for
    the n-th derivative of phi is (-1)^n He_n(x) phi(x). Numbers are integers, in units of 2^-256.
    """
    one, count = 1 << _DIGITS, (_REACH << bits) + 1
    density = math.isqrt((2 << 3 * _DIGITS) // _pi())  # sqrt(2 / pi), twice the density at 0
    # exp(-(j + 1)^2 h^2 / 2) is exp(-j^2 h^2 / 2) times exp(-h^2 / 2) exp(-j h^2).
    ratio, factor = _exp_of_minus(2 * bits + 1), _exp_of_minus(2 * bits)
    densities = []
    for _ in range(count):
        densities.append(density)
        density, ratio = density * ratio >> _DIGITS, ratio * factor >> _DIGITS
    integers = np.arange(count).astype(object)
    squares = (integers * integers << _DIGITS) >> 2 * bits  # of x
    total = even = odd = np.full(count, one, object)  # He_2i, and He_(2i+1) / x
    power, order = one, 0  # a^order / (order + 1)!
    while power * int(abs(even).max()) >> _DIGITS:
        order += 2
        even = (squares * odd >> _DIGITS) - (order - 1) * even
        odd = even - order * odd
        power = (power >> 2 * (bits + 1)) // (order * (order + 1))
        total = total + (power * even >> _DIGITS)
    masses = np.array(densities, object) * total >> (_DIGITS + bits)
    tails = np.cumsum(masses[:0:-1])[::-1]
    unit = _DIGITS - _RANDOM_BITS
    return [number for tail in tails if (number := (int(tail) + (1 << (unit - 1))) >> unit) > 1]


def _exp_of_minus(power: int) -> int:
    """exp(-2^-power) for power at least 1, in units of 2^-256."""
    total = term = 1 << _DIGITS
    order = 0
    while term:
        order += 1
        term = -((abs(term) >> power) // order) if order % 2 else (abs(term) >> power) // order
        total += term
    return total


def _pi() -> int:
    """pi = 16 arctan(1/5) - 4 arctan(1/239), in units of 2^-256."""

    def arctan_of_inverse(number: int) -> int:
        term, total, order = (1 << _DIGITS) // number, 0, 1
        while term:
            total += term // order if order % 4 == 1 else -(term // order)
            term, order = term // number**2, order + 2
        return total

    return 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)
