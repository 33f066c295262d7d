"""The mixing step where nodes lie over devices (see `jaxfl.core.devices`): every device sends what others need.

On each of the s devices the leaves of a tree are joined to one buffer for each type of leaf, (n / s, d). These parts of
it travel:

- "circulant": the first and the last rows of a share, as many as some shift takes to another device;
- "neighbors": the rows that some node of the receiving device hears from, each once (see `needed_rows`);
- "dense": sums. Each device multiplies its columns of the matrix with its rows; a reduce-scatter adds the products.

Results equal a single device's, to rounding. Values travel in the type of their leaf. Weights may change from round to
round, as they do over links that lose messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxfl.core.devices import NODES, num_shares, on_each_device
from jaxfl.core.tree import number_type
from jaxfl.core.types import Array, PyTree
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.neighbor_lists import gathered_sum, lists_of_round, needed_rows, sum_dtype

# The matrix product is taken up to this size where a sparse graph makes devices send more than half of all rows: it
# sends as much in one collective instead of s - 1. At 512 nodes of in-degree 18 on 8 devices, the product and the
# gathers both take as long as reading 20 rows a node does; the product's share grows with n.
DENSE_NODES = 512
_BY_NODE, _COLUMNS = PartitionSpec(NODES), PartitionSpec(None, NODES)


def structure_over_devices(graph: Graph, structure: str) -> str:
    """Resolve "auto" for nodes over several devices, given its meaning on a single one."""
    shares = num_shares(graph.num_nodes)
    if structure != "neighbors" or graph.num_nodes > DENSE_NODES:
        return structure
    others = graph.num_nodes - graph.num_nodes // shares
    return "dense" if 2 * needed_rows(graph, shares).rows_sent() > others else structure


def mix_over_devices(
    graph: Graph, fn: Callable[..., PyTree], operands: tuple[PyTree, ...], slot: Array | None, structure: str
) -> PyTree:
    """`mix_result` of the round, where nodes lie over devices."""
    if structure == "circulant":
        assert graph.shifts is not None
        branches = [lambda *values, shifts=shifts: shifted_sum(shifts, fn(*values)) for shifts in graph.shifts]
        return branches[0](*operands) if slot is None else jax.lax.switch(slot, branches, *operands)
    tree = fn(*operands)
    dtype = number_type(tree)
    if structure == "dense":
        matrices = jnp.asarray(graph.mixing_matrices.astype(dtype))
        return matrix_sum(matrices[0 if slot is None else slot], tree)
    own, _, weights = lists_of_round(graph, slot, dtype)
    return neighbors_sum(graph, slot, own, weights, tree)


def shifted_sum(shifts: Sequence[tuple[int, float | Array]], tree: PyTree) -> PyTree:
    """Each leaf's weighted sum of copies rolled along the node axis.

    Args:
        shifts: (offset, weight): node i gets `weight` times the value of node i - offset (mod n). A weight is a number,
            or (n,), of the receivers.
        tree: leaves (n, *leaf), floating point.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Guarantees:
        - rows that stay on their device are not sent, and no row twice to the same device.
    """
    num_nodes = jax.tree.leaves(tree)[0].shape[0]
    offsets = [offset % num_nodes for offset, _ in shifts]
    weights = [weight for _, weight in shifts]
    arrays = [weight for weight in weights if isinstance(weight, jax.Array)]

    def body(tree: PyTree, arrays: list[Array]) -> PyTree:
        def of_rows(rows: Array) -> Array:
            queue, terms = iter(arrays), []
            for copy, weight in zip(_rolled_copies(rows, offsets), weights, strict=True):
                factor = next(queue)[:, None].astype(sum_dtype(rows)) if isinstance(weight, jax.Array) else weight
                terms.append(factor * copy.astype(sum_dtype(rows)))
            return sum(terms[1:], start=terms[0]).astype(rows.dtype)

        return _in_buffers(of_rows, tree)

    return on_each_device(body, _BY_NODE, (tree, _BY_NODE), (arrays, _BY_NODE))


def neighbors_sum(graph: Graph, slot: Array | None, own: Array, weights: Array, tree: PyTree) -> PyTree:
    """Sum each node's value times its own weight, and its in-neighbors' values times their weights.

    Args:
        graph: its in-neighbors, in the order of `neighbor_lists`.
        slot: (), int32, the round within the period; None where there is only one.
        own: (n,), each node's weight for itself, in the widest type of the leaves' sums.
        weights: (k, n), weights of the in-neighbors, in the same type.
        tree: leaves (n, *leaf), floating point.

    Guarantees:
        - only needed rows are sent.
    """
    shares = num_shares(graph.num_nodes)
    plan = needed_rows(graph, shares)
    tables = [jnp.asarray(table)[0 if slot is None else slot] for table in (plan.senders, *plan.sent)]

    def body(tree: PyTree, tables: list[Array], senders: Array, own: Array, weights: Array) -> PyTree:
        def of_rows(rows: Array) -> Array:
            arrivals = [
                _send(rows.at[table[0]].get(mode="promise_in_bounds"), step, shares)
                for step, table in zip(plan.steps, tables, strict=True)
            ]
            dtype = sum_dtype(rows)
            return gathered_sum(own.astype(dtype), senders, weights.astype(dtype), jnp.concatenate([rows, *arrivals]))

        return _in_buffers(of_rows, tree)

    return on_each_device(
        body,
        _BY_NODE,
        (tree, _BY_NODE),
        (tables[1:], _BY_NODE),
        (tables[0], _COLUMNS),
        (own, _BY_NODE),
        (weights, _COLUMNS),
    )


def matrix_sum(matrix: Array, tree: PyTree) -> PyTree:
    """The matrix (n, n), in the widest type of the leaves' sums, times each leaf."""

    def body(tree: PyTree, columns: Array) -> PyTree:
        def of_rows(rows: Array) -> Array:
            dtype = sum_dtype(rows)
            # Accelerators multiply float32 in fewer bits by default; mass would then not be conserved.
            parts = jnp.matmul(columns.astype(dtype), rows.astype(dtype), precision=jax.lax.Precision.HIGHEST)
            return jax.lax.psum_scatter(parts, NODES, scatter_dimension=0, tiled=True).astype(rows.dtype)

        return _in_buffers(of_rows, tree)

    return on_each_device(body, _BY_NODE, (tree, _BY_NODE), (matrix, _COLUMNS))


