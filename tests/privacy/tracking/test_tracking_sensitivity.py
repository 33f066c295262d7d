"""Effect of a changed sample on the algorithms' own states, given everything broadcast: proven bounds and their reach.

Pairs of data sets that differ in one sample of node 0 run on the same transcript: x~ and y~ are chosen, and in each run
the noise is what leads there from its own x and y. 200 pairs are one program.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfl
from jaxfl.algorithms.perturbed_gossip import perturbed_gossip
from jaxfl.core import FederatedData
from jaxfl.privacy import tracking
from jaxfl.privacy.dominating_pairs import gaussian_epsilon
from jaxfl.privacy.tracking import (
    TrackingAgent,
    TrackingRelease,
    TrackingSchedule,
    gradient_tracking_account,
    perturbed_state_sensitivities,
)
from jaxfl.privacy.tracking.joint_bound import gram_rows, worst_changes

PAIRS, NODES, SAMPLES, ROUNDS, FEATURES, CLIP = 200, 3, 6, 12, 4, 0.5
KEY, ROUNDING = jax.random.key(3), 1e-5
STATE_WEIGHTS = np.array([[0.0, 0.7, 0.5], [0.6, 0.0, 0.8], [0.9, 0.3, 0.4]])
TRACKER_WEIGHTS = np.array([[0.2, 0.4, 0.9], [0.8, 0.0, 0.3], [0.5, 0.6, 0.0]])
INDICES = jnp.arange(NODES * SAMPLES, dtype=jnp.int32).reshape(NODES, SAMPLES)
SIZES = jnp.full(NODES, SAMPLES, jnp.int32)  # never traced, so that `init` can check them
SILENT = np.zeros(ROUNDS + 1)  # the noise is chosen
SCHEDULE = TrackingSchedule(0.3, 0.25, 0.2, SAMPLES, SILENT, SILENT)
AGENT = TrackingAgent(2 * CLIP, STATE_WEIGHTS[0].sum(), TRACKER_WEIGHTS[:, 0].sum())


def task():
    """Gradients sign(w_0) x cos(w), which the transcript turns round by w_0, and -y w_1 on top of the second."""

    def loss(w, x, y):
        direction = jnp.sign(jax.lax.stop_gradient(w[0]))
        return direction * (x @ jnp.sin(w)) - 0.5 * y * w[1] ** 2

    return jaxfl.from_functions(lambda key: jnp.array([1.0, 0.0, 0.0, 0.0]), loss)


def tracking_algorithm(gradient_at, task_of=task, clip_norm: float | None = CLIP, distribution="laplace"):
    return jaxfl.gradient_tracking(
        task_of(),
        state_weights=STATE_WEIGHTS,
        tracker_weights=TRACKER_WEIGHTS,
        schedule=SCHEDULE,
        clip_norm=clip_norm,
        gradient_at=gradient_at,
        distribution=distribution,
    )


class Pairs(NamedTuple):
    """Two sets of data and one transcript a pair."""

    inputs: np.ndarray  # (PAIRS, NODES * SAMPLES, FEATURES), float32
    labels: np.ndarray  # (PAIRS, NODES * SAMPLES), float32
    other_inputs: np.ndarray
    other_labels: np.ndarray
    states: np.ndarray  # (PAIRS, ROUNDS + 1, NODES, FEATURES), float32: x~; the first for gossip only
    trackers: np.ndarray  # (PAIRS, ROUNDS, NODES, FEATURES), float32: y~


def follow(algorithm, inputs, labels, states, trackers):
    """x and y of a run on a transcript, (ROUNDS + 1, NODES, d) each."""
    data = FederatedData(inputs, labels, INDICES, SIZES)

    def body(state, sent):
        next_state, tracker = sent
        draws = algorithm.draw(KEY, state, data)._replace(tracker_noise=tracker - state.gradient_tracker)
        unperturbed, _ = algorithm.update(state, data, draws)
        # x is the same for every noise on it; with this one x~ is what was chosen.
        state, _ = algorithm.update(state, data, draws._replace(state_noise=next_state - unperturbed.params))
        return state, (state.params, state.gradient_tracker)

    first = algorithm.init(KEY, data)
    _, later = jax.lax.scan(body, first, (states[1:], trackers))
    start = (first.params, first.gradient_tracker)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, later)


@functools.cache
def follower(gradient_at):
    """(inputs, labels, x~, y~) -> x and y, (PAIRS, ROUNDS + 1, NODES, FEATURES) each."""
    return jax.jit(jax.vmap(functools.partial(follow, tracking_algorithm(gradient_at))))


def distances(gradient_at, pairs):
    """L1 changes of node 0's x and y, (PAIRS, ROUNDS + 1) each; nobody else changes."""
    own = follower(gradient_at)(pairs.inputs, pairs.labels, pairs.states, pairs.trackers)
    other = follower(gradient_at)(pairs.other_inputs, pairs.other_labels, pairs.states, pairs.trackers)
    actual = []
    for a, b in zip(own, other, strict=True):
        change = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum(axis=-1)
        assert change[..., 1:].max() < ROUNDING, "what others send is the same, and so are they"
        actual.append(change[..., 0])
    return actual


