"""Federated averaging: local SGD at a few clients a round, whose models a server averages.

Round r. The server sends x to the active clients S; client i sets x_i = x, v_i = 0, and for t = 1, ..., tau

    v_i <- mu v_i + g_i + lambda x_i,   x_i <- x_i - gamma v_i,       g_i: mean gradient of a batch, at x_i
    Delta = x - sum_{i in S} p_i x_i,   p_i = J_i / sum_{j in S} J_j or 1 / |S|
    x <- x + u,                         u: the server optimizer's update for the gradient Delta; -Delta by default

| symbol | here |
|---|---|
| x, Delta | `State.params`, the pseudo-gradient |
| S, |S|, J_i | `Draws.active`, `num_active`, `data.sizes` |
| tau, gamma, mu, lambda | `num_local_steps`, `step_size`, `momentum`, `weight_decay` |
| p_i | `weighting` |

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, arXiv:1602.05629, Algorithm 1. The server optimizer: Reddi et al., "Adaptive Federated
Optimization", ICLR 2021, arXiv:2003.00295, Algorithm 1.

Differences from the papers: every client makes the same number of steps whatever it holds, instead of epochs; a step's
batch is drawn anew, without repetition in it, so that two steps may share samples. Momentum and weight decay (added to
the gradient, where it goes through the momentum) are optional.

Does not claim: privacy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients import local_sgd
from jaxfl.core import Algorithm, Array, Purpose, PyTree, Task, algorithm, check, over_nodes, purpose_key
from jaxfl.core.tree import size, weighted_sum
from jaxfl.gradients.per_example import tree_norm


class State(NamedTuple):
    """What the next round needs; all of it is the server's, and has no node axis."""

    params: PyTree  # x, leaves (*leaf), float32
    optimizer: Any  # state of the server optimizer
    model_state: PyTree  # batch statistics, leaves (*leaf), float32; None where the task has none
    round_index: Array  # (), int32, rounds completed


class Draws(NamedTuple):
    """The random numbers of one round; k clients are active, b is the batch size."""

    active: Array  # (k,), int32, different clients; drawn in ascending order
    batch_indices: Array  # (k, tau, b), int32, among the client's own samples; its size or more: an empty slot
    dropout_keys: Array | None  # (k, tau), typed keys, one for each step; None where the task takes none


class Info(NamedTuple):
    """What happened in one round."""

    loss: Array  # (), float32, of the steps' batches before each step: mean over steps, p-weighted sum over clients
    pseudo_gradient_norm: Array  # (), float32, L2, of Delta
    update_norm: Array  # (), float32, L2, of u
    active: Array  # (n,), int32, 1 for a client that took part, else 0
    bits_sent: Array  # (n,), float32, params and batch statistics from an active client to the server
    bits_received: Array  # (n,), float32, the same from the server
    gradient_evaluations: Array  # (n,), int32


def fed_avg(
    task: Task,
    *,
    num_active: int,
    num_local_steps: int,
    batch_size: int,
    step_size: float | Array | Callable[[Array], Array],
    momentum: float | Array = 0.0,
    weight_decay: float | Array = 0.0,
    weighting: str = "data",
    server_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """Federated averaging.

    Args:
        task: what is learned; batch normalization and dropout are welcome. Statistics are averaged like parameters, and
            a client's local steps start from the server's.
        num_active: clients in a round, uniform without replacement, at most all.
        num_local_steps: tau, SGD steps of each active client in a round.
        batch_size: b, samples in a step, uniform without replacement, independent from step to step. A client with
            fewer samples uses all of them in each step; the mean is over those used.
        step_size: gamma, of the clients: a number, a traced scalar, or a schedule of the round index (any optax
            schedule).
        momentum: mu, of the clients, at least 0; the velocity starts at zero in each round.
        weight_decay: lambda, of the clients, at least 0.
        weighting: "data", by the active clients' numbers of samples, or "uniform".
        server_optimizer: any optax transformation, of the pseudo-gradient; default `optax.sgd(1.0)`, with which the
            new model is the average of the clients'.

    Returns:
        An `Algorithm`; `node_params` gives the server's model behind a node axis of length 1, as `Variables` where the
        task has `train_loss`.

    Raises:
        ArgumentError: a count below 1, a step size that is not positive, negative momentum or weight decay, an unknown
            weighting; from `init` and `draw`, more active clients than there are.

    Guarantees:
        - all clients, one local step, full batches and data weights give gradient descent on the pooled data.
        - padding never contributes: a client trains on its own samples alone, each at most once in a step.
        - each client is active with probability num_active / n in each round, never twice in one.
        - a client's batches do not depend on who else is active.
        - cost and memory grow with num_active, not with the number of clients, but for the (n,) fields of `Info`.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0], [1, 2, 3]])
        >>> learner = jaxfl.fed_avg(task, num_active=2, num_local_steps=5, batch_size=2, step_size=0.1)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.bits_sent.tolist()
        ([5, 10], [64.0, 64.0])
    """
    check.at_least(1, num_active=num_active)
    clients = local_sgd.local_steps(
        num_local_steps=num_local_steps,
        batch_size=batch_size,
        step_size=step_size,
        momentum=momentum,
        weight_decay=weight_decay,
        weighting=weighting,
    )
    optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer

    def init(key, data):
        local_sgd.check_num_active(num_active, data.num_nodes)
        params = task.init(purpose_key(key, Purpose.INIT))
        return State(
            params=params,
            optimizer=optimizer.init(params),
            model_state=None if task.init_state is None else task.init_state(),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        n, k = data.num_nodes, state.round_index
        local_sgd.check_num_active(num_active, n)
        active = local_sgd.draw_active(key, k, num_active, n)
        batch_indices, dropout_keys = clients.draw(key, k, active, data, task)
        return Draws(active=active, batch_indices=batch_indices, dropout_keys=dropout_keys)

    def update(state, data, draws):
        k, active = state.round_index, draws.active
        samples, mask = local_sgd.samples_of(data, active, draws.batch_indices)
        counts = mask.sum(axis=(1, 2), dtype=jnp.int32)
        step_loss = local_sgd.batch_loss(task, data)

        def one_client(*steps):
            return clients.run(step_loss, state.params, state.model_state, steps, k)

        params, model_state, losses = over_nodes(one_client, task.node_loop)(samples, mask, draws.dropout_keys)
        shares = clients.weigh(data, active)
        shares = shares / shares.sum()
        mean_params, mean_model_state = weighted_sum(shares, (params, model_state))
        pseudo_gradient = jax.tree.map(jnp.subtract, state.params, mean_params)
        updates, optimizer_state = optimizer.update(pseudo_gradient, state.optimizer, state.params)

        def by_client(values):
            return local_sgd.by_client(active, data.num_nodes, values)

        bits = jnp.full(active.shape, 32 * size((state.params, state.model_state)), jnp.float32)
        info = Info(
            loss=jnp.sum(shares * losses),
            pseudo_gradient_norm=tree_norm(pseudo_gradient, 2),
            update_norm=tree_norm(updates, 2),
            active=by_client(jnp.ones_like(counts)),
            bits_sent=by_client(bits),
            bits_received=by_client(bits),
            gradient_evaluations=by_client(counts),
        )
        new_state = State(
            params=optax.apply_updates(state.params, updates),
            optimizer=optimizer_state,
            model_state=mean_model_state,
            round_index=k + 1,
        )
        return new_state, info

    return algorithm(init, draw, update, local_sgd.server_model(task))
