"""Residual networks for small images, and their parts: convolutions without bias, the stem, basic blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.tracing import mark_activation
from jaxfl.models import layers
from jaxfl.models.classification import Model, sequential
from jaxfl.models.composite import composite, scaled
from jaxfl.models.kernels import convolve, geometry, patches, suits_gpu, suits_in_place
from jaxfl.models.layers import Layer, normal_kernel

MakeNorm = Callable[[int], Layer]
"""(number of channels) -> a normalization layer for them."""
_NORMS = ("batch", "static", "group")
_SHORTCUTS = ("projection_all", "projection", "padding")

# Channels up to which a CPU runs a strided convolution rather than a product of patches. Forward and backward pass on a
# core, 32 images, 3x3, ms of the two: 32x32, 16 to 32 channels 2.5 and 2.7; 64 to 128 32 and 41; 16x16, 128 to 256 25
# and 24; 8x8, 256 to 512 28 and 20. With 1x1 windows, patches are always faster.
_MOST_CHANNELS_IN_PLACE = 128


def resnet18(
    sample_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    *,
    norm: str = "group",
    widths: tuple[int, ...] = (64, 128, 256, 512),
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    groups: int = 32,
) -> Model:
    """ResNet-18 for images of about 32x32: a 3x3 convolution, four stages of basic blocks, mean, dense layer.

    A basic block is two 3x3 convolutions, each followed by normalization, around which its input is added; where the
    shape changes, the input first passes a 1x1 convolution and normalization of its own. The first block of every
    stage but the first halves the image. Unlike the network for ImageNet it starts with stride 1 and no pooling, as is
    usual at this size. Convolutions have no bias. Layers with parameters, in order: "stem", "block_1_1" (stage,
    position), ..., "dense". Gradients have no factored form: clipped ones are computed one sample at a time.

    Args:
        sample_shape: (height, width, channels) of an image. Images of this many numbers in another shape, for instance
            without channel axis, are reshaped.
        num_classes: number of logits.
        norm: "group" normalization, which leaves every sample a gradient of its own, as privacy needs; "batch"
            normalization with running statistics; "static", batch normalization that tracks no statistics (see
            `jaxfl.models.layers.batch_norm`).
        widths: output channels of each stage.
        blocks: basic blocks of each stage.
        groups: groups of each group normalization; layers with fewer channels take one group for each channel.

    Raises:
        ArgumentError: a number or normalization out of range, or groups that do not fit the channels or images.

    Guarantees:
        - equals the same network of flax layers in value and in gradient.
        - 11,173,962 parameters by default.
        - mapped over nodes it makes no grouped convolution on a CPU.

    Examples:
        >>> import jax
        >>> params = jax.eval_shape(resnet18().init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        11173962

    References:
        He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385, figure 5
        (left) and table 1. Group for batch normalization: Wu, He, ECCV 2018, arXiv:1803.08494.
    """
    check.one_of(_NORMS, norm=norm)
    _check_sizes(sample_shape, num_classes, widths, blocks, groups if norm == "group" else None)
    return _network(sample_shape, num_classes, widths, blocks, _norm_maker(norm, groups), "projection")


def resnet20(
    sample_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    *,
    norm: str = "batch",
    shortcut: str = "projection_all",
    widths: tuple[int, ...] = (16, 32, 64),
    blocks: tuple[int, ...] = (3, 3, 3),
    groups: int = 8,
    width: float = 1.0,
    scaler: bool = False,
) -> Model:
    """ResNet-20 for images of about 32x32: a 3x3 convolution, three stages of basic blocks, mean, dense layer.

    Built and named like `resnet18`; it differs in widths and blocks, and in its choice of shortcuts.

    Args:
        sample_shape: (height, width, channels) of an image, as for `resnet18`.
        num_classes: number of logits.
        norm: "batch", "static" or "group", as for `resnet18`.
        shortcut: "projection_all", a 1x1 convolution and normalization in the first block of every stage, as
            EmbracingFL has it; "projection", only where the shape changes, option B of He and others; "padding", their
            option A without parameters: every second row and column, and zeros in the channels that are new.
        widths: output channels of each stage.
        blocks: basic blocks of each stage.
        groups: groups of each group normalization; layers with fewer channels take one group a channel.
        width: share in (0, 1] of the channels of every stage, rounded down; its parameters are leading slices of those
            of the full network, as `jaxfl.width_reduction` takes them.
        scaler: HeteroFL's scaler: in training, a convolution's outputs are divided by `width`
            (`jaxfl.models.composite.scaled`). Set it for the full network, too, so that the model state is the same.

    Raises:
        ArgumentError: as for `resnet18`; a shortcut or a width that does not fit.

    Guarantees:
        - equals the same network of flax layers in value and in gradient.
        - 272,762 parameters by default; 272,474 and 269,722 with the other shortcuts.
        - 52,874 parameters at width 0.45, and 10,006 at 0.2.
        - with batch normalization, a narrow network is the full one whose other parameters are zero.
        - layers in a row are a model, and the parts of a cut, one after the other, are the whole.

    Examples:
        >>> import jax
        >>> params = jax.eval_shape(resnet20().init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        272762

    References:
        He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385, section 4.2.
        Lee, Zhang, Prakash, Niu, Avestimehr: "Embracing Federated Learning: Enabling Weak Client Participation via
        Partial Model Training", Tables 1 and 10. Width and scaler: Diao, Ding, Tarokh, "HeteroFL", ICLR 2021,
        arXiv:2010.01264, section 3.
    """
    check.one_of(_NORMS, norm=norm)
    check.one_of(_SHORTCUTS, shortcut=shortcut)
    widths = _narrow(widths, width)
    _check_sizes(sample_shape, num_classes, widths, blocks, groups if norm == "group" else None)
    if shortcut == "padding" and list(widths) != sorted(widths):
        found = f"got {widths}"
        raise ArgumentError("widths", 'must not decrease with shortcut="padding"', found, 'Pass "projection".')
    make_norm = _norm_maker(norm, groups)
    if scaler:  # every convolution is followed by a normalization
        return _network(sample_shape, num_classes, widths, blocks, lambda c: scaled(make_norm(c), width), shortcut)
    return _network(sample_shape, num_classes, widths, blocks, make_norm, shortcut)


def _norm_maker(norm: str, groups: int) -> MakeNorm:
    """Make the function that builds a network's normalizations."""

    def make_norm(channels: int) -> Layer:
        if norm == "group":
            return layers.group_norm(channels, min(groups, channels))
        return layers.batch_norm(channels, tracked=norm == "batch")

    return make_norm


def _narrow(widths: tuple[int, ...], width: float) -> tuple[int, ...]:
    """A share of every stage's channels, rounded down."""
    check.at_least(1, **{f"widths[{stage}]": features for stage, features in enumerate(widths)})
    if not 0 < width <= 1:
        raise ArgumentError("width", "must lie in (0, 1]", f"got {width}", "Pass a share of the channels.")
    # Rounded first, because 0.29 * 100 is below 29 in binary.
    narrow = tuple(math.floor(round(width * features, 9)) for features in widths)
    if 0 in narrow:
        found = f"got {width} of {min(widths)}"
        raise ArgumentError("width", "must leave every stage a channel", found, "Pass a larger share.")
    return narrow


def _network(
    sample_shape: tuple[int, int, int],
    num_classes: int,
    widths: tuple[int, ...],
    blocks: tuple[int, ...],
    make_norm: MakeNorm,
    shortcut: str,
) -> Model:
    """Stem, stages of basic blocks, mean over positions, dense layer."""
    parts = [("images", layers.reshape(sample_shape)), ("stem", stem(sample_shape[2], widths[0], make_norm))]
    previous = widths[0]
    for stage, (features, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        for position in range(1, count + 1):
            stride = 2 if stage > 1 and position == 1 else 1
            kind = "identity"
            if stride > 1 or features != previous or (shortcut == "projection_all" and position == 1):
                kind = "padding" if shortcut == "padding" else "projection"
            block = basic_block(previous, features, stride, make_norm, kind)
            parts.append((f"block_{stage}_{position}", block))
            previous = features
    parts += [
        ("mean", layers.elementwise(lambda images: images.mean(axis=(1, 2)))),
        ("dense", layers.dense(previous, num_classes)),
    ]
    return sequential(parts)


def _check_sizes(
    sample_shape: tuple[int, ...],
    num_classes: int,
    widths: tuple[int, ...],
    blocks: tuple[int, ...],
    groups: int | None,
) -> None:
    """Refuse sizes of which no network can be built; groups are None without group normalization."""
    if len(sample_shape) != 3:
        found = f"got {sample_shape}"
        raise ArgumentError("sample_shape", "must be (height, width, channels)", found, "Pass three integers.")
    height, width, channels = sample_shape
    check.at_least(1, height=height, width=width, channels=channels, num_classes=num_classes)
    if groups is not None:
        check.at_least(1, groups=groups)
    if not widths or len(blocks) != len(widths):
        found = f"got {len(blocks)} for {len(widths)} widths"
        raise ArgumentError("blocks", "must hold one number for each stage", found, "Pass as many as widths.")
    for stage, (features, count) in enumerate(zip(widths, blocks, strict=True)):
        check.at_least(1, **{f"widths[{stage}]": features, f"blocks[{stage}]": count})
        if stage > 0:
            height, width = -(-height // 2), -(-width // 2)
        if groups is not None:
            _check_groups(stage, features, min(groups, features), height * width)


def _check_groups(stage: int, features: int, groups: int, positions: int) -> None:
    """Refuse groups that do not divide the channels or hold one number each."""
    if features % groups:
        found = f"got {features} for {groups} groups"
        raise ArgumentError(f"widths[{stage}]", "must be a multiple of groups", found, "Change one of the two.")
    if positions * (features // groups) == 1:
        found = f"got groups of one channel where stage {stage + 1} has shrunk images to 1x1"
        remedy = "Use fewer groups or fewer stages."
        raise ArgumentError("groups", "must leave more than one number to a group", found, remedy)


def conv_without_bias(in_channels: int, out_channels: int, window: int, stride: int = 1) -> Layer:
    """Convolution with "SAME" padding: (b, height, width, c) -> (b, ceil(height / stride), ..., out_channels)."""
    shape = (window, window, in_channels, out_channels)

    def apply(params, images):
        kernel = params["kernel"]
        geom = geometry((images.shape[1], images.shape[2]), (window, window), (stride, stride))
        in_place = suits_in_place(geom, out_channels) and out_channels <= _MOST_CHANNELS_IN_PLACE
        if stride == 1 or (window > 1 and (suits_gpu() or in_place)):
            return mark_activation(convolve(images, kernel, geom))
        # Patches times kernel, because a stride leaves few patches.
        rows = patches(images, geom)
        batch, positions, taps = rows.shape
        products = rows.reshape(batch * positions, taps) @ kernel.reshape(taps, out_channels)
        return mark_activation(products.reshape(batch, *geom.output_size, out_channels))

    # Variance 2 / fan-in keeps the scale through ReLUs (He and others 2015); both papers initialize with it.
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
