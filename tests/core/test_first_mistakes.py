# pyright: reportArgumentType=false, reportCallIssue=false
"""A newcomer's first mistakes in Python end in one sentence that says what to pass instead."""

import inspect

import flax.linen as linen
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from helpers import refused
from registry import REGISTRY

import jaxfl
from jaxfl import graphs, models

TASK = models.classification(models.mlp((4, 2)))
RING = graphs.ring(3)
STEPS = jaxfl.local_steps(1, batch_size=2, optimizer=optax.sgd(0.1))
ROWS = np.zeros((6, 4), np.float32)
KEY, FALLING = jax.random.key(0), optax.exponential_decay(1.0, 1, 0.5)
DATA, MORE = (
    jaxfl.federate(np.eye(8, 4, dtype="float32"), np.zeros(8, int), np.split(np.arange(8)[: 2 * n], n)) for n in (3, 4)
)
PUSH_SUM, D_PSGD = (learn(TASK, graph=RING, step_size=0.1) for learn in (jaxfl.push_sum, jaxfl.d_psgd))
FED_AVG = jaxfl.fed_avg(TASK, clients=STEPS, num_active=1)
STATE = PUSH_SUM.init(KEY, DATA)


class Embeds(nnx.Module):
    def __init__(self, rngs):
        self.table, self.head = nnx.Embed(256, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.table(tokens).mean(axis=1))


EMBEDS = jaxfl.from_flax(Embeds)


def LOSS(params, inputs, labels):
    return (inputs @ params["w"] - labels) ** 2


def steps(optimizer, max_steps=1):
    return jaxfl.local_steps(max_steps, batch_size=2, optimizer=optimizer)


