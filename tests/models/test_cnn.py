"""CNNs, LeNet and DZOFL's network against the same networks of flax layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import refusals

from jaxfl.models import cnn, dzofl_cnn, lenet

RNG = np.random.default_rng(0)


def pool(images):
    return nnx.max_pool(images, (2, 2), strides=(2, 2))


class FlaxLeNet(nnx.Module):
    def __init__(self, padding, size, rngs):
        self.conv_1 = nnx.Conv(1, 6, (5, 5), padding=padding, rngs=rngs)
        self.conv_2 = nnx.Conv(6, 16, (5, 5), padding="VALID", rngs=rngs)
        self.dense_1 = nnx.Linear(size, 120, rngs=rngs)
        self.dense_2 = nnx.Linear(120, 84, rngs=rngs)
        self.dense_3 = nnx.Linear(84, 3, rngs=rngs)

    def __call__(self, images):
        hidden = pool(nnx.relu(self.conv_2(pool(nnx.relu(self.conv_1(images))))))
        hidden = nnx.relu(self.dense_1(hidden.reshape(hidden.shape[0], -1)))
        return self.dense_3(nnx.relu(self.dense_2(hidden)))


class FlaxDzofl(nnx.Module):
    def __init__(self, rngs):
        self.conv_1 = nnx.Conv(1, 3, (3, 3), padding="VALID", rngs=rngs)
        self.conv_2 = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs)
        self.dense_1 = nnx.Linear(2 * 1 * 4, 3, rngs=rngs)

    def __call__(self, images):
        hidden = pool(nnx.relu(self.conv_2(nnx.relu(self.conv_1(images)))))
        return self.dense_1(hidden.reshape(hidden.shape[0], -1))


class FlaxCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv_1 = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.conv_2 = nnx.Conv(4, 6, (3, 3), rngs=rngs)
        self.dense_1 = nnx.Linear(2 * 2 * 6, 8, rngs=rngs)
        self.dense_2 = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, images):
        hidden = pool(nnx.relu(self.conv_2(pool(nnx.relu(self.conv_1(images))))))
        return self.dense_2(nnx.relu(self.dense_1(hidden.reshape(hidden.shape[0], -1))))


CASES = {
    "cnn": ((8, 8, 1), cnn((8, 8, 1), channels=(4, 6), window=3, hidden=8, num_classes=3), FlaxCNN),
    "lenet": ((13, 12, 1), lenet((13, 12, 1), 3), lambda rngs: FlaxLeNet("SAME", 1 * 1 * 16, rngs)),
    "lenet valid": ((21, 16, 1), lenet((21, 16, 1), 3, padding="VALID"), lambda rngs: FlaxLeNet("VALID", 32, rngs)),
    "dzofl": ((8, 6, 1), dzofl_cnn((8, 6, 1), 3, channels=(3, 4), window=3), FlaxDzofl),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_cases(1)
def test_equals_the_same_network_of_flax_layers_in_value_and_in_gradient(name):
    shape, model, make_module = CASES[name]
    structure, state = nnx.split(nnx.eval_shape(lambda: make_module(nnx.Rngs(0))))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape) * 0.3, jnp.float32), nnx.to_pure_dict(state)
    )
    images, direction = (jnp.asarray(RNG.normal(size=(4, *part)), jnp.float32) for part in (shape, (3,)))

    def both(network):
        def total(params, images):
            logits = network(params, images)
            return jnp.sum(logits * direction), logits

        return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, images)

    found, expected = both(model.apply), both(lambda params, x: nnx.merge(structure, nnx.State(params))(x))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Sums whose terms cancel are known to the rounding of their terms.
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(other).max())))


test_bad_arguments_are_named = refusals(
    [
        (lambda: lenet((11, 28, 1)), "sample_shape"),
        (lambda: lenet((28, 15, 1), padding="VALID"), "sample_shape"),
        (lambda: lenet((28, 28)), "sample_shape"),  # pyright: ignore[reportArgumentType]
        (lambda: lenet(padding="FULL"), "padding"),
        (lambda: lenet(num_classes=0), "num_classes"),
        (lambda: dzofl_cnn((28, 13, 1)), "sample_shape"),
        (lambda: dzofl_cnn(window=0), "window"),
        (lambda: dzofl_cnn(channels=(20, 0)), "out_channels"),
        (lambda: cnn((28, 28)), "sample_shape"),  # pyright: ignore[reportArgumentType]
    ]
)
