import inspect

import jax
import networkx as nx
import numpy as np
import pytest
from helpers import refusals
from hypothesis import given, settings
from strategies import column_stochastic

from jaxfl import ArgumentError, graphs
from jaxfl.graphs import random_graphs

CHECKED = settings(max_examples=25, deadline=None, derandomize=True)

NUM_NODES = (1, 2, 3, 4, 5, 8, 13)
CONSTRUCTORS = {
    "exponential": graphs.exponential,
    "static_exponential": graphs.static_exponential,
    "ring": graphs.ring,
    "directed_ring": graphs.directed_ring,
    "complete": graphs.complete,
    "star": graphs.star,
    "star_metropolis": lambda n: graphs.star(n, weights="metropolis"),
    "random_digraph": lambda n: graphs.random_digraph(n, 0.6, key=0),
    "from_networkx": lambda n: graphs.from_networkx(nx.path_graph(n)),
    "from_matrix": lambda n: graphs.from_matrix(np.full((n, n), 1 / n)),
    "sequence": lambda n: graphs.sequence([graphs.star(n), graphs.exponential(n)]),
}
DOUBLY_STOCHASTIC = {"exponential", "static_exponential", "ring", "directed_ring", "complete", "star_metropolis"}


@pytest.mark.parametrize("num_nodes", NUM_NODES)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_constructor_gives_connected_column_stochastic_matrices_with_self_loops(name, num_nodes):
    graph = CONSTRUCTORS[name](num_nodes)
    matrices = graph.mixing_matrices
    assert graph.num_nodes == num_nodes
    assert matrices.shape == (graph.period, num_nodes, num_nodes)
    assert matrices.dtype == np.float64
    np.testing.assert_allclose(matrices.sum(axis=1), 1.0, atol=1e-12)
    assert (np.diagonal(matrices, axis1=1, axis2=2) > 0).all()
    graphs.require_strongly_connected(graph)
    if name in DOUBLY_STOCHASTIC:
        np.testing.assert_allclose(matrices.sum(axis=2), 1.0, atol=1e-12)
        graphs.require_doubly_stochastic(graph)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 8, 9, 16, 17])
def test_exponential_is_the_papers(num_nodes):
    graph = graphs.exponential(num_nodes)
    m = int(np.floor(np.log2(num_nodes - 1))) + 1
    assert graph.period == m
    for k in range(2 * m):
        expected = np.zeros((num_nodes, num_nodes))
        for i in range(num_nodes):
            expected[i, i] += 0.5
            expected[(i + 2 ** (k % m)) % num_nodes, i] += 0.5
        np.testing.assert_array_equal(graph.mixing_matrix(k), expected)


def test_degrees_and_adjacency_count_each_direction():
    graph = graphs.from_networkx(nx.DiGraph([(0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]))
    np.testing.assert_array_equal(graph.adjacency(0), [[1, 1, 1], [1, 1, 1], [1, 0, 1]])
    np.testing.assert_array_equal(graph.out_degree, [[2, 1, 2]])
    np.testing.assert_array_equal(graph.in_degree, [[2, 2, 1]])
    np.testing.assert_allclose(
        graph.mixing_matrix(0), [[1 / 3, 1 / 2, 1 / 3], [1 / 3, 1 / 2, 1 / 3], [1 / 3, 0, 1 / 3]]
    )


def test_wrong_arguments_are_refused_in_one_sentence():
    makers = [value for name in dir(graphs) if inspect.isfunction(value := getattr(graphs, name))]
    makers = [one for one in makers if inspect.signature(one).return_annotation in ("Graph", "TrackingPair")]
    assert len(makers) >= 12
    for make in makers:
        with pytest.raises(ArgumentError, match=f"^wights: must be an argument of {make.__name__}; it takes "):
            make(wights="metropolis")


def test_a_graph_equals_only_itself():
    graph = graphs.ring(4)
    assert graph == graph
    assert graph != graphs.ring(4)
    assert len({graph, graph, graphs.ring(4)}) == 2
    assert not graph.mixing_matrices.flags.writeable


def test_large_circulant_graphs_need_no_dense_matrix():
    graph = graphs.exponential(4096)
    assert graph.shifts is not None
    assert graph.out_degree.max() == 1
    np.testing.assert_allclose(graphs.spectral_gap(graph), 1.0, atol=1e-9)
    graphs.mix(graph, np.ones((4096, 1), np.float32), 3)
    assert "mixing_matrices" not in vars(graph)


def test_metropolis_weights_are_the_formulas():
    undirected = nx.gnp_random_graph(7, 0.5, seed=1)
    matrix = graphs.from_networkx(undirected, weights="metropolis").mixing_matrix(0)
    for i in range(7):
        for j in range(7):
            if i != j:
                degrees = max(undirected.degree(i), undirected.degree(j))
                expected = 1 / (1 + degrees) if undirected.has_edge(i, j) else 0.0
                np.testing.assert_allclose(matrix[i, j], expected, atol=1e-15)
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0)


def test_networkx_labels_zero_to_n_are_node_numbers_whatever_their_order():
    path = nx.Graph([(2, 0), (0, 1)])  # networkx keeps the order 2, 0, 1; node 0 is the middle
    np.testing.assert_array_equal(graphs.from_networkx(path).out_degree, [[2, 1, 1]])
    named = nx.Graph([("c", "a"), ("a", "b")])
    np.testing.assert_array_equal(graphs.from_networkx(named).out_degree, [[1, 2, 1]])


def test_networkx_self_loops_change_nothing():
    plain = nx.path_graph(4)
    looped = plain.copy()
    looped.add_edge(1, 1)
    for weights in ("uniform", "metropolis"):
        expected = graphs.from_networkx(plain, weights=weights).mixing_matrices
        np.testing.assert_array_equal(graphs.from_networkx(looped, weights=weights).mixing_matrices, expected)


