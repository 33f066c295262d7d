"""The mixing step where messages are lost: x <- A x, with a matrix A that follows from P^k and from what arrived.

    A_ij = P_ij where the message from j reached i, else 0;   A_ii = P_ii + the weights of lost messages that i keeps

The weight of a lost message stays with its sender (i keeps P_mi when its message to m is lost) or with its receiver (i
keeps P_ij when the message from j is lost). Kept by senders, A has P's column sums; kept by receivers, its row sums.

References:
    D. Kempe, A. Dobra, J. Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003: mass conservation.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.devices import num_shares
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import number_type
from jaxfl.core.types import Array, PyTree
from jaxfl.graphs import sharded_mixing
from jaxfl.graphs.graph import Graph, Shifts
from jaxfl.graphs.mixing import (
    check_leaves,
    chosen_structure,
    matrix_sum,
    shifted_sum,
    slot_of,
)
from jaxfl.graphs.neighbor_lists import gathered_sum, lists_of_round, sum_dtype


def lossy_mix(
    graph: Graph,
    tree: PyTree,
    arrived: Array,
    round_index: int | Array,
    *,
    kept_by: str,
    structure: str = "auto",
) -> PyTree:
    """`mix` over links that lose messages.

    It costs what `mix` costs, and reads as many entries of `arrived` as there are edges (1,000 nodes on two CPU cores:
    no difference in time; drawing 1,000,000 arrivals takes 2 ms). A value that is not finite also reaches receivers
    whose message was lost, for it is multiplied by 0.

    Args:
        graph: static; its matrix `round_index mod period` is used.
        tree: leaves (n, *leaf), floating point.
        arrived: (n, n), bool; entry (i, j) says whether the message from j reached i. Entries without an edge do not
            count; the diagonal is True.
        round_index: (), int32, may be traced.
        kept_by: "sender" or "receiver": who keeps the weight of a lost message.
        structure: as for `mix`.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        ArgumentError: as `mix`, or `arrived` of another shape or dtype.

    Guarantees:
        - where everything arrives it is mix, to 1e-6 relative.
        - all structures agree to 1e-6 relative.
        - kept by the sender, total mass is preserved when P is column stochastic, whatever arrives.
        - kept by the receiver, equal values stay equal when P is row stochastic.
        - kept by the receiver, node mean is preserved when P is doubly stochastic and symmetric, and losses symmetric.

    Examples:
        >>> from jaxfl.graphs import directed_ring
        >>> arrived = jnp.array([[True, True, False], [True, True, True], [True, True, True]])  # 2 does not reach 0
        >>> lossy_mix(directed_ring(3), jnp.array([0.0, 2.0, 4.0]), arrived, 0, kept_by="sender").tolist()
        [0.0, 1.0, 5.0]
        >>> lossy_mix(directed_ring(3), jnp.array([0.0, 2.0, 4.0]), arrived, 0, kept_by="receiver").tolist()
        [0.0, 1.0, 3.0]
    """
    check.one_of(("sender", "receiver"), kept_by=kept_by)
    check_leaves(graph, tree)
    _check_arrived(graph, arrived)
    form, slot = chosen_structure(graph, structure), slot_of(graph, round_index)
    if num_shares(graph.num_nodes) > 1:
        return _over_devices(graph, tree, arrived, slot, kept_by, form)
    mix_leaf = {"dense": _dense, "circulant": _circulant, "neighbors": _neighbors}[form]

    def mix_one(leaf):
        return mix_leaf(graph, leaf, arrived, slot, _loops(graph, arrived, slot, kept_by, sum_dtype(leaf)))

    return jax.tree.map(mix_one, tree)


def messages_lost(graph: Graph, arrived: Array, round_index: int | Array) -> Array:
    """Count each node's messages that do not arrive in a round, (n,), int32.

    Args:
        graph, arrived, round_index: as for `lossy_mix`.

    Examples:
        >>> from jaxfl.graphs import ring
        >>> messages_lost(ring(4), jnp.eye(4, dtype=bool), 0).tolist()
        [2, 2, 2, 2]
    """
    _check_arrived(graph, arrived)
    slot, nodes = slot_of(graph, round_index), jnp.arange(graph.num_nodes, dtype=jnp.int32)
    _, receivers, _ = lists_of_round(_transpose(graph), slot, np.dtype(np.float32))
    return (~arrived[receivers, nodes[None, :]]).sum(axis=0, dtype=jnp.int32)


def messages_missed(graph: Graph, arrived: Array, round_index: int | Array) -> Array:
    """Count the messages to each node that do not arrive in a round, (n,), int32; as `messages_lost`."""
    _check_arrived(graph, arrived)
    slot, nodes = slot_of(graph, round_index), jnp.arange(graph.num_nodes, dtype=jnp.int32)
    _, senders, _ = lists_of_round(graph, slot, np.dtype(np.float32))
    return (~arrived[nodes[None, :], senders]).sum(axis=0, dtype=jnp.int32)


def _check_arrived(graph: Graph, arrived: Array) -> None:
    expected = (graph.num_nodes, graph.num_nodes)
    if arrived.shape != expected or arrived.dtype != jnp.bool_:
        found = f"got {arrived.dtype} of shape {tuple(arrived.shape)}"
        remedy = "Pass what Links.draw_between gives."
        raise ArgumentError("arrived", f"must be bool of shape {expected}", found, remedy)


@functools.lru_cache(maxsize=64)
def _transpose(graph: Graph) -> Graph:
    """The graph with senders and receivers exchanged, with the same weights."""
    return Graph(
        f"reversed {graph.name}",
        graph.num_nodes,
        tuple(scipy.sparse.csr_array(matrix.T) for matrix in graph.rounds),
        graph.names,
    )


def _loops(graph: Graph, arrived: Array, slot: Array | None, kept_by: str, dtype: np.dtype) -> Array:
    """A_ii, (n,), the weights of self-loops: P_ii, and the weights of lost messages that i keeps."""
    nodes = jnp.arange(graph.num_nodes, dtype=jnp.int32)[None, :]
    if kept_by == "sender":
        own_weights, receivers, weights = lists_of_round(_transpose(graph), slot, dtype)
        arrivals = arrived[receivers, nodes]
    else:
        own_weights, senders, weights = lists_of_round(graph, slot, dtype)
        arrivals = arrived[nodes, senders]
    return own_weights + jnp.where(arrivals, 0, weights).sum(axis=0)


def _over_devices(
    graph: Graph, tree: PyTree, arrived: Array, slot: Array | None, kept_by: str, structure: str
) -> PyTree:
    """The round's weights, which every device computes of all edges, and the tree mixed by them."""
    dtype = number_type(tree)
    loops = _loops(graph, arrived, slot, kept_by, dtype)
    if structure == "dense":
        return sharded_mixing.matrix_sum(_realized_matrix(graph, arrived, slot, loops), tree)
    if structure == "neighbors":
        return sharded_mixing.neighbors_sum(graph, slot, loops, _realized_weights(graph, arrived, slot, dtype)[1], tree)
    assert graph.shifts is not None
    branches = [
        lambda tree, arrived, loops, shifts=shifts: sharded_mixing.shifted_sum(
            _realized_shifts(shifts, arrived, loops), tree
        )
        for shifts in graph.shifts
    ]
    return branches[0](tree, arrived, loops) if slot is None else jax.lax.switch(slot, branches, tree, arrived, loops)


