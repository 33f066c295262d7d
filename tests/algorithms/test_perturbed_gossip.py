"""Gossip over perturbed and quantised states: the comparison's lines, special cases, the noise and what is refused."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from problems import linear_task, small_task, start, uneven_data
from reference.gradients import PlainGradient, batch_entries
from reference.network import as_float64
from reference.perturbed_gossip import perturbed_gossip as reference_perturbed_gossip
from reference.perturbed_gossip import round_ternary, round_uniform

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.algorithms.perturbed_gossip import perturbed_gossip
from jaxfl.channel import ternary_quantizer, uniform_quantizer
from jaxfl.gradients import fixed, mini_batch
from jaxfl.privacy.tracking import TrackingSchedule

KEY = jax.random.key(6)
NODES, ROUNDS, NUM_PARAMETERS = 5, 40, 53
ALPHA, GAMMA = 0.3, 0.1


def bull():
    """A triangle with two horns: degrees 2, 3, 3, 1, 1. Its weights are doubly stochastic and not symmetric, so that a
    transposed matrix would show."""
    symmetric = graphs.from_networkx(nx.bull_graph(), weights="metropolis").mixing_matrix(0)
    around = np.zeros((NODES, NODES))
    around[[0, 1, 2], [1, 2, 0]] = 0.2
    return graphs.from_matrix(symmetric + around - around.T)


def schedule(num_iterations, state_noise_scale: Any = None):
    """Constant steps, three samples a gradient; unless given, noise that differs over nodes and iterations."""
    varied = 0.01 * np.arange(1.0, NODES + 1)[:, None] * (1 + np.arange(num_iterations + 1) % 3)
    return TrackingSchedule(
        state_mixing=ALPHA,
        tracker_mixing=math.nan,  # not read
        step_size=GAMMA,
        num_samples=3,
        state_noise_scale=varied if state_noise_scale is None else state_noise_scale,
        tracker_noise_scale=np.empty(0),  # not read
    )


class Case(NamedTuple):
    """One method of the comparison; its run ends where its schedule does."""

    arguments: dict
    clip_norm: float
    quantize: Any  # of the reference
    bits: float


CASES = {
    "perturbed states": Case({"schedule": schedule(ROUNDS - 1)}, 8.0, None, 32),
    "perturbed and quantised": Case(
        {
            "schedule": schedule(ROUNDS),
            "distribution": "gaussian",
            "quantizer": uniform_quantizer(0.05, levels=16),
            "gradient_at": "broadcast",
        },
        1.8,
        functools.partial(round_uniform, step=0.05, levels=16),
        4,
    ),
    "ternary": Case(
        {"schedule": schedule(ROUNDS - 1, np.zeros(ROUNDS)), "quantizer": ternary_quantizer(1.5)},
        8.0,
        functools.partial(round_ternary, threshold=1.5),
        math.log2(3),
    ),
}


class Run(NamedTuple):
    """All rounds of one case, one at a time."""

    algorithm: jaxfl.Algorithm
    states: list  # ROUNDS + 1
    draws: list  # ROUNDS + 1: those of `init` first
    infos: list  # ROUNDS
    traces: int  # of the round


@functools.cache
def engine_run(name):
    case = CASES[name]
    algorithm = perturbed_gossip(small_task(), graph=bull(), clip_norm=case.clip_norm, **case.arguments)
    data, traces = uneven_data(), 0

    @jax.jit
    def step(key, state, data):
        nonlocal traces
        traces += 1  # runs when traced, not when called
        draws = algorithm.draw(key, state, data)
        return draws, *algorithm.update(state, data, draws)

    states, infos = [start(algorithm, KEY, data)], []
    # `init` perturbs with the numbers that a round -1 would draw.
    kept = [step(KEY, states[0]._replace(round_index=jnp.int32(-1)), data)[0]]
    for _ in range(ROUNDS):
        draws, state, info = step(KEY, states[-1], data)
        states.append(state)
        kept.append(draws)
        infos.append(info)
    return Run(algorithm, states, kept, infos, traces)


def flat(tree):
    """(n, d) float64."""
    return np.concatenate([np.asarray(leaf, np.float64).reshape(NODES, -1) for leaf in jax.tree.leaves(tree)], axis=1)


def stacked(nodes):
    """The reference's list of parameters as (n, d)."""
    return flat(jax.tree.map(lambda *leaves: np.stack(leaves), *nodes))


