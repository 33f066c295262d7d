"""AB: gradient tracking without noise over a directed graph, whose nodes need no push-sum weights.

    x_i^{k+1} = sum_j R_ij x_j^k - gamma y_i^k
    y_i^{k+1} = sum_j C_ij y_j^k + g_i^{k+1} - g_i^k,   g_i^k at x_i^k,   y_i^0 = g_i^0

These are the rounds of `gradient_tracking` with alpha = beta = 1 and without noise, over links, too.

Xin, Khan, "A Linear Algorithm for Optimization over Directed Graphs with Geometric Convergence", IEEE Control Systems
Letters 2(3), 2018, arXiv:1803.02503.

Differences from the paper: gradients of batches; links. All nodes start from the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxfl.algorithms.gradient_tracking import tracking_rounds
from jaxfl.channel import Links
from jaxfl.core import Algorithm, ArgumentError, Array, Task
from jaxfl.core.algorithm import constructor
from jaxfl.gradients import fixed, mini_batch
from jaxfl.graphs import Graph, require_strongly_connected
from jaxfl.privacy.mechanisms import NO_NOISE
from jaxfl.privacy.tracking import TrackingSchedule


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
        graph: the same in every round, strongly connected. Its edges count, its weights do not: R weighs equally all
            that a node receives, C all that it sends; its own value is included.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index (any optax schedule).
        batch_size: samples in a gradient.
        clip_norm: bound on the L2 norm of each sample's gradient; None does not clip.
        links: as for `gradient_tracking`; x is taken as it is at the node, not as it is sent.

    Returns:
        An `Algorithm` with the state and the info of `gradient_tracking`.

    Guarantees:
        - without noise the error on a strongly convex problem falls geometrically.
        - the rounds of gradient_tracking on the same weights without noise.

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
    if graph.period > 1:
        remedy = "Pass jaxfl.graphs.static_exponential(n), for instance."
        raise ArgumentError("graph", "must be the same in every round", f"{graph.name} has {graph.period}", remedy)
    require_strongly_connected(graph)
    edges = graph.adjacency(0).astype(np.float64)
    weights = edges / edges.sum(axis=1, keepdims=True), edges / edges.sum(axis=0, keepdims=True), graph.names
    plan = TrackingSchedule(1.0, 1.0, step_size, batch_size, np.zeros(1), np.zeros(1))  # pyright: ignore
    estimator = mini_batch(sampler=fixed(batch_size), clip_norm=clip_norm)
    return tracking_rounds(task, weights, plan, estimator, NO_NOISE, gradient_at="state", links=links)
