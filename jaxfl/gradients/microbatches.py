"""Parts of a batch whose gradients are computed at once: groups of samples, blocks of a sum, slots that are in use.

One sample after the other is the fast way on a CPU for models without layers in factored form: a sample fills the
caches. It leaves an accelerator idle: its kernels are small, and there are as many as the batch is large. All samples
at once may not fit. So accelerators take groups: as many samples as a share of the memory holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxfl.core import Array, PyTree, Task
from jaxfl.core.devices import axis_size
from jaxfl.core.platform import is_cpu
from jaxfl.core.tasks import sample_losses
from jaxfl.core.tracing import suits_cpu
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory

# Nodes that are vmapped, and lanes of a sweep (runs in one compiled program), hold their samples at the same time.
_SHARES = 64
BLOCK = 256  # samples, or clients, that are added up in one go
# Parts of the slots beyond the expected batch. Of 64 nodes the fullest uses one or two of four at b = 8 to 512. More
# parts save little: each reads and writes the sums once.
_PARTS = 4


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


def over_used_slots(
    function: Callable[[PyTree, Array], tuple[PyTree, PyTree]], slots: PyTree, mask: Array, batch_size: int
) -> tuple[PyTree, PyTree]:
    """Make (sums over slots, numbers of each slot) of all nodes' batches without the slots that no node uses.

    A Poisson batch leaves about half of its slots empty. A CPU computes the first `batch_size` of them, and then a
    quarter of the others at a time while a node has samples there. An accelerator's host would have to wait for their
    number, and devices that share the nodes for each other: they compute all slots at once.

    Args:
        function: (slots, leaves (n, s, ...); mask (n, s)) -> (sums, leaves (n, ...); leaves (n, s, ...)). An empty slot
            adds 0.
        slots: leaves (n, c, ...), those in use first.
        mask: (n, c), bool, False for empty slots.
        batch_size: b, the expected number of slots in use.

    Returns:
        (sums, leaves (n, ...); leaves (n, c, ...), 0 in slots that were left out).

    Guarantees:
        - equals one call of the function, the sums to the rounding of at most four additions.
        - a batch without room beyond `batch_size` is one call of the function.
        - has derivatives of both modes; both compute all slots.
    """
    capacity = mask.shape[1]
    if capacity <= batch_size or not suits_cpu() or axis_size() > 1:
        return function(slots, mask)
    size = -(-(capacity - batch_size) // _PARTS)
    width = batch_size + _PARTS * size

    def widened(leaf):
        return jnp.pad(leaf, [(0, 0), (0, width - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])

    def some(start, length, held):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, length, 1), held)

    held = jax.tree.map(widened, (slots, mask))
    first, first_arrays = _closed(function, *jax.eval_shape(partial(some, 0, batch_size), held))
    of_part, part_arrays = _closed(function, *jax.eval_shape(partial(some, 0, size), held))

    def run(count, arrays, held):
        def add(part, carry):
            (sums, of_slots), start = carry, batch_size + part * size
            more, rows = of_part(arrays[1], *some(start, size, held))
            of_slots = jax.tree.map(
                lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, start, 1), of_slots, rows
            )
            return jax.tree.map(jnp.add, sums, more), of_slots

        sums, rows = first(arrays[0], *some(0, batch_size, held))
        sums, rows = jax.lax.fori_loop(0, count(held[1]), add, (sums, jax.tree.map(widened, rows)))
        return sums, jax.tree.map(lambda leaf: leaf[:, :capacity], rows)

    def num_used(mask):
        most = jnp.max(jnp.sum(mask, axis=1, dtype=jnp.int32))
        return (most - batch_size + size - 1) // size  # below 1 where no node has more than b

    # A loop of traced length has no derivative in reverse mode; that of all parts is the same.
    used = jax.custom_jvp(partial(run, num_used))
    used.defjvp(partial(jax.jvp, partial(run, lambda mask: _PARTS)))
    return used((first_arrays, part_arrays), held)


def _closed(function: Callable[..., PyTree], *shapes: PyTree) -> tuple[Callable[..., PyTree], list[Array]]:
    """(function of the arrays that `function` closes over, then its arguments, which have these shapes; the arrays)."""
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # imports slowly

    program, result = jax.make_jaxpr(function, return_shape=True)(*shapes)

    def call(arrays, *arguments):
        run = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, arrays))
        return jax.tree.unflatten(jax.tree.structure(result), run(*jax.tree.leaves(arguments)))

    return call, program.consts


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
