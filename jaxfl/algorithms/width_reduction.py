"""Width reduction: clients of less capacity train the first channels of every layer. HeteroFL and FjORD.

The server's model x has elements e. Class c of clients has a model with fewer channels, whose parameters are the
elements E_c of x: the leading slice of every array. Round r, with S the active clients and c_i the class of client i:

    HeteroFL:  x_i = x[E_{c_i}], then tau local steps on the loss of class c_i's model
    FjORD:     the same start; step t trains the model of a class w_it, drawn uniformly among c_i and those after it,
               which has batch statistics of its own
    x[e] <- sum_{i holds e} p_i x_i[e] / sum_{i holds e} p_i,    over i in S with e in E_{c_i}; x[e] stays if none

| symbol | here |
|---|---|
| x, E_c | `State.params`, the elements of `tasks[0]` that `tasks[c]` has |
| S, c_i, w_it | `Draws.active`, `client_class`, `Draws.widths` |
| tau, p_i | `clients`: `jaxfl.local_steps`, its weighting |

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, arXiv:2010.01264, Algorithm 1, with fixed capacities. Horváth, Laskaridis, Almeida, Leontiadis, Venieris,
Lane, "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout", NeurIPS 2021,
arXiv:2102.13451, Algorithm 1, without distillation; as in its authors' code (the baseline `fjord` of Flower, layer
`ODBatchNorm2d`), each width keeps statistics of its own, and all share scale and bias. Lee and others, "Embracing
Federated Learning", sections 4.2 and 6.4, compare both with training consecutive layers.

Differences from the papers: clients weigh by their data unless told otherwise; steps and batches are those of
`jaxfl.fed_avg`; HeteroFL masks the logits of labels that a client does not hold, this file does not. With momentum or
weight decay, FjORD's elements beyond a step's width have gradient zero but still move: the optimizer has all of them.
HeteroFL's running statistics, where the model tracks any, are one set for all widths: the paper tracks none. Its
scaler and static normalization belong to the model (`jaxfl.models.resnet20`) and to evaluation
(`calibration_samples` of `jaxfl.training.train`).

Does not claim: an epsilon; that the full model, which no narrow client sees, is better than the narrow ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.client_classes import client_classes, in_order
from jaxfl.algorithms.clients.local_steps import LocalSteps, require_plain
from jaxfl.algorithms.clients.server import server_model
from jaxfl.algorithms.clients.slices import AxisGroups, Slices, leading_slices, variable_shapes
from jaxfl.algorithms.clients.steps import StepDraws, StepLoss, batch_loss, by_backward
from jaxfl.algorithms.clients.uplink import PLAIN, Updates, Uplink, UplinkDraws, changed, info_at_clients
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
    node_keys,
    purpose_key,
)
from jaxfl.core.algorithm import constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import number_type, size, weighted_sum
from jaxfl.gradients.per_example import tree_norm


class State(NamedTuple):
    """State carried to the next round. All of it is the server's, without a node axis."""

    params: PyTree  # x of the full model, leaves (*leaf), float32
    # Batch statistics of the full model, leaves (*leaf), float32; with ordered dropout a tuple, of each class's model;
    # None where the task has none.
    model_state: PyTree
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round; k clients are active."""

    active: Array  # (k,), int32, different clients; drawn in ascending order, or class after class if stratified
    steps: StepDraws  # of the active clients
    widths: Array | None  # (k, tau), int32, the class whose model each step trains; None without ordered dropout
    uplink: UplinkDraws  # which slots hold a client, what arrives, and noise


@constructor
def width_reduction(
    tasks: Sequence[Task],
    *,
    clients: LocalSteps,
    client_class: Sequence[int] | np.ndarray,
    num_active: int | Sequence[int],
    ordered_dropout: bool = False,
    axis_groups: AxisGroups | None = None,
    uplink: Uplink | None = None,
) -> Algorithm:
    """HeteroFL, and with `ordered_dropout` FjORD.

    Most tasks differ only in their numbers of channels and need no `axis_groups`. Where an axis of a parameter holds
    several runs of channels one after the other, `axis_groups` says how many:

        cnn, p pixels left:   {"dense_1/kernel": {0: p}}, the flattened images, 7 * 7 for two convolutions of 28x28
        bilstm_classifier:    {"lstm/kernel": {2: 4}, "lstm/recurrent_kernel": {2: 4}, "lstm/bias": {1: 4},
                              "dense/kernel": {0: 2}}, four gates and two directions

    Args:
        tasks: one for each capacity class, widest first. The first has the full model, which the server keeps and
            evaluates. All have the same params and model state except for sizes, which never grow; `node_loop` is that
            of the first.
        clients: what an active client does with its class's task, see `jaxfl.local_steps`; it neither clips nor adds
            noise.
        client_class: (n,), int, on the host: the class of each client.
        num_active: clients in a round, without replacement: an int, uniform over all of them, or one int a class
            (stratified). Uniform sampling of several classes runs clients one after the other on a CPU.
        ordered_dropout: each step trains a width drawn among the client's own and all narrower ones, all equally
            likely. With `node_loop` "vmap" every step computes all of them. Each width has its own batch statistics.
        axis_groups: path of a parameter, or of a part of the model state -> axis -> number of equal runs of channels.
        uplink: `jaxfl.uplink(...)`, the way of clients' changes of their slices to the server. None loses, rounds and
            hides nothing. With private updates `num_active` is an int, the expected number of clients, and an element
            moves by the noisy sum divided by the number of clients that are expected to hold it.

    Returns:
        An `Algorithm`; `node_params` gives the full model with a leading node axis of length 1, as `Variables` if the
        task has `train_loss`. The loss of its info, () float32, is that of each client's model on a step's batch:
        mean over steps, p-weighted mean over clients.

    Raises:
        ArgumentError: tasks, classes or clients that do not fit; from `init` and `draw`, other numbers of clients.

    Guarantees:
        - one class is fed_avg.
        - elements that no active client holds stay bit for bit.
        - an element becomes the mean over the active clients that hold it.
        - with ordered dropout, each width has batch statistics of its own.
        - padding never contributes: a client trains on its own samples alone, each at most once in a step.
        - a client's batches and widths do not depend on who else is active.
        - a client sends and receives its slice only.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, jaxfl
        >>> def linear(features):
        ...     return jaxfl.from_functions(
        ...         lambda key: jnp.zeros(features), lambda w, x, y: (x[:, :features] @ w - y) ** 2
        ...     )
        >>> data = jaxfl.federate(np.eye(3, dtype="float32"), np.ones(3, "float32"), [[0], [2]])
        >>> clients = jaxfl.local_steps(1, batch_size=1, optimizer=optax.sgd(0.5))
        >>> tasks = [linear(3), linear(2)]
        >>> learner = jaxfl.width_reduction(tasks, clients=clients, client_class=[1, 0], num_active=2)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> state.params.tolist()  # the mean of (1, 0) and (0, 0, 1)
        [0.5, 0.0, 1.0]
        >>> info.bits_sent.tolist()
        [64.0, 96.0]
    """
    if isinstance(tasks, Task):  # a tuple, too
        remedy = "Pass [wide, narrow], the same network with fewer channels, of jaxfl.models or a module of your own."
        raise ArgumentError("tasks", "must hold a task for each capacity class", "got one task", remedy)
    tasks = tuple(tasks)
    if not tasks:
        raise ArgumentError("tasks", "must hold the full model", "got none", "Pass one task a capacity class.")
    require_plain(clients)
    classes = client_classes(client_class, num_active, len(tasks))
    shapes = [variable_shapes(task) for task in tasks]
    slices = _all_slices(shapes, axis_groups or {})
    by_width = ordered_dropout and tasks[0].init_state is not None
    if by_width:
        shapes = _with_state_of_each_width(shapes)
        of_params = {path: groups for path, groups in (axis_groups or {}).items() if path in _paths(shapes[0].params)}
        slices = _all_slices(shapes, of_params)
    bits = np.array([32 * size(shape) for shape in shapes], np.float32)
    sizes = np.array([size(shape.params) for shape in shapes], np.float32)
    way = PLAIN if uplink is None else uplink
    way.check(tasks[0], clients, holds_parts=True)
    classes.check_expected(way.is_private)
    num_expected = int(np.sum(classes.num_active))
    members = np.bincount(classes.of_client, minlength=len(tasks))
    expected = (num_expected * members / members.sum()).astype(np.float32)  # active clients of each class

    def init(key, data):
        classes.check_data(data)
        clients.check_data(tasks[0], data)
        params = tasks[0].init(purpose_key(key, Purpose.INIT))
        way.init(key, params, data.num_nodes)
        return State(
            params=params,
            model_state=tuple(_init_state(task) for task in tasks) if by_width else _init_state(tasks[0]),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        classes.check_data(data)
        n, k = data.num_nodes, state.round_index
        choose = partial(classes.draw_active, key, k)
        active, of_way = way.draw(key, k, state.params, n, num_expected, choose)

        def client_widths(client_key, number):
            step_keys = node_keys(client_key, clients.max_steps)
            return jax.vmap(lambda step_key: jax.random.randint(step_key, (), number, len(tasks), jnp.int32))(step_keys)

        client_keys = node_keys(purpose_key(key, Purpose.PART, k), n)[active]
        return Draws(
            active=active,
            steps=clients.draw(key, k, active, data, tasks[0]),
            widths=jax.vmap(client_widths)(client_keys, classes.of(active)) if ordered_dropout else None,
            uplink=of_way,
        )

    def update(state, data, draws):
        active = draws.active
        whole = Variables(state.params, state.model_state)
        steps = clients.steps(data, active, draws.steps)
        losses_of = [batch_loss(task, data, clients.mean) for task in tasks]

        def client_of(number):
            step_loss = losses_of[number]
            if ordered_dropout:
                step_loss = _ordered_loss(number, losses_of[number:], slices[number], by_width)

            def train(widths, own_steps):
                start, each = slices[0][number].take(whole), (widths, own_steps) if ordered_dropout else own_steps
                params, model_state, client_info = clients.run(
                    by_backward(step_loss), start.params, start.model_state, each, state.round_index
                )
                return Variables(params, model_state), client_info

            return train

        def embed(number, variables):
            return slices[0][number].put(jax.tree.map(jnp.zeros_like, whole), variables)

        def holder_sum(class_weights):
            """The sum of class weights over the classes that hold an element, in the form of the model."""
            return _add_up(
                [
                    embed(
                        number,
                        jax.tree.map(lambda leaf, weight=weight: jnp.full(leaf.shape, weight, leaf.dtype), shape),
                    )
                    for number, (shape, weight) in enumerate(zip(shapes, class_weights, strict=True))
                ]
            )

        groups = classes.run(
            [client_of(number) for number in range(len(tasks))],
            lambda number, result: (embed(number, result[0]), result[1]),
            tasks[0].node_loop,
            active,
            (draws.widths, steps),
            draws.uplink.is_active,
            differentiable=clients.differentiable,
        )
        client_info = in_order(groups, [group.results[1] for group in groups], len(active))
        weights, numbers = clients.weigh(data, active).astype(number_type(state.params)), classes.of(active)

        def holders(weights):
            class_weights = jax.ops.segment_sum(weights, numbers, len(tasks))
            return holder_sum(class_weights.astype(weights.dtype))

        def mean(weights):
            sums = []
            for group in groups:
                total = weighted_sum(group.take(weights), group.results[0])
                sums.append(total if group.number is None else embed(group.number, total))
            return jax.tree.map(_mean_over_holders, whole, _add_up(sums), holders(weights))

        def changes():
            wide = [
                group.results[0] if group.number is None else jax.vmap(partial(embed, group.number))(group.results[0])
                for group in groups
            ]
            change_of_all = changed(whole, in_order(groups, wide, len(active)))
            is_held = jax.vmap(holder_sum)(jax.nn.one_hot(numbers, len(tasks), dtype=jnp.float32))
            return jax.tree.map(lambda change, count: jnp.where(count > 0, change, 0), change_of_all, is_held)

        models = Updates(mean, changes, holders, holder_sum(jnp.asarray(expected)).params, sum(expected))
        received = way.send(draws.uplink, active, weights, client_info.loss, whole, models)
        new = received.model
        of_active = client_info._replace(loss=jnp.sum(received.weights * received.losses) / received.total).plus(
            clients.counts(steps, draws.steps, state.round_index),
            received.counts,
            active=jnp.ones_like(active),  # 1 for a client that took part
            bits_sent=jnp.asarray(bits + (way.bits - 32) * sizes)[numbers],  # its slice of params and batch statistics
            bits_received=jnp.asarray(bits)[numbers],
        )
        info = info_at_clients(of_active, draws.uplink, active, data.num_nodes).plus(
            update_norm=tree_norm(jax.tree.map(jnp.subtract, new.params, state.params), 2)
        )
        return State(params=new.params, model_state=new.model_state, round_index=state.round_index + 1), info

    def node_params(state):
        return server_model(tasks[0])(state._replace(model_state=state.model_state[0]) if by_width else state)

    releases = of_clients(clients, num_expected, way.updates)
    return algorithm(init, draw, update, node_params, releases=releases)


def _init_state(task: Task) -> PyTree:
    """A task's first model state; None where it has none."""
    return None if task.init_state is None else task.init_state()


