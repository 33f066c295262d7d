"""Draws that are made before the loop over rounds: the same ones, of indices; noise and what the state enters wait."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import small_task, uneven_data

import jaxfl
from jaxfl import core, gradients, graphs
from jaxfl.core.platform import tracing_for
from jaxfl.training.chunks import rounds_fn
from jaxfl.training.early_draws import draws_of_rounds

KEY = jax.random.key(5)


class State(NamedTuple):
    """As much as its early draws take, and a number that enters a draw."""

    params: Any
    shift: Any
    round_index: Any


def state_of(size):
    return State(params=jnp.zeros((5, size)), shift=jnp.int32(7), round_index=jnp.int32(3))


def draw(key, state, data):
    key = core.purpose_key(key, core.Purpose.BATCH, state.round_index)
    indices = jax.random.randint(key, (5, 4), 0, 100, jnp.int32)
    noise = jax.random.normal(key, (5, 4), jnp.float32)
    return {"indices": indices, "shifted": indices + state.shift, "noise": noise, "is_odd": indices % 2 == 1}


ALGORITHM = core.algorithm(lambda key, data: state_of(100), draw, lambda *_: None, lambda state: state.params)


def test_early_draws_are_those_of_each_round():
    """Those that depend on the number of the round only are looked up."""
    data, start = uneven_data(), state_of(100)

    def rounds(state, count):
        draws = draws_of_rounds(ALGORITHM, KEY, state, data, 6)
        assert draws is not None
        later = [state._replace(round_index=state.round_index + k, shift=state.shift * k) for k in range(count)]
        return [draws(one, jnp.int32(k)) for k, one in enumerate(later)]

    with tracing_for("gpu"):
        made = jax.jit(rounds, static_argnums=1)(start, 6)
        program = str(jax.make_jaxpr(rounds, static_argnums=1)(start, 1))
    for k, actual in enumerate(made):
        expected = draw(KEY, start._replace(round_index=jnp.int32(3 + k), shift=jnp.int32(7 * k)), data)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert program.count("dynamic_slice[") == 2


@pytest.mark.parametrize(("platform", "size"), [("gpu", 1), ("cpu", 100)])
def test_nothing_is_drawn_early_on_a_cpu_or_beyond_the_memory_of_the_state(platform, size):
    with tracing_for(platform):
        assert draws_of_rounds(ALGORITHM, KEY, state_of(size), uneven_data(), 6) is None


@pytest.mark.parametrize("graph", [graphs.exponential(5), graphs.ring(5)], ids=["weights of one", "others"])
@pytest.mark.parametrize("estimator", [gradients.saga, gradients.mini_batch])
def test_a_chunk_in_the_form_for_accelerators_equals_its_rounds(estimator, graph):
    """Packed infos, early draws and weights that are left out change no number, and no shape of an info."""
    data, noise = uneven_data(), jaxfl.gaussian(0.01)
    gradient = estimator(sampler=gradients.fixed(2), clip_norm=1.0)
    learner = jaxfl.push_sum(small_task(), graph=graph, gradient=gradient, noise=noise, step_size=0.1)
    with tracing_for("gpu"):
        start = jax.jit(learner.init)(KEY, data)
        state, infos = jax.jit(rounds_fn(learner, 4))(KEY, start, data, np.int32(4))
    expected, rows = start, []
    for _ in range(4):
        expected, info = jax.jit(learner.round)(KEY, expected, data)
        rows.append(info)
    expected_infos = jax.tree.map(lambda *each: np.stack(each), *rows)
    assert jax.tree.structure(infos) == jax.tree.structure(expected_infos)
    for actual, wanted in zip(
        jax.tree.leaves((state, infos)), jax.tree.leaves((expected, expected_infos)), strict=True
    ):
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-6)
