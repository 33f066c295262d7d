"""Effective noise, the ratio rule, and noise that pairs of nodes share."""

import itertools
import math

import jax
import numpy as np
import pytest

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


# Means of a release, by whether the changed sample is drawn or not, in both data sets.
MECHANISMS = {
    "zero_out": ((0.0, 1.5), (0.0, 0.0)),
    "replace_one": ((0.0, 0.9), (0.0, -0.9)),
    "a stored gradient": ((0.2, 1.4), (0.0, 0.0)),
    "a batch of fixed size": ((0.0, 2.0), (0.0, 1.0)),
}
SMALL = {
    3: (pairs(3, [(0, 1), (1, 2), (0, 2)], [1.0, 2.0, 0.7]), np.array([1.0, 0.5, 0.8])),
    4: (pairs(4, [(0, 1), (1, 2), (2, 3), (0, 3)], [1.0, 2.0, 0.7, 1.5]), np.array([1.0, 0.5, 0.8, 1.2])),
}


@pytest.mark.statistical
@pytest.mark.parametrize("num_nodes", SMALL)
@pytest.mark.parametrize("colluding", [0, 1])
@pytest.mark.parametrize(("mechanism", "rate"), [*((name, 0.3) for name in MECHANISMS), ("zero_out", 1.0)])
def test_the_likelihood_of_all_that_is_seen_has_the_claimed_delta(num_nodes, mechanism, rate, colluding):
    """Two rounds; the observer sees all y, and the last node's own noise and seeds where it colludes.

    Delta of the whole ratio is that of the claim where the gradient stays the worst, and no larger where the second one
    follows from what was seen.
    """
    count, epsilon, rng = 400_000, 1.0, np.random.default_rng(0)
    (keys, own), worlds = SMALL[num_nodes], np.array(MECHANISMS[mechanism])
    shared_std = keys.shared(own)
    first, second = np.nonzero(np.triu(shared_std))
    unit = np.eye(num_nodes)
    columns = [*(own[:, None] * unit), *(shared_std[first, second][:, None] * (unit[first] - unit[second]))]
    released_by, last = np.array(columns).T, num_nodes - 1
    seeds = [last, *(num_nodes + np.flatnonzero((first == last) | (second == last)))]
    # What the last node sends follows from its seeds.
    seen = np.vstack([released_by[:last], np.eye(len(columns))[seeds]]) if colluding else released_by
    inverse = np.linalg.inv(seen @ seen.T)

    def log_density(means, at, worth):
        """log of the mixture's density over that of noise by itself; `at` is the released number, to its worth."""
        exponents = [mean * at - mean**2 * worth / 2 for mean in means]
        return np.log((1 - rate) * np.exp(exponents[0]) + rate * np.exp(exponents[1]))

    def released(scale):
        """The log-likelihood ratio of one round's view, and what the observer makes of it."""
        with_sample, without = worlds[:, :, None] * scale
        view = seen @ rng.normal(size=(len(columns), count))
        view[0] += np.where(rng.random(count) < rate, with_sample[1], with_sample[0])
        at = (inverse @ view)[0]
        ratio = log_density(with_sample, at, inverse[0, 0]) - log_density(without, at, inverse[0, 0])
        return ratio, np.sign(at)

    def delta(adaptive):
        first, sign = released(np.ones(count))
        second, _ = released(np.where(sign > 0, 1.0, -0.5) if adaptive else np.ones(count))
        lost = np.maximum(0, -np.expm1(epsilon - first - second))
        return lost.mean(), lost.std() / math.sqrt(count)

    noise = noise_against(own, shared_std, [last][:colluding])[0]
    assert noise == pytest.approx(1 / math.sqrt(inverse[0, 0]))
    x, step = np.linspace(-12, 12 + worlds.max() / noise, 4001, retstep=True)
    with_sample, without = (
        sum(
            chance * np.exp(-np.square(x - mean / noise) / 2) / math.sqrt(2 * math.pi)
            for chance, mean in zip((1 - rate, rate), means, strict=True)
        )
        for means in worlds
    )
    both = np.outer(with_sample, with_sample) - math.exp(epsilon) * np.outer(without, without)
    claim = np.maximum(0, both).sum() * step**2
    found, error = delta(adaptive=False)
    assert abs(found - claim) < 4 * error
    assert error < 0.02 * claim
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
    """Only noise is pushed through the rounds; star's push-sum weights move."""
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


def test_an_even_ratio_is_no_noisier_at_nodes_and_takes_the_key_graph_that_is_best_for_the_average():
    graph = graphs.exponential(16)
    even = best_ratio(graph, colluding=1, least="mean")
    assert 0.95 < even.variance <= 1 + 1e-6

    def in_the_average(choice):
        return 1 / effective_noise(choice.key_graph, ratio=choice.ratio).noise.min()

    others = [best_ratio(graph, which, colluding=1, least="mean") for which in ("mixing", "exponential", "complete")]
    assert in_the_average(even) == min(map(in_the_average, others)) < in_the_average(best_ratio(graph, colluding=1))
