"""Promises of every algorithm of the registry, row by row and with every kind of gradient."""

import collections
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import LOSSY
from problems import problem, small_task, uneven_data
from reference.runs import assert_same, by_node
from registry import REGISTRY

import jaxfl
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
NAMES = [name for name in REGISTRY if name not in SPECIAL_CASES]
# Every kind with the first algorithm, a mini-batch with the others; their most intricate kind is slow, for compiling is
# what costs. (A row that takes a schedule has a mini-batch of its own, and no other kind.)
CASES = [(name, kind) for name in NAMES for kind in KINDS if kind == "mini_batch" or name == NAMES[0]]
# A mini-batch over links that lose and round messages, of one row for each way to take them. What is conserved over
# them has tests of its own, and tests/algorithms/test_over_links.py and clients/test_uplink.py follow the messages.
LINKS = "over links"
WAYS = [problem(name).example.over for name in NAMES]
OVER_LINKS = [(NAMES[WAYS.index(way)], LINKS) for way in dict.fromkeys(WAYS) if way is not None]
INTRICATE = [(name, "saga factored") for name in NAMES[1:] if REGISTRY[name].stateful_gradient]
# Over an uplink it is slow, too; with the compiler's full optimizations, with which the gate runs some of these tests,
# it is not.
OPTIMIZED = os.environ.get("JAXFL_TESTS_OPTIMIZED", "0") == "1"


def cases(holds=lambda p: True, *, over_links=False):
    """Tests of the cases of which this holds, by the problem of the row."""
    first, others = (OVER_LINKS[:1], OVER_LINKS[1:]) if over_links else ([], [])
    later = () if OPTIMIZED else pytest.mark.slow
    marked = [(CASES, ()), (first, ()), (others, later), (INTRICATE, pytest.mark.slow)]
    parameters = [
        pytest.param(case, marks=marks, id="-".join(case))
        for some, marks in marked
        for case in some
        if holds(problem(case[0]))
    ]
    return pytest.mark.parametrize("c", parameters, indirect=True)


KEY, OTHER_KEY = jax.random.key(7), jax.random.key(8)
CLIP_NORM, STEP_SIZE, NOISE_SCALE = 0.7, 0.2, 0.02
COUNTED = {"bits_sent": "float32", "bits_received": "float32"} | dict.fromkeys(
    ("gradient_evaluations", "forward_evaluations"), "int32"
)


class Case:
    """A problem with one kind of gradient, its functions compiled once for all tests."""

    def __init__(self, name, kind):
        self.kind, self.problem = kind, problem(name)
        self.row, self.data = self.problem.row, self.problem.data
        over = self.problem.example.over
        options = over(LOSSY) if kind == LINKS and over else {}
        gradient = KINDS["mini_batch" if kind == LINKS else kind]
        self.build = functools.partial(self.problem.algorithm, gradient=gradient, step_size=STEP_SIZE, **options)
        self.algorithm = self.build(clip_norm=CLIP_NORM, noise_scale=NOISE_SCALE)
        self.traces = collections.Counter()

        def counted(function):
            def traced(*arguments):
                self.traces[function.__name__] += 1  # runs when traced, not when called
                return function(*arguments)

            return jax.jit(traced)

        @counted
        def started(key, noise_scale):
            return self.build(clip_norm=CLIP_NORM, noise_scale=noise_scale).init(key, self.data)

        @counted
        def drawn(key, state, noise_scale):
            return self.build(clip_norm=CLIP_NORM, noise_scale=noise_scale).draw(key, state, self.data)

        @counted
        def step(key, state, data):
            return self.algorithm.round(key, state, data)

        @counted
        def tuned(state, data, draws, clip_norm, step_size):
            return self.build(clip_norm=clip_norm, step_size=step_size).update(state, data, draws)

        self.started, self.drawn, self.step, self.tuned = started, drawn, step, tuned
        self.first = self.start(KEY)

    def start(self, key, noise_scale=NOISE_SCALE):
        return self.started(key, jnp.float32(noise_scale))

    def draw(self, key, state, noise_scale=NOISE_SCALE):
        return self.drawn(key, state, jnp.float32(noise_scale))

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

    def silent(self, draws, fields=None):
        """The same draws without noise, or without that of some fields."""
        fields = self.row.noise_draws if fields is None else fields
        return draws._replace(**{name: jax.tree.map(jnp.zeros_like, getattr(draws, name)) for name in fields})


@pytest.fixture(scope="module")
def c(request):
    """The case of a test. pytest puts tests of one case in a row, and its programs are dropped behind them."""
    yield Case(*request.param)
    jax.clear_caches()


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bits(tree):
    """The arrays of a tree, typed keys as their words."""
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def differ(a, b):
    pairs = zip(jax.tree.leaves(bits(a)), jax.tree.leaves(bits(b)), strict=True)
    return any(np.any(x != y) for x, y in pairs)  # by NumPy, which compiles nothing


