"""What nodes exchange over a graph whose links lose and round messages, and what is counted of it."""

from __future__ import annotations

from typing import NamedTuple

from jaxfl.channel import LinkDraws, Links
from jaxfl.core import Array, PyTree
from jaxfl.graphs import Graph
from jaxfl.graphs.lossy_mixing import lossy_mix, messages_lost


class LinkCounts(NamedTuple):
    """Fields of `GossipInfo`."""

    lost_messages: Array | None = None  # (n,), int32; None without links
    quantizer_overflow: Array | None = None  # (n,), int32; None without a quantizer


def exchange(
    graph: Graph, links: Links, draws: LinkDraws, tree: PyTree, round_index: Array, *, kept_by: str
) -> tuple[PyTree, LinkCounts]:
    """A mixing step over links: what is sent is quantised, and the weight of a lost message stays with `kept_by`.

    Args:
        graph, round_index, kept_by: as for `lossy_mix`.
        links, draws: what messages meet in this round.
        tree: leaves (n, *leaf).

    Returns:
        (the mixed tree, what is counted).
    """
    sent = links.send(tree, draws.rounding)
    rounded = None if links.quantizer is None else sent.values
    mixed = lossy_mix(graph, tree, draws.arrived, round_index, kept_by=kept_by, sent=rounded)
    return mixed, LinkCounts(messages_lost(graph, draws.arrived, round_index), sent.overflow)
