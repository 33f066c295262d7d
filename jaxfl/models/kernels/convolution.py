"""Convolution that stays fast with a kernel of its own at every node, also inside loops.

Two things make the obvious `jax.vmap(lax.conv_general_dilated)` slow on a CPU. Mapped over nodes that each have their
own kernel, it becomes one grouped convolution, which runs at a fraction of the machine's speed. And the compiler has a
fast path for NHWC x HWIO -> NHWC only: outside loops it transposes other layouts into that one, in the body of a loop
(`lax.scan` over rounds, `lax.map` over nodes) it falls to a naive kernel, and both gradients that automatic
differentiation makes are in other layouts (https://github.com/jax-ml/jax/issues/12868).

This module therefore works as follows:
- both gradients are written as NHWC x HWIO -> NHWC convolutions themselves,
- a mapped axis is folded into the batch where the kernel is shared, into the output channels where the input is shared,
- where neither is shared, it becomes what `jaxfl.models.kernels.forms` says: on a CPU batched matrix products.

On a GPU the gradient to the kernel is the library's own.

Reverse-mode derivatives of every order work, under any nesting of `jax.vmap`; forward mode (`jax.jvp`) does not.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxfl.core.tracing import suits_cpu
from jaxfl.core.types import Array
from jaxfl.models.kernels import error_windows, forms
from jaxfl.models.kernels.error_windows import canonical
from jaxfl.models.kernels.forms import suits_gpu
from jaxfl.models.kernels.windows import Geometry

# Several neighboring columns are computed as channels of one, at most this many channels. Measured on a core, 32
# images, share of the time taken: 32x32, 3x3, 16 to 16 channels 0.68, 12 to 12 0.42, 3 to 16 0.24; 4 to 8 of 16x16
# 0.20; 28x28, 5x5, 1 to 32 0.88. With twice as many channels, the zeros of the wider windows cost more than they save.
_COLUMN_CHANNELS, _COLUMN_CHANNELS_OF_THIN_INPUTS = 32, 64
_THIN_INPUTS = 4  # channels
_MAX_COLUMNS = 4
# Odd numbers of channels get one more, of zeros: 7 to 7 of 32x32 then took 0.83 ms, not 2.47 (a core, 32 images), 13 to
# 13 of 16x16 half the time, 31 to 31 of 8x8 0.6. Up to 3 channels, and for gradients to kernels, it saves nothing.
_FEWEST_EVEN = 5


def _columns_at_once(geom: Geometry, in_channels: int, out_channels: int) -> int:
    """Compute the number of neighboring output columns that `_by_columns` should treat as channels of one."""
    if geom.strides != (1, 1) or not suits_cpu():
        return 1
    most_channels = _COLUMN_CHANNELS_OF_THIN_INPUTS if in_channels <= _THIN_INPUTS else _COLUMN_CHANNELS
    return max(1, min(most_channels // out_channels, _MAX_COLUMNS, geom.output_size[1]))


def _by_columns(inputs: Array, kernel: Array, geom: Geometry, columns: int) -> Array:
    """Compute `canonical` of stride 1 with horizontal stride `columns`: shifted copies of the kernel side by side."""
    height, width, channels, features = kernel.shape
    copies = [jnp.pad(kernel, [(0, 0), (column, columns - 1 - column), (0, 0), (0, 0)]) for column in range(columns)]
    wide = jnp.stack(copies, axis=3).reshape(height, width + columns - 1, channels, columns * features)
    groups = -(-geom.output_size[1] // columns)
    (top, bottom), (left, right) = geom.padding
    padding = ((top, bottom), (left, right + groups * columns - geom.output_size[1]))
    out = canonical(inputs, lax.optimization_barrier(wide), (1, columns), padding)
    out = out.reshape(inputs.shape[0], geom.output_size[0], groups * columns, features)
    return out[:, :, : geom.output_size[1]]


def _even(channels: int) -> int:
    """Compute the number of channels that the compiler should see on a CPU."""
    return channels + channels % 2 if channels >= _FEWEST_EVEN and suits_cpu() else channels


def _convolve_one(inputs: Array, kernel: Array, geom: Geometry) -> Array:
    """`canonical` in the form that suits the numbers of channels best."""
    channels, features = kernel.shape[2:]
    more_channels, more_features = _even(channels) - channels, _even(features) - features
    if more_channels:
        inputs = jnp.pad(inputs, [(0, 0), (0, 0), (0, 0), (0, more_channels)])
    if more_channels or more_features:
        kernel = jnp.pad(kernel, [(0, 0), (0, 0), (0, more_channels), (0, more_features)])
    columns = _columns_at_once(geom, *kernel.shape[2:])
    if columns > 1:
        outputs = _by_columns(inputs, kernel, geom, columns)
    else:
        outputs = canonical(inputs, kernel, geom.strides, geom.padding)
    return outputs[..., :features] if more_features else outputs


# A user context is part of JAX's cache keys: no function that was traced with one answer serves for the other.
_bfloat16_kernel_gradients = jax.make_user_context(False)


def bfloat16_kernel_gradients() -> AbstractContextManager[None]:
    """A context in which `convolve` is one whose gradient to the kernel is a product of bfloat16, summed in float32."""
    return _bfloat16_kernel_gradients(True)


def convolve(inputs: Array, kernel: Array, geom: Geometry) -> Array:
    """Convolution (cross-correlation, as every network library means it).

    Args:
        inputs: (b, height, width, in_channels), float32.
        kernel: (window height, window width, in_channels, out_channels), float32.
        geom: the static geometry; its input size and window must be those of the arrays.

    Returns:
        (b, *geom.output_size, out_channels), float32.

    Guarantees:
        - equals lax.conv in value and in both gradients, to float32 rounding, for every stride and padding.
        - mapped over nodes it makes no grouped convolution on a CPU.
        - its gradients are convolutions in the canonical layout.

    Examples:
        >>> from jaxfl.models.kernels.windows import geometry
        >>> image, kernel = jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1))
        >>> convolve(image, kernel, geometry((3, 3), (3, 3)))[0, :, :, 0].tolist()
        [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
    """
    return cast(Array, _convolve(inputs, kernel, geom, bool(_bfloat16_kernel_gradients.value)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(inputs, kernel, geom, is_narrow):
    return _mapped_convolve(geom)(inputs, kernel)


def _mapped_convolve(geom: Geometry):
    """`canonical` with a rule for a mapped axis; made anew for each call since the geometry is static."""

    @custom_vmap
    def call(inputs, kernel):
        return _convolve_one(inputs, kernel, geom)

    @call.def_vmap
    def rule(axis_size, in_batched, inputs, kernel):
        inputs_mapped, kernel_mapped = in_batched
        if inputs_mapped and kernel_mapped:
            return forms.forward(inputs, kernel, geom), True
        if inputs_mapped:  # a shared kernel: the mapped axis joins the batch
            out = convolve(_join_batch(inputs), kernel, geom)
            return out.reshape(*inputs.shape[:2], *out.shape[1:]), True
        # shared inputs: the mapped axis joins the output channels
        height, width, channels, features = kernel.shape[1:]
        wide = jnp.moveaxis(kernel, 0, 3).reshape(height, width, channels, axis_size * features)
        out = convolve(inputs, wide, geom)
        return jnp.moveaxis(out.reshape(*out.shape[:-1], axis_size, features), -2, 0), True

    return call


def _join_batch(array: Array) -> Array:
    """(n, b, ...) -> (n * b, ...)."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _convolve_forward(inputs, kernel, geom, is_narrow):
    return _convolve(inputs, kernel, geom, is_narrow), (inputs, kernel)


def _convolve_backward(geom, is_narrow, residuals, error):
    inputs, kernel = residuals
    factors = (inputs, error)
    if is_narrow:
        factors = tuple(factor.astype(jnp.bfloat16) for factor in factors)
        if not suits_gpu():  # others are no faster at it, and round no sum
            factors = tuple(factor.astype(kernel.dtype) for factor in factors)
    return input_gradient(error, kernel, geom), cast(Array, kernel_gradient(*factors, geom)).astype(kernel.dtype)


_convolve.defvjp(_convolve_forward, _convolve_backward)


def input_gradient(error: Array, kernel: Array, geom: Geometry) -> Array:
    """Compute the gradient with respect to `convolve`'s inputs: a convolution of the error with the flipped kernel.

    Args:
        error: (b, *geom.output_size, out_channels), float32.
        kernel: (window height, window width, in_channels, out_channels), float32.
        geom: the geometry of the forward convolution.

    Returns:
        (b, *geom.input_size, in_channels), float32.
    """
    mirror = lax.optimization_barrier(jnp.swapaxes(kernel[::-1, ::-1], 2, 3))
    pads = []
    for size, window, stride, (low, _), out in zip(
        geom.input_size, geom.window, geom.strides, geom.padding, geom.output_size, strict=True
    ):
        before = window - 1 - low
        pads.append((before, size + window - 1 - before - ((out - 1) * stride + 1)))
    if geom.strides == (1, 1) and min(map(min, pads)) >= 0:
        return convolve(error, mirror, Geometry(geom.output_size, geom.window, (1, 1), (pads[0], pads[1])))
    if suits_gpu():
        return forms.strided_input_gradient(error, kernel, geom)
    if suits_cpu() and max(geom.strides) > 1:
        return _input_gradient_by_rows(error, kernel, geom)
    spread = lax.pad(
        error,
        jnp.zeros((), error.dtype),
        [
            (0, 0, 0),
            *[(low, high, stride - 1) for (low, high), stride in zip(pads, geom.strides, strict=True)],
            (0, 0, 0),
        ],
    )
    spread = lax.optimization_barrier(spread)
    return convolve(spread, mirror, Geometry((spread.shape[1], spread.shape[2]), geom.window, (1, 1), ((0, 0), (0, 0))))


def _input_gradient_by_rows(error: Array, kernel: Array, geom: Geometry) -> Array:
    """`input_gradient` with strides: rows of the inputs that are a stride apart are one convolution of the errors.

    A stride's worth of neighboring columns are treated as channels of one column.
    """
    (height, width), (rows, columns), (step_down, step_right) = geom.input_size, geom.window, geom.strides
    (top, _), (left, _) = geom.padding
    batch, out_height, out_width, features = error.shape
    channels, taps_right = kernel.shape[2], -(-columns // step_right)
    size = -(-(top + height) // step_down), -(-(left + width) // step_right)
    wide = jnp.pad(kernel, [(0, 0), (0, taps_right * step_right - columns), (0, 0), (0, 0)])
    wide = wide.reshape(rows, taps_right, step_right, channels, features)[:, ::-1]
    wide = wide.transpose(0, 1, 4, 2, 3).reshape(rows, taps_right, features, step_right * channels)
    parts = []
    for first in range(step_down):
        taps = wide[first::step_down][::-1]
        if not taps.shape[0]:  # no window covers these rows
            parts.append(jnp.zeros((batch, *size, step_right * channels), error.dtype))
            continue
        below, right = size[0] - out_height, size[1] - out_width  # negative: some errors reach no row of the inputs
        crop = error[:, : out_height + min(below, 0), : out_width + min(right, 0)]
        pads = (taps.shape[0] - 1, max(below, 0)), (taps_right - 1, max(right, 0))
        part = Geometry((crop.shape[1], crop.shape[2]), (taps.shape[0], taps_right), (1, 1), pads)
        parts.append(convolve(crop, lax.optimization_barrier(taps), part))
    whole = jnp.stack(parts, axis=2).reshape(batch, size[0] * step_down, size[1] * step_right, channels)
    return whole[:, top : top + height, left : left + width]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def kernel_gradient(inputs: Array, error: Array, geom: Geometry) -> Array:
    """Compute the gradient with respect to `convolve`'s kernel, summed over the batch.

    Args:
        inputs: (b, *geom.input_size, in_channels), float32.
        error: (b, *geom.output_size, out_channels), float32.
        geom: the geometry of the forward convolution.

    Returns:
        (window height, window width, in_channels, out_channels), float32.
    """
    return _mapped_kernel_gradient(geom)(inputs, error)


def _kernel_gradient_one(inputs, error, geom):
    if suits_gpu():  # the canonical one would slide the whole error as one window there, too
        kernel = jax.ShapeDtypeStruct((*geom.window, inputs.shape[-1], error.shape[-1]), inputs.dtype)
        return jax.linear_transpose(lambda kernel: canonical(inputs, kernel, geom.strides, geom.padding), kernel)(
            error
        )[0]
    return error_windows.kernel_gradient(inputs, error, geom)


def _mapped_kernel_gradient(geom):
    @custom_vmap
    def call(inputs, error):
        return _kernel_gradient_one(inputs, error, geom)

    @call.def_vmap
    def rule(axis_size, in_batched, inputs, error):
        if not in_batched[0]:
            inputs = jnp.broadcast_to(inputs, (axis_size, *inputs.shape))
        if not in_batched[1]:
            error = jnp.broadcast_to(error, (axis_size, *error.shape))
        return forms.kernel_gradient(inputs, error, geom), True

    return call


def _kernel_gradient_forward(inputs, error, geom):
    return kernel_gradient(inputs, error, geom), (inputs, error)


def _kernel_gradient_backward(geom, residuals, direction):
    inputs, error = residuals
    return input_gradient(error, direction, geom), convolve(inputs, direction, geom)


kernel_gradient.defvjp(_kernel_gradient_forward, _kernel_gradient_backward)
