"""AB: gradient tracking without noise over a directed graph, whose nodes need no push-sum weights.

    x_i^{k+1} = sum_j R_ij x_j^k - gamma y_i^k
    y_i^{k+1} = sum_j C_ij y_j^k + g_i^{k+1} - g_i^k,   g_i^k at x_i^k,   y_i^0 = g_i^0

| symbol | here |
|---|---|
| x_i, y_i, g_i | `State.params`, `State.gradient_tracker`, `State.gradient` |
| R, C | rows and columns of `graph`'s edges, weighed equally; a node's own value is included |
| gamma | `step_size` |

Xin, Khan, "A Linear Algorithm for Optimization over Directed Graphs with Geometric Convergence", IEEE Control Systems
Letters 2(3), 2018, arXiv:1803.02503.

Over `links` receivers use their own value in place of a lost x_j, and senders keep a lost y_j, so that the trackers
still sum to the gradients. Both messages may be rounded; a node keeps the rounding error of its own.

Differences from the paper: gradients of batches; links. All nodes start from the same parameters. `gradient_tracking`
has noise, and weights that need not be stochastic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.exchange import exchange
from jaxfl.algorithms.schedules import check_steps
from jaxfl.channel import LinkDraws, Links
from jaxfl.core import Algorithm, ArgumentError, Array, Purpose, PyTree, Task, algorithm, purpose_key, stream_key
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.tree import consensus_distance, descend, replicate
from jaxfl.gradients import fixed, mini_batch
from jaxfl.graphs import Graph, from_matrix, require_strongly_connected


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32
    gradient_tracker: PyTree  # y, leaves (n, *leaf), float32
    gradient: PyTree  # g, leaves (n, *leaf), float32
    round_index: Array  # (), int32, rounds completed


class Draws(NamedTuple):
    """The random numbers of one round k."""

    gradient: Any  # draws of the gradient estimator: which samples g^{k+1} uses
    links: LinkDraws  # which states arrive, and how they are rounded
    tracker_links: LinkDraws  # the same of the trackers


@constructor
def ab(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    batch_size: int = 1,
    clip_norm: float | Array | None = None,
    links: Links | None = None,
) -> Algorithm:
    """Gradient tracking without noise over a directed graph.

    Args:
        task: the learning task.
        graph: the same in every round, strongly connected. Its edges count, its weights do not.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index (any optax schedule).
        batch_size: samples in a gradient.
        clip_norm: bound on the L2 norm of each sample's gradient; None does not clip.
        links: `jaxfl.links(...)`, over which x and y travel, each in its own message; None loses and rounds nothing.

    Returns:
        An `Algorithm`; the loss of its info and the consensus distance are taken at the parameters after the round.

    Guarantees:
        - the trackers sum to the gradients, sum_i y_i = sum_i g_i, after every round, whatever links lose and round.
        - links that lose and round nothing change no bit.
        - the error on a strongly convex problem falls geometrically.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = jaxfl.ab(task, graph=jaxfl.graphs.directed_ring(2), step_size=0.1, batch_size=2)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.bits_sent.tolist()
        ([2, 2], [128.0, 128.0])
    """
    pull, push = (exchange(weights, links, kept_by=who) for weights, who in _even_weights(graph))
    check_steps(step_size=step_size)
    estimator = mini_batch(sampler=fixed(batch_size), clip_norm=clip_norm)

    # The samples of g^{k+1} are drawn in round k, from the keys of k + 1; the keys of 0 are for `init`.
    def init(key, data):
        params, k = replicate(task.init(purpose_key(key, Purpose.INIT)), graph.num_nodes), jnp.int32(0)
        estimator_state = estimator.init(task, key, params, data)
        gradient = estimator.estimate(task, params, estimator_state, data, estimator.draw(key, k, data), k)[0]
        return State(params=params, gradient_tracker=gradient, gradient=gradient, round_index=k)

    def draw(key, state, data):
        k = state.round_index
        of_trackers = push.draw(stream_key(key, 1), k)
        return Draws(gradient=estimator.draw(key, k + 1, data), links=pull.draw(key, k), tracker_links=of_trackers)

    def update(state, data, draws):
        k = state.round_index
        mixture, sent = pull.send(draws.links, state.params, k)
        params = descend(mixture, at_round(step_size, k, mixture), state.gradient_tracker)
        trackers, sent_too = push.send(draws.tracker_links, state.gradient_tracker, k)
        gradient, _, info = estimator.estimate(task, params, None, data, draws.gradient, k + 1)
        tracker = jax.tree.map(lambda y, new, old: y + (new - old), trackers, gradient, state.gradient)
        info = info.plus(jax.tree.map(jnp.add, sent, sent_too), consensus_distance=consensus_distance(params))
        return State(params=params, gradient_tracker=tracker, gradient=gradient, round_index=k + 1), info

    return algorithm(init, draw, update, lambda state: state.params, nodes=(graph.num_nodes, graph.names))


def _even_weights(graph: Graph) -> tuple[tuple[Graph, str], tuple[Graph, str]]:
    """R with who keeps a lost message of it, and C."""
    if graph.period > 1:
        remedy = "Pass jaxfl.graphs.static_exponential(n), for instance."
        raise ArgumentError("graph", "must be the same in every round", f"{graph.name} has {graph.period}", remedy)
    require_strongly_connected(graph)
    edges = graph.adjacency(0).astype(np.float64)
    rows, columns = (edges / edges.sum(axis=axis, keepdims=True) for axis in (1, 0))
    return (from_matrix(rows), "receiver"), (from_matrix(columns), "sender")
