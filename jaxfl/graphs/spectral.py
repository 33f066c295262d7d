"""How fast mixing forgets where values started."""

from __future__ import annotations

import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.validation import require_strongly_connected, sums_to_one, unreachable_pair


def is_strongly_connected_over_period(graph: Graph) -> bool:
    """Whether the union of the edges of one period is strongly connected.

    Example:
        >>> from jaxfl.graphs import exponential, from_matrix
        >>> is_strongly_connected_over_period(exponential(8))
        True
        >>> is_strongly_connected_over_period(from_matrix([[1.0, 0.0], [0.0, 1.0]]))
        False
    """
    return unreachable_pair(graph) is None


def spectral_gap(graph: Graph) -> float:
    """1 minus the contraction of one period, in (0, 1]; 1 means that one period averages exactly.

    Let Q = P^(period-1) ... P^0 be column stochastic, v its positive eigenvector Q v = v with sum 1, and D = diag(v).
    The contraction is the second largest singular value s of D^(-1/2) Q D^(1/2). For doubly stochastic matrices v is
    uniform and s = |Q - 1 1^T / n| in the spectral norm. For row-stochastic matrices the same is computed for Q^T.
    It is per period: a graph of period p contracts by s^(1/p) per round on average.

    Args:
        graph: strongly connected over its period, all rounds column stochastic or all row stochastic.

    Returns:
        1 - s.

    Raises:
        ArgumentError: the graph is not strongly connected, or neither all columns nor all rows sum to 1.

    Guarantees:
        - one period contracts by at least 1 - gap: with m = sum(x), |D^(-1/2) (Q x - m v)| <= s |D^(-1/2) (x - m v)|.
        - circulant graphs give the same number by Fourier transform as by singular values.

    Example:
        >>> from jaxfl.graphs import complete, ring
        >>> round(spectral_gap(complete(5)), 6), round(spectral_gap(ring(6)), 6)
        (1.0, 0.333333)
    """
    require_strongly_connected(graph)
    by_columns = sums_to_one(graph, "column")
    if not by_columns and not sums_to_one(graph, "row"):
        requirement = "all rounds must be column stochastic, or all row stochastic"
        raise ArgumentError("graph", requirement, f"{graph.name} is neither", "Use one kind of weights throughout.")
    if graph.num_nodes == 1:
        return 1.0
    contraction = _contraction_by_svd(graph, by_columns) if graph.shifts is None else _contraction_by_fft(graph)
    return float(np.clip(1 - contraction, 0.0, 1.0))  # rounding alone can leave the interval


def _contraction_by_fft(graph: Graph) -> float:
    """Circulant matrices are normal and share eigenvectors: the singular values of the product are |eigenvalues|."""
    assert graph.shifts is not None
    eigenvalues = np.ones(graph.num_nodes, dtype=np.complex128)
    for shifts in graph.shifts:
        first_column = np.zeros(graph.num_nodes)
        for offset, weight in shifts:
            first_column[offset] = weight
        eigenvalues *= np.fft.fft(first_column)
    return float(np.abs(eigenvalues[1:]).max())


def _contraction_by_svd(graph: Graph, by_columns: bool) -> float:
    """Second largest singular value of the product over a period in the norm weighted by its fixed vector."""
    product = graph.rounds[0].toarray()
    for matrix in graph.rounds[1:]:
        product = matrix @ product
    if not by_columns:
        product = product.T
    num_nodes = graph.num_nodes
    system = np.concatenate([product - np.eye(num_nodes), np.ones((1, num_nodes))])
    fixed = np.linalg.lstsq(system, np.append(np.zeros(num_nodes), 1.0), rcond=None)[0]
    assert (fixed > 0).all(), "strong connectivity and self-loops make the fixed vector positive"
    root = np.sqrt(fixed)
    return float(np.linalg.svd(product * root[None, :] / root[:, None], compute_uv=False)[1])
