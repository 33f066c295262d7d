"""The data that algorithms take: a pool of samples with an index table of the nodes, and partitions by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import Array, check
from jaxfl.core.check import ArgumentError
from jaxfl.core.tables import as_name, refuse_alike
from jaxfl.core.types import FederatedData, NodeNames, node_text
from jaxfl.data.partition import by_owner, dirichlet, few_classes, iid, label_shards, whole_writers
from jaxfl.data.sources import Dataset


def federate(inputs: Any, labels: Any, parts: Sequence[Any], *, names: Sequence[str] | None = None) -> FederatedData:
    """One pool of samples and the nodes' indices into it, on the default device.

    The samples are stored once, whatever the nodes. Only the index table is padded, with 0, to the largest node's size.

    Args:
        inputs: (N, *sample), uint8 images, float32 features or int32 tokens; kept as they are.
        labels: (N, ...), classes of any integer dtype (stored as int32) or float32 targets.
        parts: n vectors of sample indices in [0, N), none empty, no sample twice; a sample may belong to no node.
        names: (n,), distinct names of the nodes. A graph with names must have the same in the same order. Default: the
            names of a partition by `by_owner`, else none.

    Raises:
        ArgumentError: lengths or dtypes that do not fit, numbers that are not finite, an empty node, or indices out of
            range or repeated.

    Guarantees:
        - row i of `indices` begins with node i's part, in its order, and ends with zeros.

    Examples:
        >>> data = federate(np.zeros((5, 2), np.float32), np.arange(5), [np.array([4, 1]), np.array([3])])
        >>> data.indices.tolist(), data.sizes.tolist()
        ([[4, 1], [3, 0]], [2, 1])
    """
    pool, targets = _one_array("inputs", inputs), _one_array("labels", labels)
    _check_parts(parts)
    # Only dtypes that JAX keeps: without x64 it would silently turn float64 into float32.
    floats = ["float32", "float64"] if jnp.result_type(float) == np.float64 else ["float32"]
    _check_dtype("inputs", pool.dtype.name, ["uint8", "int32", *floats])
    if targets.dtype.kind not in "iu":
        _check_dtype("labels", targets.dtype.name, ["integers", *floats])
    if pool.ndim == 0 or targets.ndim == 0 or len(pool) != len(targets):
        found = f"got shape {targets.shape} for inputs of shape {pool.shape}"
        raise ArgumentError("labels", "must hold one entry per sample of inputs", found, "Check both lengths.")
    rows, node_names = _rows(parts, len(pool), names)

    def place(sample: int) -> str:
        node = next((node for node, row in enumerate(rows) if sample in row), None)
        owner = "no node" if node is None else node_text(node, None if node_names is None else node_names.names)
        return f"sample {sample} of {owner}"

    check.finite(place, inputs=pool, labels=targets)
    if targets.dtype.kind in "iu":
        targets = _as_int32(targets)
    indices, sizes = _index_table(rows)
    return FederatedData(
        inputs=jnp.asarray(pool), labels=jnp.asarray(targets), indices=indices, sizes=sizes, node_names=node_names
    )


def redeal(data: FederatedData, parts: Sequence[Any], *, names: Sequence[str] | None = None) -> FederatedData:
    """The same pool of samples, which stays where it is on the device, at other nodes.

    Args:
        data: whose pool is taken, as it is and unchecked.
        parts, names: as for `federate`.

    Raises:
        ArgumentError: as `federate` of parts and names.
    """
    _check_parts(parts)
    rows, node_names = _rows(parts, len(data.labels), names)
    indices, sizes = _index_table(rows)
    return data._replace(indices=indices, sizes=sizes, node_names=node_names)


def _check_parts(parts: Any) -> None:
    if not hasattr(parts, "__len__") or isinstance(parts, str | dict):
        remedy = "Pass jaxfl.data.iid(num_samples, num_nodes, seed), for instance; of a dict its list(parts.values())."
        raise ArgumentError(
            "parts", "must be a list with the sample indices of each node", f"got {parts!r:.40}", remedy
        )


def _rows(
    parts: Sequence[Any], num_samples: int, names: Sequence[str] | None
) -> tuple[list[np.ndarray], NodeNames | None]:
    """The nodes' indices, checked, and their names."""
    node_names = _names(getattr(parts, "names", None) if names is None else names, len(parts))
    return _index_rows(parts, num_samples, None if node_names is None else node_names.names), node_names


def _index_table(rows: Sequence[np.ndarray]) -> tuple[Array, Array]:
    """(n, J) indices, padded with 0, and (n,) sizes."""
    sizes = np.array([len(row) for row in rows], np.int32)
    indices = np.zeros((len(rows), int(sizes.max())), np.int32)
    for row, part in zip(indices, rows, strict=True):
        row[: len(part)] = part
    return jnp.asarray(indices), jnp.asarray(sizes)


