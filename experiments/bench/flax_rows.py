"""Training a model of jaxfl, and the same network of flax's own layers, with parameters of its own at every node."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.bench.setting import KEY, Setting, descend, node_batches, node_params, node_rounds
from experiments.bench.timing import Runner, runner
from jaxfl.core import Array, PyTree, cross_entropy
from jaxfl.models import Model, classification


def _conv(layer: PyTree, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    height, width, channels, features = layer["kernel"].shape
    strides, bias = (stride, stride), "bias" in layer
    return nnx.Conv(channels, features, (height, width), strides=strides, use_bias=bias, rngs=rngs)


class FlaxStem(nnx.Module):
    """The first convolution of a residual network."""

    def __init__(self, layer: PyTree, rngs: nnx.Rngs):
        self.conv = _conv(layer["conv"], rngs)
        self.norm = nnx.BatchNorm(self.conv.out_features, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        return nnx.relu(self.norm(self.conv(images)))


class FlaxBlock(nnx.Module):
    """A basic block, whose shortcut has no parameters; one with more channels than before halves the images."""

    def __init__(self, layer: PyTree, rngs: nnx.Rngs):
        _, _, channels, features = layer["conv_1"]["kernel"].shape
        self.new, self.stride = features - channels, 2 if features > channels else 1
        self.conv_1, self.conv_2 = _conv(layer["conv_1"], rngs, self.stride), _conv(layer["conv_2"], rngs)
        self.norm_1, self.norm_2 = nnx.BatchNorm(features, rngs=rngs), nnx.BatchNorm(features, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        hidden = self.norm_2(self.conv_2(nnx.relu(self.norm_1(self.conv_1(images)))))
        images = images[:, :: self.stride, :: self.stride]
        return nnx.relu(hidden + jnp.pad(images, [(0, 0), (0, 0), (0, 0), (0, self.new)]))


class FlaxNetwork(nnx.Module):
    """A CNN, or a residual network with batch normalization and shortcuts by padding; names are the model's."""

    def __init__(self, model: Model, rngs: nnx.Rngs):
        makers = {
            "conv": _conv,
            "dense": lambda layer, rngs: nnx.Linear(*layer["kernel"].shape, rngs=rngs),
            "stem": FlaxStem,
            "block": FlaxBlock,
        }
        self.names = tuple(name for name, _ in model.layers)
        for name, layer in jax.eval_shape(model.init, KEY).items():
            setattr(self, name, makers[name.partition("_")[0]](layer, rngs))

    def __call__(self, images: Array) -> Array:
        functions = {
            "images": lambda values: values,
            "relu": nnx.relu,
            "pool": lambda values: nnx.max_pool(values, (2, 2), strides=(2, 2)),
            "flatten": lambda values: values.reshape(values.shape[0], -1),
            "mean": lambda values: values.mean(axis=(1, 2)),
        }
        for name in self.names:
            images = (getattr(self, name, None) or functions[name.partition("_")[0]])(images)
        return images


class Row(NamedTuple):
    """One library's network: how it starts, and the loss of a batch in training mode."""

    init: Callable[[Array], tuple[PyTree, PyTree]]  # key -> (params, batch statistics)
    loss: Callable[[PyTree, PyTree, Array, Array], tuple[Array, PyTree]]  # -> (mean loss, new statistics)
    node_loop: str


def rows(model: Model) -> dict[str, Row]:
    """The same network twice."""
    structure, _, _ = nnx.split(FlaxNetwork(model, nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def our_loss(params, statistics, inputs, labels):
        weights = jnp.ones(labels.shape[0], jnp.float32)
        logits, statistics = model.apply_train(params, statistics, inputs, weights, KEY)
        return cross_entropy(logits, labels).mean(), statistics

    def flax_init(key):
        _, params, statistics = nnx.split(FlaxNetwork(model, nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(statistics)

    def flax_loss(params, statistics, inputs, labels):
        module = nnx.merge(structure, nnx.State(params), nnx.State(statistics))
        loss = cross_entropy(module(inputs), labels).mean()
        return loss, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    ours = Row(lambda key: (model.init(key), model.init_state()), our_loss, classification(model).node_loop)
    return {"jaxfl": ours, "flax": Row(flax_init, flax_loss, "vmap")}


def sgd_rounds(row: Row, rounds: int, step_size: float):
    """((params, statistics), inputs, labels) -> the first after `rounds` steps at every node."""

    def step(variables, inputs, labels):
        params, statistics = variables
        gradient, statistics = jax.grad(row.loss, has_aux=True)(params, statistics, inputs, labels)
        return descend(params, gradient, step_size), statistics

    return node_rounds(step, row.node_loop, rounds)


def compiled(row: Row, setting: Setting, rounds: int) -> Runner:
    """A call of several rounds on the setting's batches."""
    start, batches = node_params(row.init, setting.num_nodes), node_batches(setting)
    return runner(sgd_rounds(row, rounds, setting.step_size), start, *batches)
