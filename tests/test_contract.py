"""What every algorithm of the registry promises, row by row and with every kind of gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import irregular_graph, run, small_task, start, uneven_data

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.algorithms import REGISTRY
from jaxfl.gradients import fixed, mini_batch, poisson, saga, uniform

GRADIENTS = {
    "mini_batch": lambda: mini_batch(sampler=poisson(2), clip_norm=0.7),
    "saga dense": lambda: saga(sampler=uniform(2), table="dense", clip_norm=0.7, refresh_every=4),
    "saga factored": lambda: saga(sampler=fixed(2), table="factored", storage="bfloat16"),
}
CASES = [(name, gradient) for name, row in REGISTRY.items() if row.gradient for gradient in GRADIENTS]
KEY = jax.random.key(7)


class Problem(NamedTuple):
    row: object
    graph: graphs.Graph
    data: jaxfl.FederatedData

    def algorithm(self, gradient, graph=None, step_size=0.2, noise_std=0.02, task=None):
        noise = jaxfl.gaussian(noise_std) if self.row.private and noise_std is not None else None
        return self.row.constructor(
            small_task() if task is None else task,
            graph=self.graph if graph is None else graph,
            gradient=gradient,
            noise=noise,
            step_size=step_size,
        )


def problem(name):
    row = REGISTRY[name]
    graph = irregular_graph() if row.mixing == "column" else graphs.ring(5)
    return Problem(row, graph, uneven_data())


def assert_same(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if tolerance and jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, **tolerance)
        else:
            np.testing.assert_array_equal(x, y)


def one_by_one(algorithm, state, data, rounds):
    step, infos = jax.jit(algorithm.round), []
    for _ in range(rounds):
        state, info = step(KEY, state, data)
        infos.append(info)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *infos), step


@pytest.mark.parametrize(("name", "gradient"), CASES)
def test_rounds(name, gradient):
    """Structure and dtypes stable; alone = scan = resumed, bit for bit; round = update after draw; no second compile."""
    p = problem(name)
    algorithm = p.algorithm(GRADIENTS[gradient]())
    first = start(algorithm, KEY, p.data)
    state, infos, step = one_by_one(algorithm, first, p.data, 6)
    assert step._cache_size() == 1
    for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(state), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)
    assert jax.tree.structure(first) == jax.tree.structure(state)
    scanned, scanned_infos = run(algorithm, KEY, p.data, 6)
    assert_same(state, scanned)
    assert_same(infos, scanned_infos)

    half, _, _ = one_by_one(algorithm, first, p.data, 3)
    stored = jax.tree.map(np.asarray, half)
    resumed, _, _ = one_by_one(algorithm, jax.tree.map(jnp.asarray, stored), p.data, 3)
    assert_same(state, resumed)

    draws = jax.jit(algorithm.draw)(KEY, half, p.data)
    assert_same(jax.jit(algorithm.update)(half, p.data, draws)[0], step(KEY, half, p.data)[0], rtol=1e-6, atol=1e-7)
    other = jax.jit(algorithm.draw)(KEY, state, p.data)
    differs = [
        np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (draws, other)), strict=True)
    ]
    assert any(differs), "two rounds never draw the same"


@pytest.mark.parametrize(("name", "gradient"), CASES)
def test_a_vmap_over_seeds_equals_a_loop(name, gradient):
    p = problem(name)
    algorithm = p.algorithm(GRADIENTS[gradient]())
    keys = jax.vmap(jax.random.key)(jnp.arange(2))

    def three_rounds(key):
        state = algorithm.init(key, p.data)
        return jax.lax.scan(lambda s, _: algorithm.round(key, s, p.data), state, None, length=3)

    together, alone = jax.jit(jax.vmap(three_rounds))(keys), jax.jit(three_rounds)
    for index in range(2):
        assert_same(jax.tree.map(lambda x, i=index: x[i], together), alone(keys[index]), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("name", "gradient"), CASES)
def test_relabelling_the_nodes_permutes_the_result(name, gradient):
    p, order = problem(name), np.array([3, 0, 4, 1, 2])
    algorithm = p.algorithm(GRADIENTS[gradient]())
    state, _ = run(algorithm, KEY, p.data, 2)
    draws = jax.jit(algorithm.draw)(KEY, state, p.data)

    def relabel(tree):
        return jax.tree.map(lambda leaf: leaf if leaf.ndim == 0 else leaf[order], tree)

    relabelled = p.data._replace(indices=p.data.indices[order], sizes=p.data.sizes[order])
    other = p.algorithm(GRADIENTS[gradient](), graph=graphs.permute(p.graph, order))
    expected = jax.jit(algorithm.update)(state, p.data, draws)
    found = jax.jit(other.update)(relabel(state), relabelled, relabel(draws))
    assert_same(relabel(expected), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "gradient"), CASES[:2] + CASES[3:4])
def test_the_derivative_by_the_step_size_equals_a_finite_difference(name, gradient):
    p, task = problem(name), small_task()
    options = {"mini_batch": mini_batch(sampler=fixed(2)), "saga dense": saga(sampler=fixed(2), refresh_every=2)}

    def loss_after_three_rounds(step_size):
        algorithm = p.algorithm(options[gradient], step_size=step_size, task=task)
        state = algorithm.init(KEY, p.data)
        for _ in range(3):
            state, _ = algorithm.round(KEY, state, p.data)
        one = jax.tree.map(lambda leaf: leaf[0], algorithm.node_params(state))
        return task.loss(one, p.data.inputs, p.data.labels).mean()

    value, slope = jax.jit(jax.value_and_grad(loss_after_three_rounds))(jnp.float32(0.5))
    f, h = jax.jit(loss_after_three_rounds), 0.02
    # Fourth-order central difference: its own error is far below float32 rounding of the loss over h.
    differences = [float(f(jnp.float32(0.5 + s * h)) - f(jnp.float32(0.5 - s * h))) for s in (1, 2)]
    expected = (8 * differences[0] - differences[1]) / (12 * h)
    assert abs(expected) > 1e-2
    np.testing.assert_allclose(slope, expected, rtol=1e-3)
    assert np.isfinite(float(value))


@pytest.mark.parametrize(("name", "gradient"), CASES)
def test_no_noise_and_no_clipping_give_the_plain_method(name, gradient):
    kinds = {
        "mini_batch": lambda **o: mini_batch(sampler=fixed(2), **o),
        "saga dense": lambda **o: saga(sampler=fixed(2), **o),
        "saga factored": lambda **o: saga(sampler=fixed(2), table="factored", **o),
    }
    p = problem(name)
    plain, _ = run(p.algorithm(kinds[gradient](), noise_std=None), KEY, p.data, 5)
    off, info = run(p.algorithm(kinds[gradient](clip_norm=1e9), noise_std=0.0), KEY, p.data, 5)
    assert_same(plain.params, off.params, rtol=1e-5, atol=1e-6)
    assert float(info.clipped_fraction.max()) == 0.0
    noisy, _ = run(p.algorithm(kinds[gradient](clip_norm=0.1), noise_std=0.1), KEY, p.data, 5)
    assert np.abs(np.asarray(noisy.params["dense_1"]["kernel"] - plain.params["dense_1"]["kernel"])).max() > 1e-2


@pytest.mark.parametrize("name", [name for name, row in REGISTRY.items() if row.gradient])
def test_one_node_or_a_complete_graph_with_equal_data_is_gradient_descent(name):
    """n = 1, and n nodes that hold the same data on a complete graph, follow full-batch gradient descent."""
    task, count, row = small_task(), 6, REGISTRY[name]
    pool = uneven_data(sizes=(count,))
    params = None
    for nodes in (1, 4):
        data = pool._replace(indices=jnp.tile(pool.indices, (nodes, 1)), sizes=jnp.full(nodes, count, jnp.int32))
        algorithm = row.constructor(
            task, graph=graphs.complete(nodes), gradient=mini_batch(sampler=fixed(count)), step_size=0.3
        )
        state, _ = run(algorithm, KEY, data, 10)
        if params is None:
            params = jax.tree.map(lambda leaf: leaf[0], start(algorithm, KEY, data).params)
            loss = jax.jit(jax.grad(lambda p: task.loss(p, pool.inputs, pool.labels).mean()))
            for _ in range(10):
                params = jax.tree.map(lambda x, g: x - 0.3 * g, params, loss(params))
        expected = jax.tree.map(lambda leaf, n=nodes: jnp.stack([leaf] * n), params)
        assert_same(algorithm.node_params(state), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "gradient"), CASES)
def test_invariants_in_every_round(name, gradient):
    """The push-sum weights sum to n; mixing keeps the sum of the parameters, so one round moves it by the gradients."""
    p, step_size = problem(name), 0.2
    mixing_only = p.algorithm(GRADIENTS[gradient](), noise_std=None, step_size=1e-30)
    algorithm = p.algorithm(GRADIENTS[gradient](), noise_std=None, step_size=step_size)

    def total(params):
        return jnp.concatenate([leaf.sum(axis=0).reshape(-1) for leaf in jax.tree.leaves(params)])

    def step(state, _):
        new, info = algorithm.round(KEY, state, p.data)
        kept, _ = mixing_only.round(KEY, state, p.data)
        weight = getattr(new, "push_sum_weight", jnp.ones(5))
        return new, (weight, info, total(kept.params) - total(state.params), total(new.params) - total(state.params))

    rounds = jax.jit(lambda state: jax.lax.scan(step, state, None, length=30))
    _, (weights, infos, leaked, moved) = rounds(start(algorithm, KEY, p.data))
    np.testing.assert_allclose(leaked, 0.0, atol=1e-5)
    # No gradient can move the sum by more than step_size times the nodes' gradient norms, and some do move it.
    bound = step_size * np.asarray(infos.gradient_norm).sum(axis=1)
    distance = np.linalg.norm(np.asarray(moved), axis=1)
    assert np.all(distance <= bound + 1e-5)
    assert distance.max() > 1e-2
    np.testing.assert_allclose(np.asarray(weights).sum(axis=1), 5.0, rtol=1e-6)
    if p.row.mixing == "column":
        assert np.ptp(np.asarray(weights)) > 0.1
    assert int(infos.batch_overflow.sum()) == int(infos.prefetch_misses.sum()) == 0
    assert np.all(np.asarray(infos.bits_sent) >= 0)
    assert infos.gradient_evaluations.dtype == jnp.int32


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_constructor_refuses(name):
    p = problem(name)
    unbalanced = graphs.from_matrix(np.array([[0.9, 0.1], [0.2, 0.9]]))
    apart = graphs.from_matrix(np.eye(2))
    for graph, message in ((unbalanced, "column|doubly|row"), (apart, "strongly connected|reach")):
        with pytest.raises(ArgumentError, match=message):
            p.row.constructor(small_task(), graph=graph, step_size=0.1)
    with pytest.raises(ArgumentError, match="^step_size: must be positive"):
        p.algorithm(mini_batch(), step_size=0.0)
    with pytest.raises(ArgumentError, match="^noise: must be a scalar or hold one number per node"):
        p.algorithm(mini_batch(), noise_std=np.ones(3))
    with pytest.raises(ArgumentError, match="^data: .*the graph has 5 nodes and the data 2"):
        p.algorithm(mini_batch()).init(KEY, uneven_data(sizes=(3, 4)))
    with pytest.raises(ArgumentError, match="^batch_size: "):
        p.algorithm(mini_batch(sampler=fixed(5))).init(KEY, p.data)
