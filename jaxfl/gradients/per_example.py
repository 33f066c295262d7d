"""Weighted and per-sample-clipped gradients of one node's batch, without forming per-sample gradients where possible.

A task with `layers` gives each layer's input and output error in one forward and one backward pass. The norm of every
sample's gradient follows from these factors, the errors are scaled by min(1, clip_norm / norm), and one weighted
product a layer yields the clipped sum (ghost norms with book-keeping: Li, Tramer, Liang, Hashimoto 2022,
arXiv:2110.05679, and Bu, Wang, Zha, Karypis 2023, arXiv:2210.00038). A layer whose samples' gradients are small may
keep them between norm and sum.

For any other task each sample's gradient is computed: on a CPU one after the other, on accelerators as many at once as
memory allows (`jaxfl.gradients.microbatches`).

A gradient whose norm is not finite cannot be scaled to any norm. Under a clip norm the gradient and its loss become
zero, and `DISCARDED` counts the sample: otherwise a single broken sample would reach the other nodes without noise.
Without a clip norm the gradient stays visible.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import Array, Factors, PyTree, Task, check
from jaxfl.core.tasks import of_samples, sample_losses
from jaxfl.core.tree import root
from jaxfl.gradients import microbatches

DISCARDED = "discarded_gradients"
"""Count of samples whose gradient was not finite, and counted as zero under a clip norm."""


class GradientSum(NamedTuple):
    """A weighted sum of one batch's (clipped) gradients at one node."""

    losses: Array  # (b,), float32; 0 where the gradient was discarded
    gradient: PyTree  # leaves (*leaf), float32, sum over samples of weight times clipped gradient
    clipped: Array  # (b,), float32, 1 for a gradient that was scaled down, else 0
    discarded: Array  # (b,), float32, 1 for a gradient that was not finite and counts as zero, else 0


def check_clipping(clip_norm: float | Array | None, clip_order: int) -> None:
    """Refuse a clip norm out of range or an order that is neither 1 nor 2."""
    check.clip_norm(clip_norm=clip_norm)
    check.one_of((1, 2), clip_order=clip_order)


def route(task: Task, clip_norm: float | Array | None) -> str:
    """Name the route of `weighted_sum`: "backward" (no clipping), "factored", "one_sample" (each sample's gradient)."""
    if clip_norm is None:
        return "backward"
    return "factored" if task.factors is not None else "one_sample"


def clip_scale(norms: Array, clip_norm: float | Array | None) -> Array:
    """min(1, clip_norm / norm), elementwise; 1 where the norm is 0 or `clip_norm` is None.

    | norm | result |
    |---|---|
    | 0 | 1 |
    | at most clip_norm | 1 |
    | infinite, NaN | 0 |

    Examples:
        >>> clip_scale(jnp.array([0.0, 1.0, 4.0]), 2.0).tolist()
        [1.0, 1.0, 0.5]
    """
    if clip_norm is None:
        return jnp.ones_like(norms)
    clip_norm = jnp.asarray(clip_norm, norms.dtype)  # a float64 array would widen what it scales
    above = norms > clip_norm
    return jnp.where(jnp.isfinite(norms), jnp.where(above, clip_norm / jnp.where(above, norms, 1.0), 1.0), 0.0)


Kept = dict[str, tuple[Array, PyTree]]
"""Name of a layer -> its squared norms (b,) and its samples' gradients, leaves (b, *leaf)."""


def factor_norms(task: Task, factors: Factors, clip_order: int, kept: Kept | None = None) -> Array:
    """Norm of each sample's whole gradient from its factors, (b,); L1 for clip_order 1, L2 for 2."""

    def part(layer, layer_input, error):
        if clip_order == 1:
            return layer.absolute_norm(layer_input, error)
        return kept[layer.name][0] if kept and layer.name in kept else layer.squared_norm(layer_input, error)

    parts = [part(*each) for each in zip(task.layers, factors.inputs, factors.errors, strict=True)]
    total = sum(parts[1:], start=parts[0])
    return root(total) if clip_order == 2 else total


def clipped_factors(
    task: Task, params: PyTree, inputs: Array, labels: Array, *, clip_norm: float | Array | None, clip_order: int = 2
) -> tuple[GradientSum, Factors]:
    """The factors of one batch with every sample's errors scaled so that its gradient's norm is at most `clip_norm`.

    Returns:
        (a `GradientSum` whose gradient is None, factors, all of them finite under a clip norm).
    """
    assert task.factors is not None
    losses, factors = task.factors(params, inputs, labels)
    losses = of_samples("task.factors", losses, inputs)
    if clip_norm is None:
        errors = tuple(jnp.where(_along(jnp.isfinite(losses), error), error, jnp.nan) for error in factors.errors)
        return _plain_result(losses, None), Factors(inputs=factors.inputs, errors=errors)
    norms, scale = _norms_and_scale(task, losses, factors, clip_norm, clip_order, {})
    return _clipped_result(losses, norms, scale, None), _scale_errors(factors, norms, scale)


