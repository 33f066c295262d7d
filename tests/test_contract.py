"""What every algorithm of the registry promises, row by row and with every kind of gradient."""

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import irregular_graph, run, small_task, start, uneven_data

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.algorithms import REGISTRY
from jaxfl.algorithms.registry import Row
from jaxfl.core import Purpose, purpose_key
from jaxfl.gradients import fixed, mini_batch, poisson, saga, uniform

KINDS = {
    "mini_batch": lambda **options: mini_batch(sampler=poisson(2), **options),
    "saga dense": lambda **options: saga(sampler=uniform(2), table="dense", refresh_every=4, **options),
    "saga factored": lambda **options: saga(sampler=fixed(2), table="factored", storage="bfloat16", **options),
}
TAKES_GRADIENTS = [name for name, row in REGISTRY.items() if row.gradient]
# Every kind with the first algorithm, the cheapest and the most intricate with the others: compiling is what costs.
CASES = [(name, kind) for name in TAKES_GRADIENTS for kind in KINDS if name == "push_sum" or kind != "saga dense"]
KEY = jax.random.key(7)


class Problem(NamedTuple):
    """One row of the registry on a small problem that fits it."""

    row: Row
    graph: graphs.Graph
    data: jaxfl.FederatedData

    def algorithm(self, gradient, *, graph=None, step_size: Any = 0.2, noise_std: Any = 0.02, task=None):
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


class Case:
    """A problem with one kind of gradient, its functions compiled once for all tests."""

    def __init__(self, name, kind):
        self.problem, self.kind = problem(name), kind
        self.data = self.problem.data
        self.algorithm = self.problem.algorithm(KINDS[kind](clip_norm=0.7))
        self.first = start(self.algorithm, KEY, self.data)
        self.traces = 0

        def counted(key, state, data):
            self.traces += 1  # runs when traced, not when called
            return self.algorithm.round(key, state, data)

        self.step, self.draw = jax.jit(counted), jax.jit(self.algorithm.draw)
        self.update = jax.jit(self.algorithm.update)

    def rounds(self, state, count):
        """`count` calls of the compiled round: the last state and the stacked infos."""
        infos = []
        for _ in range(count):
            state, info = self.step(KEY, state, self.data)
            infos.append(info)
        return state, jax.tree.map(lambda *leaves: np.stack(leaves), *infos)


case = functools.cache(Case)


def assert_same(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if tolerance and jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, **tolerance)
        else:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_structure_and_dtypes_are_stable_and_nothing_compiles_twice(name, kind):
    c = case(name, kind)
    state, infos = c.rounds(c.first, 6)
    assert c.traces == 1
    assert jax.tree.structure(c.first) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(c.first), jax.tree.leaves(state), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)
    assert int(state.round_index) == 6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(infos))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_round_is_a_function_of_key_and_round(name, kind):
    """Alone, in a scan and resumed from stored arrays: the same bits. Another round or key: other numbers, of every
    purpose."""
    c = case(name, kind)
    state, infos = c.rounds(c.first, 6)
    scanned, scanned_infos = run(c.algorithm, KEY, c.data, 6, state=c.first)
    # Known gap, see BUILD_NOTES.md: fully optimized, the dense table is off by an ulp between the two programs.
    optimized = os.environ.get("JAXFL_TESTS_OPTIMIZED") == "1" and kind == "saga dense"
    assert_same(state, scanned, **({"rtol": 1e-5, "atol": 1e-6} if optimized else {}))
    assert_same(infos, scanned_infos, **({"rtol": 1e-4, "atol": 1e-6} if optimized else {}))
    half, _ = c.rounds(c.first, 3)
    stored = jax.tree.map(np.asarray, half)
    assert_same(state, c.rounds(jax.tree.map(jnp.asarray, stored), 3)[0])
    in_scan = jax.jit(lambda s: jax.lax.scan(lambda s, _: (s, c.algorithm.draw(KEY, s, c.data)), s, length=2)[1])(half)
    draws, later = c.draw(KEY, half, c.data), c.draw(KEY, state, c.data)
    assert_same(draws, jax.tree.map(lambda leaf: leaf[1], in_scan))
    elsewhere = c.draw(jax.random.key(8), half, c.data)
    for other in (later, elsewhere):
        for ours, theirs in zip(jax.tree.leaves(draws.noise), jax.tree.leaves(other.noise), strict=True):
            assert not np.isin(np.asarray(ours), np.asarray(theirs)).any(), "noise is used once"
        batches = (jax.tree.leaves(one.gradient)[0] for one in (draws, other))
        assert np.any(np.not_equal(*map(np.asarray, batches)))
    expected = jaxfl.gaussian(0.02).draw(purpose_key(KEY, Purpose.NOISE, jnp.int32(3)), half.params)
    assert_same(draws.noise, expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_round_is_update_after_draw(name, kind):
    c = case(name, kind)
    state, _ = c.rounds(c.first, 1)
    apart = c.update(state, c.data, c.draw(KEY, state, c.data))
    assert_same(apart, c.step(KEY, state, c.data), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_vmap_over_seeds_equals_a_loop(name, kind):
    c = case(name, kind)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    firsts = [start(c.algorithm, key, c.data) for key in keys]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *firsts)
    step = jax.jit(jax.vmap(c.algorithm.round, in_axes=(0, 0, None)))
    for _ in range(3):
        together, _ = step(keys, together, c.data)
    for index, state in enumerate(firsts):
        for _ in range(3):
            state, _ = c.step(keys[index], state, c.data)
        assert_same(jax.tree.map(lambda x, i=index: x[i], together), state, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_relabelling_the_nodes_permutes_the_result(name, kind):
    c, order = case(name, kind), np.array([3, 0, 4, 1, 2])
    state, _ = c.rounds(c.first, 2)
    draws = c.draw(KEY, state, c.data)

    def relabel(tree):
        return jax.tree.map(lambda leaf: leaf if leaf.ndim == 0 else leaf[order], tree)

    data = c.data._replace(indices=c.data.indices[order], sizes=c.data.sizes[order])
    other = c.problem.algorithm(KINDS[kind](clip_norm=0.7), graph=graphs.permute(c.problem.graph, order))
    found = jax.jit(other.update)(relabel(state), data, relabel(draws))
    assert_same(relabel(c.update(state, c.data, draws)), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [(name, "mini_batch") for name in TAKES_GRADIENTS] + CASES[1:2])
def test_the_derivative_by_the_step_size_equals_a_finite_difference(name, kind):
    p, task = problem(name), small_task()

    def loss_after_three_rounds(step_size):
        algorithm = p.algorithm(KINDS[kind](), step_size=step_size, task=task)
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


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_noise_and_no_clipping_give_the_plain_method(name, kind):
    """One round, same state and batches: noise 0 and a huge clip norm change nothing, small ones do."""
    c = case(name, kind)
    state, _ = c.rounds(c.first, 2)
    draws = c.draw(KEY, state, c.data)
    silent = draws._replace(noise=jax.tree.map(jnp.zeros_like, draws.noise))
    plain = c.problem.algorithm(KINDS[kind](), noise_std=None)
    off = c.problem.algorithm(KINDS[kind](clip_norm=1e9), noise_std=0.0)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(off.draw(KEY, state, c.data).noise))
    expected, _ = jax.jit(plain.update)(state, c.data, draws._replace(noise=None))
    found, info = jax.jit(off.update)(state, c.data, silent)
    assert_same(expected.params, found.params, rtol=1e-5, atol=1e-6)
    assert float(info.clipped_fraction.max()) == 0.0
    clipped, clipped_info = c.update(state, c.data, silent)
    noisy, _ = c.update(state, c.data, draws)
    assert float(clipped_info.clipped_fraction.max()) > 0.0
    for other in (clipped, noisy):
        moved = [
            np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (other.params, expected.params)), strict=True)
        ]
        assert max(moved) > 1e-3


