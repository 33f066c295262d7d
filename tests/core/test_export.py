"""Rounds with their states through `jax.export`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import small_task, uneven_data

import jaxfl
from jaxfl import gradients, graphs
from jaxfl.core.types import NodeNames

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
CLIENTS = jaxfl.local_steps(2, batch_size=2, optimizer=optax.sgd(0.1))
LEARNERS = {
    "push_sum": jaxfl.push_sum(small_task(), graph=graphs.exponential(5), gradient=gradients.saga(), optimizer=ADAM),
    "fed_avg": jaxfl.fed_avg(small_task(), clients=CLIENTS, num_active=2, server_optimizer=ADAM),
    "a_dp2_sgd": jaxfl.a_dp2_sgd(small_task(), graph=graphs.ring(5), step_size=0.1),
}


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.quick_cases(1)
def test_a_round_that_was_exported_and_read_again_gives_the_same_bits(name):
    jaxfl.register_for_export()
    jaxfl.register_for_export()
    learner, data = LEARNERS[name], uneven_data()._replace(node_names=NodeNames(tuple("abcde")))

    def round(words, state, data):
        return learner.round(jax.random.wrap_key_data(words), state, data)

    key = jax.random.key(0)
    with jax.numpy_dtype_promotion("standard"):  # as Adam of optax needs it
        arguments = (jax.random.key_data(key), jax.jit(learner.init)(key, data), data)
        exported = jax.export.export(jax.jit(round))(*arguments)
        again = jax.export.deserialize(exported.serialize())
        actual, expected = jax.jit(again.call)(*arguments), jax.jit(round)(*arguments)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert type(actual[0]) is type(arguments[1])
    assert np.isfinite(actual[1].loss).all()
    assert jnp.ndim(actual[0].round_index) == 0
