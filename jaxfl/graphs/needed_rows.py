"""Which rows travel between devices on a sparse graph: the plan of a mixing step, made on the host.

The n nodes lie over s devices in order, m = n / s on each. In step k = 1, ..., s - 1 every device p sends to device
p + k (mod s) the rows that some node there hears from. Devices send equally many in a step: the most that any of them
has to send in any round of the period. Who has fewer fills up with its first row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from jaxfl.graphs.graph import Graph
from jaxfl.graphs.neighbor_lists import neighbor_lists


class Plan(NamedTuple):
    """Plan of the rows to send, and of their places at the receiver: behind its own m rows, step after step.

    Attributes:
        steps: the k in which anything is sent, ascending.
        sent: an array for each step, (period, s, count), int32: the rows of each device that it sends, in [0, m).
        senders: (period, in-degree, n), int32: place of each node's in-neighbors among the rows of its device.
    """

    steps: tuple[int, ...]
    sent: tuple[np.ndarray, ...]
    senders: np.ndarray

    def rows_sent(self) -> int:
        """Rows that leave each device in a round, those that fill up among them."""
        return sum(rows.shape[-1] for rows in self.sent)


@functools.lru_cache(maxsize=64)
def needed_rows(graph: Graph, num_shares: int) -> Plan:
    """The plan for a graph over `num_shares` devices, which must divide its nodes.

    Guarantees:
        - every row travels to a device at most once a round.

    Example:
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
    received = starts[steps] + position[message_of.reshape(senders.shape)]
    used = tuple(int(step) for step in np.flatnonzero(counts))
    return Plan(
        steps=used,
        sent=tuple(tables[step].reshape(graph.period, num_shares, -1) for step in used),
        senders=np.where(steps == 0, places, received).astype(np.int32),
    )
