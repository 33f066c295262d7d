"""Batch statistics measured on training samples before an evaluation: which samples, and what is evaluated."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import uneven_data

from jaxfl import core, training
from jaxfl.core import ArgumentError
from jaxfl.models import classification, sequential
from jaxfl.models.layers import batch_norm, dense
from jaxfl.training import calibrated_scores, evaluation_set
from jaxfl.training.measures import calibration_set, flatten_scores

KEY = jax.random.key(3)
DATA = uneven_data((7, 3, 9, 1, 6))  # 26 samples of 6 features, 3 classes
TASK = classification(sequential([("dense", dense(6, 3)), ("norm", batch_norm(3, tracked=False))]))
TEST_INPUTS = np.random.default_rng(5).normal(size=(11, 6)).astype(np.float32)
TEST_LABELS = (np.arange(11) % 3).astype(np.int32)


def positions(actual):
    """Positions in the pool of the samples that count, batch by batch."""
    pool, weights = np.asarray(DATA.inputs), np.asarray(actual.weights)
    where = np.argmax((np.asarray(actual.inputs)[:, :, None] == pool).all(axis=3), axis=2)
    return [batch[weight > 0].tolist() for batch, weight in zip(where, weights, strict=True)]


DRAW = jax.jit(calibration_set, static_argnums=(2, 3))


@pytest.mark.parametrize(("num_samples", "sizes"), [(10, [4, 4, 2]), (26, [4] * 6 + [2]), (40, [26])])
@pytest.mark.quick_cases(1)
def test_every_sample_of_the_pool_is_drawn_at_most_once_and_padding_never(num_samples, sizes):
    actual = DRAW(KEY, DATA, num_samples, 4 if num_samples < 40 else 100)
    batches = positions(actual)
    assert [len(batch) for batch in batches if batch] == sizes
    drawn = [position for batch in batches for position in batch]
    assert len(set(drawn)) == len(drawn) == min(num_samples, 26)
    assert actual.weights.sum() == len(drawn)
    np.testing.assert_array_equal(
        actual.labels.reshape(-1)[actual.weights.reshape(-1) > 0], DATA.labels[jnp.array(drawn)]
    )


def test_the_same_key_and_data_give_the_same_samples_and_all_are_equally_likely():
    np.testing.assert_array_equal(DRAW(KEY, DATA, 10, 4).inputs, DRAW(KEY, DATA, 10, 4).inputs)
    held = DATA._replace(inputs=jnp.arange(26, dtype=jnp.float32))
    keys = jax.vmap(jax.random.key)(jnp.arange(600))
    drawn = jax.jit(jax.vmap(lambda key: calibration_set(key, held, 10, 10).inputs))(keys)
    counts = np.bincount(np.asarray(drawn, int).reshape(-1), minlength=26)
    rate = 10 / 26
    assert np.all(np.abs(counts - rate * 600) <= 4 * np.sqrt(rate * (1 - rate) * 600))


def by_hand(params, calibration, inputs, labels):
    """Mean loss in float64, statistics being the weighted mean over batches of each batch's."""
    layers = params["dense"] | params["norm"] | {"shift": params["norm"]["bias"], "bias": params["dense"]["bias"]}
    names = ("kernel", "bias", "scale", "shift")
    kernel, bias, scale, shift = (np.asarray(layers[name], np.float64) for name in names)
    weights = np.asarray(calibration.weights)
    mean = var = np.zeros(3)
    for batch, weight in zip(np.asarray(calibration.inputs, np.float64), weights, strict=True):
        outputs = (batch @ kernel + bias)[weight > 0]
        share = weight.sum() / weights.sum()
        mean, var = mean + share * outputs.mean(axis=0), var + share * outputs.var(axis=0)
    logits = (np.asarray(inputs, np.float64) @ kernel + bias - mean) / np.sqrt(var + 1e-5) * scale + shift
    return np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels])


def test_statistics_are_calibrated_for_each_model_by_itself():
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(TASK.init, KEY)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=(2, *leaf.shape)), jnp.float32), shapes)
    assert TASK.init_state is not None
    variables = core.Variables(params, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), TASK.init_state()))
    calibration, test = DRAW(KEY, DATA, 10, 4), evaluation_set(TEST_INPUTS, TEST_LABELS, 4)
    scores = jax.jit(calibrated_scores(TASK, test, 10).compute)(variables, (test, calibration))
    line = flatten_scores(jax.device_get(scores))
    of = [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in (0, 1)]
    nodes = [by_hand(node, calibration, TEST_INPUTS, TEST_LABELS) for node in of]
    average = by_hand(jax.tree.map(lambda leaf: leaf.mean(axis=0), params), calibration, TEST_INPUTS, TEST_LABELS)
    np.testing.assert_allclose(line["test_loss"], np.mean(nodes), rtol=1e-5)
    np.testing.assert_allclose(line["test_loss_worst_node"], max(nodes), rtol=1e-5)
    np.testing.assert_allclose(line["test_loss_average_model"], average, rtol=1e-5)


class State(NamedTuple):
    params: Any
    model_state: Any
    round_index: jax.Array


def growing():
    """One model, whose parameters grow in every round; no training, for nothing but evaluation is looked at."""

    def init(key, data):
        params = TASK.init(core.purpose_key(key, core.Purpose.INIT))
        assert TASK.init_state is not None
        return State(params, TASK.init_state(), jnp.int32(0))

    def update(state, data, draws):
        params = jax.tree.map(lambda leaf: 1.1 * leaf + 0.01, state.params)
        return State(params, state.model_state, state.round_index + 1), core.Info(loss=jnp.zeros((), jnp.float32))

    def node_params(state):
        return jax.tree.map(lambda leaf: leaf[None], core.Variables(state.params, state.model_state))

    return core.algorithm(init, lambda key, state, data: (), update, node_params)


ALGORITHM = growing()
TEST = evaluation_set(TEST_INPUTS, TEST_LABELS, 4)
A = training.Case(lambda numbers: ALGORITHM, TASK, TEST, lambda seed: DATA, (0, 1), 3, evaluate_every=2)


def train_growing(out, cases, resume=False):
    run = training.open_run(out, {}, experiment="growing", resume=resume)
    training.train(cases, run=run, quiet=True)
    return run


@pytest.mark.slow
def test_a_run_evaluates_with_samples_drawn_once_per_seed(tmp_path):
    cases = {"A": A._replace(measures={"test": calibrated_scores(TASK, TEST, 10)})}
    run = train_growing(tmp_path, cases)
    lines = run.read_metrics()
    drawn = {seed: calibration_set(jax.random.key(seed), DATA, 10, 4) for seed in (0, 1)}
    assert positions(drawn[0]) != positions(drawn[1])
    for seed in (0, 1):
        last = [line for line in lines if line["seed"] == seed][-1]
        rounds, state = training.restore_state(run, "A", cases["A"], seed)
        assert (rounds, last["round"]) == (3, 3)
        np.testing.assert_array_equal(state.model_state["norm"]["mean"], np.zeros(3))  # none is tracked
        expected = by_hand(state.params, drawn[seed], TEST_INPUTS, TEST_LABELS)
        np.testing.assert_allclose(last["test_loss"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "num_samples", "message"),
    [
        (TASK, 0, "calibration_samples: must be an integer of at least 1"),
        (classification(sequential([("dense", dense(6, 3))])), 5, "calibration_samples: must be left out without"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(task, num_samples, message):
    with pytest.raises(ArgumentError, match=message):
        calibrated_scores(task, TEST, num_samples)
