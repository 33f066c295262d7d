"""Exchange of messages over a graph whose links lose and round them, with its counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import LOST_MESSAGES
from jaxfl.core import Array, PyTree
from jaxfl.graphs import Graph, messages_received, messages_sent, mix
from jaxfl.graphs.lossy_mixing import lossy_mix, messages_lost


def exchange(
    graph: Graph, links: Links, draws: LinkDraws, tree: PyTree, round_index: Array, *, kept_by: str
) -> tuple[PyTree, dict[str, Array]]:
    """Mix over links: messages are quantised, and `kept_by` keeps the weight of a lost one.

    With A the matrix of the messages that arrive and q the rounded values, node i gets x_i + sum_j A_ij q_j - q_i.
    Rounding thus keeps the sums of x that A keeps: the compensating strategy of Carli, Fagnani, Frasca, Zampieri,
    "Gossip consensus algorithms via quantized communication", Automatica 46(1), 2010.

    Args:
        graph, round_index, kept_by: as for `lossy_mix`.
        links, draws: losses and rounding of this round's messages.
        tree: leaves (n, *leaf).

    Returns:
        (the mixed tree, counts (n,) by name: lost messages, where any can be lost; overflows, with a quantizer).
    """
    messages = links.send(tree, draws.rounding)
    counts = dict(messages.counts)
    if draws.arrived is None:
        result = mix(graph, messages.values, round_index)
    else:
        result = lossy_mix(graph, messages.values, draws.arrived, round_index, kept_by=kept_by)
        counts[LOST_MESSAGES] = messages_lost(graph, draws.arrived, round_index)
    if links.quantizer is not None:  # a node subtracts what it really sends, and so keeps the rounding error
        result = jax.tree.map(lambda m, value, rounded: m + (value - rounded), result, tree, messages.values)
    return result, counts


def message_bits(graph: Graph, round_index: Array, bits: float) -> dict[str, Array]:
    """Count the bits of messages between neighbors by name, (n,), float32, lost ones, too; a message has `bits`."""
    return {
        "bits_sent": messages_sent(graph, round_index) * jnp.float32(bits),
        "bits_received": messages_received(graph, round_index) * jnp.float32(bits),
    }
