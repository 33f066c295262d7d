"""Metrics and gradient norm of the average model on training data, against a plain NumPy computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import run_bytes
from toy_problem import TASK, toy_case, train_toy

from jaxfl import core
from jaxfl.core import ArgumentError, Variables
from jaxfl.data.pool import some_samples
from jaxfl.models import classification, layers, sequential
from jaxfl.training import own_scores, stationarity


def squares(node_loop="vmap"):
    """Least squares: f(w) = |x . w - y|^2."""
    return core.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2, node_loop=node_loop)


def uneven():
    inputs = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    labels = np.arange(9, dtype=np.float32)
    return core.FederatedData(
        inputs=jnp.asarray(inputs),
        labels=jnp.asarray(labels),
        indices=jnp.asarray([[0, 1, 2, 3, 4], [5, 6, 0, 0, 0], [8, 7, 6, 0, 0]], jnp.int32),
        sizes=jnp.asarray([5, 2, 3], jnp.int32),
    )


def measured(measure, params, data):
    """Value of a measure at parameters."""
    return jax.jit(measure.compute)(params, measure.prepare(jax.random.key(0), data))


@pytest.mark.parametrize("node_loop", ["vmap", "map"])
def test_the_squared_norm_is_that_of_the_mean_gradient(node_loop):
    task, data = squares(node_loop), uneven()
    params = jnp.asarray([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]])
    actual = measured(stationarity(task, 100, at_nodes=True), params, data)
    w = np.asarray(params, np.float64).mean(axis=0)
    losses, gradients = [], []
    for row, size in zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True):
        x, y = (np.asarray(part, np.float64)[row[:size]] for part in (data.inputs, data.labels))
        losses.append(np.mean((x @ w - y) ** 2))
        gradients.append((2 * (x @ w - y)[:, None] * x).mean(axis=0))
    np.testing.assert_allclose(actual["train_loss_average_model"], np.mean(losses), rtol=1e-5)
    squared = np.sum(np.mean(gradients, axis=0) ** 2)
    np.testing.assert_allclose(actual["gradient_norm_squared_average_model"], squared, rtol=1e-5)
    one_by_one = [measured(stationarity(task, 100), params[i : i + 1], data) for i in range(3)]
    of_nodes = [one["gradient_norm_squared_average_model"] for one in one_by_one]
    np.testing.assert_allclose(actual["gradient_norm_squared"], np.mean(of_nodes), rtol=1e-5)
    assert "gradient_norm_squared" not in one_by_one[0]


def test_it_is_0_at_a_minimum():
    data = core.FederatedData(jnp.eye(2), jnp.ones(2), jnp.arange(2)[None], jnp.array([2]))
    actual = measured(stationarity(squares(), 5), jnp.ones((1, 2)), data)
    assert jax.tree.map(float, actual) == {
        "train_loss_average_model": 0.0,
        "gradient_norm_squared_average_model": 0.0,
    }


def test_model_state_is_held_fixed():
    task = classification(sequential([("norm", layers.batch_norm(2)), ("dense", layers.dense(2, 3))]))
    params = jax.vmap(task.init)(jax.random.split(jax.random.key(0), 3))
    state = {"norm": {"mean": jnp.arange(6.0).reshape(3, 2), "var": 1 + jnp.arange(6.0).reshape(3, 2)}}
    data = uneven()._replace(labels=jnp.arange(9, dtype=jnp.int32) % 3)
    samples = some_samples(data, 100)
    actual = measured(stationarity(task, 100), Variables(params, state), data)
    average_params, average_state = jax.tree.map(lambda leaf: leaf.mean(axis=0), (params, state))

    @jax.jit
    def by_hand(params):
        def loss(params):
            flat = [part.reshape(-1, *part.shape[2:]) for part in samples]
            losses = task.loss(Variables(params, average_state), flat[0], flat[1])
            return jnp.sum(losses * flat[2]) / 3

        value, gradient = jax.value_and_grad(loss)(params)
        return value, sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

    value, squared = by_hand(average_params)
    np.testing.assert_allclose(actual["train_loss_average_model"], value, rtol=1e-5)
    np.testing.assert_allclose(actual["gradient_norm_squared_average_model"], squared, rtol=1e-5)


@pytest.mark.parametrize(("most", "seen"), [(100, [[0, 1, 2, 3, 4], [5, 6], [8, 7, 6]]), (2, [[0, 2], [5, 6], [8, 7]])])
@pytest.mark.quick_cases(1)
def test_samples_are_evenly_spaced_and_padding_has_weight_0(most, seen):
    actual = some_samples(uneven(), most)
    np.testing.assert_allclose(actual.weights.sum(axis=1), 1.0, rtol=1e-6)
    for labels, weights, expected in zip(actual.labels, actual.weights, seen, strict=True):
        np.testing.assert_array_equal(labels[weights > 0], expected)
        np.testing.assert_allclose(weights[weights > 0], 1 / len(expected), rtol=1e-6)
    with pytest.raises(ArgumentError, match="most"):
        some_samples(uneven(), 0)


def test_a_run_writes_them_and_resumes_with_them(tmp_path):
    case = toy_case(num_rounds=4, evaluate_every=2, seeds=(0,), measures={"stationarity": stationarity(TASK, 3)})
    train_toy(tmp_path, {"A": case})
    lines = run_bytes(tmp_path).decode()
    assert lines.count("gradient_norm_squared_average_model") == lines.count("train_accuracy_average_model") == 3
    with pytest.raises(ArgumentError, match="measures"):
        train_toy(tmp_path, {"A": case._replace(measures={})}, resume=True)


@pytest.mark.parametrize("node_loop", ["vmap", "map"])
def test_own_scores_are_each_models_on_its_own_samples(node_loop):
    """The data of the measure take the place of the training data, seed by seed."""
    task, held = squares(node_loop), uneven()
    params = jnp.asarray([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]])
    measure = own_scores(task, lambda seed: held._replace(sizes=held.sizes - seed))
    assert measure.data is not None
    for seed in (0, 1):
        actual = jax.jit(measure.compute)(params, measure.prepare(jax.random.key(seed), measure.data(seed)))
        losses = []
        for w, row, size in zip(np.asarray(params), np.asarray(held.indices), np.asarray(held.sizes), strict=True):
            x, y = (np.asarray(part, np.float64)[row[: size - seed]] for part in (held.inputs, held.labels))
            losses.append(np.mean((x @ w - y) ** 2))
        expected = {"own_loss": np.mean(losses), "own_loss_worst_node": max(losses), "own_loss_spread": np.std(losses)}
        assert actual == pytest.approx(expected, rel=1e-5)
