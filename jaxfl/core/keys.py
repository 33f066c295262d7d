"""Randomness: every key in the engine is derived here and nowhere else.

A run has one base key. A key for use is `fold_in(fold_in(base, purpose), round)`, then folded with the
node. The purpose comes first, so that the key of a purpose without rounds (initialisation) can never equal
the key of a round, and a round's numbers depend on (base key, round) alone. Node i's stream does not
depend on how many nodes there are. No key is ever split.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from jaxfl.core.check import ArgumentError
from jaxfl.core.threefry import fold_in, is_threefry
from jaxfl.core.types import Array


class Purpose(enum.IntEnum):
    """What a key is for. Append only: a number, once used, is part of published results."""

    INIT = 0
    BATCH = 1
    PARTICIPATION = 2
    NOISE = 3
    GRAPH = 4
    PARTITION = 5
    EVENT = 6
    ROUNDING = 7
    DROPOUT = 8
    PART = 9  # which part of the model a client trains
    CALIBRATION = 10


def purpose_key(key: Array, purpose: Purpose, round_index: int | Array = 0) -> Array:
    """The key of one purpose in one round.

    Args:
        key: typed base key of the run, shape ().
        purpose: what the numbers are for.
        round_index: (), int32; leave out for purposes without rounds.

    Returns:
        A typed key, shape ().

    Raises:
        ArgumentError: a key of another generator than threefry.
    """
    if not is_threefry(key):
        # Other generators give a vmapped draw other numbers than a single one, so that node streams would depend on n.
        found = f"got a {jax.random.key_impl(key)} key"
        raise ArgumentError("key", "must be a threefry key", found, "Make it with jax.random.key(seed).")
    return fold_in(fold_in(key, int(purpose)), round_index)


def node_keys(key: Array, num_nodes: int) -> Array:
    """One key a node, shape (n,): entry i is `fold_in(key, i)` and does not depend on `num_nodes`.

    Guarantees:
        - node streams do not depend on the number of nodes.

    Example:
        >>> key = jax.random.key(0)
        >>> bool((node_keys(key, 3) == node_keys(key, 8)[:3]).all())
        True
    """
    return jax.vmap(lambda node: fold_in(key, node))(jnp.arange(num_nodes, dtype=jnp.uint32))


def leaf_key(key: Array, leaf: int) -> Array:
    """The key of one leaf of a tree, numbered in `jax.tree.leaves` order."""
    return fold_in(key, leaf)