def test_random_digraph_is_a_function_of_its_arguments():
    first, again = (graphs.random_digraph(8, 0.4, key=3).mixing_matrices for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, graphs.random_digraph(8, 0.4, jax.random.key(3)).mixing_matrices)
    assert (first != graphs.random_digraph(8, 0.4, key=4).mixing_matrices).any()
    traced = jax.jit(lambda x: graphs.mix(graphs.random_digraph(8, 0.4, key=3), x, 0))(np.eye(8, dtype=np.float32))
    np.testing.assert_allclose(traced, first[0], rtol=1e-6)


@pytest.mark.statistical
def test_gaps_between_edges_have_the_law_of_coins(monkeypatch):
    """Every pair of nodes with the same probability, and pairs independent of each other."""
    monkeypatch.setattr(random_graphs, "MAX_TRIES", 1)
    monkeypatch.setattr(random_graphs, "unreachable_pair", lambda graph: None)
    monkeypatch.setattr(random_graphs, "_MOST_COINS_NODES", 0)
    count, off_diagonal = 1000, ~np.eye(4, dtype=bool)
    actual = np.stack([graphs.random_digraph(4, 0.3, key=seed).mixing_matrix(0) > 0 for seed in range(count)])
    assert actual[:, ~off_diagonal].all()
    edges = actual[:, off_diagonal].astype(float)
    error = np.sqrt(0.3 * 0.7 / count)
    np.testing.assert_allclose(edges.mean(axis=0), 0.3, atol=4.5 * error)
    correlations = np.corrcoef(edges.T)[~np.eye(12, dtype=bool)]
    assert np.abs(correlations).max() < 5 / np.sqrt(count)
    assert (graphs.random_digraph(4, 1.0, key=0).mixing_matrix(0) == 0.25).all()
    assert (graphs.random_digraph(4, 0.0, key=0).mixing_matrix(0) == np.eye(4)).all()


def test_a_hundred_thousand_nodes():
    num_nodes = 100_000
    probability = 2 * np.log(num_nodes) / num_nodes
    first, again = (graphs.random_digraph(num_nodes, probability, key=0).rounds[0] for _ in range(2))
    np.testing.assert_array_equal(first.indices, again.indices)
    edges, expected = first.nnz - num_nodes, probability * num_nodes * (num_nodes - 1)
    assert abs(edges - expected) < 5 * np.sqrt(expected)
    np.testing.assert_allclose(first.sum(axis=0), 1.0, rtol=1e-12)


def test_sequence_plays_every_round_of_every_member():
    members = [graphs.ring(6), graphs.exponential(6), graphs.star(6)]
    joined = graphs.sequence(members)
    assert joined.period == 1 + 3 + 1
    expected = np.concatenate([graph.mixing_matrices for graph in members])
    for k in range(11):
        np.testing.assert_array_equal(joined.mixing_matrix(k), expected[k % 5])


@CHECKED
@given(column_stochastic())
def test_from_matrix_keeps_every_bit(matrices):
    np.testing.assert_array_equal(graphs.from_matrix(matrices).mixing_matrices, matrices)


@CHECKED
@given(column_stochastic())
def test_shifts_are_found_exactly_when_they_reproduce_the_matrices(matrices):
    graph = graphs.from_matrix(matrices)
    n = graph.num_nodes
    by_diagonals = all(
        len({matrix[i, (i - offset) % n] for i in range(n)}) == 1 for matrix in matrices for offset in range(n)
    )
    assert (graph.shifts is not None) == by_diagonals
    for shifts, matrix in zip(graph.shifts or (), matrices, strict=False):
        rebuilt = sum(weight * np.roll(np.eye(n), offset, axis=0) for offset, weight in shifts)
        np.testing.assert_array_equal(rebuilt, matrix)


def test_permute_relabels_degrees_and_undoes():
    graph = graphs.random_digraph(6, 0.4, key=1)
    order = np.array([3, 0, 5, 1, 4, 2])
    relabeled = graphs.permute(graph, order)
    np.testing.assert_array_equal(relabeled.out_degree, graph.out_degree[:, order])
    assert (relabeled.mixing_matrices != graph.mixing_matrices).any()
    np.testing.assert_array_equal(graphs.permute(relabeled, np.argsort(order)).mixing_matrices, graph.mixing_matrices)


ONE_WAY = nx.DiGraph([(0, 1), (1, 0), (1, 2)])
test_refusals = refusals(
    [
        (lambda: graphs.ring(0), "num_nodes"),
        (lambda: graphs.exponential(2.5), "num_nodes"),  # pyright: ignore[reportArgumentType]
        (lambda: graphs.star(4, weights="equal"), "weights"),
        (lambda: graphs.random_digraph(4, 1.5, key=0), "edge_probability"),
        (lambda: graphs.random_digraph(9, 0.0, key=0), "edge_probability"),
        (lambda: jax.jit(lambda key: graphs.random_digraph(4, 0.5, key).out_degree)(jax.random.key(0)), "key"),
        (lambda: graphs.from_networkx(nx.MultiGraph([(0, 1), (0, 1)])), "graph"),
        (lambda: graphs.from_networkx(nx.Graph()), "graph"),
        (lambda: graphs.from_networkx(ONE_WAY, weights="metropolis"), "weights"),
        (lambda: graphs.from_networkx(nx.path_graph(3), names="ab"), "names"),
        (lambda: graphs.sequence([]), "graphs"),
        (lambda: graphs.sequence([graphs.ring(3), graphs.ring(4)]), "graphs"),
        (lambda: graphs.permute(graphs.ring(3), [0, 0, 1]), "permutation"),
    ]
)
