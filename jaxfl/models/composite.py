"""Layers made of layers: blocks whose parts do not simply run one after the other, and HeteroFL's scaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxfl.core import check
from jaxfl.core.keys import leaf_key, leaf_keys
from jaxfl.core.types import Array, Variables
from jaxfl.models.layers import Layer

Run = Callable[[str, Array], Array]
"""(name of a part, its inputs) -> its outputs."""


def composite(parts: Mapping[str, Layer], forward: Callable[[Run, Array], Array]) -> Layer:
    """One layer made of named ones.

    Args:
        parts: name -> layer; the name is the key of the part's parameters and of its state.
        forward: (run, inputs) -> outputs, where `run(name, inputs)` runs a part; it must run every part once. It is
            written once for training and evaluation.

    Returns:
        A layer without factored form. It has `train` if any part has; part number i then gets `leaf_key(key, i)`.

    Guarantees:
        - every part gets its state, the weights and a key of its own.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jaxfl.models.layers import dense, relu
        >>> parts = {"inner": dense(3, 3), "relu": relu()}
        >>> block = composite(parts, lambda run, inputs: inputs + run("relu", run("inner", inputs)))
        >>> params = block.init(jax.random.key(0))
        >>> list(params), block.apply(params, jnp.zeros((2, 3))).shape
        (['inner'], (2, 3))
    """
    positions = {name: position for position, name in enumerate(parts)}
    with_params = [(name, part.init) for name, part in parts.items() if part.init is not None]
    with_state = [(name, part.init_state) for name, part in parts.items() if part.init_state is not None]

    def init(key):
        keys = leaf_keys(key, len(with_params))
        return {name: init_part(part_key) for part_key, (name, init_part) in zip(keys, with_params, strict=True)}

    def init_state():
        return {name: init_part() for name, init_part in with_state}

    def apply(variables, inputs):
        params, state = variables if with_state else (variables, {})

        def run(name, values):
            part = parts[name]
            tree = params[name] if part.init is not None else None
            return part.apply(tree if part.train is None else Variables(tree, state[name]), values)

        return forward(run, inputs)

    def train(params, state, inputs, weights, key):
        new_state = {}

        def run(name, values):
            part = parts[name]
            tree = params[name] if part.init is not None else None
            if part.train is None:
                return part.apply(tree, values)
            own_state = None if state is None else state[name]
            outputs, new_state[name] = part.train(tree, own_state, values, weights, leaf_key(key, positions[name]))
            return outputs

        return forward(run, inputs), new_state

    return Layer(
        init=init if with_params else None,
        apply=apply,
        fills_caches=any(part.fills_caches for part in parts.values()),
        init_state=init_state if with_state else None,
        train=train if with_state else None,
    )


def scaled(layer: Layer, ratio: float) -> Layer:
    """The layer, but in training its inputs are divided by `ratio`.

    A model that keeps the first channels of every layer adds up fewer terms than the full model, into which its
    parameters are averaged. HeteroFL therefore divides a convolution's outputs by the share of channels that are kept,
    before normalization, in training alone.

    Args:
        layer: any; its parameters keep their names, and so does its state. A layer without state gets an empty one,
            because training and evaluation now differ.
        ratio: share of the channels that are kept, above 0.

    Raises:
        ArgumentError: a ratio that is not positive.

    Guarantees:
        - in training it is the layer on inputs divided by the ratio.
        - evaluation is unchanged.

    Examples:
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
