"""What a model costs: parameters, activations and operations.

An architecture is data: a list of named layer descriptions and the shape of one sample. Every count is per sample. The
papers count activations differently, so an architecture also says which layers' outputs are counted:

- EmbracingFL, ResNet-20 and FEMNIST CNN: convolutions (those of shortcuts too) and dense layers. Normalisation, ReLU
  and pooling do not count.
- EmbracingFL, bidirectional LSTM: the LSTM alone, ten numbers per unit, direction and word. The ten are inferred from
  Table 1; four gates before and after their nonlinearity, cell state and output would be ten.
- DZOFL: convolutions, pooling, the flattened copy of it, and the dense layer.

Counted as parameters: kernels, biases, the scale and shift of normalisation. Not counted: its moving statistics.

References:
    S. Lee, T. Zhang, S. Prakash, Y. Niu, S. Avestimehr, "Embracing Federated Learning: Enabling Weak Client
    Participation via Partial Model Training": Tables 1 and 10, sections 4 and 6.2.
    E. Mhanna, M. Assaad, "Communication and Energy Efficient Federated Learning using Zero-Order Optimization
    Technique": section V.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxfl.core import check
from jaxfl.core.check import ArgumentError


class Convolution(NamedTuple):
    """Two-dimensional, on (height, width, channels)."""

    features: int
    window: int
    stride: int = 1
    padding: str = "same"  # or "valid"
    bias: bool = True


class Dense(NamedTuple):
    """On the last axis."""

    features: int
    bias: bool = True


class Normalization(NamedTuple):
    """With a trained scale and shift for each channel."""


class Relu(NamedTuple):
    """max(x, 0)."""


class Pooling(NamedTuple):
    """Maximum or mean over windows that do not overlap; a rest at the border is dropped."""

    window: int


class Flatten(NamedTuple):
    """To one axis."""


class Embedding(NamedTuple):
    """From (words,) to (words, features)."""

    vocabulary: int
    features: int


class Lstm(NamedTuple):
    """From (words, features) to the last outputs of all directions."""

    units: int
    directions: int = 2
    bias_vectors: int = 1  # for each gate: 1 as in Keras, 2 as in PyTorch


class Residual(NamedTuple):
    """Sum of a branch and a shortcut; the shortcut without layers is the identity."""

    branch: tuple[tuple[str, Layer], ...]
    shortcut: tuple[tuple[str, Layer], ...] = ()


Layer = Convolution | Dense | Normalization | Relu | Pooling | Flatten | Embedding | Lstm | Residual

LSTM_NUMBERS_PER_UNIT = 10


class Architecture(NamedTuple):
    """A model as data."""

    input_shape: tuple[int, ...]  # of one sample
    layers: tuple[tuple[str, Layer], ...]
    counted: tuple[type, ...]  # kinds of layers whose outputs are activations


class Counts(NamedTuple):
    """Sums over layers, for one sample."""

    parameters: int
    activations: int
    macs: int  # multiply-accumulate operations of convolutions, dense layers and LSTMs
    other_operations: int  # one per bias added, ReLU, normalized number, number read by a pooling, residual sum


def count(architecture: Architecture, *, trained_from: str | None = None) -> Counts:
    """Counts of a model, or of its output side.

    Args:
        architecture: the model.
        trained_from: name of the first layer to count; the whole model where it is None.

    Returns:
        Sums over the counted layers, for one sample.

    Raises:
        ArgumentError: no layer has that name, or a layer does not fit the shape that reaches it.

    Example:
        >>> count(resnet20()).parameters, 32 * count(resnet20()).activations
        (272762, 6947136)
        >>> count(resnet20(), trained_from="block_4").parameters
        257994
    """
    names = [name for name, _ in architecture.layers]
    if trained_from is not None and trained_from not in names:
        requirement = f"must be one of {', '.join(names)}"
        raise ArgumentError("trained_from", requirement, f"got {trained_from!r}", "Name one of these layers.")
    first = 0 if trained_from is None else names.index(trained_from)
    shape, _ = _walk(architecture.input_shape, architecture.layers[:first], architecture.counted)
    return _walk(shape, architecture.layers[first:], architecture.counted)[1]


def capacity(part: Counts, whole: Counts, *, batch_size: int = 1) -> float:
    """EmbracingFL's (2 p_w + 2 a_w) / (2 p + 2 a), memory of a client that trains only a part, between 0 and 1.

    Args:
        part: counts of what the client trains.
        whole: counts of the full model.
        batch_size: samples whose activations are held at once. Table 1 has 32 for ResNet-20 and 1 for the others.

    Returns:
        The share, without unit.

    Raises:
        ArgumentError: a batch size that is not an integer of at least 1.

    Example:
        >>> round(capacity(count(resnet20(), trained_from="block_4"), count(resnet20()), batch_size=32), 5)
        0.41702
    """
    check.at_least(1, batch_size=batch_size)
    numbers = [counts.parameters + batch_size * counts.activations for counts in (part, whole)]
    return numbers[0] / numbers[1]


def resnet20(width: float = 1.0) -> Architecture:
    """ResNet-20 for CIFAR-10, with a 1x1 convolution and normalization as shortcut of all three stages.

    Args:
        width: share of the channels of every layer, rounded down: 0.45 and 0.2 in EmbracingFL's Table 10.

    Returns:
        The architecture, for images (32, 32, 3) and 10 classes.

    Raises:
        ArgumentError: a width that is not positive, or leaves no channel.
    """
    check.positive(width=width)
    stages = [math.floor(width * channels) for channels in (16, 32, 64)]
    if stages[0] < 1:
        raise ArgumentError("width", "must leave at least one of 16 channels", f"got {width}", "Pass 1 / 16 or more.")
    layers: list[tuple[str, Layer]] = list(_normalized(stages[0], 3, 1))
    for stage, channels in enumerate(stages):
        for position in range(3):
            stride = 2 if stage > 0 and position == 0 else 1
            block = Residual(
                branch=(*_normalized(channels, 3, stride), *_normalized(channels, 3, 1)[:2]),
                shortcut=_normalized(channels, 1, stride)[:2] if position == 0 else (),
            )
            number = 3 * stage + position + 1
            layers += [(f"block_{number}", block), (f"block_{number}_relu", Relu())]
    layers += [("pool", Pooling(8)), ("flatten", Flatten()), ("dense", Dense(10))]
    return Architecture(input_shape=(32, 32, 3), layers=tuple(layers), counted=(Convolution, Dense))


def femnist_cnn() -> Architecture:
    """EmbracingFL's network for FEMNIST, 62 classes: two 5x5 convolutions, each with 2x2 pooling, two dense layers.

    Example:
        >>> count(femnist_cnn()).parameters
        6603710
    """
    layers = (
        ("conv_1", Convolution(32, 5)),
        ("relu_1", Relu()),
        ("pool_1", Pooling(2)),
        ("conv_2", Convolution(64, 5)),
        ("relu_2", Relu()),
        ("pool_2", Pooling(2)),
        ("flatten", Flatten()),
        ("dense_1", Dense(2048)),
        ("relu_3", Relu()),
        ("dense_2", Dense(62)),
    )
    return Architecture(input_shape=(28, 28, 1), layers=layers, counted=(Convolution, Dense))


def bilstm(num_words: int = 256) -> Architecture:
    """EmbracingFL's bidirectional LSTM for IMDB; its weakest clients train on half of the words.

    Args:
        num_words: words of a review, at least 1.

    Raises:
        ArgumentError: a number of words that is not an integer of at least 1.

    Example:
        >>> count(bilstm()).parameters, count(bilstm(num_words=128)).activations
        (3611137, 655360)
    """
    check.at_least(1, num_words=num_words)
    layers = (("embedding", Embedding(10_000, 256)), ("lstm", Lstm(256)), ("dense", Dense(1)))
    return Architecture(input_shape=(num_words,), layers=layers, counted=(Lstm,))


def dzofl_cnn() -> Architecture:
    """DZOFL's network for two classes of Fashion-MNIST: 20 and 40 kernels 7x7 without padding, one 2x2 pooling.

    Example:
        >>> counts = count(dzofl_cnn())
        >>> counts.parameters, counts.activations, counts.macs + counts.other_operations
        (45362, 25042, 10564722)
    """
    layers = (
        ("conv_1", Convolution(20, 7, padding="valid")),
        ("relu_1", Relu()),
        ("conv_2", Convolution(40, 7, padding="valid")),
        ("relu_2", Relu()),
        ("pool", Pooling(2)),
        ("flatten", Flatten()),
        ("dense", Dense(2)),
    )
    return Architecture(input_shape=(28, 28, 1), layers=layers, counted=(Convolution, Pooling, Flatten, Dense))


def _normalized(features: int, window: int, stride: int) -> tuple[tuple[str, Layer], ...]:
    """Convolution without bias, normalization, ReLU."""
    convolution = Convolution(features, window, stride, bias=False)
    return ("conv", convolution), ("norm", Normalization()), ("relu", Relu())


def _walk(
    shape: tuple[int, ...], layers: tuple[tuple[str, Layer], ...], counted: tuple[type, ...]
) -> tuple[tuple[int, ...], Counts]:
    """The shape behind the layers, and their counts."""
    total = (0, 0, 0, 0)
    for name, layer in layers:
        shape, counts = _one(name, layer, shape, counted)
        total = tuple(a + b for a, b in zip(total, counts, strict=True))
    return shape, Counts(*total)


def _one(name: str, layer: Layer, shape: tuple[int, ...], counted: tuple[type, ...]) -> tuple[tuple[int, ...], Counts]:
    """The shape behind one layer, and its counts."""
    for field, value in zip(layer._fields, layer, strict=True):
        if isinstance(value, int) and not isinstance(value, bool):
            check.at_least(1, **{f"{field} of {name}": value})
    parameters = macs = other = 0
    numbers = None  # activations, where they are not the outputs
    match layer:
        case Convolution(features, window, stride, padding, bias):
            check.one_of(("same", "valid"), **{f"padding of {name}": padding})
            height, width, channels = _axes(name, shape, 3)
            margin = 0 if padding == "same" else window - 1
            output = (math.ceil((height - margin) / stride), math.ceil((width - margin) / stride), features)
            parameters = features * (window**2 * channels + bias)
            macs, other = math.prod(output) * window**2 * channels, math.prod(output) * bias
        case Dense(features, bias):
            output = (*shape[:-1], features)
            parameters = features * (shape[-1] + bias)
            macs, other = math.prod(output) * shape[-1], math.prod(output) * bias
        case Normalization():
            output, parameters, other = shape, 2 * shape[-1], math.prod(shape)
        case Relu():
            output, other = shape, math.prod(shape)
        case Pooling(window):
            height, width, channels = _axes(name, shape, 3)
            output = (height // window, width // window, channels)
            other = math.prod(output) * window**2
        case Flatten():
            output = (math.prod(shape),)
        case Embedding(vocabulary, features):
            output, parameters = (*_axes(name, shape, 1), features), vocabulary * features
        case Lstm(units, directions, bias_vectors):
            words, features = _axes(name, shape, 2)
            output = (directions * units,)
            parameters = 4 * units * directions * (features + units + bias_vectors)
            macs = words * 4 * units * directions * (features + units)
            other = words * units * directions * (4 * bias_vectors + 9)  # 5 nonlinearities, 3 products, 1 sum
            numbers = words * units * directions * LSTM_NUMBERS_PER_UNIT
        case Residual(branch, shortcut):
            output, counts = _walk(shape, branch, counted)
            skipped, skipped_counts = _walk(shape, shortcut, counted)
            if output != skipped:
                found = f"got {output} and {skipped}"
                raise ArgumentError(name, "branch and shortcut must give one shape", found, "Project the shortcut.")
            sums = Counts(0, 0, 0, math.prod(output))
            return output, Counts(*(sum(column) for column in zip(counts, skipped_counts, sums, strict=True)))
    if min(output) < 1:
        raise ArgumentError(name, "must leave at least one number on every axis", f"got {output}", "Enlarge the input.")
    activations = math.prod(output) if numbers is None else numbers
    return output, Counts(
        parameters=parameters,
        activations=activations if isinstance(layer, counted) else 0,
        macs=macs,
        other_operations=other,
    )


def _axes(name: str, shape: tuple[int, ...], num_axes: int) -> tuple[int, ...]:
    """`shape`, refused unless it has so many axes."""
    if len(shape) != num_axes:
        raise ArgumentError(name, f"needs an input of {num_axes} axes", f"got shape {shape}", "Check the layer before.")
    return shape
