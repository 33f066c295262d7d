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

from jaxfl.core import (
    Algorithm,
    ArgumentError,
    Array,
    Purpose,
    PyTree,
    Task,
    Variables,
    algorithm,
    check,
    node_keys,
    over_nodes,
    purpose_key,
)
from jaxfl.core.algorithm import at_round
from jaxfl.core.tree import replicate, size, weighted_sum
from jaxfl.gradients import fixed
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
    check.at_least(1, num_active=num_active, num_local_steps=num_local_steps, batch_size=batch_size)
    check.scalar(step_size=step_size, momentum=momentum, weight_decay=weight_decay)
    check.positive(step_size=step_size)
    check.non_negative(momentum=momentum, weight_decay=weight_decay)
    check.one_of(("data", "uniform"), weighting=weighting)
    optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    sampler = fixed(batch_size)

    def init(key, data):
        _check_num_active(num_active, data.num_nodes)
        params = task.init(purpose_key(key, Purpose.INIT))
        return State(
            params=params,
            optimizer=optimizer.init(params),
            model_state=None if task.init_state is None else task.init_state(),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        n, k = data.num_nodes, state.round_index
        _check_num_active(num_active, n)
        active = jnp.arange(n, dtype=jnp.int32)
        if num_active < n:
            chosen = jax.random.choice(purpose_key(key, Purpose.PARTICIPATION, k), active, (num_active,), replace=False)
            active = jnp.sort(chosen)

        def step_keys(purpose):
            """(k, tau): one key for each local step of the active clients, by the client's own number."""
            clients = node_keys(purpose_key(key, purpose, k), n)[active]
            return jax.vmap(lambda client: node_keys(client, num_local_steps))(clients)

        def batch(step_key, count):
            # A slot for which no sample is left gets its own position, which is then at least `count`.
            return sampler.draw_node(step_key, count)[0]

        return Draws(
            active=active,
            batch_indices=jax.vmap(jax.vmap(batch, (0, None)))(step_keys(Purpose.BATCH), data.sizes[active]),
            dropout_keys=None if task.train_loss is None else step_keys(Purpose.DROPOUT),
        )

    def update(state, data, draws):
        k, active, n = state.round_index, draws.active, data.num_nodes
        sizes = data.sizes[active]
        mask = draws.batch_indices < sizes[:, None, None]
        samples = data.indices[active[:, None, None], jnp.where(mask, draws.batch_indices, 0)]
        counts = mask.sum(axis=(1, 2), dtype=jnp.int32)

        def one_client(*steps):
            return _local_sgd(
                task,
                (state.params, state.model_state),
                (data.inputs, data.labels),
                steps,
                step_size=at_round(step_size, k),
                momentum=at_round(momentum, k) if _may_act(momentum) else None,
                weight_decay=at_round(weight_decay, k) if _may_act(weight_decay) else None,
            )

        variables, losses = over_nodes(one_client, task.node_loop)(samples, mask, draws.dropout_keys)
        shares = sizes.astype(jnp.float32) if weighting == "data" else jnp.ones(active.shape[0], jnp.float32)
        shares = shares / shares.sum()
        mean_params, mean_model_state = weighted_sum(shares, variables)
        pseudo_gradient = jax.tree.map(jnp.subtract, state.params, mean_params)
        updates, optimizer_state = optimizer.update(pseudo_gradient, state.optimizer, state.params)

        def by_client(values):
            return jnp.zeros(n, values.dtype).at[active].set(values, unique_indices=True)

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

    def node_params(state):
        if task.train_loss is None:
            return replicate(state.params, 1)
        return replicate(Variables(params=state.params, model_state=state.model_state), 1)

    return algorithm(init, draw, update, node_params)


def _local_sgd(task, variables, pool, steps, *, step_size, momentum, weight_decay):
    """One client's steps.

    Args:
        task: what is learned.
        variables: (params, model state) to start from.
        pool: (inputs (N, *sample), labels (N, ...)) of all clients.
        steps: (samples (tau, b) in [0, N), mask (tau, b), dropout keys (tau,) or None).
        step_size, momentum, weight_decay: (), float32; the last two may be None.

    Returns:
        ((params, model state) after the steps, mean loss over steps ()).
    """
    inputs, labels = pool

    def step(carry, one_step):
        params, model_state, velocity = carry
        samples, mask, key = one_step
        loss, model_state, gradient = _batch_gradient(
            task, params, model_state, inputs[samples], labels[samples], mask.astype(jnp.float32), key
        )
        if weight_decay is not None:
            gradient = jax.tree.map(lambda g, x: g + weight_decay * x, gradient, params)
        if momentum is not None:
            gradient = velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
        params = jax.tree.map(lambda x, v: x - step_size * v, params, gradient)
        return (params, model_state, velocity), loss

    params, model_state = variables
    velocity = None if momentum is None else jax.tree.map(jnp.zeros_like, params)
    (params, model_state, _), losses = jax.lax.scan(step, (params, model_state, velocity), steps)
    return (params, model_state), losses.mean()


def _batch_gradient(task, params, model_state, inputs, labels, mask, key):
    """Mean loss over the samples of mask 1, the new model state, and the gradient of that loss."""
    weights = mask / mask.sum()

    def mean_loss(values):
        if task.train_loss is None:
            losses, new_model_state = task.loss(values, inputs, labels), model_state
        else:
            losses, new_model_state = task.train_loss(values, model_state, inputs, labels, mask, key)
        return jnp.sum(weights * losses), new_model_state

    (loss, new_model_state), gradient = jax.value_and_grad(mean_loss, has_aux=True)(params)
    return loss, new_model_state, gradient


def _may_act(value: float | Array) -> bool:
    """Whether a hyper-parameter is traced or not zero: what is known to be 0 costs neither work nor memory."""
    return check.is_traced(value) or bool(value != 0)


def _check_num_active(num_active: int, num_nodes: int) -> None:
    """Refuse more active clients than there are."""
    if num_active > num_nodes:
        found = f"got {num_active}, and the data {num_nodes}"
        remedy = f"Pass {num_nodes} or less, or partition the data into more parts."
        raise ArgumentError("num_active", "must be at most the number of clients in the data", found, remedy)