@cases(over_links=True)
def test_structure_and_dtypes_are_stable_and_nothing_compiles_twice(c):
    state, infos = c.rounds(c.first, 6)
    assert c.traces["step"] == 1
    assert jax.tree.structure(c.first) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(c.first), jax.tree.leaves(state), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)
    assert int(state.round_index) == 6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(infos))
    assert {numbers.dtype for numbers in jax.tree.leaves(infos.counts)} == {np.dtype("int32")}
    marked = {name for name, count in infos.counts.items() if isinstance(count, tuple)}
    assert marked == {"batch_overflow", "prefetch_misses", "discarded_gradients"} & {*infos.counts}
    assert {numbers.dtype for numbers in infos.measurements.values()} == {np.dtype("float32")}
    for field, dtype in COUNTED.items():
        counts = getattr(infos, field)
        assert (counts.shape, counts.dtype) == ((6, c.data.num_nodes), dtype), field
        assert np.all(counts >= 0), field
        assert counts.any() or field.endswith("_evaluations"), field
    assert infos.gradient_evaluations.any() or infos.forward_evaluations.any()


@cases(over_links=True)
def test_a_round_is_a_function_of_key_and_round(c):
    """A round, `update` after `draw` in a scan, and resumed from stored arrays: the same bits. Another round or key:
    other numbers, of every purpose."""
    state, infos = c.rounds(c.first, 6)

    def body(state, _):
        draws = c.algorithm.draw(KEY, state, c.data)
        after, info = c.algorithm.update(state, c.data, draws)  # as `round` does, which `step` is
        return after, (info, draws)

    scanned, (scanned_infos, scanned_draws) = jax.jit(lambda s: jax.lax.scan(body, s, length=6))(c.first)
    assert_same(state, scanned)
    assert_same(infos, scanned_infos)
    half, _ = c.rounds(c.first, 3)
    stored = jax.tree.map(np.asarray, half)
    assert_same(state, c.rounds(jax.tree.map(jnp.asarray, stored), 3)[0])
    draws, later = c.draw(KEY, half), c.draw(KEY, state)
    # Without optimizations LLVM fuses products and sums of normal numbers in some programs only.
    tolerance = {} if OPTIMIZED else {"rtol": 1e-6}
    assert_same(bits(draws), jax.tree.map(lambda leaf: leaf[3], bits(scanned_draws)), **tolerance)
    elsewhere = c.draw(OTHER_KEY, half)
    all_draws = (draws, later, elsewhere)
    noises = [by_node(getattr(one, field)) for one in all_draws for field in c.row.noise_draws]
    for ours, theirs in itertools.combinations(noises, 2):
        assert not np.isin(ours, theirs).any(), "noise is used once"
    for field in set(draws._fields) - set(c.row.noise_draws):
        for ours, *others in zip(*(jax.tree.leaves(getattr(one, field))[:1] for one in all_draws), strict=True):
            assert all(differ(ours, theirs) for theirs in others)
    if "noise" in c.row.noise_draws:
        steps = [3 * c.row.num_gradients + step for step in range(c.row.num_gradients)]
        keys = [purpose_key(KEY, Purpose.NOISE, jnp.int32(step)) for step in steps]
        each = [jaxfl.gaussian(NOISE_SCALE).draw(key, half.params) for key in keys]
        expected = each[0] if len(each) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *each)
        assert_same(draws.noise, expected, rtol=1e-6)


@cases()
def test_no_two_leaves_of_an_eager_state_share_a_buffer(c):
    states = [c.algorithm.init(KEY, c.data)]  # whoever donates it deletes nothing else, and no data
    if c.kind == "mini_batch":  # an eager round takes seconds
        states.append(c.algorithm.update(states[0], c.data, c.draw(KEY, states[0]))[0])
    for leaves in ([leaf for leaf in jax.tree.leaves((state, c.data)) if leaf.size] for state in states):
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@cases(over_links=True)
def test_hyper_parameters_and_seeds_compile_nothing_again(c):
    """Another seed, step size, clip norm or noise scale gives other numbers from the same compiled programs."""
    draws, private = c.draw(KEY, c.first), bool(c.row.noise_draws)
    updated = c.update(c.first, draws)
    assert differ(c.first, c.start(OTHER_KEY, noise_scale=1.0))
    assert differ(c.step(KEY, c.first, c.data), c.step(OTHER_KEY, c.first, c.data))
    assert differ(updated, c.update(c.first, draws, step_size=1.0))
    assert differ(updated, c.update(c.first, draws, clip_norm=0.1)) == private
    assert differ(draws, c.draw(KEY, c.first, noise_scale=1.0)) == private
    assert c.traces == {"started": 1, "drawn": 1, "step": 1, "tuned": 1}


