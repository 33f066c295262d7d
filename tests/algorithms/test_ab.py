"""AB: the loop's lines over links, the minimum that it reaches, and gradient tracking without noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from problems import problem, small_task, uneven_data
from reference.links import ab as reference_ab
from reference.perturbed_gossip import round_uniform
from reference.runs import by_node, each, entries, one_by_one, plain_gradients, relative_error

import jaxfl
from jaxfl.channel import uniform_quantizer
from jaxfl.gradients import fixed, mini_batch
from jaxfl.privacy.tracking import TrackingSchedule

KEY, NODES, BATCH = jax.random.key(2), 5, 3
GRAPH = problem("ab").example.topology["graph"]
EDGES = GRAPH.adjacency(0).astype(float)
ROWS, COLUMNS = EDGES / EDGES.sum(axis=1, keepdims=True), EDGES / EDGES.sum(axis=0, keepdims=True)


@pytest.mark.parametrize(
    "links", [None, jaxfl.links(0.7, uniform_quantizer(2.0**-7, levels=1024))], ids=["plain", "lossy, rounded"]
)
def test_follows_the_loop_and_keeps_the_trackers_sum(links):
    """Message by message; sum_i y_i = sum_i g_i in every round, to 25 roundings of trackers below 4."""
    learner = jaxfl.ab(small_task(), graph=GRAPH, step_size=0.05, batch_size=BATCH, links=links)
    data = uneven_data()
    done = one_by_one(learner, KEY, data, 25)
    first = done.states[0]

    def numbers_of(draws):
        arrived = np.ones((NODES, NODES), bool) if draws.arrived is None else np.asarray(draws.arrived)
        return arrived, [None] * NODES if draws.rounding is None else each(draws.rounding.draw(first.params))

    expected = reference_ab(
        each(first.params),
        ROWS,
        COLUMNS,
        plain_gradients(data, BATCH, None, 2),
        0.05,
        entries(mini_batch(sampler=fixed(BATCH)).draw(KEY, jnp.int32(0), data)),
        [(entries(d.gradient), *numbers_of(d.links), *numbers_of(d.tracker_links)) for d in done.draws],
        None if links is None else functools.partial(round_uniform, step=2.0**-7, levels=1024),
    )
    last = done.states[-1]
    for ours, theirs in zip((last.params, last.gradient_tracker, last.gradient), expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    for state in done.states:
        difference = by_node(state.gradient_tracker).sum(axis=0) - by_node(state.gradient).sum(axis=0)
        np.testing.assert_allclose(difference, 0.0, atol=1.2e-7 * 5 * NODES * 4)
    for draws, info in zip(done.draws, done.infos, strict=True):
        others = EDGES.astype(bool) & ~np.eye(NODES, dtype=bool)
        bits = 32 if links is None else 10
        np.testing.assert_array_equal(info.bits_sent, 2 * others.sum(axis=0) * 53 * bits)
        if links is not None:
            lost = [(others & ~np.asarray(one.arrived)).sum(axis=0) for one in (draws.links, draws.tracker_links)]
            np.testing.assert_array_equal(info.lost_messages, sum(lost))
            assert (draws.links.arrived != draws.tracker_links.arrived).any(), "losses are independent"


def test_reaches_the_minimum_of_the_mean_loss_from_uneven_degrees_and_is_tracking_without_noise():
    """Full batches, so that gradients are exact."""
    data, key = uneven_data(sizes=(4,) * NODES, features=3), jax.random.key(2)
    task = jaxfl.from_functions(lambda key: jnp.zeros(3), lambda w, x, y: (x @ w - y.astype(x.dtype)) ** 2)
    learner = jaxfl.ab(task, graph=GRAPH, step_size=0.05, batch_size=4)
    rounds = jax.jit(
        lambda learner, state, count: jax.lax.scan(lambda s, _: learner.round(key, s, data), state, length=count)[0],
        static_argnums=(0, 2),
    )
    found = rounds(learner, learner.init(key, data), 600).params
    minimum = np.linalg.lstsq(np.asarray(data.inputs, float), np.asarray(data.labels, float))[0]
    np.testing.assert_allclose(found, np.broadcast_to(minimum, (NODES, 3)), atol=1e-4)
    schedule = TrackingSchedule(1.0, 1.0, 0.05, 4, np.zeros(9), np.zeros(9))
    weights = {"state_weights": ROWS, "tracker_weights": COLUMNS}
    tracking = jaxfl.gradient_tracking(task, **weights, schedule=schedule, clip_norm=None)
    ours, theirs = (rounds(one, one.init(key, data), 5) for one in (learner, tracking))
    assert_close((ours.params, ours.gradient_tracker), (theirs.params, theirs.gradient_tracker))
