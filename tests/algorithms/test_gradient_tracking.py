"""Gradient tracking over two directed graphs: the paper's lines, what is conserved, the noise and what is refused."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import run, small_task, start, uneven_data
from reference.gradient_tracking import gradient_tracking as reference_gradient_tracking
from reference.gradients import PlainGradient, batch_entries
from reference.network import as_float64

import jaxfl
from jaxfl import ArgumentError
from jaxfl.gradients import fixed, mini_batch
from jaxfl.privacy.tracking import TrackingSchedule, exponential_schedule, polynomial_schedule

KEY = jax.random.key(5)
NODES, ROUNDS, CLIP_NORM = 5, 50, 8.0

# R: node 0 is the only root, so the graph is not strongly connected. C: everything flows to nodes 0 and 1.
STATE_WEIGHTS = np.array(
    [
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [0.5, 0.0, 0.0, 0.0, 0.3],
        [0.4, 0.7, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.9, 0.0, 0.0],
        [0.0, 0.6, 0.0, 0.8, 0.0],
    ]
)
TRACKER_WEIGHTS = np.array(
    [
        [0.0, 0.5, 0.0, 0.9, 0.0],
        [0.6, 0.0, 0.4, 0.0, 0.7],
        [0.0, 0.0, 0.0, 0.8, 0.0],
        [0.0, 0.0, 0.3, 0.0, 0.6],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]
)
SELF_LOOPS = np.diag([0.3, 0.0, 0.7, 0.2, 0.5])
# (self-loops, gradient_at)
CASES = [(False, "broadcast"), (True, "broadcast"), (False, "state"), (True, "state")]


def weights(self_loops):
    """R and C, neither row nor column stochastic."""
    loops = SELF_LOOPS if self_loops else 0.0
    return STATE_WEIGHTS + loops, TRACKER_WEIGHTS + loops


def schedule(num_iterations=ROUNDS, state_noise_scale: Any = None, tracker_noise_scale: Any = None):
    """Constant steps, three samples a gradient; unless given, noise that differs over nodes and iterations."""
    varied = 0.002 * np.arange(1.0, NODES + 1)[:, None] * (1 + np.arange(num_iterations + 1) % 3)
    return TrackingSchedule(
        state_mixing=0.3,
        tracker_mixing=0.25,
        step_size=0.05,
        num_samples=3,
        state_noise_scale=varied if state_noise_scale is None else state_noise_scale,
        tracker_noise_scale=2 * varied if tracker_noise_scale is None else tracker_noise_scale,
    )


class Run(NamedTuple):
    """Fifty rounds of one case, one at a time."""

    algorithm: jaxfl.Algorithm
    states: list  # ROUNDS + 1
    draws: list  # ROUNDS
    infos: list  # ROUNDS
    traces: int  # of the round


@functools.cache
def engine_run(self_loops, gradient_at):
    state_weights, tracker_weights = weights(self_loops)
    algorithm = jaxfl.gradient_tracking(
        small_task(),
        state_weights=state_weights,
        tracker_weights=tracker_weights,
        schedule=schedule(),
        clip_norm=CLIP_NORM,
        gradient_at=gradient_at,
    )
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


def stacked(nodes):
    """The reference's list of parameters as (n, d)."""
    return flat(jax.tree.map(lambda *leaves: np.stack(leaves), *nodes))


