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

    With realized matrix A and rounded values q: x_i + sum_j A_ij q_j - q_i. A preserves the same sums of x as without
    rounding: the compensating strategy of Carli, Fagnani, Frasca, Zampieri, "Gossip consensus algorithms via quantized
    communication", Automatica 46(1), 2010.

    Args:
        graph, round_index, kept_by: as for `lossy_mix`.
        links, draws: what messages meet in this round.
        tree: leaves (n, *leaf).

    Returns:
        (the mixed tree, counts (n,) by name: of lost messages where one can be lost, with a quantizer of overflows).
    """
    messages = links.send(tree, draws.rounding)
    counts = dict(messages.counts)
    if draws.arrived is None:
        result = mix(graph, messages.values, round_index)
    else:
        result = lossy_mix(graph, messages.values, draws.arrived, round_index, kept_by=kept_by)
        counts[LOST_MESSAGES] = messages_lost(graph, draws.arrived, round_index)
    if links.quantizer is not None:  # a node takes from its own value what it sends, and keeps what rounding took
        result = jax.tree.map(lambda m, value, rounded: m + (value - rounded), result, tree, messages.values)
    return result, counts


def message_bits(graph: Graph, round_index: Array, bits: float) -> dict[str, Array]:
    """Count the bits of messages between neighbors by name, (n,), float32, lost ones too; `bits` are of one message."""
    return {
        "bits_sent": messages_sent(graph, round_index) * jnp.float32(bits),
        "bits_received": messages_received(graph, round_index) * jnp.float32(bits),
    }
