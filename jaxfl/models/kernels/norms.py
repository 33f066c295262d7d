"""Norms of each sample's gradient to a convolution's kernel and bias.

A sample's gradient is a sum over positions of the window's content times the error. `position_sums` says how norms are
rounded up where these terms cancel; the bound needs the norm of each term, which follows from sums over windows and not
from the windows themselves.

On a CPU the samples' kernel gradients are computed one after the other, each in the layout that is fast there: for 32
samples of 14x14, windows of 5x5 and 32 to 64 channels this took 0.3 of the time of one batched product over patches,
and as long as the gradient of the batch. If a batch's gradients are small, `kept` keeps them until their weights are
known: for 75 samples a clipped sum took 10.6 ms, not 17.5 (a core; without clipping 8.1). Otherwise only their norms
are kept. Other platforms compute the batched product, in groups of samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from jaxfl.core.tracing import suits_cpu
from jaxfl.core.types import Array
from jaxfl.models.kernels import position_sums
from jaxfl.models.kernels.convolution import kernel_gradient
from jaxfl.models.kernels.windows import Geometry, patches


def squared_norm(inputs: Array, errors: Array, geom: Geometry) -> Array:
    """Squared L2 norm of each sample's gradient, bias included.

    Args:
        inputs: (b, *geom.input_size, in_channels), float32.
        errors: (b, *geom.output_size, out_channels), float32.
        geom: the static geometry of the convolution.

    Returns:
        (b,), float32.

    Guarantees:
        - no norm is below the gradient's where its terms cancel.
    """
    sizes = (math.prod(geom.output_size), math.prod(geom.window) * inputs.shape[3], errors.shape[3])
    if position_sums.uses_gram(*sizes):
        bytes_of_one = 4 * sizes[0] * sizes[1] + position_sums.sample_bytes(*sizes)
        by_positions = lambda x, e: position_sums.squared_norm(patches(x, geom), positions(e))  # noqa: E731
        return position_sums.in_groups(by_positions, inputs, errors, bytes_of_one)
    return _upper_bound(_of_kernels(lambda kernel: jnp.sum(kernel**2), inputs, errors, geom), inputs, errors, geom)


def kept(inputs: Array, errors: Array, geom: Geometry) -> tuple[Array, dict[str, Array]] | None:
    """`squared_norm` and each sample's gradient, zeros where the norm is not finite, if a CPU can keep a batch of them.

    Args:
        inputs, errors, geom: as for `squared_norm`.

    Returns:
        ((b,), {"kernel": (b, *geom.window, in_channels, out_channels), "bias": (b, out_channels)}), float32; None on
        other platforms, if they take more than 16 MiB, and if pairs of positions give the norms.

    Guarantees:
        - a clipped sum of kept gradients equals that of gradients computed twice.
    """
    row_size = math.prod(geom.window) * inputs.shape[3]
    sizes = (math.prod(geom.output_size), row_size, errors.shape[3])
    too_large = 4 * inputs.shape[0] * row_size * errors.shape[3] > position_sums.GROUP_BYTES
    if not suits_cpu() or too_large or position_sums.uses_gram(*sizes):
        return None

    def of_sample(pair):
        kernel = cast(Array, kernel_gradient(pair[0][None], pair[1][None], geom))
        square = jnp.sum(kernel**2)
        # Flat, so that the reordering of axes fits a core's cache: reordering all kernels at once took longer than
        # summing them.
        return square, jnp.where(jnp.isfinite(square), kernel, 0.0).reshape(-1)

    squares, flat = jax.lax.map(of_sample, (inputs, errors))
    kernels = flat.reshape(inputs.shape[0], *geom.window, inputs.shape[3], errors.shape[3])
    squares = _upper_bound(squares, inputs, errors, geom)
    bias = jnp.where(jnp.isfinite(squares)[:, None], errors.sum(axis=(1, 2)), 0.0)
    return squares, {"kernel": kernels, "bias": bias}


def _upper_bound(kernel_part: Array, inputs: Array, errors: Array, geom: Geometry) -> Array:
    """Squared norms (b,) from the kernels' squared norms: bias included, and rounded up by the rounding errors."""
    content = _window_sums(jnp.sum(inputs**2, axis=3), geom)
    terms = jnp.sqrt((content + 1.0) * jnp.sum(errors**2, axis=3)).sum(axis=(1, 2))
    squares = kernel_part + jnp.sum(errors.sum(axis=(1, 2)) ** 2, axis=1)
    error = position_sums.summation_error(terms, math.prod(geom.output_size))
    return squares + error * (2.0 * jnp.sqrt(jax.lax.stop_gradient(squares)) + error)  # (norm + error)^2


