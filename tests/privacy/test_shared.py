"""Effective noise, the ratio rule, and noise that pairs of nodes share."""

import itertools
import math

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from helpers import refusals

import jaxfl
from jaxfl import graphs
from jaxfl.privacy import key_graph, shared
from jaxfl.privacy.shared import effective_noise, noise_against, pairs
from jaxfl.privacy.shared_ratio import best_ratio, variances

KEY = jax.random.key(0)
EDGES = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)]
WEIGHTS = [3.0, 1.0, 2.0, 0.5, 1.0]
CLIQUES = [*itertools.combinations(range(5), 2), *((i, 5) for i in range(1, 5)), *((5, i) for i in range(6, 16))]
CLIQUES += itertools.combinations(range(6, 16), 2)


# Effective noise


@pytest.mark.parametrize(
    ("name", "num_nodes", "ratio", "colluding", "expected"),
    [
        ("ring", 16, 3.0, 0, 2.454154),
        ("ring", 16, 3.0, 1, 1.881749),
        ("ring", 16, 3.0, 2, 1.0),
        ("exponential", 16, 3.0, 0, 3.593991),
        ("exponential", 16, 3.0, 1, 3.446936),
        ("exponential", 16, 3.0, 2, 3.285730),
        ("complete", 16, 1.0, 0, 2.915476),
        ("complete", 16, 1.0, 2, 2.738613),
        ("exponential", 50, 1.0, 0, 3.172505),
        ("exponential", 50, 1.0, 1, 3.060755),
        ("exponential", 16, 3.0, 15, 1.0),
    ],
)
def test_effective_noise_is_that_of_the_worst_colluding_nodes(name, num_nodes, ratio, colluding, expected):
    found = effective_noise(key_graph(name, num_nodes), ratio=ratio, colluding=colluding)
    np.testing.assert_allclose(found.noise, np.full(num_nodes, expected), atol=1e-6)
    assert found.method == "exact"


@pytest.mark.parametrize(
    ("keys", "ratio", "colluding", "expected", "tolerance"),
    [
        (key_graph("ring", 16), 3.0, 1, 1.873883, 1e-6),
        (key_graph("exponential", 16), 3.0, 1, 3.332659, 1e-6),
        (key_graph("exponential", 16), 3.0, 2, 3.050890, 1e-6),
        (key_graph("exponential", 50), 1.0, 1, 3.043437, 1e-6),
        (pairs(16, CLIQUES), 3.0, 1, 2.0027, 1e-4),
    ],
)
def test_the_bound_by_currents_takes_the_place_of_too_many_sets(
    monkeypatch, keys, ratio, colluding, expected, tolerance
):
    exact = effective_noise(keys, ratio=ratio, colluding=colluding)
    monkeypatch.setattr(shared, "_MOST_SETS", 0)
    bound = effective_noise(keys, ratio=ratio, colluding=colluding)
    assert bound.method == "bound"
    assert float(bound.noise[0]) == pytest.approx(expected, abs=tolerance)
    assert (bound.noise <= exact.noise * (1 + 1e-12)).all()


def test_the_bound_is_never_above_the_worst_set_of_a_random_weighted_graph(monkeypatch):
    rng = np.random.default_rng(0)
    for trial in range(20):
        edges = [pair for pair in itertools.combinations(range(7), 2) if rng.random() < 0.6]
        keys, own = pairs(7, edges, rng.uniform(0.2, 3, len(edges))), rng.uniform(0.5, 2, 7)
        options = {"ratio": 2.0, "own": own, "colluding": 1 + trial % 3}
        exact = effective_noise(keys, **options)
        with monkeypatch.context() as patch:
            patch.setattr(shared, "_MOST_SETS", 0)
            bound = effective_noise(keys, **options)
        assert (bound.noise <= exact.noise * (1 + 1e-9)).all()
        assert (bound.noise >= own).all()