MISTAKES = {
    "networkx graph": (lambda: jaxfl.push_sum(TASK, graph=nx.cycle_graph(3), step_size=0.1), "graph", "from_networkx"),
    "matrix": (lambda: jaxfl.d_psgd(TASK, graph=np.eye(3), step_size=0.1), "graph", "from_matrix"),
    "name": (lambda: jaxfl.push_sum(TASK, graph="ring", step_size=0.1), "graph", "ring(n)"),
    "number as noise": (lambda: jaxfl.push_sum(TASK, graph=RING, step_size=0.1, noise=0.1), "noise", "gaussian(0.1)"),
    "estimator not called": (
        lambda: jaxfl.push_sum(TASK, graph=RING, step_size=0.1, gradient=jaxfl.mini_batch),
        "gradient",
        "called",
    ),
    "model as task": (lambda: jaxfl.push_sum(models.mlp((4, 2)), graph=RING, step_size=0.1), "task", "classification"),
    "function as task": (lambda: jaxfl.fed_avg(lambda: 0, clients=STEPS, num_active=1), "task", "from_"),
    "steps as clients": (lambda: jaxfl.fed_avg(TASK, clients=10, num_active=1), "clients", "local_steps"),
    "number as links": (lambda: jaxfl.push_sum(TASK, graph=RING, step_size=0.1, links=0.9), "links", "jaxfl.links"),
    "links as uplink": (
        lambda: jaxfl.fed_avg(TASK, clients=STEPS, num_active=1, uplink=jaxfl.links(success=0.9)),
        "uplink",
        "jaxfl.uplink",
    ),
    "batch as sampler": (lambda: jaxfl.saga(sampler=32), "sampler", "fixed(32)"),
    "bits as quantizer": (
        lambda: jaxfl.perturbed_gossip(TASK, graph=RING, schedule=None, clip_norm=None, quantizer=4),
        "quantizer",
        "jaxfl.channel",
    ),
    "number of nodes as parts": (lambda: jaxfl.federate(ROWS, np.zeros(6, int), 3), "parts", "jaxfl.data.iid"),
    "list of arrays": (lambda: jaxfl.federate([ROWS, ROWS[:2]], np.zeros(8, int), [[0], [1]]), "inputs", "Concatenate"),
    "module": (lambda: jaxfl.from_flax(nnx.Linear(4, 2, rngs=nnx.Rngs(0))), "make_module", "lambda rngs"),
    "linen module": (lambda: jaxfl.from_flax(linen.Dense(2)), "make_module", "from_functions"),
    "batch norm under a clip norm": (
        lambda: jaxfl.mini_batch(2, clip_norm=1.0).init(
            jaxfl.from_flax(lambda rngs: nnx.BatchNorm(4, rngs=rngs)), None, None, None
        ),
        "task",
        "(BatchNorm)",
    ),
    "number as module": (lambda: jaxfl.from_flax(3), "make_module", "lambda rngs"),
    "tokens in uint8": (
        lambda: jax.eval_shape(EMBEDS.loss, EMBEDS.init(KEY), jnp.ones((2, 5), jnp.uint8), jnp.zeros(2, jnp.int32)),
        "inputs",
        "preprocess=",
    ),
    "leaf that is no array": (
        lambda: jaxfl.from_functions(lambda key: {"w": jnp.zeros(4), "act": jnp.tanh}, LOSS).init(KEY),
        "init",
        "['act']",
    ),
    "number as key": (lambda: PUSH_SUM.init(0, DATA), "key", "jax.random.key(0)"),
    "number as key of a draw": (lambda: FED_AVG.draw(0, FED_AVG.init(KEY, DATA), DATA), "key", "jax.random.key(0)"),
    "several keys": (lambda: PUSH_SUM.round(jax.random.split(KEY, 3), STATE, DATA), "key", "vmap"),
    "state of a server": (lambda: PUSH_SUM.round(KEY, FED_AVG.init(KEY, DATA), DATA), "state", "server_rounds"),
    "state of gossip": (lambda: PUSH_SUM.node_params(D_PSGD.init(KEY, DATA)), "state", "d_psgd"),
    "no state": (lambda: PUSH_SUM.round(KEY, None, DATA), "state", "NoneType"),
    "state that holds more": (lambda: jax.eval_shape(D_PSGD.round, KEY, STATE, DATA), "state", "push_sum"),
    "data of four nodes": (lambda: jax.jit(PUSH_SUM.round)(KEY, STATE, MORE), "data", "3 nodes and the data 4"),
    "lr": (lambda: jaxfl.push_sum(TASK, graph=RING, lr=0.1), "lr", "step_size=0.1"),
    "lr of clients": (lambda: jaxfl.local_steps(1, batch_size=2, lr=0.1), "lr", "optimizer=optax.sgd(0.1)"),
    "step size of a server": (lambda: jaxfl.fed_avg(TASK, step_size=0.1), "step_size", "local_steps"),
    "epsilon": (lambda: jaxfl.d_psgd(TASK, graph=RING, step_size=0.1, epsilon=1.0), "epsilon", "noise=jaxfl.gaussian"),
    "misspelled": (lambda: jaxfl.mini_batch(2, clipnorm=1.0), "clipnorm", "clip_norm="),
    "optimizer as step size": (
        lambda: jaxfl.push_sum(TASK, graph=RING, step_size=optax.sgd(0.1)),
        "step_size",
        "optimizer=",
    ),
    "schedule of a client's only step": (lambda: steps(optax.sgd(FALLING)), "optimizer", "lambda k: optax.sgd"),
    "schedule of one step of five": (
        lambda: jaxfl.local_steps(5, num_steps=1, batch_size=2, optimizer=optax.sgd(FALLING)),
        "optimizer",
        "starts anew",
    ),
    "schedule among numbers": (lambda: steps(optax.inject_hyperparams(optax.sgd)(FALLING)), "optimizer", "client_sgd"),
    "steps collected by clients": (lambda: steps(optax.MultiSteps(optax.sgd(0.1), 4)), "optimizer", "batch_size"),
    "nothing by name": (lambda: jaxfl.fed_avg(TASK), "clients", "fed_avg(task, clients="),
    "all by position": (lambda: jaxfl.fed_avg(TASK, STEPS, 2), "task", "fed_avg(task, clients="),
    "key and data exchanged": (lambda: PUSH_SUM.init(DATA, KEY), "data", "federate"),
    "data set as data": (lambda: jax.jit(PUSH_SUM.round)(KEY, STATE, (ROWS, ROWS)), "data", "federate"),
    "no data": (lambda: PUSH_SUM.round(KEY, STATE), "data", "key, state, data"),
    "unknown name in a call": (lambda: PUSH_SUM.init(KEY, dataset=DATA), "data", "key, data"),
    "text as number": (lambda: jaxfl.push_sum(TASK, graph=RING, step_size="0.1"), "step_size", "'0.1'"),
    "result of a round as info": (lambda: jaxfl.check_info((STATE, None)), "info", "second"),
    "labels of each node": (lambda: jaxfl.federate([ROWS] * 2, [np.zeros(6, int)] * 2, [[0], [1]]), "labels", "parts"),
    "module without streams": (lambda: jaxfl.from_flax(lambda: None), "make_module", "1 argument"),
    "function without module": (lambda: jaxfl.from_flax(lambda rngs: 3), "make_module", "nnx module"),
    "params as init": (lambda: jaxfl.from_functions({"w": ROWS}, LOSS), "init", "1 argument"),
    "loss of two arguments": (lambda: jaxfl.from_functions(lambda key: ROWS, lambda p, x: 0), "loss", "3 arguments"),
    "model of which a part trains": (lambda: jaxfl.train_only(models.mlp((4, 2)), "dense_1"), "task", "classification"),
    "one-hot labels": (
        lambda: jax.eval_shape(TASK.loss, TASK.init(jax.random.key(0)), ROWS, jnp.zeros((6, 2))),
        "labels",
        "argmax",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_first_mistake_is_one_sentence(mistake):
    call, argument, word = MISTAKES[mistake]
    refused(call, argument, word)


@pytest.mark.parametrize("name", sorted({*REGISTRY} - {"width_reduction"}))  # which takes a list of tasks
def test_every_algorithm_refuses_a_function_as_its_task(name):
    build = getattr(jaxfl, name)
    needed = {key for key, one in inspect.signature(build).parameters.items() if one.default is one.empty} - {"task"}
    refused(lambda: build(lambda: 0, **dict.fromkeys(needed)), "task", "a function")


OPTIMIZERS = {
    "number": (0.1, "optax.sgd(0.1)"),
    "not called": (optax.sgd, "got a constructor"),
    "line search": (optax.lbfgs(), "'value'"),
    "Polyak's step": (optax.polyak_sgd(), "'value'"),
    "plateau": (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "'value'"),
    "lookahead": (optax.lookahead(optax.sgd(0.1), 5, 0.5), "fast"),
    "private": (optax.contrib.differentially_private_aggregate(1.0, 1.0, key=jax.random.key(0)), "shape ()"),
    "several steps": (optax.MultiSteps(optax.sgd(0.1), 4), ""),
}


def test_every_constructor_that_takes_an_optimizer_tries_it():
    takers = {
        (name, argument)
        for name in dir(jaxfl)
        if inspect.isfunction(build := getattr(jaxfl, name))
        for argument in inspect.signature(build).parameters
        if "optimizer" in argument
    }
    assert {name for name, _ in takers} >= {"local_steps", "push_sum", "d_psgd", "dp2_sgd", "fed_avg"}
    for name, argument in takers:
        build = getattr(jaxfl, name)
        needed = {key for key, one in inspect.signature(build).parameters.items() if one.default is one.empty}
        parts = {"task": TASK, "graph": RING, "noise": jaxfl.gaussian(0.1), "clients": STEPS, "num_active": 1}
        parts |= {"max_steps": 2, "batch_size": 2}
        given = {key: parts[key] for key in needed - {argument}} | {argument: optax.lbfgs()}
        refused(lambda build=build, given=given: build(**given), argument, "'value'")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_cannot_step_along_one_gradient_is_refused_wherever_an_optimizer_is_taken(name):
    optimizer, word = OPTIMIZERS[name]
    refused(lambda: steps(optimizer), "optimizer", word)
    refused(lambda: jaxfl.push_sum(TASK, graph=RING, optimizer=optimizer), "optimizer", word)
    refused(
        lambda: jaxfl.fed_avg(TASK, clients=STEPS, num_active=1, server_optimizer=optimizer), "server_optimizer", word
    )


def test_optimizers_that_can_are_taken():
    masked = optax.masked(optax.sgd(0.1), {"dense_1": {"kernel": True, "bias": False}})

    def no_bias(path, _):
        return path[-1] != "bias"

    decayed = optax.adamw(0.1, mask=lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree))
    by_path = optax.masked(optax.sgd(0.1), lambda tree: traverse_util.path_aware_map(no_bias, tree))
    for optimizer in (optax.adam(0.1), masked, decayed, by_path, optax.lion(0.1)):
        assert steps(optimizer).optimizer_at(0).init is not None
        assert jaxfl.push_sum(TASK, graph=RING, optimizer=optimizer).init is not None
    assert steps(optax.sgd(FALLING), max_steps=5).max_steps == 5
    assert steps(lambda k: optax.sgd(FALLING(k))).max_steps
    collected = optax.MultiSteps(optax.sgd(FALLING), 4).gradient_transformation()
    assert jaxfl.push_sum(TASK, graph=RING, optimizer=collected).init is not None


def test_a_schedule_over_rounds_is_a_function_of_the_round():
    """As docs/sharp_edges.md has it: 1, 1/2, 1/4 of the gradient, where a client's own count would stay at 0."""
    task = jaxfl.from_functions(lambda key: jnp.zeros(1), lambda w, x, y: (x @ w).astype(jnp.float32))
    data = jaxfl.federate(np.ones((4, 1), "float32"), np.zeros(4, "float32"), [[0, 1], [2, 3]])
    moves = {}
    for max_steps, optimizer in ((1, lambda k: optax.sgd(FALLING(k))), (2, optax.sgd(FALLING))):
        learner = jaxfl.fed_avg(task, clients=steps(optimizer, max_steps), num_active=2)
        state, values = learner.init(KEY, data), [0.0]
        for _ in range(3):
            state, _ = learner.round(KEY, state, data)
            values.append(float(learner.node_params(state)[0, 0]))
        moves[max_steps] = (-np.diff(values)).tolist()
    assert moves == {1: [1.0, 0.5, 0.25], 2: [1.5, 1.5, 1.5]}


@pytest.mark.parametrize(
    ("name", "near"), [("FedAvg", "fed_avg?"), ("PushSum", "push_sum?"), ("Bulyan", "coming_from")]
)
def test_a_name_of_another_library_is_pointed_on(name, near):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'.*{near.rstrip('?')}"):
        getattr(jaxfl, name)
    assert not hasattr(jaxfl, "__wrapped__")
