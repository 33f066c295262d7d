"""Exchange of messages between neighbors of a graph: a component of algorithms that mix, over links or without.

With A the matrix of the messages that arrive and q the rounded values, node i gets x_i + sum_j A_ij q_j - q_i; the
plain form is sum_j P_ij x_j. Rounding thus keeps the sums of x that A keeps: the compensating strategy of Carli,
Fagnani, Frasca, Zampieri, "Gossip consensus algorithms via quantized communication", Automatica 46(1), 2010.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import LOST_MESSAGES, PLAIN
from jaxfl.core import Array, Key, PyTree
from jaxfl.core.tree import size
from jaxfl.graphs import Graph, messages_received, messages_sent, mix
from jaxfl.graphs.lossy_mixing import lossy_mix, messages_lost
from jaxfl.graphs.mixing import keeps_ones, mix_result


class Exchange(NamedTuple):
    """The way of messages between neighbors, made by `exchange`."""

    keeps_ones: bool  # values of one stay one exactly
    draw: Callable[[Key, Array], LinkDraws]  # (key, round index) -> losses and rounding
    # (draws, fn, operands, round index) -> (mixtures of both trees fn(*operands), the second never rounded; numbers as
    # below). An elementwise `fn` is computed while mixing.
    send_result: Callable[..., tuple[tuple[PyTree, PyTree], dict[str, Array]]]

    def send(self, draws: LinkDraws, tree: PyTree, round_index: Array) -> tuple[PyTree, dict[str, Array]]:
        """The mixture of a tree, leaves (n, *leaf); bits and counts (n,) of its messages by name, lost ones, too."""
        (mixture, _), numbers = self.send_result(draws, lambda tree: (tree, ()), (tree,), round_index)
        return mixture, numbers


def exchange(graph: Graph, links: Links | None = None, *, kept_by: str) -> Exchange:
    """The way by which messages reach neighbors; links that lose and round nothing change no bit.

    Args:
        graph: static.
        links: `jaxfl.links(...)`, for as many nodes; None loses and rounds nothing.
        kept_by: "sender" or "receiver": who keeps the weight of a lost message, see `lossy_mix`.
    """
    links = links or PLAIN
    links.check_num_nodes(graph.num_nodes)

    def draw(key, round_index):
        return links.draw_between(key, round_index, graph.num_nodes)

    def send_result(draws, fn, operands, round_index):
        if links.is_plain:
            both, counts = mix_result(graph, fn, operands, round_index), {}
        else:
            tree, exact = fn(*operands)
            (messages, counts), arrived = links.send(tree, draws.rounding), draws.arrived
            if arrived is None:
                mixture, exact = mix(graph, (messages, exact), round_index)
            else:
                mixture, exact = lossy_mix(graph, (messages, exact), arrived, round_index, kept_by=kept_by)
                counts = {**counts, LOST_MESSAGES: messages_lost(graph, arrived, round_index)}
            both = links.with_error(mixture, tree, messages), exact
        rounded, exact = (size(tree) // graph.num_nodes for tree in both)
        return both, counts | message_bits(graph, round_index, links.bits * rounded + 32 * exact)

    return Exchange(links.is_plain and keeps_ones(graph), draw, send_result)


def message_bits(graph: Graph, round_index: Array, bits: float) -> dict[str, Array]:
    """Count the bits of messages between neighbors by name, (n,), float32, lost ones, too; a message has `bits`."""
    return {
        "bits_sent": messages_sent(graph, round_index) * jnp.float32(bits),
        "bits_received": messages_received(graph, round_index) * jnp.float32(bits),
    }
