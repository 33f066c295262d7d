"""Gossip over states that are perturbed, quantised or both before they are sent: distributed SGD, without tracking.

    x~_i^k    = Q(x_i^k + zeta_i^k)                                              what is broadcast
    x_i^{k+1} = (1 - alpha) x_i^k + alpha sum_j a_ij x~_j^k - gamma g_i^k,       g_i^k at x_i^k, or at x~_i^k

With `num_mixings` M, x~ is mixed M times in place of once: s^0 = x~, s^m_i = sum_j a_ij s^{m-1}_j, and s^M stands in
place of the sum. Only mixtures of broadcasts are passed on, a node's own term too, never x: it holds the last gradient
without noise. Messages are then functions of what was broadcast, so that no epsilon changes.

| symbol | here |
|---|---|
| x_i, x~_i | `State.params`, `State.broadcast_params` |
| zeta_i^{k+1}, the random numbers of Q in x~_i^{k+1} | `Draws.state_noise`, `Draws.rounding` of round k |
| g_i^k | the mean of m_K clipped sample gradients, drawn by `Draws.gradient` of round k |
| a, Q | `graph`, `quantizer` |
| alpha, gamma, m_K, scales of the noise | `schedule.state_mixing`, `.step_size`, `.num_samples`, `.state_noise_scale` |

One form covers the methods that Chen, Wang, Zhang compare with gradient tracking (section 4.3), by its references:

- [46] noise, no quantiser. J. Wang, J.-F. Zhang, "Differentially Private Distributed Stochastic Optimization with
  Time-Varying Sample Sizes", IEEE Transactions on Automatic Control 69(9), 2024.
- [47] noise and a quantiser. J. Chen, J. Wang, J.-F. Zhang, "Differentially Private Distributed Nonconvex Stochastic
  Optimization with Quantized Communication", IEEE Transactions on Automatic Control, 2025.
- [41] a ternary quantiser, noise scales 0. Y. Wang, T. Basar, "Quantization Enabled Privacy Protection in Decentralized
  Stochastic Optimization", IEEE Transactions on Automatic Control 68(7), 2023.
- [42] stochastic quantisation, noise scales 0. G. Yan, T. Li, K. Wu, L. Song, "Killing Two Birds with One Stone:
  Quantization Achieves Privacy in Distributed Learning", Digital Signal Processing 146, 2024.

Differences from the papers: the mechanisms are implemented as the comparison names them, not from the cited papers'
own lines. Step sizes and sample sizes are those of a whole run of K iterations, as the comparison sets them; in [46]
they vary with k. Gradients are clipped per sample. Noise may be Gaussian. All nodes start from the same parameters.

Does not claim: a privacy guarantee. Noise and quantisation are the caller's choice. With gradients at x_i^k, as
published, neighboring data sets make the points at which gradients are taken differ, and the returned state was never
perturbed; with gradients at x~_i^k, given all that was broadcast, x_i depends on the data linearly through g_i only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.exchange import exchange
from jaxfl.algorithms.releases import of_noisy_states
from jaxfl.algorithms.schedules import check_noise_scales, check_steps, noise_of, scale_at
from jaxfl.channel import LinkDraws, Quantizer
from jaxfl.channel.links import RoundingValues, links
from jaxfl.core import (
    Algorithm,
    ArgumentError,
    Array,
    Purpose,
    PyTree,
    Task,
    algorithm,
    check,
    node_keys,
    one_kernel,
    purpose_key,
)
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.check import is_traced
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses
from jaxfl.core.tree import copied, flattener, replicate, scale, size
from jaxfl.gradients import fixed, mini_batch
from jaxfl.graphs import (
    Graph,
    require_doubly_stochastic,
    require_strongly_connected,
    require_undirected,
)
from jaxfl.privacy.mechanisms import add
from jaxfl.privacy.tracking import (
    TrackingSchedule,
    perturbed_state_account,
    quantization_account,
)


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32; private to the node
    broadcast_params: PyTree  # x~, leaves (n, *leaf), float32
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round k."""

    gradient: Any  # draws of the gradient estimator: which samples g^k uses
    state_noise: PyTree  # zeta^{k+1}, leaves (n, *leaf), float32, already scaled
    rounding: PyTree  # how x~^{k+1} is rounded, leaves (n, *leaf), float32, in [0, 1); None without a quantiser


