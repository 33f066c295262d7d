"""Names of nodes travel with data and graphs, which must agree, and are shown."""

import json

import jax
import networkx as nx
import numpy as np
import pytest
from problems import small_task
from toy_problem import toy_data, toy_statements, toy_variant, train_toy

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.analysis.partition_plot import plot_partition
from jaxfl.data import by_owner, federate

SITES = ["S00", "S03", "S01", "S02", "S00", "S02"]
INPUTS, LABELS = np.arange(36, dtype=np.float32).reshape(6, 6), np.array([0, 1, 2, 0, 1, 2])
TRUST: nx.Graph = nx.Graph([("S03", "S00"), ("S00", "S02"), ("S02", "S01")])  # whose nodes stand in another order


def learner(graph):
    return jaxfl.push_sum(small_task(), graph=graph, step_size=0.1)


def test_data_of_a_site_get_the_neighbors_of_that_site():
    data = federate(INPUTS, LABELS, by_owner(SITES))
    assert data.names is not None
    assert data.names == ("S00", "S01", "S02", "S03")
    with pytest.raises(
        ArgumentError, match=r"node 0 is 'S03' in the graph and 'S00' in the data\. .*names=data\.names"
    ):
        learner(graphs.from_networkx(TRUST)).init(jax.random.key(0), data)
    graph = graphs.from_networkx(TRUST, names=data.names)
    for i, name in enumerate(data.names):
        (senders,) = np.nonzero(graph.mixing_matrix(0)[i])
        assert {data.names[sender] for sender in senders} == {name, *TRUST.neighbors(name)}
    state = learner(graph).init(jax.random.key(0), data)
    jax.jit(learner(graph).round)(jax.random.key(0), state, data)


def test_names_are_those_that_are_given_and_numbers_need_none():
    parts = [[0, 1], [2, 3, 4], [5]]
    assert federate(INPUTS, LABELS, parts).names is None
    named = federate(INPUTS, LABELS, parts, names=["c", "a", "b"])
    assert named.names == ("c", "a", "b")
    learner(graphs.ring(3)).init(jax.random.key(0), named)  # a graph without names
    learner(graphs.from_networkx(nx.path_graph(3))).init(jax.random.key(0), named)
    assert graphs.from_networkx(nx.path_graph(3)).names is None
    assert federate(INPUTS, LABELS, by_owner([30, 10, 30, 20, 10, 10])).names == ("10", "20", "30")
    assert graphs.from_networkx(nx.Graph([(30, 10), (10, 20)])).names == ("30", "10", "20")
    for wrong in (["a", "b"], ["a", "b", "a"]):
        with pytest.raises(ArgumentError, match=r"^names: must hold one name for each node, all different"):
            federate(INPUTS, LABELS, parts, names=wrong)


def test_names_go_with_a_graph():
    graph = graphs.from_networkx(TRUST)
    assert graph.names == tuple(TRUST.nodes)
    assert graphs.permute(graph, [1, 0, 2, 3]).names == ("S00", "S03", "S02", "S01")
    assert graphs.sequence([graph, graph]).names == graph.names
    with pytest.raises(ArgumentError, match=r"^graphs: must have the same names"):
        graphs.sequence([graph, graphs.ring(4)])
    for wrong in (["S00"], ["S00", "S01", "S02", "S04"]):
        with pytest.raises(ArgumentError, match=r"^names: must be the graph's labels, each once"):
            graphs.from_networkx(TRUST, names=wrong)


def test_files_and_pictures_show_names(tmp_path):
    names = ["S00", "S01", "S02", "S03"]
    plain = toy_data()[0]
    data = federate(plain.inputs, plain.labels, list(np.asarray(plain.indices)), names=names)
    variant = toy_variant(data=lambda seed: data, seeds=(0,), privacy=toy_statements)
    train_toy(tmp_path, {"A": variant})
    (stated,) = json.loads((tmp_path / "privacy.json").read_text())["A"]
    assert stated["nodes"] == names
    assert [len(part) for part in stated["node_epsilons"]] == [4]
    assert plot_partition(data, plain.labels, 3, tmp_path / "partition.png").exists()
