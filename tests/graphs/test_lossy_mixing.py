"""Mixing over links that lose messages: the realized matrix in all structures, and what it preserves."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals
from hypothesis import given, settings
from strategies import column_stochastic
from test_mixing import CHECKED, GRAPHS, assert_close, structures, tree_of

from jaxfl import graphs
from jaxfl.core.platform import tracing_for
from jaxfl.graphs.lossy_mixing import lossy_mix, messages_lost

lossy = jax.jit(lossy_mix, static_argnums=0, static_argnames=("kept_by", "structure"))


def arrived_in(num_nodes, success=0.6, seed=0, symmetric=False):
    """(n, n), bool, diagonal True."""
    arrived = np.random.default_rng(seed).uniform(size=(num_nodes, num_nodes)) < success
    if symmetric:
        arrived = np.triu(arrived, 1) | np.triu(arrived, 1).T
    return jnp.asarray(arrived | np.eye(num_nodes, dtype=bool))


def realized(matrix, arrived, kept_by):
    """A, float64, entry by entry."""
    result, n = np.zeros_like(matrix), len(matrix)
    for i in range(n):
        for j in range(n):
            if i == j or arrived[i, j]:
                result[i, j] += matrix[i, j]
            else:
                keeper = j if kept_by == "sender" else i
                result[keeper, keeper] += matrix[i, j]
    return result


@pytest.mark.parametrize("kept_by", ["sender", "receiver"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.quick_cases(2)
def test_all_structures_agree(name, kept_by):
    """With the realized matrix, in float64; and what is counted as lost."""
    graph = GRAPHS[name]
    tree, arrived = tree_of(graph.num_nodes), arrived_in(graph.num_nodes)

    @jax.jit
    def mixed(tree, k, arrived):
        every = [lossy_mix(graph, tree, arrived, k, kept_by=kept_by, structure=s) for s in structures(graph)]
        return every, messages_lost(graph, arrived, k)

    for k in (0, 1, graph.period + 1):
        every, lost = mixed(tree, jnp.int32(k), arrived)
        matrix = graph.mixing_matrix(k)
        expected = realized(matrix, arrived, kept_by)
        for actual in every:
            assert_close(
                actual, jax.tree.map(lambda x, a=expected: np.tensordot(a, np.asarray(x, np.float64), axes=1), tree)
            )
        np.testing.assert_array_equal(lost, ((matrix > 0) & ~np.asarray(arrived)).sum(axis=0))
        assert lost.dtype == jnp.int32


@pytest.mark.parametrize("kept_by", ["sender", "receiver"])
def test_no_structure_branches_on_an_accelerator(kept_by):
    """Its host would wait for the number of the branch."""
    graph, tree, arrived = graphs.exponential(6), tree_of(6), arrived_in(6)
    with tracing_for("gpu"):
        mixed = jax.jit(partial(lossy_mix, graph, kept_by=kept_by)).trace(tree, arrived, jnp.int32(4))
    assert "cond[" not in str(mixed.jaxpr)
    expected = realized(graph.mixing_matrix(4), arrived, kept_by)
    actual = mixed.lower().compile()(tree, arrived, jnp.int32(4))
    assert_close(actual, jax.tree.map(lambda x: np.tensordot(expected, np.asarray(x, np.float64), axes=1), tree))


@settings(CHECKED, max_examples=5)
@given(column_stochastic())
def test_kept_by_the_sender_total_mass_is_preserved_whatever_arrives(matrices):
    graph = graphs.from_matrix(matrices)
    values = tree_of(graph.num_nodes)["vector"]
    mixed = jax.jit(lambda x, arrived: lossy_mix(graph, x, arrived, 1, kept_by="sender"))
    for success in (0.0, 0.5, 1.0):
        actual = np.asarray(mixed(values, arrived_in(graph.num_nodes, success)))
        np.testing.assert_allclose(actual.sum(axis=0), np.asarray(values).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_kept_by_the_receiver_equal_values_stay_equal_when_row_stochastic():
    rows = graphs.from_matrix(graphs.random_digraph(6, 0.4, key=0).mixing_matrix(0).T)
    ones, arrived = jnp.ones((6, 2), jnp.float32), arrived_in(6)
    np.testing.assert_allclose(lossy(rows, ones, arrived, 0, kept_by="receiver"), 1.0, rtol=1e-6)
    assert np.abs(np.asarray(lossy(rows, ones, arrived, 0, kept_by="sender")) - 1).max() > 0.1


def test_kept_by_the_receiver_node_mean_is_preserved_when_matrix_and_losses_are_symmetric():
    graph = GRAPHS["star_metropolis"]
    values = tree_of(5)["vector"]

    def drift(arrived):
        actual = np.asarray(lossy(graph, values, arrived, 0, kept_by="receiver"))
        return np.abs((actual - np.asarray(values)).mean(axis=0)).max()

    both_ways = arrived_in(5, symmetric=True)
    assert 0 < int(messages_lost(graph, both_ways, 0).sum()) < 8
    assert drift(both_ways) < 1e-6
    assert drift(arrived_in(5)) > 0.01


def test_a_leaf_of_16_bits_is_summed_in_float32():
    graph = GRAPHS["ring"]
    values = tree_of(5)["vector"].astype(jnp.bfloat16)
    actual = lossy(graph, values, arrived_in(5), 0, kept_by="sender")
    assert actual.dtype == jnp.bfloat16
    exact = lossy(graph, values.astype(jnp.float32), arrived_in(5), 0, kept_by="sender").astype(jnp.bfloat16)
    np.testing.assert_array_equal(actual.astype(jnp.float32), exact.astype(jnp.float32))


def call(**changes: Any):
    arguments: dict[str, Any] = {"graph": GRAPHS["ring"], "tree": jnp.ones(5), "arrived": jnp.ones((5, 5), bool)}
    return lambda: lossy_mix(**{**arguments, "round_index": 0, "kept_by": "sender", **changes})


test_refusals = refusals(
    [
        (call(arrived=jnp.ones((4, 4), bool)), "arrived"),
        (call(arrived=jnp.ones((5, 5))), "arrived"),
        (call(kept_by="nobody"), "kept_by"),
        (call(structure="sparse"), "structure"),
        (call(tree=jnp.ones(4)), "tree"),
        (call(graph=graphs.star(5), structure="circulant"), "structure"),
    ]
)
