"""Blocks of a user's own flax module: partial training and averaging as of the same network of jaxfl.models."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused
from problems import run

import jaxfl
from jaxfl.algorithms import output_side
from jaxfl.models import classification, mlp

KEY = jax.random.key(3)
WIDTHS = (64, 32, 16, 10)
BLOCKS = ("dense_1", "dense_2", "dense_3")
CLIENTS = jaxfl.local_steps(3, batch_size=8, optimizer=optax.sgd(0.1))


class Network(nnx.Module):
    """The MLP, with names of one's own choice."""

    def __init__(self, rngs, names=BLOCKS, norm=False):
        self.names = names
        for name, inside, outside in zip(names, WIDTHS, WIDTHS[1:], strict=False):
            setattr(self, name, nnx.Linear(inside, outside, rngs=rngs))
        if norm:
            self.norm = nnx.BatchNorm(10, rngs=rngs)

    def __call__(self, inputs):
        for name in self.names[:-1]:
            inputs = nnx.relu(getattr(self, name)(inputs))
        logits = getattr(self, self.names[-1])(inputs)
        return self.norm(logits) if hasattr(self, "norm") else logits


OWN, SAME = jaxfl.from_flax(Network), classification(mlp(WIDTHS))


def digits(sizes=(20, 9, 31, 12)):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(sum(sizes), 64)).astype("float32")
    return jaxfl.federate(
        inputs, (inputs[:, 0] > 0).astype("int32"), np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    )


LEARNERS = {
    "embracing, stratified": lambda task: jaxfl.embracing(
        task,
        clients=CLIENTS,
        trained_blocks=(task.blocks, output_side(task.blocks, "dense_2"), 1),
        client_class=(0, 1, 1, 2),
        num_active=(1, 2, 1),
    ),
    "embracing, uniform, whole clients hidden": lambda task: jaxfl.embracing(
        task,
        clients=jaxfl.local_steps(3, batch_size=8, optimizer=optax.sgd(0.1), weighting="uniform"),
        trained_blocks=(task.blocks, output_side(task.blocks, "dense_3")),
        client_class=(0, 1, 1, 0),
        num_active=2,
        uplink=jaxfl.uplink(updates=jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.gaussian(0.1))),
    ),
    "FedPer": lambda task: jaxfl.partial_averaging(task, clients=CLIENTS, synchronized=task.blocks[:-1]),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_an_own_module_is_trained_in_parts_as_the_same_network_of_ours(name):
    data = digits()
    learners = [LEARNERS[name](task) for task in (OWN, SAME)]
    start = learners[1].init(KEY, data)
    ends = [run(learner, KEY, data, 4, start) for learner in learners]
    for ours, theirs in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6)
    moved = jax.tree.map(lambda new, old: float(abs(new - old).max()), ends[0][0].params, start.params)
    assert min(jax.tree.leaves(moved)) > 0


def test_a_weak_client_runs_no_backward_pass_in_front_of_its_own_blocks_of_a_module():
    """A strong client's step has 3 matrix products forward, 3 for kernels, 2 for inputs; a weak one's 3 and 1."""
    data, counts = digits(), []
    for number in (0, 1):
        blocks = (OWN.blocks, output_side(OWN.blocks, "dense_3"))
        classes = {"trained_blocks": blocks, "client_class": [number] * 4, "num_active": 1}
        learner = jaxfl.embracing(OWN, clients=CLIENTS, **classes)
        state = jax.eval_shape(learner.init, KEY, data)
        draws = jax.eval_shape(learner.draw, KEY, state, data)
        counts.append(str(jax.make_jaxpr(learner.update)(state, data, draws)).count("dot_general["))
    assert counts[0] == 2 * counts[1] > 0


def test_blocks_are_the_attributes_in_order_of_definition():
    names = ("stem", "fc2", "body")
    task = jaxfl.from_flax(lambda rngs: Network(rngs, names))
    assert task.blocks == names
    assert output_side(task.blocks, "fc2") == ("fc2", "body")
    head = jaxfl.from_flax(lambda rngs: Network(rngs, names), trainable=nnx.PathContains("body"))
    assert head.blocks == ("body",)


def test_a_module_with_batch_normalization_is_averaged_in_parts_and_not_trained_in_parts():
    task, data = jaxfl.from_flax(lambda rngs: Network(rngs, norm=True)), digits()
    assert task.blocks == (*BLOCKS, "norm")
    learner = jaxfl.partial_averaging(task, clients=CLIENTS, synchronized=("norm",))
    state, _ = jax.jit(learner.round)(KEY, learner.init(KEY, data), data)
    spread = {name: float(np.ptp(next(iter(values.values())), axis=0).max()) for name, values in state.params.items()}
    assert spread["norm"] == 0 < spread["dense_1"]
    assert float(np.ptp(state.model_state["norm"]["mean"], axis=0).max()) == 0
    classes = {"trained_blocks": (task.blocks,), "client_class": [0] * 4, "num_active": 2}
    refused(lambda: jaxfl.embracing(task, clients=CLIENTS, **classes), "task", "without batch normalization")


def test_a_module_whose_loss_mixes_samples_is_refused_though_it_has_blocks():
    mixed = jaxfl.from_flax(
        Network, loss=lambda outputs, labels: (outputs - outputs.mean(axis=0, keepdims=True))[:, 0] ** 2
    )
    learner = jaxfl.push_sum(mixed, graph=jaxfl.graphs.ring(4), step_size=0.1)
    refused(lambda: learner.init(KEY, digits()), "task.loss", "must not mix")


def test_blocks_of_plain_functions_are_refused():
    refused(lambda: output_side((), "fc2"), "blocks", "from_flax")


def test_widths_of_an_own_module_are_reduced_and_a_lone_task_is_refused():
    class Wide(nnx.Module):
        def __init__(self, rngs, width=8):
            self.first, self.last = nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)

        def __call__(self, inputs):
            return self.last(nnx.relu(self.first(inputs)))

    data, tasks = digits(), [jaxfl.from_flax(lambda rngs, width=width: Wide(rngs, width)) for width in (8, 4)]
    options = {"clients": CLIENTS, "client_class": [0, 1, 1, 0], "num_active": 4}
    learner = jaxfl.width_reduction(tasks, **options)
    _, info = jax.jit(learner.round)(KEY, learner.init(KEY, data), data)
    assert info.bits_sent.tolist() == [32 * (64 * width + width + 2 * width + 2) for width in (8, 4, 4, 8)]
    one: Any = tasks[0]
    refused(lambda: jaxfl.width_reduction(one, **options), "tasks", "each capacity class")
