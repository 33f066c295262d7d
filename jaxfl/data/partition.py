"""Partitions of a pool over nodes, on the host and from an integer seed.

A partition is a list with one int32 array of sample indices for each node. The order inside a node is random (except
for `by_owner`), so that consecutive samples make fair batches.

References:
    label_shards: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        AISTATS 2017, arXiv:1602.05629, section 3.
    dirichlet: M. Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019,
        arXiv:1905.12022, section 4.
    dirichlet of equal labels, few_classes: Q. Li et al., "Federated Learning on Non-IID Data Silos: An Experimental
        Study", ICDE 2022, arXiv:2102.02079, section 4.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.tables import numbered
from jaxfl.core.types import FederatedData

Part = npt.NDArray[np.int32]


class Stream(enum.IntEnum):
    """Keeps the random numbers of two schemes apart under one seed. Append only: published results depend on them."""

    IID = 0
    DIRICHLET = 1
    SHARDS = 2
    WRITERS = 3
    CLASSES = 4
    SHARES = 5
    HELD_OUT = 6


def iid(num_samples: int, num_nodes: int, seed: int, *, sizes: Sequence[int] | None = None) -> list[Part]:
    """Deals the samples at random.

    Args:
        num_samples: N, at least `num_nodes`.
        num_nodes: n.
        seed: non-negative integer.
        sizes: how many samples each node gets, n integers of at least 1. Their sum may stay below N; the samples
            left over then belong to no node. Default: N / n; if that is not an integer, the first nodes get one more.

    Returns:
        n index arrays, int32.

    Raises:
        ArgumentError: there are too few samples.

    Guarantees:
        - every sample is used exactly once (at most once with `sizes`).
        - without `sizes`, sizes differ by at most one.

    Examples:
        >>> parts = iid(10, 4, seed=0)
        >>> [len(part) for part in parts], sorted(np.concatenate(parts).tolist()) == list(range(10))
        ([3, 3, 2, 2], True)
    """
    check.at_least(1, num_samples=num_samples, num_nodes=num_nodes)
    if sizes is None:
        _enough(num_samples, num_nodes, 1)
        counts = np.full(num_nodes, num_samples // num_nodes)
        counts[: num_samples % num_nodes] += 1
    else:
        counts = np.asarray(sizes)
        if counts.dtype.kind not in "iu" or counts.shape != (num_nodes,) or counts.min() < 1:
            found = f"got {counts.dtype} of shape {counts.shape}"
            raise ArgumentError("sizes", f"must be {num_nodes} integers of at least 1", found, "Pass one size a node.")
        if counts.sum() > num_samples:
            found = f"it is {counts.sum():,}"
            remedy = "Lower the sizes or take more samples."
            raise ArgumentError("sizes", f"must sum to at most the {num_samples:,} samples", found, remedy)
    order = generator_of(seed, Stream.IID).permutation(num_samples).astype(np.int32)
    ends = np.cumsum(counts)
    return [order[end - count : end].copy() for count, end in zip(counts, ends, strict=True)]


def dirichlet(labels: Any, num_nodes: int, alpha: float, seed: int, *, min_size: int = 1) -> list[Part]:
    """Splits every class over the nodes in proportions drawn from a symmetric Dirichlet distribution.

    Sizes come out uneven. Nodes with fewer than `min_size` samples are then filled up, in ascending order: each takes
    one random sample after another from the node that is largest at that moment (of equals the first), which never
    drops below `min_size` itself. So no draw is ever rejected, and the time is bounded.

    Args:
        labels: (N,), non-negative integers. If all are equal, only the sizes of nodes differ (quantity skew).
        num_nodes: n.
        alpha: concentration, above 0. Near 0 each class is at one node; towards infinity every node has the pool's mix.
        seed: non-negative integer.
        min_size: fewest samples of a node; n * min_size must not exceed N.

    Returns:
        n index arrays, int32.

    Raises:
        ArgumentError: there are too few samples, or an argument is out of range.

    Guarantees:
        - every sample is used exactly once.
        - every node has at least min_size samples.
        - a class has the same shares under the same seed, whatever samples there are: so do those of a test set.

    Examples:
        >>> labels = np.arange(1000) % 10
        >>> counts = label_counts(dirichlet(labels, 4, alpha=1e-4, seed=0), labels, 10)
        >>> (counts > 95).sum(axis=0), bool(counts.sum(axis=1).min() >= 1)  # each class at one node, no node empty
        (array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1]), True)
    """
    array = _label_vector(labels)
    check.at_least(1, num_nodes=num_nodes, min_size=min_size)
    check.positive(alpha=alpha)
    _enough(len(array), num_nodes, min_size)
    generator = generator_of(seed, Stream.DIRICHLET)
    pieces: list[list[np.ndarray]] = [[] for _ in range(num_nodes)]
    for label in np.unique(array):
        members = generator.permutation(np.flatnonzero(array == label))
        cumulative = np.cumsum(_dirichlet_draw(generator_of(seed, Stream.SHARES, label), float(alpha), num_nodes))
        cuts = np.rint(cumulative[:-1] / cumulative[-1] * len(members)).astype(np.int64)
        for piece, part in zip(np.split(members, cuts), pieces, strict=True):
            part.append(piece)
    parts = [generator.permutation(np.concatenate(part)) for part in pieces]
    return [part.astype(np.int32) for part in _fill_small_nodes(parts, min_size)]


def _dirichlet_draw(generator: np.random.Generator, alpha: float, num_nodes: int) -> np.ndarray:
    """Unnormalised proportions, (n,) float64, the largest 1; finite for every alpha > 0.

    A Gamma(alpha) variable is a Gamma(alpha + 1) variable times U^(1 / alpha). For alpha below 1 it may underflow, for
    small alpha at all nodes at once. So alpha times its logarithm is kept, and the largest is subtracted before
    dividing by alpha.
    """
    if alpha >= 1.0:
        weights = generator.standard_gamma(alpha, num_nodes)
        return weights / weights.max()
    uniform = 1.0 - generator.random(num_nodes)  # in (0, 1], so that its logarithm is finite
    scaled_log = alpha * np.log(generator.standard_gamma(alpha + 1.0, num_nodes)) + np.log(uniform)
    with np.errstate(over="ignore"):
        return np.exp((scaled_log - scaled_log.max()) / alpha)


def _fill_small_nodes(parts: list[np.ndarray], min_size: int) -> list[np.ndarray]:
    """Moves samples, one at a time and at most n * min_size in all, from the largest node to nodes below min_size.

    While a node is short, the largest is above the mean, hence above min_size: it is never the same node, and it is
    still large enough afterwards.
    """
    sizes = np.array([len(part) for part in parts])
    if sizes.min() >= min_size:
        return parts
    members = [part.tolist() for part in parts]
    for node in np.flatnonzero(sizes < min_size):
        while sizes[node] < min_size:
            donor = int(np.argmax(sizes))
            members[node].append(members[donor].pop())
            sizes[donor] -= 1
            sizes[node] += 1
    return [np.array(part) for part in members]


def label_shards(labels: Any, num_nodes: int, shards_per_node: int, seed: int) -> list[Part]:
    """Sorts the samples by label, cuts them into n * shards_per_node shards and deals these at random.

    Args:
        labels: (N,), non-negative integers; N at least n * shards_per_node.
        num_nodes: n.
        shards_per_node: how many shards a node gets: with 2, most nodes see two classes.
        seed: non-negative integer; it also orders the samples of a class.

    Returns:
        n index arrays, int32.

    Raises:
        ArgumentError: there are too few samples.

    Guarantees:
        - every sample is used exactly once.
        - shards differ in size by at most one.

    Examples:
        >>> labels = np.arange(40) % 4
        >>> label_counts(label_shards(labels, 4, shards_per_node=1, seed=0), labels, 4).max(axis=1)
        array([10, 10, 10, 10])
    """
    array = _label_vector(labels)
    check.at_least(1, num_nodes=num_nodes, shards_per_node=shards_per_node)
    _enough(len(array), num_nodes, shards_per_node)
    generator = generator_of(seed, Stream.SHARDS)
    order = generator.permutation(len(array)).astype(np.int32)
    by_label = order[np.argsort(array[order], kind="stable")]
    shards = np.array_split(by_label, num_nodes * shards_per_node)
    deal = generator.permutation(len(shards)).reshape(num_nodes, shards_per_node)
    return [generator.permutation(np.concatenate([shards[shard] for shard in row])) for row in deal]


def few_classes(labels: Any, num_nodes: int, classes_per_node: int, seed: int) -> list[Part]:
    """Gives every node the same number of classes; the nodes of a class share its samples equally.

    Nodes draw in a random order. Each takes the classes that the fewest nodes have so far, at random among equals.

    Args:
        labels: (N,), non-negative integers.
        num_nodes: n.
        classes_per_node: k, at most the number of classes.
        seed: non-negative integer.

    Returns:
        n index arrays, int32.

    Raises:
        ArgumentError: there are fewer classes than k, or a class has fewer samples than nodes.

    Guarantees:
        - every node has samples of exactly k classes.
        - the numbers of nodes of two classes differ by at most one.
        - every sample is used exactly once, except in classes that no node draws (if n k is below their number).

    Examples:
        >>> labels = np.arange(40) % 4
        >>> label_counts(few_classes(labels, 4, classes_per_node=2, seed=0), labels, 4).tolist()
        [[0, 5, 5, 0], [5, 0, 5, 0], [5, 0, 0, 5], [0, 5, 0, 5]]
    """
    array = _label_vector(labels)
    classes = np.unique(array)
    check.at_least(1, num_nodes=num_nodes, classes_per_node=classes_per_node)
    if classes_per_node > len(classes):
        requirement = f"must be at most the {len(classes)} classes"
        raise ArgumentError("classes_per_node", requirement, f"got {classes_per_node}", "Pass fewer.")
    generator = generator_of(seed, Stream.CLASSES)
    nodes: list[list[int]] = [[] for _ in classes]
    for node in generator.permutation(num_nodes).tolist():
        order = np.lexsort((generator.random(len(classes)), np.array([len(of_class) for of_class in nodes])))
        for number in order[:classes_per_node]:
            nodes[number].append(node)
    pieces: list[list[np.ndarray]] = [[] for _ in range(num_nodes)]
    for label, of_class in zip(classes, nodes, strict=True):
        members = generator.permutation(np.flatnonzero(array == label))
        _enough(len(members), len(of_class), 1, f"samples of class {label}")
        for node, piece in zip(of_class, np.array_split(members, max(1, len(of_class))), strict=False):
            pieces[node].append(piece)
    return [generator.permutation(np.concatenate(part)).astype(np.int32) for part in pieces]


class NamedParts(list[Part]):
    """A partition whose nodes have names, which `federate` keeps.

    Attributes:
        names: (n,), distinct.
    """

    def __init__(self, parts: Sequence[Part], names: Sequence[str]):
        super().__init__(parts)
        self.names = tuple(names)


def by_owner(owner_ids: Any) -> NamedParts:
    """One node per owner (a writer, a hospital, a phone), in ascending order of the owners' names.

    Args:
        owner_ids: (N,), integers or text, N at least 1; the owner of each sample. A column of pandas will do.

    Returns:
        One index array per distinct owner, int32, ascending. The nodes are named by the owners, as `jaxfl.core.tables`
        writes and orders names.

    Raises:
        ArgumentError: the ids are no vector of integers or text, one is missing, or two differ by blanks or case only.

    Guarantees:
        - every sample is used exactly once.

    Examples:
        >>> [part.tolist() for part in by_owner(["bo", "al", "bo"])]
        [[1], [0, 2]]
    """
    return NamedParts(*_by_id("owner_ids", owner_ids))


def whole_writers(writer_ids: Any, num_nodes: int, writers_per_node: int, seed: int) -> list[Part]:
    """Deals whole writers at random, equally many to each node. Writers left over, with their samples, have no node.

    Args:
        writer_ids: (N,), integers or text; who made each sample.
        num_nodes: n; n * writers_per_node must not exceed the number of writers.
        writers_per_node: how many a node gets; EmbracingFL gives each client two writers of FEMNIST.
        seed: non-negative integer.

    Returns:
        n index arrays, int32.

    Raises:
        ArgumentError: there are too few writers, or the ids are not a vector of integers or text.

    Guarantees:
        - no writer is split over two nodes.
        - every node has exactly writers_per_node writers.
        - every sample is used at most once.

    Examples:
        >>> writers = np.repeat(np.arange(6), 10)
        >>> [np.unique(writers[part]).tolist() for part in whole_writers(writers, 2, 2, seed=0)]
        [[2, 3], [0, 4]]
    """
    writers, _ = _by_id("writer_ids", writer_ids)
    check.at_least(1, num_nodes=num_nodes, writers_per_node=writers_per_node)
    _enough(len(writers), num_nodes, writers_per_node, "writers")
    generator = generator_of(seed, Stream.WRITERS)
    deal = generator.permutation(len(writers))[: num_nodes * writers_per_node].reshape(num_nodes, writers_per_node)
    return [generator.permutation(np.concatenate([writers[writer] for writer in row])) for row in deal]


def label_counts(parts: Sequence[Any] | FederatedData, labels: Any, num_classes: int) -> np.ndarray:
    """Count the samples of each class at every node.

    Args:
        parts: a partition, or data made from one.
        labels: (N,), integers in [0, num_classes): the labels of the pool.
        num_classes: c.

    Returns:
        (n, c), int64; rows sum to the sizes of the nodes.

    Raises:
        ArgumentError: a label is out of range.

    Examples:
        >>> label_counts([np.array([0, 2]), np.array([1])], [1, 0, 1], 2)
        array([[0, 2],
               [1, 0]])
    """
    check.at_least(1, num_classes=num_classes)
    array = _label_vector(labels, num_classes)
    if isinstance(parts, FederatedData):
        indices, sizes = np.asarray(parts.indices), np.asarray(parts.sizes)
        parts = [row[:size] for row, size in zip(indices, sizes, strict=True)]
    return np.stack([np.bincount(array[np.asarray(part)], minlength=num_classes) for part in parts])


def _by_id(argument: str, ids: Any) -> tuple[list[Part], tuple[str, ...]]:
    """The samples of each distinct id, and the ids as names, in their order."""
    vector = ids if isinstance(ids, np.ndarray | list | tuple) else np.asarray(ids)
    names, owners = numbered(argument, vector, "sample {}".format)
    if not names:
        raise ArgumentError(argument, "must hold one entry a sample", "got none", "Pass (N,) ids.")
    order = np.argsort(owners, kind="stable").astype(np.int32)
    return [part.copy() for part in np.split(order, np.cumsum(np.bincount(owners))[:-1])], names


def generator_of(seed: int, stream: Stream, *parts: int) -> np.random.Generator:
    """The generator of one scheme under one seed, or of a part of it."""
    check.at_least(0, seed=seed)
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=(int(stream), *map(int, parts))))


def _enough(count: int, num_nodes: int, per_node: int, what: str = "samples") -> None:
    """Refuses more nodes than there are samples, or writers, for."""
    if count < num_nodes * per_node:
        requirement = f"must leave at least {per_node} of the {count:,} {what} for every node"
        found = f"got {num_nodes:,}, which needs {num_nodes * per_node:,}"
        raise ArgumentError("num_nodes", requirement, found, f"Take fewer nodes or more {what}.")


def _label_vector(labels: Any, num_classes: float = np.inf) -> np.ndarray:
    """`labels` as a vector of integers in [0, num_classes)."""
    array = np.asarray(labels)
    check.integers(labels=array)
    check.below(num_classes, labels=array)
    return array