@cases(over_links=True)
@pytest.mark.slow
def test_a_vmap_over_seeds_equals_a_loop(c):
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    firsts = [c.start(key) for key in keys]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *firsts)
    step = jax.jit(jax.vmap(c.algorithm.round, in_axes=(0, 0, None)))
    for _ in range(3):
        together, _ = step(keys, together, c.data)
    for index, state in enumerate(firsts):
        for _ in range(3):
            state, _ = c.step(keys[index], state, c.data)
        assert_same(jax.tree.map(lambda x, i=index: x[i], together), state, rtol=2e-4, atol=2e-5)


@cases(over_links=True)
def test_relabelling_the_nodes_permutes_the_result(c):
    order = np.array([3, 0, 4, 1, 2])
    state, _ = c.rounds(c.first, 2)
    draws = c.draw(KEY, state)

    data = c.data._replace(indices=c.data.indices[order], sizes=c.data.sizes[order])
    relabeled, permuted = c.problem.example.relabeled, c.problem.example.permuted(order)
    of_round = (state, draws, c.update(state, draws))
    state, draws, (new_state, info) = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), of_round)
    assert 0 < np.sum(getattr(info, "active", 1)) < 5, "some must be idle for this test to mean something"
    before, renamed = relabeled(order, state, draws)
    expected, _ = relabeled(order, new_state, draws)
    if permuted:  # a topology is not traced
        result = jax.jit(c.build(clip_norm=CLIP_NORM, **permuted).update)(before, data, renamed)
    else:
        result = c.tuned(before, data, renamed, jnp.float32(CLIP_NORM), jnp.float32(STEP_SIZE))
    info = jax.tree.map(lambda leaf: leaf if leaf.ndim == 0 else leaf[order], info)
    assert_same((expected, info), result, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [(name, "mini_batch") for name in NAMES] + CASES[1:2])
@pytest.mark.slow
def test_the_derivative_by_the_step_size_equals_a_finite_difference(name, kind):
    p = problem(name)

    def moved_in_three_rounds(step_size):
        """Squared distance of all nodes from their start, whose slope is never small."""
        algorithm = p.algorithm(gradient=KINDS[kind], step_size=step_size)
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


# A row without noise takes no clip norm, either.
@cases(lambda p: p.row.noise_draws)
def test_no_noise_and_no_clipping_give_the_plain_method(c):
    """Two rounds, same state and draws: noise 0 and a huge clip norm change nothing, small ones do."""
    before, _ = c.rounds(c.first, 2)
    draws = [c.draw(KEY, state) for state in (before, c.rounds(before, 1)[0])]
    silent = [c.silent(one) for one in draws]
    drawn = c.draw(KEY, before, noise_scale=0.0)
    assert not any(by_node(getattr(drawn, field)).any() for field in c.row.noise_draws)
    # A schedule holds noise of scale 0; a noise mechanism can be left out, and so are its draws.
    plain = c.build(noise_scale=None)
    expected_draws = jax.eval_shape(plain.draw, KEY, before, c.data)
    left_out = [field for field in c.row.noise_draws if getattr(expected_draws, field) is None]
    bare, plain_update = [one._replace(**dict.fromkeys(left_out)) for one in silent], jax.jit(plain.update)

    def after(update, draws, **options):
        middle, _ = update(before, draws[0], **options)
        last, info = update(middle, draws[1], **options)
        return last.params, float(info.clipped_fraction.max())

    expected, _ = after(lambda state, one: plain_update(state, c.data, one), bare)
    unclipped, fraction = after(c.update, silent, clip_norm=1e9)
    assert_same(expected, unclipped, rtol=1e-5, atol=1e-6)
    assert fraction == 0.0
    clipped, fraction = after(c.update, silent)
    assert fraction > 0.0
    noisy = []
    for field in c.row.noise_draws:
        one_kind = [quiet._replace(**{field: getattr(loud, field)}) for quiet, loud in zip(silent, draws, strict=True)]
        noisy.append(after(c.update, one_kind, clip_norm=1e9)[0])
    for other in (clipped, *noisy):
        assert np.abs(by_node(other) - by_node(expected)).max() > 1e-3


