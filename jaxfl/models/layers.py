"""Layers as pure functions, each with the factored form of its gradient where it has parameters.

A layer is a `Layer`; a model is an ordered list of named ones (`jaxfl.models.classification`). The factored form
(`jaxfl.core.FactoredLayer`) gives norms and weighted sums of per-sample gradients from the layer's inputs and the
errors at its outputs, without forming a gradient for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.types import Array, FactoredLayer, PyTree
from jaxfl.models.convolution import convolve, kernel_gradient
from jaxfl.models.pooling import max_pool as pool
from jaxfl.models.windows import geometry, patches

# LeCun normal (truncated) kernels and zero biases: the default of flax.
_initial_kernel = jax.nn.initializers.lecun_normal()

# Bytes that the norms of a convolution may hold at a time; larger batches go through in groups of samples.
_GROUP_BYTES = 1 << 24

_ROUNDOFF = 2.0**-24  # half the distance between neighboring float32 numbers at 1


class Layer(NamedTuple):
    """One layer of a sequential model.

    Attributes:
        init: key -> parameters, for most {"kernel": ..., "bias": ...}; None for a layer without parameters.
        apply: (params or None, inputs (b, ...)) -> outputs (b, ...).
        factored: (name, input_is_sample) -> FactoredLayer; None for a layer without parameters or without such a form.
        convolutional: whether one node fills a CPU's caches, so that nodes are best run one after the other there.
    """

    init: Callable[[Array], PyTree] | None
    apply: Callable[[PyTree, Array], Array]
    factored: Callable[[str, bool], FactoredLayer] | None = None
    convolutional: bool = False


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
    """Each sample in another shape; adds a missing channel axis or flattens.

    Example:
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
    """Maximum over windows that do not overlap; see `jaxfl.models.pooling`."""
    return Layer(init=None, apply=lambda params, inputs: pool(inputs, window))


