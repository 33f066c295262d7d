"""Matrices and graphs from .npy files, edges by name from .csv files, and the pairs of gradient tracking by name."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path

import numpy as np

from jaxfl.core import ArgumentError, tables
from jaxfl.core.calls import by_name
from jaxfl.graphs import topologies
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.topologies import TrackingPair, from_matrix, from_networkx

NAMED_PAIRS = ("five_agents", "five_agents_self_loops")
_SAME_TWICE = ("directed_ring", "exponential", "ring", "complete", "star")


def read_matrices(path: str, requirement: str, remedy: str) -> np.ndarray:
    """The array of numbers in a .npy file.

    Raises:
        ArgumentError: a file that cannot be read, or holds something else.

    Guarantees:
        - nothing is allocated that the file does not hold.
        - a pipe, a socket or a device is refused, not opened.
    """
    file = Path(os.path.expanduser(path))

    def refusal(found: str) -> ArgumentError:
        return ArgumentError("graph", requirement, f"{file} {found}", remedy)

    try:
        size = tables.regular_size(file)
        with file.open("rb"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers written by Python 2, which can be read
            array = np.lib.format.open_memmap(file, mode="r")  # maps the file's own bytes, and never unpickles
    except OSError as error:
        raise refusal((error.strerror or str(error)).lower()) from None
    except ArgumentError:
        raise
    # A header is text that goes through Python's tokenizer and parser and the constructor of a dtype: damaged, it can
    # raise nearly anything, from SyntaxError to MemoryError.
    except Exception:
        several = zipfile.is_zipfile(file)
        raise refusal(
            f"{'is an archive of several arrays' if several else 'holds no whole array of numbers'}"
        ) from None
    if array.dtype.kind not in "biuf":
        raise refusal(f"has entries of type {array.dtype.name}")
    if size != array.offset + array.nbytes:
        raise refusal(f"holds {size:,} bytes, which do not fill the shape {array.shape} of its header")
    try:
        return np.array(array)
    except MemoryError:
        raise refusal("is larger than the memory") from None


def is_edges(path: str) -> bool:
    """Tell whether a file has edges by name, and no matrix."""
    return path.lower().endswith((".csv", ".tsv", ".csv.gz"))


def is_graph_file(graph: str) -> bool:
    """Tell a file from the name of a graph."""
    return graph.endswith(".npy") or is_edges(graph)


@by_name
def read_graph(path: str, num_nodes: int) -> Graph:
    """Read a graph from a file.

    Args:
        path: a .npy file, an array (n, n) or (period, n, n); entry (i, j) is the share of j's value that i receives. Or
            a .csv file, perhaps with a heading, and one row per edge: the names of the sender and of the receiver, by
            the rules of `jaxfl.core.tables`, as sites have. The first row is a heading unless the other rows name both
            of its words. Weights are then metropolis where every edge has its reverse, else uniform.
        num_nodes: n, the number of nodes that the run has.

    Raises:
        ArgumentError: a file that cannot be read, or holds no mixing matrix or edges for these nodes.

    Guarantees:
        - nodes are in ascending order of their names, as sites are.
    """
    if is_edges(path):
        return _of_edges(path, num_nodes)
    requirement = "must be a .npy file with a mixing matrix"
    remedy = "Write it by numpy.save, shape (n, n), or (period, n, n) for a time-varying graph."
    matrices = read_matrices(path, requirement, remedy)
    if matrices.ndim not in (2, 3) or matrices.shape[-1] != matrices.shape[-2]:
        raise ArgumentError("graph", requirement, f"{path} has shape {matrices.shape}", remedy)
    if matrices.shape[-1] != num_nodes:
        fitting = f"Pass --nodes {matrices.shape[-1]}, or another file."
        found = f"{path} is for {matrices.shape[-1]}"
        raise ArgumentError("graph", f"must be for the run's {num_nodes} nodes", found, fitting)
    try:
        return from_matrix(matrices, name=path)
    except ArgumentError as error:
        raise ArgumentError("graph", error.requirement, f"in {path} {error.found}", error.remedy) from None


def _of_edges(path: str, num_nodes: int) -> Graph:
    requirement, remedy = "must be a .csv file with one edge per row", "Write a sender and a receiver in each row."
    cells = tables.read_rows(path, "graph", requirement, remedy).cells
    odd = next((row for _, row in cells if len(row) != 2), None)
    if odd is not None or not cells:
        found = f"{path} has " + (f"a row of {len(odd)}: {', '.join(odd)[:80]}" if odd else "none")
        raise ArgumentError("graph", requirement, found, remedy)
    ends = [name for _, row in cells for name in row]
    named = tables.numbered("graph", ends, lambda end: f"row {cells[end // 2][0]} of {path}", path)
    edges, heading = named.numbers.reshape(-1, 2), ""
    if not np.isin(edges[0], edges[1:]).all():
        edges, heading = edges[1:], ", and row 1 counts as a heading"
    order = tables.in_order(named.names[node] for node in np.unique(edges))
    if len(order) != num_nodes:
        found = f"{path} names {len(order)}: {', '.join(order)[:80]}{heading}"
        raise ArgumentError("graph", f"must have edges of the run's {num_nodes} nodes", found, "Name each node.")
    import networkx as nx

    graph = nx.DiGraph(name=path)
    graph.add_edges_from((named.names[sender], named.names[receiver]) for sender, receiver in edges)
    both_ways = all(graph.has_edge(receiver, sender) for sender, receiver in graph.edges)
    return from_networkx(graph, weights="metropolis" if both_ways else "uniform", names=order)


def read_pair(path: str, num_nodes: int) -> TrackingPair:
    """The weights R and C of gradient tracking in a .npy file, an array (2, n, n).

    Raises:
        ArgumentError: a file that cannot be read, or holds something else.
    """
    requirement = f"must be a .npy file with R and C, shape (2, {num_nodes}, {num_nodes})"
    remedy = "Write it by numpy.save(FILE, numpy.stack([R, C]))."
    weights = read_matrices(path, requirement, remedy)
    if weights.shape != (2, num_nodes, num_nodes):
        raise ArgumentError("graph", requirement, f"{path} has shape {weights.shape}", remedy)
    return TrackingPair(state_weights=weights[0], tracker_weights=weights[1])


def tracking_pair(graph: str, num_nodes: int) -> TrackingPair:
    """The weights R and C of gradient tracking that a name stands for.

    Args:
        graph: the name of a pair in `jaxfl.graphs`; or of a graph there, whose mean over rounds stands for R and C;
            or a .npy file, see `read_pair`; or a .csv file with edges, see `read_graph`, which stands for both, too.
        num_nodes: n, 5 for `five_agents` and `five_agents_self_loops`.

    Raises:
        ArgumentError: another name, another number of nodes, or a file that cannot be used.
    """
    if graph in NAMED_PAIRS:
        if num_nodes != 5:
            raise ArgumentError("num_nodes", f"must be 5 for {graph}", f"got {num_nodes}", "Name another graph.")
        return getattr(topologies, graph)()
    if graph.endswith(".npy"):
        return read_pair(graph, num_nodes)
    if graph not in _SAME_TWICE and not is_edges(graph):
        names = ", ".join((*NAMED_PAIRS, *_SAME_TWICE))
        remedy = "Choose one of these, or name a .npy file with R and C, or a .csv file with edges."
        raise ArgumentError("graph", f"must be one of {names}", f"got {graph!r}", remedy)
    both = getattr(topologies, graph)(num_nodes) if graph in _SAME_TWICE else read_graph(graph, num_nodes)
    matrix = both.mixing_matrices.mean(axis=0)
    return TrackingPair(state_weights=matrix, tracker_weights=matrix)
