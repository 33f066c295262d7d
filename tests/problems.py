"""Small learning problems that several tests share."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from examples import Example, Numbers
from registry import REGISTRY, Row

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
        lambda key: {"w": 0.1 * jax.random.normal(key, (features,), jnp.float32), "b": jnp.float32(0.0)},
        lambda params, x, y: (x @ params["w"] + params["b"] - y.astype(jnp.float32)) ** 2,
    )


def statistics_task(features=6):
    """Least squares on the first features less their running mean, with one of three shifts chosen by a key."""

    def shifted_loss(params, centre, inputs, labels, shift):
        return ((inputs[:, :features] - centre[None]) @ params["w"] - labels.astype(jnp.float32) + shift) ** 2

    def loss(variables, inputs, labels):
        return shifted_loss(variables.params, variables.model_state["mean"], inputs, labels, 0.0)

    def train_loss(params, model_state, inputs, labels, weights, key):
        batch_mean = weights @ inputs[:, :features] / weights.sum()
        shift = jax.random.randint(key, (), 0, 3, jnp.int32).astype(jnp.float32)
        new = {"mean": 0.5 * model_state["mean"] + 0.5 * batch_mean}
        return shifted_loss(params, batch_mean, inputs, labels, shift), new

    return jaxfl.Task(
        init=lambda key: {"w": 0.1 * jax.random.normal(key, (features,), jnp.float32)},
        loss=loss,
        metrics=lambda variables, inputs, labels: {"loss": loss(variables, inputs, labels)},
        init_state=lambda: {"mean": jnp.zeros(features, jnp.float32)},
        train_loss=train_loss,
    )


def with_clients(*, num_local_steps, batch_size, step_size, **options):
    """Arguments of an algorithm with a server, those of its clients' SGD as `clients`."""
    decays = {name: options.pop(name) for name in ("momentum", "weight_decay") if name in options}
    weighting = {name: options.pop(name) for name in ("weighting",) if name in options}
    optimizer = jaxfl.client_sgd(step_size, **decays)
    clients = jaxfl.local_steps(num_local_steps, batch_size=batch_size, optimizer=optimizer, **weighting)
    return {"clients": clients, **options}


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


@functools.lru_cache(maxsize=64)
def _starting(algorithm, sizes):
    """`init`, compiled once for an algorithm and sizes, which stay concrete so that `init` can check them."""
    with jax.ensure_compile_time_eval():
        concrete = jnp.asarray(sizes, jnp.int32)
    return jax.jit(lambda key, data: algorithm.init(key, data._replace(sizes=concrete)))


def start(algorithm, key, data):
    """The first state, compiled as a whole."""
    return _starting(algorithm, tuple(np.asarray(data.sizes).tolist()))(key, data)


@functools.lru_cache(maxsize=64)
def _running(algorithm, num_rounds):
    """Some rounds, compiled once for an algorithm and their number."""
    return jax.jit(
        lambda key, state, data: jax.lax.scan(
            lambda s, _: algorithm.round(key, s, data), state, None, length=num_rounds
        )
    )


def run(algorithm, key, data, num_rounds, state=None):
    """State after some rounds, in one compiled scan, with the stacked infos."""
    return _running(algorithm, num_rounds)(key, start(algorithm, key, data) if state is None else state, data)


class Problem(NamedTuple):
    """The example of a row of the registry, on five nodes with uneven data."""

    row: Row
    example: Example
    data: jaxfl.FederatedData

    def algorithm(self, **changes: Any):
        """The algorithm, with other `Numbers` or other arguments of the constructor where told."""
        numbers = Numbers(**{name: changes.pop(name) for name in Numbers._fields if name in changes})
        e = self.example
        return self.row.constructor(**{**e.tasks, **e.topology, **e.arguments(numbers), **changes})


def problem(name):
    """The problem of one row."""
    row = REGISTRY[name]
    return Problem(row, row.example(lambda hidden: small_task(hidden=hidden)), uneven_data())