@pytest.mark.parametrize(
    ("colluders", "expected"),
    [([], 1.646649), ([1], 1.414214), ([2], 1.201351), ([3], 1.581139), ([2, 3], 1.115008)],
)
def test_noise_against_one_set(colluders, expected):
    weights, own = pairs(4, EDGES, WEIGHTS).weights, [1.0, 0.5, 2.0, 1.0]
    assert noise_against(own, weights, colluders)[0] == pytest.approx(expected, abs=1e-6)
    # the definition, without a spectrum
    honest = [node for node in range(4) if node not in colluders]
    squares = np.square(weights)[np.ix_(honest, honest)]
    sigma = np.diag(np.square(own)[honest] + squares.sum(axis=1)) - squares
    assert 1 / math.sqrt(np.linalg.inv(sigma)[0, 0]) == pytest.approx(expected, abs=1e-6)


def test_the_worst_colluder_need_not_be_a_neighbor():
    keys = pairs(16, CLIQUES)
    of = [noise_against(np.ones(16), 3 * keys.weights, colluders)[0] for colluders in ([], [1], [5])]
    np.testing.assert_allclose(of, [3.1467, 2.9076, 2.1448], atol=1e-4)
    assert effective_noise(keys, ratio=3.0).noise[0] == pytest.approx(of[2])


@pytest.mark.parametrize("colluding", [0, 1, 2])
def test_every_set_is_tried_where_nodes_differ(colluding):
    own, keys = np.array([1.0, 0.5, 2.0, 1.0, 0.7]), key_graph("exponential", 5)
    sets = itertools.combinations(range(5), colluding)
    worst = np.min([noise_against(own, 2 * keys.shared(own), each) for each in sets], axis=0)
    np.testing.assert_allclose(effective_noise(keys, ratio=2.0, own=own, colluding=colluding).noise, worst)


@pytest.mark.statistical
@pytest.mark.parametrize("colluding", [0, 1])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_the_likelihood_of_all_that_is_seen_has_the_claimed_delta(colluding, rate):
    """Two rounds of three nodes; the observer sees all y, and node 2's own noise and seeds where it colludes.

    Delta of the whole ratio is that of the claim where the gradient stays the worst, and no larger where the second one
    follows from what was seen.
    """
    count, change, epsilon, rng = 400_000, 1.5, 1.0, np.random.default_rng(0)
    keys, own = pairs(3, [(0, 1), (1, 2), (0, 2)], [1.0, 2.0, 0.7]), np.array([1.0, 0.5, 0.8])
    shared_std = keys.shared(own)
    columns = [own[i] * np.eye(3)[i] for i in range(3)]
    columns += [shared_std[i, v] * (np.eye(3)[i] - np.eye(3)[v]) for i, v in ((0, 1), (1, 2), (0, 2))]
    seen = np.vstack([np.array(columns).T, np.eye(6)[[2, 4, 5]] if colluding else np.zeros((0, 6))])
    inverse = np.linalg.inv(seen @ seen.T)

    def released(shift):
        """The log-likelihood ratio of one round's view, and what the observer makes of it."""
        drawn = rng.random(count) < rate
        view = seen @ rng.normal(size=(6, count))
        view[0] += shift * drawn
        exponent = shift * (inverse @ view)[0] - shift**2 * inverse[0, 0] / 2
        return np.log1p(rate * np.expm1(exponent)), np.sign((inverse @ view)[0])

    def delta(adaptive):
        first, sign = released(np.full(count, change))
        second, _ = released(np.where(sign > 0, change, -0.5 * change) if adaptive else np.full(count, change))
        lost = np.maximum(0, -np.expm1(epsilon - first - second))
        return lost.mean(), lost.std() / math.sqrt(count)

    noise = noise_against(own, shared_std, [2][:colluding])[0]
    assert noise == pytest.approx(1 / math.sqrt(inverse[0, 0]))
    x, step = np.linspace(-12, 12 + change / noise, 4001, retstep=True)
    plain, moved = (np.exp(-np.square(x - mean) / 2) / math.sqrt(2 * math.pi) for mean in (0, change / noise))
    mixed = (1 - rate) * plain + rate * moved
    claim = np.maximum(0, np.outer(mixed, mixed) - math.exp(epsilon) * np.outer(plain, plain)).sum() * step**2
    found, error = delta(adaptive=False)
    assert abs(found - claim) < 4 * error
    assert error < 0.01 * claim
    found, error = delta(adaptive=True)
    assert found < claim + 4 * error


# The rule for the ratio: spec, table of 3.2; (ratio, V / V(0)) of ring, exponential and complete, and the even ratio