def _in_buffers(fn: Callable[[Array], Array], tree: PyTree) -> PyTree:
    """Apply `fn`, a function of arrays (m, d) that is linear in their rows, to a tree with leaves (m, *leaf)."""
    leaves, structure = jax.tree.flatten(tree)
    results: list[Any] = [None] * len(leaves)
    for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        parts = [leaves[place].reshape(len(leaves[place]), -1) for place in places]
        buffer = fn(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1))
        ends = np.cumsum([part.shape[1] for part in parts])
        for place, part in zip(places, jnp.split(buffer, ends[:-1], axis=1), strict=True):
            results[place] = part.reshape(leaves[place].shape)
    return structure.unflatten(results)


def _rolled_copies(rows: Array, offsets: Sequence[int]) -> list[Array]:
    """Each device's rows of the copies that are rolled by offsets in [0, n); `rows` are its own m."""
    share, num_devices = len(rows), jax.lax.axis_size(NODES)
    first, last = {}, {}  # by step: the most rows that a shift takes from the start of a share, and from its end
    for offset in offsets:
        step, rest = divmod(offset, share)
        first[step] = max(first.get(step, 0), share - rest)
        if rest:
            after = (step + 1) % num_devices
            last[after] = max(last.get(after, 0), rest)
    starts, ends = {}, {}
    for step in sorted({*first, *last}):
        head, tail = first.get(step, 0), last.get(step, 0)
        if step == 0 or head + tail >= share:
            starts[step] = ends[step] = _send(rows, step, num_devices)
        else:
            both = _send(jnp.concatenate([rows[:head], rows[share - tail :]]), step, num_devices)
            starts[step], ends[step] = both[:head], both[head:]

    def copy(offset: int) -> Array:
        step, rest = divmod(offset, share)
        if rest == 0:
            return starts[step]
        end = ends[(step + 1) % num_devices]
        return jnp.concatenate([end[len(end) - rest :], starts[step][: share - rest]])

    return [copy(offset) for offset in offsets]


def _send(rows: Array, step: int, num_devices: int) -> Array:
    """Return the rows of the device `step` places before this one. In step 0 nothing travels."""
    if step == 0:
        return rows
    return jax.lax.ppermute(rows, NODES, [(device, (device + step) % num_devices) for device in range(num_devices)])
