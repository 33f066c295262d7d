"""Groups of samples whose single gradients are computed at once, for models without layers in factored form.

One sample after the other is the fast way on a CPU, whose caches a sample fills, and leaves an accelerator idle: its
kernels are small, and there are as many as the batch is large. All samples at once may not fit. So accelerators take
groups: as many samples as a share of the memory holds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.core import Array, PyTree, Task
from jaxfl.core.platform import is_cpu
from jaxfl.core.tasks import sample_losses
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory

# Nodes that are vmapped, and lanes of a sweep (runs in one compiled program), hold their samples at the same time.
_SHARES = 64
BLOCK = 256  # samples, or clients, that are added up in one go


def size_of(task: Task, params: PyTree, inputs: Array, labels: Array) -> int:
    """Compute the number of samples whose gradients one node makes at once. It is static, and 1 on a CPU.

    Args:
        task: the learning task.
        params: one node's parameters, leaves (*leaf), or their shapes.
        inputs: (b, *sample).
        labels: (b, ...).

    Returns:
        In [1, b]; 1 where not even one sample fits.

    Guarantees:
        - the samples of a group take at most a 64th of the memory, by the bytes of a gradient and of activations.
        - groups are as even as their number allows.
    """
    if is_cpu():
        return 1
    bytes_of_one = sample_bytes(task, params, inputs, labels)
    # A share of all memory, not of free memory, which differs between processes: a resumed run needs the same groups.
    fitting = max(1, memory.total_bytes() // _SHARES // bytes_of_one)
    num_groups = -(-len(inputs) // fitting)
    return -(-len(inputs) // num_groups)


def sample_bytes(task: Task, params: PyTree, inputs: Array, labels: Array) -> int:
    """Compute the bytes of a sample's gradient and of all that its backward pass reads; arguments as of `size_of`."""
    one_input, one_label = (jax.ShapeDtypeStruct(each.shape[1:], each.dtype) for each in (inputs, labels))

    def residuals(values, one_input, one_label):
        return jax.vjp(lambda own: sample_losses(task, own, one_input[None], one_label[None])[0], values)[1]

    # Measured in programs compiled for an H200 on a machine without one: each of 8 samples took 0.44 (ResNet-20) and
    # 0.51 (ResNet-18 of an eighth of its width) of this.
    return num_bytes(params) + num_bytes(jax.eval_shape(residuals, params, one_input, one_label))


def grouped(samples: PyTree, size: int) -> PyTree:
    """Leaves (b, ...) as (groups, size, ...), the last sample repeated where the last group is short.

    Guarantees:
        - what is repeated is dropped by `joined`.

    Examples:
        >>> groups = grouped(jnp.array([1, 2, 3]), 2)
        >>> groups.tolist(), joined(groups, 3).tolist()
        ([[1, 2], [3, 3]], [1, 2, 3])
    """

    def of_leaf(leaf):
        missing = -leaf.shape[0] % size
        whole = jnp.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)], mode="edge") if missing else leaf
        return whole.reshape(-1, size, *leaf.shape[1:])

    return jax.tree.map(of_leaf, samples)


def joined(groups: PyTree, count: int) -> PyTree:
    """Leaves (groups, size, ...) as (count, ...): the inverse of `grouped`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], groups)


def in_blocks(
    function: Callable[[PyTree, Array], tuple[PyTree, PyTree]], samples: PyTree, weights: Array
) -> tuple[PyTree, PyTree]:
    """Make (sums over samples, numbers of each sample) of a batch from blocks of at most 256 samples, added pairwise.

    The rounding of a float32 sum of b vectors, added one after the other, lets one of them move it by up to b^2 2^-24
    more than its own norm: twice as far at b = 16,384 (Casacuberta, Shoemate, Vadhan, Wagaman 2022, arXiv:2207.10635).

    Args:
        function: (samples, leaves (s, ...); weights (s,)) -> (weighted sums, leaves (...); leaves (s, ...)).
        samples: leaves (b, ...).
        weights: (b,); a weight of 0 adds nothing.

    Guarantees:
        - a batch of at most 256 samples is one call of the function.
    """
    count = len(weights)
    if count <= BLOCK:
        return function(samples, weights)
    size = -(-count // -(-count // BLOCK))
    blocks = grouped(samples, size), jnp.pad(weights, (0, -count % size)).reshape(-1, size)
    sums, of_samples = jax.lax.map(lambda block: function(*block), blocks)
    return jax.tree.map(pairwise_sum, sums), joined(of_samples, count)


def pairwise_sum(parts: Array) -> Array:
    """Sum over the first axis, by halves.

    Examples:
        >>> pairwise_sum(jnp.array([1.0, 2.0, 3.0])).tolist()
        6.0
    """
    while len(parts) > 1:
        half = len(parts) // 2
        parts = jnp.concatenate([parts[:half] + parts[half : 2 * half], parts[2 * half :]])
    return parts[0]
