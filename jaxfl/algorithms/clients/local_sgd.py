"""Local SGD: what a client does between two meetings with its server, and how its batches are drawn.

A client starts from (x, s), parameters and model state, with v = 0, and for t = 1, ..., tau

    v <- mu v + g + lambda x,   x <- x - gamma v,   s <- the new model state,    g: gradient of the step's mean loss

gamma, mu, lambda are `step_size`, `momentum`, `weight_decay`. What a step's mean loss is, the algorithm says: of the
whole model, of some blocks, of a narrower model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import (
    ArgumentError,
    Array,
    FederatedData,
    Key,
    Purpose,
    PyTree,
    Task,
    Variables,
    check,
    node_keys,
    purpose_key,
)
from jaxfl.core.algorithm import at_round
from jaxfl.core.tree import replicate
from jaxfl.gradients import fixed

StepLoss = Callable[[PyTree, PyTree, Any], tuple[Array, PyTree]]
"""(params, model state, what one step gets) -> (mean loss (), new model state)."""


class LocalSteps(NamedTuple):
    """What clients do between two meetings with their server; `local_steps` makes it.

    Attributes:
        draw: (key, round index, active (k,), data, task) -> (batch indices (k, tau, b), int32, among the client's own
            samples, where its size or more is an empty slot; dropout keys (k, tau), or None where the task takes none).
            A client's batches do not depend on who else is active.
        run: (step loss, params, model state, what each step gets (tau, ...), round index) -> (params and model state
            after one client's steps, mean over steps of the loss before each, ()).
        weigh: (data, active (k,)) -> what the active clients weigh, (k,), float32.
    """

    draw: Callable[[Array, Array, Array, FederatedData, Task], tuple[Array, Array | None]]
    run: Callable[[StepLoss, PyTree, PyTree, Any, Array], tuple[PyTree, PyTree, Array]]
    weigh: Callable[[FederatedData, Array], Array]


def local_steps(
    *,
    num_local_steps: int,
    batch_size: int,
    step_size: float | Array | Callable[[Array], Array],
    momentum: float | Array,
    weight_decay: float | Array,
    weighting: str = "uniform",
) -> LocalSteps:
    """Steps of SGD.

    Args:
        num_local_steps: tau.
        batch_size: b, samples in a step, uniform without replacement.
        step_size: gamma, a number, a traced scalar, or a schedule of the round index.
        momentum: mu; where it is known to be 0, no velocity is kept.
        weight_decay: lambda.
        weighting: "data", by the clients' numbers of samples, or "uniform".

    Raises:
        ArgumentError: a count below 1, a step size that is not positive, negative momentum or weight decay, an unknown
            weighting.

    Example:
        >>> def step_loss(x, model_state, target):
        ...     return 0.5 * (x - target) ** 2, model_state
        >>> steps = local_steps(num_local_steps=2, batch_size=1, step_size=0.5, momentum=0.5, weight_decay=0.0)
        >>> x, _, loss = steps.run(step_loss, jnp.float32(0.0), None, jnp.ones(2), jnp.int32(0))
        >>> float(x), float(loss)  # 0 -> 0.5, then v = 0.5 (-1) - 0.5; losses 1/2 and 1/8
        (1.0, 0.3125)
    """
    check.at_least(1, num_local_steps=num_local_steps, batch_size=batch_size)
    check.scalar(step_size=step_size, momentum=momentum, weight_decay=weight_decay)
    check.positive(step_size=step_size)
    check.non_negative(momentum=momentum, weight_decay=weight_decay)
    check.one_of(("data", "uniform"), weighting=weighting)
    sampler = fixed(batch_size)

    def draw(key, round_index, active, data, task):
        def step_keys(purpose):
            """(k, tau): one key for each local step of the active clients, by the client's own number."""
            clients = node_keys(purpose_key(key, purpose, round_index), data.num_nodes)[active]
            return jax.vmap(lambda client: node_keys(client, num_local_steps))(clients)

        def batch(step_key, count):
            # A slot without a sample of its own gets its own position, at least `count`.
            return sampler.draw_node(step_key, count)[0]

        batch_indices = jax.vmap(jax.vmap(batch, (0, None)))(step_keys(Purpose.BATCH), data.sizes[active])
        return batch_indices, None if task.train_loss is None else step_keys(Purpose.DROPOUT)

    def run(step_loss, params, model_state, steps, round_index):
        gamma = at_round(step_size, round_index)
        mu = at_round(momentum, round_index) if _may_act(momentum) else None
        decay = at_round(weight_decay, round_index) if _may_act(weight_decay) else None

        def step(carry, one_step):
            x, state, velocity = carry
            (loss, state), gradient = jax.value_and_grad(step_loss, has_aux=True)(x, state, one_step)
            if decay is not None:
                gradient = jax.tree.map(lambda g, value: g + decay * value, gradient, x)
            if mu is not None:
                gradient = velocity = jax.tree.map(lambda v, g: mu * v + g, velocity, gradient)
            x = jax.tree.map(lambda value, v: value - gamma * v, x, gradient)
            return (x, state, velocity), loss

        # Not zeros_like: of parameters from an earlier round over devices it asks for a sharding that fails here.
        velocity = None if mu is None else jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        (params, model_state, _), losses = jax.lax.scan(step, (params, model_state, velocity), steps)
        return params, model_state, losses.mean()

    def weigh(data, active):
        return data.sizes[active].astype(jnp.float32) if weighting == "data" else jnp.ones(len(active), jnp.float32)

    return LocalSteps(draw, run, weigh)


def check_num_active(num_active: int, num_nodes: int) -> None:
    """Refuse more active clients than there are."""
    if num_active > num_nodes:
        found = f"got {num_active}, and the data {num_nodes}"
        remedy = f"Pass {num_nodes} or less, or partition the data into more parts."
        raise ArgumentError("num_active", "must be at most the number of clients in the data", found, remedy)


def draw_active(key: Key, round_index: Array, num_active: int, num_nodes: int) -> Array:
    """The clients of one round, uniform without replacement.

    Args:
        key: the run's base key.
        round_index: (), int32.
        num_active: k, at most n.
        num_nodes: n.

    Returns:
        (k,), int32, ascending.
    """
    everybody = jnp.arange(num_nodes, dtype=jnp.int32)
    if num_active == num_nodes:
        return everybody
    participation_key = purpose_key(key, Purpose.PARTICIPATION, round_index)
    return jnp.sort(jax.random.choice(participation_key, everybody, (num_active,), replace=False))


def samples_of(data: FederatedData, active: Array, batch_indices: Array) -> tuple[Array, Array]:
    """Where in the pool the samples of each step are.

    Args:
        data: all clients'.
        active: (k,), int32.
        batch_indices: (k, tau, b), int32, as `LocalSteps.draw` gives them.

    Returns:
        (samples (k, tau, b), int32, in [0, N); mask (k, tau, b), bool, False for an empty slot).
    """
    mask = batch_indices < data.sizes[active][:, None, None]
    return data.indices[active[:, None, None], jnp.where(mask, batch_indices, 0)], mask


def by_client(active: Array, num_nodes: int, values: Array) -> Array:
    """Numbers of the active clients (k,) at their places among all, (n,); 0 for the others."""
    return jnp.zeros(num_nodes, values.dtype).at[active].set(values, unique_indices=True)


def batch_loss(task: Task, data: FederatedData) -> StepLoss:
    """The mean loss of a batch of the pool, of the whole task.

    Args:
        task: what is learned.
        data: whose pool the samples are in.

    Returns:
        A `StepLoss` of steps (samples (b,), mask (b,), dropout key or None).
    """

    def step_loss(params, model_state, one_step):
        samples, mask, key = one_step
        inputs, labels, weights = data.inputs[samples], data.labels[samples], mask.astype(jnp.float32)
        if task.train_loss is None:
            losses = task.loss(params, inputs, labels)
        else:
            losses, model_state = task.train_loss(params, model_state, inputs, labels, weights, key)
        return masked_mean(losses, weights), model_state

    return step_loss


def masked_mean(losses: Array, weights: Array) -> Array:
    """Mean of losses (b,) over the samples of weight 1; those of weight 0 are padding."""
    return jnp.sum(weights / weights.sum() * losses)


def server_model(task: Task) -> Callable[[Any], PyTree]:
    """The `node_params` of an algorithm with a server, whose state has `params` and `model_state`.

    Returns:
        state -> the server's model behind a node axis of length 1, as `Variables` where the task has `train_loss`.
    """

    def node_params(state):
        if task.train_loss is None:
            return replicate(state.params, 1)
        return replicate(Variables(params=state.params, model_state=state.model_state), 1)

    return node_params


def _may_act(value: float | Array) -> bool:
    """Whether a hyper-parameter is traced or not zero: what is known to be 0 costs neither work nor memory."""
    return check.is_traced(value) or bool(value != 0)
