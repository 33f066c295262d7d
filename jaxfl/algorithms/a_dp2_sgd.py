"""Asynchronous private gossip over a fixed undirected graph: A(DP)2SGD, and without noise AD-PSGD.

    at event t a node i = i_t wakes, uniform over the nodes, and picks j, uniform over the neighbors of i:
    x_j^{t+1} = (x_i^t + x_j^t) / 2
    x_i^{t+1} = (x_i^t + x_j^t) / 2 - gamma (g_i + N_i),   g_i at x_i^{t - delay}, delay uniform over 0 ... max_delay

| symbol | here |
|---|---|
| x_i | `State.params` |
| i, j, delay | `Draws.node`, `Draws.neighbor`, `Draws.delay` |
| g_i, N_i | `gradient`, `noise` |
| gamma | `step_size` |

Xu, Zhang, Wang, "A(DP)2SGD: Asynchronous Decentralized Parallel Stochastic Gradient Descent with Differential Privacy",
TPAMI 2021, arXiv:2008.09246; without noise Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic
Gradient Descent", ICML 2018, arXiv:1710.06952, Algorithm 1, where each event averages one pair of nodes.

Differences from the papers: time is simulated. A round is n events, so that it costs the gradient evaluations of one
synchronous iteration. Nodes are equally fast. Delays do not depend on who waits for whom. A delay that reaches back
before the run gives the first parameters.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes. The number of a node's
releases is random: `Info.events` counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.exchange import exchange, plus_final
from jaxfl.algorithms.releases import of_noisy_gradients
from jaxfl.core import (
    Algorithm,
    ArgumentError,
    Array,
    FederatedData,
    Info,
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
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses
from jaxfl.core.tree import descend, replicate, size
from jaxfl.gradients import GradientEstimator, mini_batch
from jaxfl.graphs import Graph, require_doubly_stochastic, require_strongly_connected, require_undirected
from jaxfl.privacy import A_DP2_SGD, NoiseMechanism
from jaxfl.privacy.mechanisms import NO_NOISE, check_types, released, require_own_noise, require_rescaled


class EventLog(NamedTuple):
    """Ring buffer of the last s = max(2, max_delay + 1) events: their nodes, and the parameters that they overwrote.

    Event t is kept in slot t mod s. Two rows for each event are enough: the other nodes' parameters do not change.
    """

    nodes: Array  # (s, 2), int32, the node that woke and its neighbor; -1 in a slot that no event has filled
    params: PyTree  # leaves (s, 2, *leaf), float32, their parameters before the event


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32
    log: EventLog
    round_index: Array  # (), int32, rounds of n events completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round: n events, in the order in which they happen."""

    node: Array  # (n,), int32, who wakes
    neighbor: Array  # (n,), int32, with whom it averages; itself in a network of one node
    delay: Array  # (n,), int32, in 0 ... max_delay, age in events of the parameters at which the gradient is taken
    gradient: Any  # draws of the gradient estimator, event by event: which samples
    noise: PyTree  # leaves (n, *leaf), a row an event: float32, scaled for its waking node, or int32; None: no noise


