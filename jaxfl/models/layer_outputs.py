"""Outputs of chosen layers of a model, for the study of representations."""

from __future__ import annotations

from collections.abc import Sequence

from jaxfl.core.check import ArgumentError
from jaxfl.core.types import Array, PyTree, Variables
from jaxfl.models.classification import Model


def layer_outputs(model: Model, params: PyTree, inputs: Array, names: Sequence[str]) -> dict[str, Array]:
    """The outputs of named layers in evaluation, in one pass that ends after the last of them.

    For parameters of many nodes, use `jax.vmap`. In `jaxfl.models.resnet20` the output of "stem" is Conv 1 of
    EmbracingFL's paper; its Conv 3, 7, 15 and 19 are followed by the outputs of "block_1_1", "block_1_3", "block_3_1"
    and "block_3_3": a block ends with the sum and the ReLU after its second convolution.

    Args:
        model: any.
        params: as `Model.apply` takes them: of a model with a training mode they are `Variables`.
        inputs: (b, *sample), as `Model.apply` takes them: images in float32 (`jaxfl.core.tasks.scale_images`).
        names: layers, with or without parameters; at least one.

    Returns:
        Name -> (b, ...) outputs.

    Raises:
        ArgumentError: no name, an unknown one, or params that are not `Variables` though the model has a training mode.

    Guarantees:
        - the outputs of the last layer are those of `Model.apply`.
        - layers after the last named one do not run.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jaxfl.models import mlp
        >>> model = mlp((4, 3, 2))
        >>> outputs = layer_outputs(model, model.init(jax.random.key(0)), jnp.ones((5, 4)), ["dense_1", "relu_1"])
        >>> bool((jax.nn.relu(outputs["dense_1"]) == outputs["relu_1"]).all()), outputs["relu_1"].shape
        (True, (5, 3))
    """
    layers = [name for name, _ in model.layers]
    for name in names:
        if name not in layers:
            raise ArgumentError("names", f"must be some of {', '.join(layers)}", f"got {name!r}", "Name some of these.")
    if not names:
        raise ArgumentError("names", "must hold at least one layer", "got none", f"Choose among {', '.join(layers)}.")
    if model.has_training_mode and not isinstance(params, Variables):
        requirement = "must be Variables, because the model has batch normalization or dropout"
        found = f"got {type(params).__name__}"
        raise ArgumentError("params", requirement, found, "Pass Variables(params=..., model_state=...).")
    own_params, states = (params.params, params.model_state) if isinstance(params, Variables) else (params, {})
    outputs = {}
    for name, layer in model.layers[: max(map(layers.index, names)) + 1]:
        layer_params = own_params[name] if layer.init is not None else None
        inputs = layer.apply(layer_params if layer.train is None else Variables(layer_params, states[name]), inputs)
        outputs[name] = inputs
    return {name: outputs[name] for name in names}
