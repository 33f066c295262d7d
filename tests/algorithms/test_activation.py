"""Nodes that sleep: they keep everything, and the sums of those that are awake stay."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused
from problems import linear_task, run, uneven_data
from reference.runs import assert_same, by_node, one_by_one

import jaxfl
from jaxfl import graphs, privacy
from jaxfl.algorithms import cyclic_activation, debiased_params, random_activation
from jaxfl.channel import uniform_quantizer

KEY, NODES = jax.random.key(8), 16
RING = graphs.from_matrix(0.4 * np.eye(NODES) + 0.6 * graphs.ring(NODES).mixing_matrix(0))
DATA = uneven_data(sizes=tuple(4 + i % 5 for i in range(NODES)), classes=5)
SLEEPY = {
    "uniform": random_activation(0.6),
    "markov": random_activation(0.8, wake_rate=0.3),
    "cyclic": cyclic_activation(3, 2),
}
METHODS = {
    "d_psgd": jaxfl.d_psgd,
    "push_sum": jaxfl.push_sum,
    "d_sgdm": functools.partial(jaxfl.d_sgdm, momentum=0.7),
    "qg_dsgdm": functools.partial(jaxfl.qg_dsgdm, momentum=0.7),
}


def learner(name, activation, **options: Any):
    arguments: dict[str, Any] = {"graph": RING, "step_size": 0.05, "gradient": jaxfl.mini_batch(2), **options}
    return METHODS[name](linear_task(), activation=activation, **arguments)


def kept(state):
    """All that a node keeps, (n, d)."""
    return by_node([leaf for leaf in jax.tree.leaves(state) if jnp.ndim(leaf) > 0])


@pytest.mark.parametrize("kind", SLEEPY)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.quick_cases(4)
def test_a_node_that_sleeps_keeps_all_bits_and_sends_nothing(name, kind):
    """And the others move; what is counted is what they do, over links that lose and round, in two exchanges."""
    links = jaxfl.links(0.8, uniform_quantizer(2.0**-10), symmetric=True)
    ours = learner(name, SLEEPY[kind], links=links, num_mixings=2, noise=jaxfl.gaussian(0.01))
    rounds = one_by_one(ours, KEY, DATA, 12)
    edges = (RING.mixing_matrix(0) > 0) & ~np.eye(NODES, dtype=bool)
    for k, (before, after, info) in enumerate(zip(rounds.states[:-1], rounds.states[1:], rounds.infos, strict=True)):
        awake = np.asarray(SLEEPY[kind].draw(KEY, jnp.int32(k), NODES))
        assert 0 < awake.sum() < NODES
        same = (kept(before) == kept(after)).all(axis=1)
        np.testing.assert_array_equal(same, ~awake)
        between = edges & awake[:, None] & awake[None]
        size = by_node(before.params).shape[1]
        bits = 2 * (size * links.bits + (32 if name == "push_sum" else 0))
        if name != "push_sum":
            bits = size * (links.bits + (32 if name in ("d_sgdm", "qg_dsgdm") else links.bits))
        np.testing.assert_array_equal(info.bits_sent, between.sum(axis=0) * np.float32(bits))
        np.testing.assert_array_equal(info.bits_received, between.sum(axis=1) * np.float32(bits))
        np.testing.assert_array_equal(info.gradient_evaluations, 2 * awake)
        np.testing.assert_array_equal(info.awake, awake)
        assert (np.asarray(info.lost_messages) <= 2 * between.sum(axis=0)).all()


def test_follows_the_lines():
    """Float64: x_i + sum over awake neighbors of W_ij (x_j - x_i) - gamma g_i, for those that are awake; to 1e-6."""
    ours, silent = learner("d_psgd", SLEEPY["markov"]), learner("d_psgd", None, graph=graphs.isolated(NODES))
    rounds, weights = one_by_one(ours, KEY, DATA, 20), RING.mixing_matrix(0)
    step = jax.jit(lambda state: silent.round(KEY, state, DATA)[0].params)
    for before, draws, after in zip(rounds.states[:-1], rounds.draws, rounds.states[1:], strict=True):
        x, awake = by_node(before.params), np.asarray(draws.links.awake)
        heard = weights * awake[:, None] * awake[None]
        mixed = x + heard @ x - heard.sum(axis=1, keepdims=True) * x
        expected = np.where(awake[:, None], mixed + by_node(step(before)) - x, x)
        np.testing.assert_allclose(by_node(after.params), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_sums_move_by_the_steps_of_those_awake_over_1000_rounds(name):
    """To 1e-5 of the largest x, in float32; push-sum on a directed graph that changes, with weights that sum to n."""
    estimator, gamma = jaxfl.mini_batch(2), 0.02
    graph, data = graphs.exponential(NODES) if name == "push_sum" else RING, DATA
    ours = learner(name, SLEEPY["markov"], graph=graph, step_size=gamma)

    @jax.jit
    def states(key):
        def step(state, _):
            draws = ours.draw(key, state, data)
            x = debiased_params(state) if name == "push_sum" else state.params
            drawn = draws.gradient
            g, *_ = estimator.estimate(linear_task(), x, None, data, drawn, state.round_index)
            after, info = ours.update(state, data, draws)
            m = (
                g
                if not hasattr(state, "memory")
                else jax.tree.map(lambda m, g: 0.7 * m + g, state.memory["momentum"], g)
            )
            along = jax.tree.map(lambda leaf: jnp.einsum("n,n...->...", info.awake.astype(leaf.dtype), leaf), m)
            weights = getattr(state, "push_sum_weight", jnp.ones(1))
            return after, (jax.tree.map(lambda leaf: leaf.sum(axis=0), after.params), along, weights.sum(), x)

        first = ours.init(key, data)
        return first.params, jax.lax.scan(step, first, length=1000)[1]

    first, (total, along, mass, x) = states(KEY)

    def rows(tree):
        return np.concatenate([np.float64(leaf).reshape(1000, -1) for leaf in jax.tree.leaves(tree)], axis=1)

    error = rows(total) - by_node(first).sum(axis=0) + gamma * np.cumsum(rows(along), axis=0)
    largest = np.abs(rows(x)).max() * len(data.sizes)
    print(f"{name}: error of the sum {np.abs(error).max() / largest:.1e}")
    assert np.abs(error).max() < 1e-5 * largest
    np.testing.assert_allclose(mass, mass[0], rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.quick_cases(2)
def test_nobody_sleeps(name):
    """The plain rounds, to 1e-5."""
    plain, awake = learner(name, None), learner(name, random_activation(1.0))
    assert_same(run(awake, KEY, DATA, 20)[0].params, run(plain, KEY, DATA, 20)[0].params, rtol=1e-5, atol=1e-6)


@pytest.mark.statistical
def test_nodes_are_awake_as_often_as_they_are_to_be():
    def draw(one):
        return np.asarray(jax.jit(jax.vmap(lambda k: one.draw(KEY, k, 50)))(jnp.arange(2000, dtype=jnp.int32)))

    uniform, markov, cyclic = map(draw, SLEEPY.values())
    assert uniform.mean() == pytest.approx(0.6, abs=4 * np.sqrt(0.24 / uniform.size))
    rate, memory = 0.3 / 0.5, 0.5
    spread = np.sqrt(rate * (1 - rate) / markov.size * (1 + memory) / (1 - memory))
    assert markov.mean() == pytest.approx(rate, abs=4 * spread)
    assert markov[1:][~markov[:-1]].mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / (~markov[:-1]).sum()))
    np.testing.assert_array_equal(cyclic, (np.arange(2000)[:, None] - np.arange(50)[None]) % 3 < 2)
    messages = jaxfl.links(0.6).draw_to_server(KEY, 3, 50).arrived
    assert (np.asarray(messages) != uniform[3]).any(), "who sleeps is drawn apart from what is lost"


def test_the_statement_counts_all_rounds():
    gradient = jaxfl.mini_batch(sampler=jaxfl.gradients.poisson(2), clip_norm=1.0)
    private: dict[str, Any] = {"gradient": gradient, "noise": jaxfl.gaussian(2.0)}
    for name in METHODS:
        ours, theirs = (
            privacy.statements(learner(name, one, **private), [90] * NODES, 50, dp_delta=1e-5)
            for one in (SLEEPY["uniform"], None)
        )
        assert ours == theirs


def test_refusals():
    sleepy = SLEEPY["uniform"]
    refused(lambda: random_activation(1.5), "rate")
    refused(lambda: random_activation(0.5, wake_rate=-0.1), "wake_rate")
    refused(lambda: cyclic_activation(0, 1), "period")
    refused(lambda: cyclic_activation(4, 2), "num_awake")
    refused(lambda: learner("push_sum", sleepy, gradient=jaxfl.saga()), "gradient", "read no table ahead")
    shared = jaxfl.shared_gaussian(1.0, key_graph=privacy.key_graph("complete", NODES), ratio=10.0)
    refused(lambda: learner("d_psgd", sleepy, noise=shared), "noise", "does not cancel")
    robust = jaxfl.algorithms.trimmed_mean(1)
    refused(lambda: learner("d_psgd", sleepy, aggregate=robust), "activation")
