"""The graph without edges, for baselines."""

from __future__ import annotations

from jaxfl.core import check
from jaxfl.core.calls import by_name
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.weights import circulant


@by_name
def isolated(num_nodes: int) -> Graph:
    """Every node keeps its own value and hears nobody: with it, every algorithm on a graph trains each node by itself.

    Examples:
        >>> isolated(3).mixing_matrix(0).tolist(), isolated(3).out_degree.tolist()
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [[0, 0, 0]])
    """
    check.at_least(1, num_nodes=num_nodes)
    return Graph(f"isolated({num_nodes})", num_nodes, (circulant(num_nodes, {0}),), is_isolated=True)
