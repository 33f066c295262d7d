import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import column_stochastic, connected

from jaxfl import graphs
from jaxfl.core import ArgumentError
from jaxfl.graphs.spectral import _contraction_by_fft, _contraction_by_svd

CHECKED = settings(max_examples=30, deadline=None, derandomize=True)


def fixed_vector(product):
    """The positive eigenvector of a column-stochastic primitive matrix, by powers."""
    return np.linalg.matrix_power(product, 20_000)[:, 0]


@pytest.mark.parametrize("num_nodes", [4, 5, 8])
def test_known_gaps(num_nodes):
    n = num_nodes
    np.testing.assert_allclose(graphs.spectral_gap(graphs.ring(n)), (2 - 2 * np.cos(2 * np.pi / n)) / 3, atol=1e-12)
    np.testing.assert_allclose(graphs.spectral_gap(graphs.directed_ring(n)), 1 - np.cos(np.pi / n), atol=1e-12)
    np.testing.assert_allclose(graphs.spectral_gap(graphs.complete(n)), 1.0, atol=1e-12)
    star = graphs.star(n, weights="metropolis")  # leaves that differ keep 1 - 1/n of the difference
    np.testing.assert_allclose(graphs.spectral_gap(star), 1 / n, atol=1e-12)
    assert graphs.spectral_gap(graphs.ring(1)) == 1.0


def test_exponential_averages_in_one_period():
    np.testing.assert_allclose(graphs.spectral_gap(graphs.exponential(16)), 1.0, atol=1e-12)
    assert 0.5 < graphs.spectral_gap(graphs.exponential(12)) < 0.99


@CHECKED
@given(column_stochastic(), st.integers(0, 100))
def test_one_period_contracts_by_at_least_the_gap(matrices, seed):
    graph = graphs.from_matrix(connected(matrices))
    product = np.eye(graph.num_nodes)
    for matrix in graph.mixing_matrices:
        product = matrix @ product
    fixed = fixed_vector(product)
    values = np.random.default_rng(seed).normal(size=graph.num_nodes)
    before = np.linalg.norm((values - values.sum() * fixed) / np.sqrt(fixed))
    after = np.linalg.norm((product @ values - values.sum() * fixed) / np.sqrt(fixed))
    assert after <= (1 - graphs.spectral_gap(graph)) * before + 1e-9 * max(before, 1)


def test_the_contraction_is_attained_by_the_rounds_in_their_order():
    graph = graphs.sequence([graphs.star(6), graphs.random_digraph(6, 0.4, key=0), graphs.exponential(6)])
    product = np.eye(6)
    for matrix in graph.mixing_matrices:
        product = matrix @ product
    root = np.sqrt(fixed_vector(product))
    _, singular, right = np.linalg.svd(product * root / root[:, None])
    worst = right[1] * root
    shrunk = np.linalg.norm(product @ worst / root) / np.linalg.norm(worst / root)
    np.testing.assert_allclose(shrunk, 1 - graphs.spectral_gap(graph), rtol=1e-9)
    np.testing.assert_allclose(singular[0], 1.0)


@pytest.mark.parametrize("make", [graphs.exponential, graphs.static_exponential, graphs.ring, graphs.directed_ring])
def test_circulant_graphs_give_the_same_number_by_fourier_transform_as_by_singular_values(make):
    graph = make(11)
    np.testing.assert_allclose(_contraction_by_fft(graph), _contraction_by_svd(graph, True), atol=1e-12)


def test_row_stochastic_graphs_are_read_transposed():
    graph = graphs.random_digraph(6, 0.4, key=0)
    transposed = graphs.from_matrix(graph.mixing_matrix(0).T)
    np.testing.assert_allclose(graphs.spectral_gap(transposed), graphs.spectral_gap(graph), atol=1e-12)


def test_gap_is_refused_where_it_means_nothing():
    with pytest.raises(ArgumentError, match="no path leads from node 0 to node 1"):
        graphs.spectral_gap(graphs.from_matrix(np.eye(3)))
    columns = graphs.star(4)
    rows = graphs.from_matrix(columns.mixing_matrix(0).T)
    with pytest.raises(ArgumentError, match="all rounds must be column stochastic, or all row stochastic"):
        graphs.spectral_gap(graphs.sequence([columns, rows]))
