"""Convolution with own inputs and an own kernel at every node: its products in two forms, and the choice between them.

- "patches" writes the window around every position as a row, then multiplies batches of matrices. A 3x3 window reads
  and writes every input nine times.
- "grouped" puts the node axis beside the channels, each node a feature group. The library reads every number once.
  Kernels change their layout.

`form` chooses for each product, by `_GPU_THRESHOLDS`. CPUs, where grouped convolutions are slow, and TPUs take patches.

Memory traffic of two basic blocks with batch normalization in a training step at 32 nodes, batch 32, float32: GB with
patches and with grouped, from the program compiled for an H200, not run (jax 0.11.2): 32x32x16 16.7 and 5.2, 16x16x32
8.2 and 2.6, 8x8x64 4.5 and 1.7. At 8 nodes, one library call for each node moved as much as grouped (1.25 and 1.29 for
32x32x16), but with 198 kernels instead of 83.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxfl.core.platform import platform
from jaxfl.core.tracing import is_canonical
from jaxfl.core.types import Array
from jaxfl.models.kernels.windows import Geometry, patches

FORWARD, KERNEL_GRADIENT = "forward", "kernel_gradient"
PATCHES, GROUPED = "patches", "grouped"

# A GPU takes "grouped" for a product with at least this number of positions of a node's batch for each channel. Below,
# the changed layout of kernels costs more than patches do. 0 means always, math.inf never. Timed on an H200 (jax
# 0.11.2, cuDNN 9.19), 32 nodes, batch 32, 3x3, ms with patches and with grouped, float32 then bfloat16:
#   positions a channel     forward                       kernel gradient
#   2048 (32x32x16)         0.85 0.18    0.77 0.11        0.86 0.40    0.77 0.13
#   256  (16x16x32)         0.29 0.10    0.25 0.07        0.29 0.24    0.25 0.07
#   32   (8x8x64)           0.12 0.08    0.09 0.09        0.13 0.11    0.09 0.08
#   16   (8x8x128)          0.21 0.13    0.16 0.07        0.24 0.19    0.15 0.09
#   8    (8x8x256)          0.47 0.35    0.31 0.19        0.56 0.75    0.31 0.67
#   1    (4x4x512)          0.35 0.59    0.21 0.60        0.48 0.80    0.22 0.55
# FORWARD's 4 lies between 8 and 1 positions; 2 to 7 were not measured.
_GPU_THRESHOLDS = {FORWARD: 4.0, KERNEL_GRADIENT: 16.0}
# Patches for kernel gradients of 3 channels, which cuDNN computes in one call for each node, were slower all the same:
# BlazeFL's CNN (100 nodes, batch 50, 5x5 windows of 32x32x3) took 413 ms a round with them and 238 without.


def suits_gpu() -> bool:
    """True if a layer should take the form that is meant for a GPU."""
    return platform() == "gpu" and not is_canonical()


def form(product: str, positions: int, channels: int) -> str:
    """Choose the form of a product, "patches" or "grouped".

    Args:
        product: "forward" or "kernel_gradient". The gradient to the inputs is a forward product of the errors.
        positions: batch times pixels of the forward product's outputs, at one node.
        channels: channels of these outputs.

    Examples:
        >>> from jaxfl.core.platform import tracing_for
        >>> with tracing_for("gpu"):
        ...     form("forward", 32 * 32 * 32, 16), form("forward", 32 * 2 * 2, 512)
        ('grouped', 'patches')
    """
    return GROUPED if suits_gpu() and positions >= _GPU_THRESHOLDS[product] * channels else PATCHES


def forward(inputs: Array, kernel: Array, geom: Geometry) -> Array:
    """Each node's inputs convolved with its kernel.

    Args:
        inputs: (n, b, *geom.input_size, in_channels), float32 or bfloat16.
        kernel: (n, *geom.window, in_channels, out_channels), of the same type.
        geom: the static geometry.

    Returns:
        (n, b, *geom.output_size, out_channels), of the same type.

    Guarantees:
        - equals lax.conv of every node in every form.
    """
    if form(FORWARD, inputs.shape[1] * math.prod(geom.output_size), kernel.shape[-1]) == GROUPED:
        return _group_convolution(inputs, kernel, geom)
    rows = _rows(inputs, geom)
    flat_kernel = kernel.reshape(kernel.shape[0], rows.shape[-1], kernel.shape[-1])
    return jnp.matmul(rows, flat_kernel).reshape(*inputs.shape[:2], *geom.output_size, kernel.shape[-1])


def strided_input_gradient(error: Array, kernel: Array, geom: Geometry) -> Array:
    """One node's gradient to the inputs of a convolution with strides: patches of gradients, added up.

    The form is the same for one node and mapped over nodes. XLA has no grouped form: it would pad errors with zeros.

    Args:
        error: (b, *geom.output_size, out_channels), float32 or bfloat16.
        kernel: (*geom.window, in_channels, out_channels), of the same type.
        geom: the geometry of the forward convolution.

    Returns:
        (b, *geom.input_size, in_channels), of the same type.
    """
    batch, *size, features = error.shape
    flat_kernel = kernel.reshape(math.prod(kernel.shape[:-1]), features)
    rows = error.reshape(batch, math.prod(size), features) @ flat_kernel.T
    inputs = jax.ShapeDtypeStruct((batch, *geom.input_size, kernel.shape[-2]), error.dtype)
    return jax.linear_transpose(lambda inputs: patches(inputs, geom), inputs)(rows)[0]


def kernel_gradient(inputs: Array, error: Array, geom: Geometry) -> Array:
    """Each node's gradient to its kernel, summed over its batch.

    Args:
        inputs: (n, b, *geom.input_size, in_channels), float32 or bfloat16.
        error: (n, b, *geom.output_size, out_channels), of the same type.
        geom: the geometry of the forward convolution.

    Returns:
        (n, *geom.window, in_channels, out_channels), of the same type.

    Guarantees:
        - equals lax.conv of every node in every form.
    """
    shape = (inputs.shape[0], *geom.window, inputs.shape[-1], error.shape[-1])
    if form(KERNEL_GRADIENT, error.shape[1] * math.prod(geom.output_size), error.shape[-1]) == GROUPED:
        kernel = jax.ShapeDtypeStruct(shape, inputs.dtype)
        # XLA recognizes this transpose and calls cuDNN's backward filter. Channels in place of the batch, as on a CPU,
        # would make the errors one large window.
        return jax.linear_transpose(lambda kernel: _group_convolution(inputs, kernel, geom), kernel)(error)[0]
    rows = _rows(inputs, geom)
    flat_error = error.reshape(error.shape[0], math.prod(error.shape[1:-1]), error.shape[-1])
    return jnp.matmul(jnp.swapaxes(rows, -1, -2), flat_error).reshape(shape)


def _rows(inputs: Array, geom: Geometry) -> Array:
    """inputs (n, b, H, W, c) -> (n, b * positions, taps * c)."""
    rows = patches(inputs, geom)
    return rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2], rows.shape[3])


def _group_convolution(inputs: Array, kernel: Array, geom: Geometry) -> Array:
    """inputs (n, b, H, W, c), kernel (n, h, w, c, o) -> (n, b, H', W', o)."""
    nodes, features = kernel.shape[0], kernel.shape[-1]
    outputs = lax.conv_general_dilated(
        _beside_channels(inputs),
        _beside_channels(kernel),
        geom.strides,
        geom.padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=nodes,
    )
    return jnp.moveaxis(outputs.reshape(*outputs.shape[:-1], nodes, features), -2, 0)


def _beside_channels(array: Array) -> Array:
    """(n, ..., channels) -> (..., n * channels)."""
    channels_last = jnp.moveaxis(array, 0, -2)
    return channels_last.reshape(*channels_last.shape[:-2], channels_last.shape[-2] * channels_last.shape[-1])
