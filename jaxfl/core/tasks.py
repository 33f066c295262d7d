"""Adapters that turn a user's model into a `Task`: plain functions, or a flax (nnx) module with a loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxfl.core.check import ArgumentError
from jaxfl.core.types import Array, PyTree, Task


def scale_images(inputs: Array) -> Array:
    """uint8 images as float32 in [0, 1]; anything else unchanged."""
    return inputs.astype(jnp.float32) / 255.0 if inputs.dtype == jnp.uint8 else inputs


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Softmax cross entropy of each sample; logits (b, c) float32, labels (b,) int32; returns (b,)."""
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def accuracy(logits: Array, labels: Array) -> Array:
    """1.0 where the largest logit is the label's, else 0.0, (b,) float32."""
    return (jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels).astype(jnp.float32)


def from_functions(
    init: Callable[[Array], PyTree],
    loss: Callable[[PyTree, Array, Array], Array],
    metrics: Callable[[PyTree, Array, Array], dict[str, Array]] | None = None,
    *,
    node_loop: str = "vmap",
) -> Task:
    """A task from plain functions.

    Args:
        init: key -> params, a pytree of float32 arrays.
        loss: (params, inputs (b, *sample), labels (b, ...)) -> (b,) losses.
        metrics: the same arguments -> dict of (b,) numbers; "loss" is added. Default: the loss alone.
        node_loop: see `jaxfl.core.node_loop`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> task = from_functions(lambda key: jnp.zeros(3), lambda w, x, y: (x @ w - y) ** 2)
        >>> task.loss(jnp.ones(3), jnp.ones((2, 3)), jnp.zeros(2)).tolist()
        [9.0, 9.0]
    """

    def all_metrics(params, inputs, labels):
        named = {} if metrics is None else metrics(params, inputs, labels)
        return {"loss": loss(params, inputs, labels), **named}

    return Task(init=init, loss=loss, metrics=all_metrics, node_loop=node_loop)


def from_flax(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    *,
    loss: Callable[[Array, Array], Array] = cross_entropy,
    metrics: dict[str, Callable[[Array, Array], Array]] | None = None,
    preprocess: Callable[[Array], Array] = scale_images,
    node_loop: str = "vmap",
) -> Task:
    """A task from a flax nnx module.

    Args:
        make_module: rngs -> module, called as `module(inputs (b, *sample)) -> outputs (b, ...)`. Its `nnx.Param`s are
            what is trained.
        loss: (outputs, labels) -> (b,) losses.
        metrics: name -> (outputs, labels) -> (b,). Default: {"accuracy": accuracy}.
        preprocess: applied to the raw inputs first.
        node_loop: see `jaxfl.core.node_loop`.

    Returns:
        A task whose params are plain nested dicts.

    Raises:
        ArgumentError: the module keeps state other than parameters (batch statistics, dropout streams).

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> task = from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        >>> sorted(task.init(jax.random.key(0)))
        ['bias', 'kernel']
    """
    chosen = {"accuracy": accuracy} if metrics is None else metrics
    structure, _, rest = nnx.split(nnx.eval_shape(lambda: make_module(nnx.Rngs(0))), nnx.Param, ...)
    if jax.tree.leaves(rest):
        kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(rest)})
        raise ArgumentError(
            "make_module",
            "must hold nnx.Param variables only",
            f"found {', '.join(kinds)}",
            "Use GroupNorm for BatchNorm and leave dropout out: a per-sample gradient has no batch statistics.",
        )

    def init(key):
        return nnx.to_pure_dict(nnx.split(make_module(nnx.Rngs(key)), nnx.Param, ...)[1])

    def apply(params, inputs):
        return nnx.merge(structure, nnx.State(params))(preprocess(inputs))

    def all_metrics(params, inputs, labels):
        outputs = apply(params, inputs)
        return {"loss": loss(outputs, labels), **{name: fn(outputs, labels) for name, fn in chosen.items()}}

    return Task(
        init=init,
        loss=lambda params, inputs, labels: loss(apply(params, inputs), labels),
        metrics=all_metrics,
        node_loop=node_loop,
    )
