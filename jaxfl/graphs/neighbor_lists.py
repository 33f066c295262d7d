"""Lists of in-neighbors, which mixing on sparse graphs reads, and the rows that devices send each other."""

from __future__ import annotations

import functools
from typing import NamedTuple

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
    """Sum each node's value times its own weight (n,), and its k senders' values times their weights (k, n).

    Behind the n nodes the leaf may hold values of other nodes, which are only read.
    """
    values = leaf.astype(own.dtype)
    column = (len(own),) + (1,) * (leaf.ndim - 1)

    def add(total, neighbor):
        sender, weight = neighbor
        neighbor_values = values.at[sender].get(mode="promise_in_bounds")
        return total + weight.reshape(column) * neighbor_values, None

    sums, _ = jax.lax.scan(add, own.reshape(column) * values[: len(own)], (senders, weights), unroll=FUSED_NEIGHBORS)
    return sums.astype(leaf.dtype)


@functools.lru_cache(maxsize=64)
def neighbor_lists(graph: Graph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight each node gives itself (period, n), and its k in-neighbors: senders int32 and weights, (period, k, n).

    Shorter lists are padded with the node itself at weight zero: its value is read anyway, and where that is not finite
    the result is not finite, either.
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


class Plan(NamedTuple):
    """Rows that travel between devices in a round, and their places at the receiver: behind its own m, step by step.

    The n nodes lie over s devices in order, m = n / s on each. In step k = 1, ..., s - 1 every device p sends to device
    p + k (mod s) the rows that some node there hears from. Devices send equally many in a step: the most that any of
    them has to send in any round of the period. A device with fewer fills up with its first row.

    Attributes:
        steps: the k in which anything is sent, ascending.
        sent: an array for each step, (period, s, count), int32: the rows of each device that it sends, in [0, m).
        senders: (period, in-degree, n), int32: place of each node's in-neighbors among the rows of its device.
    """

    steps: tuple[int, ...]
    sent: tuple[np.ndarray, ...]
    senders: np.ndarray

    def rows_sent(self) -> int:
        """Rows that leave each device in a round, including those that only fill up."""
        return sum(rows.shape[-1] for rows in self.sent)


@functools.lru_cache(maxsize=64)
def needed_rows(graph: Graph, num_shares: int) -> Plan:
    """The plan for a graph over `num_shares` devices, which must divide its nodes.

    Guarantees:
        - every row travels to a device at most once a round.

    Examples:
        >>> from jaxfl.graphs import star
        >>> plan = needed_rows(star(4), 2)  # the center, node 0, exchanges with nodes 2 and 3 of the other device
        >>> plan.steps, plan.sent[0][0].tolist()
        ((1,), [[0, 0], [0, 1]])
    """
    _, senders, _ = neighbor_lists(graph)
    share = graph.num_nodes // num_shares
    devices = np.arange(graph.num_nodes) // share  # of each receiver
    steps, places = (devices - senders // share) % num_shares, senders % share
    # One number for what a device sends in a step and round: equal ones are the same message.
    rounds = np.arange(graph.period)[:, None, None]
    groups = (steps * graph.period + rounds) * num_shares + senders // share
    messages, message_of = np.unique(groups * share + places, return_inverse=True)
    group_of = messages // share
    position = np.arange(len(messages)) - np.searchsorted(group_of, group_of)  # of each message within its group
    counts = np.bincount(group_of, minlength=num_shares * graph.period * num_shares)
    counts = counts.reshape(num_shares, -1).max(axis=1)  # of each step
    counts[0] = 0  # what stays is not sent
    tables = [np.zeros((graph.period * num_shares, count), np.int32) for count in counts]
    for step in np.flatnonzero(counts):
        own = group_of // (graph.period * num_shares) == step
        tables[step][group_of[own] % (graph.period * num_shares), position[own]] = messages[own] % share
    starts = share + np.cumsum(counts) - counts
    remote = starts[steps] + position[message_of.reshape(senders.shape)]
    sending_steps = tuple(int(step) for step in np.flatnonzero(counts))
    return Plan(
        steps=sending_steps,
        sent=tuple(tables[step].reshape(graph.period, num_shares, -1) for step in sending_steps),
        senders=np.where(steps == 0, places, remote).astype(np.int32),
    )
