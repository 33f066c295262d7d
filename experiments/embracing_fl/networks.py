"""The models of experiments.embracing_fl and experiments.similarity, at any share of their channels."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxfl import models
from jaxfl.channel import BILSTM_COUNTED, Counts, count
from jaxfl.core import ArgumentError, Task, check
from jaxfl.data import Dataset
from jaxfl.data.imdb import NUM_TOKENS
from jaxfl.frame import Choice, choose
from jaxfl.frame.networks import image_shape, with_node_loop
from jaxfl.frame.options import ABSENT, added_later
from jaxfl.models import Model
from jaxfl.models.composite import scaled

from .methods import masked_cross_entropy

RESNETS = ("resnet20", "resnet8")


class Problem(NamedTuple):
    """Shape of a sample and number of classes for which a model is built."""

    sample_shape: Any  # (height, width, channels) of an image, (words,) of a text
    num_classes: int


class Form(NamedTuple):
    """The form of a model that one class of clients trains."""

    width: float = 1.0  # share of each layer's channels, in (0, 1]
    batch_norm: str = "global"  # of resnets; static: no statistics are tracked
    divisor: float | None = None  # of hidden activations in training, HeteroFL's; 1 adds only its model state
    frozen_words: int = 0  # of bilstm: words read without gradient
    masked: bool = False  # HeteroFL's masked loss, on labels as `with_classes` makes them


FULL = Form()


def problem_of(dataset: Dataset, model: str) -> Problem:
    """The shapes of a data set.

    Raises:
        ArgumentError: a model of text on other samples, or another model on text.
    """
    is_text = dataset.train_inputs.dtype.kind == "i"
    if (model == "bilstm") != is_text or (model == "bilstm" and dataset.num_classes != 2):
        requirement = "must fit the data set: bilstm reads reviews with two labels, all others images"
        raise ArgumentError("model", requirement, f"got {model} for {dataset.name}", "Choose another one.")
    takes_any = is_text or (model == "mlp" and dataset.train_inputs.ndim == 2)
    return Problem(dataset.train_inputs.shape[1:] if takes_any else image_shape(dataset), dataset.num_classes)


def narrow(numbers: tuple[int, ...], width: float) -> tuple[int, ...]:
    """A share of each number of channels, rounded down."""
    return tuple(math.floor(round(width * number, 9)) for number in numbers)


def _resnet(problem: Problem, form: Form, *, resnet_widths: tuple[int, ...], resnet_blocks: tuple[int, ...]) -> Model:
    return models.resnet20(
        problem.sample_shape,
        problem.num_classes,
        norm="batch" if form.batch_norm == "global" else "static",
        widths=resnet_widths,
        blocks=resnet_blocks,
        width=form.width,
        scaler=form.divisor is not None and form.divisor < 1,
    )


def _femnist_cnn(problem: Problem, form: Form, *, channels: tuple[int, ...], hidden: tuple[int, ...]) -> Model:
    (units,), channels = narrow(hidden, form.width), narrow(channels, form.width)
    return models.cnn(problem.sample_shape, channels=channels, hidden=units, num_classes=problem.num_classes)


def _mlp(problem: Problem, form: Form, *, hidden: tuple[int, ...]) -> Model:
    return models.mlp((math.prod(problem.sample_shape), *narrow(hidden, form.width), problem.num_classes))


def _bilstm(problem: Problem, form: Form, *, embedding_features: int, units: int, dropout: float) -> Model:
    embedding_features, units = narrow((embedding_features, units), form.width)
    sizes = {"embedding_features": embedding_features, "units": units, "frozen_words": form.frozen_words}
    return models.bilstm_classifier(NUM_TOKENS, problem.sample_shape[0], dropout=dropout, **sizes)


MODELS = {"resnet20": _resnet, "resnet8": _resnet, "femnist_cnn": _femnist_cnn, "bilstm": _bilstm, "mlp": _mlp}
MODEL = Choice("model", MODELS)


@dataclasses.dataclass(frozen=True)
class Network:
    """The model of every client."""

    COUNTS: ClassVar = (MODEL.counts,)
    model: Literal["resnet20", "resnet8", "femnist_cnn", "bilstm", "mlp"] = "femnist_cnn"
    """resnet20, resnet8 (one block a stage), femnist_cnn (two convolutions, two dense layers), bilstm or mlp."""
    resnet_widths: tuple[int, ...] = (16, 32, 64)
    """Channels of the stages of a resnet."""
    resnet_blocks: tuple[int, ...] = (3, 3, 3)
    """Blocks of the stages of a resnet."""
    channels: tuple[int, ...] = (32, 64)
    """Channels of the convolutions of femnist_cnn."""
    hidden: tuple[int, ...] = (64, 32)
    """Units of the hidden layers of mlp, or of the single one of femnist_cnn."""
    embedding_features: int = 256
    """Size of a word's embedding in bilstm."""
    units: int = 256
    """Size of each direction's state in bilstm."""
    dropout: float = 0.3
    """Rate of the two dropouts of bilstm."""
    node_loop: str = "auto"
    """Loop over clients that run together: vmap (all at once), map (one after the other), chunk:k (k at once), or auto:
    map for convolutions on a CPU, else vmap. devices:vmap, devices:map and devices:chunk:k share clients out over
    devices. On a CPU, clients of several classes under uniform sampling always run one after the other."""
    compute_dtype: Literal["float32", "bfloat16", "bfloat16_kernel_gradients"] = added_later(
        "float32", {"float32": ABSENT}
    )
    """Number format in which layers compute. bfloat16 rounds their parameters and inputs, which is faster on hardware
    that multiplies bfloat16. Parameters, gradients, losses and statistics of normalizations stay float32.
    bfloat16_kernel_gradients rounds the factors of convolutions' gradients to kernels only, and no clipped sum."""

    def build(self, problem: Problem, form: Form = FULL) -> Model:
        """The model in one form; the same object in every call."""
        return _model(self, problem, form)

    def task(self, problem: Problem, form: Form = FULL) -> Task:
        """The task of classifying with it; the same object in every call."""
        return _task(self, problem, form)

    def counts(self, problem: Problem, form: Form = FULL) -> dict[str, Counts]:
        """Counts of each layer. For the LSTM's classifier Table 1 counts the activations of the LSTM alone."""
        return _counts(self, problem, form)

    def widths(self) -> tuple[int, ...]:
        """The numbers of channels that a narrow form has fewer of."""
        if self.model == "bilstm":
            return self.embedding_features, self.units
        return {"mlp": self.hidden, "femnist_cnn": (*self.channels, *self.hidden)}.get(self.model, self.resnet_widths)

    def axis_groups(self, problem: Problem) -> dict[str, dict[int, int]]:
        """Axes that hold several runs of channels, as `jaxfl.algorithms.width_reduction` needs them."""
        if self.model == "femnist_cnn":
            height, width = (side // 2 ** len(self.channels) for side in problem.sample_shape[:2])
            return {"dense_1/kernel": {0: height * width}}
        if self.model == "bilstm":
            gates = {"lstm/kernel": {2: 4}, "lstm/recurrent_kernel": {2: 4}, "lstm/bias": {1: 4}}
            return {**gates, "dense/kernel": {0: 2}}
        return {}

    def check(self) -> None:
        """Refuse layers without a channel or a block."""
        for name in ("resnet_widths", "resnet_blocks", "channels", "hidden", "embedding_features", "units"):
            for number in np.atleast_1d(getattr(self, name)).tolist():
                check.at_least(1, **{name: number})
        if self.model == "femnist_cnn" and len(self.hidden) != 1:
            found = f"got {len(self.hidden)}"
            raise ArgumentError("hidden", "must be one number for femnist_cnn", found, "Pass 2048, for instance.")
        if self.model in RESNETS and len(self.resnet_blocks) != len(self.resnet_widths):
            found = f"got {len(self.resnet_blocks)} for {len(self.resnet_widths)} widths"
            remedy = "Pass as many as widths."
            raise ArgumentError("resnet_blocks", "must hold one number for each stage", found, remedy)


@functools.lru_cache(maxsize=64)
def _model(network: Network, problem: Problem, form: Form) -> Model:
    model = choose(MODEL, vars(network))(problem, form)
    if form.divisor is None or network.model in RESNETS:
        return model
    # Layers behind every hidden layer: relu(x / r) = relu(x) / r, and dropout(x / r) = dropout(x) / r.
    behind = ("relu", "dropout")
    layers = [(name, scaled(layer, form.divisor) if name.startswith(behind) else layer) for name, layer in model.layers]
    return Model(tuple(layers))


@functools.lru_cache(maxsize=64)
def _counts(network: Network, problem: Problem, form: Form) -> dict[str, Counts]:
    of_text: dict[str, Any] = {"dtype": np.int32, "counted": BILSTM_COUNTED} if network.model == "bilstm" else {}
    return count(network.build(problem, form), problem.sample_shape, **of_text)


@functools.lru_cache(maxsize=64)
def _task(network: Network, problem: Problem, form: Form) -> Task:
    adapter: Any = models.binary_classification if network.model == "bilstm" else models.classification
    more = {"loss": masked_cross_entropy} if form.masked else {}
    task = adapter(network.build(problem, form), compute_dtype=network.compute_dtype, **more)
    return with_node_loop(task, network.node_loop)
