"""Flax modules with batch normalization and dropout as tasks, and nodes and clients that train them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, refused
from problems import statistics_task, uneven_data
from reference.runs import one_by_one

import jaxfl
from jaxfl import gradients, graphs
from jaxfl.core import Variables
from jaxfl.core.tasks import calibrated_state

KEY, RNG = jax.random.key(3), np.random.default_rng(1)


class Network(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.BatchNorm(8, momentum=0.8, rngs=rngs), nnx.BatchNorm(8, axis=1, rngs=rngs)])
        self.drop_1, self.drop_2 = nnx.Dropout(rate, rngs=rngs), nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        hidden = self.blocks[0](nnx.relu(self.first(x)))
        hidden = self.blocks[1](hidden[:, :, None])[:, :, 0]  # channels in front of places
        return self.last(self.drop_2(self.drop_1(hidden)))


TASK = jaxfl.from_flax(Network)
DROPOUT = jaxfl.from_flax(functools.partial(Network, rate=0.5))


def train(task, *arguments):
    """(losses, statistics) of the task in training."""
    assert task.train_loss is not None
    return task.train_loss(*arguments)


def start(task, seed=0):
    """Parameters, and statistics away from their start."""
    state = jax.tree.map(lambda leaf: jnp.asarray(RNG.uniform(0.5, 1, leaf.shape), jnp.float32), task.init_state())
    return task.init(jax.random.key(seed)), state


def samples(count):
    return jnp.asarray(RNG.normal(size=(count, 6)), jnp.float32), jnp.asarray(RNG.integers(0, 3, count), jnp.int32)


def by_flax(params, state, inputs, labels, trains):
    """(losses, statistics) of the module itself."""
    module = Network(nnx.Rngs(0))
    nnx.update(module, nnx.State(params), nnx.State(state))
    (module.train if trains else module.eval)()
    losses = jaxfl.core.cross_entropy(module(inputs), labels)
    return losses, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))


def test_training_is_flaxs_on_the_samples_that_count_in_values_gradient_and_statistics():
    (params, state), (inputs, labels) = start(TASK), samples(7)
    kept, weights = np.array([0, 2, 3, 6]), jnp.zeros(7).at[jnp.array([0, 2, 3, 6])].set(1.0)

    def ours(params):
        losses, new = train(TASK, params, state, inputs, labels, weights, KEY)
        return losses @ weights, (losses[kept], new)

    def theirs(params):
        losses, new = by_flax(params, state, inputs[kept], labels[kept], True)
        return losses.sum(), (losses, new)

    actual, expected = (jax.jit(jax.value_and_grad(fn, has_aux=True))(params) for fn in (ours, theirs))
    assert_close(actual, expected)
    evaluated = TASK.loss(Variables(params, state), inputs, labels)
    assert_close(evaluated, by_flax(params, state, inputs, labels, False)[0])
    assert np.abs(evaluated[kept] - actual[0][1][0]).max() > 0.01


def test_a_batch_of_padding_alone_leaves_statistics_as_they_are_and_calibration_takes_the_batch_alone():
    (params, state), (inputs, labels) = start(TASK), samples(4)
    losses, new = train(TASK, params, state, inputs, labels, jnp.zeros(4), KEY)
    assert np.isfinite(losses).all()
    jax.tree.map(np.testing.assert_array_equal, new, state)
    actual = calibrated_state(TASK, params, inputs[None], labels[None], jnp.ones((1, 4)), KEY)
    hidden = jax.nn.relu(inputs @ params["first"]["kernel"] + params["first"]["bias"][None])
    assert_close(actual["blocks"][0]["mean"], hidden.mean(axis=0))


def test_dropout_takes_a_key_for_each_layer_while_it_trains_and_none_while_it_evaluates():
    (params, state), (inputs, labels) = start(DROPOUT), samples(400)

    def losses(key):
        return train(DROPOUT, params, state, inputs, labels, jnp.ones(400), key)[0]

    assert not np.array_equal(losses(KEY), losses(jax.random.key(4)))
    variables = Variables(params, state)
    np.testing.assert_array_equal(DROPOUT.loss(variables, inputs, labels), TASK.loss(variables, inputs, labels))
    # Both layers keep a number with chance 1/4, as one mask alone would not: then a row is the bias with chance 1/2^8.
    logits = []
    task = jaxfl.from_flax(functools.partial(Network, rate=0.5), loss=lambda out, _: (logits.append(out), out[:, 0])[1])
    train(task, params, state, inputs, labels, jnp.ones(400), KEY)
    empty = np.all(np.isclose(logits[0], params["last"]["bias"], atol=1e-6), axis=1).mean()
    assert abs(empty - 0.75**8) < 5 * np.sqrt(0.75**8 * 0.9 / 400)


@pytest.mark.parametrize("constructor", [jaxfl.push_sum, jaxfl.d_psgd])
def test_nodes_keep_statistics_of_their_own_and_draw_keys_of_their_own(constructor):
    """On the complete graph, where a round is one step from the mean; each node's batch is all that it has."""
    task, data, step = statistics_task(), uneven_data(sizes=(4,) * 5), 0.1
    algorithm = constructor(task, graph=graphs.complete(5), gradient=gradients.mini_batch(4), step_size=step)
    run = one_by_one(algorithm, KEY, data, 3)
    for before, draws, after in zip(run.states, run.draws, run.states[1:], strict=False):
        own = algorithm.node_params(before)
        batch, keys = draws.gradient
        rows = np.take_along_axis(np.asarray(data.indices), np.asarray(batch.indices), axis=1)

        def loss(w, state, node, rows=rows, keys=keys):
            samples = data.inputs[rows[node]], data.labels[rows[node]]
            losses, new = train(task, {"w": w}, state, *samples, jnp.ones(4), keys[node])
            return losses.mean(), new

        slopes, statistics = [], []
        for node in range(5):
            state = jax.tree.map(lambda leaf, node=node: leaf[node], own.model_state)
            slope, new = jax.grad(loss, has_aux=True)(own.params["w"][node], state, node)
            slopes.append(slope)
            statistics.append(new["mean"])
        actual = algorithm.node_params(after)
        np.testing.assert_allclose(actual.model_state["mean"], statistics, rtol=1e-5)
        mean = np.asarray(own.params["w"]).mean(axis=0)[None]
        moved = mean - step * (np.mean(slopes, axis=0) if constructor is jaxfl.push_sum else np.array(slopes))
        np.testing.assert_allclose(actual.params["w"], np.broadcast_to(moved, (5, 6)), rtol=1e-4, atol=1e-6)
    shifts = {int(jax.random.randint(key, (), 0, 3, jnp.int32)) for draws in run.draws for key in draws.gradient.keys}
    assert len(shifts) > 1