def _norms_and_scale(task: Task, losses: Array, factors: Factors, clip_norm, clip_order, kept: Kept):
    """Each sample's gradient norm (NaN where its loss is not finite), and the factor that clips its gradient."""
    norms = jnp.where(jnp.isfinite(losses), factor_norms(task, factors, clip_order, kept), jnp.nan)
    return norms, clip_scale(norms, clip_norm)


def _scale_errors(factors: Factors, norms: Array, scale: Array) -> Factors:
    """Errors of clipped gradients, zeros for discarded ones."""
    errors = tuple(_or_zero(norms, error * _along(scale, error)) for error in factors.errors)
    return Factors(inputs=factors.inputs, errors=errors)


def _clipped_sum(task: Task, params, inputs, labels, weights, clip_norm, clip_order) -> GradientSum:
    """`weighted_sum` by factors: a layer that keeps its samples' gradients makes them once."""
    assert task.factors is not None
    losses, factors = task.factors(params, inputs, labels)
    losses = of_samples("task.factors", losses, inputs)
    kept: Kept = {}
    for layer, *factor in zip(task.layers, factors.inputs, factors.errors, strict=True):
        norms_and_rows = None if clip_order == 1 or layer.kept is None else layer.kept(*factor)
        kept |= {} if norms_and_rows is None else {layer.name: norms_and_rows}
    norms, scale = _norms_and_scale(task, losses, factors, clip_norm, clip_order, kept)
    gradient = from_factors(task, _scale_errors(factors, norms, scale), weights, without=kept)
    for name, (_, gradients) in kept.items():
        gradient[name] = jax.tree.map(lambda leaf: _sum_over_samples(weights * scale, leaf), gradients)
    return _clipped_result(losses, norms, scale, {layer.name: gradient[layer.name] for layer in task.layers})


def _along(values: Array, array: Array) -> Array:
    """Reshape (b,) to (b, 1, ..., 1), with as many axes as `array`."""
    return values.reshape(-1, *([1] * (array.ndim - 1)))


def _or_zero(norms: Array, array: Array) -> Array:
    """Zeros in the rows of samples whose gradient's norm is not finite."""
    return jnp.where(_along(jnp.isfinite(norms), array), array, jnp.zeros_like(array))


def _clipped_result(losses: Array, norms: Array, scale: Array, gradient: PyTree) -> GradientSum:
    """A result under a clip norm, from each sample's norm and factor."""
    finite = jnp.isfinite(norms)
    return GradientSum(
        losses=jnp.where(finite, losses, 0.0),
        gradient=gradient,
        clipped=((scale < 1) & finite).astype(jnp.float32),
        discarded=(~finite).astype(jnp.float32),
    )


def _plain_result(losses: Array, gradient: PyTree) -> GradientSum:
    """A result without a clip norm."""
    return GradientSum(
        losses=losses, gradient=gradient, clipped=jnp.zeros_like(losses), discarded=jnp.zeros_like(losses)
    )


def _sum_over_samples(weights: Array, leaf: Array) -> Array:
    """sum_b weights[b] leaf[b]."""
    flat = leaf.reshape(leaf.shape[0], -1)
    return jnp.matmul(weights, flat, precision="highest").reshape(leaf.shape[1:])


def from_factors(task: Task, factors: Factors, weights: Array, without: Collection[str] = ()) -> PyTree:
    """Sum over samples of weight (b,) times gradient, as a tree like the parameters, `without` some layers."""
    return {
        layer.name: layer.weighted_sum(layer_input, error, weights)
        for layer, layer_input, error in zip(task.layers, factors.inputs, factors.errors, strict=True)
        if layer.name not in without
    }


