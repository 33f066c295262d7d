"""Contractive compressors: a message keeps a share of its numbers, of the whole model as one vector.

|Q(v) - v|^2 <= (1 - k / d) |v|^2 with k of d numbers kept: always for top-k, in expectation for rand-k. Stich,
Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599. Numbers are not scaled by d / k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import Array, Purpose, PyTree, check, node_keys, one_kernel, purpose_key
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import flattener, number_type, size


class Compressor(NamedTuple):
    """A way to keep k of the d numbers of a node's message, made by `top_k` or `rand_k`."""

    num_kept: Callable[[int], int]  # d -> k
    bits: Callable[[int], float]  # d -> bits of a message
    draw: Callable[..., PyTree]  # (key, round index, messages (n, *leaf), nodes (c,) or all) -> what `apply` draws
    apply: Callable[[PyTree, PyTree], PyTree]  # (messages (n, *leaf), drawn) -> the same with zeros in places

    __repr__ = short_repr


def top_k(share: float) -> Compressor:
    """Keep the largest magnitudes; of equal ones the first. A message has k numbers and their places.

    Args:
        share: of the d numbers of the model, in (0, 1]; k is share * d, rounded up. Static.

    Guarantees:
        - a share of 1 keeps all bits.

    Examples:
        >>> top_k(0.5).apply(jnp.array([[1.0, -3.0, 2.0, -2.0]]), None).tolist(), top_k(0.5).bits(4)
        ([[0.0, -3.0, 2.0, 0.0]], 68)
    """
    return _kept(share, lambda *_: None, lambda flat, drawn: jnp.abs(flat), lambda d: math.ceil(math.log2(d)))


def rand_k(share: float) -> Compressor:
    """Keep k numbers at random, drawn by each node and round from a seed that its receivers know: no places are sent.

    Args:
        share: as for `top_k`.

    Guarantees:
        - every number is kept with probability k / d; a share of 1 keeps all bits.
    """

    def draw(key, k, tree, nodes=None):
        num_nodes = jax.tree.leaves(tree)[0].shape[0]
        keys, count = node_keys(purpose_key(key, Purpose.MESSAGE_ROUNDING, k), num_nodes), size(tree) // num_nodes
        keys = keys if nodes is None else keys[nodes]
        return jax.vmap(lambda one: jax.random.uniform(one_kernel(one), (count,), number_type(tree)))(keys)

    return _kept(share, draw, lambda flat, drawn: drawn, lambda d: 0)


def _kept(share: float, draw: Callable, score: Callable[[Array, Array], Array], bits_of_place: Callable) -> Compressor:
    """The compressor that keeps the numbers with the k largest scores (n, d)."""
    check.positive(share=share)
    check.probability(share=share)

    def num_kept(count):
        return math.ceil(share * count)

    def apply(tree, drawn):
        flatten, unflatten = flattener(
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)
        )
        flat = flatten(tree)
        places = jax.lax.top_k(score(flat, drawn), num_kept(flat.shape[1]))[1]
        return unflatten(jax.vmap(lambda row, at: jnp.zeros_like(row).at[at].set(row[at]))(flat, places))

    return Compressor(num_kept, lambda d: num_kept(d) * (32 + bits_of_place(d)), draw, apply)
