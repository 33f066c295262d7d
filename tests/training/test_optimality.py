"""Distance from a known optimum and regret, against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_stationarity import measured, squares, uneven
from toy_problem import TASK, toy_case, train_toy

import jaxfl
from jaxfl.core import ArgumentError
from jaxfl.training import optimality, regret


def nodes_of(data):
    """Each node's inputs and labels in float64."""
    for row, size in zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True):
        yield tuple(np.asarray(part, np.float64)[row[:size]] for part in (data.inputs, data.labels))


def best_of(data):
    """The minimum of the mean over nodes of mean squared errors."""
    nodes = [*nodes_of(data)]
    return np.linalg.solve(sum(x.T @ x / len(y) for x, y in nodes), sum(x.T @ y / len(y) for x, y in nodes))


def objective(data, w):
    return np.mean([np.mean((x @ w - y) ** 2) for x, y in nodes_of(data)])


@pytest.mark.parametrize("node_loop", ["vmap", "map"])
def test_follows_its_definition(node_loop):
    task, data = squares(node_loop), uneven()
    best, params = best_of(data), np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]])
    actual = measured(optimality(task, np.float32(best)), jnp.float32(params), data)
    mean = params.mean(axis=0)
    assert jax.tree.map(float, actual) == pytest.approx(
        {
            "optimum_loss": objective(data, best),
            "excess_loss_average_model": objective(data, mean) - objective(data, best),
            "optimum_distance": np.mean(np.sum((params - best) ** 2, axis=1)),
            "optimum_distance_average_model": np.sum((mean - best) ** 2),
        },
        rel=1e-5,
    )
    at_best = measured(optimality(task, np.float32(best)), jnp.float32(best)[None], data)
    assert at_best.pop("optimum_loss") > 1
    assert jax.tree.map(float, at_best) == dict.fromkeys(at_best, 0.0)


def test_gradient_descent_comes_as_near_as_the_optimum_says():
    data = uneven()
    clients = jaxfl.local_steps(1, batch_size=5, optimizer=optax.sgd(0.1), weighting="uniform")
    learner = jaxfl.fed_avg(squares(), clients=clients, num_active=3)
    key = jax.random.key(0)
    state, _ = jax.lax.scan(lambda s, _: learner.round(key, s, data), learner.init(key, data), length=300)
    numbers = measured(optimality(squares(), np.float32(best_of(data))), learner.node_params(state), data)
    assert numbers["optimum_distance_average_model"] < 1e-6
    assert numbers["excess_loss_average_model"] < 1e-6


def test_an_optimum_of_another_form_is_refused():
    for optimum in (np.zeros(3, np.float32), np.zeros(2, int), {"w": np.zeros(2, np.float32)}):
        with pytest.raises(ArgumentError, match="optimum: must have the form"):
            optimality(squares(), optimum)


def test_regret_does_not_depend_on_evaluations(tmp_path):
    measures = {"optimality": optimality(TASK, TASK.init(jax.random.key(7)))}
    curves = {}
    for every in (1, 3):
        case = toy_case(num_rounds=6, evaluate_every=every, seeds=(0, 1), measures=measures)
        train_toy(tmp_path / str(every), {"A": case})
        lines = jaxfl.training.read_run(tmp_path / str(every)).read_metrics()
        curves[every] = regret(lines)
        assert set(curves[every]) == {("A", 0), ("A", 1)}
    rounds, values = curves[1]["A", 1]
    assert rounds.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(values[2::3], curves[3]["A", 1][1], rtol=1e-12)
    first = jaxfl.training.read_run(tmp_path / "1").read_metrics()
    losses = [line["train_loss"] - line["optimum_loss"] for line in first if line["seed"] == 1 and line["round"] > 0]
    np.testing.assert_allclose(values, np.cumsum(losses) / np.arange(1, 7), rtol=1e-12)