def weighted_sum(
    task: Task,
    params: PyTree,
    inputs: Array,
    labels: Array,
    weights: Array,
    *,
    clip_norm: float | Array | None = None,
    clip_order: int = 2,
) -> GradientSum:
    """Sum over the batch of weight times per-sample gradient, each clipped first.

    Args:
        task: the learning task.
        params: one node's parameters, leaves (*leaf).
        inputs: (b, *sample).
        labels: (b, ...).
        weights: (b,), float32; 0 for padding, 1/batch_size for a mean.
        clip_norm: bound on each sample's gradient norm over all parameters; None does not clip.
        clip_order: 2 for the L2 norm, 1 for the L1 norm.

    Guarantees:
        - each sample contributes a gradient of norm at most clip_norm.
        - under a clip norm a gradient that is not finite counts as zero, and is counted.
        - a sample of weight 0 contributes exactly zero.
        - without clipping it is the gradient of the weighted loss.
        - rounding lets a sample move the sum by hardly more than clip_norm, however large the batch.
        - samples computed at once give what they give one after the other, to rounding.
    """
    how = route(task, clip_norm)
    if how == "backward":

        def total(values):
            losses = sample_losses(task, values, inputs, labels)
            return jnp.sum(weights * losses), losses

        gradient, losses = jax.grad(total, has_aux=True)(params)
        return _plain_result(losses, gradient)
    if len(inputs) > microbatches.BLOCK:
        clipping = {"clip_norm": clip_norm, "clip_order": clip_order}

        def of_block(samples, block_weights):
            part = weighted_sum(task, params, samples[0], samples[1], block_weights, **clipping)
            return part.gradient, part._replace(gradient=None)

        gradient, results = microbatches.in_blocks(of_block, (inputs, labels), weights)
        return results._replace(gradient=gradient)
    if how == "factored":
        return _clipped_sum(task, params, inputs, labels, weights, clip_norm, clip_order)

    size = microbatches.size_of(task, params, inputs, labels)
    if size > 1:
        return _sum_of_groups(task, params, (inputs, labels, weights), size, clip_norm, clip_order)

    def add(carry, sample):
        one_input, one_label, weight = sample
        results = _one_sample(task, params, one_input, one_label, clip_norm, clip_order)
        total = jax.tree.map(lambda a, b: a + weight * b, carry, results.gradient)
        return total, results._replace(gradient=None)

    gradient, results = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (inputs, labels, weights))
    return results._replace(gradient=gradient)


def per_sample(
    task: Task,
    params: PyTree,
    inputs: Array,
    labels: Array,
    *,
    clip_norm: float | Array | None = None,
    clip_order: int = 2,
) -> GradientSum:
    """The clipped gradients themselves, leaves (b, *leaf): for stores that must hold them.

    Layers in factored form make them from one backward pass; any other task runs one sample at a time on a CPU (faster
    there than a batched gradient, and b times smaller intermediates) and as many as memory allows elsewhere.
    """
    if task.factors is not None:
        results, factors = clipped_factors(task, params, inputs, labels, clip_norm=clip_norm, clip_order=clip_order)
        gradient = {
            layer.name: layer.per_sample(layer_input, error)
            for layer, layer_input, error in zip(task.layers, factors.inputs, factors.errors, strict=True)
        }
        return results._replace(gradient=gradient)

    def one(sample):
        one_input, one_label = sample
        return _one_sample(task, params, one_input, one_label, clip_norm, clip_order)

    size = microbatches.size_of(task, params, inputs, labels)
    if size == 1:
        return jax.lax.map(one, (inputs, labels))
    return microbatches.joined(jax.lax.map(jax.vmap(one), microbatches.grouped((inputs, labels), size)), len(inputs))


def _sum_of_groups(task: Task, params: PyTree, samples, size: int, clip_norm, clip_order) -> GradientSum:
    """`weighted_sum` of a task without factors, `size` samples at once."""
    inputs, labels, weights = samples

    def of_sample(x, y):
        return _one_sample(task, params, x, y, clip_norm, clip_order)

    def add(total, group):
        group_inputs, group_labels, group_weights = group
        results = jax.vmap(of_sample)(group_inputs, group_labels)
        part = jax.tree.map(lambda leaf: _sum_over_samples(group_weights, leaf), results.gradient)
        return jax.tree.map(jnp.add, total, part), results._replace(gradient=None)

    weights = jnp.pad(weights, (0, -len(inputs) % size))  # what is repeated does not count
    groups = (*microbatches.grouped((inputs, labels), size), weights.reshape(-1, size))
    gradient, results = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), groups)
    return microbatches.joined(results, len(inputs))._replace(gradient=gradient)


def tree_norm(gradient: PyTree, clip_order: int) -> Array:
    """L1 or L2 norm over all leaves of one gradient, ()."""
    leaves = jax.tree.leaves(gradient)
    if clip_order == 1:
        return jnp.stack([jnp.sum(jnp.abs(leaf)) for leaf in leaves]).sum()
    return root(jnp.stack([jnp.sum(leaf**2) for leaf in leaves]).sum())


def _one_sample(task: Task, params: PyTree, one_input: Array, one_label: Array, clip_norm, clip_order) -> GradientSum:
    """The clipped gradient of a single sample, leaves (*leaf), and () numbers beside it."""
    loss, gradient = jax.value_and_grad(
        lambda values: sample_losses(task, values, one_input[None], one_label[None])[0]
    )(params)
    if clip_norm is None:
        return _plain_result(loss, gradient)
    norm = tree_norm(gradient, clip_order)
    scale = clip_scale(norm, clip_norm)
    gradient = jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(norm), scale * leaf, 0.0), gradient)
    return _clipped_result(loss, norm, scale, gradient)