def _one_array(argument: str, values: Any) -> np.ndarray | jax.Array:
    """The values as one array; a list of arrays of different lengths, or of each node's labels, is refused."""
    found = "got a list of arrays of different shapes"
    if argument == "labels" and isinstance(values, list | tuple) and any(map(np.ndim, values)):
        found = "got a list of arrays"
    else:
        try:
            return values if isinstance(values, jax.Array) else np.asarray(values)
        except ValueError:
            pass
    remedy = "Concatenate them, and pass the indices of each node as parts."
    raise ArgumentError(argument, "must be one array with a row a sample", found, remedy)


def _names(names: Sequence[str] | None, num_nodes: int) -> NodeNames | None:
    """Check the names: one for each node."""
    if names is None:
        return None
    texts = tuple(as_name(name) or "" for name in names)
    if len(texts) != num_nodes or len({*texts} - {""}) != num_nodes:
        found = f"got {len(texts)} of which {len(set(texts))} differ, for {num_nodes} nodes"
        raise ArgumentError("names", "must hold one name for each node, all different", found, "Name each node once.")
    refuse_alike("names", texts, "it")
    return NodeNames(texts)


def _sites(dataset: Dataset, num_nodes: int, seed: int) -> list[np.ndarray]:
    """A node for each writer, with the writers' names if they have any."""
    del seed  # nothing is drawn
    parts, names = by_owner(writers_of(dataset)), dataset.writer_names
    if names is not None:
        parts.names = tuple(names[int(writer)] for writer in parts.names)
    if len(parts) != num_nodes:
        requirement = f"must be {len(parts)}, the sites of {dataset.name}"
        raise ArgumentError("num_nodes", requirement, f"got {num_nodes}", f"Pass {len(parts)}, or leave it out.")
    return parts


SCHEMES: dict[str, Callable[..., list[np.ndarray]]] = {  # (data set, nodes, seed), and the scheme's own number
    "iid": lambda dataset, *rest: iid(len(dataset.train_labels), *rest),
    "dirichlet": lambda dataset, nodes, seed, *, alpha: dirichlet(dataset.train_labels, nodes, alpha, seed),
    "quantity": lambda dataset, nodes, seed, *, alpha: dirichlet(0 * dataset.train_labels, nodes, alpha, seed),
    "classes": lambda dataset, nodes, seed, *, classes_per_node: few_classes(
        dataset.train_labels, nodes, classes_per_node, seed
    ),
    "shards": lambda dataset, nodes, seed, *, shards_per_node: label_shards(
        dataset.train_labels, nodes, shards_per_node, seed
    ),
    "writers": lambda dataset, nodes, seed, *, writers_per_node: whole_writers(
        writers_of(dataset, "writer"), nodes, writers_per_node, seed
    ),
    "sites": _sites,
}


FROM_LABELS = ("dirichlet", "classes", "shards")  # schemes that look at labels, the others only at numbers of samples


def partition_dataset(
    dataset: Dataset,
    scheme: str,
    num_nodes: int,
    seed: int,
    *,
    alpha: float | None = None,
    classes_per_node: int | None = None,
    shards_per_node: int | None = None,
    writers_per_node: int | None = None,
) -> list[np.ndarray]:
    """Partition a data set's training samples by the name of a scheme, as on the command line.

    Args:
        dataset: what to split.
        scheme: "iid", "dirichlet" (needs `alpha`), "quantity" (sizes differ, labels do not; needs `alpha`), "classes"
            (needs `classes_per_node`), "shards" (needs `shards_per_node`), "writers" (needs `writers_per_node`, and a
            data set whose writers are known) or "sites" (a node for each writer).
        num_nodes: n.
        seed: non-negative integer.
        alpha: see `dirichlet`. Other schemes refuse it; the same holds for the arguments below.
        classes_per_node: see `few_classes`.
        shards_per_node: see `label_shards`.
        writers_per_node: see `whole_writers`.

    Returns:
        n index arrays, int32.

    Raises:
        ArgumentError: an unknown scheme, a missing number, another scheme's number, no writers to partition by, or
            a number of nodes that is not that of the sites.

    Examples:
        >>> from jaxfl.data.sources import load
        >>> digits = load("digits")
        >>> parts = partition_dataset(digits, "dirichlet", 16, seed=0, alpha=0.5)
        >>> federate(digits.train_inputs, digits.train_labels, parts).num_nodes
        16
    """
    check.one_of(tuple(SCHEMES), scheme=scheme)
    numbers = {"alpha": alpha, "classes_per_node": classes_per_node}
    numbers |= {"shards_per_node": shards_per_node, "writers_per_node": writers_per_node}
    own = {name: value for name, value in numbers.items() if name in inspect.signature(SCHEMES[scheme]).parameters}
    for argument, value in numbers.items():
        if argument in own and value is None:
            raise ArgumentError(argument, f"must be given for the {scheme} partition", "got None", "Pass a number.")
        if argument not in own and value is not None:
            remedy = "Leave it out, or choose a partition that takes it."
            raise ArgumentError(argument, f"must be left out for the {scheme} partition", f"got {value}", remedy)
    return SCHEMES[scheme](dataset, num_nodes, seed, **own)


