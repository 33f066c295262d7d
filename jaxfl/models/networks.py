"""Multilayer perceptrons and small convolutional networks."""

from __future__ import annotations

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.models import layers
from jaxfl.models.classification import Model, sequential


def mlp(widths: tuple[int, ...] = (784, 32, 10), activation: str = "relu") -> Model:
    """Dense layers "dense_1", "dense_2", ... with an activation between them; flattens its input first.

    Kernels start LeCun normal, biases at zero, as in flax.

    Args:
        widths: numbers in a sample, units of each hidden layer, classes.
        activation: "relu" or "tanh".

    Raises:
        ArgumentError: a number or activation out of range.

    Examples:
        >>> import jax
        >>> params = jax.eval_shape(mlp((784, 32, 10)).init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        25450
    """
    if len(widths) < 2:
        requirement = "must hold the input size and the number of classes"
        raise ArgumentError("widths", requirement, f"got {widths}", "Pass at least two numbers.")
    check.one_of(("relu", "tanh"), activation=activation)
    for position, width in enumerate(widths):
        check.at_least(1, **{f"widths[{position}]": width})
    parts = [("flatten", layers.reshape((widths[0],)))]
    for position in range(1, len(widths)):
        if position > 1:
            parts.append((f"{activation}_{position - 1}", layers.activation(activation)))
        parts.append((f"dense_{position}", layers.dense(widths[position - 1], widths[position])))
    return sequential(parts)


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

    Raises:
        ArgumentError: a number or activation out of range, or too many poolings.

    Examples:
        >>> import jax
        >>> params = jax.eval_shape(cnn().init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        1663370

    References:
        McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from
        Decentralized Data", AISTATS 2017, arXiv:1602.05629, section 3.
    """
    _check_image(sample_shape)
    check.at_least(1, window=window, num_classes=num_classes)
    if hidden is not None:
        check.at_least(1, hidden=hidden)
    check.one_of(("relu", "tanh"), activation=activation)
    height, width, previous = sample_shape
    parts = [("images", layers.reshape(sample_shape))]
    for position, features in enumerate(channels, start=1):
        if min(height, width) < 2:
            found = f"got {len(channels)} for images of {sample_shape[0]}x{sample_shape[1]}"
            raise ArgumentError("channels", "must not pool an image below 1x1", found, "Use fewer convolutions.")
        parts += [
            (f"conv_{position}", layers.conv(previous, features, (window, window))),
            (f"{activation}_{position}", layers.activation(activation)),
            (f"pool_{position}", layers.max_pool((2, 2))),
        ]
        height, width, previous = height // 2, width // 2, features
    size = height * width * previous
    parts.append(("flatten", layers.reshape((size,))))
    if hidden is None:
        parts.append(("dense_1", layers.dense(size, num_classes)))
    else:
        parts += [
            ("dense_1", layers.dense(size, hidden)),
            (f"{activation}_{len(channels) + 1}", layers.activation(activation)),
            ("dense_2", layers.dense(hidden, num_classes)),
        ]
    return sequential(parts)


def lenet(sample_shape: tuple[int, int, int] = (28, 28, 1), num_classes: int = 10, *, padding: str = "SAME") -> Model:
    """LeNet-5 with ReLU and max-pooling, as it is mostly used today.

    Two 5x5 convolutions to 6 and 16 channels, each with 2x2 max-pooling, then dense layers of 120, 84 and num_classes
    units: "conv_1", "conv_2", "dense_1", "dense_2", "dense_3". Kernels start LeCun normal, biases at zero, as in flax.

    Args:
        sample_shape: (height, width, channels) of an image, as for `cnn`.
        num_classes: number of logits.
        padding: of the first convolution. "SAME" for digits of 28x28, which the original padded to 32x32; "VALID" for
            images of 32x32. The second convolution has no padding.

    Raises:
        ArgumentError: a number or padding out of range, or an image too small for the windows.

    Examples:
        >>> import jax
        >>> params = jax.eval_shape(lenet().init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        61706

    References:
        LeCun, Bottou, Bengio, Haffner: "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 86(11),
        1998, section II.B; its sigmoids, trained averages and radial basis functions are replaced.
    """
    check.at_least(1, num_classes=num_classes)
    check.one_of(("SAME", "VALID"), padding=padding)
    _check_image(sample_shape)
    height, width = ((size - (4 if padding == "VALID" else 0)) // 2 for size in sample_shape[:2])
    height, width = (height - 4) // 2, (width - 4) // 2
    if min(height, width) < 1:
        smallest = 16 if padding == "VALID" else 12
        requirement = f"must hold at least {smallest}x{smallest} pixels"
        raise ArgumentError("sample_shape", requirement, f"got {sample_shape}", "Pass larger images.")
    return sequential(
        [
            ("images", layers.reshape(sample_shape)),
            ("conv_1", layers.conv(sample_shape[2], 6, (5, 5), padding=padding)),
            ("relu_1", layers.relu()),
            ("pool_1", layers.max_pool((2, 2))),
            ("conv_2", layers.conv(6, 16, (5, 5), padding="VALID")),
            ("relu_2", layers.relu()),
            ("pool_2", layers.max_pool((2, 2))),
            ("flatten", layers.reshape((height * width * 16,))),
            ("dense_1", layers.dense(height * width * 16, 120)),
            ("relu_3", layers.relu()),
            ("dense_2", layers.dense(120, 84)),
            ("relu_4", layers.relu()),
            ("dense_3", layers.dense(84, num_classes)),
        ]
    )


def dzofl_cnn(
    sample_shape: tuple[int, int, int] = (28, 28, 1),
    num_classes: int = 2,
    *,
    channels: tuple[int, int] = (20, 40),
    window: int = 7,
) -> Model:
    """Two convolutions without padding, then one 2x2 max-pooling and a dense layer: DZOFL's network.

    Layers are "conv_1", "conv_2", "dense_1"; kernels start LeCun normal, biases at zero, as in flax.

    Args:
        sample_shape: (height, width, channels) of an image, as for `cnn`.
        num_classes: number of logits.
        channels: output channels of each convolution.
        window: height and width of each kernel.

    Raises:
        ArgumentError: a number below 1, or an image too small for the windows.

    Examples:
        >>> import jax
        >>> params = jax.eval_shape(dzofl_cnn().init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        45362

    References:
        Mhanna, Assaad: "Communication and Energy Efficient Federated Learning using Zero-Order Optimization Technique",
        section V.
    """
    check.at_least(1, num_classes=num_classes, window=window)
    _check_image(sample_shape)
    height, width = ((size - 2 * (window - 1)) // 2 for size in sample_shape[:2])
    if min(height, width) < 1:
        requirement = f"must hold at least {2 * window}x{2 * window} pixels for windows of {window}"
        raise ArgumentError("sample_shape", requirement, f"got {sample_shape}", "Pass larger images.")
    size = height * width * channels[1]
    return sequential(
        [
            ("images", layers.reshape(sample_shape)),
            ("conv_1", layers.conv(sample_shape[2], channels[0], (window, window), padding="VALID")),
            ("relu_1", layers.relu()),
            ("conv_2", layers.conv(channels[0], channels[1], (window, window), padding="VALID")),
            ("relu_2", layers.relu()),
            ("pool", layers.max_pool((2, 2))),
            ("flatten", layers.reshape((size,))),
            ("dense_1", layers.dense(size, num_classes)),
        ]
    )


def _check_image(sample_shape: tuple[int, ...]) -> None:
    """Refuse a shape that is not (height, width, channels)."""
    if len(sample_shape) != 3:
        found = f"got {sample_shape}"
        raise ArgumentError("sample_shape", "must be (height, width, channels)", found, "Pass three integers.")
