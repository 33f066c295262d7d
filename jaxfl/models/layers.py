"""Layers as pure functions, each with the factored form of its gradient where it has parameters.

A layer is a `Layer`; a model is an ordered list of named ones (`jaxfl.models.classification`). The factored form
(`jaxfl.core.FactoredLayer`) gives norms and weighted sums of per-sample gradients from the layer's inputs and the
errors at its outputs, without forming a gradient for each sample. Products of factors have the highest precision: by
default accelerators round the factors to fewer bits, with which a clipped gradient exceeded its bound by a relative
3.2e-4 in an emulation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxfl.core import check, one_kernel
from jaxfl.core.check import ArgumentError
from jaxfl.core.reprs import short_repr
from jaxfl.core.tracing import mark_activation
from jaxfl.core.types import Array, FactoredLayer, PyTree
from jaxfl.models import kernels, normalization
from jaxfl.models.kernels import convolve, geometry


class Layer(NamedTuple):
    """One layer of a model.

    Batch normalization and dropout differ in training and evaluation: such a layer has `init_state` and `train`.

    Attributes:
        init: key -> parameters, for most {"kernel": ..., "bias": ...}; None for a layer without parameters.
        apply: (params or None, inputs (b, ...)) -> outputs (b, ...). For a layer with `train` this is evaluation,
            and the first argument is `Variables` of its parameters and state.
        factored: (name, input_is_sample) -> FactoredLayer; None for a layer without parameters or without such a form.
        fills_caches: whether one node fills a CPU's caches, so that nodes run best one after the other there.
        init_state: () -> its state beside parameters, empty for dropout; None without `train`.
        train: (params or None, state, inputs (b, ...), weights (b,), key) -> (outputs, new state). Samples of weight 0
            are padding. Without a state (None) the new one comes from this batch only. None if training is `apply`.
        tapped: (params, inputs, tap or None) -> (outputs, factor inputs, pre-activations): `apply` with a tap added to
            the pre-activations, for a layer whose factors are not its inputs and the errors at its outputs; else None.
    """

    init: Callable[[Array], PyTree] | None
    apply: Callable[[PyTree, Array], Array]
    factored: Callable[[str, bool], FactoredLayer] | None = None
    fills_caches: bool = False
    init_state: Callable[[], PyTree] | None = None
    train: Callable[[PyTree, PyTree, Array, Array, Array], tuple[Array, PyTree]] | None = None
    tapped: Callable[[PyTree, Array, Array | None], tuple[Array, Array, Array]] | None = None
    __repr__ = short_repr


def normal_kernel(key: Array, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """A truncated normal kernel (..., in, out) of variance scale / fan_in: LeCun normal, flax's default; He at scale 2.

    Guarantees:
        - kernels start as those of jax.nn.initializers.
    """
    # Drawn flat, in one kernel: LLVM took 1.5 s to compile jax.nn.initializers' loop over (32, 10) numbers.
    deviation = jnp.sqrt(jnp.float32(scale / math.prod(shape[:-1]))) / jnp.float32(0.87962566103423978)
    flat = jax.random.truncated_normal(one_kernel(key), -2, 2, (math.prod(shape),), jnp.float32)
    return (flat * deviation).reshape(shape)


def elementwise(fn: Callable[[Array], Array]) -> Layer:
    """A layer without parameters, for instance `elementwise(jnp.tanh)`."""
    return Layer(init=None, apply=lambda params, inputs: fn(inputs))


def relu() -> Layer:
    """max(x, 0), with derivative 0 at 0."""
    return elementwise(jax.nn.relu)


def tanh() -> Layer:
    """Hyperbolic tangent."""
    return elementwise(jnp.tanh)


def activation(name: str) -> Layer:
    """The activation called `name`: "relu" or "tanh"."""
    check.one_of(("relu", "tanh"), activation=name)
    return {"relu": relu, "tanh": tanh}[name]()


def reshape(sample_shape: tuple[int, ...]) -> Layer:
    """Give each sample another shape; adds a missing channel axis, for instance, or flattens.

    Examples:
        >>> reshape((784,)).apply(None, jnp.zeros((2, 28, 28, 1))).shape
        (2, 784)
    """

    def apply(params, inputs):
        if math.prod(inputs.shape[1:]) != math.prod(sample_shape):
            raise ArgumentError(
                "inputs",
                f"must hold samples of {math.prod(sample_shape)} numbers, as the model was built for {sample_shape}",
                f"got samples of shape {inputs.shape[1:]}",
                "Build the model for this shape.",
            )
        return inputs.reshape(inputs.shape[0], *sample_shape)

    return Layer(init=None, apply=apply)


def max_pool(window: tuple[int, int] = (2, 2)) -> Layer:
    """Maximum over windows that do not overlap; see `jaxfl.models.kernels.pooling`."""
    return Layer(init=None, apply=lambda params, inputs: kernels.max_pool(inputs, window))


def group_norm(channels: int, num_groups: int) -> Layer:
    """Bring groups of channels of each sample to mean 0 and variance 1; see `jaxfl.models.normalization`."""

    def apply(params, inputs):
        return normalization.group_norm(inputs, params["scale"], params["bias"], num_groups)

    def normalize(inputs):
        initial = _scale_and_bias(channels)
        return normalization.group_norm(inputs, initial["scale"], initial["bias"], num_groups)

    factored = normalization.factored_scale_and_bias(normalize)
    return Layer(init=lambda key: _scale_and_bias(channels), apply=apply, factored=factored)


def batch_norm(channels: int, *, momentum: float = 0.9, tracked: bool = True, eps: float = 1e-5) -> Layer:
    """Bring each channel to mean 0 and variance 1 over the batch, then scale and shift it.

    Its state is {"mean": (channels,), "var": (channels,)}, float32, which evaluation uses. Statistics are those of
    `jaxfl.models.normalization.batch_statistics`, over the samples whose weight is not 0. Forward mode (`jax.jvp`) does
    not work in training.

    Args:
        channels: size of the last axis of the inputs (b, ..., channels).
        momentum: share of the old statistics in the new ones, new = momentum * old + (1 - momentum) * batch's.
        tracked: False leaves the state as it is while training. This is "static" batch normalization, whose statistics
            come from a calibration set before evaluation: `jaxfl.core.tasks.calibrated_state`.
        eps: added to the variance.

    Guarantees:
        - equals flax BatchNorm in values, gradients and running statistics.
        - samples of weight 0 never count.
        - a batch that is all padding leaves the state as it is.

    Examples:
        >>> layer = batch_norm(1)
        >>> inputs, weights = jnp.array([[1.0], [3.0], [50.0]]), jnp.array([1.0, 1.0, 0.0])
        >>> state, key = layer.init_state(), jax.random.key(0)
        >>> outputs, state = layer.train(layer.init(key), state, inputs, weights, key)
        >>> outputs[:2, 0].round(3).tolist(), state["mean"].round(3).tolist()
        ([-1.0, 1.0], [0.20000000298023224])

    References:
        Ioffe, Szegedy, ICML 2015, arXiv:1502.03167. Static: Diao, Ding, Tarokh, "HeteroFL", ICLR 2021,
        arXiv:2010.01264, section 3.
    """
    check.at_least(1, channels=channels)
    check.scalar(momentum=momentum)
    check.probability(momentum=momentum)

    def init_state():
        return {"mean": jnp.zeros(channels, jnp.float32), "var": jnp.ones(channels, jnp.float32)}

    def apply(variables, inputs):
        params, state = variables
        return normalization.batch_norm(inputs, params["scale"], params["bias"], state, eps)

    def train(params, state, inputs, weights, key):
        otherwise = init_state() if state is None else state
        results = normalization.normalize_batch(inputs, weights, params["scale"], params["bias"], otherwise, eps)
        outputs, statistics = cast(tuple[Array, PyTree], results)  # a custom_vjp hides the type
        if state is None:
            return outputs, statistics
        if not tracked:
            return outputs, state
        # In this form, statistics equal to the old ones change no bit.
        return outputs, jax.tree.map(lambda old, new: old + (1.0 - momentum) * (new - old), state, statistics)

    return Layer(init=lambda key: _scale_and_bias(channels), apply=apply, init_state=init_state, train=train)


def dropout(rate: float) -> Layer:
    """Set each number to 0 with probability `rate` while training, and divide the others by 1 - rate.

    Args:
        rate: in [0, 1).

    Guarantees:
        - numbers are kept independently with probability 1 - rate, and their means stay the same.
        - evaluation changes nothing.

    References:
        Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov: "Dropout", JMLR 15, 2014, in its inverted form.
    """
    if not 0 <= rate < 1:
        raise ArgumentError("rate", "must be at least 0 and below 1", f"got {rate}", "Pass 0 to drop nothing.")

    def train(params, state, inputs, weights, key):
        mask = jax.random.bernoulli(one_kernel(key), jnp.float32(1.0 - rate), inputs.shape)
        return jnp.where(mask, inputs / (1.0 - rate), jnp.zeros((), inputs.dtype)), {}

    return Layer(init=None, apply=lambda variables, inputs: inputs, init_state=dict, train=train)


def dense(in_features: int, out_features: int) -> Layer:
    """inputs (b, in_features) @ kernel + bias.

    Args:
        in_features: size of the input.
        out_features: size of the output.

    Guarantees:
        - its factored form agrees with per-sample gradients and never forms them, except in `per_sample`.

    Examples:
        >>> layer = dense(3, 2)
        >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.array([0.0, 1.0])}
        >>> layer.apply(params, jnp.ones((1, 3))).tolist()
        [[3.0, 4.0]]
        >>> layer.factored("out", True).squared_norm(jnp.ones((1, 3)), jnp.ones((1, 2))).tolist()  # 3 * 2 + 2
        [8.0]
    """
    check.at_least(1, in_features=in_features, out_features=out_features)

    def init(key):
        return {"kernel": normal_kernel(key, (in_features, out_features)), "bias": _zeros(out_features)}

    def apply(params, inputs):
        return mark_activation(_add_bias(inputs @ params["kernel"], params["bias"]))

    def squared_norm(inputs, errors):
        # The gradient is the outer product of input and error, and the error itself for the bias.
        return (jnp.sum(inputs**2, axis=1) + 1.0) * jnp.sum(errors**2, axis=1)

    def absolute_norm(inputs, errors):
        return (jnp.sum(jnp.abs(inputs), axis=1) + 1.0) * jnp.sum(jnp.abs(errors), axis=1)

    def weighted_sum(inputs, errors, weight):
        products = errors * weight[:, None]
        return {"kernel": jnp.matmul(inputs.T, products, precision="highest"), "bias": products.sum(axis=0)}

    def per_sample(inputs, errors):
        return {"kernel": inputs[:, :, None] * errors[:, None, :], "bias": errors}

    factored = functools.partial(
        FactoredLayer,
        is_outer_product=True,
        squared_norm=squared_norm,
        absolute_norm=absolute_norm,
        weighted_sum=weighted_sum,
        per_sample=per_sample,
    )
    return Layer(init=init, apply=apply, factored=factored)


def conv(
    in_channels: int,
    out_channels: int,
    window: tuple[int, int],
    *,
    strides: tuple[int, int] = (1, 1),
    padding: str = "SAME",
) -> Layer:
    """Convolution of images (b, height, width, in_channels) with a bias per output channel.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        window: (height, width) of the kernel.
        strides: steps along height and width.
        padding: "SAME" or "VALID".

    A sample's gradient is a sum over positions of input row times error. `jaxfl.models.kernels.norms` says how its
    norms are rounded up.

    Guarantees:
        - its factored form agrees with per-sample gradients.
        - no norm is below the gradient's where its terms cancel.

    Examples:
        >>> layer = conv(1, 8, (3, 3), strides=(2, 2))
        >>> layer.apply(layer.init(jax.random.key(0)), jnp.zeros((5, 28, 28, 1))).shape
        (5, 14, 14, 8)
    """
    check.at_least(1, in_channels=in_channels, out_channels=out_channels)
    geometry((max(window), max(window)), window, strides, padding)  # refuses bad windows, strides and paddings now
    shape = (*window, in_channels, out_channels)

    def of(inputs):
        return geometry((inputs.shape[1], inputs.shape[2]), window, strides, padding)

    def init(key):
        return {"kernel": normal_kernel(key, shape), "bias": _zeros(out_channels)}

    def apply(params, inputs):
        if inputs.ndim != 4 or inputs.shape[3] != in_channels:
            requirement = f"must be images (b, height, width, {in_channels})"
            raise ArgumentError("inputs", requirement, f"got shape {inputs.shape}", "Build the model for this shape.")
        return mark_activation(_add_bias(convolve(inputs, params["kernel"], of(inputs)), params["bias"]))

    def per_sample(inputs, errors):
        return {"kernel": kernels.norms.per_sample(inputs, errors, of(inputs)), "bias": errors.sum(axis=(1, 2))}

    def weighted_sum(inputs, errors, weight):
        products = errors * weight[:, None, None, None]
        return {"kernel": kernels.norms.summed(inputs, products, of(inputs)), "bias": products.sum(axis=(0, 1, 2))}

    factored = functools.partial(
        FactoredLayer,
        is_outer_product=False,
        squared_norm=lambda inputs, errors: kernels.norms.squared_norm(inputs, errors, of(inputs)),
        absolute_norm=lambda inputs, errors: kernels.norms.absolute_norm(inputs, errors, of(inputs)),
        weighted_sum=weighted_sum,
        per_sample=per_sample,
        kept=lambda inputs, errors: kernels.norms.kept(inputs, errors, of(inputs)),
    )
    return Layer(init=init, apply=apply, factored=factored, fills_caches=True)


def _zeros(count: int) -> Array:
    """An initial bias."""
    return jnp.zeros(count, jnp.float32)


def _add_bias(outputs: Array, bias: Array) -> Array:
    """outputs (..., features) + bias (features,), in float32, so that its gradient, a long sum, is in float32, too."""
    wide_outputs, wide_bias = normalization.at_least_float32(outputs), normalization.at_least_float32(bias)
    return (wide_outputs + wide_bias.reshape((1,) * (outputs.ndim - 1) + bias.shape)).astype(outputs.dtype)


def _scale_and_bias(channels: int) -> dict[str, Array]:
    """Make the initial scale and bias of a normalization."""
    return {"scale": jnp.ones(channels, jnp.float32), "bias": _zeros(channels)}
