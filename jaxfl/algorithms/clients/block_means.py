"""Aggregation of the blocks that clients trained into one model of the server."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.client_classes import Group, in_order
from jaxfl.algorithms.clients.uplink import Updates, changed
from jaxfl.core import Array, PyTree, Variables
from jaxfl.core.tree import along_nodes, replicate, weighted_sum


def mean(
    weights: Array, is_trained: Mapping[str, Array], old: PyTree, groups: Sequence[tuple[Group, PyTree]]
) -> PyTree:
    """Average each layer, weighted, over the clients that trained it; keep the old values where none did.

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
        block_weights = weights * is_trained[name].astype(weights.dtype) if name in is_trained else weights
        total = block_weights.sum()
        shares = block_weights / jnp.where(total > 0, total, 1.0)
        sums = [weighted_sum(group.take(shares), values[name]) for group, values in groups if name in values]
        if sums:
            after = _add_up(sums)
            new[name] = jax.tree.map(functools.partial(jnp.where, total > 0), after, before)
        else:
            new[name] = before
    return new


def models(
    before: Variables,
    groups: Sequence[Group],
    is_trained: Mapping[str, Array],
    expected: Mapping[str, float],
    num_expected: int,
) -> Updates:
    """Give the models of clients that each trained some blocks, as `Updates`.

    Args:
        before: the server's, layer name -> leaves (*leaf).
        groups: each result begins with (parameters, model state): layer name -> leaves (clients, *leaf); layers that
            a group did not train may be absent.
        is_trained: block -> (k,), bool, whether the client trained it; a layer that is no block counts as trained.
        expected: block -> how many clients are expected to train it, public.
        num_expected: how many clients are expected in all.
    """

    def all_changes(group, old, new):
        """Changes of all layers by a group's clients; 0 in layers that a client did not train."""
        num_clients = len(jax.tree.leaves(group.results)[0])

        def of_layer(name):
            if name not in new:
                return replicate(jax.tree.map(jnp.zeros_like, old[name]), num_clients)
            change = changed(old[name], new[name])
            return _where(group.take(is_trained[name]), change) if name in is_trained else change

        return {name: of_layer(name) for name in old}

    def changes():
        of_groups = [
            Variables(*(all_changes(group, old, group.results[place]) for place, old in enumerate(before)))
            for group in groups
        ]
        return in_order(groups, of_groups, len(next(iter(is_trained.values()))))

    def holders(weights):
        def of_layer(name, layer):
            block_weights = weights * is_trained[name].astype(weights.dtype) if name in is_trained else weights
            return jax.tree.map(lambda _: block_weights.sum(), layer)

        return Variables(*({name: of_layer(name, layer) for name, layer in part.items()} for part in before))

    def means(weights):
        return Variables(
            *(
                mean(weights, is_trained, old, [(group, group.results[place]) for group in groups])
                for place, old in enumerate(before)
            )
        )

    counts = {name: jax.tree.map(lambda _, name=name: expected[name], layer) for name, layer in before.params.items()}
    return Updates(means, changes, holders, counts, num_expected)


def _where(mask: Array, tree: PyTree) -> PyTree:
    """The clients' leaves (c, *leaf) where `mask` (c,) is True, else 0."""
    return jax.tree.map(lambda leaf: jnp.where(along_nodes(mask, leaf), leaf, 0), tree)


def _add_up(trees: Sequence[PyTree]) -> PyTree:
    """Sum of trees of the same structure."""
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), trees)
