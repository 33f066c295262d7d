"""Layers and networks against flax's own: values, every gradient, statistics, over nodes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close

from jaxfl.core import Variables, over_nodes
from jaxfl.models import Model, cnn, dzofl_cnn, layers, lenet, resnet18, resnet20
from jaxfl.models.lstm import bidirectional_lstm

RNG = np.random.default_rng(0)
KEY = jax.random.key(1)
NODES, BATCH = 2, 4


def pool(images, window=(2, 2)):
    return nnx.max_pool(images, window, strides=window)


def flatten(images):
    return images.reshape(images.shape[0], -1)


class Holder(nnx.Module):
    """Modules by name."""

    def __init__(self, modules):
        for name, module in modules.items():
            setattr(self, name, module(rngs=nnx.Rngs(0)))


def chain(**parts):
    """(params, state, inputs) -> (outputs in training, new state, outputs in evaluation) of parts in a row.

    A part is a function of arrays, or a partial that makes a module.
    """
    modules = {name: part for name, part in parts.items() if isinstance(part, partial)}
    structure = nnx.graphdef(nnx.eval_shape(lambda: Holder(modules)))

    def run(holder, values):
        for name, part in parts.items():
            values = (getattr(holder, name) if name in modules else part)(values)
        return values

    def both(params, state, inputs):
        holder = nnx.merge(structure, nnx.State(params), *([nnx.State(state)] if state else []))
        if hasattr(nnx, "view"):
            evaluated = run(nnx.view(holder, use_running_average=True, raise_if_not_found=False), inputs)
        else:  # an older flax
            holder.eval()
            evaluated = run(holder, inputs)
            holder.train()
        return run(holder, inputs), nnx.to_pure_dict(nnx.state(holder, nnx.BatchStat)), evaluated

    return both


class Block(nnx.Module):
    """Two 3x3 convolutions and a shortcut: "identity", "projection" or "padding" by zeros."""

    def __init__(self, channels, features, stride, shortcut, norm, rngs):
        conv = partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.conv_1, self.norm_1 = conv(channels, features, (3, 3), strides=stride), norm(features, rngs=rngs)
        self.conv_2, self.norm_2 = conv(features, features, (3, 3)), norm(features, rngs=rngs)
        if shortcut == "projection":
            self.conv_shortcut = conv(channels, features, (1, 1), strides=stride)
            self.norm_shortcut = norm(features, rngs=rngs)
        self.shortcut, self.added = shortcut, features - channels

    def __call__(self, images):
        hidden = self.norm_2(self.conv_2(nnx.relu(self.norm_1(self.conv_1(images)))))
        if self.shortcut == "projection":
            images = self.norm_shortcut(self.conv_shortcut(images))
        elif self.shortcut == "padding":
            images = jnp.pad(images[:, ::2, ::2], [(0, 0), (0, 0), (0, 0), (0, self.added)])
        return nnx.relu(hidden + images)


class Stem(nnx.Module):
    def __init__(self, features, norm, rngs):
        self.conv, self.norm = nnx.Conv(3, features, (3, 3), use_bias=False, rngs=rngs), norm(features, rngs=rngs)

    def __call__(self, images):
        return nnx.relu(self.norm(self.conv(images)))


def resnet(norm, first, second):
    """One block that keeps the shape, one that halves it; their shortcuts."""
    blocks = {
        "block_1_1": partial(Block, 4, 4, 1, first, norm),
        "block_2_1": partial(Block, 4, 6, 2, second, norm),
    }
    mean = {"mean": lambda images: images.mean(axis=(1, 2)), "dense": partial(nnx.Linear, 6, 5)}
    return chain(stem=partial(Stem, 4, norm), **blocks, **mean)


def lstm(whole_sequence, frozen_steps):
    """Both directions by flax's cells, step by step; the first steps are constants."""

    def run(params, state, inputs):
        params, read = params["layer"], []
        in_features, units = params["kernel"].shape[1], params["recurrent_kernel"].shape[1]
        for direction, steps in enumerate((range(inputs.shape[1]), reversed(range(inputs.shape[1])))):
            cell = nnx.OptimizedLSTMCell(in_features, units, rngs=nnx.Rngs(0))
            own = {name: leaf[direction] for name, leaf in params.items()}
            recurrent = {"kernel": own["recurrent_kernel"], "bias": own["bias"]}
            mapped = {"dense_i": {"kernel": own["kernel"]}, "dense_h": recurrent}
            zeros, outputs = jnp.zeros((inputs.shape[0], units)), {}
            carry = (zeros, zeros)
            with jax.numpy_rank_promotion("allow"):  # flax adds the bias so
                for number, step in enumerate(steps):
                    here = (mapped, inputs[:, step])
                    kernels, words = jax.lax.stop_gradient(here) if number < frozen_steps else here
                    nnx.update(cell, nnx.State(kernels))
                    carry, outputs[step] = cell(carry, words)
            at_positions = jnp.stack([outputs[step] for step in range(inputs.shape[1])], axis=1)
            read.append(at_positions if whole_sequence else carry[1])
        outputs = jnp.concatenate(read, axis=-1)
        return outputs, {}, outputs

    return run


