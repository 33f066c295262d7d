"""The models of experiments.embracing_fl at any width, and the same as lists of layers of which costs are counted."""

from __future__ import annotations

import math
from typing import NamedTuple

from experiments.partial.config import RESNETS, BatchNorm, Resolved
from experiments.problem import image_shape
from jaxfl import models
from jaxfl.channel import cost
from jaxfl.core import ArgumentError, Task
from jaxfl.data import Dataset
from jaxfl.data.imdb import NUM_TOKENS
from jaxfl.models import Model
from jaxfl.models.scaler import scaled


class Problem(NamedTuple):
    """What a model is built for."""

    sample_shape: tuple[int, ...]  # (height, width, channels) of an image, (words,) of a text
    num_classes: int


def problem_of(dataset: Dataset, model: str) -> Problem:
    """The shapes of a data set.

    Raises:
        ArgumentError: the model reads text and the samples are none, or the other way round.
    """
    is_text = dataset.train_inputs.dtype.kind == "i"
    if (model == "bilstm") != is_text or (model == "bilstm" and dataset.num_classes != 2):
        requirement = "must read what the data set holds: bilstm reviews of two kinds, all others images"
        raise ArgumentError("model", requirement, f"got {model} for {dataset.name}", "Choose another one.")
    return Problem(dataset.train_inputs.shape[1:] if is_text else image_shape(dataset), dataset.num_classes)


def narrow(numbers: tuple[int, ...], width: float) -> tuple[int, ...]:
    """A share of each number of channels, rounded down."""
    return tuple(math.floor(round(width * number, 9)) for number in numbers)


def check_widths(config: Resolved) -> None:
    """Refuse widths at which a layer has nothing left."""
    layers = {
        "femnist_cnn": (*config.channels, *config.hidden),
        "bilstm": (config.embedding_features, config.units),
        "mlp": config.hidden,
    }.get(config.model, config.resnet_widths)
    for name in ("width_moderate", "width_weak"):
        width = getattr(config, name)
        if 0 in narrow(layers, width):
            raise ArgumentError(name, "must leave every layer a channel", f"got {width} of {min(layers)}", "Pass more.")


def make_network(
    config: Resolved,
    problem: Problem,
    *,
    width: float = 1.0,
    batch_norm: BatchNorm = "global",
    divisor: float | None = None,
    frozen_words: int = 0,
) -> Model:
    """The model of a run, or its narrow version with that share of each layer's channels.

    Args:
        config: the options.
        problem: what it is for.
        width: in (0, 1].
        batch_norm: of resnets.
        divisor: of hidden activations in training. `width`: HeteroFL's scaler. 1: no more than the model state that
            goes with it, so that full and narrow models have the same. None: neither.
        frozen_words: of bilstm.
    """
    if config.model in RESNETS:
        return models.resnet20(
            problem.sample_shape,  # pyright: ignore[reportArgumentType]
            problem.num_classes,
            norm="batch" if batch_norm == "global" else "static",
            widths=config.resnet_widths,
            blocks=config.resnet_blocks,
            width=width,
            scaler=divisor is not None and divisor < 1,
        )
    if config.model == "femnist_cnn":
        network = models.cnn(
            problem.sample_shape,  # pyright: ignore[reportArgumentType]
            channels=narrow(config.channels, width),
            hidden=narrow(config.hidden, width)[0],
            num_classes=problem.num_classes,
        )
    elif config.model == "bilstm":
        embedding_features, units = narrow((config.embedding_features, config.units), width)
        network = models.bilstm_classifier(
            NUM_TOKENS,
            problem.sample_shape[0],
            embedding_features=embedding_features,
            units=units,
            dropout=config.dropout,
            frozen_words=frozen_words,
        )
    else:
        network = models.mlp((math.prod(problem.sample_shape), *narrow(config.hidden, width), problem.num_classes))
    if divisor is None:
        return network
    # What follows every hidden layer: relu(x / r) = relu(x) / r, and dropout(x / r) = dropout(x) / r.
    return Model(
        tuple(
            (name, scaled(layer, divisor) if name.startswith(("relu", "dropout")) else layer)
            for name, layer in network.layers
        )
    )


