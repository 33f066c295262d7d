"""Aggregation of the blocks that clients trained into one model of the server."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.client_classes import Group, in_order
from jaxfl.algorithms.clients.private_updates import ClippedSum, PrivateUpdates
from jaxfl.core import Array, PyTree
from jaxfl.core.tree import along_nodes, weighted_sum


def mean(
    weights: Array, is_trained: Mapping[str, Array], old: PyTree, groups: Sequence[tuple[Group, PyTree]]
) -> PyTree:
    """For each layer the weighted mean over the clients that trained it, the old values where none did.

    Args:
        weights: (k,), float32 or float64, of the active clients.
        is_trained: block -> (k,), bool, whether the client trained it; a layer that is no block counts as trained.
        old: layer name -> leaves (*leaf).
        groups: (clients, layer name -> leaves (clients, *leaf)); layers that a group did not train may be absent.

    Returns:
        In the form of `old`.
    """
    new = {}
    for name, before in old.items():
        own = weights * is_trained[name].astype(weights.dtype) if name in is_trained else weights
        total = own.sum()
        shares = own / jnp.where(total > 0, total, 1.0)
        sums = [weighted_sum(group.take(shares), values[name]) for group, values in groups if name in values]
        if sums:
            after = _add_up(sums)
            new[name] = jax.tree.map(functools.partial(jnp.where, total > 0), after, before)
        else:
            new[name] = before
    return new


def noisy_mean(
    updates: PrivateUpdates,
    expected: Mapping[str, float],
    is_active: Array,
    is_trained: Mapping[str, Array],
    old: PyTree,
    groups: Sequence[Group],
    values: Sequence[PyTree],
    noise: PyTree,
) -> tuple[PyTree, ClippedSum]:
    """The old blocks, moved by the noisy sum of the clients' clipped changes over how many are expected to train each.

    A client's changes of all its blocks are clipped together, and count as zero in the others.

    Args:
        updates: how to clip.
        expected: block -> how many clients are expected to train it, public; one that none can train stays.
        is_active: (c,), bool, False for an empty slot.
        is_trained: block -> (c,), bool, whether the client trains it.
        old: block -> leaves (*leaf).
        groups: in which clients ran.
        values: of each group block -> leaves (clients, *leaf), after each client's steps; blocks that none of them
            trains may be absent.
        noise: block -> leaves (*leaf), on the sum.

    Returns:
        (in the form of `old`, the sum).
    """

    def changes_of(group, new):
        def change(own, after, before):
            return jnp.where(along_nodes(own, after), after - before[None], 0.0)

        return {
            block: jax.tree.map(functools.partial(change, group.take(is_trained[block])), new[block], old[block])
            for block in new
            if expected[block] > 0
        }

    sums = [
        updates.sum(changes_of(group, new), group.take(is_active)) for group, new in zip(groups, values, strict=True)
    ]
    names = dict.fromkeys(block for own in sums for block in own.total)
    total = ClippedSum(
        total={block: _add_up([own.total[block] for own in sums if block in own.total]) for block in names},
        counts=in_order(groups, [own.counts for own in sums], len(is_active)),
    )
    noisy = updates.noise.release(total.total, {block: noise[block] for block in names})
    moved = {
        block: jax.tree.map(lambda x, u, count=expected[block]: x + u / count, old[block], noisy[block])
        for block in names
    }
    return {**old, **moved}, total


def _add_up(trees: Sequence[PyTree]) -> PyTree:
    """Sum of trees of the same structure."""
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), trees)
