"""Weighted output perturbation: the comparison's lines, what averaging does, the noise and what is refused."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from problems import run, small_task, start, uneven_data
from reference.gradients import PlainGradient, batch_entries
from reference.network import as_float64
from reference.output_perturbation import output_perturbation as reference_output_perturbation

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.algorithms.output_perturbation import output_perturbation
from jaxfl.privacy.tracking import TrackingSchedule

KEY = jax.random.key(7)
NODES, ROUNDS, CLIP_NORM, GAMMA = 5, 40, 8.0, 0.1


def bull():
    """A triangle with two horns, degrees 2, 3, 3, 1, 1; its weights are not doubly stochastic and must not matter."""
    return graphs.from_networkx(nx.bull_graph())


def schedule(num_iterations, state_noise_scale: Any = None):
    """Constant step, three samples a gradient; unless given, noise that differs over nodes and iterations."""
    varied = 0.01 * np.arange(1.0, NODES + 1)[:, None] * (1 + np.arange(num_iterations + 1) % 3)
    return TrackingSchedule(
        state_mixing=math.nan,  # not read
        tracker_mixing=math.nan,  # not read
        step_size=GAMMA,
        num_samples=3,
        state_noise_scale=varied if state_noise_scale is None else state_noise_scale,
        tracker_noise_scale=np.empty(0),  # not read
    )


class Run(NamedTuple):
    """All rounds of a schedule, one at a time."""

    algorithm: jaxfl.Algorithm
    states: list  # ROUNDS + 1
    draws: list  # ROUNDS
    infos: list  # ROUNDS
    traces: int  # of the round


@functools.cache
def engine_run():
    algorithm = output_perturbation(small_task(), graph=bull(), schedule=schedule(ROUNDS - 1), clip_norm=CLIP_NORM)
    data, traces = uneven_data(), 0

    @jax.jit
    def step(key, state, data):
        nonlocal traces
        traces += 1  # runs when traced, not when called
        draws = algorithm.draw(key, state, data)
        return draws, *algorithm.update(state, data, draws)

    states, kept, infos = [start(algorithm, KEY, data)], [], []
    for _ in range(ROUNDS):
        draws, state, info = step(KEY, states[-1], data)
        states.append(state)
        kept.append(draws)
        infos.append(info)
    return Run(algorithm, states, kept, infos, traces)


def flat(tree):
    """(n, d) float64."""
    return np.concatenate([np.asarray(leaf, np.float64).reshape(NODES, -1) for leaf in jax.tree.leaves(tree)], axis=1)


def test_follows_the_lines():
    """x within 1e-5 after 40 rounds, and the last round's measurements."""
    done, data, nodes = engine_run(), uneven_data(), range(NODES)
    inputs, labels = np.asarray(data.inputs), np.asarray(data.labels)
    rows = zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True)
    references = [
        PlainGradient([(inputs[j], int(labels[j])) for j in row[:size]], 3, CLIP_NORM, 1) for row, size in rows
    ]
    rounds = [
        ([batch_entries(draws.gradient, i) for i in nodes], [as_float64(draws.state_noise, i) for i in nodes])
        for draws in done.draws
    ]
    x0 = [as_float64(done.states[0].params, i) for i in nodes]
    x = reference_output_perturbation(x0, bull().adjacency(0), data.sizes, references, GAMMA, rounds)
    expected = flat(jax.tree.map(lambda *leaves: np.stack(leaves), *x))
    found = flat(done.algorithm.node_params(done.states[-1]))
    assert (np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max() < 1e-5

    info = done.infos[-1]
    np.testing.assert_allclose(info.loss, [g.loss for g in references], rtol=1e-4)
    np.testing.assert_allclose(info.gradient_norm, [g.norm for g in references], rtol=1e-4)
    distance = ((expected - expected.mean(axis=0)) ** 2).sum(axis=1).mean()
    np.testing.assert_allclose(info.consensus_distance, distance, rtol=1e-4)
    np.testing.assert_array_equal(info.gradient_evaluations, [3] * NODES)
    np.testing.assert_array_equal(info.bits_sent, np.array([2, 3, 3, 1, 1]) * 32 * 53)
    assert 0 < np.mean([i.clipped_fraction for i in done.infos]) < 1, "clipping must matter, and not everywhere"
    assert not any(int(i.batch_overflow.sum()) + int(i.prefetch_misses.sum()) for i in done.infos)


def test_state_is_stable():
    """One program for all rounds; structure, shapes and dtypes stay."""
    done = engine_run()
    assert done.traces == 1
    first, last = done.states[0], done.states[-1]
    assert jax.tree.structure(first) == jax.tree.structure(last)
    for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)


