"""The rate at which mixing forgets initial values, and the Laplacian of a directed graph with any weights.

The Laplacian's functions take weights W, (n, n), with W[i, j] > 0 exactly when i receives from j: they need neither
stochastic weights nor self-loops. For the graph of gradient tracking's trackers, pass the transpose of C (G_{C^T}).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.validation import require_strongly_connected, sums_to_one


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
        ArgumentError: a graph that is not strongly connected, or not stochastic.

    Guarantees:
        - one period contracts by at least 1 - gap: with m = sum(x), |D^(-1/2) (Q x - m v)| <= s |D^(-1/2) (x - m v)|.
        - circulant graphs give the same number by Fourier transform as by singular values.

    Examples:
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


def laplacian(weights: Any) -> np.ndarray:
    """diag(W 1) - W, (n, n) float64. Row i times values x is sum_j W[i, j] (x_i - x_j); self-loops cancel.

    With W = R it is L1 of gradient tracking (Chen, Wang, Zhang, section 2.1), with W = C^T the transpose of L2.

    Args:
        weights: array-like, (n, n), finite and non-negative.

    Raises:
        ArgumentError: unusable weights.

    Examples:
        >>> laplacian([[0, 2], [3, 5]]).tolist()
        [[2.0, -2.0], [-3.0, 3.0]]
    """
    values = _weights(weights)
    return np.diag(values.sum(axis=1)) - values


def laplacian_eigenvalues(weights: Any) -> np.ndarray:
    """Eigenvalues of `laplacian(weights)` by ascending modulus, (n,) complex128; the first is 0 up to rounding.

    Raises:
        ArgumentError: unusable weights.

    Guarantees:
        - the others have positive real parts exactly when the graph has a spanning tree (Lemma 1 (i)).

    Examples:
        >>> laplacian_eigenvalues([[0, 0, 0], [1, 0, 0], [0, 2, 0]]).real.tolist()  # a path, 0 to 1 to 2
        [0.0, 1.0, 2.0]
    """
    eigenvalues = np.linalg.eigvals(laplacian(weights)).astype(np.complex128)
    return eigenvalues[np.argsort(np.abs(eigenvalues), kind="stable")]


def spanning_tree_roots(weights: Any) -> tuple[int, ...]:
    """The nodes whose values reach every other node, ascending; empty when the graph has no spanning tree.

    Raises:
        ArgumentError: unusable weights.

    Examples:
        >>> spanning_tree_roots([[0, 1, 0], [1, 0, 0], [0, 1, 0]])  # 0 and 1 exchange, 2 hears from 1
        (0, 1)
        >>> spanning_tree_roots([[0, 0, 0], [1, 0, 1], [0, 0, 0]])  # 0 and 2 hear from nobody
        ()
    """
    import networkx as nx

    sends_to = nx.from_numpy_array(_weights(weights).T > 0, create_using=nx.DiGraph)
    components = nx.condensation(sends_to)
    sources = [component for component, degree in components.in_degree() if degree == 0]
    return tuple(sorted(components.nodes[sources[0]]["members"])) if len(sources) == 1 else ()


def consensus_weights(weights: Any) -> np.ndarray:
    """v of Lemma 1 (ii), (n,) float64: v^T laplacian = 0, sum n, so that averaging by W tends to v^T x / n.

    It is v1 for W = R and v2 for W = C^T; positive at the roots of spanning trees and 0 elsewhere.

    Raises:
        ArgumentError: unusable weights, or a graph without a spanning tree, which has no unique v.

    Examples:
        >>> consensus_weights([[0, 1, 0], [2, 0, 0], [0, 1, 0]]).round(6).tolist()
        [2.0, 1.0, 0.0]
    """
    roots = list(spanning_tree_roots(weights))
    if not roots:
        requirement = "the graph must have a spanning tree"
        remedy = "Add edges until some node reaches all others."
        raise ArgumentError("weights", requirement, "no node's values reach all others", remedy)
    values = _weights(weights)
    distances = np.zeros(len(values))
    distances[roots] = len(values) * _stationary(values[np.ix_(roots, roots)])
    return distances


def _weights(weights: Any) -> np.ndarray:
    """Check that weights are square, finite and non-negative; return them as (n, n) float64."""
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or values.size == 0:
        remedy = "Pass entry (i, j) > 0 where i receives from j."
        raise ArgumentError("weights", "must be a square matrix", f"got shape {values.shape}", remedy)
    check.non_negative(weights=values)
    return values


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
    root = np.sqrt(_stationary(product.T))
    return float(np.linalg.svd(product * root[None, :] / root[:, None], compute_uv=False)[1])


def _stationary(moves: np.ndarray) -> np.ndarray:
    """Stationary distribution (n,) of a Markov chain that moves from i to j at the rate (i, j), from anywhere anywhere.

    By elimination of one state after the other without a subtraction (Grassmann, Taksar, Heyman 1985), so that small
    entries are as exact as large ones. The diagonal does not count.
    """
    moves, last = moves.copy(), len(moves) - 1
    for k in range(last, 0, -1):
        moves[:k, k] /= moves[k, :k].sum()
        moves[:k, :k] += np.outer(moves[:k, k], moves[k, :k])
    weights = np.ones(len(moves))
    for k in range(1, len(moves)):
        weights[k] = weights[:k] @ moves[:k, k]
    return weights / weights.sum()
