"""In-neighbors as lists: what mixing on sparse graphs reads, made on the host once for a graph."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.types import Array
from jaxfl.graphs.graph import Graph

# Measured on two CPU cores, float32, 4 million entries: the gathers of up to 16 neighbors fuse into one loop, and 16 at
# a time beats 4 or 8.
FUSED_NEIGHBORS = 16


def sum_dtype(leaf: Array) -> np.dtype:
    """float32 for leaves of 16 bits, else the leaf's own."""
    return np.dtype(np.float32) if leaf.dtype.itemsize < 4 else np.dtype(leaf.dtype)


def lists_of_round(graph: Graph, slot: Array | None, dtype: np.dtype) -> tuple[Array, Array, Array]:
    """`neighbor_lists` of one round: own weights (n,), senders (k, n), int32, and their weights (k, n)."""
    own, senders, weights = neighbor_lists(graph)
    own, senders, weights = jnp.asarray(own.astype(dtype)), jnp.asarray(senders), jnp.asarray(weights.astype(dtype))
    own, senders, weights = (table[0 if slot is None else slot] for table in (own, senders, weights))
    return own, senders, weights


def gathered_sum(own: Array, senders: Array, weights: Array, leaf: Array) -> Array:
    """Each node's own weight (n,) times its value, and those of its k senders (k, n) times theirs.

    The leaf may go on after the n nodes with values that are only sent: those of other nodes.
    """
    values = leaf.astype(own.dtype)
    column = (len(own),) + (1,) * (leaf.ndim - 1)

    def add(total, neighbor):
        sender, weight = neighbor
        gathered = values.at[sender].get(mode="promise_in_bounds")
        return total + weight.reshape(column) * gathered, None

    mixed, _ = jax.lax.scan(add, own.reshape(column) * values[: len(own)], (senders, weights), unroll=FUSED_NEIGHBORS)
    return mixed.astype(leaf.dtype)


@functools.lru_cache(maxsize=64)
def neighbor_lists(graph: Graph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight each node gives itself (period, n), and its k in-neighbors: senders int32 and weights, (period, k, n).

    Shorter lists are padded with the node itself at weight zero: it is read anyway, and where its value is not finite
    the result is not either.
    """
    num_nodes, most = graph.num_nodes, int(graph.in_degree.max())
    own = np.stack([matrix.diagonal() for matrix in graph.rounds])
    senders = np.tile(np.arange(num_nodes, dtype=np.int32), (graph.period, most, 1))
    weights = np.zeros((graph.period, most, num_nodes))
    for k, matrix in enumerate(graph.rounds):
        entries = matrix.tocoo()
        others = entries.row != entries.col
        row, column, data = entries.row[others], entries.col[others], entries.data[others]
        order = np.argsort(row, kind="stable")
        row, column, data = row[order], column[order], data[order]
        position = np.arange(len(row)) - np.searchsorted(row, row)  # place of each entry within its row
        senders[k, position, row] = column
        weights[k, position, row] = data
    return own, senders, weights
