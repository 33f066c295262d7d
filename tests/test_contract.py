"""What every algorithm of the registry promises, row by row and with every kind of gradient."""

import functools
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
from jaxfl.core.tree import squared_norm
from jaxfl.gradients import fixed, mini_batch, poisson, saga, uniform

KINDS = {
    "mini_batch": lambda **options: mini_batch(sampler=poisson(2), **options),
    "saga dense": lambda **options: saga(sampler=uniform(2), table="dense", refresh_every=4, **options),
    "saga factored": lambda **options: saga(sampler=fixed(2), table="factored", storage="bfloat16", **options),
}
# A special case runs the rounds of another row (a test below holds it to that), and what holds of these holds of it.
SPECIAL_CASES = [name for name, row in REGISTRY.items() if row.special_case_of]
TAKES_GRADIENTS = [name for name, row in REGISTRY.items() if row.gradient and name not in SPECIAL_CASES]
# Every kind with the first algorithm, the cheapest and the most intricate with the others: compiling is what costs.
CASES = [
    (name, kind)
    for name in TAKES_GRADIENTS
    for kind in KINDS
    if kind == "mini_batch"
    or (REGISTRY[name].stateful_gradient and (name == TAKES_GRADIENTS[0] or kind != "saga dense"))
]
KEY = jax.random.key(7)
CLIP_NORM, STEP_SIZE = 0.7, 0.2


