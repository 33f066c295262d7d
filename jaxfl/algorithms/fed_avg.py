"""Federated averaging: local steps at a few clients a round, whose models a server averages.

In each round the server sends the model x to the active clients S. Client i makes tau steps from x by its own
optimizer, here SGD:

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
fixed). `uplink` says how the updates x_i - x reach the server: links may lose and round them. Private updates protect
whole clients (DP-FedAvg); each client is then drawn into S independently. With an uplink, Delta is minus the change of
x that `clients.uplink` defines. A server that receives no update keeps its state.

Differences from the papers: links; every client makes the same number of steps, not of epochs over its data; each
step's batch is drawn anew, without repetition, so that two steps may share samples.

Does not claim: an epsilon; `jaxfl.privacy.clients` states it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.server import check_num_active, draw_active, over_slots, server_model
from jaxfl.algorithms.clients.steps import StepDraws
from jaxfl.algorithms.clients.uplink import PLAIN, Uplink, UplinkDraws, info_at_clients, of_whole_models
from jaxfl.algorithms.exchange import plus_seeds
from jaxfl.algorithms.releases import of_clients
from jaxfl.core import Algorithm, Array, Purpose, PyTree, Task, Variables, algorithm, check, purpose_key
from jaxfl.core.algorithm import constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import number_type, size
from jaxfl.gradients.per_example import tree_norm


class State(NamedTuple):
    """State carried to the next round. All of it is the server's, without a node axis."""

    params: PyTree  # x, leaves (*leaf), float32
    optimizer: Any  # state of the server optimizer
    model_state: PyTree  # batch statistics, leaves (*leaf), float32; None where the task has none
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round; k clients are active."""

    active: Array  # (k,), int32, different clients; drawn in ascending order
    steps: StepDraws  # of the active clients
    uplink: UplinkDraws  # which slots hold a client, what arrives, and noise


@constructor
def fed_avg(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_optimizer: optax.GradientTransformation | None = None,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Federated averaging.

    The server holds the model x, and client i ends its local steps at x_i.

    Args:
        task: the learning task; batch normalization and dropout are supported. Private clients refuse both, and
            private updates refuse batch normalization. Statistics are averaged like parameters, and a client's local
            steps start from the server's.
        clients: what an active client does, see `jaxfl.local_steps`.
        num_active: clients in a round, uniform without replacement, at most all. With private updates: how many are
            expected, each drawn independently.
        server_optimizer: any optax transformation, of the pseudo-gradient; default `optax.sgd(1.0)`, with which the
            new model is the average of the clients'.
        uplink: `jaxfl.uplink(...)`, the way of clients' updates x_i - x to the server: links, privacy of whole clients.
            None loses, rounds and hides nothing.

    Returns:
        An `Algorithm`; `node_params` gives the server's model with a leading node axis of length 1, as `Variables` if
        the task has `train_loss`. Its info has the loss, () float32, taken on each step's batch before the step: mean
        over steps, p-weighted sum over clients. It also has the L2 norms of Delta and u, and the clients' counts, (n,).

    Raises:
        ArgumentError: a count out of range, or clients that do not fit the updates; from `init`, unusable data.

    Guarantees:
        - all clients, one local step, full batches and data weights give gradient descent on the pooled data.
        - padding never contributes: a client trains on its own samples alone, each at most once in a step.
        - each client is active with probability num_active / n in each round, never twice in one.
        - a client's batches do not depend on who else is active.
        - cost and memory grow with num_active, not with the number of clients, but for the (n,) numbers of the info.
        - adding or removing one client moves what is released by at most the clip norm, where updates are private.
        - over links the new model is the mean over clients that arrive; where none does the server's state stays.
        - links that lose and round nothing change no bit.

    Examples:
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
    way = PLAIN if uplink is None else uplink
    way.check(task, clients)
    optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer

    def init(key, data):
        check_num_active(num_active, data.num_nodes)
        clients.check_data(task, data)
        params = task.init(purpose_key(key, Purpose.INIT))
        way.init(key, params, data.num_nodes)
        return State(
            params=params,
            optimizer=optimizer.init(params),
            model_state=None if task.init_state is None else task.init_state(),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        n, k = data.num_nodes, state.round_index
        check_num_active(num_active, n)
        choose = partial(draw_active, key, k, num_active, n)
        active, of_way = way.draw(key, k, state.params, n, num_active, choose)
        return Draws(active=active, steps=clients.draw(key, k, active, data, task), uplink=of_way)

    def update(state, data, draws):
        k, active = state.round_index, draws.active
        steps = clients.steps(data, active, draws.steps)
        gradient_of = clients.gradient_of(task, data)

        def train(client_steps):
            return clients.run(gradient_of, state.params, state.model_state, client_steps, k)

        params, model_state, client_info = over_slots(train, task.node_loop)(draws.uplink.is_active, steps)
        before = Variables(state.params, state.model_state)
        models = of_whole_models(before, Variables(params, model_state), num_active)
        weights = clients.weigh(data, active).astype(number_type(state.params))
        received = way.send(draws.uplink, active, weights, client_info.loss, before, models)

        pseudo_gradient = jax.tree.map(jnp.negative, received.change)
        moves, new_optimizer = optimizer.update(pseudo_gradient, state.optimizer, state.params)
        # A server that receives no update keeps its state.
        moves = jax.tree.map(lambda leaf: jnp.where(received.any_arrived, leaf, 0), moves)
        new_state = State(
            params=optax.apply_updates(state.params, moves),
            optimizer=jax.tree.map(partial(jnp.where, received.any_arrived), new_optimizer, state.optimizer),
            model_state=received.model.model_state,
            round_index=k + 1,
        )

        numbers, statistics = size(state.params), size(state.model_state)
        of_active = client_info._replace(loss=received.loss).plus(
            clients.counts(steps, draws.steps, k),
            received.counts,
            active=jnp.ones_like(active),  # 1 for a client that took part
            bits_sent=jnp.full(active.shape, way.bits * numbers + 32 * statistics, jnp.float32),
            bits_received=jnp.full(active.shape, 32 * (numbers + statistics), jnp.float32),
        )
        info = info_at_clients(of_active, draws.uplink, active, data.num_nodes)
        noise = clients.noise if way.updates is None else way.updates.noise
        secrets = None if noise is None else noise.secrets
        if secrets is not None:  # any two clients may be partners where not all are active
            n = data.num_nodes
            secrets = secrets if num_active == n else secrets._replace(partners=(n - 1,) * n)
            info = info.plus(plus_seeds(info.measurements, secrets, k))
        return new_state, info.plus(pseudo_gradient_norm=tree_norm(pseudo_gradient, 2), update_norm=tree_norm(moves, 2))

    releases = of_clients(clients, num_active, way.updates)
    return algorithm(init, draw, update, server_model(task), releases=releases)


def released_updates(before: State, after: State) -> PyTree:
    """Compute the release of one round's updates, with the default server optimizer: Delta = x - w.

    Args:
        before, after: states around one round.

    Returns:
        Leaves (1, *leaf), float32, off by the rounding of x. With private updates this is minus the noisy sum of
        clipped updates, divided by the expected number of clients.

    Guarantees:
        - equals the pseudo-gradient of the round.
    """
    return jax.tree.map(lambda old, new: (old - new)[None], before.params, after.params)
