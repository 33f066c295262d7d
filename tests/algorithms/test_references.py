"""Every algorithm against a float64 loop over nodes, on the same draws."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import irregular_graph, small_task, uneven_data
from reference.gossip import a_dp2_sgd as reference_a_dp2_sgd
from reference.gossip import d_psgd as reference_d_psgd
from reference.gradients import SagaGradient
from reference.network import add, zeros_like
from reference.push_sum import push_sum as reference_push_sum
from reference.runs import check_info, each, entries, node_samples, one_by_one, plain_gradients, relative_error

import jaxfl
from jaxfl import gradients, graphs
from jaxfl.algorithms import dp2_sgd
from jaxfl.algorithms.a_dp2_sgd import a_dp2_sgd, released_gradients
from jaxfl.core import ArgumentError
from jaxfl.core.tree import norm, scale

ROUNDS, STEP_SIZE, NOISE_STD = 50, 0.2, 0.02
NODES = 5


def engine_run(algorithm, key, data):
    """The run, and of each round the entries and the noise of each node; of each event, where a round is events."""
    run = one_by_one(algorithm, key, data, ROUNDS)
    return run, [(entries(draws.gradient), each(draws.noise)) for draws in run.draws]


def check(info, references, params, used, data, case):
    """The last round's measurements, on the entries that it used, against the reference's."""
    check_info(info, references)
    entry_size = (CASES[case][1] or {}).get("entry_size", 1)
    samples = [
        sum(min(entry_size, size - entry_size * e) for e in own)
        for own, size in zip(used, np.asarray(data.sizes), strict=True)
    ]
    np.testing.assert_array_equal(info.gradient_evaluations, samples)


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


def learner(constructor, graph, case, noise=None, **options):
    """An algorithm with the gradients of a case."""
    sampler, table, clipping = CASES[case]
    estimator = gradients.mini_batch if table is None else gradients.saga
    return constructor(
        small_task(),
        graph=graph,
        gradient=estimator(sampler=sampler, **(table or {}), **clipping),
        noise=jaxfl.gaussian(NOISE_STD) if noise is None else noise,
        **{"step_size": STEP_SIZE, **options},
    )


def make_references(case, data, x0):
    """The reference's gradients of a case."""
    sampler, table, clipping = CASES[case]
    arguments = (sampler.batch_size, clipping.get("clip_norm"), clipping.get("clip_order", 2))
    if table is None:
        return plain_gradients(data, *arguments)
    size = table.get("entry_size", 1)
    return [SagaGradient(samples, *arguments, x, size) for samples, x in zip(node_samples(data), x0, strict=True)]


# One of each table and of each sampler; the others differ in numbers.
QUICK = (
    "plain poisson 2 clipped L1",
    "dense uniform 3 repeats",
    "factored refreshed",
    "factored fixed 3",
    "per batch 2",
)