@pytest.mark.parametrize(
    ("graph", "num_nodes", "mixings", "colluding", "v", "mean", "v_shared", "rows", "even"),
    [
        ("ring", 16, 1, 0, 1.51490, 0.62500, (0.39554, 4.88990, 14.23840),
         ((1.819, 0.4942), (0.658, 0.7061), (0.3746, 0.8148)), 0.7720),
        ("ring", 16, 1, 1, 1.51490, 0.62500, (0.39554, 4.88990, 14.23840),
         ((1.369, 0.7609), (0.616, 0.7817), (0.3548, 0.8510)), 0.6997),
        ("exponential", 16, 1, 0, 1.28187, 0.62500, (1.27930, 4.29727, 10.51000),
         ((0.709, 0.8654), (0.642, 0.7218), (0.4167, 0.7529)), 0.9108),
        ("exponential", 16, 1, 1, 1.28187, 0.62500, (1.27930, 4.29727, 10.51000),
         ((None, 1.0000), (0.597, 0.7980), (0.4006, 0.7887)), 0.8412),
        ("exponential", 16, 2, 0, 0.81250, 0.62500, (0.31250, 1.06250, 3.00000),
         ((1.448, 0.5896), (0.998, 0.4166), (0.6160, 0.4684)), 1.7500),
        ("exponential", 16, 3, 0, 0.68750, 0.62500, (0.11719, 0.35156, 1.00000),
         ((2.284, 0.4048), (1.351, 0.2540), (0.8384, 0.2812)), 3.0516),
        ("exponential", 16, 4, 0, 0.62500, 0.62500, (0.0, 0.0, 0.0),
         ((10.0, None), (10.0, None), (10.0, 101 / 1601)), 10.0),
        ("ring", 50, 1, 0, 1.50780, 0.20000, (0.39669, 12.44018, 65.39015),
         ((1.817, 0.4958), (0.507, 0.8323), (0.1864, 0.9476)), 0.3604),
        ("exponential", 50, 1, 0, 1.01933, 0.20000, (1.45766, 8.80038, 40.96650),
         ((0.446, 0.9585), (0.475, 0.8581), (0.2217, 0.9028)), 0.4682),
        ("exponential", 50, 6, 0, 0.20252, 0.20000, (0.00049, 0.02145, 0.12599),
         ((None, None), (2.507, 0.0561), (1.1078, 0.0630)), 8.8182),
    ],
)  # fmt: skip
def test_the_ratio_is_that_of_least_variance(graph, num_nodes, mixings, colluding, v, mean, v_shared, rows, even):
    network, options = getattr(graphs, graph)(num_nodes), {"num_mixings": mixings, "colluding": colluding}
    for name, of_pairs, (ratio, variance) in zip(("ring", "exponential", "complete"), v_shared, rows, strict=True):
        of = variances(network, key_graph(name, num_nodes), num_mixings=mixings)
        np.testing.assert_allclose(of, (v, of_pairs, mean), atol=6e-6)
        found = best_ratio(network, name, **options)
        if variance is not None:
            assert found.variance == pytest.approx(variance, abs=1e-4 if name == "complete" else 1e-3)
        if ratio is not None:
            assert found.ratio == pytest.approx(ratio, abs=1e-4 if name == "complete" else 0.02 * ratio)
    assert best_ratio(network, "complete", least="mean", **options).ratio == pytest.approx(even, abs=1e-4)


def test_auto_takes_the_key_graph_of_least_variance():
    assert best_ratio(graphs.ring(16), colluding=0).key_graph.name == "ring(16)"
    assert best_ratio(graphs.exponential(16), num_mixings=4, colluding=0).key_graph.name == "complete"
    assert best_ratio(graphs.ring(16), colluding=2).key_graph.name != "ring(16)"  # two neighbors hide nothing


def test_a_ratio_that_is_given_is_kept_and_key_graphs_are_compared_at_it():
    options = {"ratio": 2.0, "colluding": 0}
    each = [best_ratio(graphs.ring(16), name, **options) for name in ("mixing", "exponential", "complete")]
    found = best_ratio(graphs.ring(16), **options)
    assert (found.ratio, found.variance) == (2.0, min(choice.variance for choice in each))
    assert best_ratio(graphs.ring(16), "mixing", ratio=0.0).variance == pytest.approx(1)


