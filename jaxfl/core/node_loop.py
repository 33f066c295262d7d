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
    if node_loop == "vmap":
        return jax.vmap(fn)
    kind, _, size = node_loop.partition(":")
    if node_loop == "map":
        batch_size = None
    elif kind == "chunk" and size.isdecimal() and int(size) >= 1:
        batch_size = int(size)
    else:
        requirement = 'must be "vmap", "map" or "chunk:k"'
        raise ArgumentError("node_loop", requirement, f"got {node_loop!r}", "Choose one of these.")
    return lambda *args: jax.lax.map(lambda one: fn(*one), args, batch_size=batch_size)
