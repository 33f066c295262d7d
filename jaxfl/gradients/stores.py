"""Rows of SAGA's table of stored gradients, and recovery of gradients from rows: dense, factored, per batch.

All functions act on one node; c is the number of entries at hand, s the samples of one entry, F the size of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import ArgumentError, Array, Factors, FederatedData, PyTree, Task
from jaxfl.core.tree import flattener, size
from jaxfl.gradients import per_example
from jaxfl.gradients.microbatches import in_blocks


class Rows(NamedTuple):
    """The rows of one batch of entries, as they would be stored."""

    losses: Array  # (c,), float32, loss of each entry
    rows: Array  # (c, F), float32
    clipped: Array  # (c,), float32, share of the entry's samples that were scaled down
    discarded: Array  # (c,), float32, samples of the entry whose gradient was not finite
    sample_inputs: tuple[Array, ...]  # inputs of the layers that read the sample, which rows leave out; else empty


class Store(NamedTuple):
    """One kind of table, for one node.

    Attributes:
        row_size: F.
        compute: (params, inputs (c * s, *sample), labels, weights (c * s,)) -> Rows.
        sample_inputs: (params, inputs, labels) -> what `combine` needs of the samples beside the rows.
        combine: (sample_inputs, rows, weights (c,)) -> sum of weight times gradient, leaves (*leaf).
        difference: (sample_inputs, new rows, old rows, weights (c,)) -> sum of weight times (new - old) gradient.
    """

    row_size: int
    compute: Callable[[PyTree, Array, Array, Array], Rows]
    sample_inputs: Callable[[PyTree, Array, Array], tuple[Array, ...]]
    combine: Callable[[tuple[Array, ...], Array, Array], PyTree]
    difference: Callable[[tuple[Array, ...], Array, Array, Array], PyTree]


def encode(rows: Array, storage: str) -> Array:
    """Rows as they are stored. bfloat16 is kept as its bits: XLA's CPU backend would widen and copy such a table."""
    if storage != "bfloat16":
        return rows
    # The upper half of a float32 is the bfloat16 next to it toward zero.
    return (jax.lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.uint32) >> 16).astype(jnp.uint16)


def decode(rows: Array, storage: str) -> Array:
    """Stored rows as numbers; bfloat16 becomes float32."""
    return rows if storage != "bfloat16" else jax.lax.bitcast_convert_type(rows, jnp.bfloat16).astype(jnp.float32)


def make_store(
    task: Task,
    params: PyTree,
    data: FederatedData,
    *,
    table: str,
    entry_size: int,
    clip_norm: float | Array | None,
    clip_order: int,
) -> Store:
    """Make the store of one kind (`table`) for a task.

    Args:
        task: the learning task.
        params: arrays or shapes, leaves (n, *leaf).
        data: read for the shape of a sample only.
        table: "dense", "factored" or "per_batch".
        entry_size: s, samples of one entry; 1 but for "per_batch".
        clip_norm: bound on each sample's gradient norm, or None.
        clip_order: 1 or 2.

    Raises:
        ArgumentError: "factored" for a task without layers.
    """
    one_node = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    if table == "factored":
        return _factored(task, one_node, data, clip_norm, clip_order)
    return _dense(task, one_node, entry_size if table == "per_batch" else None, clip_norm, clip_order)


def _dense(task: Task, one_node: PyTree, entry_size: int | None, clip_norm, clip_order: int) -> Store:
    """Rows are whole gradients: of one sample (`entry_size` None) or of a fixed batch of samples."""
    flatten, unflatten = flattener(one_node)
    clipping = {"clip_norm": clip_norm, "clip_order": clip_order}

    def of_samples(params, inputs, labels, weights):
        part = per_example.per_sample(task, params, inputs, labels, **clipping)
        return Rows(part.losses, flatten(part.gradient), part.clipped, part.discarded, ())

    def of_batches(params, inputs, labels, weights):
        def one_entry(entry):
            entry_inputs, entry_labels, entry_weights = entry
            part = per_example.weighted_sum(task, params, entry_inputs, entry_labels, entry_weights, **clipping)
            loss = jnp.sum(entry_weights * part.losses)
            clipped = jnp.sum(entry_weights * part.clipped)
            discarded = jnp.sum(jnp.where(entry_weights > 0, part.discarded, 0.0))
            return Rows(loss, flatten(part.gradient), clipped, discarded, ())

        assert entry_size is not None
        split = (inputs, labels, weights)
        return jax.lax.map(one_entry, jax.tree.map(lambda x: x.reshape(-1, entry_size, *x.shape[1:]), split))

    def combine(sample_inputs, rows, weights):
        def product(block, block_weights):
            return jnp.dot(block_weights, block, precision="highest"), ()

        return unflatten(in_blocks(product, rows, weights)[0])

    return Store(
        row_size=size(one_node),
        compute=of_samples if entry_size is None else of_batches,
        sample_inputs=lambda params, inputs, labels: (),
        combine=combine,
        difference=lambda sample_inputs, new, old, weights: combine((), new - old, weights),
    )