def random_pairs(seed):
    """Gradients small and large, of all directions, and a transcript that turns them."""
    rng = np.random.default_rng(seed)
    count = NODES * SAMPLES
    inputs = rng.normal(size=(PAIRS, count, FEATURES)) * np.exp(rng.normal(size=(PAIRS, count, 1)))
    labels = rng.normal(size=(PAIRS, count))
    other_inputs, other_labels = inputs.copy(), labels.copy()
    changed, pair = rng.integers(0, SAMPLES, PAIRS), np.arange(PAIRS)
    other_inputs[pair, changed] = rng.choice([-10.0, -1.0, 1.0], (PAIRS, 1)) * rng.normal(size=(PAIRS, FEATURES))
    other_labels[pair, changed] = rng.normal(size=PAIRS)
    states = rng.normal(size=(PAIRS, ROUNDS + 1, NODES, FEATURES))
    trackers = rng.normal(size=(PAIRS, ROUNDS, NODES, FEATURES))
    arrays = (inputs, labels, other_inputs, other_labels, states, trackers)
    return Pairs(*(array.astype(np.float32) for array in arrays))


def opposite_pairs(signs, label=0.0):
    """Node 0's first sample has opposite gradients, both clipped, which take the given signs (m, ROUNDS + 1), cyclic
    over the pairs; the other samples have only a label."""
    inputs = np.zeros((PAIRS, NODES * SAMPLES, FEATURES), np.float32)
    inputs[:, 0, 1] = 1e3
    labels = np.full(inputs.shape[:2], label, np.float32)
    labels[:, 0] = 0.0
    states = np.zeros((PAIRS, ROUNDS + 1, NODES, FEATURES), np.float32)
    states[..., 0] = np.resize(signs, (PAIRS, ROUNDS + 1))[:, :, None]
    return Pairs(inputs, labels, -inputs, labels, states, np.zeros_like(states[:, 1:]))


def worst_signs(responses):
    """(K, ROUNDS + 1): in row k - 1 the signs of g_0, ..., g_K that drive what responds so furthest at k, g_0's +."""
    signs = np.ones((ROUNDS, ROUNDS + 1))
    for k in range(1, ROUNDS + 1):
        wanted = np.where(responses[k::-1] < 0, -1.0, 1.0)
        signs[k - 1, : k + 1] = wanted * wanted[0]
    return signs


def test_no_pair_of_data_sets_exceeds_the_proven_bounds():
    bounds = tracking.proven_sensitivities(SCHEDULE, AGENT)
    for actual, bound in zip(distances("broadcast", random_pairs(0)), bounds, strict=True):
        assert actual.shape == (PAIRS, ROUNDS + 1)
        assert (actual <= bound + ROUNDING).all()
        assert (actual[:, 1:].max(axis=0) > 0.6 * bound[1:]).all(), "the pairs do change what is broadcast"


@pytest.mark.parametrize("position", [0, 1], ids=["state", "tracker"])
def test_worst_data_sets_reach_the_proven_bounds(position):
    """At every k a transcript turns the changed sample's gradients as the impulse response does."""
    bounds = tracking.proven_sensitivities(SCHEDULE, AGENT)
    signs = worst_signs(tracking.impulse_responses(SCHEDULE, AGENT)[position])
    assert (np.diff(signs) != 0).any(), "a constant gradient is not the worst"
    actual = distances("broadcast", opposite_pairs(signs))
    for change, bound in zip(actual, bounds, strict=True):
        assert (change <= bound + ROUNDING).all()
    for k in range(1, ROUNDS + 1):
        np.testing.assert_allclose(actual[position][k - 1, k], bounds[position][k], rtol=1e-5)


def test_published_argument_fails_where_gradients_are_taken_at_the_own_state():
    """Unchanged samples, whose gradients are steep, follow the state that the changed one has moved: Lemma 3, which
    takes them for equal, is exceeded. At the broadcast state the same pair stays below the smaller, proven bound."""
    pairs = opposite_pairs(np.ones((1, ROUNDS + 1)), label=1e4)
    published, proven = (
        sensitivities(SCHEDULE, AGENT)
        for sensitivities in (tracking.published_sensitivities, tracking.proven_sensitivities)
    )
    at_state, at_broadcast = distances("state", pairs), distances("broadcast", pairs)
    assert at_state[0][0, 2] > 1.5 * published.state[2]
    assert at_state[1][0, 1] > 1.5 * published.tracker[1]
    for change, bound in zip(at_broadcast, proven, strict=True):
        assert (change <= bound + ROUNDING).all()
        assert change.max() > 0


