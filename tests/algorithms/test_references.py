"""Every algorithm against a float64 loop over nodes, on the same draws."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import irregular_graph, small_task, start, uneven_data
from reference.gossip import a_dp2_sgd as reference_a_dp2_sgd
from reference.gossip import d_psgd as reference_d_psgd
from reference.gradients import PlainGradient, SagaGradient, batch_entries
from reference.network import add, as_float64, zeros_like
from reference.push_sum import push_sum as reference_push_sum

import jaxfl
from jaxfl import gradients, graphs
from jaxfl.algorithms import asynchronous_gossip, dp2_sgd
from jaxfl.core.tree import scale

ROUNDS, STEP_SIZE, NOISE_STD = 50, 0.2, 0.02
NODES = 5


class Run(NamedTuple):
    """What the engine did, and with which random numbers."""

    x0: list  # the nodes' first parameters, float64
    before: Any  # state before the last round
    state: Any  # final state
    rounds: list  # (entries of each node, noise of each node) of each round, for the reference; of each event, where
    # a round is events
    draws: list  # the draws themselves, round by round
    info: Any  # of the last round


def engine_run(algorithm, key, data):
    """Runs the rounds, keeping their draws."""

    @jax.jit
    def step(key, state, data):
        draws = algorithm.draw(key, state, data)
        return draws, *algorithm.update(state, data, draws)

    state, rounds, kept = start(algorithm, key, data), [], []
    before: Any = None
    info: Any = None
    x0 = [as_float64(state.params, node) for node in range(NODES)]
    for _ in range(ROUNDS):
        before = state
        draws, state, info = step(key, state, data)
        batch = getattr(draws.gradient, "batch", draws.gradient)
        entries = [batch_entries(batch, node) for node in range(NODES)]
        rounds.append((entries, [as_float64(draws.noise, node) for node in range(NODES)]))
        kept.append(draws)
        assert int(info.batch_overflow.sum()) == 0
        assert int(info.prefetch_misses.sum()) == 0
    return Run(x0=x0, before=before, state=state, rounds=rounds, draws=kept, info=info)


def node_samples(data):
    """Each node's samples, in its own order."""
    inputs, labels = np.asarray(data.inputs), np.asarray(data.labels)
    rows = zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True)
    return [[(inputs[j], int(labels[j])) for j in row[:size]] for row, size in rows]


def relative_error(engine, reference):
    """Largest over nodes of |engine - reference| / |reference|, all parameters together."""
    worst = 0.0
    for node, expected in enumerate(reference):
        found = as_float64(engine, node)
        pairs = [(found[name][part], expected[name][part]) for name in expected for part in expected[name]]
        difference = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
        worst = max(worst, difference / np.sqrt(sum(np.sum(b**2) for _, b in pairs)))
    return worst


def check_info(info, references, params, entries, data, table):
    """The last round's measurements against the reference's."""
    np.testing.assert_allclose(info.loss, [g.loss for g in references], rtol=1e-4)
    np.testing.assert_allclose(info.gradient_norm, [g.norm for g in references], rtol=1e-4)
    flat = np.array(
        [np.concatenate([leaf.reshape(-1) for layer in x.values() for leaf in layer.values()]) for x in params]
    )
    distance = ((flat - flat.mean(axis=0)) ** 2).sum(axis=1).mean()
    np.testing.assert_allclose(info.consensus_distance, distance, rtol=1e-4)
    entry_size = (table or {}).get("entry_size", 1)
    used = [
        sum(min(entry_size, size - entry_size * e) for e in own)
        for own, size in zip(entries, np.asarray(data.sizes), strict=True)
    ]
    np.testing.assert_array_equal(info.gradient_evaluations, used)


