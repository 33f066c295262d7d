import chex
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import scipy.linalg
from helpers import equations, refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import column_stochastic, doubly_stochastic

from jaxfl import graphs
from jaxfl.core.devices import on_one_device
from jaxfl.core.platform import tracing_for
from jaxfl.graphs.mixing import keeps_ones, mix_result

CHECKED = settings(max_examples=15, deadline=None, derandomize=True)
GRAPHS = {
    "exponential": graphs.exponential(6),
    "exponential_one": graphs.exponential(1),
    "exponential_two": graphs.exponential(2),
    "static_exponential": graphs.static_exponential(9),
    "ring": graphs.ring(5),
    "directed_ring": graphs.directed_ring(4),
    "complete": graphs.complete(5),
    "star": graphs.star(5),
    "wide_star": graphs.star(21),  # more in-neighbors than are fused at a time
    "star_metropolis": graphs.star(5, weights="metropolis"),
    "random_digraph": graphs.random_digraph(7, 0.4, key=1),
    "from_networkx": graphs.from_networkx(nx.karate_club_graph(), weights="metropolis"),
    "two_circulants": graphs.sequence(
        [graphs.ring(6), graphs.from_matrix(scipy.linalg.circulant([0.5, 0.0, 0.2, 0.3, 0.0, 0.0]))]
    ),
    "circulants_of_two_and_three": graphs.sequence(
        [graphs.from_matrix(scipy.linalg.circulant([0.25, 0.75, 0.0, 0.0, 0.0, 0.0])), graphs.ring(6)]
    ),
    "sequence": graphs.sequence([graphs.star(6), graphs.exponential(6), graphs.random_digraph(6, 0.3, key=2)]),
}


def structures(graph):
    return ("auto", "dense", "neighbors") + (("circulant",) if graph.shifts is not None else ())


def tree_of(num_nodes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "matrix": jnp.asarray(rng.normal(size=(num_nodes, 3, 2)), jnp.float32),
        "vector": jnp.asarray(rng.normal(size=(num_nodes, 4)), jnp.float32),
        "weight": jnp.asarray(rng.uniform(0.5, 2.0, num_nodes), jnp.float32),
    }


def in_structures(graph, names):
    """(tree, k) -> what each structure mixes, in one program."""
    return jax.jit(lambda tree, k: [graphs.mix(graph, tree, k, structure) for structure in names])


def unstacked(tree):
    return [jax.tree.map(lambda leaf, k=k: leaf[k], tree) for k in range(3)]


def expected_mix(graph, tree, k):
    matrix = graph.mixing_matrices[k % graph.period]
    return jax.tree.map(lambda leaf: np.tensordot(matrix, np.asarray(leaf, np.float64), axes=1), tree)


def assert_close(actual, expected, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 1e-6, "atol": 1e-6})), actual, expected
    )


# One graph of each kind in the form for accelerators is quick.
KINDS = ("exponential", "wide_star", "random_digraph", "circulants_of_two_and_three", "sequence")
CASES = [(name, "cpu") for name in GRAPHS] + [(name, "gpu") for name in KINDS]
OTHERS = [pytest.param(name, "gpu", marks=pytest.mark.slow) for name in GRAPHS if name not in KINDS]


@pytest.mark.parametrize(("name", "platform"), CASES + OTHERS)
def test_all_structures_agree(name, platform):
    """In the forms for both; on an accelerator none branches, whose number its host would wait for."""
    graph = GRAPHS[name]
    tree = tree_of(graph.num_nodes)
    mixed = in_structures(graph, structures(graph))
    with tracing_for(platform):
        program = str(mixed.trace(tree, jnp.int32(1)).jaxpr)
        assert platform == "cpu" or not ("cond[" in program or "while[" in program)
        for k in (0, 1, graph.period + 1):
            expected = expected_mix(graph, tree, k)
            for actual in mixed(tree, jnp.int32(k)):
                assert_close(actual, expected)