def test_the_even_ratio_is_the_largest_at_which_nodes_are_no_noisier():
    found = best_ratio(graphs.exponential(16), "exponential", least="mean", colluding=0)
    assert found.ratio > best_ratio(graphs.exponential(16), "exponential", colluding=0).ratio
    assert 0.99 < found.variance <= 1 + 1e-9


@pytest.mark.parametrize("graph", [graphs.ring(6), graphs.exponential(6), graphs.star(5)])
@pytest.mark.parametrize("mixings", [1, 2])
def test_variances_are_those_of_simulated_push_sum(graph, mixings):
    """Noise alone is pushed through the rounds; star's push-sum weights move."""
    n, kappa, rng = graph.num_nodes, math.sqrt(0.8), np.random.default_rng(1)
    keys = key_graph(graph, n)
    incidence = np.stack([np.eye(n)[i] - np.eye(n)[v] for i, v in zip(*np.nonzero(np.triu(keys.weights)), strict=True)])
    for which, columns in enumerate((np.eye(n), incidence.T)):
        x, w, seen = np.zeros((n, 20_000)), np.ones(n), []
        for k in range(40):
            x = (1 - (1 - kappa) / w)[:, None] * x + columns @ rng.normal(size=(columns.shape[1], 20_000))
            for m in range(mixings):
                mixing = graph.mixing_matrix(k * mixings + m)
                x, w = mixing @ x, mixing @ w
            if k >= 40 - 6:
                seen.append(np.square(x / w[:, None]).mean())
        expected = variances(graph, keys, num_mixings=mixings, memory=5.0)[which]
        assert np.mean(seen) == pytest.approx(expected, rel=0.03)


# What is drawn


OWN = np.array([0.5, 1.0, 2.0, 1.5])
NOISES = {
    "ring": ("ring", 5, 1.0),
    "ring of two": ("ring", 2, 1.0),
    "ring of four": ("ring", 4, 1.0),
    "exponential, offset n / 2": ("exponential", 8, 1.0),
    "complete": ("complete", 6, 1.0),
    "complete, own scales": ("complete", 4, OWN),
    "exponential, own scales": ("exponential", 4, OWN),
    "pairs": (pairs(4, EDGES, WEIGHTS), 4, 1.0),
    "star": (graphs.star(4), 4, 1.0),
    "more pairs than nodes": (graphs.from_networkx(nx.gnp_random_graph(7, 0.7, seed=1)), 7, 1.0),
}


def made(case, ratio=2.0, **options):
    which, num_nodes, scales = NOISES[case]
    keys = key_graph(which, num_nodes)
    return keys, scales, jaxfl.shared_gaussian(scales, key_graph=keys, ratio=ratio, **options)


@pytest.mark.statistical
@pytest.mark.parametrize("case", NOISES)
def test_the_covariance_over_nodes_is_that_of_calibration(case):
    keys, scales, noise = made(case, colluding=1)
    n, count = keys.num_nodes, 100_000
    like = {"a": jnp.zeros((n, count // 2)), "b": jnp.zeros((n, 5, count // 10))}
    drawn = np.concatenate([np.asarray(leaf, np.float64).reshape(n, -1) for leaf in noise.draw(KEY, like).values()], 1)
    parts = np.broadcast_to(scales, (n,))
    factor = (parts / effective_noise(keys, ratio=2.0, own=parts, colluding=1).noise).max()
    squares = np.square(2.0 * factor * keys.shared(parts))
    expected = np.diag(np.square(factor * parts) + squares.sum(axis=1)) - squares
    error = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + np.square(expected)) / count)
    assert (np.abs(drawn @ drawn.T / count - expected) < 4 * error).all()
    # What this noise is made for: no node has less than its scale, and the neediest has no more.
    worst = effective_noise(keys, ratio=2.0, own=factor * parts, colluding=1).noise
    assert (worst / parts).min() == pytest.approx(1.0)


@pytest.mark.parametrize("case", NOISES)
def test_shared_parts_cancel_in_the_sum_over_nodes(case):
    """The sum at a large ratio has the standard deviation of own noise; 1e-5 of the shared one is rounding."""
    keys, scales, noise = made(case, ratio=1000.0, colluding=0)
    drawn = np.asarray(noise.draw(KEY, jnp.zeros((keys.num_nodes, 40_000))), np.float64)
    parts = np.broadcast_to(scales, (keys.num_nodes,))
    factor = (parts / effective_noise(keys, ratio=1000.0, own=parts, colluding=0).noise).max()
    own = factor * np.sqrt(np.square(parts).sum())
    assert drawn.sum(axis=0).std() == pytest.approx(own, rel=0.02)
    assert drawn.std() > 100 * own / keys.num_nodes


def test_rounds_coordinates_and_leaves_have_noise_of_their_own():
    noise = made("exponential, offset n / 2")[2]
    first, second = (
        noise.draw(jax.random.key(seed), {"a": jnp.zeros((8, 9)), "b": jnp.zeros((8, 9))}) for seed in (0, 1)
    )
    numbers = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves((first, second))])
    assert len(np.unique(numbers)) == len(numbers)


