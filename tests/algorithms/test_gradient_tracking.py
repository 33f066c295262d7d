"""Gradient tracking over two directed graphs: the paper's lines, what is conserved, the noise and what is refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals
from problems import small_task, start, uneven_data
from reference.gradient_tracking import gradient_tracking as reference_gradient_tracking
from reference.runs import (
    by_node,
    check_info,
    check_noise,
    each,
    entries,
    one_by_one,
    plain_gradients,
    relative_error,
    stacked,
)

import jaxfl
from jaxfl import ArgumentError
from jaxfl.gradients import fixed, mini_batch
from jaxfl.privacy.tracking import TrackingSchedule

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
CASES = [(False, "broadcast"), (True, "state")]


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


@functools.cache
def engine_run(self_loops, gradient_at):
    """(algorithm, its run)."""
    state_weights, tracker_weights = weights(self_loops)
    algorithm = jaxfl.gradient_tracking(
        small_task(),
        state_weights=state_weights,
        tracker_weights=tracker_weights,
        schedule=schedule(),
        clip_norm=CLIP_NORM,
        gradient_at=gradient_at,
    )
    return algorithm, one_by_one(algorithm, KEY, uneven_data(), ROUNDS)


@pytest.mark.parametrize(("self_loops", "gradient_at"), CASES)
@pytest.mark.quick_cases(1)
def test_follows_the_papers_lines(self_loops, gradient_at):
    """x, broadcast x, y and g within 1e-5 after 50 rounds, and the last round's measurements."""
    (algorithm, done), data = engine_run(self_loops, gradient_at), uneven_data()
    references, first = plain_gradients(data, 3, CLIP_NORM, 1), done.states[0]
    zeta = jax.tree.map(lambda sent, x: np.float64(sent) - np.float64(x), first.broadcast_params, first.params)
    batch = mini_batch(sampler=fixed(3)).draw(KEY, jnp.int32(0), data)
    assert (batch.indices != done.draws[0].gradient.indices).any(), "every iteration draws its own samples"
    expected = reference_gradient_tracking(
        each(first.params),
        *weights(self_loops),
        references,
        (0.3, 0.25, 0.05),
        (entries(batch), each(zeta)),
        [(entries(draws.gradient), each(draws.state_noise), each(draws.tracker_noise)) for draws in done.draws],
        gradient_at,
    )
    last, info = done.states[-1], done.infos[-1]
    arrays = (last.params, last.broadcast_params, last.gradient_tracker, last.gradient)
    for ours, theirs in zip(arrays, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    returned = stacked(expected[1] if gradient_at == "broadcast" else expected[0])
    np.testing.assert_allclose(by_node(algorithm.node_params(last)), returned, rtol=1e-4, atol=1e-5)

    check_info(info, references)
    np.testing.assert_array_equal(info.gradient_evaluations, [3] * NODES)
    # Who hears of nodes 0 to 4, by hand: 2 2 1 1 1 others in R, 1 1 2 2 2 in C; 53 parameters of 32 bits.
    np.testing.assert_array_equal(info.bits_sent, np.array([3, 3, 3, 3, 3]) * 32 * 53)
    heard = [sum(own[i, j] > 0 for own in weights(self_loops) for j in range(NODES) if j != i) for i in range(NODES)]
    np.testing.assert_array_equal(info.bits_received, np.array(heard) * 32 * 53)
    assert len({*heard}) > 1, "they must differ for this test to mean something"
    assert 0 < np.mean([i.clipped_fraction for i in done.infos]) < 1, "clipping must matter, and not everywhere"


@pytest.mark.parametrize(("self_loops", "gradient_at"), CASES)
def test_trackers_sum_to_the_gradients_and_the_noise_received(self_loops, gradient_at):
    """sum_i y_i = sum_i g_i + beta sum over past rounds of sum_ij C_ij eta_j, in every round, to float32 rounding."""
    (_, done), (_, tracker_weights) = engine_run(self_loops, gradient_at), weights(self_loops)
    excess = np.zeros(by_node(done.states[0].params).shape[1])
    for k, state in enumerate(done.states):
        if k:
            excess += 0.25 * (tracker_weights @ by_node(done.draws[k - 1].tracker_noise)).sum(axis=0)
        difference = by_node(state.gradient_tracker).sum(axis=0) - by_node(state.gradient).sum(axis=0)
        np.testing.assert_allclose(difference, excess, atol=2e-5)
    assert np.abs(excess).max() > 1e-2, "noise must matter for this test to mean something"


LARGE = 3000  # parameters


@pytest.mark.statistical
@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
@pytest.mark.quick_cases(1)
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
    both = np.concatenate([state_noise[: last + 1], tracker_noise[: last + 1]])
    check_noise(both, np.concatenate(scales, axis=1), distribution)


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
    for unrooted in (
        {"state_weights": chain, "tracker_weights": chain},  # roots 0 and 1
        {"state_weights": np.eye(2)},  # no root
        {"tracker_weights": np.zeros((2, 2))},
    ):
        with pytest.raises(ArgumentError, match="some node must reach all others"):
            build(**unrooted)


test_refusals = refusals(
    [
        (lambda changes=changes: build(**changes), argument)
        for changes, argument in (
            ({"state_weights": np.ones((2, 3))}, "state_weights"),
            ({"tracker_weights": np.ones((3, 3))}, "tracker_weights"),
            ({"tracker_weights": np.array([[0.0, -1.0], [1.0, 0.0]])}, "tracker_weights"),
            ({"state_weights": np.array([[0.0, np.nan], [1.0, 0.0]])}, "state_weights"),
            ({"schedule": schedule(4, np.ones(5), np.ones(6))}, "tracker_noise_scale"),
            ({"schedule": schedule(4, np.ones((3, 5)), np.ones(5))}, "state_noise_scale"),
            ({"schedule": schedule(4, 1.0, np.ones(5))}, "state_noise_scale"),
            ({"schedule": schedule(4, np.ones(5), -np.ones(5))}, "tracker_noise_scale"),
        )
    ]
)