def absolute_norm(inputs: Array, errors: Array, geom: Geometry) -> Array:
    """L1 norm of each sample's gradient, bias included, (b,); arguments and guarantee as for `squared_norm`."""
    content = _window_sums(jnp.abs(inputs).sum(axis=3), geom)
    terms = jnp.sum((content + 1.0) * jnp.abs(errors).sum(axis=3), axis=(1, 2))
    kernel_part = _of_kernels(lambda kernel: jnp.sum(jnp.abs(kernel)), inputs, errors, geom)
    norm = kernel_part + jnp.abs(errors.sum(axis=(1, 2))).sum(axis=1)
    return norm + position_sums.summation_error(terms, math.prod(geom.output_size))


def positions(errors: Array) -> Array:
    """(b, height, width, channels) -> (b, positions, channels)."""
    return errors.reshape(errors.shape[0], errors.shape[1] * errors.shape[2], errors.shape[3])


def per_sample(inputs: Array, errors: Array, geom: Geometry) -> Array:
    """Each sample's kernel gradient, (b, *geom.window, in_channels, out_channels)."""
    kernel = jnp.einsum("bpk,bpo->bko", patches(inputs, geom), positions(errors), precision="highest")
    return kernel.reshape(inputs.shape[0], *geom.window, inputs.shape[3], errors.shape[3])


def summed(inputs: Array, errors: Array, geom: Geometry) -> Array:
    """The kernel's gradient, summed over samples, (*geom.window, in_channels, out_channels).

    On a CPU this is the gradient of the convolution. Elsewhere it is a product in the precision of the norms, because
    the convolution's gradient is rounded to the precision of the platform.
    """
    if suits_cpu():
        return cast(Array, kernel_gradient(inputs, errors, geom))
    rows, columns = patches(inputs, geom), positions(errors)
    flat = (rows.reshape(-1, rows.shape[2]).T, columns.reshape(-1, columns.shape[2]))
    kernel = jnp.matmul(*flat, precision="highest")
    return kernel.reshape(*geom.window, inputs.shape[3], errors.shape[3])


def _of_kernels(norm: Callable[[Array], Array], inputs: Array, errors: Array, geom: Geometry) -> Array:
    """`norm` of each sample's kernel gradient, (b,)."""
    if suits_cpu():
        return jax.lax.map(lambda pair: norm(kernel_gradient(pair[0][None], pair[1][None], geom)), (inputs, errors))
    numbers = math.prod(geom.window) * inputs.shape[3] * (math.prod(geom.output_size) + errors.shape[3])
    of_group = lambda x, e: jax.vmap(norm)(per_sample(x, e, geom))  # noqa: E731
    return position_sums.in_groups(of_group, inputs, errors, 4 * numbers)


def _window_sums(values: Array, geom: Geometry) -> Array:
    """The sum over the window at every output position: (b, *geom.input_size) -> (b, *geom.output_size)."""
    values = jnp.pad(values, [(0, 0), *geom.padding])
    for axis in (1, 2):
        taps, stride, count = geom.window[axis - 1], geom.strides[axis - 1], geom.output_size[axis - 1]
        spans = [(tap, tap + (count - 1) * stride + 1) for tap in range(taps)]
        parts = [jax.lax.slice_in_dim(values, first, end, stride, axis) for first, end in spans]
        values = functools.reduce(jnp.add, parts)
    return values
