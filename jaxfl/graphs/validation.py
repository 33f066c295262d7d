"""Checks of the requirements on a graph, with messages that say where it violates them.

Constructors check what every algorithm needs (`checked_matrices`); an algorithm checks the rest itself with the
`require_` functions. Nothing here changes a matrix: one that does not qualify is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from jaxfl.core.check import ArgumentError
from jaxfl.graphs.graph import Graph

TOLERANCE = 1e-6  # of a row or column sum


def require_column_stochastic(graph: Graph) -> None:
    """Refuse a graph unless every column of every P^k sums to 1: then mass is conserved, as push-sum needs.

    Examples:
        >>> from jaxfl.graphs import from_matrix
        >>> require_column_stochastic(from_matrix([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]))
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: graph: columns must sum to 1 (tolerance 1e-06); column 1 of from_matrix(3) ...
    """
    _require_sums(graph, "column", "columns must sum to 1")


def require_doubly_stochastic(graph: Graph) -> None:
    """Refuse a graph unless rows and columns of every P^k sum to 1: then mixing keeps the mean, as gossip needs."""
    for line in ("row", "column"):
        _require_sums(graph, line, "must be doubly stochastic, rows and columns each summing to 1")


def require_strongly_connected(graph: Graph) -> None:
    """Refuse a graph unless every node's values reach every other node in one period (B-strong connectivity).

    The graph `isolated` passes: nobody makes it by mistake.

    Examples:
        >>> from jaxfl.graphs import from_matrix
        >>> require_strongly_connected(from_matrix([[1.0, 0.5], [0.0, 0.5]]))
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: graph: must be strongly connected over its period; ...
    """
    pair = None if graph.is_isolated else unreachable_pair(graph)
    if pair is None:
        return
    from jaxfl.core.types import node_text

    sender, receiver = (node_text(node, graph.names) for node in pair)
    span = "in its one round" if graph.period == 1 else f"over the {graph.period} rounds of the period"
    raise ArgumentError(
        "graph",
        "must be strongly connected over its period",
        f"in {graph.name} no path leads from {sender} to {receiver} {span}",
        "Add edges, or rounds that hold them.",
    )


def unreachable_pair(graph: Graph) -> tuple[int, int] | None:
    """A (sender, receiver) pair without a path over one period, or None when the graph is strongly connected.

    Guarantees:
        - finds a pair exactly when one exists: all nodes reach each other when node 0 reaches all and all reach it.
    """
    adjacency: Any = sum(graph.rounds[1:], start=graph.rounds[0])  # weights are positive, so nothing cancels
    for reversed_, edges in ((False, adjacency.T), (True, adjacency)):
        reachable = scipy.sparse.csgraph.breadth_first_order(edges.tocsr(), 0, directed=True, return_predecessors=False)
        missing = np.setdiff1d(np.arange(graph.num_nodes), reachable)
        if missing.size:
            return (int(missing[0]), 0) if reversed_ else (0, int(missing[0]))
    return None


def sums_to_one(graph: Graph, line: str) -> bool:
    """True where every "row", or every "column", of every round sums to 1 within the tolerance."""
    return abs(_worst_sum(graph, line)[2] - 1) <= TOLERANCE


def require_undirected(graph: Graph, *, weights: bool = False) -> None:
    """Refuse a graph unless all rounds have one mixing matrix, whose edges go both ways.

    Args:
        graph: any.
        weights: whether both ways must also have the same weight (to 1e-6): a symmetric matrix.

    Examples:
        >>> from jaxfl.graphs import directed_ring
        >>> require_undirected(directed_ring(3))
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: graph: must be undirected; entry (0, 1) of directed_ring(3) is 0 and (1, 0) ...
    """
    if graph.period != 1:
        found = f"{graph.name} has {graph.period} mixing matrices in turn"
        raise ArgumentError("graph", "must be the same in every round", found, "Use a fixed graph, or push_sum.")
    matrix = graph.rounds[0]
    sides = matrix if weights else matrix.sign()
    differs = abs(sides - sides.T) > (TOLERANCE if weights else 0)
    if differs.nnz:
        i, j = min(zip(*(nodes.tolist() for nodes in differs.nonzero()), strict=True))
        requirement = "must have symmetric weights" if weights else "must be undirected"
        found = f"entry ({i}, {j}) of {graph.name} is {matrix[i, j]:.6g} and ({j}, {i}) is {matrix[j, i]:.6g}"
        raise ArgumentError("graph", requirement, found, 'Use an undirected graph with weights="metropolis".')


def checked_matrices(matrices: Any, argument: str = "mixing_matrices") -> np.ndarray:
    """Check the argument of `from_matrix` and convert it to (period, n, n) float64.

    Args:
        matrices: array-like, (n, n) or (period, n, n).
        argument: the name to use in messages.

    Returns:
        (period, n, n) float64: finite, non-negative, with positive diagonals, each round summing to 1 by rows or by
        columns.
    """
    values = _as_stack(matrices, argument)
    rounds, num_nodes = len(values), values.shape[-1]
    for bad, requirement, remedy in (
        (~np.isfinite(values), "entries must be finite", "Replace it by a weight in [0, 1]."),
        (values < 0, "entries must be non-negative", "Use weights in [0, 1]."),
        (
            (values == 0) & np.eye(num_nodes, dtype=bool),
            "every node must be its own in-neighbor",
            "Leave every node a positive share of its own value.",
        ),
    ):
        if bad.any():
            k, i, j = (int(index) for index in np.argwhere(bad)[0])
            found = f"entry ({i}, {j}){_in_round(k, rounds)} is {values[k, i, j]}"
            raise ArgumentError(argument, requirement, found, remedy)
    for k, matrix in enumerate(values):
        worst = [(line, *_worst(matrix.sum(axis=axis))) for line, axis in (("column", 0), ("row", 1))]
        if all(abs(total - 1) > TOLERANCE for _, _, total in worst):
            found = " and ".join(f"{line} {index} sums to {total:.8g}" for line, index, total in worst)
            requirement = f"columns or rows must sum to 1 (tolerance {TOLERANCE:g})"
            remedy = "Divide each column by its sum for push-sum, each row for averaging; nothing is normalized here."
            raise ArgumentError(argument, requirement, found + _in_round(k, rounds), remedy)
    return values


def _as_stack(matrices: Any, argument: str) -> np.ndarray:
    """The input as a (period, n, n) float64 array with period and n at least 1."""
    remedy = "Pass shape (n, n), or (period, n, n) for a time-varying graph, with n and period at least 1."
    requirement = "must hold square matrices of real numbers"
    try:
        array = np.asarray(matrices)
    except (TypeError, ValueError) as error:
        raise ArgumentError(argument, requirement, f"got {type(matrices).__name__} ({error})", remedy) from None
    if array.dtype.kind not in "biuf":
        raise ArgumentError(argument, requirement, f"got entries of type {array.dtype}", remedy)
    values = array[None].astype(np.float64) if array.ndim == 2 else array.astype(np.float64)
    if values.ndim != 3 or values.shape[1] != values.shape[2] or 0 in values.shape:
        raise ArgumentError(argument, requirement, f"got shape {array.shape}", remedy)
    return values


def _worst(sums: np.ndarray) -> tuple[int, float]:
    """Index and value of the sum farthest from 1."""
    index = int(np.argmax(np.abs(sums - 1)))
    return index, float(sums[index])


def _worst_sum(graph: Graph, line: str) -> tuple[int, int, float]:
    """(round, index, sum) of the row or column sum farthest from 1."""
    sums = np.stack([matrix.sum(axis=0 if line == "column" else 1) for matrix in graph.rounds])
    index, total = _worst(sums.reshape(-1))
    return index // graph.num_nodes, index % graph.num_nodes, total


def _require_sums(graph: Graph, line: str, requirement: str) -> None:
    k, index, total = _worst_sum(graph, line)
    if abs(total - 1) > TOLERANCE:
        found = f"{line} {index} of {graph.name}{_in_round(k, graph.period)} sums to {total:.8g}"
        remedy = {
            "column": 'Divide every column by its sum; weights="uniform" gives such matrices on any graph.',
            "row": 'weights="metropolis" gives doubly stochastic matrices on any undirected graph.',
        }[line]
        receives = graph.rounds[k] > 0
        one_way = (receives > receives.T).tocoo()
        if line == "row" and one_way.nnz:
            from jaxfl.core.types import node_text

            receiver, sender = (node_text(int(ends[0]), graph.names) for ends in (one_way.row, one_way.col))
            found += f", and its edge from {sender} to {receiver} has no reverse"
            remedy = 'Add the reverse of each edge. A file of edges needs no more; else pass weights="metropolis", too.'
        raise ArgumentError("graph", f"{requirement} (tolerance {TOLERANCE:g})", found, remedy)


def _in_round(k: int, period: int) -> str:
    return "" if period == 1 else f" in round {k} of {period}"
