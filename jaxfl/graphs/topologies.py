"""Communication graphs with their mixing weights. JAX is not imported: accounting uses them, too.

There are two kinds of weights: "uniform", where each node splits its mass equally over itself and its out-neighbors
(P[i, j] = 1 / (1 + out-degree of j), column stochastic, the choice for push-sum), and "metropolis", for undirected
graphs (P[i, j] = 1 / (1 + max(degree i, degree j)), symmetric and doubly stochastic, the choice for gossip). On a
regular graph they coincide. Every node is its own in-neighbor.

References:
    Assran, Loizou, Ballas, Rabbat: "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019
    (arXiv:1811.10792), appendix A: the exponential graph.
    Xiao, Boyd, Lall: "A scheme for robust distributed sensor fusion based on average consensus", IPSN 2005: the
    Metropolis weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy

from jaxfl.core import check
from jaxfl.core.calls import by_name
from jaxfl.core.check import ArgumentError
from jaxfl.core.tables import as_name
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.validation import checked_matrices
from jaxfl.graphs.weights import WEIGHTS, check_graph, circulant, in_star, mixing_matrix, nodes_of, received_from

if TYPE_CHECKING:
    import networkx as nx


class TrackingPair(NamedTuple):
    """The two directed graphs of gradient tracking, as weights: a `Graph` would have to be stochastic, with self-loops.

    Attributes:
        state_weights: R, (n, n) float64; entry (i, j) is the weight of j's state in what i receives.
        tracker_weights: C, (n, n) float64; entry (i, j) is the weight of j's tracker in what i receives.
    """

    state_weights: np.ndarray
    tracker_weights: np.ndarray


@by_name
def exponential(num_nodes: int) -> Graph:
    """The time-varying directed exponential graph of PrivSGP-VR (appendix D) and SGP.

    In round k node i keeps one half and sends one half to node (i + 2^(k mod m)) mod n, m = floor(log2(n - 1)) + 1.
    Circulant and doubly stochastic, so push-sum weights stay 1. A single node keeps everything.

    Args:
        num_nodes: n, at least 1.

    Returns:
        A graph of period m (1 for n = 1).

    Guarantees:
        - one period averages exactly when n is a power of two.

    Examples:
        >>> exponential(8).period, exponential(8).out_degree.max().item()
        (3, 1)
        >>> np.linalg.multi_dot(exponential(8).mixing_matrices)[0].tolist()
        [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]
    """
    check.at_least(1, num_nodes=num_nodes)
    offsets = _powers_of_two(num_nodes) or [0]
    return Graph(f"exponential({num_nodes})", num_nodes, tuple(circulant(num_nodes, {0, o}) for o in offsets))


@by_name
def static_exponential(num_nodes: int) -> Graph:
    """Every hop of the exponential graph in every round: node i sends to (i + 2^l) mod n for all l < m.

    Examples:
        >>> static_exponential(8).mixing_matrix(0)[:, 0].tolist()
        [0.25, 0.25, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0]
    """
    check.at_least(1, num_nodes=num_nodes)
    offsets = {0, *_powers_of_two(num_nodes)}
    return Graph(f"static_exponential({num_nodes})", num_nodes, (circulant(num_nodes, offsets),))


@by_name
def ring(num_nodes: int) -> Graph:
    """The undirected ring: node i exchanges with i - 1 and i + 1 (mod n); 1/3 each, doubly stochastic.

    With two nodes the two neighbors are one and the weights 1/2.

    Examples:
        >>> ring(4).adjacency(0).astype(int).tolist()
        [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]
    """
    check.at_least(1, num_nodes=num_nodes)
    return Graph(f"ring({num_nodes})", num_nodes, (circulant(num_nodes, {0, 1, -1}),))


@by_name
def directed_ring(num_nodes: int) -> Graph:
    """The directed ring: node i keeps one half and sends one half to i + 1 (mod n); doubly stochastic.

    Examples:
        >>> directed_ring(4).adjacency(0).astype(int).tolist()
        [[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    check.at_least(1, num_nodes=num_nodes)
    return Graph(f"directed_ring({num_nodes})", num_nodes, (circulant(num_nodes, {0, 1}),))


@by_name
def complete(num_nodes: int) -> Graph:
    """Every node sends to every other, weight 1/n: one mixing step is the exact mean.

    Examples:
        >>> complete(4).mixing_matrix(0)[1].tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    check.at_least(1, num_nodes=num_nodes)
    return Graph(f"complete({num_nodes})", num_nodes, (circulant(num_nodes, set(range(num_nodes))),))


@by_name
def star(num_nodes: int, *, weights: str = "uniform") -> Graph:
    """Node 0 exchanges with every other node; the others with node 0 only.

    Args:
        num_nodes: n, at least 1.
        weights: "uniform" (column stochastic: push-sum weights move) or "metropolis" (doubly stochastic).

    Examples:
        >>> star(3).mixing_matrix(0).round(2).tolist()
        [[0.33, 0.5, 0.5], [0.33, 0.5, 0.0], [0.33, 0.0, 0.5]]
        >>> star(3, weights="metropolis").mixing_matrix(0).round(2).tolist()
        [[0.33, 0.33, 0.33], [0.33, 0.67, 0.0], [0.33, 0.0, 0.67]]
    """
    check.at_least(1, num_nodes=num_nodes)
    check.one_of(WEIGHTS, weights=weights)
    received = in_star(num_nodes)
    return Graph(f"star({num_nodes})", num_nodes, (mixing_matrix(received, weights),))


@by_name
def from_networkx(graph: nx.Graph, *, weights: str = "uniform", names: Sequence[str] | None = None) -> Graph:
    """A graph from networkx, directed or not; an edge (u, v) means that u sends to v, and v to u when undirected.

    Node i is the node labeled i when the labels are exactly 0, ..., n - 1; else the node that `names` has in place i,
    or, without names, the i-th of `graph.nodes`. Such labels, as text, are the nodes' names: data with names must have
    the same names. Self-loops are implied. Edge attributes are not read: a graph that brings its own weights goes
    through `from_matrix`.

    Args:
        graph: `nx.Graph` or `nx.DiGraph` with at least one node.
        weights: "uniform" (column stochastic) or "metropolis" (doubly stochastic; every edge must have its reverse).
        names: (n,), the labels as text, in the order of the nodes: `data.names`, for instance.

    Raises:
        ArgumentError: no nodes, a multigraph, names other than the labels, or metropolis on a directed graph.

    Examples:
        >>> import networkx as nx; path = from_networkx(nx.path_graph(3), weights="metropolis")
        >>> path.mixing_matrix(0).round(2).tolist()
        [[0.67, 0.33, 0.0], [0.33, 0.33, 0.33], [0.0, 0.33, 0.67]]
    """
    check.one_of(WEIGHTS, weights=weights)
    check_graph(graph)
    num_nodes = graph.number_of_nodes()
    if num_nodes == 0:
        raise ArgumentError("graph", "must have at least one node", "got none", "Add nodes to the networkx graph.")
    labels, are_numbers = nodes_of(graph)
    if names is not None:
        by_name, wanted = {as_name(label) or "": label for label in labels}, [as_name(name) or "" for name in names]
        if len(by_name) != num_nodes or sorted(by_name) != sorted(wanted):
            odd = sorted({*by_name} ^ {*wanted})
            found = f"{odd[0]!r} is in only one of the two" if odd else "two have the same text"
            raise ArgumentError("names", "must be the graph's labels, each once", found, "Rename the graph's nodes.")
        labels = [by_name[name] for name in wanted]
    node_names = None if are_numbers and names is None else tuple(as_name(label) or "" for label in labels)
    adjacency = received_from(graph, labels)
    if weights == "metropolis":
        one_way = (adjacency > adjacency.T).tocoo()
        if one_way.nnz:
            from jaxfl.core.types import node_text

            receiver, sender = (node_text(int(ends[0]), node_names) for ends in (one_way.row, one_way.col))
            found = f"the edge from {sender} to {receiver} has no reverse"
            remedy = 'Use weights="uniform", or make the graph undirected.'
            raise ArgumentError("weights", "metropolis needs an undirected graph", found, remedy)
    name = str(graph.name) or f"from_networkx({num_nodes})"
    return Graph(name, num_nodes, (mixing_matrix(adjacency, weights),), node_names)


@by_name
def from_matrix(mixing_matrices: Any, *, name: str | None = None) -> Graph:
    """A graph from its mixing matrices, used exactly as given: nothing is normalized.

    Args:
        mixing_matrices: array-like, (n, n) or (period, n, n); entry (i, j) is the share of j's value that i receives.
        name: for messages and records.

    Raises:
        ArgumentError: matrices that are no mixing matrices.

    Examples:
        >>> from_matrix([[0.5, 0.25], [0.5, 0.75]])
        Graph(from_matrix(2), num_nodes=2, period=1)
        >>> from_matrix([[0.5, 0.3], [0.5, 0.6]])
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: mixing_matrices: columns or rows must sum to 1 (tolerance 1e-06); column 1 ...
    """
    values = checked_matrices(mixing_matrices)
    num_nodes = values.shape[-1]
    return Graph(
        name or f"from_matrix({num_nodes})", num_nodes, tuple(scipy.sparse.csr_array(matrix) for matrix in values)
    )


@by_name
def sequence(graphs: Sequence[Graph]) -> Graph:
    """A time-varying graph: all rounds of the first graph, then all of the second, and so on, then from the start.

    Args:
        graphs: at least one, all of the same number of nodes.

    Examples:
        >>> sequence([ring(8), exponential(8)]).period
        4
    """
    remedy = "Pass a list of graphs over the same nodes."
    if not graphs:
        raise ArgumentError("graphs", "must hold at least one graph", "got none", remedy)
    for position, graph in enumerate(graphs):
        if graph.num_nodes != graphs[0].num_nodes:
            found = f"got {graphs[0].num_nodes} at position 0 and {graph.num_nodes} at position {position}"
            raise ArgumentError("graphs", "must have equal numbers of nodes", found, remedy)
        if graph.names != graphs[0].names:
            found = f"the names at position 0 and at position {position} differ"
            raise ArgumentError("graphs", "must have the same names of nodes", found, remedy)
    name = f"sequence({', '.join(graph.name for graph in graphs)})"
    return Graph(
        name, graphs[0].num_nodes, tuple(matrix for graph in graphs for matrix in graph.rounds), graphs[0].names
    )


@by_name
def permute(graph: Graph, permutation: Sequence[int] | np.ndarray) -> Graph:
    """The same graph with its nodes relabeled: new node i is old node permutation[i].

    Guarantees:
        - mixing commutes with relabeling: mix(permute(g, p), x[p]) equals mix(g, x)[p].

    Examples:
        >>> permute(star(4), [1, 0, 2, 3]).out_degree.tolist()  # the center is now node 1
        [[1, 3, 1, 1]]
    """
    order = np.asarray(permutation)
    if order.shape != (graph.num_nodes,) or not np.array_equal(np.sort(order), np.arange(graph.num_nodes)):
        requirement = f"must hold each of 0, ..., {graph.num_nodes - 1} once"
        raise ArgumentError("permutation", requirement, f"got {order.tolist()}", "Pass a permutation of the nodes.")
    rounds = tuple(scipy.sparse.csr_array(matrix[order][:, order]) for matrix in graph.rounds)
    names = None if graph.names is None else tuple(graph.names[node] for node in order)
    return Graph(f"permuted {graph.name}", graph.num_nodes, rounds, names)


@by_name
def five_agents() -> TrackingPair:
    """Five agents for gradient tracking, without self-loops: states spread from agents 0, 1, trackers gather at 0, 4.

    States: 0 and 1 exchange, 2 hears from both, 3 from 2, 4 from 2 and 3. Trackers: 0 and 4 exchange, 1 sends to 0, 2
    to 1, 3 to 1 and 2. An agent receives states, and sends its tracker, in equal shares: rows of R and columns of C
    sum to 1. Edges and weights are ours: figure 1 of the paper (see `jaxfl.graphs.tracking_conditions`) gives neither.

    Guarantees:
        - neither graph is strongly connected; the roots are 0, 1 and 0, 4, so that agent 0 alone is common.

    Examples:
        >>> pair = five_agents()
        >>> pair.state_weights.sum(axis=1).tolist(), pair.tracker_weights.sum(axis=0).tolist()
        ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    receives_state_from = ((1,), (0,), (0, 1), (2,), (2, 3))
    sends_tracker_to = ((4,), (0,), (1,), (1, 2), (0,))
    state_weights, tracker_weights = np.zeros((5, 5)), np.zeros((5, 5))
    for agent, (senders, receivers) in enumerate(zip(receives_state_from, sends_tracker_to, strict=True)):
        state_weights[agent, list(senders)] = 1 / len(senders)
        tracker_weights[list(receivers), agent] = 1 / len(receivers)
    return TrackingPair(state_weights=state_weights, tracker_weights=tracker_weights)


@by_name
def five_agents_self_loops() -> TrackingPair:
    """`five_agents` with a self-loop of weight 1 at every agent, in both graphs: rows of R and columns of C sum to 2.

    The Laplacians are those without self-loops. Two things change (Remark 24): an agent receives its own broadcast
    noise, too, and a and b of the privacy bounds are alpha and beta times these sums.

    Examples:
        >>> (five_agents_self_loops().state_weights - five_agents().state_weights).tolist() == np.eye(5).tolist()
        True
    """
    pair = five_agents()
    return TrackingPair(state_weights=pair.state_weights + np.eye(5), tracker_weights=pair.tracker_weights + np.eye(5))


def _powers_of_two(num_nodes: int) -> list[int]:
    """1, 2, 4, ... up to n - 1: m = floor(log2(n - 1)) + 1 of them, the bit length of n - 1."""
    return [2**level for level in range((num_nodes - 1).bit_length())]