@constructor
def perturbed_gossip(
    task: Task,
    *,
    graph: Graph,
    schedule: TrackingSchedule,
    clip_norm: float | Array | None,
    distribution: str = "laplace",
    quantizer: Quantizer | None = None,
    gradient_at: str = "state",
    num_mixings: int = 1,
    num_final_mixings: int = 0,
) -> Algorithm:
    """Distributed SGD on perturbed, possibly quantised, states over an undirected graph.

    Every node holds a state x and sends x~, which is x plus noise zeta, rounded where there is a quantiser. g^k are the
    gradients of round k, alpha is `schedule.state_mixing`.

    A run over k = 0, ..., K of the schedule has K + 1 perturbed states x~^0, ..., x~^K, of which `init` makes the
    first. With `gradient_at="broadcast"` it takes K rounds and ends with x~^K; with "state" it takes K + 1 rounds and
    ends with the unperturbed x^{K+1}. After the schedule's end the noise is NaN, so that no round goes unnoticed that
    the privacy budget does not cover.

    Args:
        task: the learning task.
        graph: one doubly stochastic mixing matrix for all rounds, of a connected graph whose edges go both ways. A node
            receives its own x~, too, with its own weight.
        schedule: all numbers of the run; those of the tracker are not used. Step sizes may be traced, and so may noise
            scales, which are at least 0: the scale b of Laplace noise, the standard deviation of Gaussian noise. With
            scales of 0 the quantiser alone makes messages random.
        clip_norm: bound on each sample's gradient norm, L1 for Laplace noise and L2 for Gaussian noise; None does not
            clip.
        distribution: "laplace" or "gaussian".
        quantizer: rounds x + zeta before it is sent; None sends 32 bits a number.
        gradient_at: "state" takes gradients at x and returns it, as published; "broadcast" takes them at x~ and returns
            that.
        num_mixings: M, exchanges of a round. Those behind the first send 32 bits a number: mixtures are not quantised.
            Static.
        num_final_mixings: exchanges of x~ after the last round: `node_params` gives what they would make of it. Their
            bits count in the first round. 0 where x is returned, which is private. Static.

    Returns:
        An `Algorithm`; `node_params` gives x for "state" and x~ for "broadcast". In its info the loss is taken at the
        point of g^k, before the round; x~^k goes to every neighbor. Its overflow counts numbers of x + zeta that are
        beyond the quantiser's range in x~^{k+1}, which the round makes; those of x~^0 are not counted.

    Raises:
        ArgumentError: a graph that does not qualify, or a number out of range; from `init`, data with too few samples.

    Guarantees:
        - without noise and quantiser, alpha 1 gives the rounds of d_psgd.
        - node mean moves by minus step_size times the mean gradient plus state_mixing times the mean perturbation.
        - noise is NaN after the end of the schedule.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> from jaxfl.channel import uniform_quantizer
        >>> from jaxfl.privacy.tracking import exponential_schedule
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = perturbed_gossip(
        ...     task,
        ...     graph=jaxfl.graphs.complete(2),
        ...     schedule=exponential_schedule(10, state_noise_base=0.5, tracker_noise_base=0.5),
        ...     clip_norm=1.0,
        ...     quantizer=uniform_quantizer(0.1, levels=256),
        ... )
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.bits_sent.tolist()
        ([2, 2], [16.0, 16.0])
    """
    schedule = copied(schedule)
    require_undirected(graph)
    require_doubly_stochastic(graph)
    require_strongly_connected(graph)
    check_steps(state_mixing=schedule.state_mixing, step_size=schedule.step_size)
    check_noise_scales(graph.num_nodes, state_noise_scale=schedule.state_noise_scale)
    unit_noise, clip_order = noise_of(distribution)
    check.one_of(("state", "broadcast"), gradient_at=gradient_at)
    estimator = mini_batch(sampler=fixed(schedule.num_samples), clip_norm=clip_norm, clip_order=clip_order)
    if num_final_mixings and gradient_at == "state":
        remedy = 'Pass gradient_at="broadcast".'
        found = f"got {num_final_mixings}"
        raise ArgumentError("num_final_mixings", "must be 0 where x is returned, which is never sent", found, remedy)
    way = links(quantizer=quantizer)
    gossip = exchange(graph, first_bits=way.bits, num_mixings=num_mixings, num_final_mixings=num_final_mixings)
    rounding_of = _uniform if quantizer else lambda key, params: None
    plan = graph.num_nodes, schedule, clip_norm, distribution, gradient_at
    releases = of_noisy_states(perturbed_state_account, *plan)
    if quantizer is not None and not is_traced(schedule.state_noise_scale) and not np.any(schedule.state_noise_scale):
        step = {"quantization_step": quantizer.step}
        releases = None if quantizer.step is None else of_noisy_states(quantization_account, *plan, **step)

    def point(state):
        return state.broadcast_params if gradient_at == "broadcast" else state.params

    def perturbation(key, k, params):
        """zeta^k, and the random numbers by which x~^k is rounded."""
        noise = scale(
            scale_at(schedule.state_noise_scale, k), unit_noise.draw(purpose_key(key, Purpose.NOISE, k), params)
        )
        return noise, rounding_of(purpose_key(key, Purpose.ROUNDING, k), params)

    def init(key, data):
        check_sample_losses(task)
        params = replicate(task.init(purpose_key(key, Purpose.INIT)), graph.num_nodes)
        estimator.init(task, key, params, data)  # it keeps no state, but refuses more samples than a node has
        noise, rounding = perturbation(key, 0, params)
        broadcast = way.send(add(params, noise), RoundingValues(rounding)).values
        return State(params=params, broadcast_params=broadcast, round_index=jnp.int32(0))

    # x~^{k+1} is made in round k, from the keys of k + 1, so that the state after it holds what may be returned.
    def draw(key, state, data):
        k = state.round_index
        noise, rounding = perturbation(key, k + 1, state.params)
        return Draws(gradient=estimator.draw(key, k, data), state_noise=noise, rounding=rounding)

    def update(state, data, draws):
        k = state.round_index
        alpha, gamma = at_round(schedule.state_mixing, k), at_round(schedule.step_size, k)
        gradient, _, info = estimator.estimate(task, point(state), None, data, draws.gradient, k)
        mixture, message = gossip.send(LinkDraws(None, None), state.broadcast_params, k)
        params = jax.tree.map(
            lambda x, received, g: (1 - alpha) * x + alpha * received - gamma * g,
            state.params,
            mixture,
            gradient,
        )
        broadcast, counts = way.send(add(params, draws.state_noise), RoundingValues(draws.rounding))
        new_state = State(params=params, broadcast_params=broadcast, round_index=k + 1)
        return new_state, info.plus(message, counts)

    def node_params(state):
        return gossip.finish(point(state), state.round_index)

    return algorithm(init, draw, update, node_params, nodes=(graph.num_nodes, graph.names), releases=releases)


def _uniform(key: Array, tree: PyTree) -> PyTree:
    """Uniform numbers on [0, 1), leaves (n, *leaf), in the dtype of the first leaf: one stream a node."""
    one_node = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)
    first = jax.tree.leaves(tree)[0]
    keys = node_keys(key, first.shape[0])
    numbers = jax.vmap(lambda node_key: jax.random.uniform(one_kernel(node_key), (size(one_node),), first.dtype))(keys)
    return flattener(one_node)[1](numbers)
