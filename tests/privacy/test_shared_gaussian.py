"""Noise that pairs of nodes share: what is drawn, what algorithms say of it, and what is refused."""

import math

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from helpers import refusals
from problems import problem

import jaxfl
from jaxfl import graphs
from jaxfl.privacy import key_graph, shared
from jaxfl.privacy.shared import effective_noise, pairs
from jaxfl.privacy.shared_ratio import best_ratio

KEY = jax.random.key(0)
EDGES = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)]
WEIGHTS = [3.0, 1.0, 2.0, 0.5, 1.0]


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


@pytest.mark.parametrize("scale", [0.7, jnp.asarray(OWN)])
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


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["ring", "exponential", "complete"])
def test_on_a_grid_integers_have_the_covariance_of_calibration(name):
    n, count, bits, ratio = 4, 40_000, 9, 2.0
    keys = key_graph(name, n)
    noise = jaxfl.shared_gaussian(0.7, key_graph=keys, ratio=ratio, grid_bits=bits)
    like = jnp.zeros((n, count))
    steps = noise.draw(KEY, like)
    assert steps.dtype == jnp.int32
    factor = 1 / effective_noise(keys, ratio=ratio).noise[0]
    step = np.float32(0.7) * np.float32(factor * 2.0**-bits)
    released = noise.release(like + 0.123, steps)
    whole = np.round(np.float32(0.123) / step) + np.asarray(steps)
    np.testing.assert_array_equal(released, whole.astype(np.float32) * step)
    drawn = np.asarray(steps, np.float64) * 2.0**-bits  # at own noise 1
    squares = np.square(ratio * keys.weights)
    expected = np.diag(1 + squares.sum(axis=1)) - squares
    error = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + np.square(expected)) / count)
    assert (np.abs(drawn @ drawn.T / count - expected) < 4 * error + 1e-4).all()
    np.testing.assert_allclose(drawn.sum(axis=0).std(), math.sqrt(n), rtol=4 / math.sqrt(2 * count))


def test_on_a_grid_the_accountant_counts_rounding_and_all_draws():
    of_grid, own = (learner(noise) for noise in (shared_noise(grid_bits=10), jaxfl.grid_gaussian(0.5, 10)))
    stated, plain = (jaxfl.privacy.statements(one, [40] * 4, 5, dp_delta=1e-5) for one in (of_grid, own))
    assert [one.dp_epsilon for one in stated] == [one.dp_epsilon for one in plain]
    assert "integers times the own noise over 1024" in " ".join(stated[1].assumptions)
    each = jaxfl.privacy.releases_of(of_grid, [40] * 4).each[0].grid
    assert each.distance == 10 * 6 * 2.0 ** (16 - 124)


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


def clients(noise):
    return jaxfl.local_steps(1, batch_size=2, optimizer=optax.sgd(0.1), clip_norm=1.0, noise=noise)


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
        (lambda: shared_noise(ratio=0.7, grid_bits=10), "ratio"),
        (lambda: shared_noise(ratio=2.0, grid_bits=7), "grid_bits"),
        (lambda: shared_noise(ratio=2.0, grid_bits=16), "shared_grid_bits"),
        (
            lambda: jaxfl.shared_gaussian(jnp.asarray(OWN), key_graph=key_graph("ring", 4), ratio=1.0, grid_bits=9),
            "noise_std",
        ),
        (lambda: clients(shared_noise(grid_bits=9)), "noise"),
        *(
            (lambda name=name: problem(name).algorithm(distribution="shared_gaussian"), "distribution")
            for name in ("gradient_tracking", "perturbed_gossip", "output_perturbation")
        ),
        (by_direction(), "links"),
        (by_direction(graphs.exponential(4)), "links"),
        (lambda: learner(shared_noise(), jaxfl.dp2_sgd, links=jaxfl.links(0.5)), "links"),
        (lambda: learner(shared_noise(), jaxfl.a_dp2_sgd), "noise"),
        (lambda: jaxfl.private_updates(clip_norm=1.0, noise=shared_noise(grid_bits=9)), "noise"),
    ]
)


def test_symmetric_losses_keep_the_sum():
    assert by_direction(symmetric=True)() is not None
    assert learner(shared_noise(), links=jaxfl.links(0.5)) is not None  # a sender of push-sum keeps what is lost
