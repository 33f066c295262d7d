"""Sequential models, and classification tasks for them: one logit for each class, or one logit for two classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.devices import varying_like
from jaxfl.core.node_loop import automatic
from jaxfl.core.reprs import layers_repr
from jaxfl.core.tasks import accuracy, cross_entropy, scale_images
from jaxfl.core.types import Array, Factors, Part, PyTree, Task, Variables
from jaxfl.models.composite import composite
from jaxfl.models.kernels import bfloat16_kernel_gradients
from jaxfl.models.layers import Layer, elementwise

Loss: TypeAlias = Callable[[Array, Array], Array]  # (logits, labels) -> losses


class Model(NamedTuple):
    """Layers run one after the other. Consecutive layers are a model again: `Model(model.layers[:3])`.

    Attributes:
        layers: (name, layer) pairs, input side first; a name is the key of the layer's parameters and of its state.
    """

    layers: tuple[tuple[str, Layer], ...]
    __repr__ = layers_repr

    @property
    def as_layer(self) -> Layer:
        """The whole model as one layer."""

        def one_after_the_other(run, inputs):
            for name, _ in self.layers:
                inputs = run(name, inputs)
            return inputs

        return composite(dict(self.layers), one_after_the_other)

    @property
    def has_training_mode(self) -> bool:
        """True if a layer differs in training and evaluation: batch normalization or dropout."""
        return any(layer.train is not None for _, layer in self.layers)

    def init(self, key: Array) -> dict[str, PyTree]:
        """Layer name -> its parameters, float32; layers without parameters have no entry."""
        init = self.as_layer.init
        return {} if init is None else init(key)

    def init_state(self) -> dict[str, PyTree]:
        """Layer name -> its state beside parameters; layers that do not differ in training have no entry."""
        init_state = self.as_layer.init_state
        return {} if init_state is None else init_state()

    def apply(self, params: PyTree, inputs: Array) -> Array:
        """(b, *sample) -> (b, ...) outputs of the last layer, in evaluation mode.

        `params` are as `init` makes them; `Variables` if the model has a training mode.
        """
        return self.as_layer.apply(params, inputs)

    def apply_train(
        self, params: dict[str, PyTree], state: dict[str, PyTree] | None, inputs: Array, weights: Array, key: Array
    ) -> tuple[Array, dict[str, PyTree]]:
        """`apply` in training mode.

        Args:
            params: as `init` makes them.
            state: as `init_state` makes it; None computes a new one from this batch only.
            inputs: (b, *sample), float32.
            weights: (b,), float32; samples of weight 0 are padding and do not count in batch statistics.
            key: typed; layer number i gets `leaf_key(key, i)`.

        Returns:
            (outputs of the last layer, new state).
        """
        whole = self.as_layer
        if whole.train is None:
            return whole.apply(params, inputs), {}
        return whole.train(params, state, inputs, weights, key)

    def apply_tapped(
        self, params: dict[str, PyTree], inputs: Array, taps: Sequence[Array] | None
    ) -> tuple[Array, tuple[Array, ...], tuple[Array, ...], Array]:
        """`apply` with `taps` added to the output of each layer with parameters, or where its `Layer.tapped` adds it.

        The gradient with respect to a tap is the error there, a factor of the layer's gradient.

        Args:
            params: as `init` makes them; the model has no training mode.
            inputs: (b, *sample), float32.
            taps: one array for each layer with parameters, in the shape of the values it is added to; None for zeros.

        Returns:
            (outputs of the last layer, factor inputs and tapped values of each layer with parameters, is_finite (b,)).
            Factor inputs are finite: a number that is not finite is replaced by 0, and the sample's is_finite is False.
        """
        layer_inputs, layer_outputs, is_finite = [], [], jnp.ones(inputs.shape[0], bool)
        for name, layer in self.layers:
            if layer.init is None:
                inputs = layer.apply(None, inputs)
                continue
            tap = None if taps is None else taps[len(layer_inputs)]
            inputs, is_finite = _finite(inputs, is_finite)
            if layer.tapped is not None:
                inputs, factor_input, outputs = layer.tapped(params[name], inputs, tap)
                factor_input, is_finite = _finite(factor_input, is_finite)
            else:
                factor_input, outputs = inputs, layer.apply(params[name], inputs)
                inputs = outputs = outputs if tap is None else outputs + tap
            layer_inputs.append(factor_input)
            layer_outputs.append(outputs)
        return inputs, tuple(layer_inputs), tuple(layer_outputs), is_finite


def sequential(layers: Sequence[tuple[str, Layer]]) -> Model:
    """A model of named layers.

    Args:
        layers: (name, layer) pairs, input side first.

    Raises:
        ArgumentError: a repeated name, or no layer with parameters.

    Examples:
        >>> from jaxfl.models.layers import dense, relu
        >>> model = sequential([("hidden", dense(4, 3)), ("relu", relu()), ("output", dense(3, 2))])
        >>> sorted(model.init(jax.random.key(0)))
        ['hidden', 'output']
    """
    names = [name for name, _ in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError("layers", "must have different names", f"got {twice[0]!r} twice", "Rename one.")
    if all(layer.init is None for _, layer in layers):
        raise ArgumentError("layers", "must hold a layer with parameters", f"got {names}", "Add a dense layer.")
    return Model(tuple(layers))


def classification(
    model: Model,
    *,
    preprocess: Callable[[Array], Array] = scale_images,
    node_loop: str | None = None,
    compute_dtype: str = "float32",
    loss: Loss = cross_entropy,
) -> Task:
    """The task of predicting int32 labels with softmax cross entropy.

    Args:
        model: outputs (b, classes) logits.
        preprocess: function applied to the raw inputs first; it has no trainable parameters.
        node_loop: see `jaxfl.core.node_loop`. Default: for a model with convolutions or LSTMs on a CPU "map", or
            "devices:map" if the CPU has several devices; else "vmap".
        compute_dtype: "float32", or "bfloat16" to run the layers on rounded parameters and inputs, which is faster
            on hardware that multiplies bfloat16. Parameters, gradients, losses, model state, and the statistics of
            normalizations stay float32. "bfloat16_kernel_gradients" rounds the factors of one product only, of the
            gradients to convolutions' kernels; clipped sums of factored layers stay in float32.
        loss: (logits (b, classes) float32, labels) -> losses (b,), in training and as the metric "loss". It must take
            the labels of test samples, too.

    Returns:
        A task with metrics "loss" and "accuracy", blocks and factored layers named as the model's layers; no factored
        layers if any layer with parameters has no factored form. A model with batch normalization or dropout gives a
        task with `train_loss`, which has no factored layers. Convolutions, LSTMs and batch normalization in training
        have gradients of their own, so that forward mode (`jax.jvp`, `jax.hessian`) does not work with them.

    Guarantees:
        - factors agree with per-sample gradients.
        - errors are derivatives of the summed loss.
        - in bfloat16, losses and gradients are float32 and near those of float32.
        - a part of all blocks is the task; any part has the task's losses, and its gradients for the blocks it trains.
        - a part's frozen blocks keep their statistics.

    Examples:
        >>> from jaxfl.models import classification, mlp
        >>> task = classification(mlp((4, 3, 2)))
        >>> task.blocks
        ('dense_1', 'dense_2')
        >>> losses, factors = task.factors(task.init(jax.random.key(0)), jnp.ones((5, 4)), jnp.zeros(5, jnp.int32))
        >>> losses.shape, [error.shape for error in factors.errors]
        ((5,), [(5, 3), (5, 2)])
    """
    check.one_of(("float32", "bfloat16", "bfloat16_kernel_gradients"), compute_dtype=compute_dtype)
    if compute_dtype == "bfloat16_kernel_gradients":
        model = Model(tuple((name, _with_narrow_gradients(layer)) for name, layer in model.layers))
    if node_loop is None:
        fills_caches = any(layer.fills_caches for _, layer in model.layers)
        node_loop = automatic(fills_caches)
    with_params = [(name, layer) for name, layer in model.layers if layer.init is not None]
    factored_layers = [
        layer.factored(name, position == 0)
        for position, (name, layer) in enumerate(with_params)
        if layer.factored is not None
    ]
    has_mode = model.has_training_mode
    has_factors = len(factored_layers) == len(with_params) and not has_mode

    def narrow(tree):
        """Cast to the type to compute in."""
        return _cast(tree, jnp.bfloat16) if compute_dtype == "bfloat16" else tree

    def widen(tree):
        """Cast back to float32."""
        return _cast(tree, jnp.float32) if compute_dtype == "bfloat16" else tree

    def logits_of(variables, inputs):
        narrow_variables = Variables(narrow(variables.params), variables.model_state) if has_mode else narrow(variables)
        return widen(model.apply(narrow_variables, narrow(preprocess(inputs))))

    def losses_of(variables, inputs, labels):
        return loss(logits_of(variables, inputs), labels)

    def metrics(variables, inputs, labels):
        logits = logits_of(variables, inputs)
        return {"loss": loss(logits, labels), "accuracy": accuracy(logits, labels)}

    def train_loss(params, model_state, inputs, labels, weights, key):
        ready = narrow(preprocess(inputs))
        logits, new_state = model.apply_train(narrow(params), model_state, ready, weights, key)
        return loss(widen(logits), labels), new_state

    def factors(params, inputs, labels):
        narrow_params, ready = narrow(params), narrow(preprocess(inputs))
        shapes = jax.eval_shape(lambda: model.apply_tapped(narrow_params, ready, None)[2])

        def summed_loss(taps):
            logits, layer_inputs, _, is_finite = model.apply_tapped(narrow_params, ready, taps)
            losses = loss(widen(logits), labels)
            return losses.sum(), (jnp.where(is_finite, losses, jnp.nan), layer_inputs)

        zeros = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
        # Gradients for values that all devices of a shard_map share would be sums over the devices.
        zeros = varying_like(zeros, params, inputs)
        errors, (losses, layer_inputs) = jax.grad(summed_loss, has_aux=True)(zeros)
        return losses, Factors(inputs=widen(layer_inputs), errors=widen(errors))

    def part(trained):
        return _part(model, trained, lambda inputs: narrow(preprocess(inputs)), narrow, widen, loss)

    return Task(
        init=model.init,
        loss=losses_of,
        metrics=metrics,
        blocks=tuple(name for name, _ in with_params),
        layers=tuple(factored_layers) if has_factors else (),
        factors=factors if has_factors else None,
        node_loop=node_loop,
        init_state=model.init_state if has_mode else None,
        train_loss=train_loss if has_mode else None,
        part=part,
        logits=logits_of,
        modes=tuple(name for name, layer in model.layers if layer.train is not None),
        is_by_sample=not has_mode,
    )


def binary_classification(
    model: Model,
    *,
    preprocess: Callable[[Array], Array] = scale_images,
    node_loop: str | None = None,
    compute_dtype: str = "float32",
) -> Task:
    """The task of predicting int32 labels 0 or 1 with sigmoid cross entropy.

    Sigmoid cross entropy of a logit z is softmax cross entropy of the two logits 0 and z, of which the second is the
    largest where z > 0. So this is `classification` with a logit 0 put in front of the model's own.

    Args:
        model: outputs (b, 1) logits.
        preprocess: as for `classification`.
        node_loop: likewise.
        compute_dtype: likewise.

    Returns:
        A task with metrics "loss" and "accuracy", otherwise as `classification` makes it.

    Guarantees:
        - losses, accuracies and gradients equal those of sigmoid cross entropy.

    Examples:
        >>> from jaxfl.models import mlp
        >>> task = binary_classification(mlp((2, 1)))
        >>> params = {"dense_1": {"kernel": jnp.array([[1.0], [0.0]]), "bias": jnp.zeros(1)}}
        >>> inputs = jnp.array([[0.0, 0.0], [3.0, 0.0], [-3.0, 0.0]])
        >>> metrics = task.metrics(params, inputs, jnp.ones(3, jnp.int32))
        >>> [round(loss, 3) for loss in metrics["loss"].tolist()], metrics["accuracy"].tolist()  # log(1 + exp(-z))
        ([0.693, 0.049, 3.049], [0.0, 1.0, 0.0])
    """

    def both_logits(logits):
        if logits.ndim != 2 or logits.shape[1] != 1:
            remedy = "End the model with one output, or use jaxfl.models.classification."
            raise ArgumentError("model", "must output logits (b, 1)", f"got shape {logits.shape}", remedy)
        return jnp.concatenate([jnp.zeros_like(logits), logits], axis=1)

    two_logits = sequential([*model.layers, ("logit_of_0", elementwise(both_logits))])
    return classification(two_logits, preprocess=preprocess, node_loop=node_loop, compute_dtype=compute_dtype)


def _part(
    model: Model,
    trained: tuple[str, ...],
    ready: Callable[[Array], Array],
    narrow: Callable[[PyTree], PyTree],
    widen: Callable[[PyTree], PyTree],
    loss: Loss,
) -> Part:
    """Make the `Part` that trains the blocks named `trained`; `ready` prepares inputs for the first layer."""
    blocks = [position for position, (_, layer) in enumerate(model.layers) if layer.init is not None]
    names = [model.layers[position][0] for position in blocks]
    unknown = [name for name in trained if name not in names]
    if unknown or not trained:
        found = f"got {unknown[0]!r}" if unknown else "got none"
        raise ArgumentError("trained", "must name blocks of the task", found, f"Choose among {', '.join(names)}.")
    first = next(position for position, name in zip(blocks, names, strict=True) if name in trained)
    in_front = [position for position in blocks if position < first]
    cut = 0
    if in_front:
        # Layers without parameters go to the frozen side, where pooling leaves less to store. Dropout, which draws anew
        # in each step, and layers after it do not.
        between = range(in_front[-1] + 1, first)
        cut = next((position for position in between if model.layers[position][1].train is not None), first)

    # Layers of the other side pass their inputs on, so that all layers keep their numbers, which make their keys.
    elsewhere = elementwise(lambda inputs: inputs)
    front = Model(tuple((name, layer if i < cut else elsewhere) for i, (name, layer) in enumerate(model.layers)))
    rest = Model(
        tuple(
            (name, elsewhere if i < cut else layer if name in trained or layer.init is None else _evaluating(layer))
            for i, (name, layer) in enumerate(model.layers)
        )
    )

    def features(params, model_state, inputs):
        values = narrow(params)
        return front.apply(Variables(values, model_state) if front.has_training_mode else values, ready(inputs))

    def features_train(params, model_state, inputs, weights, key):
        return front.apply_train(narrow(params), model_state, ready(inputs), weights, key)[0]

    def train_loss(trained_params, frozen_params, model_state, values, labels, weights, key):
        params = narrow({**frozen_params, **trained_params})
        entering = values if in_front else ready(values)
        logits, new_state = rest.apply_train(params, model_state, entering, weights, key)
        return loss(widen(logits), labels), None if model_state is None else {**model_state, **new_state}

    return Part(
        trained=tuple(name for name in names if name in trained),
        features=features if in_front else None,
        features_train=features_train if in_front else None,
        train_loss=train_loss,
    )


def _with_narrow_gradients(layer: Layer) -> Layer:
    """The layer, whose gradients to kernels are products of bfloat16."""

    def within(fn):
        def call(*arguments):
            with bfloat16_kernel_gradients():
                return fn(*arguments)

        return fn and call

    return layer._replace(apply=within(layer.apply), train=within(layer.train))


def _evaluating(layer: Layer) -> Layer:
    """The layer in evaluation mode, with a fixed state, also in training."""
    if layer.train is None:
        return layer

    def train(params, state, inputs, weights, key):
        return layer.apply(Variables(params, state), inputs), state

    return layer._replace(train=train)


def _finite(inputs: Array, is_finite: Array) -> tuple[Array, Array]:
    """Replace numbers that are not finite by 0, and mark samples that have been finite up to here.

    This is done where a layer's input is computed, so that XLA fuses it. On stored factors it would copy each of them.
    """
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        return inputs, is_finite
    ones = jnp.isfinite(inputs)
    return jnp.where(ones, inputs, jnp.zeros_like(inputs)), is_finite & ones.reshape(ones.shape[0], -1).all(axis=1)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    """Floating-point leaves in another type; integers, as of words, unchanged."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)
