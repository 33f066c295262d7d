"""EmbracingFL: clients too weak to train the whole model train blocks of it, mostly those of the output side.

A model consists of blocks 1, ..., L, input side first. Client i belongs to a capacity class and trains the blocks T_i
of that class. Their parameters are z_i, those of the other blocks y_i. In each round the server sends the model x to
the active clients S. Client i

    computes features once for each sample of its batches: the outputs of the blocks in front of its first one
    z_i <- tau local steps on z by its own optimizer, with y_i held fixed (see `clients.local_steps`)

For each block b the server then takes the mean over the clients that trained it; client i has J_i samples:

    x_b <- sum_{i in S: b in T_i} p_ib z_ib,    p_ib = J_i / sum_{j in S: b in T_j} J_j, or 1 / their number

A block that no active client trained stays as it is. All this holds for a block's model state (batch statistics), too.

Over an `uplink` the change Delta_i of client i, 0 in the blocks that it does not train, may be lost and rounded.
Private updates protect whole clients: each is drawn into S independently, and for each block (see `clients.uplink`)

    x_b <- x_b + (sum_{i in S} Delta_ib min(1, S_0 / |Delta_i|_2) + noise) / E_b,   S_0: the clip norm

where E_b is a public constant, the expected number of clients that train b in a round: k / n (k expected of n
clients) times the clients whose class names b, where a client that draws m of L blocks counts as m / L. A block with
E_b = 0 stays as it is.

| symbol | here |
|---|---|
| x, S, J_i | `State.params`, `Draws.active`, `data.sizes` |
| T_i | `trained_blocks[client_class[i]]`, or `Draws.trained` where it is drawn |
| tau, p_ib | `clients`: `jaxfl.local_steps`, its weighting |

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training", Algorithms 1 (the multi-step forward pass, here the features of a `jaxfl.core.Part`) and 2.

Differences from the paper: any number of classes, each with any blocks. Features are computed only for the samples of
the round's batches, which are drawn first. Weights may be by data; the paper's are uniform.

Does not claim: an epsilon. Classes of clients are public.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients import block_means
from jaxfl.algorithms.clients.blocks import check_blocks, tasks_of_classes, train_drawn
from jaxfl.algorithms.clients.client_classes import client_classes, in_order
from jaxfl.algorithms.clients.local_steps import LocalSteps, require_plain
from jaxfl.algorithms.clients.parts import train_part
from jaxfl.algorithms.clients.server import server_model
from jaxfl.algorithms.clients.steps import StepDraws, num_different
from jaxfl.algorithms.clients.uplink import PLAIN, Uplink, UplinkDraws, info_at_clients
from jaxfl.algorithms.releases import of_clients
from jaxfl.core import (
    Algorithm,
    Array,
    Purpose,
    PyTree,
    Task,
    Variables,
    algorithm,
    check,
    node_keys,
    purpose_key,
)
from jaxfl.core.algorithm import constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import number_type, size
from jaxfl.gradients.per_example import tree_norm


class State(NamedTuple):
    """State carried to the next round. All of it is the server's, without a node axis."""

    params: PyTree  # x, block name -> leaves (*leaf), float32
    model_state: PyTree  # batch statistics, leaves (*leaf), float32; None where the task has none
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round; k clients are active."""

    active: Array  # (k,), int32, different clients; ascending, or class after class if stratified
    steps: StepDraws  # of the active clients
    trained: Array | None  # (k, L), bool, the blocks that each trains; None where all classes name theirs
    uplink: UplinkDraws  # which slots hold a client, what arrives, and noise


@constructor
def embracing(
    task: Task,
    *,
    clients: LocalSteps,
    trained_blocks: Sequence[Sequence[str] | int],
    client_class: Sequence[int] | np.ndarray,
    num_active: int | Sequence[int],
    frozen_batch_norm: str = "running",
    class_tasks: Sequence[Task] | None = None,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Layer-wise partial training.

    A block behind a client's first one that the client does not train is part of every step: it is held fixed and runs
    in evaluation mode (running statistics). A class that draws its blocks runs and differentiates the whole model in
    training mode and keeps the changes of the drawn blocks only. Such a class saves neither time nor memory, and
    normalizes by batch statistics throughout.

    Args:
        task: the learning task, with `part`, as `jaxfl.models.classification` and `binary_classification` make it, or
            `from_flax` of a module without batch normalization and dropout: it runs whole in each forward pass.
        clients: what an active client does, see `jaxfl.local_steps`; it neither clips nor adds noise. Its optimizer
            sees the blocks that the client trains; its weighting is among the clients that trained a block.
        trained_blocks: what each capacity class trains: names of `task.blocks`, for instance all of them for a strong
            client and `output_side(task.blocks, "block_3_1")` for a weak one; or an int, how many blocks each client
            of that class draws in each round, uniformly without replacement. `jaxfl.algorithms.capacity` tells a
            class's share of a strong client's memory.
        client_class: (n,), int, each client's place in `trained_blocks`; on the host.
        num_active: clients in a round, uniform without replacement. An int: among all clients, as in the paper, so that
            each class's count is random; on a CPU active clients then run one after the other, whatever
            `task.node_loop` says (see `clients.client_classes`). Or one int a class: among the clients of that class,
            which then run together.
        frozen_batch_norm: the mode of blocks in front of a client's first: "running" is evaluation mode; "batch" is
            training mode, with the statistics (and dropout) of the batch. Their own state changes in neither mode.
        class_tasks: one task for each class, for a class that cuts inside a block, as
            `jaxfl.models.bilstm_classifier(frozen_words=128)` does. Blocks and parameters are those of `task`, and so
            is the `node_loop`. Default: `task` for all.
        uplink: `jaxfl.uplink(...)`, the way of clients' changes to the server. None loses, rounds and hides nothing.
            With private updates `num_active` is an int, the expected number of clients; each is drawn independently,
            and a block's changes are added up and divided by the expected number of clients that train it.

    Returns:
        An `Algorithm`; `node_params` gives the server's model with a leading node axis of length 1, as `Variables` if
        the task has `train_loss`. The loss of its info, () float32, is taken on each step's batch before the step:
        mean over steps, weighted mean over clients.

    Raises:
        ArgumentError: tasks, classes, clients or updates that do not fit; from `init` and `draw`, other data.

    Guarantees:
        - cached features equal those recomputed in every step.
        - features of a sample are computed once a round, where clients run one after the other on a CPU.
        - if all clients train all blocks, a round is that of `fed_avg`.
        - if all clients are of one class, a round is that of `fed_avg` on the features, for its blocks.
        - a block that nobody trained stays bit for bit.
        - padding never contributes.
        - a client's batches and blocks do not depend on who else is active.
        - a weak client's steps run no backward pass through the blocks in front of its own.
        - adding or removing one client moves what is released by at most the clip norm, where updates are private.

    Cost:
        A weak client holds the features of its tau * b samples, or of as many as the largest client has, if these are
        fewer. (With a module of flax it holds none: the blocks in front run forward in each step.) Clients that run
        together hold them side by side. With "running" statistics and clients that run one after the other on a CPU, a
        sample that several steps draw is computed once; otherwise all tau * b are. An accelerator also computes a
        class's empty slots.

    Examples:
        >>> import optax, jaxfl
        >>> from jaxfl.algorithms import output_side
        >>> from jaxfl.models import classification, mlp
        >>> task = classification(mlp((2, 4, 3)))
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.array([0, 1, 2, 0]), [[0], [1, 2, 3]])
        >>> blocks = [task.blocks, output_side(task.blocks, "dense_2")]
        >>> classes = {"trained_blocks": blocks, "client_class": [0, 1], "num_active": 2}
        >>> clients = jaxfl.local_steps(5, batch_size=2, optimizer=optax.sgd(0.1))
        >>> learner = jaxfl.embracing(task, clients=clients, **classes)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.bits_sent.tolist(), info.bits_received.tolist()  # 27 and 15 parameters of 32 bits
        ([864.0, 480.0], [864.0, 864.0])
    """
    require_plain(clients)
    check.one_of(("running", "batch"), frozen_batch_norm=frozen_batch_norm)
    tasks = tasks_of_classes(task, class_tasks, len(trained_blocks))
    block_names, drawn_counts = check_blocks(task.blocks, trained_blocks)
    # All have `part`, which the type checker does not see.
    parts = [own.part(blocks) if own.part and blocks else None for own, blocks in zip(tasks, block_names, strict=True)]
    classes = client_classes(client_class, num_active, len(block_names))
    way = PLAIN if uplink is None else uplink
    way.check(task, clients, holds_parts=True)
    classes.check_expected(way.is_private)
    # (classes, L): the blocks of each class that names them.
    table = np.array([[block in blocks for block in task.blocks] for blocks in block_names])
    any_drawn = bool(np.any(drawn_counts[classes.of_client] > 0))
    num_expected = int(np.sum(classes.num_active))
    rates = np.where(drawn_counts[:, None] > 0, drawn_counts[:, None] / len(task.blocks), table)
    expected = (num_expected * rates[classes.of_client].mean(axis=0)).tolist()  # of clients that train each block

    def init(key, data):
        classes.check_data(data)
        clients.check_data(task, data)
        params = task.init(purpose_key(key, Purpose.INIT))
        way.init(key, params, data.num_nodes)
        return State(
            params=params,
            model_state=None if task.init_state is None else task.init_state(),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        classes.check_data(data)
        n, k = data.num_nodes, state.round_index
        choose = functools.partial(classes.draw_active, key, k)
        active, of_way = way.draw(key, k, state.params, n, num_expected, choose)
        trained = None
        if any_drawn:
            keys = node_keys(purpose_key(key, Purpose.PART, k), n)[active]
            places = jnp.arange(len(task.blocks), dtype=jnp.int32)
            ranks = jax.vmap(lambda client_key: jax.random.permutation(client_key, places))(keys)
            numbers = classes.of(active)
            # A class that names its blocks has count 0.
            trained = jnp.asarray(table)[numbers] | (ranks < jnp.asarray(drawn_counts)[numbers][:, None])
        return Draws(active=active, steps=clients.draw(key, k, active, data, task), trained=trained, uplink=of_way)

    def update(state, data, draws):
        k, active, is_active = state.round_index, draws.active, draws.uplink.is_active
        steps = clients.steps(data, active, draws.steps)
        trained = jnp.asarray(table)[classes.of(active)] if draws.trained is None else draws.trained
        model_state = {} if state.model_state is None else state.model_state
        common = {"state": state, "data": data, "clients": clients}

        def in_common_form(number, results):
            params, own_state, client_info = results
            return {**state.params, **params}, {**model_state, **own_state}, client_info

        of_class = [
            functools.partial(train_drawn, own, **common)
            if part is None
            else functools.partial(train_part, part, task.blocks, frozen_batch_norm, **common)
            for own, part in zip(tasks, parts, strict=True)
        ]
        own = (active, (trained, steps), is_active, clients.differentiable)
        groups = classes.run(of_class, in_common_form, task.node_loop, *own)

        client_info = in_order(groups, [group.results[2] for group in groups], len(active))
        weights = clients.weigh(data, active).astype(number_type(state.params))
        if is_active is not None:
            weights, trained = weights * is_active.astype(weights.dtype), trained & is_active[:, None]
        before = Variables(state.params, model_state)
        is_trained, of_block = (dict(zip(task.blocks, each, strict=True)) for each in (trained.T, expected))
        models = block_means.models(before, groups, is_trained, of_block, num_expected)
        received = way.send(draws.uplink, active, weights, client_info.loss, before, models)

        sizes = jnp.array([size((state.params[block], model_state.get(block))) for block in task.blocks], jnp.int32)
        in_params = jnp.array([size(state.params[block]) for block in task.blocks], jnp.int32)
        numbers, of_params = ((trained.astype(jnp.int32) @ each).astype(jnp.float32) for each in (sizes, in_params))
        whole = size((state.params, state.model_state))
        counts = clients.counts(steps, draws.steps, k)
        # Count the least that the method needs. Clients that run together compute a sample once in each of its steps.
        num_entering = counts["gradient_evaluations"] if frozen_batch_norm == "batch" else num_different(steps)
        runs_front = [part is not None and (part.features or part.trained[0] != task.blocks[0]) for part in parts]
        in_front = jnp.array([bool(runs) for runs in runs_front])[classes.of(active)]
        of_active = client_info._replace(loss=received.loss).plus(
            counts,  # gradients are with respect to the client's blocks
            received.counts,
            active=jnp.ones_like(active),  # 1 for a client that took part
            bits_sent=32 * numbers + (way.bits - 32) * of_params,  # its blocks
            bits_received=jnp.full(active.shape, 32 * whole, jnp.float32),  # the whole model, once
            forward_evaluations=jnp.where(in_front, num_entering, 0),  # samples through the blocks in front
        )
        info = info_at_clients(of_active, draws.uplink, active, data.num_nodes).plus(
            update_norm=tree_norm(jax.tree.map(jnp.subtract, received.model.params, state.params), 2),
            untrained_blocks=jnp.sum(~trained.any(axis=0), dtype=jnp.int32),  # that no active client trained
        )
        new_state = State(
            params=received.model.params,
            model_state=None if state.model_state is None else received.model.model_state,
            round_index=k + 1,
        )
        return new_state, info

    releases = of_clients(clients, num_expected, way.updates)
    return algorithm(init, draw, update, server_model(task), releases=releases)


embracing_fl = embracing
"""The paper's name of `embracing`."""
