"""The gradient to a convolution's kernel, on a CPU: a convolution in which the errors are the window.

It has two forms. "In place" moves no axis of the inputs or errors. Images of a group stand below one another, zeros
between them. Columns and channels of the inputs are one axis, along which the window of errors steps by whole columns:
each channel is a position, and the stride of the forward convolution only makes the steps longer. The other form
exchanges the axes of batch and channels.

Measured on a core (jax 0.10.2, 32 images), ms in place and in the other form: 32x32, 3x3, 16 to 16 channels 1.5 and
2.0; 16x16, 32 to 32 1.06 and 1.16; 8x8, 64 to 64 0.88 and 1.13; 32x32 with stride 2, 16 to 32 0.9 and 2.6. 14x14, 5x5,
32 to 64 takes 1.08 times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxfl.core.devices import varying_like
from jaxfl.core.tracing import suits_cpu
from jaxfl.core.types import Array
from jaxfl.models.kernels.windows import Geometry

# The errors of the whole batch are one window. Measured on a core with 1 MB of second-level cache: in groups of samples
# with 0.2 MB of errors it took 0.4 of the time of one group with 1.6 MB.
_CACHED_BYTES = 1 << 18
# In the form that exchanges batch and channels each group rearranges its inputs first, which is too slow for few
# channels: with 16 channels of 32x32 errors, groups of 16 samples took 2.5 ms and groups of 4 samples 5.5.
_MIN_GROUP_CHANNELS = 256  # samples times channels of a group
_MAX_GROUPS = 8  # bounds the size of the compiled program

# In place, neighboring columns of errors are treated as channels of one: at most this many channels, and columns.
_COLUMN_CHANNELS, _MAX_COLUMNS = 32, 4
# XLA's CPU backend hands convolutions with more channels in or out than this to a library that is fast in place; others
# run at a tenth of its speed. Older versions have no such library, or were not measured: there all count as slow.
_MOST_CHANNELS_OF_SLOW_PATH = 16
_FIRST_FAST_VERSION = (0, 10, 2)


def canonical(inputs: Array, kernel: Array, strides: tuple[int, int], padding, dilation: tuple[int, int] = (1, 1)):
    """NHWC x HWIO -> NHWC, the one layout with a fast path inside loop bodies on a CPU."""
    return lax.conv_general_dilated(
        inputs, kernel, strides, padding, rhs_dilation=dilation, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def suits_in_place(geom: Geometry, features: int) -> bool:
    """True if the kernel's gradient is computed in place, where strides cost nothing.

    Args:
        geom: the geometry of the forward convolution.
        features: its output channels.
    """
    is_wide = _columns_at_once(geom, features) * features > _MOST_CHANNELS_OF_SLOW_PATH
    return suits_cpu() and is_wide and jax.__version_info__ >= _FIRST_FAST_VERSION


def _columns_at_once(geom: Geometry, features: int) -> int:
    """Compute the number of neighboring columns of errors that `_in_place` treats as channels of one."""
    return max(1, min(_COLUMN_CHANNELS // features, _MAX_COLUMNS, geom.output_size[1]))


def kernel_gradient(inputs: Array, error: Array, geom: Geometry) -> Array:
    """`convolution.kernel_gradient`; on a CPU summed over groups of samples whose errors fit a core's cache.

    Guarantees:
        - equals lax.conv's, to float32 rounding, for every stride and padding.
    """
    batch, features = error.shape[0], error.shape[-1]
    columns, in_place = _columns_at_once(geom, features), suits_in_place(geom, features)
    size = batch
    if suits_cpu():
        fitting = _CACHED_BYTES // (error.size * error.dtype.itemsize // batch)
        fewest = 1 if in_place else _MIN_GROUP_CHANNELS // features
        num_groups = min(-(-batch // max(fitting, fewest, 1)), _MAX_GROUPS)
        size = -(-batch // num_groups)
    if in_place:
        # Padded outside the loop over groups. In the loop, fused with the change of shape, it took four times as long.
        images = _pad(inputs, geom, columns)
        products = _sum_over_groups(lambda x, e: _in_place(x, e, geom, columns), images, error, size)
        return _fold_columns(products, geom, inputs.shape[-1], columns)
    parts = [
        _channels_for_batch(inputs[start : start + size], error[start : start + size], geom)
        for start in range(0, batch, size)
    ]
    return jnp.transpose(functools.reduce(jnp.add, parts), (1, 2, 0, 3))


def _sum_over_groups(fn: Callable[[Array, Array], Array], inputs: Array, error: Array, size: int) -> Array:
    """The sum of `fn(inputs, error)` over groups of `size` samples, in a loop.

    The loop forces XLA to store the inputs. Unrolled, each group would compute the normalization before them anew.
    """
    whole = inputs.shape[0] // size
    groups = tuple(array[: whole * size].reshape(whole, size, *array.shape[1:]) for array in (inputs, error))
    if whole == 1:
        sums = fn(*(group[0] for group in groups))
    else:
        shape = jax.eval_shape(fn, *(group[0] for group in groups))
        zeros = varying_like(jnp.zeros(shape.shape, shape.dtype), inputs, error)
        sums, _ = lax.scan(lambda sums, group: (sums + fn(*group), None), zeros, groups)
    rest = inputs[whole * size :], error[whole * size :]
    return sums + fn(*rest) if rest[0].shape[0] else sums


def _pad(inputs: Array, geom: Geometry, columns: int) -> Array:
    """(b, rows, columns, in_channels): as many rows and columns as the windows of `_in_place` cover."""
    (height, width), (top, _), (left, _) = geom.input_size, *geom.padding
    rows, all_columns = _extent(geom, columns)
    pads = [(0, 0, 0), (top, rows - top - height, 0), (left, all_columns - left - width, 0), (0, 0, 0)]
    return lax.pad(inputs, jnp.zeros((), inputs.dtype), pads)


def _extent(geom: Geometry, columns: int) -> tuple[int, int]:
    """Rows, a multiple of the stride, and columns of an image with the zeros around it."""
    (out_height, out_width), (step_down, step_right) = geom.output_size, geom.strides
    span = (out_height - 1) * step_down + geom.window[0]
    num_columns = out_width + -out_width % columns
    return -(-span // step_down) * step_down, (num_columns - 1) * step_right + geom.window[1]


def _in_place(images: Array, error: Array, geom: Geometry, columns: int) -> Array:
    """(1, window height, (window width + (columns - 1) * stride) * in_channels, columns * out_channels)."""
    step_down, step_right = geom.strides
    batch, out_height, out_width, features = error.shape
    _, rows, width, channels = images.shape
    pitch = rows // step_down  # rows of errors from image to image
    window = jnp.pad(error, [(0, 0), (0, pitch - out_height), (0, -out_width % columns), (0, 0)])
    window = window.reshape(batch * pitch, window.shape[2] // columns, 1, columns * features)
    window = window[: (batch - 1) * pitch + out_height]
    planes = images.reshape(1, batch * rows, width * channels, 1)
    planes = planes[:, : (window.shape[0] - 1) * step_down + geom.window[0]]
    steps = (step_down, columns * step_right * channels)
    planes, window = lax.optimization_barrier((planes, window))
    return canonical(planes, window, (1, 1), "VALID", steps)


def _fold_columns(products: Array, geom: Geometry, channels: int, columns: int) -> Array:
    """Sum the contributions of all columns to each place of the window, (*geom.window, in_channels, out_channels)."""
    rows, width = geom.window
    products = products.reshape(rows, -1, channels, columns, products.shape[-1] // columns)
    starts = [column * geom.strides[1] for column in range(columns)]
    parts = [products[:, start : start + width, :, column] for column, start in enumerate(starts)]
    return functools.reduce(jnp.add, parts)


def _channels_for_batch(inputs: Array, error: Array, geom: Geometry) -> Array:
    """(in_channels, *geom.window, out_channels): channels play the batch, the batch plays the channels."""
    planes = lax.optimization_barrier(jnp.transpose(inputs, (3, 1, 2, 0)))
    window = jnp.transpose(error, (1, 2, 0, 3))
    if geom.strides != (1, 1):
        spread = [(0, 0, stride - 1) for stride in geom.strides]
        window = lax.pad(window, jnp.zeros((), window.dtype), [*spread, (0, 0, 0), (0, 0, 0)])
    window = lax.optimization_barrier(window)
    pads = []
    for size, taps, (low, _), extent in zip(geom.input_size, geom.window, geom.padding, window.shape[:2], strict=True):
        pads.append((low, taps + extent - 1 - size - low))
    # With strides the last rows and columns of the input may lie beyond every window: leave them out.
    (_, bottom), (_, right) = pads
    planes = planes[:, : planes.shape[1] + min(bottom, 0), : planes.shape[2] + min(right, 0)]
    return canonical(planes, window, (1, 1), [(low, max(high, 0)) for low, high in pads])
