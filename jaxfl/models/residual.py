"""The parts of residual networks: convolutions without bias, the stem, basic blocks and their shortcuts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.core.tracing import mark_activation
from jaxfl.models.composite import composite
from jaxfl.models.convolution import convolve
from jaxfl.models.convolution_forms import suits_gpu
from jaxfl.models.error_windows import suits_in_place
from jaxfl.models.layers import Layer, normal_kernel
from jaxfl.models.windows import geometry, patches

MakeNorm = Callable[[int], Layer]
"""number of channels -> a normalization of them."""


# Channels up to which a CPU convolves with a stride rather than multiply patches. Forward and backward on a core, 32
# images, 3x3, ms of both: 32x32, 16 to 32 channels 2.5 and 2.7; 64 to 128 32 and 41; 16x16, 128 to 256 25 and 24;
# 8x8, 256 to 512 28 and 20. With 1x1 patches are always faster.
_MOST_CHANNELS_IN_PLACE = 128


def conv_without_bias(in_channels: int, out_channels: int, window: int, stride: int = 1) -> Layer:
    """Convolution with "SAME" padding: (b, height, width, c) -> (b, ceil(height / stride), ..., out_channels)."""
    shape = (window, window, in_channels, out_channels)

    def apply(params, images):
        kernel = params["kernel"]
        geom = geometry((images.shape[1], images.shape[2]), (window, window), (stride, stride))
        in_place = suits_in_place(geom, out_channels) and out_channels <= _MOST_CHANNELS_IN_PLACE
        if stride == 1 or (window > 1 and (suits_gpu() or in_place)):
            return mark_activation(convolve(images, kernel, geom))
        # Patches times kernel, for a stride leaves few of them.
        rows = patches(images, geom)
        batch, positions, taps = rows.shape
        products = rows.reshape(batch * positions, taps) @ kernel.reshape(taps, out_channels)
        return mark_activation(products.reshape(batch, *geom.output_size, out_channels))

    # Variance 2 / fan-in keeps the scale through ReLUs (He and others 2015): what the papers start from.
    return Layer(init=lambda key: {"kernel": normal_kernel(key, shape, 2.0)}, apply=apply, fills_caches=True)


def stem(in_channels: int, features: int, make_norm: MakeNorm) -> Layer:
    """3x3 convolution, normalization, ReLU."""
    parts = {"conv": conv_without_bias(in_channels, features, 3), "norm": make_norm(features)}
    return composite(parts, lambda run, images: jax.nn.relu(run("norm", run("conv", images))))


def basic_block(in_channels: int, features: int, stride: int, make_norm: MakeNorm, shortcut: str) -> Layer:
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)).

    Args:
        in_channels: channels of the input.
        features: channels of the output.
        stride: of the first convolution and of the shortcut.
        make_norm: the normalizations.
        shortcut: "identity"; "projection", a 1x1 convolution and normalization; "padding", every stride-th row and
            column, zeros in the channels that are new.
    """
    parts = {
        "conv_1": conv_without_bias(in_channels, features, 3, stride),
        "conv_2": conv_without_bias(features, features, 3),
    }
    if shortcut == "projection":
        parts["conv_shortcut"] = conv_without_bias(in_channels, features, 1, stride)
        parts["norm_shortcut"] = make_norm(features)
    parts |= {"norm_1": make_norm(features), "norm_2": make_norm(features)}

    def forward(run, images):
        hidden = jax.nn.relu(run("norm_1", run("conv_1", images)))
        hidden = run("norm_2", run("conv_2", hidden))
        if shortcut == "projection":
            images = run("norm_shortcut", run("conv_shortcut", images))
        elif shortcut == "padding":
            images = images[:, ::stride, ::stride]
            images = jnp.pad(images, [(0, 0), (0, 0), (0, 0), (0, features - in_channels)])
        return jax.nn.relu(hidden + images)

    return composite(parts, forward)