def turned(pattern):
    """Gradients y pattern[k] of four clip norms, where the transcript's first coordinate holds k."""
    table = jnp.asarray(4 * CLIP * pattern, jnp.float32)

    def loss(w, _, y):
        k = jnp.round(jax.lax.stop_gradient(w[0])).astype(jnp.int32)
        return y * (table[k] @ w[1:])

    return jaxfl.from_functions(lambda key: jnp.zeros(1 + pattern.shape[1]), loss)


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_one_transcript_costs_what_is_stated_and_more_without_clipping(distribution):
    """The changed sample's gradients are opposite in both data sets, and turned as is worst for all broadcasts at once:
    with Laplace noise into a coordinate of its own in each round, with Gaussian noise as `worst_changes` says. Such
    transcripts have a positive density, so that no epsilon can be smaller."""
    rounds = np.arange(ROUNDS + 1)
    scales = 1 + 0.1 * rounds, np.where(rounds < ROUNDS, 1.5 + 0.15 * rounds, np.inf)
    run, pattern = SCHEDULE._replace(state_noise_scale=scales[0], tracker_noise_scale=scales[1]), np.eye(ROUNDS + 1)
    if distribution == "gaussian":
        rows = list(gram_rows(run, AGENT))[::-1]
        lower = np.array([np.pad(row, (0, ROUNDS + 1 - len(row))) for row in rows])
        pattern = worst_changes(lower + np.tril(lower, -1).T)
    release = TrackingRelease(clip_norm=CLIP, distribution=distribution)
    weights = {"state_in_weights": STATE_WEIGHTS.sum(axis=1), "tracker_out_weights": TRACKER_WEIGHTS.sum(axis=0)}
    stated = gradient_tracking_account(run, release, dp_delta=1e-5, **weights).statements(ROUNDS)[1].node_epsilons[0]
    states = np.zeros((ROUNDS + 1, NODES, 1 + pattern.shape[1]), np.float32)
    states[..., 0] = rounds[:, None]
    inputs, labels = jnp.zeros((NODES * SAMPLES, 1)), jnp.zeros(NODES * SAMPLES)

    def reached(clip_norm):
        algorithm = tracking_algorithm("broadcast", lambda: turned(pattern), clip_norm, distribution)
        path = jax.jit(lambda label: follow(algorithm, inputs, labels.at[0].set(label), states, 0 * states[1:]))
        order = 1 if distribution == "laplace" else 2
        changes = [np.asarray(a - b, np.float64)[:, 0] for a, b in zip(path(1.0), path(-1.0), strict=True)]
        shifts = [np.linalg.norm(c, ord=order, axis=-1) / scale for c, scale in zip(changes, scales, strict=True)]
        if distribution == "laplace":
            return float(np.sum(shifts))
        return gaussian_epsilon(float(np.linalg.norm(shifts)), 1e-5)

    least = 1 - 1e-4 if distribution == "laplace" else 0.99
    assert least * stated < reached(CLIP) <= (1 + 1e-4) * stated
    assert reached(None) > 2 * stated


def gossip_distances(gradient_at, pairs):
    """L1 changes of node 0's x in perturbed gossip, (PAIRS, ROUNDS + 1)."""
    algorithm = perturbed_gossip(
        task(), graph=jaxfl.graphs.complete(NODES), schedule=SCHEDULE, clip_norm=CLIP, gradient_at=gradient_at
    )

    @jax.jit
    @jax.vmap
    def follow(inputs, labels, states):
        data = FederatedData(inputs, labels, INDICES, SIZES)

        def body(state, sent):
            state = state._replace(broadcast_params=sent)
            state, _ = algorithm.update(state, data, algorithm.draw(KEY, state, data))
            return state, state.params

        return jax.lax.scan(body, algorithm.init(KEY, data), states[:-1])[1]

    own = follow(pairs.inputs, pairs.labels, pairs.states)
    other = follow(pairs.other_inputs, pairs.other_labels, pairs.states)
    change = np.abs(np.asarray(own, np.float64) - np.asarray(other, np.float64)).sum(axis=-1)
    return np.pad(change[..., 0], ((0, 0), (1, 0)))


def test_perturbed_gossip_stays_below_its_bound_and_reaches_it():
    bound = perturbed_state_sensitivities(SCHEDULE, 2 * CLIP).state
    for pairs, least in ((random_pairs(1), 0.3), (opposite_pairs(np.ones((1, ROUNDS + 1))), 0.9999)):
        actual = gossip_distances("broadcast", pairs)
        assert (actual <= bound + ROUNDING).all()
        assert (actual[:, 1:].max(axis=0) > least * bound[1:]).all()
    steep = opposite_pairs(np.ones((1, ROUNDS + 1)), label=1e4)
    assert gossip_distances("state", steep)[0, -1] > 1.5 * bound[-1], "nothing is proven there"