class Problem(NamedTuple):
    """One row of the registry on a small problem that fits it."""

    row: Row
    graph: graphs.Graph
    data: jaxfl.FederatedData

    def algorithm(self, gradient, *, graph=None, step_size: Any = STEP_SIZE, noise_std: Any = 0.02, task=None):
        noise = jaxfl.gaussian(noise_std) if self.row.private and noise_std is not None else None
        return self.row.constructor(
            small_task() if task is None else task,
            graph=self.graph if graph is None else graph,
            gradient=gradient,
            noise=noise,
            step_size=step_size,
            **({} if self.row.synchronous else {"max_delay": 6}),
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
        self.algorithm = self.problem.algorithm(KINDS[kind](clip_norm=CLIP_NORM))
        self.first = start(self.algorithm, KEY, self.data)
        self.traces = 0

        def counted(key, state, data):
            self.traces += 1  # runs when traced, not when called
            return self.algorithm.round(key, state, data)

        def tuned(state, data, draws, clip_norm, step_size):
            tuned = self.problem.algorithm(KINDS[kind](clip_norm=clip_norm), step_size=step_size)
            return tuned.update(state, data, draws)

        self.step, self.draw, self.tuned = jax.jit(counted), jax.jit(self.algorithm.draw), jax.jit(tuned)

    def update(self, state, draws, *, clip_norm=CLIP_NORM, step_size=STEP_SIZE):
        """One update; all clip norms and step sizes share one compiled program."""
        return self.tuned(state, self.data, draws, jnp.float32(clip_norm), jnp.float32(step_size))

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
    assert_same(state, scanned)
    assert_same(infos, scanned_infos)
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
        for ours, theirs in zip(draws._replace(noise=None), other._replace(noise=None), strict=True):
            assert ours is None or np.any(
                np.not_equal(*(np.asarray(jax.tree.leaves(one)[0]) for one in (ours, theirs)))
            )
    expected = jaxfl.gaussian(0.02).draw(purpose_key(KEY, Purpose.NOISE, jnp.int32(3)), half.params)
    assert_same(draws.noise, expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_round_is_update_after_draw(name, kind):
    c = case(name, kind)
    state, _ = c.rounds(c.first, 1)
    apart = c.update(state, c.draw(KEY, state, c.data))
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
    new_state, info = c.update(state, draws)
    if c.problem.row.synchronous:
        other = c.problem.algorithm(KINDS[kind](clip_norm=CLIP_NORM), graph=graphs.permute(c.problem.graph, order))
        found = jax.jit(other.update)(relabel(state), data, relabel(draws))
        expected = relabel(new_state)
    else:
        # Events are numbered by time; what is relabelled is the nodes they name. The graph is met in `draw` alone.
        names = jnp.asarray(
            np.append(np.argsort(order), -1), jnp.int32
        )  # new number of each old one, and of -1, nobody
        renamed = draws._replace(node=names[draws.node], neighbor=names[draws.neighbor])
        before, expected = (
            one._replace(params=relabel(one.params), log=one.log._replace(nodes=names[one.log.nodes]))
            for one in (state, new_state)
        )
        hyper_parameters = jnp.float32(CLIP_NORM), jnp.float32(STEP_SIZE)
        found = c.tuned(before, data, renamed, *hyper_parameters)
    assert_same((expected, relabel(info)), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [(name, "mini_batch") for name in TAKES_GRADIENTS] + CASES[1:2])
def test_the_derivative_by_the_step_size_equals_a_finite_difference(name, kind):
    p, task = problem(name), small_task()

    def moved_in_three_rounds(step_size):
        """Squared distance of all nodes from their start, whose slope is never small."""
        algorithm = p.algorithm(KINDS[kind](), step_size=step_size, task=task)
        first = algorithm.init(KEY, p.data)
        last, _ = jax.lax.scan(lambda state, _: (algorithm.round(KEY, state, p.data)[0], None), first, length=3)
        old, new = algorithm.node_params(first), algorithm.node_params(last)
        return squared_norm(jax.tree.map(jnp.subtract, new, old)).sum()

    f, h = jax.jit(jax.value_and_grad(moved_in_three_rounds)), 0.02
    value, slope = f(jnp.float32(0.5))
    # Fourth-order central difference: its own error is far below float32 rounding of the distance over h.
    differences = [float(f(jnp.float32(0.5 + s * h))[0] - f(jnp.float32(0.5 - s * h))[0]) for s in (1, 2)]
    expected = (8 * differences[0] - differences[1]) / (12 * h)
    assert abs(expected) > 1
    np.testing.assert_allclose(slope, expected, rtol=1e-4)
    assert np.isfinite(float(value))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_noise_and_no_clipping_give_the_plain_method(name, kind):
    """One round, same state and batches: noise 0 and a huge clip norm change nothing, small ones do."""
    c = case(name, kind)
    state, _ = c.rounds(c.first, 2)
    draws = c.draw(KEY, state, c.data)
    silent = draws._replace(noise=jax.tree.map(jnp.zeros_like, draws.noise))
    plain = c.problem.algorithm(KINDS[kind](), noise_std=None)
    off = c.problem.algorithm(KINDS[kind](), noise_std=0.0)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(off.draw(KEY, state, c.data).noise))
    expected, _ = jax.jit(plain.update)(state, c.data, draws._replace(noise=None))
    found, info = c.update(state, silent, clip_norm=1e9)
    assert_same(expected.params, found.params, rtol=1e-5, atol=1e-6)
    assert float(info.clipped_fraction.max()) == 0.0
    clipped, clipped_info = c.update(state, silent)
    noisy, _ = c.update(state, draws)
    assert float(clipped_info.clipped_fraction.max()) > 0.0
    for other in (clipped, noisy):
        moved = [
            np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (other.params, expected.params)), strict=True)
        ]
        assert max(moved) > 1e-3


