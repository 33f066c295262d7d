"""Names of nodes travel with data and graphs, which must agree, and are shown."""

import json

import jax
import networkx as nx
import numpy as np
import pytest
from problems import small_task
from toy_problem import toy_case, toy_data, toy_statements, train_toy

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.analysis import partition_plot
from jaxfl.data import by_owner, federate
from jaxfl.gradients import fixed
from jaxfl.gradients.samplers import check_counts
from jaxfl.privacy.tracking import exponential_schedule
from jaxfl.training.chunks import Diverged, FatalCount, refuse_bad
from jaxfl.training.measures import refuse_bad_scores

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


def test_both_graphs_of_gradient_tracking_have_names():
    data = federate(INPUTS, LABELS, by_owner(SITES))
    assert data.names is not None

    def tracking(names, **changes):
        matrix = graphs.from_networkx(TRUST).mixing_matrix(0)
        weights = {"state_weights": matrix, "tracker_weights": matrix, "names": names} | changes
        schedule = exponential_schedule(3, state_noise_base=0.5, tracker_noise_base=0.5)._replace(num_samples=1)
        return jaxfl.gradient_tracking(small_task(), schedule=schedule, clip_norm=1.0, **weights)

    with pytest.raises(ArgumentError, match=r"^data: .* node 0 is 'S03' in the graph and 'S00' in the data"):
        tracking(graphs.from_networkx(TRUST).names).init(jax.random.key(0), data)
    with pytest.raises(ArgumentError, match=r"^names: must hold one name for each node; got 3 for 4 nodes"):
        tracking(data.names[:3])
    with pytest.raises(ArgumentError, match=r"the first holds of nodes \[\] and the second of nodes \['S00'\]"):
        tracking(data.names, state_weights=np.eye(4), tracker_weights=np.eye(4)[[0, 0, 0, 0]].T)
    learner = tracking(data.names)
    jax.jit(learner.round)(jax.random.key(0), learner.init(jax.random.key(0), data), data)


def test_messages_tell_the_name_of_a_node():
    names = ("S00", "S01")
    loss = {"loss": np.array([[1.0, np.nan]], np.float32)}
    with pytest.raises(Diverged, match=r"at node 1 \('S01'\) in round 1 .* labels of node 1 \('S01'\)\.$"):
        refuse_bad(loss, "A", 0, first_round=1, names=names)
    params = {"w": np.array([[1.0], [np.inf]], np.float32)}
    lost = {"consensus_distance": np.array([np.nan], np.float32)}
    with pytest.raises(Diverged, match=r"which left node 1 \('S01'\) with parameters"):
        refuse_bad(lost, "A", 0, first_round=1, params=lambda: params, names=names)
    misses = {"prefetch_misses": np.array([[2, 0]], np.int32)}
    with pytest.raises(FatalCount, match=r"first 2 at node 0 \('S00'\) in round 1"):
        refuse_bad(misses, "A", 0, first_round=1, names=names, fatal=tuple(misses))
    with pytest.raises(Diverged, match=r"at node 1 \('S01'\) in round 3"):
        refuse_bad_scores({"own": {"x": np.array([1.0, np.nan])}}, "A", 0, 0, 3, names)
    with pytest.raises(ArgumentError, match=r"got 5, and node 1 \('S01'\) has 3"):
        check_counts(fixed(5), jax.numpy.array([6, 3]), names)
    gradient = jaxfl.mini_batch(sampler=fixed(2))
    sites = federate(INPUTS, LABELS, by_owner(SITES))
    with pytest.raises(ArgumentError, match=r"got 2, and node 1 \('S01'\) has 1"):
        jaxfl.push_sum(small_task(), graph=graphs.ring(4), step_size=0.1, gradient=gradient).init(
            jax.random.key(0), sites
        )
    for parts, actual in (
        ([[0], []], r"node 1 \('S01'\) has none"),
        ([[0], [0]], r"node 0 \('S00'\) and node 1 \('S0"),
    ):
        with pytest.raises(ArgumentError, match=actual):
            federate(INPUTS, LABELS, parts, names=names)
    one_way: nx.DiGraph = nx.DiGraph([("S00", "S01")])
    with pytest.raises(ArgumentError, match=r"the edge from node 0 \('S00'\) to node 1 \('S01'\) has no reverse"):
        graphs.from_networkx(one_way, weights="metropolis")
    with pytest.raises(ArgumentError, match=r"no path leads from node 1 \('S01'\) to node 0 \('S00'\)"):
        learner(graphs.from_networkx(one_way))


def test_a_run_that_diverges_tells_the_name_of_the_node(tmp_path):
    case = toy_case(data=named_toy_data, seeds=(0,), numbers={"bad_round": 12.0})
    with pytest.raises(Diverged, match=r"at node 2 \('S02'\) in round 13"):
        train_toy(tmp_path, {"A": case})


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


def named_toy_data(seed):
    plain = toy_data()[0]
    return federate(plain.inputs, plain.labels, list(np.asarray(plain.indices)), names=["S00", "S01", "S02", "S03"])


def test_files_and_pictures_show_names(tmp_path, monkeypatch):
    data = named_toy_data(0)
    names = list(data.names or ())
    case = toy_case(data=named_toy_data, seeds=(0,), privacy=toy_statements)
    train_toy(tmp_path, {"A": case})
    (stated,) = json.loads((tmp_path / "privacy.json").read_text())["A"]
    assert stated["nodes"] == names
    assert [len(part) for part in stated["node_epsilons"]] == [4]
    figures, make = [], partition_plot.new_figure
    monkeypatch.setattr(partition_plot, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1])
    assert partition_plot.plot_partition(data, data.labels, 3, tmp_path / "partition.png").exists()
    assert [tick.get_text() for tick in figures[0].axes[1].get_xticklabels()] == names
