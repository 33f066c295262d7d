"""Weighted output perturbation: nodes perturb the output of their local step and average what they hear by data shares.

    o~_j^k    = x_j^k - gamma g_j^k + zeta_j^k,        g_j^k at x_j^k             what is broadcast
    x_i^{k+1} = sum_j w_ij o~_j^k,   w_ij = D_j / sum_l D_l,   j and l over the neighbors of i and i itself

| symbol | here |
|---|---|
| x_i | `State.params` |
| zeta_j^k | `Draws.state_noise` of round k |
| g_j^k | the mean of m_K clipped sample gradients, drawn by `Draws.gradient` of round k |
| D_j, neighbors | `data.sizes`, the edges of `graph` |
| gamma, m_K, scales of the noise | `schedule.step_size`, `schedule.num_samples`, `schedule.state_noise_scale` |

Y. Kang, Y. Liu, B. Niu, W. Wang, "Weighted Distributed Differential Privacy ERM: Convex and Non-Convex", Computers &
Security 106, 2021; reference [38] where Chen, Wang, Zhang compare it with gradient tracking (section 4.3).

A node averages its own noisy output, too. All that x^{k+1} depends on was therefore broadcast, and given the broadcasts
before, o_j^k depends on the data through gamma g_j^k only. The sizes D_j are public.

Differences from the paper: the mechanism is implemented as the comparison names it, not from the cited paper's own
lines. Gradients are clipped per sample. Noise may be Gaussian. All nodes start from the same parameters.

Does not claim: a privacy guarantee, as the noise has the scale that the caller passes; nor, on graphs that are not
complete, that all nodes' samples count the same: the averaging preserves sum_i D_i S_i x_i, where S_i is the sum
of D_l over node i and its neighbors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.exchange import message_bits
from jaxfl.algorithms.releases import of_noisy_states
from jaxfl.algorithms.schedules import check_noise_scales, check_steps, noise_of, scale_at
from jaxfl.core import Algorithm, Array, Purpose, PyTree, Task, algorithm, purpose_key
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import copied, replicate, scale, size
from jaxfl.gradients import fixed, mini_batch
from jaxfl.graphs import Graph, require_strongly_connected, require_undirected
from jaxfl.privacy.mechanisms import check_types
from jaxfl.privacy.tracking import TrackingSchedule, output_perturbation_account


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32; a function of what was broadcast
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round k."""

    gradient: Any  # draws of the gradient estimator: which samples g^k uses
    state_noise: PyTree  # zeta^k, leaves (n, *leaf), float32, already scaled


@constructor
def output_perturbation(
    task: Task,
    *,
    graph: Graph,
    schedule: TrackingSchedule,
    clip_norm: float | Array | None,
    distribution: str = "laplace",
) -> Algorithm:
    """Distributed SGD on perturbed outputs, averaged by data shares over an undirected graph.

    A run over k = 0, ..., K of the schedule takes K + 1 rounds, with one perturbed output in each; K rounds make the
    outputs of k = 0 to K - 1. After the schedule's end the noise is NaN, so that no round goes unnoticed that the
    privacy budget does not cover.

    Args:
        task: the learning task.
        graph: the same in all rounds, undirected and connected. Its edges count, its weights do not.
        schedule: all numbers of the run; mixing weights and those of the tracker are not used. The step size may be
            traced, and so may noise scales, which are at least 0: the scale b of Laplace noise, the standard deviation
            of Gaussian noise.
        clip_norm: bound on each sample's gradient norm, L1 for Laplace noise and L2 for Gaussian noise; None does not
            clip.
        distribution: "laplace" or "gaussian".

    Returns:
        An `Algorithm`; the loss of its info is taken at the parameters before the round; o~ goes to every neighbor.

    Raises:
        ArgumentError: a graph that does not qualify, or a number out of range; from `init`, data with too few samples.

    Guarantees:
        - on the complete graph every node holds the average of all outputs, weighted by data.
        - sum_i D_i S_i x_i is preserved by the averaging on every graph.
        - noise is NaN after the end of the schedule.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> from jaxfl.privacy.tracking import exponential_schedule
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> schedule = exponential_schedule(10, state_noise_base=0.5, tracker_noise_base=0.5)
        >>> learner = output_perturbation(task, graph=jaxfl.graphs.complete(2), schedule=schedule, clip_norm=1.0)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.bits_sent.tolist()
        ([2, 2], [64.0, 64.0])
    """
    schedule = copied(schedule)
    require_undirected(graph)
    require_strongly_connected(graph)
    check_steps(step_size=schedule.step_size)
    check_noise_scales(graph.num_nodes, state_noise_scale=schedule.state_noise_scale)
    unit_noise, clip_order = noise_of(distribution)
    estimator = mini_batch(sampler=fixed(schedule.num_samples), clip_norm=clip_norm, clip_order=clip_order)
    hears = graph.adjacency(0)

    def init(key, data):
        params = replicate(task.init(purpose_key(key, Purpose.INIT)), graph.num_nodes)
        check_types(unit_noise, task, params)
        estimator.init(task, key, params, data)  # it keeps no state, but refuses more samples than a node has
        return State(params=params, round_index=jnp.int32(0))

    def draw(key, state, data):
        k = state.round_index
        noise = unit_noise.draw(purpose_key(key, Purpose.NOISE, k), state.params)
        return Draws(
            gradient=estimator.draw(key, k, data),
            state_noise=scale(scale_at(schedule.state_noise_scale, k), noise),
        )

    def update(state, data, draws):
        k = state.round_index
        gamma = at_round(schedule.step_size, k)
        gradient, _, info = estimator.estimate(task, state.params, None, data, draws.gradient, k)
        outputs = jax.tree.map(lambda x, g, noise: x - gamma * g + noise, state.params, gradient, draws.state_noise)
        params = _weighted_average(hears, data.sizes, outputs)
        message = message_bits(graph, k, 32 * (size(params) // graph.num_nodes))
        return State(params=params, round_index=k + 1), info.plus(message)

    plan = graph.num_nodes, schedule, clip_norm, distribution, "state"
    releases = of_noisy_states(output_perturbation_account, *plan)
    nodes = graph.num_nodes, graph.names
    return algorithm(init, draw, update, lambda state: state.params, nodes=nodes, releases=releases)


def _weighted_average(hears: np.ndarray, sizes: Array, tree: PyTree) -> PyTree:
    """Each node's average over those it hears (itself among them), weighted by their sizes (n,)."""
    shares = jnp.asarray(hears, jnp.float32) * sizes.astype(jnp.float32).reshape(1, -1)
    weights = shares / shares.sum(axis=1, keepdims=True)
    # Accelerators multiply float32 in fewer bits by default; the weights would then not sum to one.
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1, precision=jax.lax.Precision.HIGHEST), tree)
