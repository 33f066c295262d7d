"""Partial averaging: local SGD at every node, after which only a part of the models is averaged over the nodes.

Every node i keeps a model x_i of its own, with elements e; all start equal. In each round, for t = 1, ..., tau

    x_i <- x_i + u_i,                u_i: the update of i's optimizer for the mean gradient of a batch, at x_i
    x_i[e] <- sum_j p_j x_j[e]       for e in A;   x_i[e] stays for all others

| symbol | here |
|---|---|
| x_i | `State.params` |
| tau, u_i, p_i | `clients`: `jaxfl.local_steps` and its optimizer, its weighting |
| A | `synchronized` |

The method shows what synchronizing a part does to the rest. A is the blocks of the output side or of the input side, or
the first channels of every layer; with A empty, nodes train by themselves. Lee, Zhang, Prakash, Niu, Avestimehr,
"Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training", section 3.2 and figures
1 and 3.

Differences from the paper, which says only that models are partially synchronized every 10 local steps: batch
statistics are averaged with their part; an optimizer's state is reset every round, as in `jaxfl.fed_avg`, so that
averaging everything is federated averaging. (With momentum, the length of a round thus matters even to nodes that train
by themselves.) The paper's weights are uniform.

Does not claim: privacy; a model that is good for all nodes' data, unless everything is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.local_steps import LocalSteps, require_plain
from jaxfl.algorithms.clients.slices import AxisGroups, Slices, leading_slices, variable_shapes
from jaxfl.algorithms.clients.steps import StepDraws
from jaxfl.algorithms.clients.uplink import PLAIN, Uplink, UplinkDraws, of_whole_models
from jaxfl.algorithms.releases import of_clients
from jaxfl.core import (
    Algorithm,
    ArgumentError,
    Array,
    Purpose,
    PyTree,
    Task,
    Variables,
    algorithm,
    over_nodes,
    purpose_key,
)
from jaxfl.core.algorithm import constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import number_type, replicate, size


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32
    model_state: PyTree  # batch statistics, leaves (n, *leaf), float32; None where the task has none
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round."""

    steps: StepDraws  # of all nodes
    uplink: UplinkDraws  # what arrives, and noise


