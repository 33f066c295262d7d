"""Shared noise on a grid: own and shared parts are integers times one step, so that no float gives a state away.

With the step h = 2^-bits s, s the own standard deviation, node i releases h (round(v_i / h) + j_i + its pairs' integers
with their signs). Every integer is a rounded normal number, drawn exactly (`jaxfl.privacy.grid_noise`). Write rounding
as noise that is uniform on (-1/2, 1/2): the released integers have the law of round(round(v / h) + N / h + B U), N the
noise of `shared_gaussian`, B the pairs' signs and U uniform and independent of it, which is made from a Gaussian
mechanism on rounded values. So bounds hold with the effective noise, and the change plus h sqrt(d). Proof: the
probability of a point is a sum over the pairs' integers of products of densities of normal + uniform; with an integral
in place of the sum it is the law stated. By Poisson summation both agree to a factor 1 +- eta with
eta = (1 + 2 sum_k exp(-2 pi^2 v k^2))^pairs - 1 and v = 4^bits / (ratio^-2 + 2 maxdeg), which counts as 0 for v >= 38.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, Purpose, check, purpose_key
from jaxfl.core.tree import along_nodes, copied
from jaxfl.privacy.grid import check_bits
from jaxfl.privacy.grid_noise import integers, on_grid
from jaxfl.privacy.mechanisms import NoiseMechanism, add, standard_noise
from jaxfl.privacy.shared import KeyGraph, calibrated

_LEAST_V = 38.0  # exp(-2 pi^2 v) is 0 in float64
_REACH, _MOST_STEPS = 14, 2**30  # in standard deviations; sums of integers stay below it


def check_power(**ratio: float) -> None:
    """Refuse a ratio of shared to own noise, positive, whose integers would not have one step."""
    for name, value in ratio.items():
        if (power := math.log2(value)) != round(power):
            remedy = "Pass 0.5, 1, 2 or 4, say."
            raise ArgumentError(name, "must be a power of two on a grid", f"got {value:g}", remedy)


def shared_grid_gaussian(
    noise_std: float | Array, *, key_graph: KeyGraph, ratio: float, colluding: int, grid_bits: int
) -> NoiseMechanism:
    """`shared_gaussian` on a grid, as that function makes it: draws are int32, in steps of all nodes."""
    check_bits(grid_bits=grid_bits)
    if np.ndim(noise_std):
        found, remedy = "got one a node", "Pass one noise_std: the step of the grid is the same at all nodes."
        raise ArgumentError("noise_std", "must be one number on a grid", found, remedy)
    check_power(ratio=ratio)
    if ((key_graph.weights != 0) & (key_graph.weights != 1)).any():
        requirement, remedy = "must have pairs of weight 1 on a grid", "Leave the weights out."
        raise ArgumentError("key_graph", requirement, f"got {key_graph.name} with others", remedy)
    shared_bits, degree = grid_bits + round(math.log2(ratio)), float(key_graph.weights.sum(axis=1).max())
    check_bits(shared_grid_bits=shared_bits)
    if (
        4.0**grid_bits / (ratio**-2 + 2 * degree) < _LEAST_V
        or _REACH * 2**grid_bits * (1 + degree * ratio) > _MOST_STEPS
    ):
        found, remedy = f"got {grid_bits} with {degree:g} pairs a node", "Pass another number of bits, or fewer pairs."
        raise ArgumentError("grid_bits", "must fit the sum of all noise of a node", found, remedy)
    n, (factor, secrets), noise_std = (
        key_graph.num_nodes,
        calibrated(key_graph, ratio=ratio, colluding=colluding),
        copied(noise_std),
    )
    first, second = np.nonzero(np.triu(key_graph.weights))
    signs = np.zeros((-(-len(first) // n), n, n), np.int32)  # (chunks, nodes, pairs of a chunk)
    chunk, place = np.divmod(np.arange(len(first)), n)
    signs[chunk, first, place], signs[chunk, second, place] = 1, -1

    def drawn(key, params, purpose, index, bits):
        return standard_noise(purpose_key(key, purpose, index), params, lambda node, size: integers(node, size, bits))

    def draw(key, params):
        own = drawn(key, params, Purpose.NOISE, 0, grid_bits)

        def plus(total, chunk):
            index, ends = chunk
            of_pairs = drawn(key, params, Purpose.SHARED_NOISE, index, shared_bits)
            return add(total, jax.tree.map(lambda leaf: jnp.tensordot(ends, leaf, axes=1), of_pairs)), None

        return jax.lax.scan(plus, own, (jnp.arange(len(signs)), jnp.asarray(signs)))[0]

    def release(values, noise):
        step = jnp.asarray(noise_std, jnp.float32) * np.float32(factor * 2.0**-grid_bits)
        return jax.tree.map(lambda leaf, k: on_grid(leaf, k, along_nodes(step, leaf)), values, noise)

    check.in_float32(grid_step=noise_std if check.is_traced(noise_std) else noise_std * factor * 2.0**-grid_bits)
    return NoiseMechanism("shared_grid_gaussian", noise_std, draw, release, grid_bits=grid_bits, secrets=secrets)
