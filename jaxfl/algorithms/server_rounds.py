"""Rounds of methods with a server, whose clients train the whole model: federated averaging is the plain form.

A `Rule` is what tells one method from another: what a client and the server remember, what a client does with the model
that it gets, what the server does with the mean change that it receives. All else is common: who is active, batches,
the way of updates (`clients/uplink.py`), the rows of client memory that a round reads and writes, and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.server import check_num_active, over_slots, server_model
from jaxfl.algorithms.clients.steps import GradientOf, StepDraws, StepGradient
from jaxfl.algorithms.clients.uplink import PLAIN, Uplink, UplinkDraws, info_at_clients, of_whole_models
from jaxfl.algorithms.exchange import plus_seeds
from jaxfl.algorithms.releases import of_clients
from jaxfl.core import (
    Algorithm,
    ArgumentError,
    Array,
    Info,
    Purpose,
    PyTree,
    Task,
    Variables,
    algorithm,
    check,
    purpose_key,
)
from jaxfl.core.algorithm import check_optimizer
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import number_type, replicate, size
from jaxfl.gradients.per_example import tree_norm
from jaxfl.privacy.mechanisms import require_own_noise


class State(NamedTuple):
    """State carried to the next round. Only the clients' memory has a node axis."""

    params: PyTree  # x, leaves (*leaf), float32
    optimizer: Any  # the server's memory: state of its optimizer, or of the method
    model_state: PyTree  # batch statistics, leaves (*leaf), float32; None where the task has none
    memory: PyTree  # the clients', leaves (n, *leaf); () where they keep nothing
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round; k clients are active, or candidates where losses choose among them."""

    active: Array  # (k,), int32, different clients; drawn in ascending order
    steps: StepDraws  # of these clients
    uplink: UplinkDraws  # which slots hold a client, what arrives, and noise
    more: tuple[StepDraws, ...] = ()  # of further local steps of the same clients, each of a stream of its own


class AtClient(NamedTuple):
    """What an active client has in a round.

    Its `run(change=None, *, start=sent, which=0, count=None)` makes local steps and gives (parameters, model state,
    `Info`). `change` is (gradient, parameters) -> the gradient that the optimizer gets, clipped and noisy before.
    `which` is 0 for the steps of `clients`, j for those of `Rule.more[j - 1]`; `count` is their number, None for all.
    """

    number: Array  # (), int32, which client it is
    sent: Variables  # x and its statistics, from the server
    memory: PyTree  # its own, leaves (*leaf)
    server: Any  # the server's memory; a rule that reads it says so in `vectors_down`
    public: Any  # what `Rule.public` gives for this round
    run: Callable[..., tuple[PyTree, PyTree, Info]]


class AtServer(NamedTuple):
    """What the server has at the end of a round."""

    params: PyTree  # x before the round
    memory: Any
    change: PyTree  # mean change of the clients that arrived, noisy where updates are private
    active: Array  # (c,), int32
    shares: Array  # (c,), float32, what each client weighs in the change
    fraction: float  # of all clients that are active, expected where updates are private
    public: Any
    is_private: bool


class Rule(NamedTuple):
    """What tells one method from another.

    Attributes:
        serve: `AtServer` -> (what to add to x, the server's new memory).
        train: `AtClient` -> (what `AtClient.run` gives, the client's new memory).
        start: the first model as `Variables` -> (the memory of one client, the server's).
        public: (round index, x) -> what server and clients know beforehand.
        more: local steps beside those of `clients`, with batches of their own.
        num_steps: (n,), int32, the steps of each client that `train` makes, for the counts; None: all.
        keeps_sums: whether the server's memory is a uniform mean of the clients'. Links may then lose and round
            nothing.
        by_changes: whether changes are averaged where models could be, so that changes of 0 leave all bits of x.
        vectors_down: how many vectors like x the server sends.
        own_noise: whether noise that clients share is refused, since it would not cancel.
    """

    serve: Callable[[AtServer], tuple[PyTree, Any]]
    train: Callable[[AtClient], tuple[tuple[PyTree, PyTree, Info], PyTree]] = lambda at: (at.run(), ())
    start: Callable[[Variables], tuple[PyTree, Any]] = lambda model: ((), ())
    public: Callable[[Array, PyTree], Any] = lambda round_index, x: ()
    more: tuple[LocalSteps, ...] = ()
    num_steps: Array | None = None
    keeps_sums: bool = False
    by_changes: bool = False
    vectors_down: int = 1
    own_noise: bool = False


def by_optimizer(optimizer: optax.GradientTransformation, memory=lambda model: (), **changes: Any) -> Rule:
    """Make the rule of a server with an optimizer of the pseudo-gradient.

    Args:
        memory: the first model -> the memory of one client.
        changes: other fields of the rule.
    """

    def serve(at):
        return optimizer.update(jax.tree.map(jnp.negative, at.change), at.memory, at.params)

    return Rule(serve, start=lambda model: (memory(model), optimizer.init(model.params)), **changes)


def server_rounds(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    uplink: Uplink | None,
    rule: Rule,
    node_params: Callable[[State], PyTree] | None = None,
) -> Algorithm:
    """Join a rule with the rounds; the arguments are those of `jaxfl.fed_avg`.

    Args:
        node_params: state -> the models to evaluate; None: the server's.
    """
    check.at_least(1, num_active=num_active)
    way, learners = PLAIN if uplink is None else uplink, (clients, *rule.more)
    selection = way.selection
    selection.check_count(num_active)
    way.check(task, clients, keeps_sums=rule.keeps_sums)
    if way.aggregate is not None and num_active < way.aggregate.least:
        requirement = f"must be at least {way.aggregate.least} for this aggregate: a round with fewer updates is void"
        raise ArgumentError("num_active", requirement, f"got {num_active}", "Pass more clients, or fewer attackers.")
    if rule.keeps_sums and clients.weighting != "uniform":
        requirement = "must weigh all clients equally where the server's memory is the mean of theirs"
        found, remedy = "got local steps with weighting 'data'", "Pass weighting='uniform' to local_steps."
        raise ArgumentError("clients", requirement, found, remedy)
    if rule.own_noise:
        for noise in (clients.noise, None if way.updates is None else way.updates.noise):
            require_own_noise("it would not cancel", noise=None if noise is None else noise.distribution)

    def init(key, data):
        check_num_active(num_active, data.num_nodes)
        selection.check_data(data)
        check.per_node(data.num_nodes, num_steps=rule.num_steps)
        for learner in learners:
            learner.check_data(task, data)
        params = task.init(purpose_key(key, Purpose.INIT))
        way.init(key, params, data.num_nodes)
        model_state = None if task.init_state is None else task.init_state()
        own, of_server = rule.start(Variables(params, model_state))
        return State(
            params=params,
            optimizer=of_server,
            model_state=model_state,
            memory=replicate(own, data.num_nodes),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        n, k = data.num_nodes, state.round_index
        check_num_active(num_active, n)
        choose = partial(selection.draw, key, k, num_active, data)
        active, of_way = way.draw(key, k, state.params, n, num_active, choose)
        steps = [learner.draw(key, k, active, data, task, stream=j) for j, learner in enumerate(learners)]
        return Draws(active=active, steps=steps[0], uplink=of_way, more=tuple(steps[1:]))

    def update(state, data, draws):
        k, before = state.round_index, Variables(state.params, state.model_state)
        drawn = draws.steps, *draws.more
        active, drawn = selection.choose(task, data, before, num_active, draws.active, drawn)
        steps = tuple(one.steps(data, active, of_one) for one, of_one in zip(learners, drawn, strict=True))
        if rule.num_steps is not None:
            runs = jnp.arange(clients.max_steps, dtype=jnp.int32)[None] < rule.num_steps[active][:, None]
            steps = (steps[0]._replace(mask=steps[0].mask & runs[..., None]), *steps[1:])
        gradients = tuple(one.gradient_of(task, data) for one in learners)
        public = rule.public(k, state.params)

        def train(number, client_steps, memory):
            def run(change=None, *, start=before, which=0, count=None):
                gradient = gradients[which] if change is None else _wrapped(gradients[which], change)
                return learners[which].run(gradient, start.params, start.model_state, client_steps[which], k, count)

            return rule.train(AtClient(number, before, memory, state.optimizer, public, run))

        is_active = draws.uplink.is_active
        rows = jax.tree.map(lambda of_all: of_all[active], state.memory)
        trained, rows = over_slots(train, task.node_loop)(is_active, active, steps, rows)
        params, model_state, client_info = trained
        places = active if is_active is None else jnp.where(is_active, active, data.num_nodes)
        models = of_whole_models(before, Variables(params, model_state), num_active)
        weights = clients.weigh(data, active).astype(number_type(state.params))
        models = models._replace(mean=None) if rule.by_changes else models
        received = way.send(draws.uplink, active, weights, client_info.loss, before, models)
        moves, of_server = rule.serve(
            AtServer(
                params=state.params,
                memory=state.optimizer,
                change=received.change,
                active=active,
                shares=received.shares,
                fraction=num_active / data.num_nodes,
                public=public,
                is_private=way.is_private,
            )
        )
        # A server that receives no update keeps its state.
        moves = jax.tree.map(lambda leaf: jnp.where(received.any_arrived, leaf, 0), moves)
        new_state = State(
            params=optax.apply_updates(state.params, moves),
            optimizer=jax.tree.map(partial(jnp.where, received.any_arrived), of_server, state.optimizer),
            model_state=received.model.model_state,
            memory=jax.tree.map(lambda old, new: old.at[places].set(new, mode="drop"), state.memory, rows),
            round_index=k + 1,
        )

        numbers, statistics = size(state.params), size(state.model_state)
        down = 32 * (rule.vectors_down * numbers + statistics)
        of_active = client_info._replace(loss=received.loss).plus(
            _counts(learners, steps, drawn, k),
            received.counts,
            active=jnp.ones_like(active),  # 1 for a client that took part
            bits_sent=jnp.full(active.shape, way.bits * numbers + 32 * statistics, jnp.float32),
            bits_received=jnp.full(active.shape, down, jnp.float32),
        )
        info = info_at_clients(of_active, draws.uplink, active, data.num_nodes)
        info = selection.counted(info, data, draws.active, down)
        noise = clients.noise if way.updates is None else way.updates.noise
        secrets = None if noise is None else noise.secrets
        if secrets is not None:  # any two clients may be partners where not all are active
            n = data.num_nodes
            secrets = secrets if num_active == n else secrets._replace(partners=(n - 1,) * n)
            info = info.plus(plus_seeds(info.measurements, secrets, k))
        return new_state, info.plus(pseudo_gradient_norm=tree_norm(received.change, 2), update_norm=tree_norm(moves, 2))

    releases = of_clients(clients, num_active, way.updates)
    return algorithm(init, draw, update, node_params or server_model(task), releases=releases)


def step_mass(clients: LocalSteps, round_index: Array, x: PyTree, count: Array | None = None) -> Array:
    """Compute how far a round's steps move a number against gradients of 1, (): the sum of step sizes for SGD.

    Args:
        clients: with an optimizer that `require_linear` takes.
        x: the model, for its type of numbers.
        count: the number of steps, (), int32; None: those of `clients`.
    """

    def ones(moved, model_state, step):
        return StepGradient(jnp.ones_like(moved), model_state, Info(moved))

    steps = jnp.zeros(clients.max_steps, number_type(x))
    return -clients.run(ones, jnp.zeros((), number_type(x)), None, steps, round_index, count)[0]


def require_linear(clients: LocalSteps, reason: str, *states: str) -> None:
    """Refuse optimizers whose update is not a multiple of the gradient, or which keep more than these `states`."""
    known = {"EmptyState", "ScaleByScheduleState", "WrappedScheduleState", *states}
    types = check_optimizer("optimizer", clients.optimizer_at, by_round=True)
    found = ", ".join(sorted(name for name in types - known if name.endswith("State")))
    if not found:
        with jax.numpy_dtype_promotion("standard"), jax.ensure_compile_time_eval():
            rule = clients.optimizer_at(jnp.int32(0))

            def moved(gradient, x):
                return rule.update(jnp.float32(gradient), rule.init(jnp.float32(x)), jnp.float32(x))[0]

            moves = [moved(1.0, 0.0), moved(1e6, 0.0), moved(0.0, 1.0)]
        if not check.is_traced(moves[0]):
            small, large, still = map(float, moves)  # pyright: ignore[reportArgumentType]
            found = "weight decay" * (still != 0) or "clipping" * (abs(large - 1e6 * small) > abs(small))
    if found:
        raise ArgumentError("clients", f"must make steps of SGD{reason}", f"got {found}", "Pass optax.sgd(step_size).")


def _wrapped(gradient_of: GradientOf, change: Callable[[PyTree, PyTree], PyTree]) -> GradientOf:
    """The gradient of a step after `change`."""

    def gradient(params, model_state, step):
        result = gradient_of(params, model_state, step)
        return StepGradient(change(result.gradient, params), result.model_state, result.info)

    return gradient


def _counts(learners, steps, drawn, round_index) -> dict[str, Any]:
    """Count gradients and overflows of all learners, and the iterations of `clients`."""
    totals: dict[str, Any] = {}
    for number, (learner, *of_learner) in enumerate(zip(learners, steps, drawn, strict=True)):
        for name, value in learner.counts(*of_learner, round_index).items():
            if number == 0 or name != "local_iterations":
                totals[name] = jax.tree.map(jnp.add, totals[name], value) if name in totals else value
    return totals