@pytest.mark.parametrize("scale", [0.7, OWN])
def test_ratio_zero_is_noise_of_ones_own_bit_for_bit(scale):
    noise = jaxfl.shared_gaussian(scale, key_graph=key_graph("ring", 4), ratio=0.0)
    like = jnp.zeros((4, 33))
    np.testing.assert_array_equal(noise.draw(KEY, like), jaxfl.gaussian(scale).draw(KEY, like))
    assert noise.secrets is None


def test_a_single_scale_may_be_traced():
    keys, like = key_graph("exponential", 4), jnp.zeros((4, 5))

    def draw(scale):
        return jaxfl.shared_gaussian(scale, key_graph=keys, ratio=1.0).draw(KEY, like)

    swept = jax.jit(jax.vmap(draw))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(swept[1], 2 * draw(1.0), rtol=1e-6)


# Algorithms and statements


TASK = jaxfl.from_functions(lambda key: jnp.zeros(6), lambda w, x, y: x @ w)
CLIPPED = jaxfl.mini_batch(sampler=jaxfl.gradients.poisson(4), clip_norm=1.0)


def learner(noise, build=jaxfl.push_sum, graph=None, **options):
    graph = graphs.complete(4) if graph is None else graph
    return build(TASK, graph=graph, gradient=CLIPPED, noise=noise, **{"step_size": 0.1, **options})


def shared_noise(ratio=2.0, num_nodes=4, **options):
    return jaxfl.shared_gaussian(0.5, key_graph=key_graph("exponential", num_nodes), ratio=ratio, **options)


@pytest.mark.parametrize("build", [jaxfl.push_sum, jaxfl.d_psgd, jaxfl.dp2_sgd])
@pytest.mark.parametrize(
    ("colluding", "observer"), [(0, "an outside observer"), (1, "any one other node"), (3, "all other nodes")]
)
def test_epsilon_is_that_of_the_effective_noise_against_its_observer(build, colluding, observer):
    options = {"num_rounds": 5, "dp_delta": 1e-5}
    plain = jaxfl.privacy.statements(learner(jaxfl.gaussian(0.5), build), [40] * 4, **options)
    pairwise = jaxfl.privacy.statements(learner(shared_noise(colluding=colluding), build), [40] * 4, **options)
    assert [one.dp_epsilon for one in pairwise] == [one.dp_epsilon for one in plain]
    assert {one.observer for one in plain} == {"all other nodes"}
    assert {one.observer for one in pairwise} == {observer}
    settings = " ".join(pairwise[0].assumptions)
    assert f"seeds of {colluding} of 4 nodes" in settings
    assert "exact" in settings
    assert "exponential" in settings


def test_a_statement_says_that_its_noise_is_a_bound(monkeypatch):
    monkeypatch.setattr(shared, "_MOST_SETS", 0)
    noise = jaxfl.shared_gaussian(0.5, key_graph=key_graph("ring", 4), ratio=1.0)
    stated = jaxfl.privacy.statements(learner(noise), [40] * 4, 5, dp_delta=1e-5)
    assert "a lower bound by currents" in " ".join(stated[0].assumptions)


