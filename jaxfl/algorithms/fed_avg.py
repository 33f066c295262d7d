"""Federated averaging: local steps at a few clients a round, whose models a server averages.

In each round the server sends the model x to the active clients S. Client i makes tau steps from x by its own
optimizer, here SGD:

    v_i <- mu v_i + g_i + lambda x_i,   x_i <- x_i - gamma v_i,       g_i: mean gradient of a batch, at x_i
    Delta = x - sum_{i in S} p_i x_i,   p_i = J_i / sum_{j in S} J_j or 1 / |S|
    x <- x + u,                         u: the server optimizer's update for the gradient Delta; -Delta by default

| symbol | here |
|---|---|
| x, Delta | `State.params` of `server_rounds.py`, which has the rounds; the pseudo-gradient |
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

import jax
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import State, by_optimizer, server_rounds
from jaxfl.core import Algorithm, PyTree, Task
from jaxfl.core.algorithm import constructor


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
        num_active: clients in a round, uniform without replacement, at most all, if the uplink has no `selection`. With
            private updates: how many are expected, each drawn independently.
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
    optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=by_optimizer(optimizer))


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
