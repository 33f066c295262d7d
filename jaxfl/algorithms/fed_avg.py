"""Federated averaging: local steps at a few clients a round, whose models a server averages.

Round r. The server sends x to the active clients S. Client i makes tau steps from x by its own optimizer; of SGD

    v_i <- mu v_i + g_i + lambda x_i,   x_i <- x_i - gamma v_i,       g_i: mean gradient of a batch, at x_i
    Delta = x - sum_{i in S} p_i x_i,   p_i = J_i / sum_{j in S} J_j or 1 / |S|
    x <- x + u,                         u: the server optimizer's update for the gradient Delta; -Delta by default

| symbol | here |
|---|---|
| x, Delta | `State.params`, the pseudo-gradient |
| S, |S|, J_i | `Draws.active`, `num_active`, `data.sizes` |
| tau, gamma, mu, lambda, p_i | `clients`: `jaxfl.local_steps` and its optimizer, its weighting |

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, arXiv:1602.05629, Algorithm 1. The server optimizer: Reddi et al., "Adaptive Federated
Optimization", ICLR 2021, arXiv:2003.00295, Algorithm 1.

With clients that clip samples' gradients and add noise it is DP-SGD at every client (Algorithm 1 of ALI-DPFL, with tau
fixed). With `updates` whole clients are hidden (DP-FedAvg): S is drawn client by client, and Delta is made of clipped
updates with noise, see `clients.private_updates`.

Over `links` an update x_i - x may be lost on its way to the server, and rounded: Delta is minus the mean of Q(x_i - x)
over the active clients that it hears from, p_i renormalized among them. Updates are rounded, not parameters, for many
quantizers are finer near 0. Where the server hears from none its state stays. With private updates a lost one counts as
zero and E stays, noise is added in every round, and what arrives is clipped after rounding, so that the clip norm
bounds it. Losses and rounding do not depend on the data: statements without links hold.

Differences from the papers: links; every client makes the same number of steps whatever it holds, instead of epochs; a
step's batch is drawn anew, without repetition in it, so that two steps may share samples.

Does not claim: an epsilon; `jaxfl.privacy.clients` states it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.private_updates import DISCARDED_UPDATES, Participants, PrivateUpdates
from jaxfl.algorithms.clients.server import at_clients, check_num_active, draw_active, over_slots, server_model
from jaxfl.algorithms.clients.steps import StepDraws
from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import LOST_MESSAGES, Sent, changing
from jaxfl.core import Algorithm, Array, Purpose, PyTree, Task, algorithm, check, purpose_key
from jaxfl.core.tree import along_nodes, number_type, size, weighted_sum
from jaxfl.gradients.per_example import tree_norm


class State(NamedTuple):
    """State carried to the next round. All of it is the server's, without a node axis."""

    params: PyTree  # x, leaves (*leaf), float32
    optimizer: Any  # state of the server optimizer
    model_state: PyTree  # batch statistics, leaves (*leaf), float32; None where the task has none
    round_index: Array  # (), int32, rounds completed


class Draws(NamedTuple):
    """The random numbers of one round; k clients are active."""

    active: Array  # (k,), int32, different clients; drawn in ascending order
    steps: StepDraws  # of the active clients
    is_active: Array | None  # (k,), bool, False for an empty slot; None where k clients are always active
    update_noise: PyTree | None  # like the parameters; None without private updates
    client_overflow: Array | None  # (), int32, 1 if a client that was drawn had no slot, which is an error
    links: LinkDraws | None  # of all n clients; None where links change nothing