@pytest.mark.parametrize(("self_loops", "gradient_at"), CASES)
def test_follows_the_papers_lines(self_loops, gradient_at):
    """x, broadcast x, y and g within 1e-5 after 50 rounds, and the last round's measurements."""
    done, data = engine_run(self_loops, gradient_at), uneven_data()
    inputs, labels = np.asarray(data.inputs), np.asarray(data.labels)
    rows = zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True)
    samples = [[(inputs[j], int(labels[j])) for j in row[:size]] for row, size in rows]
    references = [PlainGradient(own, 3, CLIP_NORM, 1) for own in samples]

    first, nodes = done.states[0], range(NODES)
    zeta = jax.tree.map(lambda sent, x: np.float64(sent) - np.float64(x), first.broadcast_params, first.params)
    batch = mini_batch(sampler=fixed(3)).draw(KEY, jnp.int32(0), data)
    assert (batch.indices != done.draws[0].gradient.indices).any(), "every iteration draws its own samples"
    rounds = [
        (
            [batch_entries(draws.gradient, i) for i in nodes],
            [as_float64(draws.state_noise, i) for i in nodes],
            [as_float64(draws.tracker_noise, i) for i in nodes],
        )
        for draws in done.draws
    ]
    expected = reference_gradient_tracking(
        [as_float64(first.params, i) for i in nodes],
        *weights(self_loops),
        references,
        (0.3, 0.25, 0.05),
        ([batch_entries(batch, i) for i in nodes], [as_float64(zeta, i) for i in nodes]),
        rounds,
        gradient_at,
    )
    last, info = done.states[-1], done.infos[-1]
    found = (last.params, last.broadcast_params, last.gradient_tracker, last.gradient)
    for ours, theirs in zip(map(flat, found), map(stacked, expected), strict=True):
        error = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        assert error.max() < 1e-5
    returned = expected[1] if gradient_at == "broadcast" else expected[0]
    np.testing.assert_allclose(flat(done.algorithm.node_params(last)), stacked(returned), rtol=1e-4, atol=1e-5)

    np.testing.assert_allclose(info.loss, [g.loss for g in references], rtol=1e-4)
    np.testing.assert_allclose(info.gradient_norm, [g.norm for g in references], rtol=1e-4)
    x = stacked(expected[0])
    np.testing.assert_allclose(info.consensus_distance, ((x - x.mean(axis=0)) ** 2).sum(axis=1).mean(), rtol=1e-4)
    np.testing.assert_array_equal(info.gradient_evaluations, [3] * NODES)
    # Who hears of nodes 0 to 4, by hand: 2 2 1 1 1 others in R, 1 1 2 2 2 in C; 53 parameters of 32 bits.
    np.testing.assert_array_equal(info.bits_sent, np.array([3, 3, 3, 3, 3]) * 32 * 53)
    assert 0 < np.mean([i.clipped_fraction for i in done.infos]) < 1, "clipping must matter, and not everywhere"
    assert not any(int(i.batch_overflow.sum()) + int(i.prefetch_misses.sum()) for i in done.infos)


@pytest.mark.parametrize(("self_loops", "gradient_at"), CASES)
def test_trackers_sum_to_the_gradients_and_the_noise_received(self_loops, gradient_at):
    """sum_i y_i = sum_i g_i + beta sum over past rounds of sum_ij C_ij eta_j, in every round, to float32 rounding."""
    done, (_, tracker_weights) = engine_run(self_loops, gradient_at), weights(self_loops)
    excess = np.zeros(flat(done.states[0].params).shape[1])
    for k, state in enumerate(done.states):
        if k:
            excess += 0.25 * (tracker_weights @ flat(done.draws[k - 1].tracker_noise)).sum(axis=0)
        difference = flat(state.gradient_tracker).sum(axis=0) - flat(state.gradient).sum(axis=0)
        np.testing.assert_allclose(difference, excess, atol=2e-5)
    assert np.abs(excess).max() > 1e-2, "noise must matter for this test to mean something"


@pytest.mark.parametrize(("self_loops", "gradient_at"), [CASES[0], CASES[-1]])
def test_a_round_is_a_function_of_key_and_round(self_loops, gradient_at):
    """One program for all rounds, structure and dtypes stable, and the same bits in a scan."""
    done = engine_run(self_loops, gradient_at)
    first, last = done.states[0], done.states[-1]
    assert done.traces == 1
    assert jax.tree.structure(first) == jax.tree.structure(last)
    for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)
    scanned, infos = run(done.algorithm, KEY, uneven_data(), ROUNDS, state=first)
    for alone, within in zip(jax.tree.leaves((last, done.infos[-1])), jax.tree.leaves((scanned, infos)), strict=True):
        np.testing.assert_array_equal(alone, within if within.shape == alone.shape else within[-1])


