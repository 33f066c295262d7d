# pyright: reportArgumentType=false
"""A newcomer's first mistakes in Python end in one sentence that says what to pass instead."""

import inspect

import flax.linen as linen
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused
from registry import REGISTRY

import jaxfl
from jaxfl import graphs, models

TASK = models.classification(models.mlp((4, 2)))
RING = graphs.ring(3)
STEPS = jaxfl.local_steps(1, batch_size=2, optimizer=optax.sgd(0.1))
ROWS = np.zeros((6, 4), np.float32)
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
