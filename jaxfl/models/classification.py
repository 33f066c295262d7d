"""Sequential models, and the task of classifying with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core.check import ArgumentError
from jaxfl.core.keys import leaf_key
from jaxfl.core.tasks import accuracy, cross_entropy, scale_images
from jaxfl.core.types import Array, Factors, PyTree, Task
from jaxfl.models.layers import Layer


class Model(NamedTuple):
    """Layers run one after the other.

    Attributes:
        layers: (name, layer) pairs, input side first; a name is the key of the layer's parameters.
    """

    layers: tuple[tuple[str, Layer], ...]

    def init(self, key: Array) -> dict[str, PyTree]:
        """Layer name -> its parameters, float32; layers without parameters have no entry."""
        with_params = [(name, layer.init) for name, layer in self.layers if layer.init is not None]
        return {name: init(leaf_key(key, position)) for position, (name, init) in enumerate(with_params)}

    def apply(self, params: dict[str, PyTree], inputs: Array) -> Array:
        """(b, *sample) -> (b, ...) outputs of the last layer."""
        for name, layer in self.layers:
            inputs = layer.apply(params.get(name), inputs)
        return inputs

    def apply_tapped(
        self, params: dict[str, PyTree], inputs: Array, taps: Sequence[Array] | None
    ) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
        """`apply` with `taps` added to the output of each layer that has parameters.

        Args:
            params: as `init` makes them.
            inputs: (b, *sample), float32.
            taps: one array for each layer with parameters, in the shape of its output; None for zeros.

        Returns:
            (outputs of the last layer, inputs and outputs of each layer with parameters).
        """
        layer_inputs, layer_outputs = [], []
        for name, layer in self.layers:
            if layer.init is None:
                inputs = layer.apply(None, inputs)
                continue
            layer_inputs.append(inputs)
            inputs = layer.apply(params[name], inputs)
            if taps is not None:
                inputs = inputs + taps[len(layer_outputs)]
            layer_outputs.append(inputs)
        return inputs, tuple(layer_inputs), tuple(layer_outputs)


def sequential(layers: Sequence[tuple[str, Layer]]) -> Model:
    """A model of named layers.

    Args:
        layers: (name, layer) pairs, input side first.

    Raises:
        ArgumentError: two layers have the same name, or no layer has parameters.

    Example:
        >>> from jaxfl.models.layers import dense, relu
        >>> model = sequential([("hidden", dense(4, 3)), ("relu", relu()), ("output", dense(3, 2))])
        >>> sorted(model.init(jax.random.key(0)))
        ['hidden', 'output']
    """
    names = [name for name, _ in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError("layers", "must have names of their own", f"got {twice[0]!r} twice", "Rename one.")
    if all(layer.init is None for _, layer in layers):
        raise ArgumentError("layers", "must hold a layer with parameters", f"got {names}", "Add a dense layer.")
    return Model(tuple(layers))


def classification(
    model: Model,
    *,
    preprocess: Callable[[Array], Array] = scale_images,
    node_loop: str | None = None,
) -> Task:
    """The task of predicting int32 labels with softmax cross entropy.

    Args:
        model: outputs (b, classes) logits.
        preprocess: applied to the raw inputs first; without trainable parameters.
        node_loop: see `jaxfl.core.node_loop`. Default: "map" for a model with convolutions on a CPU, else "vmap".

    Returns:
        A task with metrics "loss" and "accuracy", blocks and factored layers named as the model's layers; no factored
        layers where a layer with parameters has no factored form.

    Guarantees:
        - factors agree with per-sample gradients.
        - errors belong to the summed loss.

    Example:
        >>> from jaxfl.models import classification, mlp
        >>> task = classification(mlp((4, 3, 2)))
        >>> task.blocks
        ('dense_1', 'dense_2')
        >>> losses, factors = task.factors(task.init(jax.random.key(0)), jnp.ones((5, 4)), jnp.zeros(5, jnp.int32))
        >>> losses.shape, [error.shape for error in factors.errors]
        ((5,), [(5, 3), (5, 2)])
    """
    if node_loop is None:
        any_convolution = any(layer.convolutional for _, layer in model.layers)
        node_loop = "map" if any_convolution and jax.default_backend() == "cpu" else "vmap"
    with_params = [(name, layer) for name, layer in model.layers if layer.init is not None]
    factored = [
        layer.factored(name, position == 0)
        for position, (name, layer) in enumerate(with_params)
        if layer.factored is not None
    ]
    has_factors = len(factored) == len(with_params)

    def loss(params, inputs, labels):
        return cross_entropy(model.apply(params, preprocess(inputs)), labels)

    def metrics(params, inputs, labels):
        logits = model.apply(params, preprocess(inputs))
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def factors(params, inputs, labels):
        ready = preprocess(inputs)
        shapes = jax.eval_shape(lambda: model.apply_tapped(params, ready, None)[2])

        def summed_loss(taps):
            logits, layer_inputs, _ = model.apply_tapped(params, ready, taps)
            losses = cross_entropy(logits, labels)
            return losses.sum(), (losses, layer_inputs)

        zeros = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
        errors, (losses, layer_inputs) = jax.grad(summed_loss, has_aux=True)(zeros)
        return losses, Factors(inputs=layer_inputs, errors=errors)

    return Task(
        init=model.init,
        loss=loss,
        metrics=metrics,
        blocks=tuple(name for name, _ in with_params),
        layers=tuple(factored) if has_factors else (),
        factors=factors if has_factors else None,
        node_loop=node_loop,
    )