CASES = {
    "plain uniform 1": (gradients.uniform(1), None, {}),
    "plain fixed 3 clipped L2": (gradients.fixed(3), None, {"clip_norm": 0.7, "clip_order": 2}),
    "plain poisson 2 clipped L1": (gradients.poisson(2), None, {"clip_norm": 1.5, "clip_order": 1}),
    "dense uniform 1": (gradients.uniform(1), {"table": "dense"}, {}),
    "dense uniform 3 repeats": (gradients.uniform(3), {"table": "dense"}, {"clip_norm": 0.7}),
    "dense poisson 2": (gradients.poisson(2), {"table": "dense"}, {"clip_norm": 0.7}),
    "factored uniform 3 repeats": (gradients.uniform(3), {"table": "factored"}, {"clip_norm": 0.7}),
    "factored fixed 3": (gradients.fixed(3), {"table": "factored"}, {"clip_norm": 0.7}),
    "factored poisson 2 L1": (gradients.poisson(2), {"table": "factored"}, {"clip_norm": 1.5, "clip_order": 1}),
    "factored refreshed": (gradients.uniform(2), {"table": "factored", "refresh_every": 7}, {}),
    "per batch 2": (gradients.uniform(1), {"table": "per_batch", "entry_size": 2}, {"clip_norm": 0.7}),
    "per batch 4 two drawn": (gradients.uniform(2), {"table": "per_batch", "entry_size": 4}, {}),
}


def make_gradient(sampler, table, clipping):
    if table is None:
        return gradients.mini_batch(sampler=sampler, **clipping)
    return gradients.saga(sampler=sampler, **table, **clipping)


