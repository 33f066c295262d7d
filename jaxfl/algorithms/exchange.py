"""Exchange of messages over a graph whose links lose and round them, with its counts."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxfl.channel import LinkDraws, Links
from jaxfl.core import Array, PyTree
from jaxfl.graphs import Graph, mix
from jaxfl.graphs.lossy_mixing import lossy_mix, messages_lost


class LinkCounts(NamedTuple):
    """Fields of `GossipInfo`."""

    lost_messages: Array | None = None  # (n,), int32; None where nothing can be lost
    quantizer_overflow: Array | None = None  # (n,), int32; None without a quantizer


def exchange(
    graph: Graph, links: Links, draws: LinkDraws, tree: PyTree, round_index: Array, *, kept_by: str
) -> tuple[PyTree, LinkCounts]:
    """A mixing step over links: what is sent is quantised, and the weight of a lost message stays with `kept_by`.

    With realized matrix A and rounded values q: x_i + sum_j A_ij q_j - q_i. A sum that A preserves is then that of x,
    whatever rounding does: the compensating strategy of Carli, Fagnani, Frasca, Zampieri, "Gossip consensus algorithms
    via quantized communication", Automatica 46(1), 2010.

    Args:
        graph, round_index, kept_by: as for `lossy_mix`.
        links, draws: what messages meet in this round.
        tree: leaves (n, *leaf).

    Returns:
        (the mixed tree, what is counted).
    """
    sent = links.send(tree, draws.rounding)
    if draws.arrived is None:
        mixed, lost = mix(graph, sent.values, round_index), None
    else:
        mixed = lossy_mix(graph, sent.values, draws.arrived, round_index, kept_by=kept_by)
        lost = messages_lost(graph, draws.arrived, round_index)
    if links.quantizer is not None:  # a node takes from its own value what it sends, and keeps what rounding took
        mixed = jax.tree.map(lambda m, value, rounded: m + (value - rounded), mixed, tree, sent.values)
    return mixed, LinkCounts(lost_messages=lost, quantizer_overflow=sent.overflow)
