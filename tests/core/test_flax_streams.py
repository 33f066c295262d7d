# pyright: reportArgumentType=false, reportCallIssue=false
"""Flax modules that hold streams of random numbers: what a module does in training says whether it has modes."""

from functools import partial

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused, rows_of

import jaxfl
from jaxfl import gradients, graphs
from jaxfl.gradients.per_example import weighted_sum
from jaxfl.models import layers

KEY, RNG = jax.random.key(0), np.random.default_rng(0)
INPUTS, LABELS = RNG.normal(size=(12, 5, 3)).astype("float32"), RNG.integers(0, 2, 12).astype("int32")
DATA = jaxfl.federate(INPUTS, LABELS, np.arange(12).reshape(2, 6))


class Recurrent(nnx.Module):
    def __init__(self, rngs, cell=nnx.LSTMCell, both=False, rate=None, attends=False, **options):
        def rnn():
            return nnx.RNN(cell(3, 4, rngs=rngs, **options))

        self.rnn = nnx.Bidirectional(rnn(), rnn()) if both else rnn()
        self.attend = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs) if attends else None
        self.dropout = None if rate is None else nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(8 if both else 4, 2, rngs=rngs)

    def __call__(self, inputs):
        hidden = self.rnn(inputs)
        hidden = hidden if self.attend is None else self.attend(hidden)
        return self.head(hidden[:, -1] if self.dropout is None else self.dropout(hidden[:, -1]))


MODULES = {
    "lstm": Recurrent,
    "gru": partial(Recurrent, cell=nnx.GRUCell),
    "optimized lstm": partial(Recurrent, cell=nnx.OptimizedLSTMCell),
    "simple": partial(Recurrent, cell=nnx.SimpleCell),
    "bidirectional": partial(Recurrent, cell=nnx.SimpleCell, both=True),
    "dropout of rate 0": partial(Recurrent, cell=nnx.SimpleCell, rate=0.0),
    "attention without dropout": partial(Recurrent, cell=nnx.SimpleCell, attends=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_stream_that_decides_nothing_makes_no_mode_and_gradients_are_flaxs(name):
    task = jaxfl.from_flax(MODULES[name])
    assert task.train_loss is None
    module = MODULES[name](nnx.Rngs(KEY))

    def loss(module):
        return optax.softmax_cross_entropy_with_integer_labels(module(INPUTS), LABELS).mean()

    expected = nnx.to_pure_dict(nnx.grad(loss)(module))
    actual = jax.grad(lambda params: task.loss(params, INPUTS, LABELS).mean())(task.init(KEY))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), actual, expected)


@pytest.mark.parametrize("name", ["lstm", "gru", "bidirectional"])
def test_every_samples_gradient_through_time_is_clipped_by_itself(name):
    """Against flax's gradient of each sample, clipped in float64."""
    task = jaxfl.from_flax(MODULES[name])
    structure, params, others = nnx.split(MODULES[name](nnx.Rngs(KEY)), nnx.Param, ...)

    def loss(params, one, label):
        outputs = nnx.merge(structure, params, others, copy=True)(one[None])
        return optax.softmax_cross_entropy_with_integer_labels(outputs[0], label)

    slopes = nnx.to_pure_dict(jax.vmap(jax.grad(loss), (None, 0, 0))(params, INPUTS, LABELS))
    norms = np.linalg.norm(rows_of(slopes), axis=1)
    bound = float(np.median(norms))
    scales = np.minimum(1, bound / norms)
    expected = jax.tree.map(lambda leaf: np.tensordot(scales, np.asarray(leaf, np.float64), axes=1), slopes)
    actual = jax.jit(partial(weighted_sum, task, clip_norm=bound))(task.init(KEY), INPUTS, LABELS, jnp.ones(12))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), actual.gradient, expected)
    assert int(actual.clipped.sum()) == len(norms) // 2


@pytest.mark.parametrize("name", ["clipped", "saga", "clients"])
def test_an_lstm_trains_privately(name):
    task = jaxfl.from_flax(Recurrent)
    rule = {"graph": graphs.directed_ring(2), "noise": jaxfl.gaussian(0.05), "step_size": 0.1}
    if name == "clipped":
        learner = jaxfl.push_sum(task, gradient=gradients.mini_batch(3, clip_norm=0.5), **rule)
    elif name == "saga":
        learner = jaxfl.push_sum(task, gradient=jaxfl.saga(sampler=gradients.fixed(3), clip_norm=0.5), **rule)
    else:
        steps = {"optimizer": optax.sgd(0.1), "clip_norm": 0.5, "noise": jaxfl.gaussian(0.05)}
        learner = jaxfl.fed_avg(task, clients=jaxfl.local_steps(2, batch_size=3, **steps), num_active=2)
    state, info = jax.jit(learner.round)(KEY, learner.init(KEY, DATA), DATA)
    jaxfl.check_info(info)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.node_params(state)))


class Drawing(nnx.Module):
    """A layer of a user's own that holds nnx.Rngs."""

    def __init__(self, rngs, draws, flag=None):
        self.dense, self.rngs, self.draws = nnx.Linear(3, 2, rngs=rngs), rngs, draws
        if flag is not None:
            self.deterministic = flag

    def __call__(self, inputs):
        outputs = self.dense(inputs[:, 0])
        draws = self.draws and not getattr(self, "deterministic", False)
        return outputs + self.rngs.normal(outputs.shape) if draws else outputs


def test_random_numbers_are_for_training_and_a_flag_says_where():
    task = jaxfl.from_flax(partial(Drawing, draws=False))
    params = task.init(KEY)
    assert task.train_loss is None
    plain = task.loss(params, INPUTS, LABELS)
    always = jaxfl.from_flax(partial(Drawing, draws=True))
    refused(lambda: always.loss(params, INPUTS, LABELS), "make_module", "rngs.default.key", "deterministic")
    trains = jaxfl.from_flax(partial(Drawing, draws=True, flag=False))
    np.testing.assert_array_equal(trains.loss(jaxfl.core.Variables(params, {}), INPUTS, LABELS), plain)
    assert trains.train_loss is not None
    losses = [trains.train_loss(params, {}, INPUTS, LABELS, jnp.ones(12), jax.random.key(k))[0] for k in (0, 1)]
    assert not np.array_equal(*losses)


def test_a_private_learner_refuses_dropout_and_names_the_layer():
    private = jaxfl.mini_batch(2, clip_norm=1.0)
    flax_task = jaxfl.from_flax(partial(Recurrent, rate=0.5))
    refused(lambda: private.init(flax_task, None, None, DATA), "task", "(dropout)")
    model = jaxfl.models.sequential([("first", layers.dense(3, 2)), ("drop", layers.dropout(0.5))])
    own_task = jaxfl.models.classification(model)
    refused(lambda: private.init(own_task, None, None, DATA), "task", "(drop)")


def test_linen_inside_nnx_is_a_module_like_others():
    class Wrapped(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.bridge.ToNNX(linen.Dense(2), rngs=rngs).lazy_init(jnp.ones((1, 3)))

        def __call__(self, inputs):
            return self.dense(inputs[:, 0])

    task = jaxfl.from_flax(Wrapped)
    params = task.init(KEY)
    logits = linen.Dense(2).apply({"params": params["dense"]}, INPUTS[:, 0])
    np.testing.assert_allclose(task.loss(params, INPUTS, LABELS), jaxfl.core.cross_entropy(logits, LABELS), rtol=1e-6)
