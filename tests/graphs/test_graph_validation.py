import numpy as np
import pytest
from helpers import refused
from hypothesis import given, settings
from strategies import column_stochastic, doubly_stochastic

from jaxfl import graphs
from jaxfl.graphs.validation import unreachable_pair

CHECKED = settings(max_examples=30, deadline=None, derandomize=True)


def complete_with(changes, n=5):
    matrix = np.full((n, n), 1 / n)
    for entry, value in changes.items():
        matrix[entry] = value
    return matrix


@pytest.mark.parametrize(
    ("matrices", "words"),
    [
        *((bad, ()) for bad in (np.ones((2, 3)), np.ones(4), np.zeros((0, 0)), np.zeros((0, 3, 3)), np.eye(2) * 1j)),
        *((bad, ()) for bad in ([[1.0, 0.0], [1.0]], [["a", "b"], ["c", "d"]])),
        (complete_with({(2, 4): np.nan}), ("(2, 4)", "nan")),
        (complete_with({(0, 3): np.inf}), ("(0, 3)", "inf")),
        (complete_with({(1, 2): -0.2}), ("(1, 2)", "-0.2")),
        (complete_with({(3, 3): 0.0, (2, 3): 0.4}), ("entry (3, 3)",)),
        (complete_with({(1, 4): 0.168}), ("column 4 sums to 0.968",)),
        (np.stack([np.eye(5), complete_with({(1, 4): 0.168})]), ("column 4 sums to 0.968", "round 1 of 2")),
    ],
)
def test_from_matrix_says_what_is_wrong_and_where(matrices, words):
    refused(lambda: graphs.from_matrix(matrices), "mixing_matrices", *words)


def test_sums_are_checked_to_one_millionth_and_never_repaired():
    inside = np.eye(3)
    inside[1, 1] = 1 + 9e-7
    assert graphs.from_matrix(inside).mixing_matrix(0)[1, 1] == 1 + 9e-7
    outside = np.eye(3)
    outside[1, 1] = 1 + 2e-6
    refused(lambda: graphs.from_matrix(outside), "mixing_matrices", "column 1")


def test_stochasticity_errors_name_the_line_the_graph_and_the_round():
    by_rows = graphs.from_matrix([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.2, 0.0, 0.8]])
    by_columns = graphs.sequence([graphs.ring(4), graphs.star(4)])
    graphs.require_column_stochastic(by_columns)
    for check in (graphs.require_column_stochastic, graphs.require_doubly_stochastic):
        refused(lambda check=check: check(by_rows), "graph", "column 0 of from_matrix(3)", "0.7")
    check = graphs.require_doubly_stochastic
    refused(lambda: check(by_columns), "graph", "row 0", "round 1 of 2", "1.75", 'weights="metropolis"')


@pytest.mark.parametrize(
    ("matrix", "sender", "receiver"),
    [
        ([[1.0, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 0.5]], 0, 1),  # 2 -> 1 -> 0 and nothing back
        ([[0.5, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 1.0]], 1, 0),  # 0 -> 1 -> 2
    ],
)
def test_connectivity_error_names_a_pair_without_a_path(matrix, sender, receiver):
    graph = graphs.from_matrix(matrix)
    refused(lambda: graphs.require_strongly_connected(graph), "graph", f"from node {sender} to node {receiver} ")
    assert unreachable_pair(graph) == (sender, receiver)


def test_connectivity_is_that_of_the_whole_period():
    halves = [np.eye(4), np.eye(4)]
    halves[0][:2, :2] = halves[1][1:3, 1:3] = 0.5
    rounds = [graphs.from_matrix(half) for half in halves]
    refused(lambda: graphs.require_strongly_connected(graphs.sequence(rounds)), "graph", "from node 0 to node 3 ")
    last = np.eye(4)
    last[2:, 2:] = 0.5
    rounds.append(graphs.from_matrix(last))
    assert all(map(unreachable_pair, rounds))
    graphs.require_strongly_connected(graphs.sequence(rounds))


@CHECKED
@given(column_stochastic())
def test_unreachable_pair_is_found_exactly_when_one_exists(matrices):
    reaches = np.linalg.matrix_power(matrices.sum(axis=0), matrices.shape[-1]) > 0  # [receiver, sender]
    pair = unreachable_pair(graphs.from_matrix(matrices))
    if pair is None:
        assert reaches.all()
    else:
        assert not reaches[pair[1], pair[0]]


@CHECKED
@given(doubly_stochastic())
def test_doubly_stochastic_matrices_pass_every_check(matrices):
    """And are refused, by the name of the sums, once half of what node 0 keeps goes to node 1 or comes from it."""
    columns, both = checks = (graphs.require_column_stochastic, graphs.require_doubly_stochastic)
    assert [check(graphs.from_matrix(matrices)) for check in checks] == [None] * 2
    if matrices.shape[-1] == 1:
        return
    for place, refusing, word in (((0, 1, 0), [both], "row"), ((0, 0, 1), [columns, both], "column")):
        moved = matrices.copy()
        half = moved[0, 0, 0] / 2
        moved[0, 0, 0] -= half
        moved[place] += half
        graph = graphs.from_matrix(moved)
        assert columns in refusing or columns(graph) is None
        for check in refusing:
            refused(lambda check=check, graph=graph: check(graph), "graph", word)