@constructor
def a_dp2_sgd(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    noise: NoiseMechanism | None = None,
    gradient: GradientEstimator | None = None,
    max_delay: int = 16,
    num_final_mixings: int = 0,
) -> Algorithm:
    """Asynchronous decentralised SGD; a round is n events.

    Args:
        task: the learning task.
        graph: who may average with whom: fixed, undirected and connected. Its weights are not used
            but for final exchanges, which need them doubly stochastic.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index (any optax schedule).
        noise: added to the gradient of every event, at the scale of the waking node; None adds nothing (AD-PSGD).
        gradient: how the waking node estimates its gradient: an estimator without state; default `mini_batch()`, one
            uniform sample.
        max_delay: largest age in events of the parameters at which a gradient is taken, at least 0; the state keeps
            2 max(2, max_delay + 1) rows of parameters for it.
        num_final_mixings: exchanges of all nodes after the last round, by the graph's weights: `node_params` gives what
            they would make of the state. Their bits count in the first round. The paper's round ends with a node's own
            fresh noise; 1 measures it after a mixing, as PrivSGP is. A round's events cannot mix more often: a node
            wakes by itself. Static.

    Raises:
        ArgumentError: an unusable graph, number or noise; from `init`, an estimator that keeps state.

    Guarantees:
        - node sum preserved by averaging: in a round it moves by minus step_size times the sum of the noisy gradients.
        - waking nodes, neighbors and delays are uniform (up to a relative n / 2^32).
        - an event's batch and noise are those of its waking node: sampling rate b / J_i, noise scale of node i.
        - one node without delay, noise and clipping gives stochastic gradient descent.
        - no copy of all nodes in an event: an event's work is that of two nodes (with jaxlib 0.10.2 or later).

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = a_dp2_sgd(task, graph=jaxfl.graphs.ring(2), step_size=0.1, noise=jaxfl.gaussian(0.01))
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> int(info.events.sum()), (info.events == info.gradient_evaluations).tolist()
        (2, [True, True])
    """
    check.scalar(step_size=step_size)
    check.positive(step_size=step_size)
    check.in_float32(step_size=step_size)
    check.at_least(0, max_delay=max_delay)
    require_undirected(graph)
    require_strongly_connected(graph)
    if num_final_mixings:
        require_doubly_stochastic(graph)
    way = exchange(graph, num_final_mixings=num_final_mixings)
    noise = noise or NO_NOISE
    check.per_node(graph.num_nodes, noise=noise.noise_scale)
    require_own_noise("one node acts at a time, so that shared parts do not cancel", noise=noise.distribution)
    require_rescaled(noise)
    estimator = mini_batch() if gradient is None else gradient
    # At least two slots: with one, XLA sees the rows of `params` themselves and copies all nodes in every event.
    num_nodes, num_slots = graph.num_nodes, max(2, max_delay + 1)
    neighbors, degree = _neighbor_table(graph)

    def init(key, data):
        check_sample_losses(task)
        params = replicate(task.init(purpose_key(key, Purpose.INIT)), num_nodes)
        check_types(noise, task, params)
        _require_stateless(estimator, task, key, params, data)
        log = EventLog(
            nodes=jnp.full((num_slots, 2), -1, jnp.int32),
            params=jax.tree.map(lambda leaf: jnp.zeros((num_slots, 2, *leaf.shape[1:]), leaf.dtype), params),
        )
        return State(params=params, log=log, round_index=jnp.int32(0))

    def draw(key, state, data):
        k = state.round_index
        event_keys = node_keys(purpose_key(key, Purpose.EVENT, k), num_nodes)
        bits = jax.vmap(lambda event_key: jax.random.bits(one_kernel(event_key), (3,), jnp.uint32))(event_keys)
        # The remainder of 32 random bits is uniform up to a relative n / 2^32. It compiles one sampler, not three.
        node = (bits[:, 0] % jnp.uint32(num_nodes)).astype(jnp.int32)
        choice = bits[:, 1] % jnp.asarray(degree)[node]
        delay = (bits[:, 2] % jnp.uint32(max_delay + 1)).astype(jnp.int32)
        return Draws(
            node=node,
            neighbor=jnp.asarray(neighbors)[node, choice],
            delay=delay,
            gradient=estimator.draw(key, k, _data_of(data, node)),
            noise=_at_nodes(noise, node).draw(purpose_key(key, Purpose.NOISE, k), state.params),
        )

    def update(state, data, draws):
        k = state.round_index
        gamma = at_round(step_size, k, state.params)
        # The number of the round's first event modulo the slots, without the product that overflows in long runs.
        first_slot = (k % num_slots) * (num_nodes % num_slots)
        slots = (first_slot + jnp.arange(num_nodes, dtype=jnp.int32)) % num_slots

        def event(carry, inputs):
            params, log = carry
            slot, event_draws = inputs  # leaves of `event_draws` without the axis of events
            log = _with_event(log, slot, params, event_draws.node, event_draws.neighbor)
            # To the estimator an event is a network of one node.
            old = _one_row(_params_before(log, slot, event_draws.node, event_draws.delay))
            node_data = _data_of(data, event_draws.node[None])
            estimate, _, info = estimator.estimate(task, old, None, node_data, _one_row(event_draws.gradient), k)
            noisy = jax.tree.map(lambda leaf: leaf[0], estimate)
            noisy = released(_at_nodes(noise, event_draws.node), noisy, event_draws.noise)
            return (_params_after(params, log, slot, event_draws.node, event_draws.neighbor, gamma, noisy), log), info

        (params, log), infos = jax.lax.scan(event, (state.params, state.log), (slots, draws))
        infos = jax.tree.map(lambda leaf: leaf[:, 0], infos)
        final = graph, k, range(1, 1 + num_final_mixings), 32 * (size(params) // num_nodes)
        info = _info(infos, draws, params, lambda messages: plus_final(messages, *final))
        return State(params=params, log=log, round_index=k + 1), info

    def node_params(state):
        return way.finish(state.params, state.round_index)

    releases = of_noisy_gradients(A_DP2_SGD, task, num_nodes, estimator, noise)
    nodes = num_nodes, graph.names
    return algorithm(init, draw, update, node_params, nodes=nodes, releases=releases)


def released_gradients(
    graph: Graph, step_size: float | Array | Callable[[Array], Array], before: State, after: State
) -> PyTree:
    """Compute the sum of a round's noisy gradients over its n events: all that two successive states reveal of them.

    Averaging keeps the sum over nodes, so sum_i (x_i^k - x_i^{k+1}) / gamma is the sum of all noisy gradients of the
    round. For a synchronous algorithm such a function returns every node's gradient. Here the states at the ends of a
    round tell neither who woke nor any single gradient. An observer of every message sees more.

    Args:
        graph: not needed; the algorithms' functions share one signature.
        step_size: gamma as given to the algorithm.
        before, after: states around one round.

    Returns:
        Leaves (n, *leaf), float32: the network's total, the same in every row.

    Guarantees:
        - it is the sum of the round's noisy gradients, up to the float32 rounding of the parameters, divided by gamma.
    """
    gamma = at_round(step_size, before.round_index, before.params)

    def total(old, new):
        return jnp.broadcast_to(jnp.sum((old - new) / gamma, axis=0, keepdims=True), old.shape)

    return jax.tree.map(total, before.params, after.params)


def _require_stateless(estimator: GradientEstimator, task: Task, key: Array, params: PyTree, data: FederatedData):
    """Refuse an estimator that keeps state; nothing is computed, and the estimator checks the data on the way."""
    estimator_state = jax.eval_shape(lambda: estimator.init(task, key, params, data))
    if jax.tree.leaves(estimator_state):
        found = f"the estimator keeps a {type(estimator_state).__name__}"
        remedy = "Use mini_batch: a gradient table that is updated out of order is not the method of the paper."
        raise ArgumentError("gradient", "must be an estimator without state", found, remedy)


def _neighbor_table(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Each node's neighbors (n, most) int32, padded with the node itself, and their number (n,) uint32, at least 1."""
    others = graph.adjacency(0) & ~np.eye(graph.num_nodes, dtype=bool)
    degree = np.maximum(others.sum(axis=1), 1)
    table = np.tile(np.arange(graph.num_nodes, dtype=np.int32)[:, None], (1, degree.max()))
    for node, row in enumerate(others):
        table[node, : row.sum()] = np.flatnonzero(row)
    return table, degree.astype(np.uint32)


def _at_nodes(noise: NoiseMechanism, nodes: Array) -> NoiseMechanism:
    """Give row e of the mechanism the scale of node `nodes[e]`. A scalar `nodes` gives one node's mechanism."""
    if jnp.ndim(noise.noise_scale) == 0:
        return noise
    assert noise.rescaled is not None
    return noise.rescaled(jnp.asarray(noise.noise_scale)[nodes])


def _one_row(tree: PyTree) -> PyTree:
    """Leaves (1, *leaf) from leaves (*leaf)."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _data_of(data: FederatedData, nodes: Array) -> FederatedData:
    """Select nodes (m,): node e of the result holds the data of node `nodes[e]`."""
    return FederatedData(inputs=data.inputs, labels=data.labels, indices=data.indices[nodes], sizes=data.sizes[nodes])


def _with_event(log: EventLog, slot: Array, params: PyTree, node: Array, neighbor: Array) -> EventLog:
    """The log with this event in its slot: the parameters of both nodes as they are before it."""
    both = jnp.stack([node, neighbor])

    def write(buffer, leaf):
        rows = jnp.stack([jax.lax.dynamic_index_in_dim(leaf, one, keepdims=False) for one in (node, neighbor)])
        return jax.lax.dynamic_update_index_in_dim(buffer, rows, slot, axis=0)

    return EventLog(
        nodes=jax.lax.dynamic_update_index_in_dim(log.nodes, both, slot, axis=0),
        params=jax.tree.map(write, log.params, params),
    )


def _params_before(log: EventLog, slot: Array, node: Array, delay: Array) -> PyTree:
    """One node's parameters `delay` events before the one in `slot`, leaves (*leaf).

    They are what the earliest event since then overwrote at this node. If there was none, this is the event itself.
    """
    num_slots = log.nodes.shape[0]
    age = (slot - jnp.arange(num_slots, dtype=jnp.int32)) % num_slots
    is_candidate = (log.nodes == node) & (age <= delay)[:, None]
    oldest = jnp.argmax(jnp.where(is_candidate, age[:, None], -1).reshape(-1))

    def read(buffer):
        return jax.lax.dynamic_index_in_dim(buffer.reshape(-1, *buffer.shape[2:]), oldest, keepdims=False)

    return jax.tree.map(read, log.params)


def _params_after(
    params: PyTree, log: EventLog, slot: Array, node: Array, neighbor: Array, gamma: Array, gradient: PyTree
) -> PyTree:
    """Apply the event in the log's slot: average its two nodes, then step the waking one."""

    def write(leaf, buffer, change):
        # Read from the log, not from `leaf`: XLA copies all nodes if one buffer is read and written at once.
        old = jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
        mean = 0.5 * (old[0] + old[1])
        leaf = jax.lax.dynamic_update_index_in_dim(leaf, mean, neighbor, axis=0)
        # The waking node last: in a network of one node both are the same.
        return jax.lax.dynamic_update_index_in_dim(leaf, descend(mean, gamma, change), node, axis=0)

    return jax.tree.map(write, params, log.params, gradient)


def _info(
    infos: Info, draws: Draws, params: PyTree, plus_final_bits: Callable[[dict[str, Array]], dict[str, Array]]
) -> Info:
    """Turn numbers of a round's events (n,) into numbers of its nodes (n,).

    Measurements are means over the events of a node. A node that did not wake shows the mean over all n events, so that
    its numbers are finite. Counts are sums.
    """
    num_nodes = draws.node.shape[0]

    def total(values):
        return jnp.zeros(num_nodes, values.dtype).at[draws.node].add(values)

    events = total(jnp.ones_like(draws.node))
    times = events.astype(jnp.float32)

    def mean(values):
        return jnp.where(events > 0, total(values) / jnp.maximum(times, 1.0), jnp.mean(values))

    exchanges = (draws.node != draws.neighbor).astype(jnp.float32)
    messages = total(exchanges) + jnp.zeros_like(exchanges).at[draws.neighbor].add(exchanges)
    bits = messages * jnp.float32(32 * (size(params) // num_nodes))  # parameters both ways in each event
    means = jax.tree.map(mean, Info(infos.loss, infos.measurements))
    return means.plus(
        jax.tree.map(total, infos.counts),
        **plus_final_bits({"bits_sent": bits, "bits_received": bits}),
        events=events,  # how often each node woke: its noisy gradients released; sums to n
    )