def test_clients_and_nodes_learn_with_them_and_refuse_to_add_noise():
    data = uneven_data(sizes=(30,) * 4, seed=2)
    data = data._replace(labels=(data.inputs[:, 0] > 0).astype(jnp.int32))
    clients = jaxfl.local_steps(2, batch_size=10, optimizer=optax.sgd(0.2))
    task = jaxfl.from_flax(functools.partial(Network, rate=0.1))
    rule = {"gradient": gradients.mini_batch(10), "step_size": 0.2}
    learners = [
        jaxfl.fed_avg(task, clients=clients, num_active=4),
        jaxfl.d_psgd(task, graph=graphs.ring(4), **rule),
    ]
    for learner in learners:
        run = jax.jit(
            lambda key, state, learner=learner: jax.lax.scan(
                lambda state, _: learner.round(key, state, data), state, length=60
            )
        )
        state, info = run(KEY, learner.init(KEY, data))
        assert info.loss[-5:].mean() < 0.5 * info.loss[:2].mean()
        first = jax.tree.map(lambda leaf: leaf[0], learner.node_params(state))
        assert task.metrics(first, data.inputs, data.labels)["accuracy"].mean() > 0.8
    private = jaxfl.d_psgd(task, graph=graphs.ring(4), noise=jaxfl.gaussian(0.1), **rule)
    refused(lambda: private.init(KEY, data), "task", "blocks.0, blocks.1, drop_1, drop_2", "GroupNorm")
    one = jaxfl.d_psgd(task, graph=graphs.ring(4), step_size=0.2)
    refused(lambda: one.init(KEY, data), "gradient", "several samples")
    both = functools.partial(gradients.mini_batch, 32, sampler=gradients.uniform(3))
    refused(both, "batch_size", "got both")
