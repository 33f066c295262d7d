"""Statements and curves of experiments.dp_gradient_tracking without a run: budgets by rounds and options, weights."""

import numpy as np
import pytest

from experiments.dp_gradient_tracking import EXPERIMENT, options
from experiments.dp_gradient_tracking.budgets import broken_conditions, calibrated, privacy_of, proven, published
from experiments.dp_gradient_tracking.options import scheme_steps
from experiments.dp_gradient_tracking.pictures import _whole_runs, plot_budgets
from jaxfl import graphs
from jaxfl.algorithms.perturbed_gossip import perturbed_gossip
from jaxfl.core import ArgumentError
from jaxfl.frame.experiment import request
from jaxfl.graphs import five_agents
from jaxfl.graphs.files import tracking_pair
from jaxfl.privacy.tracking import (
    TrackingAgent,
    gaussian_shift,
    joint_epsilon,
    joint_shift,
    proven_sensitivities,
    shifted_epsilon,
)


def config_of(**changes):
    """One row's configuration; tiny runs of Scheme (S2) where nothing else is said."""
    settings = {"iterations": 6, "batch_size": 2, "scheme": "S2", "distribution": "laplace", **changes}
    return request(EXPERIMENT, settings).config


def statements(num_rounds=6, sizes=(287,) * 5, **changes):
    """Statements that the summary would hold."""
    return privacy_of(config_of(**changes), sizes)(num_rounds)


class TestStatements:
    def test_gaussian_noise(self):
        """The scales are standard deviations, the clip norm is 1 in L2, so that C is 2."""
        changes = {"distribution": "gaussian", "dp_delta": 1e-3, "noise_gain": 0.003}
        published, proven = statements(sizes=(2,) * 5, **changes)  # a batch holds all samples
        assert (published["dp_epsilon"], published["reason"]) == (
            None,
            "This bound holds for Laplace noise only.",
        )
        schedule, pair = config_of(**changes).schedule(), five_agents()
        agents = TrackingAgent(2.0, pair.state_weights.sum(axis=1), pair.tracker_weights.sum(axis=0))
        scale = schedule.tracker_noise_scale
        sent = schedule._replace(tracker_noise_scale=np.where(np.arange(7) < 6, scale, np.inf))  # y~_6 is not sent
        expected = shifted_epsilon(joint_shift(sent, agents), 1e-3).max()
        assert (proven["dp_epsilon"], proven["dp_delta"]) == (pytest.approx(expected, rel=1e-9), 1e-3)
        assert expected < shifted_epsilon(gaussian_shift(sent, proven_sensitivities(schedule, agents)), 1e-3).max()
        assert "per-sample gradients are clipped to the L2 norm 1" in proven["assumptions"]
        _, drawn = statements(**changes)
        expected = joint_epsilon(sent, agents, dp_delta=1e-3, num_local_samples=287)(1.0).max()
        assert drawn["dp_epsilon"] == pytest.approx(expected, rel=1e-9)
        assert drawn["dp_epsilon"] < 0.2 * proven["dp_epsilon"]
        assert "averaged over how often a sample takes part" in drawn["accountant"]

    @pytest.mark.parametrize("changes", [{"noise_gain": 0.0}, {"noise_base": 1e-9, "iterations": 100}])
    def test_no_noise_no_epsilon_and_no_picture(self, changes, tmp_path):
        """1e-5 to the power of 100 is 0 in float64."""
        assert all(row["dp_epsilon"] is None and "no noise" in row["reason"] for row in statements(**changes))
        assert plot_budgets(tmp_path, {"DP-GT": config_of(**changes)}) == []