def fed_avg(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_optimizer: optax.GradientTransformation | None = None,
    updates: PrivateUpdates | None = None,
    links: Links | None = None,
) -> Algorithm:
    """Federated averaging.

    Args:
        task: what is learned; batch normalization and dropout are welcome. Private clients refuse both, private updates
            batch normalization. Statistics are averaged like parameters, and a client's local steps start from the
            server's.
        clients: what an active client does, see `jaxfl.local_steps`.
        num_active: clients in a round, uniform without replacement, at most all. With private updates: how many are
            expected, each drawn independently.
        server_optimizer: any optax transformation, of the pseudo-gradient; default `optax.sgd(1.0)`, with which the
            new model is the average of the clients'.
        updates: `jaxfl.private_updates`, for privacy of whole clients; None for none.
        links: `jaxfl.links(...)`, over which clients' updates x_i - x reach the server, quantised; batch statistics
            travel with them in 32 bits. What the server sends always arrives. None loses and rounds nothing.

    Returns:
        An `Algorithm`; `node_params` gives the server's model behind a node axis of length 1, as `Variables` where the
        task has `train_loss`. Its info has the loss (), float32, of the steps' batches before each step, the p-weighted
        sum over clients of means over steps; the L2 norms of Delta and u; and the numbers of clients, (n,).

    Raises:
        ArgumentError: a count below 1, what private updates refuse; from `init` and `draw`, more active clients than
            there are, or what the clients refuse of the data.

    Guarantees:
        - all clients, one local step, full batches and data weights give gradient descent on the pooled data.
        - padding never contributes: a client trains on its own samples alone, each at most once in a step.
        - each client is active with probability num_active / n in each round, never twice in one.
        - a client's batches do not depend on who else is active.
        - cost and memory grow with num_active, not with the number of clients, but for the (n,) numbers of the info.
        - adding or removing one client moves what is released by at most the clip norm, where updates are private.
        - over links the new model is the mean over clients that arrive; where none does the server's state stays.
        - links that lose and round nothing change no bit.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0], [1, 2, 3]])
        >>> clients = jaxfl.local_steps(5, batch_size=2, optimizer=optax.sgd(0.1, momentum=0.9))
        >>> learner = jaxfl.fed_avg(task, clients=clients, num_active=2)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.bits_sent.tolist()
        ([5, 10], [64.0, 64.0])
    """
    check.at_least(1, num_active=num_active)
    if updates is not None:
        updates.check(task, clients)
    optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    links = changing(links)

    def init(key, data):
        check_num_active(num_active, data.num_nodes)
        clients.check_data(task, data)
        params = task.init(purpose_key(key, Purpose.INIT))
        if updates is not None:
            jax.eval_shape(updates.draw_noise, key, 0, params)  # which refuses params that are not float32
        return State(
            params=params,
            optimizer=optimizer.init(params),
            model_state=None if task.init_state is None else task.init_state(),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        n, k = data.num_nodes, state.round_index
        check_num_active(num_active, n)
        if updates is None:
            who = Participants(active=draw_active(key, k, num_active, n), is_active=None, overflow=None)
        else:
            who = updates.draw(key, k, num_active, n)
        return Draws(
            active=who.active,
            steps=clients.draw(key, k, who.active, data, task),
            is_active=who.is_active,
            update_noise=None if updates is None else updates.draw_noise(key, k, state.params),
            client_overflow=who.overflow,
            links=None if links is None else links.draw_to_server(key, k, n),
        )

    def update(state, data, draws):
        k, active, is_active = state.round_index, draws.active, draws.is_active
        steps = clients.steps(data, active, draws.steps)
        gradient_of = clients.gradient_of(task, data)

        def train(own):
            return clients.run(gradient_of, state.params, state.model_state, own, k)

        params, model_state, measured = over_slots(train, task.node_loop)(is_active, steps)
        losses = measured.loss
        counted: dict[str, Array] = {}
        arrived, reached, sent = None, is_active, Sent(None, {})
        if links is not None:
            if draws.links.arrived is not None:
                arrived = draws.links.arrived[active]
                reached = arrived if updates is None else is_active & arrived
                counted[LOST_MESSAGES] = (~arrived).astype(jnp.int32)
            if links.quantizer is not None:
                rounding = jax.tree.map(lambda of_all: of_all[active], draws.links.rounding)
                sent = links.send(_moved(params, state.params), rounding)
                counted |= sent.counts
        if updates is None:
            weights = clients.weigh(data, active).astype(number_type(state.params))
            shares = weights / weights.sum()
            values, before = (params, model_state), (state.params, state.model_state)
            if sent.values is not None:  # the mean of updates: in that of x + update a zero would become rounding
                values, before = (sent.values, model_state), (jax.tree.map(jnp.zeros_like, before[0]), before[1])
            if arrived is None:
                mean_params, mean_model_state = weighted_sum(shares, values)
            else:
                mean_params, mean_model_state = _mean_of_arrived(weights, arrived, values, before)
            pseudo_gradient = jax.tree.map(jnp.subtract, before[0], mean_params)
        else:
            shares = is_active.astype(jnp.float32) / num_active
            changes = updates.sum(_moved(params, state.params) if sent.values is None else sent.values, reached)
            counted |= changes.counts
            losses = jnp.where(changes.counts[DISCARDED_UPDATES] > 0, 0.0, losses)
            noisy = updates.noise.release(changes.total, draws.update_noise)
            pseudo_gradient = jax.tree.map(lambda leaf: -leaf / num_active, noisy)
            mean_model_state = state.model_state  # which is empty
        moves, optimizer_state = optimizer.update(pseudo_gradient, state.optimizer, state.params)
        if arrived is not None and updates is None:
            anybody = arrived.any()
            moves = jax.tree.map(lambda leaf: jnp.where(anybody, leaf, 0), moves)
            optimizer_state = jax.tree.map(partial(jnp.where, anybody), optimizer_state, state.optimizer)

        bits = jnp.full(active.shape, 32 * size((state.params, state.model_state)), jnp.float32)
        bits_up = bits
        if links is not None:
            numbers = links.bits * size(state.params) + 32 * size(state.model_state)
            bits_up = jnp.full(active.shape, numbers, jnp.float32)
        of_active = measured._replace(loss=jnp.sum(shares * losses)).plus(
            clients.counts(steps, draws.steps, k),
            counted,
            active=jnp.ones_like(active),  # 1 for a client that took part
            bits_sent=bits_up,
            bits_received=bits,
        )
        info = at_clients(of_active, active, data.num_nodes, is_active).plus(
            pseudo_gradient_norm=tree_norm(pseudo_gradient, 2), update_norm=tree_norm(moves, 2)
        )
        if updates is not None:
            info = updates.with_overflow(info, draws.client_overflow)
        new_state = State(
            params=optax.apply_updates(state.params, moves),
            optimizer=optimizer_state,
            model_state=mean_model_state,
            round_index=k + 1,
        )
        return new_state, info

    return algorithm(init, draw, update, server_model(task))


def _moved(params: PyTree, before: PyTree) -> PyTree:
    """The clients' updates x_i - x, leaves (k, *leaf)."""
    return jax.tree.map(lambda after, start: after - start[None], params, before)


def _mean_of_arrived(weights: Array, arrived: Array, values: PyTree, before: PyTree) -> PyTree:
    """The weighted mean over clients that arrive, of leaves (k, *leaf); where none does what was before."""
    reaching = jnp.where(arrived, weights, 0)
    anybody = arrived.any()
    shares = reaching / jnp.where(anybody, reaching.sum(), 1)
    # A product with 0 would keep what is not finite.
    clean = jax.tree.map(lambda leaf: jnp.where(along_nodes(arrived, leaf), leaf, 0), values)
    return jax.tree.map(partial(jnp.where, anybody), weighted_sum(shares, clean), before)


def released_updates(before: State, after: State) -> PyTree:
    """Compute the release of the clients' updates in one round by the default server optimizer: Delta = x - w.

    Args:
        before, after: states around one round.

    Returns:
        Leaves (1, *leaf), float32: with private updates minus the sum of clipped updates with its noise, over the
        clients that are expected; off by the rounding of x.

    Guarantees:
        - equals the pseudo-gradient of the round.
    """
    return jax.tree.map(lambda old, new: (old - new)[None], before.params, after.params)
