"""Mixing matrices from adjacencies, on the host.

"uniform" splits each node's mass equally over itself and its out-neighbors; "metropolis" gives the edge (i, j) of an
undirected graph the weight 1 / (1 + max(degree i, degree j)) and leaves the rest of each row on the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy

from jaxfl.core.check import ArgumentError

if TYPE_CHECKING:
    import networkx as nx

WEIGHTS = ("uniform", "metropolis")


def circulant(num_nodes: int, offsets: set[int]) -> scipy.sparse.csr_array:
    """P in which node i sends an equal share to i + offset (mod n) for each distinct offset."""
    distinct = np.unique(np.array(sorted(offsets)) % num_nodes)
    sender = np.repeat(np.arange(num_nodes), len(distinct))
    receiver = (sender + np.tile(distinct, num_nodes)) % num_nodes
    return scipy.sparse.csr_array(
        (np.full(len(sender), 1 / len(distinct)), (receiver, sender)), shape=(num_nodes, num_nodes)
    )


def check_graph(graph: nx.Graph) -> None:
    """Refuse a multigraph, and anything that is not a networkx graph."""
    import networkx as nx  # takes a quarter of a second

    if not isinstance(graph, nx.Graph) or graph.is_multigraph():
        requirement = "must be a networkx Graph or DiGraph"
        raise ArgumentError("graph", requirement, f"got {type(graph).__name__}", "Convert it with nx.DiGraph(graph).")


def in_star(num_nodes: int) -> scipy.sparse.csr_array:
    """`received_from` of a star whose center is node 0."""
    import networkx as nx

    return received_from(nx.star_graph(num_nodes - 1))


def nodes_of(graph: nx.Graph) -> tuple[list[Any], bool]:
    """The labels of nodes 0, ..., n - 1, and whether they are these numbers."""
    numbers = list(range(graph.number_of_nodes()))
    return (numbers, True) if set(graph.nodes) == set(numbers) else (list(graph.nodes), False)


def received_from(graph: nx.Graph, nodes: Sequence[Any] | None = None) -> scipy.sparse.csr_array:
    """(n, n) bool adjacency with self-loops, entry (i, j) meaning i receives from j.

    Args:
        graph: of networkx.
        nodes: (n,), its labels in the order of the nodes; None takes that of `nodes_of`.
    """
    import networkx as nx

    weight: Any = None  # all edges count alike, whatever their attributes
    order = nodes_of(graph)[0] if nodes is None else nodes
    sends_to = nx.to_scipy_sparse_array(graph, nodelist=order, weight=weight)
    return scipy.sparse.csr_array(sends_to.T + scipy.sparse.eye_array(graph.number_of_nodes(), dtype=int) > 0)


def mixing_matrix(received: scipy.sparse.csr_array, weights: str) -> scipy.sparse.csr_array:
    """The mixing matrix of a boolean adjacency with self-loops under one of the two rules."""
    entries = received.tocoo()
    num_nodes = len(np.unique(entries.row))  # every node receives from itself
    receiver, sender = entries.row, entries.col
    count = np.bincount(sender, minlength=num_nodes).astype(np.float64)  # out-neighbors and the node itself
    if weights == "uniform":
        return scipy.sparse.csr_array((1 / count[sender], (receiver, sender)), shape=(num_nodes, num_nodes))
    off_diagonal = receiver != sender
    receiver, sender = receiver[off_diagonal], sender[off_diagonal]
    shares = 1 / np.maximum(count[receiver], count[sender])
    diagonal = 1 - np.bincount(receiver, weights=shares, minlength=num_nodes)
    nodes = np.arange(num_nodes)
    data = np.concatenate([shares, diagonal])
    coordinates = (np.concatenate([receiver, nodes]), np.concatenate([sender, nodes]))
    return scipy.sparse.csr_array((data, coordinates), shape=(num_nodes, num_nodes))
