"""Evaluation against a plain NumPy computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_problem import NUM_NODES, toy_algorithm, toy_data, toy_task

from jaxfl import core, models
from jaxfl.core import ArgumentError
from jaxfl.models.layers import batch_norm
from jaxfl.training import evaluation_set
from jaxfl.training import test_scores as scores_of
from jaxfl.training.measures import flatten_scores


def _state(task):
    data, inputs, labels = toy_data()
    algorithm = toy_algorithm(task)
    state = algorithm.init(jax.random.key(1), data)
    # Nodes must differ, or worst node and average model would prove nothing.
    noise = np.random.default_rng(0).normal(size=state.params["kernel"].shape).astype(np.float32)
    params = {**state.params, "kernel": state.params["kernel"] + noise}
    return state._replace(params=params), inputs, labels


def scored(task, params, test):
    """The standard evaluation."""
    measure = scores_of(task, test)
    return jax.jit(measure.compute)(params, measure.prepare(jax.random.key(0), toy_data()[0]))


def _by_hand(params, inputs, labels):
    """(loss, accuracy) of one model in float64."""
    logits = inputs.astype(np.float64) @ np.asarray(params["kernel"], np.float64) + np.asarray(params["bias"])
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -log_probabilities[np.arange(len(labels)), labels].mean(), (logits.argmax(1) == labels).mean()


@pytest.mark.parametrize(("batch_size", "node_loop"), [(8, "vmap"), (37, "map"), (1000, "chunk:3")])
@pytest.mark.quick_cases(1)
def test_scores_are_those_of_each_node_and_of_the_average_model(batch_size, node_loop):
    task = toy_task(node_loop)
    state, inputs, labels = _state(task)
    assert len(inputs) % 8 != 0
    scores = scored(task, state.params, evaluation_set(inputs, labels, batch_size))
    line = flatten_scores(jax.device_get(scores))
    nodes = [_by_hand(jax.tree.map(lambda leaf, i=i: leaf[i], state.params), inputs, labels) for i in range(NUM_NODES)]
    losses, accuracies = np.array(nodes).T
    average = _by_hand(jax.tree.map(lambda leaf: np.asarray(leaf).mean(0), state.params), inputs, labels)
    assert len(set(accuracies)) > 1
    expected = {
        "test_accuracy": accuracies.mean(),
        "test_accuracy_worst_node": accuracies.min(),
        "test_accuracy_average_model": average[1],
        "test_loss": losses.mean(),
        "test_loss_worst_node": losses.max(),
        "test_loss_average_model": average[0],
    }
    assert list(line) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(line[name], value, rtol=1e-5, err_msg=name)
    assert line["test_accuracy_average_model"] == average[1]  # a ratio of counts, exact


def test_model_state_is_averaged_like_parameters_and_evaluates():
    task = models.classification(models.sequential([("norm", batch_norm(3))]))
    params = {"norm": {"scale": jnp.ones((2, 3)), "bias": jnp.arange(6.0).reshape(2, 3)}}
    state = {"norm": {"mean": jnp.arange(6.0).reshape(2, 3), "var": jnp.arange(1.0, 7.0).reshape(2, 3)}}
    inputs = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
    labels = (np.arange(11) % 3).astype(np.int32)
    variables = core.Variables(params, state)
    scores = scored(task, variables, evaluation_set(inputs, labels, 4))
    line = flatten_scores(jax.device_get(scores))

    def loss(scale, bias, mean, var):
        logits = (inputs - mean) / np.sqrt(var + 1e-5) * scale + bias
        return np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(11), labels])

    arrays = [np.asarray(leaf, np.float64) for leaf in (*params["norm"].values(), *state["norm"].values())]
    nodes = [loss(*(leaf[node] for leaf in arrays)) for node in range(2)]
    np.testing.assert_allclose(line["test_loss"], np.mean(nodes), rtol=1e-5)
    np.testing.assert_allclose(line["test_loss_worst_node"], max(nodes), rtol=1e-5)
    np.testing.assert_allclose(
        line["test_loss_average_model"], loss(*(leaf.mean(axis=0) for leaf in arrays)), rtol=1e-5
    )


def test_the_filling_of_the_last_batch_never_counts():
    # Even a metric that is infinite on the filling (here a copy of the last sample, whose label is 1) must not show.
    task = core.from_functions(
        lambda key: jnp.zeros(()), lambda w, x, y: jnp.where(y > 0, jnp.float32(100.0), jnp.float32(1.0))
    )
    inputs, labels = np.zeros((5, 1), np.float32), np.array([0, 0, 0, 0, 1], np.int32)
    scores = scored(task, jnp.zeros(2), evaluation_set(inputs, labels, 4))
    line = flatten_scores(jax.device_get(scores))
    assert line["test_loss"] == pytest.approx((4 * 1 + 100) / 5)
    assert line["test_loss_average_model"] == pytest.approx((4 * 1 + 100) / 5)


def test_memory_is_bounded_by_the_batch():
    task = toy_task()
    state, _, _ = _state(task)
    inputs, labels = np.zeros((20_000, 5), np.float32), np.zeros(20_000, np.int32)

    def temporary_bytes(batch_size):
        test = evaluation_set(inputs, labels, batch_size)
        lowered = jax.jit(scores_of(task, test).compute).lower(state.params, test)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes(100) < 0.1 * temporary_bytes(20_000)


def test_images_stay_bytes():
    assert evaluation_set(np.zeros((3, 2, 2), np.uint8), np.zeros(3, np.int32)).inputs.dtype == jnp.uint8


def test_unusable_test_sets_are_refused():
    with pytest.raises(ArgumentError, match="test_inputs: must hold at least one sample"):
        evaluation_set(np.zeros((0, 3)), np.zeros(0))
    with pytest.raises(ArgumentError, match="got 2 labels for 3 inputs"):
        evaluation_set(np.zeros((3, 3)), np.zeros(2))
    with pytest.raises(ArgumentError, match="batch_size"):
        evaluation_set(np.zeros((3, 3)), np.zeros(3), batch_size=0)