def dense(in_features: int, out_features: int) -> Layer:
    """inputs (b, in_features) @ kernel + bias.

    Args:
        in_features: size of the input.
        out_features: size of the output.

    Guarantees:
        - its factored form agrees with per-sample gradients and never forms them, `per_sample` apart.

    Example:
        >>> layer = dense(3, 2)
        >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.array([0.0, 1.0])}
        >>> layer.apply(params, jnp.ones((1, 3))).tolist()
        [[3.0, 4.0]]
        >>> layer.factored("out", True).squared_norm(jnp.ones((1, 3)), jnp.ones((1, 2))).tolist()  # 3 * 2 + 2
        [8.0]
    """
    check.at_least(1, in_features=in_features, out_features=out_features)

    def init(key):
        return {"kernel": _initial_kernel(key, (in_features, out_features), jnp.float32), "bias": _zeros(out_features)}

    def apply(params, inputs):
        return inputs @ params["kernel"] + params["bias"][None, :]

    def squared_norm(inputs, errors):
        # The gradient is the outer product of input and error, and the error itself for the bias.
        return (jnp.sum(inputs**2, axis=1) + 1.0) * jnp.sum(errors**2, axis=1)

    def absolute_norm(inputs, errors):
        return (jnp.sum(jnp.abs(inputs), axis=1) + 1.0) * jnp.sum(jnp.abs(errors), axis=1)

    def weighted_sum(inputs, errors, weight):
        weighted = errors * weight[:, None]
        return {"kernel": inputs.T @ weighted, "bias": weighted.sum(axis=0)}

    def per_sample(inputs, errors):
        return {"kernel": inputs[:, :, None] * errors[:, None, :], "bias": errors}

    def factored(name, input_is_sample):
        return FactoredLayer(
            name=name,
            input_is_sample=input_is_sample,
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

    A sample's gradient is a sum over positions of input row times error. Where its terms cancel, float32 knows it only
    to rounding errors in proportion to what it would be without cancellation, and of two ways of summing neither's norm
    bounds the other's. So norms are rounded up by what such errors can be: sqrt(number of roundings) times 2^-24 of
    that proportion (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
    Comput. 41(5)); measured errors stay below a third of it. Without cancellation this adds less than 1e-4 of the norm.

    Guarantees:
        - its factored form agrees with per-sample gradients.
        - no norm is below the gradient's where its terms cancel.

    Example:
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
        return {"kernel": _initial_kernel(key, shape, jnp.float32), "bias": _zeros(out_channels)}

    def apply(params, inputs):
        if inputs.ndim != 4 or inputs.shape[3] != in_channels:
            requirement = f"must be images (b, height, width, {in_channels})"
            raise ArgumentError("inputs", requirement, f"got shape {inputs.shape}", "Build the model for this shape.")
        return convolve(inputs, params["kernel"], of(inputs)) + params["bias"][None, None, None, :]

    def per_sample(inputs, errors):
        rows, columns = patches(inputs, of(inputs)), _positions(errors)
        kernel = jnp.einsum("bpk,bpo->bko", rows, columns, precision="highest")
        return {"kernel": kernel.reshape(-1, *shape), "bias": columns.sum(axis=1)}

    def squared_norm(inputs, errors):
        num_positions, taps = math.prod(errors.shape[1:3]), math.prod(shape[:3])
        # |rows^T errors|^2 = sum over pairs of positions of (row . row')(error . error'); whichever multiplies less.
        use_gram = num_positions * (taps + out_channels) < taps * out_channels
        held = num_positions**2 * 2 if use_gram else taps * out_channels

        def of_group(group_inputs, group_errors):
            rows, columns = patches(group_inputs, of(inputs)), _positions(group_errors)
            # The norm of each position's term, the bias included, summed over positions.
            terms = jnp.sqrt((jnp.sum(rows**2, axis=2) + 1.0) * jnp.sum(columns**2, axis=2)).sum(axis=1)
            if use_gram:
                alike = jnp.einsum("bpk,bqk->bpq", rows, rows, precision="highest")
                alike = alike * jnp.einsum("bpo,bqo->bpq", columns, columns, precision="highest")
                roundings = taps + out_channels + num_positions**2
                error = jax.lax.stop_gradient(math.sqrt(roundings) * _ROUNDOFF * terms**2)
                kernel_part = jnp.maximum(alike.sum(axis=(1, 2)), 0.0) + error
            else:
                kernel = jnp.einsum("bpk,bpo->bko", rows, columns, precision="highest")
                kernel_part = jnp.sum(kernel**2, axis=(1, 2))
            squared = kernel_part + jnp.sum(columns.sum(axis=1) ** 2, axis=1)
            error = _summation_error(terms, num_positions)
            return squared + error * (2.0 * jnp.sqrt(jax.lax.stop_gradient(squared)) + error)  # (norm + error)^2

        return _in_groups(of_group, inputs, errors, 4 * (num_positions * taps + held))

    def absolute_norm(inputs, errors):
        geom = of(inputs)
        (rows, columns), (down, right) = geom.output_size, geom.strides
        num_positions, taps = rows * columns, math.prod(shape[:3])
        across, tall = shape[1] * in_channels, inputs.shape[1] + sum(geom.padding[0])

        def of_group(group_inputs, group_errors):
            # Channels first, the window's columns side by side, and one product for each of its rows. On a CPU, where
            # patches of few channels are slow to write, this took 0.4 to 0.6 of the time of products over patches for
            # windows of 3x3 and 5x5 (but 1.3 from 1 channel to 32, and 1.2 for 1x1).
            planes = jnp.pad(jnp.moveaxis(group_inputs, 3, 1), [(0, 0), (0, 0), *geom.padding])
            side_by_side = [planes[..., _every(right, j, columns)] for j in range(shape[1])]
            wide = jnp.concatenate(side_by_side, axis=1)  # (b, across, tall, columns)
            error = jnp.moveaxis(group_errors, 3, 1)  # (b, out_channels, rows, columns)
            norm = jnp.abs(error.sum(axis=(2, 3))).sum(axis=1)  # of the bias
            for i in range(shape[0]):
                kernel = jnp.einsum("bkhw,bohw->bko", wide[:, :, _every(down, i, rows)], error, precision="highest")
                norm = norm + jnp.abs(kernel).sum(axis=(1, 2))
            size = jnp.abs(wide).sum(axis=1)
            size = sum((size[:, _every(down, i, rows)] for i in range(shape[0])), start=1.0)
            terms = jnp.sum(size * jnp.abs(error).sum(axis=1), axis=(1, 2))
            return norm + _summation_error(terms, num_positions)

        held = across * (tall + rows) * columns + out_channels * num_positions + taps * out_channels
        return _in_groups(of_group, inputs, errors, 4 * held)

    def weighted_sum(inputs, errors, weight):
        weighted = errors * weight[:, None, None, None]
        return {"kernel": kernel_gradient(inputs, weighted, of(inputs)), "bias": weighted.sum(axis=(0, 1, 2))}

    def factored(name, input_is_sample):
        return FactoredLayer(
            name=name,
            input_is_sample=input_is_sample,
            is_outer_product=False,
            squared_norm=squared_norm,
            absolute_norm=absolute_norm,
            weighted_sum=weighted_sum,
            per_sample=per_sample,
        )

    return Layer(init=init, apply=apply, factored=factored, convolutional=True)


def _zeros(count: int) -> Array:
    """An initial bias."""
    return jnp.zeros(count, jnp.float32)


def _every(stride: int, start: int, count: int) -> slice:
    """`count` indices from `start` on, `stride` apart."""
    return slice(start, start + (count - 1) * stride + 1, stride)


def _positions(errors: Array) -> Array:
    """(b, height, width, channels) -> (b, positions, channels)."""
    return errors.reshape(errors.shape[0], errors.shape[1] * errors.shape[2], errors.shape[3])


def _summation_error(terms: Array, num_positions: int) -> Array:
    """By how much two float32 sums over positions can differ in norm, given the sum of the terms' norms (b,)."""
    # Measured on a CPU, two sums together are off by up to a third of this. No part of the derivative.
    return jax.lax.stop_gradient(math.sqrt(num_positions) * _ROUNDOFF * terms)


def _in_groups(fn: Callable[[Array, Array], Array], inputs: Array, errors: Array, sample_bytes: int) -> Array:
    """`fn` (inputs, errors) -> (b,), on groups of samples that hold at most `_GROUP_BYTES` when the batch would not."""
    group = max(1, _GROUP_BYTES // sample_bytes)
    if group >= inputs.shape[0]:
        return fn(inputs, errors)
    one_sample = lambda pair: fn(pair[0][None], pair[1][None])[0]  # noqa: E731
    return jax.lax.map(one_sample, (inputs, errors), batch_size=group)
