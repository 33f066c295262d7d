"""The mixing step x <- P^k x on trees whose leaves have the node axis first, in three exact forms.

"dense" multiplies by the matrix, "circulant" adds shifted copies, "neighbors" gathers one in-neighbor of every node
at a time. On finite values they differ in cost only. A NaN or an infinity at one node reaches only its receivers under
"circulant" and "neighbors", which never multiply by the zeros of P, and every node under "dense".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.devices import may_be_shared, num_shares
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import along_nodes
from jaxfl.core.types import Array, PyTree
from jaxfl.graphs import sharded_mixing
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.neighbor_lists import gathered_sum, lists_of_round, sum_dtype

STRUCTURES = ("auto", "dense", "circulant", "neighbors")
# Measured on two CPU cores, float32, 4 million entries: shifted copies lose to gathers from the fourth on, gathers to
# the matrix product from about n/8.
FEW_SHIFTS = 3
NODES_PER_NEIGHBOR = 8


def mix(graph: Graph, tree: PyTree, round_index: int | Array, structure: str = "auto") -> PyTree:
    """Mix every leaf of the tree by the round's matrix: new value of i = sum over j of P[i, j] times value of j.

    Args:
        graph: static; its matrix `round_index mod period` is used.
        tree: leaves (n, *leaf), floating point. A leaf of 16 bits is summed in float32 and rounded once.
        round_index: (), int32, may be traced.
        structure: "auto" (see `best_structure`), "dense", "circulant" (only for graphs with `graph.shifts`) or
            "neighbors".

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        ArgumentError: a leaf that cannot be mixed, an unusable `round_index`, or a structure that the graph lacks.

    Guarantees:
        - all structures agree to 1e-6 relative.
        - total mass is preserved when P is column stochastic: the sum over nodes of every entry.
        - node mean is preserved when P is doubly stochastic.
        - equal values stay equal when P is row stochastic.
        - nodes over devices are mixed to the same numbers, to 1e-6 (see `jaxfl.graphs.sharded_mixing`).

    Examples:
        >>> from jaxfl.graphs import directed_ring
        >>> mix(directed_ring(3), jnp.array([0.0, 2.0, 4.0]), 0).tolist()
        [2.0, 1.0, 3.0]
    """
    return mix_result(graph, lambda values: values, (tree,), round_index, structure)


def mix_result(
    graph: Graph,
    fn: Callable[..., PyTree],
    operands: tuple[PyTree, ...],
    round_index: int | Array,
    structure: str = "auto",
) -> PyTree:
    """`mix` of the tree `fn(*operands)`; elementwise functions are computed while mixing.

    A switch over rounds ("circulant", where the matrix changes, but not on an accelerator) keeps the compiler from
    doing this: everything that enters it is written to memory first.

    Args:
        graph: see `mix`.
        fn: (*operands) -> tree with leaves (n, *leaf).
        operands: pytrees of arrays.
        round_index: see `mix`.
        structure: see `mix`.

    Guarantees:
        - equals mix of the result.

    Examples:
        >>> from jaxfl.graphs import directed_ring
        >>> mix_result(directed_ring(3), jnp.add, (jnp.array([0.0, 1.0, 2.0]), jnp.array([0.0, 1.0, 2.0])), 0).tolist()
        [2.0, 1.0, 3.0]
    """
    check_leaves(graph, jax.eval_shape(fn, *operands))
    form, slot = chosen_structure(graph, structure), slot_of(graph, round_index)
    if num_shares(graph.num_nodes) > 1:
        return sharded_mixing.mix_over_devices(graph, fn, operands, slot, form)
    if form == "circulant":
        return _circulant(graph, fn, operands, round_index if slot is None else slot)
    mix_leaf = _dense if form == "dense" else _neighbors
    return jax.tree.map(lambda leaf: mix_leaf(graph, leaf, slot), fn(*operands))


def messages_sent(graph: Graph, round_index: Array | int) -> Array:
    """Count the other nodes that each node sends to in a round, (n,) float32.

    The uplink bits of the node are a multiple of this count.
    """
    slot = slot_of(graph, round_index)
    return jnp.asarray(graph.out_degree.astype(np.float32))[0 if slot is None else slot]


def messages_received(graph: Graph, round_index: Array | int) -> Array:
    """Count the other nodes that each node receives from in a round, (n,) float32.

    The downlink bits of the node are a multiple of this count.
    """
    slot = slot_of(graph, round_index)
    return jnp.asarray(graph.in_degree.astype(np.float32))[0 if slot is None else slot]


def keeps_ones(graph: Graph) -> bool:
    """True where mixing keeps push-sum weights of one exactly, in float32.

    Then every row sums to one, and all weights are multiples of 2^-20, so that no sum of them is rounded.

    Examples:
        >>> from jaxfl.graphs import directed_ring, exponential, static_exponential
        >>> keeps_ones(exponential(8)), keeps_ones(directed_ring(8)), keeps_ones(static_exponential(4))
        (True, True, False)
    """
    return all(
        bool(np.all(matrix.data * 2**20 % 1 == 0)) and bool(np.all(matrix.sum(axis=1) == 1)) for matrix in graph.rounds
    )


def best_structure(graph: Graph) -> str:
    """The structure that "auto" stands for: the fastest by in-degree, as measured on a CPU.

    "circulant" for circulant graphs of at most 3 offsets a round, "dense" when some node hears from more than
    max(2, n // 8) others, else "neighbors".

    Examples:
        >>> from jaxfl.graphs import complete, exponential, static_exponential
        >>> [best_structure(make(64)) for make in (exponential, static_exponential, complete)]
        ['circulant', 'neighbors', 'dense']
    """
    most = int(graph.in_degree.max())
    if most > max(2, graph.num_nodes // NODES_PER_NEIGHBOR):
        return "dense"
    shifts = graph.shifts
    return "circulant" if shifts is not None and max(map(len, shifts)) <= FEW_SHIFTS else "neighbors"


def chosen_structure(graph: Graph, structure: str) -> str:
    """Resolve "auto" to a structure where this is traced.

    Any other structure is returned as it is, or refused where the graph does not have it.
    """
    check.one_of(STRUCTURES, structure=structure)
    if structure == "auto":
        best = best_structure(graph)
        return sharded_mixing.structure_over_devices(graph, best) if num_shares(graph.num_nodes) > 1 else best
    if structure == "circulant" and graph.shifts is None:
        remedy = 'Use "neighbors", "dense" or "auto".'
        raise ArgumentError("structure", "circulant needs a circulant graph", f"{graph.name} is not", remedy)
    return structure


def check_leaves(graph: Graph, tree: PyTree) -> None:
    """Refuse leaves that cannot be mixed."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        where = f"leaf {jax.tree_util.keystr(path)}" if path else "the array"
        if leaf.ndim == 0 or leaf.shape[0] != graph.num_nodes:
            requirement = f"every leaf must have the node axis first, of length {graph.num_nodes}"
            remedy = f"Pass leaves of shape ({graph.num_nodes}, ...)."
            raise ArgumentError("tree", requirement, f"{where} has shape {tuple(leaf.shape)}", remedy)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            requirement = "every leaf must be floating point"
            raise ArgumentError("tree", requirement, f"{where} is {leaf.dtype}", "Mix only what is averaged.")


def slot_of(graph: Graph, round_index: int | Array) -> Array | None:
    """The round within the period, () int32; None when there is only one."""
    index = jnp.asarray(round_index)
    if index.ndim != 0 or not jnp.issubdtype(index.dtype, jnp.integer):
        found = f"got {index.dtype} of shape {index.shape}"
        raise ArgumentError("round_index", "must be an integer scalar", found, "Pass the round's number, int32.")
    return None if graph.period == 1 else index.astype(jnp.int32) % graph.period


def _dense(graph: Graph, leaf: Array, slot: Array | None) -> Array:
    dtype = sum_dtype(leaf)
    matrices = jnp.asarray(graph.mixing_matrices.astype(dtype))
    matrix = matrices[0] if slot is None else matrices[slot]
    return matrix_sum(matrix, leaf)


def matrix_sum(matrix: Array, leaf: Array) -> Array:
    """The matrix (n, n), in the dtype of the leaf's sums, times the leaf."""
    # Accelerators multiply float32 in fewer bits by default; mass would then not be conserved.
    product = jnp.tensordot(matrix, leaf.astype(matrix.dtype), axes=1, precision=jax.lax.Precision.HIGHEST)
    return product.astype(leaf.dtype)


def _circulant(graph: Graph, fn: Callable[..., PyTree], operands: tuple[PyTree, ...], index: int | Array) -> PyTree:
    assert graph.shifts is not None
    # Results of a switch are in memory; without one XLA's CPU backend finishes the sum anew for each of its readers, so
    # that there even a single matrix gets one, of two equal branches (0.7 of the time of a push-sum iteration on a
    # directed ring, without noise). Static shifts, a branch a round, become neighbor exchanges when a user shards the
    # node axis of a CPU without a mesh in the context. Elsewhere two branches that look the round's shifts up do: a
    # branch a round took 0.7 s more to compile (16 nodes, a network of four leaves, of 4.2 s for a round of PrivSGP-VR)
    # and no less time to run. An accelerator gets no switch: its host waits for the number of the branch, which is on
    # the device.
    on_cpu, same_count = is_cpu(), len({len(shifts) for shifts in graph.shifts}) == 1
    if graph.period > 1 and not on_cpu:
        return _looked_up_sum(graph, index % graph.period, fn(*operands))
    if graph.period > 1 and same_count and not may_be_shared():
        branches = [lambda *values: _looked_up_sum(graph, index % graph.period, fn(*values))] * 2
    else:
        repeats = 2 if on_cpu and graph.period == 1 else 1
        branches = [
            lambda *values, shifts=shifts: shifted_sum(shifts, fn(*values)) for shifts in graph.shifts * repeats
        ]
    return branches[0](*operands) if len(branches) == 1 else jax.lax.switch(index % len(branches), branches, *operands)


def _looked_up_sum(graph: Graph, slot: int | Array, tree: PyTree) -> PyTree:
    """`shifted_sum` of the shifts of a round that is not known yet."""
    assert graph.shifts is not None
    most = max(map(len, graph.shifts))
    # A copy that is read anyway, at weight zero, fills up the rounds with fewer.
    shifts = [[*of_round, *[(of_round[0][0], 0.0)] * (most - len(of_round))] for of_round in graph.shifts]
    offsets, weights = np.moveaxis(np.array(shifts), -1, 0)  # each (period, shifts of a round)
    nodes = np.arange(graph.num_nodes)
    senders = jnp.asarray((nodes[:, None, None] - offsets) % graph.num_nodes, jnp.int32)[:, slot]

    def one(leaf):
        values = leaf.astype(sum_dtype(leaf))
        terms = []
        for position, column in enumerate(weights.T):
            weight = float(column[0]) if (column == column[0]).all() else jnp.asarray(column, values.dtype)[slot]
            copy = (
                values.at[senders[:, position]].get(mode="promise_in_bounds") if offsets[:, position].any() else values
            )
            terms.append(weight * copy)
        return sum(terms[1:], start=terms[0]).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def shifted_sum(shifts: Sequence[tuple[int, float | Array]], tree: PyTree) -> PyTree:
    """Each leaf's weighted sum of copies rolled along the node axis; weights are numbers, or (n,), of the receivers."""

    def one(leaf):
        values = leaf.astype(sum_dtype(leaf))
        terms = [
            (along_nodes(weight, leaf) if isinstance(weight, jax.Array) else weight)
            * (jnp.roll(values, offset, axis=0) if offset else values)
            for offset, weight in shifts
        ]
        return sum(terms[1:], start=terms[0]).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def _neighbors(graph: Graph, leaf: Array, slot: Array | None) -> Array:
    return gathered_sum(*lists_of_round(graph, slot, sum_dtype(leaf)), leaf)
