"""Shared parts of algorithms with a server: participation of clients in a round, and the server's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.core import ArgumentError, Array, Info, Key, Purpose, PyTree, Task, Variables, over_nodes, purpose_key
from jaxfl.core.devices import varying_like
from jaxfl.core.tree import replicate


def check_num_active(num_active: int, num_nodes: int) -> None:
    """Refuse more active clients than there are."""
    if num_active > num_nodes:
        found = f"got {num_active} for data of {num_nodes} clients"
        remedy = f"Pass {num_nodes} or less, or partition the data into more parts."
        raise ArgumentError("num_active", "must be at most the number of clients in the data", found, remedy)


def draw_active(key: Key, round_index: Array, num_active: int, num_nodes: int, weights: Array | None = None) -> Array:
    """Draw the clients of one round, without replacement.

    Args:
        key: the run's base key.
        round_index: (), int32.
        num_active: k, at most n.
        num_nodes: n.
        weights: (n,), of which each draw takes a client in proportion among those that are left; None: uniformly.

    Returns:
        (k,), int32, ascending.
    """
    everybody = jnp.arange(num_nodes, dtype=jnp.int32)
    if num_active == num_nodes:
        return everybody
    participation_key = purpose_key(key, Purpose.PARTICIPATION, round_index)
    p = None if weights is None else weights.astype(jnp.float32)
    return jnp.sort(jax.random.choice(participation_key, everybody, (num_active,), replace=False, p=p))


def by_client(active: Array, num_nodes: int, values: Array, is_active: Array | None = None) -> Array:
    """Put numbers of the active clients (k,) at their places among all, (n,); 0 for others, as for empty slots."""
    everybody = jnp.zeros(num_nodes, values.dtype)
    if is_active is None:
        return everybody.at[active].set(values, unique_indices=True)
    return everybody.at[jnp.where(is_active, active, num_nodes)].set(values, mode="drop")


def at_clients(info: Info, active: Array, num_nodes: int, is_active: Array | None = None) -> Info:
    """Put the numbers of the active clients (k,) at their places, as `by_client` does; a number () stays."""
    return jax.tree.map(lambda values: by_client(active, num_nodes, values, is_active) if values.ndim else values, info)


def over_slots(fn: Callable[..., PyTree], node_loop: str) -> Callable[..., PyTree]:
    """Run a function of one client over slots, some of them empty, as `over_nodes` does.

    Args:
        fn: of one client's arguments.
        node_loop: of the slots, see `jaxfl.core.node_loop`. With "map" an empty slot costs nothing, otherwise as much
            as a client.

    Returns:
        The function of (whether each slot holds a client (k,), *arguments); None in place of the first: all slots
        do. An empty slot gives zeros.

    Guarantees:
        - an empty slot gives zeros, whatever a client would give in its place.
        - what all clients share is not copied for each of them.

    Examples:
        >>> over_slots(lambda x: 1 / x, "vmap")(jnp.array([True, False]), jnp.array([2.0, 0.0])).tolist()
        [0.5, 0.0]
    """

    def one_slot(is_active, *args):
        if is_active is None:
            return fn(*args)
        # Under `vmap` a conditional computes both branches anyway, and copies for each slot what they share.
        if node_loop.rpartition(":")[2] != "map":
            return jax.tree.map(lambda leaf: jnp.where(is_active, leaf, jnp.zeros_like(leaf)), fn(*args))
        form = jax.eval_shape(fn, *args)
        idle = varying_like(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form), args)
        return jax.lax.cond(is_active, fn, lambda *_: idle, *args)

    return over_nodes(one_slot, node_loop)


def server_model(task: Task) -> Callable[[Any], PyTree]:
    """The `node_params` of an algorithm with a server, whose state has `params` and `model_state`.

    Returns:
        state -> the server's model with a leading node axis of length 1, as `Variables` if the task has `train_loss`.
    """

    def node_params(state):
        if task.train_loss is None:
            return replicate(state.params, 1)
        return replicate(Variables(params=state.params, model_state=state.model_state), 1)

    return node_params