@pytest.mark.parametrize("name", TAKES_GRADIENTS)
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


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_invariants_in_every_round(name, kind):
    """The push-sum weights sum to n, and mixing leaks nothing: the sum of x moves by step size times noisy g."""
    c, step_size = case(name, kind), 0.2
    probe = c.problem.algorithm(KINDS[kind](clip_norm=0.7), step_size=1.0)
    probe_update = jax.jit(probe.update)

    def total(params):
        return np.concatenate([np.asarray(leaf, np.float64).sum(0).reshape(-1) for leaf in jax.tree.leaves(params)])

    state, largest = c.first, 0.0
    for _ in range(8):
        draws = c.draw(KEY, state, c.data)
        new, info = c.update(state, c.data, draws)
        moved, unit = (total(s.params) - total(state.params) for s in (new, probe_update(state, c.data, draws)[0]))
        np.testing.assert_allclose(moved, step_size * unit, atol=2e-5)
        largest = max(largest, np.abs(moved).max())
        np.testing.assert_allclose(getattr(new, "push_sum_weight", jnp.ones(5)).sum(), 5.0, rtol=1e-6)
        assert int(info.batch_overflow.sum()) == int(info.prefetch_misses.sum()) == 0
        assert np.all(np.asarray(info.bits_sent) >= 0)
        state = new
    assert largest > 1e-2
    if c.problem.row.mixing == "column":
        assert np.ptp(np.asarray(state.push_sum_weight)) > 0.1, "the weights must move for this test to mean something"


UNFIT = {  # row stochastic where columns must sum to 1, column stochastic where both must
    "column": np.array([[0.9, 0.1], [0.2, 0.8]]),
    "doubly": np.array([[0.9, 0.2], [0.1, 0.8]]),
}


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_constructor_refuses(name):
    p = problem(name)
    unfit = graphs.from_matrix(UNFIT[p.row.mixing])
    apart = graphs.from_matrix(np.eye(2))
    for graph, message in ((unfit, "column|doubly"), (apart, "strongly connected")):
        with pytest.raises(ArgumentError, match=message):
            p.row.constructor(small_task(), graph=graph, step_size=0.1)
    with pytest.raises(ArgumentError, match=r"^step_size: must be positive"):
        p.algorithm(mini_batch(), step_size=0.0)
    with pytest.raises(ArgumentError, match=r"^step_size: must be a single number; got shape \(5,\)"):
        p.algorithm(mini_batch(), step_size=jnp.ones(5))
    with pytest.raises(ArgumentError, match=r"^noise: must be a scalar or hold one number per node"):
        p.algorithm(mini_batch(), noise_std=np.ones(3))
    with pytest.raises(ArgumentError, match=r"^data: .*the graph has 5 nodes and the data 2"):
        p.algorithm(mini_batch()).init(KEY, uneven_data(sizes=(3, 4)))
    with pytest.raises(ArgumentError, match=r"^batch_size: "):
        p.algorithm(mini_batch(sampler=fixed(5))).init(KEY, p.data)