def _dense(graph: Graph, leaf: Array, arrived: Array, slot: Array | None, loops: Array) -> Array:
    return matrix_sum(_realized_matrix(graph, arrived, slot, loops), leaf)


def _circulant(graph: Graph, leaf: Array, arrived: Array, slot: Array | None, loops: Array) -> Array:
    assert graph.shifts is not None
    if slot is not None and not is_cpu():  # an accelerator's host would wait for the number of the branch
        return _neighbors(graph, leaf, arrived, slot, loops)
    branches = [
        lambda leaf, arrived, loops, shifts=shifts: shifted_sum(_realized_shifts(shifts, arrived, loops), leaf)
        for shifts in graph.shifts
    ]
    operands = (leaf, arrived, loops)
    return branches[0](*operands) if slot is None else jax.lax.switch(slot, branches, *operands)


def _neighbors(graph: Graph, leaf: Array, arrived: Array, slot: Array | None, loops: Array) -> Array:
    return gathered_sum(loops, *_realized_weights(graph, arrived, slot, np.dtype(loops.dtype)), leaf)


def _realized_matrix(graph: Graph, arrived: Array, slot: Array | None, loops: Array) -> Array:
    """A, (n, n), given its diagonal."""
    matrices = jnp.asarray(graph.mixing_matrices.astype(loops.dtype))
    matrix = jnp.where(arrived, matrices[0 if slot is None else slot], 0)
    return jnp.where(jnp.eye(graph.num_nodes, dtype=bool), loops[None, :], matrix)


def _realized_shifts(shifts: Shifts, arrived: Array, loops: Array) -> list[tuple[int, Array]]:
    """The shifts of a round, given the diagonal of A, with weights (n,): zero where the message is lost."""
    nodes, weights = np.arange(len(loops)), [(0, loops)]
    for offset, weight in shifts:
        if offset:
            arrivals = arrived[nodes, (nodes - offset) % len(nodes)]
            weights.append((offset, jnp.where(arrivals, jnp.asarray(weight, loops.dtype), 0)))
    return weights


def _realized_weights(graph: Graph, arrived: Array, slot: Array | None, dtype: np.dtype) -> tuple[Array, Array]:
    """The senders of a round, (k, n), and their weights, (k, n): zero where the message is lost."""
    _, senders, weights = lists_of_round(graph, slot, dtype)
    arrivals = arrived[jnp.arange(graph.num_nodes, dtype=jnp.int32)[None, :], senders]
    return senders, jnp.where(arrivals, weights, 0)
