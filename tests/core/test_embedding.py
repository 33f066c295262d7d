# pyright: reportArgumentType=false
"""Rounds inside of a caller's own program: states that are given away, second draws, numbers of one's own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused
from problems import Problem, problem, small_task, statistics_task, uneven_data
from registry import REGISTRY

import jaxfl
from jaxfl import graphs
from jaxfl.core import Purpose, RunKey, purpose_key, stream_key
from jaxfl.core.tree import leaf_names

KEY, DATA = jax.random.key(3), uneven_data()
STEPS = jaxfl.local_steps(2, batch_size=2, optimizer=optax.sgd(0.1))
PRETRAINED = {"kernel": jnp.ones((6, 3)), "bias": jnp.zeros(3)}


class Pretrained(nnx.Module):
    def __init__(self, rngs):
        self.last = nnx.Linear(6, 3, rngs=rngs)
        nnx.update(self.last, nnx.State(PRETRAINED))

    def __call__(self, inputs):
        return self.last(inputs)


def linear_loss(params, inputs, labels):
    return jaxfl.core.cross_entropy(inputs @ params["kernel"] + params["bias"][None], labels)


def averaging(task, optimizer=None):
    return jaxfl.fed_avg(task, clients=STEPS, num_active=2, server_optimizer=optimizer)


DONATED = {
    "constants": lambda: averaging(jaxfl.from_functions(lambda key: PRETRAINED, linear_loss)),
    "constants of a module": lambda: averaging(jaxfl.from_flax(Pretrained)),
    "the server's first parameters": lambda: averaging(small_task(), optax.contrib.prodigy(0.1)),
    "the nodes' first parameters": lambda: jaxfl.push_sum(
        small_task(), graph=graphs.exponential(5), optimizer=optax.contrib.dog(0.1)
    ),
}


@pytest.mark.parametrize("name", DONATED)
def test_a_first_state_may_be_given_away_twice(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax
        learner = DONATED[name]()
        step = jax.jit(lambda key, state: learner.round(key, state, DATA)[0], donate_argnums=1)
        ends = [step(KEY, learner.init(KEY, DATA)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_under_a_callers_vmap_leaves_are_arrays_of_their_own():
    learner = problem("gradient_tracking").algorithm()  # whose tracker begins as the gradient
    states = jax.vmap(lambda key: learner.init(key, DATA))(jax.random.split(KEY, 2))
    jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)(states)


@pytest.mark.parametrize("base", [KEY, RunKey(KEY, jax.random.key(4))])
def test_streams_of_a_round_are_independent_and_the_first_is_the_plain_draw(base):
    clients = jaxfl.local_steps(
        2, batch_size=2, optimizer=optax.sgd(0.1), clip_norm=1.0, noise=jaxfl.gaussian(0.1), num_steps=2
    )
    active = jnp.arange(3, dtype=jnp.int32)

    def drawn(clients, task, **stream):
        draws = clients.draw(base, 4, active, DATA, task, **stream)
        keys = (draws.noise and draws.noise.keys, draws.dropout_keys)
        return [draws.batch_indices, *(jax.random.key_data(one) for one in keys if one is not None)]

    for of, task in ((clients, small_task()), (STEPS, statistics_task())):
        plain, first, second, third = (drawn(of, task, **{"stream": n} if n + 1 else {}) for n in (-1, 0, 1, 2))
        jax.tree.map(np.testing.assert_array_equal, plain, first)
        for one, other in ((first, second), (second, third)):
            assert all((a != b).any() for a, b in zip(one, other, strict=True))
    refused(lambda: stream_key(base, -1), "stream")
    assert isinstance(stream_key(base, 1), RunKey) == isinstance(base, RunKey)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """A module as equinox has them: registered, with arrays, another module and something static."""

    kernel: jax.Array
    inner: Any = None
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    def __call__(self, inputs):
        hidden = inputs @ self.kernel * self.scale
        return hidden if self.inner is None else self.inner(jnp.tanh(hidden))


def by_class(key):
    first, second = jax.random.normal(key, (6, 4), jnp.float32), jnp.ones((4, 3))
    return Model(first, Model(second), scale=0.5)


def by_name(key):
    model = by_class(key)
    return {"first": model.kernel, "second": model.inner.kernel}


def loss_of(outputs):
    return lambda params, inputs, labels: jaxfl.core.cross_entropy(outputs(params, inputs), labels)


MODELS = (
    jaxfl.from_functions(by_class, loss_of(lambda model, inputs: model(inputs))),
    jaxfl.from_functions(by_name, loss_of(lambda p, x: Model(p["first"], Model(p["second"]), scale=0.5)(x))),
)


@pytest.mark.parametrize(
    "name", sorted({*REGISTRY} - {"embracing", "width_reduction", "partial_averaging"})
)  # need blocks
def test_a_registered_class_runs_the_same_program_as_a_dictionary(name):
    """Instruction by instruction, under a clip norm and noise."""
    row, programs = REGISTRY[name], []
    for task in MODELS:
        example = row.example(lambda hidden, task=task: task)
        learner = Problem(row, example, DATA).algorithm(**({"clip_norm": 0.5} if row.noise_draws else {}))
        state = jax.eval_shape(lambda key, learner=learner: learner.init(key, DATA), KEY)
        programs.append(str(jax.make_jaxpr(learner.round)(KEY, state, DATA)))
        assert len(leaf_names(state.params)) == 2
    assert programs[0] == programs[1]


def test_purposes_from_1000_on_are_the_callers():
    assert max(Purpose) < 1000, "a number from 1,000 on is promised to callers"
    keys = [purpose_key(KEY, purpose, 2) for purpose in (*Purpose, 1000, 1001)]
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys)
