"""How many parameters and activations each layer of a model has, counted on the traced model itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core.types import Variables
from jaxfl.models.classification import Model
from jaxfl.models.layers import ACTIVATION


class LayerSize(NamedTuple):
    """Numbers in one layer."""

    params: int
    activations: int  # for one sample


def layer_sizes(model: Model, sample_shape: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, LayerSize]:
    """The size of each layer with parameters; nothing is computed.

    Activations are the outputs of convolutions, those of shortcuts too, and of dense layers, where their bias is added:
    what `jaxfl.models.layers.mark_activation` marks. Those of normalization, activation functions and pooling are not
    counted, nor is model state among the parameters. EmbracingFL's Table 1 counts so.

    Args:
        model: any.
        sample_shape: shape of one sample.
        dtype: type of the inputs.

    Returns:
        Layer name -> its size, input side first.

    Guarantees:
        - the counts of EmbracingFL's Tables 1 and 10.

    Example:
        >>> from jaxfl.models import mlp
        >>> layer_sizes(mlp((784, 32, 10)), (28, 28))
        {'dense_1': LayerSize(params=25120, activations=32), 'dense_2': LayerSize(params=330, activations=10)}

    References:
        Lee, Zhang, Prakash, Niu, Avestimehr: "Embracing Federated Learning: Enabling Weak Client Participation via
        Partial Model Training", Tables 1 and 10.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    values = jax.ShapeDtypeStruct((1, *sample_shape), dtype)
    sizes = {}
    for name, layer in model.layers:
        params = None if layer.init is None else jax.eval_shape(layer.init, key)
        variables = params if layer.init_state is None else Variables(params, jax.eval_shape(layer.init_state))
        program, values = jax.make_jaxpr(layer.apply, return_shape=True)(variables, values)
        if params is not None:
            num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
            sizes[name] = LayerSize(params=num_params, activations=_marked(program.jaxpr))
    return sizes


def _marked(program: Any) -> int:
    """Numbers in the marked arrays of a traced program, those of functions it calls included."""
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "name" and equation.params["name"] == ACTIVATION:
            total += equation.outvars[0].aval.size
        called = [value.jaxpr for value in equation.params.values() if hasattr(value, "jaxpr")]
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += repeats * sum(map(_marked, called))
    return total