def test_the_average_of_all_nodes_has_own_noise_only():
    """Data without gradients: what is left in the sum of x is noise."""
    task = jaxfl.from_functions(lambda key: jnp.zeros(4_000), lambda w, x, y: 0.0 * w.sum() + 0.0 * x[:, 0])
    data = jaxfl.federate(np.zeros((8, 1), "float32"), np.zeros(8, "float32"), [[0, 1], [2, 3], [4, 5], [6, 7]])
    for build in (jaxfl.push_sum, jaxfl.d_psgd):
        noise = jaxfl.shared_gaussian(1.0, key_graph=key_graph("complete", 4), ratio=50.0, colluding=0)
        made = build(task, graph=graphs.exponential(4), step_size=1.0, noise=noise)
        state, _ = made.round(KEY, made.init(KEY, data), data)
        own = math.sqrt((1 + 50.0**2) / (1 + 4 * 50.0**2))
        assert np.asarray(state.params).sum(axis=0).std() == pytest.approx(2 * own, rel=0.05)


def traced_scales():
    return jax.jit(lambda s: jaxfl.shared_gaussian(s, key_graph=key_graph("ring", 4), ratio=1.0).draw(KEY, OWN))(OWN)


def ratio_of(ratio):
    return lambda: jaxfl.shared_gaussian(1.0, key_graph=key_graph("ring", 4), ratio=ratio)


def by_direction(graph=None, **options):
    links = jaxfl.links(0.5, **options)
    return lambda: learner(shared_noise(), jaxfl.d_psgd, graphs.ring(4) if graph is None else graph, links=links)


test_of_shared_noise = refusals(
    [
        (lambda: key_graph("chain", 4), "key_graph"),
        (lambda: key_graph(graphs.ring(5), 4), "key_graph"),
        (lambda: pairs(4, [(0, 0)]), "edges"),
        (lambda: pairs(4, [(0, 4)]), "edges"),
        (lambda: pairs(4, [(0, 1), (1, 0)]), "edges"),
        (lambda: pairs(4, [(0, 1)], 0.0), "weights"),
        (lambda: effective_noise(key_graph("ring", 4), ratio=1.0, colluding=4), "colluding"),
        (lambda: effective_noise(key_graph("ring", 4), ratio=1.0, own=0.0), "own"),
        (ratio_of(-1.0), "ratio"),
        (ratio_of(math.nan), "ratio"),
        (ratio_of(1e4), "ratio"),
        (ratio_of("auto"), "ratio"),
        (lambda: jax.jit(lambda ratio: ratio_of(ratio)().noise_scale)(1.0), "ratio"),
        (lambda: best_ratio(graphs.ring(4), memory=1.0), "memory"),
        (lambda: best_ratio(graphs.ring(4), num_mixings=0), "num_mixings"),
        (lambda: best_ratio(graphs.ring(4), least="all"), "least"),
        (lambda: best_ratio(graphs.ring(4), ratio=-1.0), "ratio"),
        (lambda: best_ratio(graphs.ring(4), colluding=4), "colluding"),
        (lambda: best_ratio(graphs.ring(4), "chain"), "key_graph"),
        (traced_scales, "noise_std"),
        (lambda: jaxfl.shared_gaussian(jnp.array([1.0, 0.0]), key_graph=key_graph("ring", 2), ratio=1.0), "noise_std"),
        (lambda: jaxfl.shared_gaussian(jnp.ones(3), key_graph=key_graph("ring", 2), ratio=1.0), "noise_std"),
        (lambda: shared_noise().draw(KEY, jnp.zeros((5, 2))), "params"),
        (lambda: learner(shared_noise(num_nodes=5)), "noise"),
        (lambda: learner(shared_noise(), step_size=None, optimizer=optax.adam(0.1)), "optimizer"),
        (
            lambda: learner(shared_noise(), jaxfl.d_psgd, step_size=None, optimizer=optax.sgd(0.1)),
            "optimizer",
        ),
        (by_direction(), "links"),
        (by_direction(graphs.exponential(4)), "links"),
        (lambda: learner(shared_noise(), jaxfl.dp2_sgd, links=jaxfl.links(0.5)), "links"),
        (lambda: learner(shared_noise(), jaxfl.a_dp2_sgd), "noise"),
        (lambda: jaxfl.private_updates(clip_norm=1.0, noise=shared_noise()), "noise"),
    ]
)


def test_symmetric_losses_keep_the_sum():
    assert by_direction(symmetric=True)() is not None
    assert learner(shared_noise(), links=jaxfl.links(0.5)) is not None  # a sender of push-sum keeps what is lost
