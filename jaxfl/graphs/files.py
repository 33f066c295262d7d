"""Matrices and graphs from .npy files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.topologies import TrackingPair, from_matrix


def read_matrices(path: str, requirement: str, remedy: str) -> np.ndarray:
    """The array of numbers in a .npy file.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    file = Path(path).expanduser()
    try:
        matrices = np.load(file, allow_pickle=False)
    except OSError as error:
        found = f"{file}: {(error.strerror or str(error)).lower()}"
        raise ArgumentError("graph", requirement, found, remedy) from None
    except (ValueError, EOFError):  # another format, cut off, or objects that only pickle reads
        raise ArgumentError("graph", requirement, f"{file} does not hold an array of numbers", remedy) from None
    if not isinstance(matrices, np.ndarray):
        matrices.close()
        raise ArgumentError("graph", requirement, f"{file} is an archive of several arrays", remedy)
    if matrices.dtype.kind not in "biuf":
        raise ArgumentError("graph", requirement, f"{file} has entries of type {matrices.dtype}", remedy)
    return matrices


def read_graph(path: str, num_nodes: int) -> Graph:
    """The graph whose mixing matrix, or periodic sequence of them, is in a .npy file.

    Args:
        path: the file, an array (n, n) or (period, n, n); entry (i, j) is the share of j's value that i receives.
        num_nodes: n, the number of nodes that the run has.

    Raises:
        ArgumentError: the file cannot be read, is for another number of nodes, or holds no mixing matrix.
    """
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


def read_pair(path: str, num_nodes: int) -> TrackingPair:
    """The weights R and C of gradient tracking in a .npy file, an array (2, n, n).

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    requirement = f"must be a .npy file with R and C, shape (2, {num_nodes}, {num_nodes})"
    remedy = "Write it by numpy.save(FILE, numpy.stack([R, C]))."
    weights = read_matrices(path, requirement, remedy)
    if weights.shape != (2, num_nodes, num_nodes):
        raise ArgumentError("graph", requirement, f"{path} has shape {weights.shape}", remedy)
    return TrackingPair(state_weights=weights[0], tracker_weights=weights[1])
