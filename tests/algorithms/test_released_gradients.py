"""Knowledge of an observer of every message: the noisy gradients, from two successive states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import problem, small_task, start
from registry import REGISTRY

from jaxfl import ArgumentError, graphs
from jaxfl.algorithms.push_sum import released_gradients as released_by_push_sum
from jaxfl.gradients import mini_batch

KEY = jax.random.key(5)
NAMES = [name for name, row in REGISTRY.items() if row.released and not row.releases_total and not row.special_case_of]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick_cases(1)
def test_released_gradients_equal_gradient_plus_noise(name):
    """On a time-varying graph, where it may be one whose push-sum weights move, with a scheduled step size.

    (For asynchronous algorithms test_references.py compares the network's total.)
    """
    p, gradient = problem(name), mini_batch(clip_norm=0.7)
    row, data, graph = p.row, p.data, p.example.topology["graph"]
    assert graph.period > 1

    def schedule(k):
        return 0.2 / (1.0 + k.astype(jnp.float32))

    algorithm = p.algorithm(gradient=lambda **_: gradient, noise_scale=0.3, step_size=schedule)
    assert row.released
    released_gradients = jax.jit(row.released, static_argnums=(0, 1))

    @jax.jit
    def one_round(state):
        draws = algorithm.draw(KEY, state, data)
        after, _ = algorithm.update(state, data, draws)
        params, k = algorithm.node_params(state), state.round_index
        actual, _, _ = gradient.estimate(small_task(), params, state.gradient, data, draws.gradient, k)
        released = released_gradients(graph, schedule, state, after)
        return after, jax.tree.map(jnp.add, actual, draws.noise), actual, released

    state = start(algorithm, KEY, data)
    for _ in range(4):
        state, expected, actual, released = one_round(state)
        for wanted, bare, got in zip(*map(jax.tree.leaves, (expected, actual, released)), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4)
            assert np.abs(got - bare).max() > 0.1, "the noise must show"
    moving = getattr(state, "push_sum_weight", np.arange(5))
    assert np.ptp(np.asarray(moving)) > 0.1, "the weights must move for this test to mean something"


@pytest.mark.parametrize("graph", [graphs.exponential(4), graphs.ring(6), graphs.directed_ring(4)])
def test_push_sum_refuses_to_solve_with_a_singular_matrix(graph):
    before: Any = None  # the graph alone decides
    with pytest.raises(ArgumentError, match=r"^graph: every mixing matrix must be well-conditioned .* odd number"):
        released_by_push_sum(graph, 0.1, before, before)