@jax.jit
def descended(params, pool):
    """After ten steps of gradient descent on the mean loss over the pool."""
    slope = jax.grad(lambda p: small_task().loss(p, pool.inputs, pool.labels).mean())

    def step(params, _):
        return jax.tree.map(lambda x, g: x - STEP_SIZE * g, params, slope(params)), None

    return jax.lax.scan(step, params, None, length=10)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_one_node_or_a_complete_graph_with_equal_data_is_gradient_descent(name):
    """n = 1, and n nodes that hold the same data on a complete graph, reach the server or are averaged after each
    step, follow full-batch gradient descent. (Where nodes act one after the other, n = 1 without delay does.)"""
    p, count = problem(name), 6
    pool = uneven_data(sizes=(count,))
    for nodes, changes in p.example.centralized.items():
        data = pool._replace(indices=jnp.tile(pool.indices, (nodes, 1)), sizes=jnp.full(nodes, count, jnp.int32))
        algorithm = p.algorithm(batch_size=count, step_size=STEP_SIZE, noise_scale=0.0, **changes)

        @jax.jit
        def trained(key, algorithm=algorithm, data=data):
            first = algorithm.init(key, data)
            last, _ = jax.lax.scan(lambda state, _: (algorithm.round(key, state, data)[0], None), first, length=10)
            return algorithm.node_params(first), algorithm.node_params(last)

        first, last = trained(KEY)
        expected = descended(jax.tree.map(lambda leaf: leaf[0], first), pool)
        # A server has one model, whatever the number of its clients.
        stacked = jax.tree.map(lambda leaf, at_first: jnp.stack([leaf] * len(at_first)), expected, first)
        assert_same(last, stacked, rtol=1e-4, atol=1e-5)


@cases(lambda p: p.example.conserved)
def test_invariants_in_every_round(c):
    """The push-sum weights sum to n, and mixing leaks nothing: the sum of x moves by step size times noisy g.

    The sum is a weighted one where averaging preserves such a one. What is sent with noise of its own is sent without
    here.
    """
    conserved = c.problem.example.conserved
    assert conserved is not None
    weights = conserved(np.asarray(c.data.sizes))
    of_what_is_sent = [field for field in c.row.noise_draws if field != "noise"]

    def total(tree):
        return weights @ by_node(tree)

    state, largest = c.start(KEY, noise_scale=0.0), 0.0
    for _ in range(8):
        draws = c.silent(c.draw(KEY, state), of_what_is_sent)
        new, info = c.update(state, draws)
        moved = total(new.params) - total(state.params)
        by_one = total(c.update(state, draws, step_size=1.0)[0].params) - total(state.params)
        np.testing.assert_allclose(moved, STEP_SIZE * by_one, atol=2e-5)
        largest = max(largest, np.abs(moved).max())
        np.testing.assert_allclose(getattr(new, "push_sum_weight", jnp.ones(5)).sum(), 5.0, rtol=1e-6)
        assert int(info.batch_overflow.sum()) == int(info.prefetch_misses.sum()) == 0
        state = new
    assert largest > 1e-2
    moving = getattr(state, "push_sum_weight", np.arange(5))
    assert np.ptp(np.asarray(moving)) > 0.1, "the weights must move for this test to mean something"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "c",
    [pytest.param((name, "mini_batch"), id=name) for name in NAMES if problem(name).example.conserved],
    indirect=True,
)
def test_1000_rounds_without_steps_conserve_the_sums(c):
    """In float32. The tolerance is that of docs/new_algorithm.md: eps * sqrt(rounds) * scale."""
    rounds = 1000
    conserved, state = c.problem.example.conserved, c.start(KEY, noise_scale=0.0)
    assert conserved is not None
    weights, of_what_is_sent = conserved(np.asarray(c.data.sizes)), set(c.row.noise_draws) - {"noise"}
    for _ in range(3):  # nodes differ then
        state, _ = c.update(state, c.silent(c.draw(KEY, state), of_what_is_sent))
    before, draws = np.float64(by_node(state.params)), c.silent(c.draw(KEY, state))
    for _ in range(rounds):
        state, _ = c.update(state, draws, step_size=0.0)
    after, bound = np.float64(by_node(state.params)), np.finfo(np.float32).eps * np.sqrt(rounds)
    assert np.abs(before - after).max() > 1e-3, "the nodes must differ for this test to mean something"
    assert np.abs(weights @ (after - before)).max() < bound * (weights @ np.abs(before)).max()
    assert abs(np.float64(getattr(state, "push_sum_weight", np.ones(5))).sum() - 5) < bound * 5


@pytest.mark.parametrize("name", SPECIAL_CASES)
def test_a_special_case_runs_the_rounds_of_its_row(name):
    """The same program, instruction by instruction, from the same start."""
    p, texts, firsts = problem(name), [], []
    general = p._replace(row=REGISTRY[str(p.row.special_case_of)])
    for one in (p, general):
        algorithm = one.algorithm(gradient=KINDS["mini_batch"], clip_norm=CLIP_NORM)
        firsts.append(jax.make_jaxpr(lambda key, a=algorithm: a.init(key, p.data))(KEY))
        state = jax.eval_shape(lambda key, a=algorithm: a.init(key, p.data), KEY)
        texts.append(jax.make_jaxpr(algorithm.round)(KEY, state, p.data))
    assert_same(*(traced.consts for traced in texts))
    assert str(texts[0]) == str(texts[1])
    assert str(firsts[0]) == str(firsts[1])