@pytest.mark.parametrize("method", ["DP-GT", "noisy-states", "noisy-outputs"])
@pytest.mark.parametrize("bound", ["proven", "published"])
@pytest.mark.parametrize("scheme", ["S1", "S2"])
def test_every_step_size_gets_the_least_noise_of_its_own(scheme, bound, method):
    sizes, gains = (287,) * 5, []
    for step_size in (0.05, 0.2):
        config = config_of(method=method, scheme=scheme, step_size=step_size, bound=bound, target_epsilon=8.0)
        held = calibrated(config, sizes)
        gains.append(held.noise.noise_gain)
        first, *others = privacy_of(held, sizes)(held.num_rounds)
        assert (first["asked"], (first["bound"] == "proven") == (bound == "proven")) == (True, True)
        assert 0.998 * 8 < first["dp_epsilon"] <= 8
        assert not any("asked" in one for one in others)
        spent = []
        for part in (1.0, 0.998):
            given = config_of(method=method, scheme=scheme, step_size=step_size, noise_gain=part * gains[-1])
            stated = privacy_of(given, sizes)(given.num_rounds)
            spent.append([one["dp_epsilon"] for one in stated if (one["bound"] == "proven") == (bound == "proven")][-1])
        assert spent[0] <= 8.0 < spent[1]
    assert gains[1] > 1.2 * gains[0]


class TestAgentsOfUnequalSize:
    """Sizes are public: one budget gives each agent the least noise of its own."""

    SIZES = (48, 300, 96, 1966, 360)

    @pytest.mark.parametrize("scheme", ["S1", "S2"])
    @pytest.mark.parametrize(
        ("method", "distribution"),
        [("DP-GT", "laplace"), ("DP-GT", "gaussian"), ("noisy-states", "laplace"), ("noisy-outputs", "gaussian")],
    )
    def test_every_agent_spends_the_budget(self, method, distribution, scheme):
        query = {"method": method, "distribution": distribution, "scheme": scheme, "iterations": 60}
        held = calibrated(config_of(**query, batch_size=20, target_epsilon=3.0), self.SIZES)
        stated = privacy_of(held, self.SIZES)(held.num_rounds)[0]
        assert stated["asked"]
        assert all(0.99 * 3 < epsilon <= 3 for epsilon in stated["node_epsilons"])
        scales, gains = held.schedule().state_noise_scale, np.array(held.noise.agent_gains)
        assert gains.max() == 1.0
        if (method, distribution) == ("DP-GT", "laplace"):  # whose bound counts a sample's batches
            assert gains.min() == gains[np.argmax(self.SIZES)] < 0.4
        unscaled = config_of(**query, batch_size=20, noise_gain=held.noise.noise_gain).schedule().state_noise_scale
        np.testing.assert_allclose(scales, gains[:, None] * unscaled, rtol=1e-12)

    def test_an_even_deal_keeps_the_ratios_of_the_schedule(self):
        config = config_of(batch_size=20, target_epsilon=3.0)
        assert calibrated(config, (90, 90, 89, 89, 89)).noise.agent_gains == ()
        assert len(calibrated(config, (90, 90, 89, 89, 88)).noise.agent_gains) == 5
        ratios = (1.0, 0.5, 0.5, 0.5, 0.5)
        given = calibrated(config_of(batch_size=20, target_epsilon=3.0, agent_gains=ratios), self.SIZES)
        assert given.noise.agent_gains == ratios
        assert 0.99 * 3 < privacy_of(given, self.SIZES)(given.num_rounds)[0]["dp_epsilon"] <= 3


@pytest.mark.parametrize("scheme", ["S1", "S2"])
def test_curves_end_where_the_schedule_does(scheme):
    """At k = K, with y~_K, which a run with gradients at the broadcast state does not send any more."""
    config = config_of(scheme=scheme)
    curve = published(config)
    assert curve.shape == (7,)
    whole = statements(7, scheme=scheme, gradient_at="state")[0]
    assert curve[-1] == pytest.approx(whole["dp_epsilon"], rel=1e-9)
    assert (proven(config) <= curve).all()


def test_whole_runs_follow_the_scheme_but_for_what_was_given():
    horizons, spent = _whole_runs(config_of(scheme="S1", iterations=40))
    assert (horizons[0], horizons[-1]) == (10, 40)
    for count, epsilon in ((10, spent[0]), (40, spent[-1])):
        assert epsilon == pytest.approx(published(config_of(scheme="S1", iterations=count))[-1], rel=1e-12)
    _, fixed = _whole_runs(config_of(scheme="S1", iterations=40, step_size=0.5))
    alone = config_of(scheme="S1", iterations=10, step_size=0.5)
    assert fixed[0] == pytest.approx(published(alone)[-1], rel=1e-12)


