"""AB: the minimum that it reaches, and gradient tracking without noise."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close
from problems import problem, uneven_data

import jaxfl
from jaxfl.privacy.tracking import TrackingSchedule

NODES = 5
GRAPH = problem("ab").example.topology["graph"]
EDGES = GRAPH.adjacency(0).astype(float)
ROWS, COLUMNS = EDGES / EDGES.sum(axis=1, keepdims=True), EDGES / EDGES.sum(axis=0, keepdims=True)


def test_reaches_the_minimum_of_the_mean_loss_from_uneven_degrees_and_is_tracking_without_noise():
    """Full batches, so that gradients are exact."""
    data, key = uneven_data(sizes=(4,) * NODES, features=3), jax.random.key(2)
    task = jaxfl.from_functions(lambda key: jnp.zeros(3), lambda w, x, y: (x @ w - y.astype(x.dtype)) ** 2)
    learner = jaxfl.ab(task, graph=GRAPH, step_size=0.05, batch_size=4)
    rounds = jax.jit(
        lambda learner, state, count: jax.lax.scan(lambda s, _: learner.round(key, s, data), state, length=count)[0],
        static_argnums=(0, 2),
    )
    actual = rounds(learner, learner.init(key, data), 600).params
    minimum = np.linalg.lstsq(np.asarray(data.inputs, float), np.asarray(data.labels, float))[0]
    np.testing.assert_allclose(actual, np.broadcast_to(minimum, (NODES, 3)), atol=1e-4)
    schedule = TrackingSchedule(1.0, 1.0, 0.05, 4, np.zeros(9), np.zeros(9))
    weights = {"state_weights": ROWS, "tracker_weights": COLUMNS}
    tracking = jaxfl.gradient_tracking(task, **weights, schedule=schedule, clip_norm=None)
    ours, theirs = (rounds(one, one.init(key, data), 5) for one in (learner, tracking))
    assert_close((ours.params, ours.gradient_tracker), (theirs.params, theirs.gradient_tracker))
