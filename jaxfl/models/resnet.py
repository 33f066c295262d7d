"""Residual networks for small images, with group normalization."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.keys import leaf_key
from jaxfl.core.types import Array, PyTree
from jaxfl.models import layers
from jaxfl.models.classification import Model, sequential
from jaxfl.models.convolution import convolve
from jaxfl.models.layers import Layer
from jaxfl.models.normalization import group_norm
from jaxfl.models.windows import geometry, patches

# Normal with variance 2 / fan-in, which keeps the scale through ReLUs (He and others 2015): what the paper starts from.
_initial_kernel = jax.nn.initializers.he_normal()


def resnet18(
    sample_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    *,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    groups: int = 32,
) -> Model:
    """ResNet-18 for images of about 32x32: a 3x3 convolution, four stages of basic blocks, mean, dense layer.

    A basic block is two 3x3 convolutions, each followed by group normalization, around which its input is added; where
    the shape changes, the input first passes a 1x1 convolution and normalization of its own. The first block of every
    stage but the first halves the image. Unlike the network for ImageNet it starts with stride 1 and no pooling, as is
    usual at this size. Convolutions have no bias. Layers with parameters, in order: "stem", "block_1_1" (stage,
    position), ..., "dense". Gradients have no factored form: clipped ones are computed one sample at a time.

    Args:
        sample_shape: (height, width, channels) of an image. Images of this many numbers in another shape, for instance
            without channel axis, are reshaped.
        num_classes: number of logits.
        widths: output channels of each stage.
        blocks: basic blocks of each stage.
        groups: groups of each normalization; layers with fewer channels take one group a channel.

    Returns:
        A model for `jaxfl.models.classification`.

    Raises:
        ArgumentError: a number below 1, different numbers of stages, channels that the groups do not divide, or images
            so small that a group holds a single number, which normalization would erase.

    Guarantees:
        - equals the same network of flax layers in value and in gradient.
        - 11,173,962 parameters by default.
        - mapped over nodes it makes no grouped convolution.

    Example:
        >>> params = jax.eval_shape(resnet18().init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        11173962

    References:
        He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385, figure 5
        (left) and table 1. Group for batch normalization: Wu, He, ECCV 2018, arXiv:1803.08494.
    """
    if len(sample_shape) != 3:
        found = f"got {sample_shape}"
        raise ArgumentError("sample_shape", "must be (height, width, channels)", found, "Pass three integers.")
    height, width, channels = sample_shape
    check.at_least(1, height=height, width=width, channels=channels, num_classes=num_classes, groups=groups)
    if not widths or len(blocks) != len(widths):
        found = f"got {len(blocks)} for {len(widths)} widths"
        raise ArgumentError("blocks", "must hold one number for each stage", found, "Pass as many as widths.")
    for stage, (features, count) in enumerate(zip(widths, blocks, strict=True)):
        check.at_least(1, **{f"widths[{stage}]": features, f"blocks[{stage}]": count})
        if stage > 0:
            height, width = -(-height // 2), -(-width // 2)
        _check_groups(stage, features, min(groups, features), height * width)

    named = [("images", layers.reshape(sample_shape)), ("stem", _stem(channels, widths[0], groups))]
    previous = widths[0]
    for stage, (features, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        for position in range(1, count + 1):
            stride = 2 if stage > 1 and position == 1 else 1
            named.append((f"block_{stage}_{position}", _basic_block(previous, features, stride, groups)))
            previous = features
    named += [
        ("mean", Layer(init=None, apply=lambda params, images: images.mean(axis=(1, 2)))),
        ("dense", layers.dense(previous, num_classes)),
    ]
    return sequential(named)


def _check_groups(stage: int, features: int, groups: int, positions: int) -> None:
    """Refuse groups that do not divide the channels or hold one number each."""
    if features % groups:
        found = f"got {features} for {groups} groups"
        raise ArgumentError(f"widths[{stage}]", "must be a multiple of groups", found, "Change one of the two.")
    if positions * (features // groups) == 1:
        found = f"got groups of one channel where stage {stage + 1} has shrunk images to 1x1"
        remedy = "Use fewer groups or fewer stages."
        raise ArgumentError("groups", "must leave more than one number to a group", found, remedy)


def _stem(in_channels: int, features: int, groups: int) -> Layer:
    """Convolution, normalization, ReLU."""

    def init(key):
        return {"conv": _conv_params(key, (3, 3, in_channels, features)), "norm": _norm_params(features)}

    def apply(params, images):
        return jax.nn.relu(_normalize(params["norm"], _convolve(params["conv"], images), groups))

    return Layer(init=init, apply=apply, convolutional=True)


def _basic_block(in_channels: int, features: int, stride: int, groups: int) -> Layer:
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))."""
    changes_shape = stride > 1 or in_channels != features

    def init(key):
        params = {
            "conv_1": _conv_params(leaf_key(key, 0), (3, 3, in_channels, features)),
            "norm_1": _norm_params(features),
            "conv_2": _conv_params(leaf_key(key, 1), (3, 3, features, features)),
            "norm_2": _norm_params(features),
        }
        if changes_shape:
            params["conv_shortcut"] = _conv_params(leaf_key(key, 2), (1, 1, in_channels, features))
            params["norm_shortcut"] = _norm_params(features)
        return params

    def apply(params, images):
        hidden = _convolve(params["conv_1"], images, stride)
        hidden = jax.nn.relu(_normalize(params["norm_1"], hidden, groups))
        hidden = _normalize(params["norm_2"], _convolve(params["conv_2"], hidden), groups)
        if changes_shape:
            images = _normalize(params["norm_shortcut"], _convolve(params["conv_shortcut"], images, stride), groups)
        return jax.nn.relu(hidden + images)

    return Layer(init=init, apply=apply, convolutional=True)


def _conv_params(key: Array, shape: tuple[int, int, int, int]) -> dict[str, Array]:
    """Of a convolution without bias, kernel (height, width, c, features)."""
    return {"kernel": _initial_kernel(key, shape, jnp.float32)}


def _norm_params(features: int) -> dict[str, Array]:
    """Scale 1 and bias 0 for every channel."""
    return {"scale": jnp.ones(features, jnp.float32), "bias": jnp.zeros(features, jnp.float32)}


def _convolve(params: PyTree, images: Array, stride: int = 1) -> Array:
    """Convolution with "SAME" padding: (b, height, width, c) -> (b, ceil(height / stride), ..., features)."""
    kernel = params["kernel"]
    geom = geometry((images.shape[1], images.shape[2]), kernel.shape[:2], (stride, stride))
    if stride == 1:
        return convolve(images, kernel, geom)
    # Patches times kernel, for a stride leaves few of them. Forward and backward on two cores, 32 images: 32x32x64 to
    # 16x16x128 takes 22 ms against 145 of `convolve`, whose gradients slide over errors spread with zeros.
    rows = patches(images, geom)
    batch, positions, taps = rows.shape
    products = rows.reshape(batch * positions, taps) @ kernel.reshape(taps, kernel.shape[3])
    return products.reshape(batch, *geom.output_size, kernel.shape[3])


def _normalize(params: PyTree, images: Array, groups: int) -> Array:
    """Group normalization, with one group for each channel where there are fewer channels than groups."""
    return group_norm(images, params["scale"], params["bias"], min(groups, images.shape[3]))