@pytest.mark.parametrize("case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES])
@pytest.mark.quick_cases(2)
def test_push_sum_follows_the_papers_lines(case):
    data, graph, key = uneven_data(), irregular_graph(), jax.random.key(3)
    algorithm = learner(jaxfl.push_sum, graph, case)
    run, rounds = engine_run(algorithm, key, data)
    state, info, x0 = run.states[-1], run.infos[-1], each(run.states[0].params)
    references = make_references(case, data, x0)
    x, w, z = reference_push_sum(x0, graph.mixing_matrices, references, STEP_SIZE, rounds)
    assert np.ptp(w) > 0.1, "the weights must move for this test to mean something"
    np.testing.assert_allclose(state.push_sum_weight, w, rtol=1e-5)
    assert relative_error(state.params, x) < 1e-5
    assert relative_error(algorithm.node_params(state), z) < 1e-5
    check(info, references, z, rounds[-1][0], data, case)
    matrix = graph.mixing_matrix(ROUNDS - 1)
    receivers = (matrix > 0).sum(axis=0) - 1
    np.testing.assert_array_equal(info.bits_sent, receivers * 32 * (6 * 5 + 5 + 5 * 3 + 3 + 1))
    senders = (matrix > 0).sum(axis=1) - 1
    np.testing.assert_array_equal(info.bits_received, senders * 32 * (6 * 5 + 5 + 5 * 3 + 3 + 1))
    assert not np.array_equal(senders, receivers), "they must differ for this test to mean something"


def test_push_sum_follows_the_papers_lines_where_weights_stay_one():
    """Also from weights that are not one, as a run on another graph leaves them."""
    case = "plain fixed 3 clipped L2"
    data, graph = uneven_data(), graphs.exponential(NODES)
    algorithm = learner(jaxfl.push_sum, graph, case)
    run, rounds = engine_run(algorithm, jax.random.key(3), data)
    state, x0 = run.states[-1], each(run.states[0].params)
    references = make_references(case, data, x0)
    x, _, z = reference_push_sum(x0, graph.mixing_matrices, references, STEP_SIZE, rounds)
    np.testing.assert_array_equal(state.push_sum_weight, np.ones(NODES))
    assert relative_error(state.params, x) < 1e-5
    check(run.infos[-1], references, z, rounds[-1][0], data, case)

    factors = jnp.array([0.5, 1.5, 1.0, 0.7, 1.3])
    scaled = state._replace(push_sum_weight=factors, params=scale(factors, state.params))
    update = jax.jit(algorithm.update)
    (with_weights, _), (plain, _) = (update(one, data, run.draws[0]) for one in (scaled, state))
    # z is the same in both, and so is the step P (gamma g): x differs by P ((w - 1) z).
    moved = graphs.mix(graph, scale(factors - 1, state.params), state.round_index)
    assert relative_error(with_weights.params, each(jax.tree.map(jnp.add, plain.params, moved))) < 1e-5
    np.testing.assert_allclose(with_weights.push_sum_weight, graphs.mix(graph, factors, state.round_index), rtol=1e-6)


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
@pytest.mark.quick_cases(1)
def test_d_psgd_and_dp2_sgd_follow_the_papers_lines(constructor, graph, case):
    data, key = uneven_data(), jax.random.key(4)
    algorithm = learner(constructor, graph, case)
    run, rounds = engine_run(algorithm, key, data)
    x0 = each(run.states[0].params)
    references = make_references(case, data, x0)
    x = reference_d_psgd(x0, graph.mixing_matrices, references, STEP_SIZE, rounds)
    assert relative_error(run.states[-1].params, x) < 1e-5
    check(run.infos[-1], references, x, rounds[-1][0], data, case)
    receivers = (graph.mixing_matrix(ROUNDS - 1) > 0).sum(axis=0) - 1
    np.testing.assert_array_equal(run.infos[-1].bits_sent, receivers * 32 * (6 * 5 + 5 + 5 * 3 + 3))
    np.testing.assert_array_equal(run.infos[-1].bits_received, run.infos[-1].bits_sent)  # of as many neighbors


@pytest.mark.parametrize(
    ("constructor", "reference", "graph", "case"),
    [
        (jaxfl.push_sum, reference_push_sum, irregular_graph(), "dense poisson 2"),
        (jaxfl.push_sum, reference_push_sum, graphs.exponential(NODES), "plain fixed 3 clipped L2"),
        (dp2_sgd, reference_d_psgd, graphs.star(NODES, weights="metropolis"), "factored fixed 3"),
    ],
)
@pytest.mark.quick_cases(2)
def test_an_optimizer_comes_behind_the_noise(constructor, reference, graph, case):
    data, options = uneven_data(), {"step_size": None, "optimizer": optax.sgd(STEP_SIZE, momentum=0.9)}
    algorithm = learner(constructor, graph, case, **options)
    run, rounds = engine_run(algorithm, jax.random.key(6), data)
    x0 = each(run.states[0].params)
    actual = reference(x0, graph.mixing_matrices, make_references(case, data, x0), STEP_SIZE, rounds, momentum=0.9)
    x = actual[0] if isinstance(actual, tuple) else actual
    assert relative_error(run.states[-1].params, x) < 1e-5


def test_an_optimizer_is_of_each_node_by_itself():
    """Updates are scaled to norm 1 at every node, not over all of them. Nodes start alike, so mixing moves nothing."""
    rule = optax.chain(optax.normalize_by_update_norm(), optax.trace(0.5), optax.scale(-1.0))
    algorithm = jaxfl.d_psgd(small_task(), graph=graphs.ring(NODES), optimizer=rule)
    data, key = uneven_data(), jax.random.key(0)
    start = algorithm.init(key, data)
    state, _ = jax.jit(algorithm.round)(key, start, data)
    moved = norm(jax.tree.map(jnp.subtract, state.params, start.params))
    np.testing.assert_allclose(moved, np.ones(NODES), rtol=1e-4)
    np.testing.assert_allclose(norm(state.optimizer[1].trace), np.ones(NODES), rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"step_size": 0.1, "optimizer": optax.sgd(0.1)}])
