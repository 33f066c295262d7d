"""The base-(k+1) graph: the exact mean after a period, for all numbers of nodes."""

import functools

import jax
import numpy as np
import pytest
from problems import linear_task, problem, run, uneven_data
from reference.runs import assert_same

import jaxfl
from jaxfl import graphs
from jaxfl.core import ArgumentError
from jaxfl.graphs.base_graph import _simple, base


@pytest.mark.parametrize("num_neighbors", [1, 2, 3])
def test_a_period_is_the_mean_of_any_number_of_nodes(num_neighbors):
    """To 1e-12 in float64; matrices are symmetric, weights positive, and degrees at most k."""
    for num_nodes in range(1, 130):
        graph = base(num_nodes, num_neighbors)
        product = functools.reduce(lambda total, matrix: matrix @ total, graph.rounds, np.eye(num_nodes))
        np.testing.assert_allclose(product, 1 / num_nodes, rtol=0, atol=1e-12)
        assert max(np.abs(matrix - matrix.T).max() for matrix in graph.rounds) == 0
        assert all(matrix.data.min() > 0 and matrix.diagonal().min() > 0 for matrix in graph.rounds)
        assert graph.out_degree.max() <= num_neighbors


def test_periods_of_the_paper():
    """k = 1, Algorithms 2 and 3, which share factors of 6; and numbers of nodes that are powers of k + 1."""
    assert [len(_simple([*range(n)], 2)) for n in (5, 6, 7, 25, 33, 64)] == [5, 5, 5, 9, 11, 6]
    assert [base(n, 1).period for n in (5, 6, 7, 25, 33, 64)] == [5, 4, 5, 9, 11, 6]
    assert [base((k + 1) ** 3, k).period for k in (1, 2, 3)] == [3, 3, 3]
    assert base(4, 3).period == 1


def test_a_round_of_as_many_mixings_as_the_period_takes_the_exact_mean():
    data, graph = uneven_data(), base(5, 1)
    learner = jaxfl.d_psgd(linear_task(), graph=graph, step_size=0.1, num_mixings=graph.period)
    state, _ = run(learner, jax.random.key(0), data, 3)
    exact = jaxfl.d_psgd(linear_task(), graph=graphs.complete(5), step_size=0.1)
    ours, theirs = (run(one, jax.random.key(0), data, 1, state)[0].params for one in (learner, exact))
    assert_same(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("name", ["exact_diffusion", "extra", "nids"])
def test_methods_of_one_matrix_refuse_it(name):
    with pytest.raises(ArgumentError, match=r"graph: .*same in every round"):
        problem(name).algorithm(graph=base(5, 1))