@pytest.mark.parametrize("graph", [graphs.complete(NODES), graphs.star(NODES)], ids=repr)
def test_without_noise_it_is_gradient_descent_weighted_by_data(graph):
    """Every sample of a node is the node's point p_i, and D_i differ. On the complete graph all nodes go from 0 to the
    samples' mean as (1 - gamma)^k, together. On the star D_i S_i x_i, not D_i x_i, sums to what the points give."""
    points = np.random.default_rng(0).normal(size=(NODES, 3))
    sizes = np.array([7, 4, 9, 5, 6])
    owner = np.repeat(np.arange(NODES), sizes)
    parts = [np.flatnonzero(owner == i) for i in range(NODES)]
    data = jaxfl.federate(points[owner].astype(np.float32), np.zeros(len(owner), np.float32), parts)
    task = jaxfl.from_functions(
        lambda key: jnp.zeros(3), lambda w, x, y: 0.5 * ((w.reshape(1, -1) - x) ** 2).sum(axis=1)
    )
    numbers = schedule(20, np.zeros(21))
    algorithm = output_perturbation(task, graph=graph, schedule=numbers, clip_norm=None)
    state, infos = run(algorithm, KEY, data, 20)
    x = np.asarray(state.params, np.float64)
    shares = sizes * (graph.adjacency(0) @ sizes)
    mean = shares @ points / shares.sum()
    np.testing.assert_allclose(shares @ x / shares.sum(), (1 - (1 - GAMMA) ** 20) * mean, rtol=1e-5)
    if graph.name.startswith("complete"):
        np.testing.assert_allclose(mean, sizes @ points / sizes.sum(), rtol=1e-12)
        assert np.abs(infos.consensus_distance).max() < 1e-12
    else:
        assert np.abs(infos.consensus_distance[-1]) > 1e-3


LARGE = 3000  # parameters


@pytest.mark.statistical
@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_draws_are_scaled_as_the_schedule_says(distribution):
    """zeta^k of every node and round within 5 standard errors, NaN behind the schedule's end. Without gradients the
    sum of D_i S_i x_i gains that of D_i S_i zeta_i, on any graph."""
    last = 3
    scales = np.random.default_rng(1).uniform(0.5, 2.0, (NODES, last + 1))
    scales[1] = 0.0
    algorithm = output_perturbation(
        jaxfl.from_functions(lambda key: jnp.zeros(LARGE), lambda w, x, y: 0.0 * w.sum() * x[:, 0]),
        graph=bull(),
        schedule=schedule(last, scales),
        clip_norm=1.0,
        distribution=distribution,
    )
    data = uneven_data()

    @jax.jit
    def rounds(state):
        def body(state, _):
            draws = algorithm.draw(KEY, state, data)
            state, _ = algorithm.update(state, data, draws)
            return state, (state.params, draws.state_noise)

        return jax.lax.scan(body, state, None, length=last + 2)[1]

    params, noise = (np.asarray(series, np.float64) for series in rounds(start(algorithm, KEY, data)))
    assert np.isnan(noise[last + 1]).all()
    assert np.isnan(params[last + 1]).all()
    noise = noise[: last + 1]
    sizes = np.asarray(data.sizes)
    shares = sizes * (bull().adjacency(0) @ sizes)
    preserved = shares / shares.sum() @ np.cumsum(noise, axis=0)
    np.testing.assert_allclose(shares / shares.sum() @ params[: last + 1], preserved, atol=1e-5)
    # E|z| and the standard deviation of |z| at scale 1.
    mean, std = {"laplace": (1.0, 1.0), "gaussian": (math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi))}[distribution]
    found = np.abs(noise).mean(axis=-1).T
    assert (np.abs(found - mean * scales) <= 5 * std * scales / math.sqrt(LARGE)).all()
    rows = noise[:, 2:].reshape(-1, LARGE)
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 5 / math.sqrt(LARGE), "noise is used once"


def build(**changes):
    """The constructor on five nodes."""
    arguments: dict[str, Any] = {"graph": bull(), "schedule": schedule(4), "clip_norm": 1.0}
    return output_perturbation(small_task(), **(arguments | changes))


TWO_PARTS = graphs.from_matrix(np.kron(np.eye(2), np.full((2, 2), 0.5)))


@pytest.mark.parametrize(
    ("changes", "start_of_message"),
    [
        ({"graph": graphs.exponential(NODES)}, "graph: must be the same in every round"),
        ({"graph": graphs.directed_ring(NODES)}, "graph: must be undirected"),
        ({"graph": TWO_PARTS}, "graph: must be strongly connected"),
        ({"graph": graphs.complete(4)}, "state_noise_scale"),
        ({"schedule": schedule(4, 1.0)}, "state_noise_scale"),
        ({"schedule": schedule(4, -np.ones(5))}, "state_noise_scale"),
        ({"schedule": schedule(4)._replace(step_size=0.0)}, "step_size"),
        ({"schedule": schedule(4)._replace(num_samples=0)}, "batch_size"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"distribution": "uniform"}, "distribution"),
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