def make_task(config: Resolved, network: Model) -> Task:
    """The task of classifying with a model."""
    return models.binary_classification(network) if config.model == "bilstm" else models.classification(network)


def axis_groups(config: Resolved, problem: Problem) -> dict[str, dict[int, int]]:
    """Where an axis holds several runs of channels, as `jaxfl.algorithms.width_reduction` needs it."""
    if config.model == "femnist_cnn":
        height, width = (side // 2 ** len(config.channels) for side in problem.sample_shape[:2])
        return {"dense_1/kernel": {0: height * width}}
    if config.model == "bilstm":
        gates = {"lstm/kernel": {2: 4}, "lstm/recurrent_kernel": {2: 4}, "lstm/bias": {1: 4}}
        return {**gates, "dense/kernel": {0: 2}}
    return {}


def architecture(config: Resolved, problem: Problem, width: float = 1.0) -> cost.Architecture:
    """The model as data, for its operations; layers with parameters are named as its blocks are."""
    if config.model in RESNETS:
        widths = narrow(config.resnet_widths, width)
        stages = _resnet(widths, config.resnet_blocks, min(problem.sample_shape[:2]), problem.num_classes)
        return cost.Architecture(problem.sample_shape, stages, (cost.Convolution, cost.Dense))
    if config.model == "bilstm":
        features, units = narrow((config.embedding_features, config.units), width)
        words = (("embedding", cost.Embedding(NUM_TOKENS, features)), ("lstm", cost.Lstm(units)))
        return cost.Architecture(problem.sample_shape, (*words, ("dense", cost.Dense(1))), (cost.Lstm,))
    layers: list[tuple[str, cost.Layer]] = []
    if config.model == "femnist_cnn":
        for number, channels in enumerate(narrow(config.channels, width), start=1):
            layers += [
                (f"conv_{number}", cost.Convolution(channels, 5)),
                (f"relu_{number}", cost.Relu()),
                (f"pool_{number}", cost.Pooling(2)),
            ]
    layers.append(("flatten", cost.Flatten()))
    hidden = narrow(config.hidden, width)
    for number, units in enumerate(hidden, start=1):
        layers += [(f"dense_{number}", cost.Dense(units)), (f"dense_{number}_relu", cost.Relu())]
    layers.append((f"dense_{len(hidden) + 1}", cost.Dense(problem.num_classes)))
    return cost.Architecture(problem.sample_shape, tuple(layers), (cost.Convolution, cost.Dense))


def _resnet(
    widths: tuple[int, ...], blocks: tuple[int, ...], side: int, num_classes: int
) -> tuple[tuple[str, cost.Layer], ...]:
    """Stem, stages of basic blocks with a projection in the first of each, mean, dense layer."""

    def convolution(channels: int, window: int, stride: int) -> tuple[tuple[str, cost.Layer], ...]:
        kernel = cost.Convolution(channels, window, stride, bias=False)
        return ("conv", kernel), ("norm", cost.Normalization())

    kernel, norm = convolution(widths[0], 3, 1)
    layers: list[tuple[str, cost.Layer]] = [("stem", kernel[1]), ("stem_norm", norm[1]), ("stem_relu", cost.Relu())]
    for stage, (channels, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        for position in range(1, count + 1):
            stride = 2 if stage > 1 and position == 1 else 1
            side = math.ceil(side / stride)
            block = cost.Residual(
                branch=(*convolution(channels, 3, stride), ("relu", cost.Relu()), *convolution(channels, 3, 1)),
                shortcut=convolution(channels, 1, stride) if position == 1 else (),
            )
            layers += [(f"block_{stage}_{position}", block), (f"block_{stage}_{position}_relu", cost.Relu())]
    return (*layers, ("mean", cost.Pooling(side)), ("flatten", cost.Flatten()), ("dense", cost.Dense(num_classes)))
