"""Weighted and per-sample-clipped gradients of one node's batch, without forming per-sample gradients where possible.

A task with `layers` gives each layer's input and output error in one forward and one backward pass. The norm of every
sample's gradient follows from these factors, the errors are scaled by min(1, clip_norm / norm), and one weighted
product a layer yields the clipped sum (ghost norms with book-keeping: Li, Tramer, Liang, Hashimoto 2022,
arXiv:2110.05679, and Bu, Wang, Zha, Karypis 2023, arXiv:2210.00038). Any other task is run one sample at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import Array, Factors, PyTree, Task, check
from jaxfl.core.tree import root


class GradientSum(NamedTuple):
    """A weighted sum of one batch's (clipped) gradients at one node."""

    losses: Array  # (b,), float32
    gradient: PyTree  # leaves (*leaf), float32, sum over samples of weight times clipped gradient
    clipped: Array  # (b,), float32, 1 for a gradient that was scaled down, else 0


def check_clipping(clip_norm: float | Array | None, clip_order: int) -> None:
    """Refuse a clip norm that is not positive or an order that is neither 1 nor 2."""
    check.scalar(clip_norm=clip_norm)
    check.positive(clip_norm=clip_norm)
    check.one_of((1, 2), clip_order=clip_order)


def route(task: Task, clip_norm: float | Array | None) -> str:
    """How `weighted_sum` will run: "backward" (no clipping), "factored" or "one_sample"."""
    if clip_norm is None:
        return "backward"
    return "factored" if task.factors is not None else "one_sample"


def clip_scale(norms: Array, clip_norm: float | Array | None) -> Array:
    """min(1, clip_norm / norm), elementwise; 1 where the norm is 0 or `clip_norm` is None.

    | norm | result |
    |---|---|
    | 0 | 1 |
    | at most clip_norm | 1 |
    | infinite | 0 |
    | NaN | NaN: a broken gradient stays visible |

    Example:
        >>> clip_scale(jnp.array([0.0, 1.0, 4.0]), 2.0).tolist()
        [1.0, 1.0, 0.5]
    """
    if clip_norm is None:
        return jnp.ones_like(norms)
    above = ~(norms <= clip_norm)
    return jnp.where(above, clip_norm / jnp.where(above, norms, 1.0), 1.0)


def factor_norms(task: Task, factors: Factors, clip_order: int) -> Array:
    """Norm of each sample's whole gradient from its factors, (b,); L1 for clip_order 1, L2 for 2."""
    parts = [
        layer.squared_norm(layer_input, error) if clip_order == 2 else layer.absolute_norm(layer_input, error)
        for layer, layer_input, error in zip(task.layers, factors.inputs, factors.errors, strict=True)
    ]
    total = sum(parts[1:], start=parts[0])
    return root(total) if clip_order == 2 else total


def clipped_factors(
    task: Task, params: PyTree, inputs: Array, labels: Array, *, clip_norm: float | Array | None, clip_order: int = 2
) -> tuple[Array, Factors, Array]:
    """The factors of one batch with every sample's errors scaled so that its gradient's norm is at most `clip_norm`.

    Returns:
        (losses (b,), factors, clipped (b,)): clipped is 1.0 where the gradient was scaled down, else 0.0.
    """
    assert task.factors is not None
    losses, factors = task.factors(params, inputs, labels)
    if clip_norm is None:
        return losses, factors, jnp.zeros_like(losses)
    scale = clip_scale(factor_norms(task, factors, clip_order), clip_norm)
    errors = tuple(error * scale.reshape(-1, *([1] * (error.ndim - 1))) for error in factors.errors)
    return losses, Factors(inputs=factors.inputs, errors=errors), (scale < 1).astype(jnp.float32)


def from_factors(task: Task, factors: Factors, weights: Array) -> PyTree:
    """Sum over samples of weight (b,) times gradient, as a tree like the parameters."""
    parts = {
        layer.name: layer.weighted_sum(layer_input, error, weights)
        for layer, layer_input, error in zip(task.layers, factors.inputs, factors.errors, strict=True)
    }
    return parts


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
        task: what is learned.
        params: one node's parameters, leaves (*leaf).
        inputs: (b, *sample).
        labels: (b, ...).
        weights: (b,), float32; 0 for padding, 1/batch_size for a mean.
        clip_norm: bound on each sample's gradient norm over all parameters; None does not clip.
        clip_order: 2 for the L2 norm, 1 for the L1 norm.

    Returns:
        A `GradientSum`.

    Guarantees:
        - each sample contributes a gradient of norm at most clip_norm.
        - a sample of weight 0 contributes exactly zero.
        - without clipping it is the gradient of the weighted loss.
    """
    how = route(task, clip_norm)
    if how == "backward":

        def total(values):
            losses = task.loss(values, inputs, labels)
            return jnp.sum(weights * losses), losses

        gradient, losses = jax.grad(total, has_aux=True)(params)
        return GradientSum(losses=losses, gradient=gradient, clipped=jnp.zeros_like(losses))
    if how == "factored":
        losses, factors, clipped = clipped_factors(
            task, params, inputs, labels, clip_norm=clip_norm, clip_order=clip_order
        )
        return GradientSum(losses=losses, gradient=from_factors(task, factors, weights), clipped=clipped)

    def add(carry, sample):
        one_input, one_label, weight = sample
        loss, gradient = _one_gradient(task, params, one_input, one_label)
        scale = clip_scale(tree_norm(gradient, clip_order), clip_norm)
        total = jax.tree.map(lambda a, b: a + (weight * scale) * b, carry, gradient)
        return total, (loss, (scale < 1).astype(jnp.float32))

    gradient, (losses, clipped) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (inputs, labels, weights))
    return GradientSum(losses=losses, gradient=gradient, clipped=clipped)


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
    there than a batched gradient, and b times smaller intermediates) and all at once elsewhere.
    """
    if task.factors is not None:
        losses, factors, clipped = clipped_factors(
            task, params, inputs, labels, clip_norm=clip_norm, clip_order=clip_order
        )
        gradient = {
            layer.name: layer.per_sample(layer_input, error)
            for layer, layer_input, error in zip(task.layers, factors.inputs, factors.errors, strict=True)
        }
        return GradientSum(losses=losses, gradient=gradient, clipped=clipped)

    def one(sample):
        loss, gradient = _one_gradient(task, params, *sample)
        scale = clip_scale(tree_norm(gradient, clip_order), clip_norm)
        return loss, jax.tree.map(lambda leaf: scale * leaf, gradient), (scale < 1).astype(jnp.float32)

    loop = jax.lax.map if jax.default_backend() == "cpu" else (lambda fn, samples: jax.vmap(fn)(samples))
    losses, gradient, clipped = loop(one, (inputs, labels))
    return GradientSum(losses=losses, gradient=gradient, clipped=clipped)


def tree_norm(gradient: PyTree, clip_order: int) -> Array:
    """L1 or L2 norm over all leaves of one gradient, ()."""
    leaves = jax.tree.leaves(gradient)
    if clip_order == 1:
        return jnp.stack([jnp.sum(jnp.abs(leaf)) for leaf in leaves]).sum()
    return root(jnp.stack([jnp.sum(leaf**2) for leaf in leaves]).sum())


def _one_gradient(task: Task, params: PyTree, one_input: Array, one_label: Array) -> tuple[Array, PyTree]:
    """Loss and gradient of a single sample."""
    return jax.value_and_grad(lambda values: task.loss(values, one_input[None], one_label[None])[0])(params)