def _paths(params: PyTree) -> list[str]:
    """The paths of parameters, as `axis_groups` writes them."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]


def _with_state_of_each_width(shapes: Sequence[Variables]) -> list[Variables]:
    """Shapes of each class's variables with the model states of all widths; states of wider classes are empty."""

    def empty(state):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((0,) * leaf.ndim, leaf.dtype), state)

    states = [shape.model_state for shape in shapes]
    return [
        Variables(shape.params, tuple(state if width >= number else empty(state) for width, state in enumerate(states)))
        for number, shape in enumerate(shapes)
    ]


def _all_slices(shapes: Sequence[Variables], axis_groups: AxisGroups) -> list[dict[int, Slices]]:
    """Compute for each class the slices of its model that its own and all later classes hold."""
    return [
        {later: leading_slices(wide, shapes[later], axis_groups) for later in range(number, len(shapes))}
        for number, wide in enumerate(shapes)
    ]


def _ordered_loss(number: int, losses_of: Sequence[StepLoss], slices: Mapping[int, Slices], by_width: bool) -> StepLoss:
    """The loss of a step (class, batch) that trains that class's slice of the model of a client of class `number`."""

    def branch(later, loss_of):
        def run(params, model_state, batch):
            part = slices[later].take(Variables(params, model_state))
            states, value_and_gradient = part.model_state, jax.value_and_grad(loss_of, has_aux=True)
            (loss, new_state), gradient = value_and_gradient(part.params, states[later] if by_width else states, batch)
            if by_width:
                new_state = (*states[:later], new_state, *states[later + 1 :])
            zeros = jax.tree.map(jnp.zeros_like, params)
            whole = slices[later].put(Variables(zeros, model_state), Variables(gradient, new_state))
            return (loss, whole.model_state), whole.params

        return run

    branches = [branch(later, loss_of) for later, loss_of in enumerate(losses_of, start=number)]

    def forward(params, model_state, one_step):
        width, batch = one_step
        return jax.lax.switch(width - number, branches, params, model_state, batch)

    def backward(gradient, cotangent):
        return jax.tree.map(lambda leaf: cotangent[0] * leaf, gradient), None, None

    # Gradients are taken inside the branches. A switch that is differentiated as a whole writes the residuals of all
    # its branches in every step: a step of ResNet-20 at width 0.2 then took twice the time.
    @jax.custom_vjp
    def step_loss(params, model_state, one_step):
        return forward(params, model_state, one_step)[0]

    step_loss.defvjp(forward, backward)
    return step_loss


def _add_up(trees: Sequence[PyTree]) -> PyTree:
    """Sum of trees of the same structure."""
    return jax.tree.map(lambda first, *others: sum(others, start=first), *trees)


def _mean_over_holders(old: Array, total: Array, weight: Array) -> Array:
    """total / weight where an active client holds the element, else what it was."""
    is_held = weight > 0
    return jnp.where(is_held, total / jnp.where(is_held, weight, 1.0), old)


heterofl = width_reduction
"""The papers' names of `width_reduction` and, with `ordered_dropout`, of FjORD."""
fjord = partial(width_reduction, ordered_dropout=True)
