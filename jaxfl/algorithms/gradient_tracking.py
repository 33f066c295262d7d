"""Private gradient tracking over two directed graphs: states travel over one, gradient trackers over the other.

    x~_i^k    = x_i^k + zeta_i^k,   y~_i^k = y_i^k + eta_i^k                   what is broadcast
    x_i^{k+1} = (1 - alpha sum_j R_ij) x_i^k + alpha sum_j R_ij x~_j^k - gamma y_i^k
    y_i^{k+1} = (1 - beta sum_j C_ji) y_i^k + beta sum_j C_ij y~_j^k + g_i^{k+1} - g_i^k,   y_i^0 = g_i^0

| symbol | here |
|---|---|
| x_i, x~_i | `State.params`, `State.broadcast_params` |
| y_i, g_i | `State.gradient_tracker`, `State.gradient` |
| zeta_i^{k+1}, eta_i^k | `Draws.state_noise`, `Draws.tracker_noise` of round k |
| R, C | `state_weights`, `tracker_weights` |
| alpha, beta, gamma, m_K (samples in a gradient), scales of the noise | `schedule` |

Chen, Wang, Zhang, "Differentially Private Gradient-Tracking-Based Distributed Stochastic Optimization over Directed
Graphs", Algorithm 1; Schemes (S1) and (S2) are `polynomial_schedule` and `exponential_schedule` of
`jaxfl.privacy.tracking`, which also says what a run costs in privacy.

Differences from the paper: by default g^{k+1} is taken at the broadcast state x~^{k+1}, which is then also what a node
returns, because a privacy budget is proven only for this; `gradient_at="state"` gives the paper's lines. Gradients are
clipped per sample. Noise may be Gaussian. Equation (6) prints C_ji for what i receives; equation (8) and the
conservation of the trackers' sum need C_ij. All nodes start from the same parameters.

Over `links` sums run over the messages that arrive. Receivers do without lost states. Senders keep lost trackers, so
that the trackers still sum to the gradients. Broadcasts may be rounded, after the noise; a node's tracker keeps the
rounding error of y~_i.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes. The budget of
`jaxfl.privacy.tracking` needs the same sums of R and C in every round: a change of x_i^k lives on in x_i^{k+1} by the
factor 1 - alpha sum_j R_ij. The factor is larger where messages are lost, so that the change lives longer than the
budget assumes. Links that lose messages are therefore refused beside noise. Rounding costs no budget: it comes after
the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.releases import of_noisy_states
from jaxfl.algorithms.schedules import check_noise_scales, check_steps, noise_of, scale_at
from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import LOST_MESSAGES, PLAIN
from jaxfl.core import Algorithm, ArgumentError, Array, Purpose, PyTree, Task, algorithm, check, purpose_key
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses
from jaxfl.core.tree import copied, number_type, replicate, scale, size
from jaxfl.gradients import GradientEstimator, fixed, mini_batch
from jaxfl.graphs.spectral import spanning_tree_roots
from jaxfl.privacy import NoiseMechanism
from jaxfl.privacy.mechanisms import released
from jaxfl.privacy.tracking import TrackingSchedule, gradient_tracking_account


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32; private to the node
    broadcast_params: PyTree  # x~, leaves (n, *leaf), float32
    gradient_tracker: PyTree  # y, leaves (n, *leaf), float32; private to the node
    gradient: PyTree  # g, leaves (n, *leaf), float32; private to the node
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round k."""

    gradient: Any  # draws of the gradient estimator: which samples g^{k+1} uses
    state_noise: PyTree  # zeta^{k+1}, leaves (n, *leaf), float32, already scaled; None without noise
    tracker_noise: PyTree  # eta^k, leaves (n, *leaf), float32, already scaled; None without noise
    links: LinkDraws  # arrival of x~^k, y~^k, rounding of x~^{k+1}, y~^k