@pytest.mark.parametrize("name", CASES)
def test_follows_the_lines(name):
    """x and broadcast x within 1e-5 after 40 rounds, and the last round's measurements."""
    done, case, data, nodes = engine_run(name), CASES[name], uneven_data(), range(NODES)
    inputs, labels = np.asarray(data.inputs), np.asarray(data.labels)
    rows = zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True)
    order = 2 if "distribution" in case.arguments else 1
    references = [
        PlainGradient([(inputs[j], int(labels[j])) for j in row[:size]], 3, case.clip_norm, order) for row, size in rows
    ]

    def perturbation(draws):
        used = draws.rounding is not None
        return (
            [as_float64(draws.state_noise, i) for i in nodes],
            [as_float64(draws.rounding, i) if used else None for i in nodes],
        )

    # A schedule that ends one round earlier leaves the last x without a perturbation.
    last, ends_before = done.states[-1], "gradient_at" not in case.arguments
    rounds = [([batch_entries(draws.gradient, i) for i in nodes], *perturbation(draws)) for draws in done.draws[1:]]
    x, x_sent = reference_perturbed_gossip(
        [as_float64(done.states[0].params, i) for i in nodes],
        bull().mixing_matrix(0),
        references,
        (ALPHA, GAMMA),
        perturbation(done.draws[0]),
        rounds,
        case.quantize,
        case.arguments.get("gradient_at", "state"),
    )
    found = [(last.params, x)] if ends_before else [(last.params, x), (last.broadcast_params, x_sent)]
    for ours, theirs in found:
        error = np.linalg.norm(flat(ours) - stacked(theirs), axis=1) / np.linalg.norm(stacked(theirs), axis=1)
        assert error.max() < 1e-5
    returned = x if ends_before else x_sent
    np.testing.assert_allclose(flat(done.algorithm.node_params(last)), stacked(returned), rtol=1e-4, atol=1e-5)
    assert np.isnan(flat(last.broadcast_params)).all() == ends_before, "noise is NaN behind the schedule's end"

    info = done.infos[-1]
    np.testing.assert_allclose(info.loss, [g.loss for g in references], rtol=1e-4)
    np.testing.assert_allclose(info.gradient_norm, [g.norm for g in references], rtol=1e-4)
    distance = ((stacked(x) - stacked(x).mean(axis=0)) ** 2).sum(axis=1).mean()
    np.testing.assert_allclose(info.consensus_distance, distance, rtol=1e-4)
    np.testing.assert_array_equal(info.gradient_evaluations, [3] * NODES)
    np.testing.assert_allclose(info.bits_sent, np.array([2, 3, 3, 1, 1]) * case.bits * NUM_PARAMETERS, rtol=1e-6)
    assert 0 < np.mean([i.clipped_fraction for i in done.infos]) < 1, "clipping must matter, and not everywhere"
    assert not any(int(i.batch_overflow.sum()) + int(i.prefetch_misses.sum()) for i in done.infos)


def test_what_is_sent_is_on_the_grid():
    """All of it, from the first; the 16 levels saturate somewhere, and three values are three values."""
    for name, step in (("perturbed and quantised", 0.05), ("ternary", 1.5)):
        sent = np.stack([flat(state.broadcast_params) for state in engine_run(name).states[:ROUNDS]]) / step
        np.testing.assert_allclose(sent, np.round(sent), atol=1e-5)
        lowest, highest = (-8, 7) if name != "ternary" else (-1, 1)
        assert set(np.unique(np.round(sent))) == set(range(lowest, highest + 1))


def test_node_mean_moves_by_gradient_and_perturbation():
    """Over all rounds, to float32 rounding: mean x falls by gamma times the gradients' mean and gains alpha times the
    perturbations' mean, whatever the graph."""
    done = engine_run("ternary")
    gradient = mini_batch(sampler=fixed(3), clip_norm=8.0, clip_order=1)
    data = uneven_data()
    estimate = jax.jit(lambda x, draws: gradient.estimate(small_task(), x, None, data, draws, jnp.int32(0))[0])
    for k, (before, after) in enumerate(zip(done.states[:5], done.states[1:6], strict=True)):
        x = flat(before.params)
        g = flat(estimate(before.params, done.draws[k + 1].gradient))
        step = ALPHA * (flat(before.broadcast_params) - x) - GAMMA * g
        np.testing.assert_allclose(flat(after.params).mean(axis=0), (x + step).mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_state_is_stable(name):
    """One program for all rounds; structure, shapes and dtypes stay."""
    done = engine_run(name)
    assert done.traces == 1
    first, last = done.states[0], done.states[-1]
    assert jax.tree.structure(first) == jax.tree.structure(last)
    for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)