@pytest.mark.parametrize(
    ("method", "gradient_at", "rounds"),
    [
        ("DP-GT", "broadcast", 6),
        ("DP-GT", "state", 7),
        ("noisy-states", "broadcast", 6),
        ("noisy-states", "state", 7),
        ("noisy-outputs", "broadcast", 7),
    ],
)
def test_rounds_until_all_is_broadcast(method, gradient_at, rounds):
    at = {} if method == "noisy-outputs" else {"gradient_at": gradient_at}
    assert config_of(method=method, **at).num_rounds == rounds


def test_steps_of_a_scheme_are_those_of_its_iterations():
    assert config_of(iterations=6).learning.state_mixing == scheme_steps("S2", 6).state_mixing == 0.1
    assert config_of(scheme="S1", iterations=50).learning.step_size == scheme_steps("S1", 50).step_size
    within = config_of(scheme="S1", iterations=200, distribution="gaussian", batch_size=287)
    assert within.learning.step_size == 0.3, "a larger one gets worse with rounds"
    assert config_of(scheme="S1", step_size=0.3).learning.step_size == 0.3


CHAIN = np.eye(4, k=-1)  # agent i hears i - 1: agent 0 reaches all


class TestPairs:
    def test_named(self):
        np.testing.assert_array_equal(tracking_pair("five_agents", 5).state_weights, five_agents().state_weights)
        with pytest.raises(ArgumentError, match="nodes: must be 5 for five_agents; got 4"):
            tracking_pair("five_agents", 4)

    def test_the_same_graph_twice(self):
        pair = tracking_pair("directed_ring", 8)
        np.testing.assert_array_equal(pair.state_weights, graphs.directed_ring(8).mixing_matrix(0))
        np.testing.assert_array_equal(pair.tracker_weights, pair.state_weights)

    def test_a_period_is_averaged(self):
        """Three agents: half to the next in even rounds, half to the one after it in odd ones."""
        pair = tracking_pair("exponential", 3)
        np.testing.assert_allclose(pair.state_weights, np.full((3, 3), 0.25) + 0.25 * np.eye(3))

    def test_of_a_file(self, tmp_path):
        np.save(tmp_path / "pair.npy", np.stack([CHAIN, CHAIN.T]))
        pair = tracking_pair(str(tmp_path / "pair.npy"), 4)
        np.testing.assert_array_equal(pair.state_weights, CHAIN)
        np.testing.assert_array_equal(pair.tracker_weights, CHAIN.T)

    def test_an_edge_weight_is_that_of_a_file_with_such_weights(self, tmp_path):
        """The weights, the epsilon and the theorems' conditions agree."""
        whole = tracking_pair("five_agents", 5)
        np.save(tmp_path / "pair.npy", np.stack([0.25 * whole.state_weights, 0.25 * whole.tracker_weights]))
        scaled, from_file = config_of(edge_weight=0.25), config_of(graph=str(tmp_path / "pair.npy"))
        for one, other in zip(scaled.weights.pair(5), from_file.weights.pair(5), strict=True):
            np.testing.assert_array_equal(one, other)
        assert proven(scaled).tolist() == proven(from_file).tolist() != proven(config_of()).tolist()
        assert broken_conditions(scaled, 5.0) == broken_conditions(from_file, 5.0)

    @pytest.mark.parametrize("name", ["ring", "complete", "star"])
    def test_baseline_graphs_are_taken(self, name, monkeypatch):
        """As doubly stochastic ones with the named graph's edges, which the algorithm takes."""
        taken = []

        def build(task, *, graph, **options):
            taken.append(graph)
            return perturbed_gossip(task, graph=graph, **options)

        monkeypatch.setattr(options, "perturbed_gossip", build)
        config_of(method="noisy-states", baseline_graph=name, nodes=4).settled().algorithm()
        (graph,) = taken
        matrix, named = graph.mixing_matrix(0), getattr(graphs, name)(4)
        np.testing.assert_allclose([matrix.sum(axis=0), matrix.sum(axis=1)], 1.0, atol=1e-12)
        np.testing.assert_array_equal(graph.adjacency(0), named.adjacency(0))