@constructor
def partial_averaging(
    task: Task,
    *,
    clients: LocalSteps,
    synchronized: Sequence[str] | str | Task,
    axis_groups: AxisGroups | None = None,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Local SGD at all nodes, and the average of a part.

    Args:
        task: the learning task; batch normalization and dropout are supported.
        clients: what each node does in a round, see `jaxfl.local_steps`; where a part is averaged it neither clips
            nor adds noise. A node's weight is its share of the average.
        synchronized: the part that is averaged in each round. Names of `task.blocks`, for instance
            `output_side(task.blocks, "block_2_2")` or `first_half(task.blocks)`; none of them, (), for independent
            training; "all" for the whole model. Or a task of the same network with fewer channels: its parameters are
            leading slices of the whole model's along every axis, and these are averaged. `jaxfl.models.resnet20` with
            `width=0.5`, for instance, has the first half of the channels of every layer.
        axis_groups: where `synchronized` is a task, axes that hold several runs of channels one after the other, as for
            `jaxfl.algorithms.width_reduction`.
        uplink: `jaxfl.uplink(...)`, the way of the nodes' changes of the part to the average. None loses, rounds and
            hides nothing. With private updates every node takes part, and the part moves by the noisy sum of the
            changes, divided by the number of nodes. The rest of a node's model is not released.

    Returns:
        An `Algorithm`; `node_params` gives every node's model, as `Variables` where the task has `train_loss`.
        The loss of its info, (n,) float32, is taken on each step's batch before the step: mean over steps.

    Raises:
        ArgumentError: a part that does not fit the task, or private local steps where a part is averaged; from `init`,
            unusable data.

    Guarantees:
        - what is synchronized is the same at all nodes after each round, bit for bit.
        - the rest is what each node's own steps made of it.
        - averaging all is fed_avg with all clients active.
        - with nothing synchronized, nodes do not depend on each other.
        - padding never contributes.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, jaxfl
        >>> from jaxfl.models import classification, mlp
        >>> task = classification(mlp((2, 4, 3)))
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.array([0, 1, 2, 0]), [[0], [1, 2, 3]])
        >>> clients = jaxfl.local_steps(5, batch_size=2, optimizer=optax.sgd(0.1))
        >>> learner = jaxfl.partial_averaging(task, clients=clients, synchronized=("dense_2",))
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> {name: bool((x["kernel"][0] == x["kernel"][1]).all()) for name, x in state.params.items()}
        {'dense_1': False, 'dense_2': True}
        >>> info.bits_sent.tolist()  # 15 parameters of 32 bits
        [480.0, 480.0]
    """
    if synchronized not in ((), []):
        require_plain(clients)
    part = _part(task, synchronized, axis_groups)
    way = PLAIN if uplink is None or synchronized in ((), []) else uplink
    way.check(task, clients, holds_parts=True)

    def init(key, data):
        n = data.num_nodes
        clients.check_data(task, data)
        params = task.init(purpose_key(key, Purpose.INIT))
        way.init(key, params, n)
        return State(
            params=replicate(params, n),
            model_state=None if task.init_state is None else replicate(task.init_state(), n),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        n, k = data.num_nodes, state.round_index
        model = jax.tree.map(lambda leaf: leaf[0], Variables(state.params, state.model_state))
        active, of_way = way.draw(key, k, part.take(model).params, n, n, lambda: _everybody(n))
        return Draws(steps=clients.draw(key, k, active, data, task), uplink=of_way)

    def update(state, data, draws):
        k, n = state.round_index, data.num_nodes
        steps = clients.steps(data, _everybody(n), draws.steps)
        gradient_of = clients.gradient_of(task, data)

        def one_node(params, model_state, own_steps):
            return clients.run(gradient_of, params, model_state, own_steps, k)

        params, model_state, info = over_nodes(one_node, task.node_loop)(state.params, state.model_state, steps)
        node_models = Variables(params=params, model_state=model_state)
        weights = clients.weigh(data, _everybody(n)).astype(number_type(params))
        before = jax.tree.map(lambda leaf: leaf[0], Variables(state.params, state.model_state))  # the part is common
        models = of_whole_models(part.take(before), jax.vmap(part.take)(node_models), n)
        received = way.send(draws.uplink, _everybody(n), weights, info.loss, part.take(before), models)
        new = jax.vmap(part.put, (0, None))(node_models, received.model)
        bits = 32 * size(received.model)
        info = info.plus(
            clients.counts(steps, draws.steps, k),
            received.counts,
            bits_sent=jnp.full(n, bits + (way.bits - 32) * size(received.model.params), jnp.float32),
            bits_received=jnp.full(n, bits, jnp.float32),  # the synchronized part of params and batch statistics
        )
        return State(params=new.params, model_state=new.model_state, round_index=k + 1), info

    def node_params(state):
        if task.train_loss is None:
            return state.params
        return Variables(params=state.params, model_state=state.model_state)

    return algorithm(init, draw, update, node_params, releases=of_clients(clients, None, way.updates))


def _everybody(num_nodes: int) -> Array:
    """All nodes, (n,), int32."""
    return jnp.arange(num_nodes, dtype=jnp.int32)


def _part(task: Task, synchronized: Sequence[str] | str | Task, axis_groups: AxisGroups | None) -> Slices:
    """Make the `Slices` that take the synchronized part out of one node's variables and put it back."""
    if isinstance(synchronized, Task):  # tested first, because a task is a tuple, too
        try:
            return leading_slices(variable_shapes(task), variable_shapes(synchronized), axis_groups or {})
        except ArgumentError as error:
            argument = "synchronized" if error.argument == "tasks" else error.argument
            raise ArgumentError(argument, error.requirement, error.found, error.remedy) from None
    if axis_groups is not None:
        remedy = "Leave them out, or pass a task with fewer channels."
        requirement = "must be left out unless synchronized is a task"
        raise ArgumentError("axis_groups", requirement, f"got {axis_groups!r}", remedy)
    if isinstance(synchronized, str) and synchronized == "all":
        return Slices(take=lambda whole: whole, put=lambda whole, average: average)
    wrong = [name for name in synchronized if name not in task.blocks]
    if isinstance(synchronized, str) or wrong:
        found = f"got {synchronized!r}" if isinstance(synchronized, str) else f"got {wrong[0]!r}"
        remedy = (
            f"Choose among {', '.join(task.blocks)}." if task.blocks else "This task has no blocks: pass 'all' or ()."
        )
        raise ArgumentError("synchronized", "must hold blocks of the task, or be 'all' or a task", found, remedy)

    def selection(layers):
        return None if layers is None else {name: layers[name] for name in synchronized if name in layers}

    def join(layers, average):
        # Without blocks the parameters need not be a dict.
        return {**layers, **average} if average else layers

    def take(whole):
        if not synchronized:
            return Variables(params={}, model_state=None)
        return Variables(params=selection(whole.params), model_state=selection(whole.model_state))

    def put(whole, average):
        return Variables(join(whole.params, average.params), join(whole.model_state, average.model_state))

    return Slices(take=take, put=put)
