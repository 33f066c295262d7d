"""Causes that make an accelerator's host wait in a round: conditionals, and loops whose length is traced."""

import collections

import jax
import numpy as np
import optax
import pytest
from helpers import equations
from problems import problem, small_task, uneven_data
from registry import REGISTRY

import jaxfl
from jaxfl.core.platform import tracing_for
from jaxfl.gradients import fixed, mini_batch, poisson, saga, uniform

KEY = jax.random.key(3)
SIZES = (7, 6, 9, 8, 6, 5, 8)
CLASSES = {"client_class": np.array([0, 1, 1, 2, 1, 2, 0]), "num_active": 4}
BLOCKS = [("dense_1", "dense_2"), ("dense_2",), 1]
SGD = optax.sgd(0.1)
NOISY = {"optimizer": SGD, "sampler": poisson, "clip_norm": 1.0, "noise": jaxfl.gaussian(0.1)}


def embracing(steps=3, **options):
    clients = jaxfl.local_steps(steps, batch_size=3, optimizer=SGD, weighting="uniform")
    return jaxfl.embracing(small_task(), clients=clients, trained_blocks=BLOCKS, **CLASSES, **options)


def private():
    return jaxfl.uplink(updates=jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.gaussian(0.1)))


def fed_avg(node_loop=None, **options):
    clients = jaxfl.local_steps(3, **{"batch_size": 3, "optimizer": SGD, "weighting": "uniform", **options})
    task = small_task()
    return jaxfl.fed_avg(
        task if node_loop is None else task._replace(node_loop=node_loop), clients=clients, num_active=4
    )


def ali_dpfl(constants):
    clients = jaxfl.local_steps(8, batch_size=3, **NOISY)
    budget = {"step_size": 0.1, "max_rounds": 9, "max_iterations": 40}
    return jaxfl.ali_dpfl(small_task(), clients=clients, constants=constants, **budget)


def over_changing_graph(gradient):
    graph, noise = jaxfl.graphs.exponential(len(SIZES)), jaxfl.gaussian(0.1)
    return jaxfl.push_sum(small_task(), graph=graph, gradient=gradient, noise=noise, step_size=0.1)


ROUNDS = {
    "embracing": embracing,
    "embracing, few samples": lambda: embracing(steps=4),
    "embracing, batch statistics": lambda: embracing(frozen_batch_norm="batch"),
    "embracing, private": lambda: embracing(uplink=private()),
    "fed_avg, private steps": lambda: fed_avg(**NOISY),
    "fed_avg, node after node": lambda: fed_avg(**NOISY, node_loop="map"),
    "ali_dpfl, published": lambda: ali_dpfl(jaxfl.published_constants()),
    "ali_dpfl, private": lambda: ali_dpfl(
        jaxfl.private_constants(3, clip_norm=1.0, loss_bound=1.0, noise_multiplier=1.0)
    ),
    "push_sum, dense table": lambda: over_changing_graph(saga(sampler=uniform(3), clip_norm=1.0)),
    "push_sum, factored table": lambda: over_changing_graph(saga(sampler=fixed(3), table="factored", clip_norm=1.0)),
    "push_sum, poisson": lambda: over_changing_graph(mini_batch(sampler=poisson(3), clip_norm=1.0)),
}


def waits(algorithm, data):
    """Conditionals and loops of a traced length in a round; a loop of a known length is a scan."""
    state = jax.eval_shape(lambda key: algorithm.init(key, data), KEY)
    traced = jax.make_jaxpr(algorithm.round)(KEY, state, data)
    names = [equation.primitive.name for equation in equations(traced)]
    return dict(collections.Counter(name for name in names if name in ("while", "cond")))


# The row of ALI-DPFL has three steps, of which a conditional takes some.
ROWS = [name for name in REGISTRY if name != "ali_dpfl"]


@pytest.mark.parametrize("name", [*ROWS, *ROUNDS])
@pytest.mark.quick_cases(len(ROWS) + 2)
def test_an_accelerators_host_waits_for_nothing_but_the_length_of_adaptive_steps(name):
    with tracing_for("gpu"):
        actual = waits(ROUNDS[name](), uneven_data(SIZES)) if name in ROUNDS else waits_of_row(name)
    assert actual == ({"while": 1} if "ali" in name else {})


def waits_of_row(name):
    p = problem(name)
    return waits(p.algorithm(), p.data)


@pytest.mark.parametrize("name", ["embracing", "width_reduction", "dzofl", "ali_dpfl"])
def test_a_cpu_chooses_what_it_computes(name):
    assert waits_of_row(name), "the test above would not see a wait"