def test_a_branch_a_round_is_traced_where_a_callers_shardings_may_share_nodes_out(monkeypatch):
    """Two branches compile faster than four; both give the same bits."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    graph, tree = graphs.exponential(16), tree_of(16)

    def traced():
        return jax.jit(lambda tree, k: graphs.mix(graph, tree, k)).trace(tree, jnp.int32(3))

    programs = [traced()]
    with on_one_device():
        programs.append(traced())
    steps = [[step for step in equations(program.jaxpr.jaxpr) if "branches" in step.params] for program in programs]
    assert [[len(step.params["branches"]) for step in of_one] for of_one in steps] == [[4], [2]]
    chex.assert_trees_all_equal(*(program.lower().compile()(tree, jnp.int32(3)) for program in programs))


@pytest.mark.parametrize("name", ["exponential", "star", "complete"])
def test_mix_result_equals_mix_of_the_result(name):
    """One graph of each structure."""
    graph = GRAPHS[name]
    first, second = tree_of(graph.num_nodes), tree_of(graph.num_nodes, seed=1)

    def step(a, b):
        return jax.tree.map(lambda x, y: x - 0.5 * y, a, b)

    mixed = jax.jit(lambda k: mix_result(graph, step, (first, second), k))
    for k in (0, 1, graph.period + 1):
        assert_close(mixed(jnp.int32(k)), expected_mix(graph, step(first, second), k))


def test_ones_are_kept_where_no_weight_rounds_and_rows_sum_to_one():
    kept = {name for name, graph in GRAPHS.items() if keeps_ones(graph)}
    # Rings mix by thirds, others with rows that do not sum to one.
    assert kept == {"exponential", "exponential_one", "exponential_two", "directed_ring"}
    for name in kept:
        ones = jnp.ones(GRAPHS[name].num_nodes)
        for k in range(GRAPHS[name].period):
            np.testing.assert_array_equal(graphs.mix(GRAPHS[name], ones, k), ones)
    # Columns sum to one, rows to 1/2 and 3/2, in weights without rounding.
    assert not keeps_ones(graphs.from_matrix(np.array([[0.5, 0.0], [0.5, 1.0]])))


@CHECKED
@given(st.one_of(column_stochastic(), doubly_stochastic()))
def test_all_structures_agree_on_any_matrices(matrices):
    """And total mass is preserved, and the node mean with it."""
    graph = graphs.from_matrix(matrices)
    tree = tree_of(graph.num_nodes)["vector"]
    mixed = in_structures(graph, structures(graph))
    for k in range(graph.period + 1):
        expected = expected_mix(graph, tree, k)
        for actual in mixed(tree, jnp.int32(k)):
            assert_close(actual, expected)
            np.testing.assert_allclose(np.sum(actual, axis=0), np.sum(tree, axis=0), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", ["exponential", "random_digraph", "sequence"])
@pytest.mark.quick_cases(1)
def test_transformations_commute_with_mixing(name):
    graph = GRAPHS[name]
    trees = [tree_of(graph.num_nodes, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    rounds = jnp.arange(3, dtype=jnp.int32)
    expected = [expected_mix(graph, tree, k) for k, tree in enumerate(trees)]
    looped = trees[0]
    for k in range(3):
        looped = expected_mix(graph, looped, k)
    names = structures(graph)[1:]
    mixed = in_structures(graph, names)

    @jax.jit
    def all_ways(stacked):
        def step(trees, k):
            return [graphs.mix(graph, tree, k, name) for tree, name in zip(trees, names, strict=True)], None

        scanned, _ = jax.lax.scan(step, [trees[0]] * len(names), rounds)
        return jax.vmap(mixed)(stacked, rounds), jax.vmap(mixed, in_axes=(0, None))(stacked, jnp.int32(1)), scanned

    for each_round, each_seed, last in zip(*all_ways(stacked), strict=True):
        for k, actual in enumerate(unstacked(each_round)):
            assert_close(actual, expected[k])
        assert_close(unstacked(each_seed)[1], expected[1])
        assert_close(last, looped)


@pytest.mark.parametrize("name", ["exponential", "random_digraph", "sequence", "wide_star"])
@pytest.mark.quick_cases(2)
def test_gradient_is_the_transposed_matrix(name):
    graph = GRAPHS[name]
    tree = tree_of(graph.num_nodes)["vector"]
    cotangent = tree_of(graph.num_nodes, seed=1)["vector"]
    for structure in structures(graph)[1:]:
        loss = jax.jit(lambda x, k, s=structure: jnp.sum(cotangent * graphs.mix(graph, x, k, s)))
        actual = jax.grad(loss)(tree, jnp.int32(1))
        np.testing.assert_allclose(actual, graph.mixing_matrix(1).T @ np.asarray(cotangent), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["exponential", "random_digraph", "complete"])
@pytest.mark.quick_cases(1)
def test_sixteen_bit_leaves_are_rounded_once(name):
    graph = GRAPHS[name]
    values = tree_of(graph.num_nodes)["vector"].astype(jnp.bfloat16)
    expected = jnp.asarray(graph.mixing_matrix(0) @ np.asarray(values, np.float64), jnp.float32).astype(jnp.bfloat16)
    for structure in structures(graph):
        mixed = graphs.mix(graph, {"a": values, "b": values.astype(jnp.float16)}, 0, structure)
        assert mixed["a"].dtype == jnp.bfloat16
        assert mixed["b"].dtype == jnp.float16
        # One unit in the last place of eight bits where float32 rounding falls on the other side of a tie.
        np.testing.assert_allclose(mixed["a"].astype(np.float32), expected.astype(np.float32), rtol=2**-7)
        assert (np.asarray(mixed["a"]) == np.asarray(expected)).mean() > 0.9


def test_non_finite_values_reach_receivers_alone_in_the_sparse_structures():
    graph = graphs.directed_ring(5)
    values = jnp.asarray([0.0, jnp.nan, 2.0, 3.0, 4.0], jnp.float32)
    for structure in ("circulant", "neighbors"):
        np.testing.assert_array_equal(np.isnan(graphs.mix(graph, values, 0, structure)), [0, 1, 1, 0, 0])
    assert np.isnan(graphs.mix(graph, values, 0, "dense")).all()


def test_messages_are_the_rounds_degrees():
    graph = GRAPHS["sequence"]
    both = jax.jit(lambda k: (graphs.messages_sent(graph, k), graphs.messages_received(graph, k)))
    for k in range(2 * graph.period):
        sent, received = both(jnp.int32(k))
        np.testing.assert_array_equal(sent, graph.out_degree[k % graph.period])
        np.testing.assert_array_equal(received, graph.in_degree[k % graph.period])
    assert not np.array_equal(graph.out_degree, graph.in_degree), "they must differ for this test to mean something"
    for messages in (graphs.messages_sent, graphs.messages_received):
        np.testing.assert_array_equal(messages(graphs.star(4), jnp.int32(7)), [3, 1, 1, 1])


def test_dense_mixing_asks_for_full_precision():
    program = (
        jax.jit(lambda x: graphs.mix(GRAPHS["complete"], x, 0, "dense")).lower(jnp.ones((5, 2), jnp.float32)).as_text()
    )
    assert "precision = [HIGHEST, HIGHEST]" in program


@pytest.mark.parametrize("structure", ["circulant", "neighbors"])
def test_sparse_structures_hold_no_copy_per_neighbor(structure):
    graph = graphs.ring(64)
    values = jax.ShapeDtypeStruct((64, 10_000), jnp.float32)
    compiled = jax.jit(lambda x: graphs.mix(graph, x, 0, structure)).lower(values).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        pytest.skip("this backend does not report memory")
    assert memory.temp_size_in_bytes < 64 * 10_000 * 4 / 10


test_refusals = refusals(
    [
        (lambda: graphs.mix(graphs.ring(3), {"a": jnp.ones((4, 2))}, 0), "tree"),
        (lambda: graphs.mix(graphs.ring(3), jnp.float32(1.0), 0), "tree"),
        (lambda: graphs.mix(graphs.ring(3), jnp.ones(3, jnp.int32), 0), "tree"),
        (lambda: graphs.mix(graphs.ring(3), jnp.ones(3), jnp.asarray(0.5)), "round_index"),
        (lambda: graphs.mix(graphs.ring(3), jnp.ones(3), jnp.arange(2)), "round_index"),
        (lambda: graphs.mix(graphs.ring(3), jnp.ones(3), 0, "sparse"), "structure"),
        (lambda: graphs.mix(graphs.star(4), jnp.ones(4), 0, "circulant"), "structure"),
    ]
)
