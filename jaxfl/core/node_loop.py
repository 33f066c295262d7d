"""How a function of one node becomes a function of all nodes.

`vmap` batches every operation over the nodes: best for dense layers and on accelerators. `map` runs one node after
the other inside the compiled program: best for convolutions on a CPU, whose caches one node fills. `chunk:k` maps over
groups of k vmapped nodes. Results agree to rounding. Temporary memory goes with the nodes that run at once: all of
them, one, k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxfl.core.check import ArgumentError
from jaxfl.core.types import PyTree


def automatic(any_convolution: bool) -> str:
    """The strategy for a model where none is asked for: "map" for convolutions on a CPU, else "vmap".

    Args:
        any_convolution: whether the model has a convolution, or another layer of which one node fills a CPU's caches.
    """
    return "map" if any_convolution and jax.default_backend() == "cpu" else "vmap"


def over_nodes(fn: Callable[..., Any], node_loop: str = "vmap") -> Callable[..., Any]:
    """`fn` of one node's arguments as a function of arguments whose leaves all carry the node axis first.

    Args:
        fn: any traceable function of pytrees.
        node_loop: "vmap", "map" or "chunk:k" with k at least 1.

    Returns:
        The function over nodes.

    Raises:
        ArgumentError: `node_loop` is none of these.
    """
    size = _nodes_at_once(node_loop)
    if size is None:
        return jax.vmap(fn)
    return lambda *args: jax.lax.map(lambda one: fn(*one), args, batch_size=None if size == 1 else size)


def update_over_nodes(fn: Callable[..., PyTree], node_loop: str = "vmap") -> Callable[..., PyTree]:
    """`over_nodes` for a function whose result takes the place of its first argument.

    Where nodes run one after the other each is overwritten at once, so that in a loop of rounds, or with a donated
    argument, no second copy of all nodes is made. `over_nodes` would hold the old ones beside the new.

    Args:
        fn: (values, *args) -> values of the same structure, shapes and types; all leaves of the function over nodes
            carry the node axis first.
        node_loop: as for `over_nodes`.

    Returns:
        The function over nodes.

    Raises:
        ArgumentError: `node_loop` is none of these.

    Guarantees:
        - equals over_nodes.
        - makes no copy of all nodes' values.

    Example:
        >>> import jax.numpy as jnp
        >>> update_over_nodes(lambda x, y: x + y, "map")(jnp.arange(3.0), jnp.ones(3)).tolist()
        [1.0, 2.0, 3.0]
    """
    size = _nodes_at_once(node_loop)
    if size is None:
        return jax.vmap(fn)

    def update(values: PyTree, *args: PyTree) -> PyTree:
        num_nodes = jax.tree.leaves(values)[0].shape[0]

        def group(first, count, held):
            def take(leaf):
                return jax.lax.dynamic_slice_in_dim(leaf, first, count)

            def put(leaf, rows):
                return jax.lax.dynamic_update_slice_in_dim(leaf, rows, first, axis=0)

            rows = jax.tree.map(take, (held, *args))
            one = jax.tree.map(lambda leaf: leaf[0], rows)
            new = jax.vmap(fn)(*rows) if count > 1 else jax.tree.map(lambda leaf: leaf[None], fn(*one))
            return jax.tree.map(put, held, new)

        whole, rest = divmod(num_nodes, size)
        if whole:
            values = jax.lax.fori_loop(0, whole, lambda index, held: group(index * size, size, held), values)
        return group(num_nodes - rest, rest, values) if rest else values

    return update


def _nodes_at_once(node_loop: str) -> int | None:
    """k of "chunk:k", 1 for "map", None for "vmap"; anything else is refused."""
    kind, _, size = node_loop.partition(":")
    if node_loop in ("vmap", "map"):
        return None if node_loop == "vmap" else 1
    if kind == "chunk" and size.isdecimal() and int(size) >= 1:
        return int(size)
    requirement = 'must be "vmap", "map" or "chunk:k"'
    raise ArgumentError("node_loop", requirement, f"got {node_loop!r}", "Choose one of these.")