@constructor
def gradient_tracking(
    task: Task,
    *,
    state_weights: np.ndarray,
    tracker_weights: np.ndarray,
    schedule: TrackingSchedule,
    clip_norm: float | Array | None,
    distribution: str = "laplace",
    gradient_at: str = "broadcast",
    links: Links | None = None,
    names: Sequence[str] | None = None,
    num_final_mixings: int = 0,
) -> Algorithm:
    """Gradient tracking with noise on all that is broadcast, on weights that need not be stochastic.

    Every node holds a state x and a gradient tracker y. It broadcasts x~ and y~, which are x and y plus noise. g^k are
    the gradients of round k, and R and C the weights by which states and trackers are mixed.

    A run over k = 0, ..., K of the schedule takes K rounds and ends with the broadcast state x~^K. With
    `gradient_at="state"` it takes K + 1 rounds and ends with x^{K+1}, which has no noise. After the schedule's end the
    noise is NaN, so that no round goes unnoticed that the privacy budget does not cover. After K + 1 rounds x~^{K+1} is
    therefore NaN; Algorithm 1 never sends it.

    Args:
        task: the learning task.
        state_weights: R, (n, n), at least 0; R[i, j] > 0 where i receives j's state. Static.
        tracker_weights: C, (n, n), at least 0; C[i, j] > 0 where i receives j's tracker. Static. In both, self-loops
            may be present or not, and a fixed graph's weights are `graph.mixing_matrix(0)`.
        schedule: all numbers of the run. Step sizes may be traced, and so may noise scales, which are at least 0: the
            scale b of Laplace noise, the standard deviation of Gaussian noise.
        clip_norm: bound on each sample's gradient norm: C / 2 for the C of the privacy budget. The norm is L1 for
            Laplace noise, L2 for Gaussian noise. None does not clip; a budget then assumes bounded gradients.
        distribution: "laplace" or "gaussian".
        gradient_at: "broadcast" takes gradients at x~ and returns it; "state" takes them at x and returns that, as
            published, without a proven budget.
        links: `jaxfl.links(...)`, over which x~ and y~ travel. A node's two messages to another are lost together.
            Links that lose messages are refused beside noise, see above. None loses and rounds nothing.
        names: (n,), names of the nodes in the order of both weights, for instance `graph.names`. Data with names must
            have the same. None where nodes are numbers. Static.
        num_final_mixings: exchanges of x~ after the last round, by R with rows divided by their sums where these exceed
            1: `node_params` gives what they would make of it. Their bits count in the first round. 0 where x is
            returned, which is never sent. The paper's round ends with a node's own fresh noise; 1 measures it after a
            mixing, as PrivSGP is. A round's own mixings are one: the bound is for them. Static.

    Returns:
        An `Algorithm`; `node_params` gives x~ for "broadcast" and x for "state". In its info the loss is taken at the
        point of g^{k+1}, after the round. x~ and y~ go to every out-neighbor in their graphs and count as two messages.
        The overflow counts the numbers of x~^{k+1} and y~^k, which the round makes; those of x~^0 are not counted.

    Raises:
        ArgumentError: unusable weights, schedule or names, or losses beside noise; from `init`, unusable data.

    Guarantees:
        - without tracker noise the trackers sum to the gradients, sum_i y_i = sum_i g_i, after every round.
        - they also do so over links, whatever these lose and round.
        - links that lose and round nothing change no bit.
        - with tracker noise, sum_i y_i exceeds sum_i g_i by beta times the sum of sum_j C_ji eta_i^l over nodes and
          past rounds.
        - without noise the error on a strongly convex problem falls geometrically.
        - noise is NaN after the end of the schedule.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> from jaxfl.privacy.tracking import exponential_schedule
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> schedule = exponential_schedule(10, state_noise_base=0.5, tracker_noise_base=0.5)
        >>> ring = jaxfl.graphs.directed_ring(2).mixing_matrix(0)
        >>> learner = jaxfl.gradient_tracking(
        ...     task, state_weights=ring, tracker_weights=ring, schedule=schedule, clip_norm=1.0)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.bits_sent.tolist()
        ([2, 2], [128.0, 128.0])
    """
    plan: TrackingSchedule = copied(schedule)
    unit_noise, clip_order = noise_of(distribution)
    check.one_of(("broadcast", "state"), gradient_at=gradient_at)
    estimator = mini_batch(sampler=fixed(plan.num_samples), clip_norm=clip_norm, clip_order=clip_order)
    weights = state_weights, tracker_weights, names
    check.at_least(0, num_final_mixings=num_final_mixings)
    if num_final_mixings and gradient_at == "state":
        found, remedy = f"got {num_final_mixings}", 'Pass gradient_at="broadcast".'
        raise ArgumentError("num_final_mixings", "must be 0 where x is returned, which is never sent", found, remedy)
    options = {"gradient_at": gradient_at, "links": links, "num_final_mixings": num_final_mixings}
    learner = tracking_rounds(task, weights, plan, estimator, unit_noise, **options)
    _check_links(links or PLAIN, plan)
    scales = {"state_noise_scale": plan.state_noise_scale, "tracker_noise_scale": plan.tracker_noise_scale}
    check_noise_scales(len(state_weights), **scales)
    received, sent = np.sum(state_weights, axis=1, dtype=np.float64), np.sum(tracker_weights, axis=0, dtype=np.float64)
    settings = len(state_weights), plan, clip_norm, distribution, gradient_at
    of_run = {"state_in_weights": received, "tracker_out_weights": sent}
    return learner._replace(releases=of_noisy_states(gradient_tracking_account, *settings, **of_run))


