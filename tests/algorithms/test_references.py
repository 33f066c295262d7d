"""Every algorithm against a float64 loop over nodes, on the same draws."""

from typing import Any

import jax
import numpy as np
import pytest
from problems import irregular_graph, small_task, start, uneven_data
from reference.gossip import d_psgd as reference_d_psgd
from reference.gradients import PlainGradient, SagaGradient, batch_entries
from reference.network import as_float64
from reference.push_sum import push_sum as reference_push_sum

import jaxfl
from jaxfl import gradients, graphs

ROUNDS, STEP_SIZE, NOISE_STD = 50, 0.2, 0.02
NODES = 5


def engine_run(algorithm, key, data):
    """First parameters, final state and, round by round, the draws as float64 lists for the reference."""

    @jax.jit
    def step(key, state, data):
        draws = algorithm.draw(key, state, data)
        return draws, *algorithm.update(state, data, draws)

    state, rounds = start(algorithm, key, data), []
    info: Any = None
    x0 = [as_float64(state.params, node) for node in range(NODES)]
    for _ in range(ROUNDS):
        draws, state, info = step(key, state, data)
        batch = getattr(draws.gradient, "batch", draws.gradient)
        entries = [batch_entries(batch, node) for node in range(NODES)]
        rounds.append((entries, [as_float64(draws.noise, node) for node in range(NODES)]))
        assert int(info.batch_overflow.sum()) == 0
        assert int(info.prefetch_misses.sum()) == 0
    return x0, state, rounds, info


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
    x0, state, rounds, info = engine_run(algorithm, key, data)
    references = make_references(sampler, table, clipping, data, x0)
    x, w, z = reference_push_sum(x0, graph.mixing_matrices, references, STEP_SIZE, rounds)
    assert np.ptp(w) > 0.1, "the weights must move for this test to mean something"
    np.testing.assert_allclose(state.push_sum_weight, w, rtol=1e-5)
    assert relative_error(state.params, x) < 1e-5
    assert relative_error(algorithm.node_params(state), z) < 1e-5
    check_info(info, references, z, rounds[-1][0], data, table)
    matrix = graph.mixing_matrix(ROUNDS - 1)
    receivers = (matrix > 0).sum(axis=0) - 1
    np.testing.assert_array_equal(info.bits_sent, receivers * 32 * (6 * 5 + 5 + 5 * 3 + 3 + 1))


@pytest.mark.parametrize("case", ["plain fixed 3 clipped L2", "factored uniform 3 repeats"])
def test_d_psgd_follows_the_papers_lines(case):
    sampler, table, clipping = CASES[case]
    data, key = uneven_data(), jax.random.key(4)
    graph = graphs.exponential(NODES)  # doubly stochastic and not symmetric: a transposed matrix would show
    algorithm = jaxfl.d_psgd(
        small_task(),
        graph=graph,
        gradient=make_gradient(sampler, table, clipping),
        noise=jaxfl.gaussian(NOISE_STD),
        step_size=STEP_SIZE,
    )
    x0, state, rounds, info = engine_run(algorithm, key, data)
    references = make_references(sampler, table, clipping, data, x0)
    x = reference_d_psgd(x0, graph.mixing_matrices, references, STEP_SIZE, rounds)
    assert relative_error(state.params, x) < 1e-5
    check_info(info, references, x, rounds[-1][0], data, table)
    np.testing.assert_array_equal(info.bits_sent, np.full(NODES, 32 * (6 * 5 + 5 + 5 * 3 + 3)))
