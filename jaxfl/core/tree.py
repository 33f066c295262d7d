"""Arithmetic on pytrees whose leaves carry the node axis first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxfl.core.check import is_traced
from jaxfl.core.devices import NODES, num_shares, on_each_device
from jaxfl.core.types import Array, PyTree


def number_type(tree: PyTree) -> np.dtype:
    """The type of numbers that multiply a tree's leaves: the type of its widest floating leaf, and float32 at least.

    Args:
        tree: arrays or shapes.

    Examples:
        >>> number_type({"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros(2, jnp.int32)}).name
        'float32'
    """
    types = [np.dtype(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return max([np.dtype(np.float32), *types], key=lambda dtype: dtype.itemsize)


def copied(tree: PyTree) -> PyTree:
    """The tree with its NumPy arrays copied: later writes into the originals do not change it.

    Examples:
        >>> array = np.ones(2)
        >>> copy = copied(array)
        >>> array[:] = 0
        >>> copy.tolist()
        [1.0, 1.0]
    """
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def leaf_names(tree: PyTree) -> dict[str, Any]:
    """The leaves by their paths, in the order of `jax.tree.leaves`, of any registered class; a bare array is "params".

    Examples:
        >>> list(leaf_names({"dense": {"kernel": 1, "bias": 2}, "scales": [3]}))
        ['dense/bias', 'dense/kernel', 'scales/0']
    """
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in pairs]
    if len(set(names)) < len(names):  # possible where a key holds a "/"
        names = [jax.tree_util.keystr(path) for path, _ in pairs]
    return dict(zip(names, (leaf for _, leaf in pairs), strict=True))


def with_new_arrays(tree: PyTree) -> PyTree:
    """The tree with its JAX arrays copied: who donates it does not delete the originals."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def with_own_buffers(tree: PyTree) -> PyTree:
    """The tree with a copy of each array that an earlier leaf holds: a program may then be given all of them to reuse.

    Examples:
        >>> one = jnp.ones(2)
        >>> first, second = with_own_buffers((one, one))
        >>> first is one, second is one
        (True, False)
    """
    held = set()

    def own(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        # Two leaves that are one traced array become one array where the trace is of an eager `vmap`.
        if is_traced(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            buffers = {id(leaf)}
        else:
            buffers = {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        leaf = jnp.copy(leaf) if held & buffers else leaf
        held.update(buffers)
        return leaf

    return jax.tree.map(own, tree)


def descend(start: PyTree, step_size: Array, direction: PyTree) -> PyTree:
    """start - step_size * direction, leaf by leaf, in the type of the leaf; `step_size` is ().

    Examples:
        >>> descend({"a": jnp.ones(2)}, jnp.float32(0.5), {"a": jnp.ones(2)})["a"].tolist()
        [0.5, 0.5]
    """
    return jax.tree.map(lambda x, g: x - step_size.astype(number_type(x)) * g, start, direction)


def along_nodes(values: Array, leaf: Array) -> Array:
    """`values` (n,) shaped to broadcast against `leaf` (n, *rest); scalars pass."""
    return values if jnp.ndim(values) == 0 else values.reshape(values.shape + (1,) * (leaf.ndim - 1))


def scale(values: Array, tree: PyTree) -> PyTree:
    """Each node's leaves times its number, which is rounded to the type of the leaf; `values` is () or (n,)."""
    return jax.tree.map(lambda leaf: jnp.asarray(along_nodes(values, leaf), number_type(leaf)) * leaf, tree)


def weighted_sum(weights: Array, tree: PyTree) -> PyTree:
    """Sum over nodes of weight times part, leaves (*leaf); `weights` is (n,), rounded to the type of each leaf.

    Examples:
        >>> weighted_sum(jnp.array([0.25, 0.75]), jnp.array([[4.0], [8.0]])).tolist()
        [7.0]
    """

    def sum_leaf(leaf):
        # Accelerators multiply float32 in fewer bits by default; shares would then not sum to one.
        return jnp.tensordot(weights.astype(number_type(leaf)), leaf, axes=1, precision=jax.lax.Precision.HIGHEST)

    return jax.tree.map(sum_leaf, tree)


def squared_norm(tree: PyTree) -> Array:
    """Squared L2 norm of each node's part, (n,)."""
    parts = [jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(tree)]
    return sum(parts[1:], start=parts[0])


def norm(tree: PyTree) -> Array:
    """L2 norm of each node's part, (n,); its derivative at zero is zero."""
    return root(squared_norm(tree))


def root(squared: Array) -> Array:
    """Square root whose derivative at 0 is 0, of any shape; NaN stays visible."""
    zero = squared == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, squared)))


def consensus_distance(tree: PyTree) -> Array:
    """Mean over nodes of |x_i - x_bar|^2, () of leaves (n, *leaf).

    Where nodes lie over devices, each device sends the sum of its own nodes, as large as one node's part.

    Examples:
        >>> float(consensus_distance(jnp.array([[1.0], [3.0]])))
        1.0
    """
    num_nodes = jax.tree.leaves(tree)[0].shape[0]
    over_devices = num_shares(num_nodes) > 1

    def distance(tree):
        def squared_deviation(leaf):
            # The mean as a product: XLA's CPU backend sums over the first axis by strides, at a tenth of the speed.
            shares = jnp.full(len(leaf), 1.0 / num_nodes, leaf.dtype)
            mean = jnp.tensordot(shares, leaf, axes=1, precision=jax.lax.Precision.HIGHEST)
            mean = jax.lax.psum(mean, NODES) if over_devices else mean
            return jnp.sum((leaf - mean[None]) ** 2, axis=tuple(range(1, leaf.ndim)))

        parts = [squared_deviation(leaf) for leaf in jax.tree.leaves(tree)]
        mean_over_nodes = jnp.mean(sum(parts[1:], start=parts[0]))
        return jax.lax.pmean(mean_over_nodes, NODES) if over_devices else mean_over_nodes

    if not over_devices:
        return distance(tree)
    by_node = PartitionSpec(NODES)
    return on_each_device(distance, PartitionSpec(), (tree, by_node))


def size(tree: PyTree) -> int:
    """Number of scalars in a tree of arrays or shapes (d when it is one node's parameters)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
    """Bytes that a tree of arrays or shapes holds."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def replicate(tree: PyTree, num_nodes: int) -> PyTree:
    """The same values at every node: leaves (n, *leaf)."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_nodes, *leaf.shape)), tree)


def flattener(tree: PyTree) -> tuple[Callable[[PyTree], Array], Callable[[Array], PyTree]]:
    """Functions between trees shaped like `tree` behind any leading axes, and arrays (..., d).

    Args:
        tree: arrays or shapes of one node's part, leaves (*leaf).

    Returns:
        (flatten, unflatten): flatten takes leaves (*leading, *leaf) to (*leading, d), unflatten back.

    Examples:
        >>> flatten, unflatten = flattener({"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)})
        >>> flatten({"a": jnp.ones((5, 2, 3)), "b": jnp.zeros((5, 4))}).shape
        (5, 10)
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = [leaf.shape for leaf in leaves]
    sizes = [math.prod(shape) for shape in shapes]

    def flatten(values: PyTree) -> Array:
        parts = structure.flatten_up_to(values)
        leading = parts[0].shape[: parts[0].ndim - len(shapes[0])]
        rows = [part.reshape(*leading, count) for part, count in zip(parts, sizes, strict=True)]
        return jnp.concatenate(rows, axis=-1)

    def unflatten(flat: Array) -> PyTree:
        parts, start = [], 0
        for shape, count in zip(shapes, sizes, strict=True):
            parts.append(flat[..., start : start + count].reshape(*flat.shape[:-1], *shape))
            start += count
        return structure.unflatten(parts)

    return flatten, unflatten


def add_exactly(total: PyTree, rounding: PyTree, change: PyTree) -> tuple[PyTree, PyTree]:
    """total + rounding + change as (the nearest number, its rounding error); Knuth's two-sum."""

    def add(total, rounding, change):
        change = change + rounding
        new = total + change
        growth = new - total  # not `change`: XLA keeps the order of additions
        return new, (total - (new - growth)) + (change - growth)

    pairs = jax.tree.map(add, total, rounding, change)
    return jax.tree.transpose(jax.tree.structure(total), jax.tree.structure((0, 0)), pairs)