def tracking_rounds(
    task: Task,
    weights: tuple[Any, Any, Sequence[str] | None],
    plan: TrackingSchedule,
    estimator: GradientEstimator,
    noise: NoiseMechanism,
    *,
    gradient_at: str,
    links: Links | None,
    num_final_mixings: int = 0,
) -> Algorithm:
    """The rounds of `gradient_tracking`, whose noise has scale 1 here, and of `ab`, without noise."""
    # R and C: along R nodes pull states from their in-neighbors, along C they push trackers to their out-neighbors.
    pull, push = _as_matrices(*weights)
    num_nodes = len(pull)
    check_steps(state_mixing=plan.state_mixing, tracker_mixing=plan.tracker_mixing, step_size=plan.step_size)
    links = links or PLAIN
    links.check_num_nodes(num_nodes)
    # Messages to i from j in a round, (n, n): a state and a tracker are two.
    edges = sum(((weights > 0) & ~np.eye(num_nodes, dtype=bool)).astype(np.int32) for weights in (pull, push))

    final_edges = num_final_mixings * (pull > 0) * ~np.eye(num_nodes, dtype=bool)
    final_weights = pull / np.maximum(pull.sum(axis=1, keepdims=True), 1)

    def point(params, broadcast_params):
        return broadcast_params if gradient_at == "broadcast" else params

    # The samples of g and the noise of x~ of iteration k + 1 are drawn in round k, from the keys of k + 1; the keys of
    # 0 are for `init`.
    def init(key, data):
        check_sample_losses(task)
        params = replicate(task.init(purpose_key(key, Purpose.INIT)), num_nodes)
        drawn = scale(scale_at(plan.state_noise_scale, 0), noise.draw(purpose_key(key, Purpose.NOISE, 0), params))
        noisy = released(noise, params, drawn)
        broadcast = links.send(noisy, links.draw_rounding(key, 0, num_nodes)).values
        at = point(params, broadcast)
        estimator_state = estimator.init(task, key, at, data)
        batch = estimator.draw(key, jnp.int32(0), data)
        gradient, _, _ = estimator.estimate(task, at, estimator_state, data, batch, jnp.int32(0))
        return State(
            params=params,
            broadcast_params=broadcast,
            gradient_tracker=gradient,
            gradient=gradient,
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        k = state.round_index
        pair, noise_key = (state.params, state.gradient_tracker), purpose_key(key, Purpose.NOISE, k + 1)
        state_noise, tracker_noise = noise.draw(noise_key, pair) or (None, None)
        return Draws(
            gradient=estimator.draw(key, k + 1, data),
            state_noise=scale(scale_at(plan.state_noise_scale, k + 1), state_noise),
            tracker_noise=scale(scale_at(plan.tracker_noise_scale, k), tracker_noise),
            links=links.draw_between(key, k + 1, num_nodes),
        )

    def update(state, data, draws):
        k = state.round_index
        steps = plan.state_mixing, plan.tracker_mixing, plan.step_size
        alpha, beta, gamma = (at_round(one, k, state.params) for one in steps)
        arrived = draws.links.arrived
        state_change = _inflow(pull, 1, arrived, state.broadcast_params, state.params)
        terms = state.params, state_change, state.gradient_tracker
        params = jax.tree.map(lambda x, change, y: x + alpha * change - gamma * y, *terms)
        noisy = released(noise, params, draws.state_noise)
        noisy_tracker = released(noise, state.gradient_tracker, draws.tracker_noise)
        (broadcast, sent_tracker), counts = links.send((noisy, noisy_tracker), draws.links.rounding)
        own_tracker = links.with_error(state.gradient_tracker, sent_tracker, noisy_tracker)
        tracker_change = _inflow(push, 0, arrived, sent_tracker, own_tracker)
        gradient, _, info = estimator.estimate(task, point(params, broadcast), None, data, draws.gradient, k + 1)
        terms = state.gradient_tracker, tracker_change, gradient, state.gradient
        tracker = jax.tree.map(lambda y, change, new, old: y + beta * change + (new - old), *terms)
        bits = jnp.asarray(edges, jnp.float32) * (links.bits * (size(params) // num_nodes))
        if num_final_mixings:
            final = jnp.asarray(final_edges, jnp.float32) * (32 * (size(params) // num_nodes))
            bits = bits + jnp.where(k == 0, final, 0)
        info = info.plus(
            {} if arrived is None else {LOST_MESSAGES: jnp.where(arrived, 0, edges).sum(axis=0, dtype=jnp.int32)},
            counts,
            bits_sent=bits.sum(axis=0),
            bits_received=bits.sum(axis=1),
        )
        new_state = State(
            params=params,
            broadcast_params=broadcast,
            gradient_tracker=tracker,
            gradient=gradient,
            round_index=k + 1,
        )
        return new_state, info

    def node_params(state):
        def once(_, params):
            return jax.tree.map(jnp.add, params, _inflow(final_weights, 1, None, params, params))

        params = point(state.params, state.broadcast_params)
        return jax.lax.fori_loop(0, num_final_mixings, once, params) if num_final_mixings else params

    return algorithm(init, draw, update, node_params, nodes=(num_nodes, weights[2]))


def _inflow(weights: np.ndarray, axis: int, arrived: Array | None, broadcast: PyTree, node_values: PyTree) -> PyTree:
    """sum_j weights_ij broadcast_j - node_values_i times the arriving sum of row i (axis 1) or of column i (axis 0)."""
    matrix, outflow = (jnp.asarray(one, number_type(node_values)) for one in (weights, weights.sum(axis=axis)))
    if arrived is not None:
        outflow = outflow - jnp.where(arrived, 0, matrix).sum(axis=axis)
        matrix = jnp.where(arrived, matrix, 0)

    def product(leaf):
        # Accelerators multiply float32 in fewer bits by default; the trackers' sum would then not be conserved.
        return jnp.tensordot(matrix, leaf, axes=1, precision=jax.lax.Precision.HIGHEST)

    return jax.tree.map(jnp.subtract, jax.tree.map(product, broadcast), scale(outflow, node_values))


def _check_links(links: Links, schedule: TrackingSchedule) -> None:
    """Refuse links that lose messages where a budget may be stated: it is proven for constant weights."""
    scales = schedule.state_noise_scale, schedule.tracker_noise_scale
    if links.may_lose and any(check.is_traced(one) or np.any(np.asarray(one) != 0) for one in scales):
        requirement = "must lose nothing where there is noise: its budget holds for weights that do not change"
        remedy = "Pass success=1.0, or noise scales of 0 that are not traced."
        raise ArgumentError("links", requirement, "got links that may lose messages, and noise", remedy)


def _as_matrices(
    state_weights: Any, tracker_weights: Any, names: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Check both weights by Assumption 1 of the paper, and return them as (n, n) float64."""
    state_matrix, tracker_matrix = np.asarray(state_weights, np.float64), np.asarray(tracker_weights, np.float64)
    for name, weights in (("state_weights", state_matrix), ("tracker_weights", tracker_matrix)):
        if weights.ndim != 2 or weights.shape != 2 * state_matrix.shape[:1] or not weights.size:
            found = f"got shapes {state_matrix.shape} and {tracker_matrix.shape}"
            remedy = "Pass one number per receiver and sender in each."
            raise ArgumentError(name, "both must be square matrices of one size", found, remedy)
    check.non_negative(state_weights=state_matrix, tracker_weights=tracker_matrix)
    labels = range(len(state_matrix)) if names is None else names
    if len(labels) != len(state_matrix):
        found = f"got {len(labels)} for {len(state_matrix)} nodes"
        raise ArgumentError("names", "must hold one name for each node", found, "Name the nodes in the weights' order.")
    state_roots, tracker_roots = spanning_tree_roots(state_matrix), spanning_tree_roots(tracker_matrix.T)
    if not set(state_roots) & set(tracker_roots):
        first, second = ([labels[root] for root in roots] for roots in (state_roots, tracker_roots))
        requirement = "some node must reach all others by state_weights and be reached by all by tracker_weights"
        found = f"the first holds of nodes {first} and the second of nodes {second}"
        raise ArgumentError("tracker_weights", requirement, found, "Add edges until both hold of one node.")
    return state_matrix, tracker_matrix
