"""HeteroFL's scaler: activations of a narrow model, in training as large as those of the full one."""

from __future__ import annotations

from jaxfl.core import check
from jaxfl.models.layers import Layer


def scaled(layer: Layer, ratio: float) -> Layer:
    """A layer that in training gets its inputs divided by `ratio`.

    A model that keeps the first channels of every layer adds up fewer terms than the full one, in which its parameters
    are averaged with others and evaluated. HeteroFL therefore divides what a convolution puts out by the share of
    channels that are there, before normalization, in training alone.

    Args:
        layer: any; its parameters keep their names, and so does its state. One without state gets an empty one, since
            it now trains otherwise than it evaluates.
        ratio: share of the channels that are there, above 0.

    Returns:
        The layer, without factored form.

    Raises:
        ArgumentError: a ratio that is not positive.

    Guarantees:
        - in training it is the layer on inputs divided by the ratio.
        - evaluation is unchanged.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxfl.core import Variables
        >>> from jaxfl.models.layers import relu
        >>> layer = scaled(relu(), 0.5)
        >>> layer.train(None, {}, jnp.array([[3.0]]), jnp.ones(1), None)[0].tolist()
        [[6.0]]
        >>> layer.apply(Variables(None, {}), jnp.array([[3.0]])).tolist()
        [[3.0]]

    References:
        Diao, Ding, Tarokh: "HeteroFL", ICLR 2021, arXiv:2010.01264, section 3.
    """
    check.positive(ratio=ratio)

    def apply(variables, inputs):
        return layer.apply(variables.params if layer.train is None else variables, inputs)

    def train(params, state, inputs, weights, key):
        if layer.train is None:
            return layer.apply(params, inputs / ratio), {}
        return layer.train(params, state, inputs / ratio, weights, key)

    return Layer(
        init=layer.init,
        apply=apply,
        fills_caches=layer.fills_caches,
        init_state=dict if layer.init_state is None else layer.init_state,
        train=train,
    )