def _factored(task: Task, one_node: PyTree, data: FederatedData, clip_norm, clip_order: int) -> Store:
    """Rows are the factors of one sample's gradient, the sample itself left out."""
    if task.factors is None:
        raise ArgumentError(
            "table",
            '"factored" needs a task with layers in factored form',
            "this task has none",
            'Build the model with jaxfl.models, or use table="dense" or "per_batch".',
        )
    inputs = jax.ShapeDtypeStruct((1, *data.inputs.shape[1:]), data.inputs.dtype)
    labels = jax.ShapeDtypeStruct((1, *data.labels.shape[1:]), data.labels.dtype)
    shapes = jax.eval_shape(task.factors, one_node, inputs, labels)[1]
    layers = task.layers

    def parts(factors: Factors) -> list[Array]:
        """List the stored arrays in order: each layer's input unless it is the sample, then its error."""
        arrays = []
        for layer, layer_input, error in zip(layers, factors.inputs, factors.errors, strict=True):
            arrays += [error] if layer.input_is_sample else [layer_input, error]
        return arrays

    widths = [math.prod(part.shape[1:]) for part in parts(shapes)]

    def to_factors(sample_inputs, rows) -> Factors:
        flat, start = [], 0
        for width in widths:
            flat.append(rows[:, start : start + width])
            start += width
        pieces, samples = iter(flat), iter(sample_inputs)
        layer_inputs, errors = [], []
        for layer, input_shape, error_shape in zip(layers, shapes.inputs, shapes.errors, strict=True):
            value = next(samples) if layer.input_is_sample else next(pieces).reshape(-1, *input_shape.shape[1:])
            layer_inputs.append(value)
            errors.append(next(pieces).reshape(-1, *error_shape.shape[1:]))
        return Factors(inputs=tuple(layer_inputs), errors=tuple(errors))

    def read_samples(factors: Factors) -> tuple[Array, ...]:
        return tuple(value for layer, value in zip(layers, factors.inputs, strict=True) if layer.input_is_sample)

    def compute(params, inputs, labels, weights):
        result, factors = per_example.clipped_factors(
            task, params, inputs, labels, clip_norm=clip_norm, clip_order=clip_order
        )
        rows = jnp.concatenate([part.reshape(part.shape[0], -1) for part in parts(factors)], axis=1)
        return Rows(result.losses, rows, result.clipped, result.discarded, read_samples(factors))

    def sample_inputs(params, inputs, labels):
        assert task.factors is not None
        return read_samples(task.factors(params, inputs, labels)[1])  # the compiler drops all but these

    # Accelerators multiply float32 in fewer bits by default; the mean of the table would then drift from it.
    @jax.default_matmul_precision("highest")
    def difference(samples, new, old, weights):
        """One product a layer: where both factors changed, the old ones enter with the opposite weight."""
        return in_blocks(of_block, (samples, new, old), weights)[0]

    def of_block(block, weights):
        samples, new, old = block
        fresh, stale = to_factors(samples, new), to_factors(samples, old)
        gradient = {}
        for layer, x, e, old_x, old_e in zip(
            layers, fresh.inputs, fresh.errors, stale.inputs, stale.errors, strict=True
        ):
            if layer.input_is_sample:
                gradient[layer.name] = layer.weighted_sum(x, e - old_e, weights)
            else:
                both = jnp.concatenate([x, old_x]), jnp.concatenate([e, old_e])
                gradient[layer.name] = layer.weighted_sum(*both, jnp.concatenate([weights, -weights]))
        return gradient, ()

    @jax.default_matmul_precision("highest")
    def combine(samples, rows, weights):
        def product(block, block_weights):
            return per_example.from_factors(task, to_factors(*block), block_weights), ()

        return in_blocks(product, (samples, rows), weights)[0]

    return Store(
        row_size=sum(widths),
        compute=compute,
        sample_inputs=sample_inputs,
        combine=combine,
        difference=difference,
    )