def test_a_step_size_or_an_optimizer_and_not_both(options):
    with pytest.raises(ArgumentError, match=r"^step_size: must be given, or an optimizer"):
        jaxfl.d_psgd(small_task(), graph=graphs.ring(NODES), **options)


def test_a_dp2_sgd_follows_the_papers_lines():
    """50 rounds of 5 events on a star, delays of up to 7 events, and noise that differs from node to node."""
    case = "plain fixed 3 clipped L2"
    data, graph = uneven_data(), graphs.star(NODES)
    noise = jaxfl.gaussian(jnp.array([0.0, 0.01, 0.02, 0.03, 0.04]))
    algorithm = learner(a_dp2_sgd, graph, case, noise=noise, max_delay=7)
    run, rounds = engine_run(algorithm, jax.random.key(5), data)
    (*_, before, state), info, x0 = run.states, run.infos[-1], each(run.states[0].params)
    events = [
        (int(draws.node[e]), int(draws.neighbor[e]), int(draws.delay[e]), used[e], noise[e])
        for draws, (used, noise) in zip(run.draws, rounds, strict=True)
        for e in range(NODES)
    ]
    assert {delay for _, _, delay, _, _ in events} == set(range(8))
    references = make_references(case, data, x0)
    x, seen = reference_a_dp2_sgd(x0, references, STEP_SIZE, events)
    assert relative_error(state.params, x) < 1e-5
    undelayed, _ = reference_a_dp2_sgd(x0, references, STEP_SIZE, [(*e[:2], 0, *e[3:]) for e in events])
    assert relative_error(state.params, undelayed) > 1e-3, "delays must matter for this test to mean something"

    last, last_seen = events[-NODES:], seen[-NODES:]
    woke = [[s for (i, *_), s in zip(last, last_seen, strict=True) if i == node] for node in range(NODES)]
    assert not all(woke), "a node must have slept for this test to mean something"
    for name, actual in (("loss", info.loss), ("norm", info.gradient_norm)):
        expected = [np.mean([s[name] for s in own or last_seen]) for own in woke]
        np.testing.assert_allclose(actual, expected, rtol=1e-4)
    counts = np.array([len(own) for own in woke])
    np.testing.assert_array_equal(info.events, counts)
    np.testing.assert_array_equal(info.gradient_evaluations, 3 * counts)
    met = counts + np.bincount([j for _, j, *_ in last], minlength=NODES)
    np.testing.assert_array_equal(info.bits_sent, met * 32 * (6 * 5 + 5 + 5 * 3 + 3))
    np.testing.assert_array_equal(info.bits_received, info.bits_sent)

    total = zeros_like(x[0])
    for one in last_seen:
        total = add(total, 1.0, one["noisy"])
    released = released_gradients(graph, STEP_SIZE, before, state)
    assert relative_error(released, [total] * NODES) < 1e-4