def make_references(sampler, table, clipping, data, x0):
    arguments = (sampler.batch_size, clipping.get("clip_norm"), clipping.get("clip_order", 2))
    if table is None:
        return [PlainGradient(samples, *arguments) for samples in node_samples(data)]
    size = table.get("entry_size", 1)
    return [SagaGradient(samples, *arguments, x, size) for samples, x in zip(node_samples(data), x0, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_push_sum_follows_the_papers_lines(case):
    sampler, table, clipping = CASES[case]
    data, graph, key = uneven_data(), irregular_graph(), jax.random.key(3)
    algorithm = jaxfl.push_sum(
        small_task(),
        graph=graph,
        gradient=make_gradient(sampler, table, clipping),
        noise=jaxfl.gaussian(NOISE_STD),
        step_size=STEP_SIZE,
    )
    run = engine_run(algorithm, key, data)
    state, info, references = run.state, run.info, make_references(sampler, table, clipping, data, run.x0)
    x, w, z = reference_push_sum(run.x0, graph.mixing_matrices, references, STEP_SIZE, run.rounds)
    assert np.ptp(w) > 0.1, "the weights must move for this test to mean something"
    np.testing.assert_allclose(state.push_sum_weight, w, rtol=1e-5)
    assert relative_error(state.params, x) < 1e-5
    assert relative_error(algorithm.node_params(state), z) < 1e-5
    check_info(info, references, z, run.rounds[-1][0], data, table)
    matrix = graph.mixing_matrix(ROUNDS - 1)
    receivers = (matrix > 0).sum(axis=0) - 1
    np.testing.assert_array_equal(info.bits_sent, receivers * 32 * (6 * 5 + 5 + 5 * 3 + 3 + 1))


def test_push_sum_follows_the_papers_lines_where_weights_stay_one():
    """Also from weights that are not one, as a run on another graph leaves them."""
    sampler, table, clipping = CASES["plain fixed 3 clipped L2"]
    data, graph = uneven_data(), graphs.exponential(NODES)
    algorithm = jaxfl.push_sum(
        small_task(),
        graph=graph,
        gradient=make_gradient(sampler, table, clipping),
        noise=jaxfl.gaussian(NOISE_STD),
        step_size=STEP_SIZE,
    )
    run = engine_run(algorithm, jax.random.key(3), data)
    references = make_references(sampler, table, clipping, data, run.x0)
    x, _, z = reference_push_sum(run.x0, graph.mixing_matrices, references, STEP_SIZE, run.rounds)
    np.testing.assert_array_equal(run.state.push_sum_weight, np.ones(NODES))
    assert relative_error(run.state.params, x) < 1e-5
    check_info(run.info, references, z, run.rounds[-1][0], data, table)

    factors = jnp.array([0.5, 1.5, 1.0, 0.7, 1.3])
    scaled = run.state._replace(push_sum_weight=factors, params=scale(factors, run.state.params))
    draws = run.draws[0]
    found, _ = jax.jit(algorithm.update)(scaled, data, draws)
    plain, _ = jax.jit(algorithm.update)(run.state, data, draws)
    # z is the same in both, and so is the step P (gamma g): x differs by P ((w - 1) z).
    moved = graphs.mix(graph, scale(factors - 1, run.state.params), run.state.round_index)
    assert (
        relative_error(found.params, [as_float64(jax.tree.map(jnp.add, plain.params, moved), i) for i in range(NODES)])
        < 1e-5
    )
    np.testing.assert_allclose(found.push_sum_weight, graphs.mix(graph, factors, run.state.round_index), rtol=1e-6)


@pytest.mark.parametrize(
    ("constructor", "graph", "case"),
    [
        # Doubly stochastic and not symmetric: a transposed matrix would show.
        (jaxfl.d_psgd, graphs.exponential(NODES), "plain fixed 3 clipped L2"),
        (jaxfl.d_psgd, graphs.exponential(NODES), "factored uniform 3 repeats"),
        # Unequal weights, and degrees 4 and 1.
        (dp2_sgd, graphs.star(NODES, weights="metropolis"), "plain poisson 2 clipped L1"),
    ],
)
def test_d_psgd_and_dp2_sgd_follow_the_papers_lines(constructor, graph, case):
    sampler, table, clipping = CASES[case]
    data, key = uneven_data(), jax.random.key(4)
    algorithm = constructor(
        small_task(),
        graph=graph,
        gradient=make_gradient(sampler, table, clipping),
        noise=jaxfl.gaussian(NOISE_STD),
        step_size=STEP_SIZE,
    )
    run = engine_run(algorithm, key, data)
    references = make_references(sampler, table, clipping, data, run.x0)
    x = reference_d_psgd(run.x0, graph.mixing_matrices, references, STEP_SIZE, run.rounds)
    assert relative_error(run.state.params, x) < 1e-5
    check_info(run.info, references, x, run.rounds[-1][0], data, table)
    receivers = (graph.mixing_matrix(ROUNDS - 1) > 0).sum(axis=0) - 1
    np.testing.assert_array_equal(run.info.bits_sent, receivers * 32 * (6 * 5 + 5 + 5 * 3 + 3))


def test_a_dp2_sgd_follows_the_papers_lines():
    """50 rounds of 5 events on a star, delays of up to 7 events, and noise that differs from node to node."""
    sampler, _, clipping = CASES["plain fixed 3 clipped L2"]
    data, graph = uneven_data(), graphs.star(NODES)
    algorithm = asynchronous_gossip.a_dp2_sgd(
        small_task(),
        graph=graph,
        gradient=make_gradient(sampler, None, clipping),
        noise=jaxfl.gaussian(jnp.array([0.0, 0.01, 0.02, 0.03, 0.04])),
        step_size=STEP_SIZE,
        max_delay=7,
    )
    run = engine_run(algorithm, jax.random.key(5), data)
    events = [
        (int(draws.node[e]), int(draws.neighbor[e]), int(draws.delay[e]), entries[e], noise[e])
        for draws, (entries, noise) in zip(run.draws, run.rounds, strict=True)
        for e in range(NODES)
    ]
    assert {delay for _, _, delay, _, _ in events} == set(range(8))
    references = make_references(sampler, None, clipping, data, run.x0)
    x, seen = reference_a_dp2_sgd(run.x0, references, STEP_SIZE, events)
    assert relative_error(run.state.params, x) < 1e-5
    undelayed, _ = reference_a_dp2_sgd(run.x0, references, STEP_SIZE, [(*e[:2], 0, *e[3:]) for e in events])
    assert relative_error(run.state.params, undelayed) > 1e-3, "delays must matter for this test to mean something"

    last, last_seen = events[-NODES:], seen[-NODES:]
    woke = [[s for (i, *_), s in zip(last, last_seen, strict=True) if i == node] for node in range(NODES)]
    assert not all(woke), "a node must have slept for this test to mean something"
    for name, found in (("loss", run.info.loss), ("norm", run.info.gradient_norm)):
        expected = [np.mean([s[name] for s in own or last_seen]) for own in woke]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    counts = np.array([len(own) for own in woke])
    np.testing.assert_array_equal(run.info.events, counts)
    np.testing.assert_array_equal(run.info.gradient_evaluations, 3 * counts)
    met = counts + np.bincount([j for _, j, *_ in last], minlength=NODES)
    np.testing.assert_array_equal(run.info.bits_sent, met * 32 * (6 * 5 + 5 + 5 * 3 + 3))

    total = zeros_like(x[0])
    for one in last_seen:
        total = add(total, 1.0, one["noisy"])
    released = asynchronous_gossip.released_gradients(graph, STEP_SIZE, run.before, run.state)
    assert relative_error(released, [total] * NODES) < 1e-4
