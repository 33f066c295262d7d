"""Communication graph: the receivers, senders and weights of each round of a period.

The mixing matrix P^k of round k has P^k[i, j] > 0 exactly when node i receives from node j, and a mixing step is
x <- P^k x with k = round_index mod period. A graph is static: it is built on the host, never traced, and captured by
closure.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import scipy

Shifts = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A periodic sequence of mixing matrices over n nodes; equal only to itself, hashed by identity.

    Build it with the constructors of `jaxfl.graphs.topologies`; they check what this class takes on trust.

    Attributes:
        name: for messages and records, for example "ring(8)".
        num_nodes: n.
        rounds: one sparse (n, n) float64 mixing matrix per round of the period, without stored zeros.
        names: (n,), the nodes' names, with which the names in the data must agree; None where nodes are numbers.
        is_isolated: whether the graph is without edges on purpose (`isolated`): it then counts as connected.

    Examples:
        >>> from jaxfl.graphs import directed_ring
        >>> graph = directed_ring(3)
        >>> graph.mixing_matrix(0).tolist()
        [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
        >>> graph
        Graph(directed_ring(3), num_nodes=3, period=1)
    """

    name: str
    num_nodes: int
    rounds: tuple[scipy.sparse.csr_array, ...]
    names: tuple[str, ...] | None = None
    is_isolated: bool = False

    def __repr__(self) -> str:
        return f"Graph({self.name}, num_nodes={self.num_nodes}, period={self.period})"

    @property
    def period(self) -> int:
        """Number of rounds after which the matrices repeat, at least 1."""
        return len(self.rounds)

    @functools.cached_property
    def mixing_matrices(self) -> np.ndarray:
        """(period, n, n) float64, read-only; made on first use, since a large sparse graph may never need it."""
        dense = np.stack([matrix.toarray() for matrix in self.rounds])
        dense.setflags(write=False)
        return dense

    def mixing_matrix(self, round_index: int) -> np.ndarray:
        """P of one round, (n, n) float64, `round_index` taken modulo the period."""
        return self.rounds[round_index % self.period].toarray()

    def adjacency(self, round_index: int) -> np.ndarray:
        """(n, n) bool: entry (i, j) is True when i receives from j; the diagonal is True."""
        return self.mixing_matrix(round_index) > 0

    @functools.cached_property
    def out_degree(self) -> np.ndarray:
        """(period, n) int64: how many other nodes each node sends to in each round."""
        return np.stack([_count(matrix.tocoo().col, self.num_nodes) for matrix in self.rounds])

    @functools.cached_property
    def in_degree(self) -> np.ndarray:
        """(period, n) int64: how many other nodes each node receives from in each round."""
        return np.stack([_count(matrix.tocoo().row, self.num_nodes) for matrix in self.rounds])

    @functools.cached_property
    def shifts(self) -> tuple[Shifts, ...] | None:
        """The (offset, weight) pairs of each round when every P^k is circulant, else None.

        A pair says that node i receives `weight` times the value of node (i - offset) mod n. Weights must be equal to
        the last bit: a matrix that is nearly circulant is not rounded to one that is.

        Examples:
            >>> from jaxfl.graphs import exponential, star
            >>> exponential(4).shifts
            (((0, 0.5), (1, 0.5)), ((0, 0.5), (2, 0.5)))
            >>> star(4).shifts is None
            True
        """
        pairs = []
        for matrix in self.rounds:
            shifts = _shifts(matrix, self.num_nodes)
            if shifts is None:
                return None
            pairs.append(shifts)
        return tuple(pairs)


def _count(indices: np.ndarray, num_nodes: int) -> np.ndarray:
    """Entries of each index, the self-loop not counted, (n,) int64."""
    return np.bincount(indices, minlength=num_nodes) - 1


def _shifts(matrix: scipy.sparse.csr_array, num_nodes: int) -> Shifts | None:
    """(offset, weight) pairs of a circulant matrix, offsets ascending, or None when it is not circulant."""
    entries = matrix.tocoo()
    offsets = (entries.row - entries.col) % num_nodes
    order = np.argsort(offsets, kind="stable")
    distinct, starts, counts = np.unique(offsets[order], return_index=True, return_counts=True)
    if (counts != num_nodes).any():
        return None
    weights = entries.data[order].reshape(len(distinct), num_nodes)
    if (weights != weights[:, :1]).any():
        return None
    return tuple(
        (int(offset), float(entries.data[order[start]])) for offset, start in zip(distinct, starts, strict=True)
    )