def one(layer):
    return Model((("layer", layer),))


Conv, Linear, GroupNorm = (partial(partial, module) for module in (nnx.Conv, nnx.Linear, nnx.GroupNorm))
BATCH_NORM = partial(nnx.BatchNorm, momentum=0.9)
SMALL: dict[str, Any] = {"widths": (4, 6), "blocks": (1, 1)}
DENSE = {"flatten": flatten, "dense_1": Linear(16, 120), "relu_3": nnx.relu, "dense_2": Linear(120, 84)}
LENET = {"relu_1": nnx.relu, "pool_1": pool, "conv_2": Conv(6, 16, (5, 5), padding="VALID"), "relu_2": nnx.relu}
LENET |= {"pool_2": pool, **DENSE, "relu_4": nnx.relu, "dense_3": Linear(84, 3)}
CNN = {
    **{"conv_1": Conv(1, 4, (3, 3)), "relu_1": nnx.relu, "pool_1": pool},
    **{"conv_2": Conv(4, 6, (3, 3)), "relu_2": nnx.relu, "pool_2": pool},
    **{"flatten": flatten, "dense_1": Linear(24, 8), "relu_3": nnx.relu, "dense_2": Linear(8, 3)},
}
DZOFL = {
    **{"conv_1": Conv(1, 3, (3, 3), padding="VALID"), "relu_1": nnx.relu},
    **{"conv_2": Conv(3, 4, (3, 3), padding="VALID"), "relu_2": nnx.relu, "pool": pool},
    **{"flatten": flatten, "dense_1": Linear(8, 3)},
}
# Ours, flax's, and the shape of a sample: odd heights, of which strides leave a rest.
PAIRS = {
    "dense": (one(layers.dense(7, 4)), chain(layer=Linear(7, 4)), (7,)),
    "conv": (one(layers.conv(2, 3, (3, 4))), chain(layer=Conv(2, 3, (3, 4))), (9, 8, 2)),
    "conv, strided": (
        one(layers.conv(2, 3, (3, 4), strides=(2, 1), padding="VALID")),
        chain(layer=Conv(2, 3, (3, 4), strides=(2, 1), padding="VALID")),
        (9, 8, 2),
    ),
    "group norm": (one(layers.group_norm(6, 3)), chain(layer=GroupNorm(6, 3)), (5, 3, 6)),
    "batch norm, images": (one(layers.batch_norm(5)), chain(layer=partial(BATCH_NORM, 5)), (3, 2, 5)),
    "max pool, window": (one(layers.max_pool((3, 2))), chain(layer=lambda images: pool(images, (3, 2))), (7, 9, 3)),
    **{
        f"lstm, whole sequence {whole}, frozen {frozen}": (
            one(bidirectional_lstm(3, 4, whole_sequence=whole, frozen_steps=frozen)),
            lstm(whole, frozen),
            (5, 3),
        )
        for whole, frozen in ((False, 2), (True, 0))
    },
    "cnn": (cnn((8, 8, 1), channels=(4, 6), window=3, hidden=8, num_classes=3), chain(**CNN), (8, 8, 1)),
    "resnet20": (
        resnet20((5, 4, 3), 5, **SMALL),
        resnet(BATCH_NORM, "projection", "projection"),
        (5, 4, 3),
    ),
    "resnet18": (
        resnet18((7, 6, 3), 5, **SMALL, groups=2),
        resnet(partial(nnx.GroupNorm, num_groups=2), "identity", "projection"),
        (7, 6, 3),
    ),
    "resnet20, padding": (
        resnet20((5, 4, 3), 5, **SMALL, shortcut="padding"),
        resnet(BATCH_NORM, "identity", "padding"),
        (5, 4, 3),
    ),
    "lenet": (
        lenet((17, 16, 1), 3, padding="VALID"),
        chain(conv_1=Conv(1, 6, (5, 5), padding="VALID"), **LENET),
        (17, 16, 1),
    ),
    "dzofl": (dzofl_cnn((8, 6, 1), 3, channels=(3, 4), window=3), chain(**DZOFL), (8, 6, 1)),
}


