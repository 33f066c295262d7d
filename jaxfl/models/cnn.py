"""A small convolutional network."""

from __future__ import annotations

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.models import layers
from jaxfl.models.classification import Model, sequential


def cnn(
    sample_shape: tuple[int, int, int] = (28, 28, 1),
    *,
    channels: tuple[int, ...] = (32, 64),
    window: int = 5,
    hidden: int | None = 512,
    num_classes: int = 10,
    activation: str = "relu",
) -> Model:
    """Convolutions, each followed by 2x2 max-pooling, then two dense layers: McMahan and others' network for MNIST.

    Layers are "conv_1", ..., "dense_1", "dense_2"; kernels start LeCun normal, biases at zero, as in flax. Without
    hidden units the output layer follows the convolutions and is "dense_1".

    Args:
        sample_shape: (height, width, channels) of an image. Images of this many numbers in another shape, for instance
            without channel axis, are reshaped.
        channels: output channels of each convolution.
        window: height and width of each kernel; padding keeps the image size.
        hidden: units of the dense layer before the output; None for no such layer.
        num_classes: number of logits.
        activation: "relu" or "tanh".

    Returns:
        A model for `jaxfl.models.classification`.

    Raises:
        ArgumentError: a number below 1, an unknown activation, or more poolings than the image size allows.

    Example:
        >>> import jax
        >>> params = jax.eval_shape(cnn().init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        1663370

    References:
        McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from
        Decentralized Data", AISTATS 2017, arXiv:1602.05629, section 3.
    """
    if len(sample_shape) != 3:
        found = f"got {sample_shape}"
        raise ArgumentError("sample_shape", "must be (height, width, channels)", found, "Pass three integers.")
    check.at_least(1, window=window, num_classes=num_classes)
    if hidden is not None:
        check.at_least(1, hidden=hidden)
    check.one_of(("relu", "tanh"), activation=activation)
    height, width, previous = sample_shape
    named = [("images", layers.reshape(sample_shape))]
    for position, features in enumerate(channels, start=1):
        if min(height, width) < 2:
            found = f"got {len(channels)} for images of {sample_shape[0]}x{sample_shape[1]}"
            raise ArgumentError("channels", "must not pool an image below 1x1", found, "Use fewer convolutions.")
        named += [
            (f"conv_{position}", layers.conv(previous, features, (window, window))),
            (f"{activation}_{position}", layers.activation(activation)),
            (f"pool_{position}", layers.max_pool((2, 2))),
        ]
        height, width, previous = height // 2, width // 2, features
    size = height * width * previous
    named.append(("flatten", layers.reshape((size,))))
    if hidden is None:
        named.append(("dense_1", layers.dense(size, num_classes)))
    else:
        named += [
            ("dense_1", layers.dense(size, hidden)),
            (f"{activation}_{len(channels) + 1}", layers.activation(activation)),
            ("dense_2", layers.dense(hidden, num_classes)),
        ]
    return sequential(named)