def quadratic():
    """Node i holds two points, all of which are used: the optimum of the sum of losses is the mean of all points."""
    points = np.random.default_rng(0).normal(size=(2 * NODES, 3)).astype(np.float32)
    task = jaxfl.from_functions(
        lambda key: jnp.zeros(3), lambda w, x, y: 0.5 * ((w.reshape(1, -1) - x) ** 2).sum(axis=1)
    )
    data = jaxfl.federate(points, np.zeros(2 * NODES, np.float32), np.split(np.arange(2 * NODES), NODES))
    return task, data, points.mean(axis=0)


def test_without_noise_the_error_falls_geometrically():
    """By about 11 every 50 rounds on a strongly convex quadratic, with sum y = sum g throughout; the step size and the
    noise scales are traced."""
    task, data, optimum = quadratic()
    state_weights, tracker_weights = weights(True)

    @jax.jit
    def errors(key, data, step_size, noise_scale):
        silent = schedule(250, noise_scale, noise_scale)._replace(num_samples=2, step_size=step_size)
        algorithm = jaxfl.gradient_tracking(
            task, state_weights=state_weights, tracker_weights=tracker_weights, schedule=silent, clip_norm=None
        )

        def body(state, _):
            state, _ = algorithm.round(key, state, data)
            error = jnp.linalg.norm(state.params - optimum.reshape(1, -1), axis=1).max()
            unconserved = jnp.abs((state.gradient_tracker - state.gradient).sum(axis=0)).max()
            return state, (error, unconserved)

        return jax.lax.scan(body, algorithm.init(key, data), None, length=250)[1]

    error, unconserved = (np.asarray(series) for series in errors(KEY, data, jnp.float32(0.05), jnp.zeros(251)))
    assert unconserved.max() < 5e-6
    at = error[49::50]
    assert at[0] < 0.1
    ratios = at[:-1] / at[1:]
    assert (ratios > 7).all()
    assert (ratios < 17).all()


LARGE = 3000  # parameters


@pytest.mark.statistical
@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_draws_are_scaled_as_the_schedule_says(distribution):
    """zeta^{k+1} and eta^k of every node and round within 5 standard errors, and NaN behind the schedule's end."""
    last, (state_weights, tracker_weights) = 3, weights(False)
    rng = np.random.default_rng(1)
    scales = rng.uniform(0.5, 2.0, (2, NODES, last + 1))
    scales[0, 1] = 0.0
    numbers = schedule(last, *scales)
    task = jaxfl.from_functions(lambda key: jnp.zeros(LARGE), lambda w, x, y: w.sum() * x[:, 0])
    algorithm = jaxfl.gradient_tracking(
        task,
        state_weights=state_weights,
        tracker_weights=tracker_weights,
        schedule=numbers,
        clip_norm=1.0,
        distribution=distribution,
    )
    data = uneven_data()
    first = start(algorithm, KEY, data)

    @jax.jit
    def draws(state):
        return jax.vmap(lambda k: algorithm.draw(KEY, state._replace(round_index=k), data))(jnp.arange(last + 2))

    drawn = draws(first)
    state_noise = np.concatenate([np.asarray(first.broadcast_params - first.params)[None], drawn.state_noise])
    tracker_noise = np.asarray(drawn.tracker_noise)
    assert np.isnan(state_noise[last + 1 :]).all()
    assert np.isnan(tracker_noise[last + 1 :]).all()
    # E|z| and the standard deviation of |z| at scale 1.
    mean, std = {"laplace": (1.0, 1.0), "gaussian": (math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi))}[distribution]
    for noise, scale in ((state_noise, scales[0]), (tracker_noise, scales[1])):
        found = np.abs(noise[: last + 1]).mean(axis=-1).T
        assert (np.abs(found - mean * scale) <= 5 * std * scale / math.sqrt(LARGE)).all()
    rows = np.concatenate([noise[: last + 1, 2:].reshape(-1, LARGE) for noise in (state_noise, tracker_noise)])
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / math.sqrt(LARGE), "noise is used once"