def writers_of(dataset: Dataset, called: str = "site") -> np.ndarray:
    """The writers, or sites, of a data set, one a training sample; `called` so in errors."""
    writers = dataset.train_writers
    if writers is None or len(writers) != len(dataset.train_labels):
        found = f"{dataset.name} has {'none' if writers is None else f'{len(writers)} for {len(dataset.train_labels)}'}"
        remedy = "Name a file with a column of sites, and that column (site_column, --site-column)."
        if called == "writer":
            remedy = "Choose femnist or a file with sites (--site-column), or pass train_writers to from_arrays."
        raise ArgumentError("dataset", f"must have the {called} of each training sample", found, remedy)
    return writers


def _check_dtype(argument: str, dtype: str, allowed: list[str]) -> None:
    """Refuses a dtype that JAX would change or that no model takes."""
    if dtype not in allowed:
        requirement = f"must be {', '.join(allowed[:-1])} or {allowed[-1]}"
        wanted = "int32" if "int" in dtype else "float32"
        raise ArgumentError(argument, requirement, f"got {dtype}", f"Convert it, e.g. with .astype(np.{wanted}).")


def _as_int32(labels: Any) -> np.ndarray | jax.Array:
    """Integer labels as int32, refused when a value does not fit."""
    if labels.dtype == np.int32:
        return labels
    host = np.asarray(labels)
    limits = np.iinfo(np.int32)
    if host.size and (host.min() < limits.min or host.max() > limits.max):
        found = f"got values from {host.min()} to {host.max()}"
        raise ArgumentError("labels", "must fit into int32", found, "Number the classes from 0.")
    return host.astype(np.int32)


def _index_rows(parts: Sequence[Any], num_samples: int, names: Sequence[str] | None) -> list[np.ndarray]:
    """The nodes' indices. No sample may be repeated: privacy accounting and averages count each sample once."""
    rows = [np.asarray(part) for part in parts]
    if not rows:
        raise ArgumentError("parts", "must hold at least one node", "got none", "Pass one index array a node.")
    for node, row in enumerate(rows):
        if row.size == 0:
            found, remedy = f"{node_text(node, names)} has none", "Leave the node out or give it a sample."
            raise ArgumentError("parts", "must give every node at least one sample", found, remedy)
        if row.ndim != 1 or row.dtype.kind not in "iu":
            found = f"{node_text(node, names)} has {row.dtype} of shape {row.shape}"
            remedy = "Pass sample indices: np.flatnonzero(mask) of a mask, sorted(part) of a set."
            raise ArgumentError("parts", "must be vectors of integers", found, remedy)
    members, ends = np.concatenate(rows), np.cumsum([len(row) for row in rows])
    if members.min() < 0 or members.max() >= num_samples:
        place = np.flatnonzero((members < 0) | (members >= num_samples))[0]
        found = f"{node_text(int(np.searchsorted(ends, place, 'right')), names)} has {members[place]}"
        remedy = "Partition the same samples that you pass as inputs."
        raise ArgumentError("parts", f"must hold indices in [0, {num_samples})", found, remedy)
    count = np.bincount(members, minlength=num_samples)
    if count.max() > 1:
        sample = int(np.argmax(count > 1))
        places = np.flatnonzero(members == sample)[:2]
        first, second = (node_text(int(owner), names) for owner in np.searchsorted(ends, places, "right"))
        who = f"{first} holds it twice" if first == second else f"{first} and {second} hold it"
        raise ArgumentError("parts", "must hold every sample at most once", f"sample {sample}: {who}", "Remove one.")
    return rows


class SomeSamples(NamedTuple):
    """Some of each node's samples, m at most; padding repeats its last."""

    inputs: Array  # (n, m, *sample)
    labels: Array  # (n, m, ...)
    weights: Array  # (n, m), float32, 1 / number of the node's samples here, 0 for padding


def some_samples(data: FederatedData, most: int) -> SomeSamples:
    """At most `most` samples of each node, evenly spaced in its list, which may be sorted.

    Guarantees:
        - padding has weight 0, and each node's weights sum to 1.
    """
    check.at_least(1, most=most)
    slots = jnp.arange(min(most, data.max_size), dtype=jnp.int32)
    counts = jnp.minimum(data.sizes, len(slots))
    valid = slots[None, :] < counts[:, None]
    # Slot s of m looks at sample floor(s J / m), without the product, which may not fit 32 bits.
    step, rest = jnp.divmod(data.sizes, counts)
    positions = slots[None, :] * step[:, None] + slots[None, :] * rest[:, None] // counts[:, None]
    pool = data.places(positions)
    weights = valid.astype(jnp.float32) / counts[:, None].astype(jnp.float32)
    return SomeSamples(inputs=data.inputs[pool], labels=data.labels[pool], weights=weights)
