"""A residual network of two blocks made of flax's own layers, by the names that the engine's parameters have."""

import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    """Two 3x3 convolutions and a shortcut: "identity", "projection" or "padding" by zeros."""

    def __init__(self, channels, features, stride, shortcut, norm, rngs):
        def conv(*shape, stride=1):
            return nnx.Conv(*shape, strides=(stride, stride), use_bias=False, rngs=rngs)

        self.conv_1, self.norm_1 = conv(channels, features, (3, 3), stride=stride), norm(features)
        self.conv_2, self.norm_2 = conv(features, features, (3, 3)), norm(features)
        if shortcut == "projection":
            self.conv_shortcut = conv(channels, features, (1, 1), stride=stride)
            self.norm_shortcut = norm(features)
        self.shortcut, self.added = shortcut, features - channels

    def __call__(self, images):
        hidden = self.norm_2(self.conv_2(nnx.relu(self.norm_1(self.conv_1(images)))))
        if self.shortcut == "projection":
            images = self.norm_shortcut(self.conv_shortcut(images))
        elif self.shortcut == "padding":
            images = images[:, ::2, ::2]
            images = jnp.concatenate([images, jnp.zeros((*images.shape[:3], self.added), jnp.float32)], axis=3)
        return nnx.relu(hidden + images)


class Stem(nnx.Module):
    def __init__(self, features, norm, rngs):
        self.conv = nnx.Conv(3, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm = norm(features)

    def __call__(self, images):
        return nnx.relu(self.norm(self.conv(images)))


class ResNet(nnx.Module):
    """One block that keeps the shape, one that halves it; five classes."""

    def __init__(self, widths, shortcuts, norm, rngs):
        first, second = widths
        self.stem = Stem(first, norm, rngs)
        self.block_1_1 = Block(first, first, 1, shortcuts[0], norm, rngs)
        self.block_2_1 = Block(first, second, 2, shortcuts[1], norm, rngs)
        self.dense = nnx.Linear(second, 5, rngs=rngs)

    def __call__(self, images):
        hidden = self.block_2_1(self.block_1_1(self.stem(images)))
        return self.dense(hidden.mean(axis=(1, 2)))