def test_without_perturbation_and_at_alpha_one_it_is_d_psgd():
    """On the bull and on the complete graph, in one program; the step sizes and the noise scales are traced."""
    data, pairs = uneven_data(), (bull(), graphs.complete(NODES))

    @jax.jit
    def both(key, one, noise_scale):
        numbers = schedule(10, noise_scale)._replace(state_mixing=one, step_size=0.1 * one)
        found = []
        for graph in pairs:
            estimator = mini_batch(sampler=fixed(3), clip_norm=2.0, clip_order=1)
            ours = perturbed_gossip(linear_task(), graph=graph, schedule=numbers, clip_norm=2.0)
            plain = jaxfl.d_psgd(linear_task(), graph=graph, step_size=0.1, gradient=estimator)
            for algorithm in (ours, plain):
                first = algorithm.init(key, data)
                final, _ = jax.lax.scan(lambda s, _, a=algorithm: (a.round(key, s, data)[0], None), first, length=10)
                found.append((algorithm.node_params(first), algorithm.node_params(final)))
        return found

    bull_ours, bull_plain, complete_ours, complete_plain = both(KEY, jnp.float32(1.0), jnp.zeros(11))
    for (_, ours), (first, plain) in ((bull_ours, bull_plain), (complete_ours, complete_plain)):
        np.testing.assert_allclose(flat(ours), flat(plain), rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(flat(plain) - flat(first)) > 0.5, "something must have been learned"


LARGE = 3000  # parameters


@pytest.mark.statistical
@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_draws_are_scaled_as_the_schedule_says(distribution):
    """zeta^{k+1} of every node and round within 5 standard errors, NaN behind the schedule's end; uniform numbers are
    uniform; nothing is used twice."""
    last = 3
    scales = np.random.default_rng(1).uniform(0.5, 2.0, (NODES, last + 1))
    scales[1] = 0.0
    algorithm = perturbed_gossip(
        jaxfl.from_functions(lambda key: jnp.zeros(LARGE), lambda w, x, y: w.sum() * x[:, 0]),
        graph=bull(),
        schedule=schedule(last, scales),
        clip_norm=1.0,
        distribution=distribution,
        quantizer=uniform_quantizer(1.0),
    )
    data = uneven_data()
    first = start(algorithm, KEY, data)

    @jax.jit
    def draws(state):
        return jax.vmap(lambda k: algorithm.draw(KEY, state._replace(round_index=k), data))(jnp.arange(-1, last + 2))

    drawn = draws(first)
    noise, rounding = np.asarray(drawn.state_noise, np.float64), np.asarray(drawn.rounding, np.float64)
    np.testing.assert_array_equal(first.broadcast_params, np.floor(noise[0]) + (rounding[0] < noise[0] % 1))
    assert np.isnan(noise[last + 1 :]).all()
    noise = noise[: last + 1]
    # E|z| and the standard deviation of |z| at scale 1.
    mean, std = {"laplace": (1.0, 1.0), "gaussian": (math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi))}[distribution]
    found = np.abs(noise).mean(axis=-1).T
    assert (np.abs(found - mean * scales) <= 5 * std * scales / math.sqrt(LARGE)).all()
    assert rounding.min() >= 0
    assert rounding.max() < 1
    assert (np.abs(rounding.mean(axis=-1) - 0.5) < 5 * math.sqrt(1 / 12 / LARGE)).all()
    rows = np.concatenate([noise[:, 2:].reshape(-1, LARGE), rounding.reshape(-1, LARGE)])
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 5 / math.sqrt(LARGE)


def build(**changes):
    """The constructor on five nodes."""
    arguments: dict[str, Any] = {"graph": bull(), "schedule": schedule(4), "clip_norm": 1.0}
    return perturbed_gossip(small_task(), **(arguments | changes))


TWO_PARTS = graphs.from_matrix(np.kron(np.eye(2), np.full((2, 2), 0.5)))


@pytest.mark.parametrize(
    ("changes", "start_of_message"),
    [
        ({"graph": graphs.exponential(NODES)}, "graph: must be the same in every round"),
        ({"graph": graphs.directed_ring(NODES)}, "graph: must be undirected"),
        ({"graph": graphs.star(NODES)}, "graph: must be doubly stochastic"),
        ({"graph": TWO_PARTS}, "graph: must be strongly connected"),
        ({"graph": graphs.complete(4)}, "state_noise_scale"),
        ({"schedule": schedule(4, 1.0)}, "state_noise_scale"),
        ({"schedule": schedule(4, -np.ones(5))}, "state_noise_scale"),
        ({"schedule": schedule(4)._replace(step_size=0.0)}, "step_size"),
        ({"schedule": schedule(4)._replace(state_mixing=np.ones(5))}, "state_mixing"),
        ({"schedule": schedule(4)._replace(num_samples=0)}, "batch_size"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"distribution": "uniform"}, "distribution"),
        ({"gradient_at": "tracker"}, "gradient_at"),
    ],
)
def test_refuses(changes, start_of_message):
    with pytest.raises(ArgumentError, match="^" + start_of_message):
        build(**changes)


def test_init_refuses_other_data():
    for data, argument in ((uneven_data((4, 4)), "data"), (uneven_data((4, 2, 4, 4, 4)), "batch_size")):
        with pytest.raises(ArgumentError) as caught:
            build().init(KEY, data)
        assert caught.value.argument == argument