@pytest.mark.parametrize("scheme", ["S1", "S2"])
def test_runs_both_schemes_and_counts_their_samples(scheme):
    """m_K of the scheme is the batch, and a schedule's end is where the broadcast state ends."""
    if scheme == "S1":
        numbers = polynomial_schedule(
            4, state_noise_exponent=-0.1, tracker_noise_exponent=0.1, state_mixing=(0.5, 0.9), num_samples=(0.2, 1.5)
        )
    else:
        numbers = exponential_schedule(4, state_noise_base=0.5, tracker_noise_base=0.6, num_samples_base=1.1)
    task, data = small_task(), uneven_data()
    state_weights, tracker_weights = weights(True)
    algorithm = jaxfl.gradient_tracking(
        task, state_weights=state_weights, tracker_weights=tracker_weights, schedule=numbers, clip_norm=1.0
    )
    state, infos = run(algorithm, KEY, data, 5)
    assert numbers.num_samples == 2
    np.testing.assert_array_equal(infos.gradient_evaluations, np.full((5, NODES), 2))
    assert np.isfinite(infos.loss[:4]).all()
    assert np.isnan(infos.loss[4]).all()
    assert np.isfinite(flat(state.params)).all()
    assert np.isnan(flat(algorithm.node_params(state))).all()


def build(**changes):
    """The constructor on two nodes that hear each other."""
    pair = np.array([[0.0, 1.0], [1.0, 0.0]])
    arguments: dict[str, Any] = {
        "state_weights": pair,
        "tracker_weights": pair,
        "schedule": schedule(4, np.ones(5), np.ones((2, 5))),
        "clip_norm": 1.0,
    }
    return jaxfl.gradient_tracking(small_task(), **(arguments | changes))


def test_assumption_1_is_computed():
    """R needs a root, from which all are reached; C one, to which all lead; and one node must be both."""
    chain = np.array([[0.0, 0.0], [1.0, 0.0]])  # node 1 receives from node 0
    build()
    build(state_weights=chain, tracker_weights=chain.T)
    build(state_weights=chain)
    for refused in (
        {"state_weights": chain, "tracker_weights": chain},  # roots 0 and 1
        {"state_weights": np.eye(2)},  # no root
        {"tracker_weights": np.zeros((2, 2))},
    ):
        with pytest.raises(ArgumentError, match="some node must reach all others"):
            build(**refused)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"state_weights": np.ones((2, 3))}, "state_weights"),
        ({"tracker_weights": np.ones((3, 3))}, "tracker_weights"),
        ({"tracker_weights": np.array([[0.0, -1.0], [1.0, 0.0]])}, "tracker_weights"),
        ({"state_weights": np.array([[0.0, np.nan], [1.0, 0.0]])}, "state_weights"),
        ({"schedule": schedule(4, np.ones(5), np.ones(6))}, "tracker_noise_scale"),
        ({"schedule": schedule(4, np.ones((3, 5)), np.ones(5))}, "state_noise_scale"),
        ({"schedule": schedule(4, 1.0, np.ones(5))}, "state_noise_scale"),
        ({"schedule": schedule(4, np.ones(5), -np.ones(5))}, "tracker_noise_scale"),
        ({"schedule": schedule(4, np.ones(5), np.ones(5))._replace(step_size=0.0)}, "step_size"),
        ({"schedule": schedule(4, np.ones(5), np.ones(5))._replace(num_samples=0)}, "batch_size"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"distribution": "uniform"}, "distribution"),
        ({"gradient_at": "tracker"}, "gradient_at"),
    ],
)
def test_refuses(changes, argument):
    with pytest.raises(ArgumentError) as caught:
        build(**changes)
    assert caught.value.argument == argument


def test_init_refuses_other_data():
    for data, argument in ((uneven_data(), "data"), (uneven_data((4, 2)), "batch_size")):
        with pytest.raises(ArgumentError) as caught:
            build().init(KEY, data)
        assert caught.value.argument == argument
