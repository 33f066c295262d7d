"""Windows that slide over images: the static geometry of a convolution, and what each window covers."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxfl.core.check import ArgumentError
from jaxfl.core.types import Array


class Geometry(NamedTuple):
    """The static part of a convolution: what slides over what.

    Attributes:
        input_size: (height, width) of the input.
        window: (height, width) of the kernel.
        strides: steps of the window along height and width.
        padding: ((top, bottom), (left, right)), zeros added around the input.
    """

    input_size: tuple[int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]

    @property
    def output_size(self) -> tuple[int, int]:
        """(height, width) of the output."""
        extents = [size + sum(pad) for size, pad in zip(self.input_size, self.padding, strict=True)]
        rows, columns = (
            (size - window) // stride + 1
            for size, window, stride in zip(extents, self.window, self.strides, strict=True)
        )
        return rows, columns


def geometry(
    input_size: tuple[int, int], window: tuple[int, int], strides: tuple[int, int] = (1, 1), padding: str = "SAME"
) -> Geometry:
    """The geometry of a convolution with "SAME" or "VALID" padding, as XLA and flax define them.

    Raises:
        ArgumentError: unknown padding, a window or stride below 1, or a window that does not fit the input.

    Examples:
        >>> geometry((28, 28), (5, 5), (2, 2), "SAME").output_size
        (14, 14)
    """
    if padding not in ("SAME", "VALID"):
        raise ArgumentError("padding", 'must be "SAME" or "VALID"', f"got {padding!r}", "Choose one of these.")
    for name, pair in (("window", window), ("strides", strides)):
        if len(pair) != 2 or min(pair) < 1:
            raise ArgumentError(name, "must be two integers of at least 1", f"got {pair}", "Pass (height, width).")
    if padding == "VALID" and (input_size[0] < window[0] or input_size[1] < window[1]):
        found = f"got window {window} on an input of {input_size}"
        raise ArgumentError("window", "must fit into the input", found, 'Use padding "SAME" or fewer poolings.')
    rows, columns = lax.padtype_to_pads(input_size, window, strides, padding)
    return Geometry(input_size, window, strides, ((int(rows[0]), int(rows[1])), (int(columns[0]), int(columns[1]))))


def patches(inputs: Array, geom: Geometry) -> Array:
    """The window around every output position, as rows.

    Args:
        inputs: (..., height, width, channels).
        geom: the static geometry.

    Returns:
        (..., positions, taps * channels), where positions run over output rows then columns, and the last axis in
        the order of `kernel.reshape(taps * channels, out_channels)`.
    """
    leading, channels = inputs.shape[:-3], inputs.shape[-1]
    rows, columns = geom.output_size
    no_pad = [(0, 0)] * len(leading)
    images = jnp.pad(inputs, [*no_pad, *geom.padding, (0, 0)]) if any(map(any, geom.padding)) else inputs
    step_down, step_right = geom.strides
    taps = [
        images[
            ..., i : i + (rows - 1) * step_down + 1 : step_down, j : j + (columns - 1) * step_right + 1 : step_right, :
        ]
        for i in range(geom.window[0])
        for j in range(geom.window[1])
    ]
    contents = taps[0] if len(taps) == 1 else jnp.concatenate(taps, axis=-1)
    return contents.reshape(*leading, rows * columns, len(taps) * channels)