@pytest.mark.parametrize("name", TAKES_GRADIENTS)
def test_one_node_or_a_complete_graph_with_equal_data_is_gradient_descent(name):
    """n = 1, and n nodes that hold the same data on a complete graph, follow full-batch gradient descent. (Where nodes
    act one after the other, n = 1 without delay does.)"""
    task, count, row = small_task(), 6, REGISTRY[name]
    pool = uneven_data(sizes=(count,))
    params = None
    for nodes in (1, 4) if row.synchronous else (1,):
        data = pool._replace(indices=jnp.tile(pool.indices, (nodes, 1)), sizes=jnp.full(nodes, count, jnp.int32))
        algorithm = row.constructor(
            task,
            graph=graphs.complete(nodes),
            gradient=mini_batch(sampler=fixed(count)),
            step_size=0.3,
            **({} if row.synchronous else {"max_delay": 0}),
        )
        first = start(algorithm, KEY, data)
        state, _ = run(algorithm, KEY, data, 10, state=first)
        if params is None:
            params = jax.tree.map(lambda leaf: leaf[0], first.params)
            loss = jax.jit(jax.grad(lambda p: task.loss(p, pool.inputs, pool.labels).mean()))
            for _ in range(10):
                params = jax.tree.map(lambda x, g: x - 0.3 * g, params, loss(params))
        expected = jax.tree.map(lambda leaf, n=nodes: jnp.stack([leaf] * n), params)
        assert_same(algorithm.node_params(state), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_invariants_in_every_round(name, kind):
    """The push-sum weights sum to n, and mixing leaks nothing: the sum of x moves by step size times noisy g.

    The events of a round depend on those before, so there the gradients are clipped away and the noise stays.
    """
    c = case(name, kind)
    synchronous = c.problem.row.synchronous
    clip_norm = CLIP_NORM if synchronous else 1e-9

    def total(tree):
        return np.concatenate([np.asarray(leaf, np.float64).sum(0).reshape(-1) for leaf in jax.tree.leaves(tree)])

    state, largest = c.first, 0.0
    for _ in range(8):
        draws = c.draw(KEY, state, c.data)
        new, info = c.update(state, draws, clip_norm=clip_norm)
        moved = total(new.params) - total(state.params)
        if synchronous:
            by_one = total(c.update(state, draws, step_size=1.0)[0].params) - total(state.params)
        else:
            by_one = -total(draws.noise)
            assert int(info.events.sum()) == 5
        np.testing.assert_allclose(moved, STEP_SIZE * by_one, atol=2e-5)
        largest = max(largest, np.abs(moved).max())
        np.testing.assert_allclose(getattr(new, "push_sum_weight", jnp.ones(5)).sum(), 5.0, rtol=1e-6)
        assert int(info.batch_overflow.sum()) == int(info.prefetch_misses.sum()) == 0
        assert np.all(np.asarray(info.bits_sent) >= 0)
        state = new
    assert largest > 1e-2
    if c.problem.row.mixing == "column":
        assert np.ptp(np.asarray(state.push_sum_weight)) > 0.1, "the weights must move for this test to mean something"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECIAL_CASES)
def test_a_special_case_runs_the_rounds_of_its_row(name, kind):
    """The same program, instruction by instruction, from the same start."""
    p, texts, firsts = problem(name), [], []
    general = p._replace(row=REGISTRY[str(p.row.special_case_of)])
    for one in (p, general):
        algorithm = one.algorithm(KINDS[kind](clip_norm=CLIP_NORM))
        firsts.append(jax.make_jaxpr(lambda key, a=algorithm: a.init(key, p.data))(KEY))
        state = jax.eval_shape(lambda key, a=algorithm: a.init(key, p.data), KEY)
        texts.append(jax.make_jaxpr(algorithm.round)(KEY, state, p.data))
    assert_same(*(traced.consts for traced in texts))
    assert str(texts[0]) == str(texts[1])
    assert str(firsts[0]) == str(firsts[1])


UNFIT = {  # row stochastic where columns must sum to 1, column stochastic where both must
    "column": np.array([[0.9, 0.1], [0.2, 0.8]]),
    "doubly": np.array([[0.9, 0.2], [0.1, 0.8]]),
}


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_constructor_refuses(name):
    p = problem(name)
    unfit = [(graphs.from_matrix(np.eye(2)), "strongly connected")]
    if p.row.mixing in UNFIT:
        unfit.append((graphs.from_matrix(UNFIT[p.row.mixing]), "column|doubly|symmetric"))
    if p.row.undirected:
        unfit += [(graphs.directed_ring(5), "undirected|symmetric"), (graphs.exponential(5), "same in every round")]
    for graph, message in unfit:
        with pytest.raises(ArgumentError, match=rf"^graph: .*({message})"):
            p.algorithm(mini_batch(), graph=graph)
    if p.row.requires_noise:
        with pytest.raises(ArgumentError, match=r"^noise: must be a noise mechanism; got None"):
            p.algorithm(mini_batch(), noise_std=None)
    if not p.row.stateful_gradient:
        with pytest.raises(ArgumentError, match=r"^gradient: must be an estimator without state; .* keeps a SagaState"):
            p.algorithm(saga()).init(KEY, p.data)
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