def random(tree, low):
    """Numbers of every node away from where training starts."""
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.uniform(low, 1.0, (NODES, *leaf.shape)), jnp.float32), tree)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.quick_cases(9)
def test_equals_flax_in_values_every_gradient_and_statistics_over_nodes(name):
    model, theirs, shape = PAIRS[name]
    params, state = random(jax.eval_shape(model.init, KEY), -1.0), random(jax.eval_shape(model.init_state), 0.5)
    inputs = jnp.asarray(RNG.normal(size=(NODES, BATCH, *shape)), jnp.float32)
    if "pool" in name:
        inputs = inputs.round()  # ties
    outputs = jax.eval_shape(jax.vmap(model.apply), Variables(params, state) if state else params, inputs)
    direction = jnp.asarray(RNG.normal(size=outputs.shape), jnp.float32)

    def ours(params, state, inputs):
        evaluated = model.apply(Variables(params, state) if state else params, inputs)
        return *model.apply_train(params, state, inputs, jnp.ones(BATCH), KEY), evaluated

    def with_gradients(run):
        def total(params, inputs, state, direction):
            outputs, new_state, evaluated = run(params, state, inputs)
            return jnp.sum(outputs * direction), (outputs, new_state, evaluated)

        return jax.grad(total, argnums=(0, 1), has_aux=True)

    arguments = params, inputs, state, direction
    expected = jax.jit(jax.vmap(with_gradients(theirs)))(*arguments)
    for node_loop in ("vmap", "map"):
        actual = jax.jit(over_nodes(with_gradients(ours), node_loop))(*arguments)
        # Sums whose terms cancel are known to the rounding of their terms.
        scale = jax.tree.map(lambda leaf: max(1.0, float(np.abs(leaf).max())), expected)
        assert_close(*(jax.tree.map(lambda leaf, size: leaf / size, tree, scale) for tree in (actual, expected)))


def test_pooled_ties_give_the_whole_gradient_to_the_first_maximum_and_both_modes_agree():
    window = jnp.array([[1.0, 5.0], [5.0, 5.0]])[None, :, :, None]
    fn = partial(layers.max_pool().apply, None)
    gradient = jax.grad(lambda x: 2.0 * fn(x).sum())(window)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[0.0, 2.0], [0.0, 0.0]])
    inputs, tangents = (jnp.asarray(RNG.normal(size=(2, 4, 6, 2)).round(), jnp.float32) for _ in range(2))
    forward = jax.jvp(fn, (inputs,), (tangents,))[1].sum()
    np.testing.assert_allclose(forward, jnp.vdot(jax.grad(lambda x: fn(x).sum())(inputs), tangents), rtol=1e-5)
    assert forward != 0


@pytest.mark.parametrize(("scale", "initializer"), [(1.0, "lecun_normal"), (2.0, "he_normal")])
@pytest.mark.parametrize("shape", [(4, 3), (5, 5, 2, 3)])
def test_kernels_start_as_those_of_jax_nn_initializers(shape, scale, initializer):
    expected = jax.jit(lambda key: getattr(jax.nn.initializers, initializer)()(key, shape, jnp.float32))(KEY)
    np.testing.assert_array_equal(jax.jit(lambda key: layers.normal_kernel(key, shape, scale))(KEY), expected)
