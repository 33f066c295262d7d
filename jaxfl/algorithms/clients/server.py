"""What algorithms with a server share: who takes part in a round, and the server's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.core import ArgumentError, Array, Key, Purpose, PyTree, Task, Variables, purpose_key
from jaxfl.core.tree import replicate


def check_num_active(num_active: int, num_nodes: int) -> None:
    """Refuse more active clients than there are."""
    if num_active > num_nodes:
        found = f"got {num_active}, and the data {num_nodes}"
        remedy = f"Pass {num_nodes} or less, or partition the data into more parts."
        raise ArgumentError("num_active", "must be at most the number of clients in the data", found, remedy)


def draw_active(key: Key, round_index: Array, num_active: int, num_nodes: int) -> Array:
    """The clients of one round, uniform without replacement.

    Args:
        key: the run's base key.
        round_index: (), int32.
        num_active: k, at most n.
        num_nodes: n.

    Returns:
        (k,), int32, ascending.
    """
    everybody = jnp.arange(num_nodes, dtype=jnp.int32)
    if num_active == num_nodes:
        return everybody
    participation_key = purpose_key(key, Purpose.PARTICIPATION, round_index)
    return jnp.sort(jax.random.choice(participation_key, everybody, (num_active,), replace=False))


def by_client(active: Array, num_nodes: int, values: Array, is_active: Array | None = None) -> Array:
    """Numbers of the active clients (k,) at their places among all, (n,); 0 for the others.

    Where `is_active` (k,) is False nobody is meant.
    """
    everybody = jnp.zeros(num_nodes, values.dtype)
    if is_active is None:
        return everybody.at[active].set(values, unique_indices=True)
    return everybody.at[jnp.where(is_active, active, num_nodes)].set(values, mode="drop")


def where_active(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fn` of one client's arguments as a function of (whether its slot holds a client (), *arguments).

    An empty slot gives zeros. Where slots run one after the other it costs nothing; under `vmap` it costs what a client
    does. None in place of the first argument says that no slot is empty.
    """

    def one_slot(is_active, *own):
        if is_active is None:
            return fn(*own)
        form = jax.eval_shape(fn, *own)
        idle = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)
        return jax.lax.cond(is_active, fn, lambda *_: idle, *own)

    return one_slot


def server_model(task: Task) -> Callable[[Any], PyTree]:
    """The `node_params` of an algorithm with a server, whose state has `params` and `model_state`.

    Returns:
        state -> the server's model behind a node axis of length 1, as `Variables` where the task has `train_loss`.
    """

    def node_params(state):
        if task.train_loss is None:
            return replicate(state.params, 1)
        return replicate(Variables(params=state.params, model_state=state.model_state), 1)

    return node_params
