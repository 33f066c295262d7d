import numpy as np
import pytest
from helpers import refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import column_stochastic, connected

from jaxfl import graphs
from jaxfl.graphs.spectral import (
    _contraction_by_fft,
    _contraction_by_svd,
    _stationary,
    consensus_weights,
    laplacian,
    laplacian_eigenvalues,
    spanning_tree_roots,
)

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


def test_nodes_with_next_to_no_mass():
    """Node i sends to itself, to node 0 and to node i + 1, in equal parts: masses fall by half from node to node."""
    size = 100
    sends = np.eye(size) + np.eye(size, k=-1)
    sends[0] = 1
    graph = graphs.from_matrix(sends / sends.sum(axis=0))
    masses = _stationary(graph.mixing_matrix(0).T)
    np.testing.assert_allclose(masses[2:-1] / masses[1:-2], 0.5, rtol=1e-12)
    assert 0 < graphs.spectral_gap(graph) < 1
    np.testing.assert_allclose(consensus_weights(graph.mixing_matrix(0).T), size * masses, rtol=1e-12)


def test_row_stochastic_graphs_are_read_transposed():
    graph = graphs.random_digraph(6, 0.4, key=0)
    transposed = graphs.from_matrix(graph.mixing_matrix(0).T)
    np.testing.assert_allclose(graphs.spectral_gap(transposed), graphs.spectral_gap(graph), atol=1e-12)


def weights_of_edges(num_nodes, *edges):
    """Weight 1 for every (sender, receiver)."""
    weights = np.zeros((num_nodes, num_nodes))
    for sender, receiver in edges:
        weights[receiver, sender] = 1.0
    return weights


def roots_by_search(weights):
    """The nodes from which (I + W)^n has no zero: a path of at most n edges leads from them to every node."""
    num_nodes = len(weights)
    reached = np.linalg.matrix_power(np.eye(num_nodes) + (weights > 0), num_nodes) > 0
    return tuple(np.flatnonzero(reached.all(axis=0)).tolist())


def random_weights(seed, num_nodes=6, edge_probability=0.25):
    random = np.random.default_rng(seed)
    edges = random.random((num_nodes, num_nodes)) < edge_probability
    return np.where(edges, random.uniform(0.1, 3.0, (num_nodes, num_nodes)), 0.0)


def test_known_laplacian_eigenvalues():
    ring = np.roll(np.eye(5), 1, axis=0)
    by_angle = 1 - np.exp(2j * np.pi * np.arange(5) / 5)
    actual = laplacian_eigenvalues(ring)
    np.testing.assert_allclose(np.abs(actual), np.sort(np.abs(by_angle)), atol=1e-12)
    np.testing.assert_allclose(np.sort(np.real(actual)), np.sort(np.real(by_angle)), atol=1e-12)
    everyone = np.ones((4, 4)) - np.eye(4)
    np.testing.assert_allclose(laplacian_eigenvalues(everyone), [0, 4, 4, 4], atol=1e-12)
    out_star = weights_of_edges(4, (0, 1), (0, 2), (0, 3))
    np.testing.assert_allclose(laplacian_eigenvalues(out_star), [0, 1, 1, 1], atol=1e-12)


def test_known_roots():
    assert spanning_tree_roots(weights_of_edges(4, (2, 0), (2, 1), (2, 3))) == (2,)
    assert spanning_tree_roots(weights_of_edges(4, (0, 2), (1, 2), (3, 2))) == ()
    assert spanning_tree_roots(weights_of_edges(4, (0, 1), (1, 2), (2, 3), (3, 0))) == (0, 1, 2, 3)
    assert spanning_tree_roots(weights_of_edges(5, (1, 3), (3, 1), (3, 0), (0, 2), (2, 4), (4, 4))) == (1, 3)
    assert spanning_tree_roots(np.zeros((1, 1))) == (0,)
    assert spanning_tree_roots(np.eye(2)) == ()


@pytest.mark.parametrize("seed", range(20))
def test_the_others_have_positive_real_parts_exactly_when_the_graph_has_a_spanning_tree(seed):
    weights = random_weights(seed)
    roots, eigenvalues = spanning_tree_roots(weights), laplacian_eigenvalues(weights)
    assert roots == roots_by_search(weights)
    np.testing.assert_allclose(eigenvalues[0], 0, atol=1e-9)
    assert (np.real(eigenvalues[1:]) > 1e-9).all() == bool(roots)
    if roots:
        vector = consensus_weights(weights)
        np.testing.assert_allclose(vector @ laplacian(weights), 0, atol=1e-9)
        np.testing.assert_allclose(vector.sum(), len(weights))
        assert tuple(np.flatnonzero(vector > 1e-9).tolist()) == roots
        limit = np.linalg.matrix_power(np.eye(len(weights)) - 0.05 * laplacian(weights), 20_000)
        np.testing.assert_allclose(limit, np.broadcast_to(vector / len(weights), limit.shape), atol=1e-8)


def test_random_weights_have_both_kinds_of_graphs():
    with_roots = sum(bool(spanning_tree_roots(random_weights(seed))) for seed in range(20))
    assert 3 <= with_roots <= 17


def test_consensus_weights_do_not_depend_on_the_unit_of_the_weights():
    weights = weights_of_edges(3, (0, 1), (1, 0), (1, 2))
    for scale in (1e-6, 1.0, 1e6):
        np.testing.assert_allclose(consensus_weights(scale * weights), [1.5, 1.5, 0], atol=1e-9)


COLUMNS = graphs.star(4)
ROWS = graphs.from_matrix(COLUMNS.mixing_matrix(0).T)
test_refusals = refusals(
    [
        (lambda: graphs.spectral_gap(graphs.from_matrix(np.eye(3))), "graph"),
        (lambda: graphs.spectral_gap(graphs.sequence([COLUMNS, ROWS])), "graph"),
        (lambda: laplacian(np.ones((2, 3))), "weights"),
        (lambda: spanning_tree_roots([[0, -1], [1, 0]]), "weights"),
        (lambda: consensus_weights(np.eye(2)), "weights"),
    ]
)
