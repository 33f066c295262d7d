"""Models of jaxfl made of flax's own layers; layers and parameters have the same names."""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.bench.setting import KEY
from jaxfl.core import Array, PyTree
from jaxfl.models import Model


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
    """A model: a CNN, or a residual network with batch normalization and shortcuts by padding."""

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
