"""Small learning problems that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfl
from jaxfl import graphs
from jaxfl.models import classification, mlp

UNEVEN_SIZES = (7, 4, 9, 5, 6)


def uneven_data(sizes=UNEVEN_SIZES, features=6, classes=3, seed=0):
    """Random samples in unequal parts, the pool shuffled so that a node's index is not its position."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    inputs = rng.normal(size=(count, features)).astype(np.float32)
    labels = rng.integers(0, classes, count).astype(np.int32)
    parts = np.split(rng.permutation(count), np.cumsum(sizes)[:-1])
    return jaxfl.federate(inputs, labels, parts)


def small_task(features=6, hidden=5, classes=3):
    """A smooth two-layer classifier, so that float32 and float64 never part at a kink."""
    return classification(mlp((features, hidden, classes), activation="tanh"))


def linear_task(features=6):
    """Least squares by plain functions: a task without factored layers."""
    return jaxfl.from_functions(
        lambda key: {"w": 0.1 * jax.random.normal(key, (features,)), "b": jnp.float32(0.0)},
        lambda params, x, y: (x @ params["w"] + params["b"] - y.astype(jnp.float32)) ** 2,
    )


def irregular_graph():
    """A directed graph over five nodes on which the push-sum weights move, with period 2."""
    first = np.array(
        [
            [1 / 3, 0, 0, 1 / 2, 0],
            [1 / 3, 1 / 2, 0, 0, 0],
            [1 / 3, 1 / 2, 1 / 2, 0, 0],
            [0, 0, 1 / 2, 1 / 2, 0],
            [0, 0, 0, 0, 1],
        ]
    )
    second = np.array(
        [
            [1 / 2, 0, 0, 0, 1 / 2],
            [0, 1, 0, 0, 0],
            [0, 0, 1 / 2, 0, 0],
            [0, 0, 0, 1 / 4, 0],
            [1 / 2, 0, 1 / 2, 3 / 4, 1 / 2],
        ]
    )
    return graphs.from_matrix(np.stack([first, second]))


def start(algorithm, key, data):
    """The first state, compiled as a whole, with the sizes concrete so that `init` can check them."""
    sizes = data.sizes
    return jax.jit(lambda key, data: algorithm.init(key, data._replace(sizes=sizes)))(key, data)


def run(algorithm, key, data, num_rounds, state=None):
    """State after some rounds, in one compiled scan, with the stacked infos."""

    @jax.jit
    def rounds(key, state, data):
        return jax.lax.scan(lambda s, _: algorithm.round(key, s, data), state, None, length=num_rounds)

    return rounds(key, start(algorithm, key, data) if state is None else state, data)
