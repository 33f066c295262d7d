"""What experiments.dp_gradient_tracking runs and states: budgets, variants, presets, weights."""

from typing import Any

import numpy as np
import pytest

from experiments import dp_gradient_tracking as experiment
from experiments.command_line import parse
from experiments.tracking import budgets, build, pictures
from experiments.tracking.config import Config, Variant, plan, resolve
from jaxfl import graphs
from jaxfl.graphs import five_agents
from jaxfl.privacy.tracking import TrackingAgent, proven_sensitivities
from jaxfl.privacy.tracking_gaussian import gaussian_epsilon
from jaxfl.privacy.tracking_statements import NO_BOUND


class TestStatements:
    """What the summary would say, without a run."""

    def statements(self, num_rounds=6, sizes=(287,) * 5, **options):
        settings: dict[str, Any] = {"iterations": 6, "num_samples": 2, "scheme": ("S2",), **options}
        config = resolve(Config(**settings))
        (variant,) = plan(config).values()
        return budgets.privacy_of(config, variant, list(sizes))(num_rounds)

    def test_fewer_rounds_cost_less(self):
        spent = [[row["dp_epsilon"] for row in self.statements(rounds)] for rounds in (0, 3, 6)]
        assert spent[0] == [0, 0, 0]
        assert all(less < more for less, more in zip(spent[1], spent[2], strict=True))

    def test_the_smallest_agent_counts(self):
        assert self.statements(sizes=(20, 287, 287, 287, 287))[2]["dp_epsilon"] > self.statements()[2]["dp_epsilon"]

    def test_gaussian_noise(self):
        """The scales are standard deviations, the clip norm is 1 in L2, so that C is 2."""
        published, proven = self.statements(distribution="gaussian", dp_delta=1e-3)
        assert (published["dp_epsilon"], published["reason"]) == (
            None,
            "The published budget is that of Laplace noise.",
        )
        config, pair = resolve(Config(iterations=6, num_samples=2, scheme=("S2",))), five_agents()
        (variant,) = plan(config).values()
        schedule = build.make_schedule(config, variant, 6)
        agents = TrackingAgent(2.0, pair.state_weights.sum(axis=1), pair.tracker_weights.sum(axis=0))
        scale = schedule.tracker_noise_scale
        sent = schedule._replace(tracker_noise_scale=np.where(np.arange(7) < 6, scale, np.inf))  # y~_6 is not sent
        expected = gaussian_epsilon(sent, proven_sensitivities(schedule, agents), dp_delta=1e-3).max()
        assert (proven["dp_epsilon"], proven["dp_delta"]) == (pytest.approx(expected, rel=1e-9), 1e-3)
        assert "per-sample gradients are clipped to the L2 norm 1" in proven["assumptions"]

    def test_assumed_bounds_leave_the_published_epsilon(self):
        clipped, assumed = self.statements()[0], self.statements(assume_bounded=True)
        assert assumed[0]["dp_epsilon"] == clipped["dp_epsilon"]
        assert any("assumed, not enforced" in text for text in assumed[0]["assumptions"])
        assert all(row["dp_epsilon"] is None and "not clipped" in row["reason"] for row in assumed[1:])

    def test_gradients_at_the_own_state(self):
        broadcast, at_state = self.statements(), self.statements(7, gradient_at=("state",))
        assert at_state[0]["dp_epsilon"] > broadcast[0]["dp_epsilon"] > 0  # y~_6 is sent, too
        assert NO_BOUND in at_state[0]["assumptions"]
        assert NO_BOUND not in broadcast[0]["assumptions"]
        assert all(row["dp_epsilon"] is None and "un-noised state" in row["reason"] for row in at_state[1:])

    @pytest.mark.parametrize("options", [{"noise_gain": (0.0,)}, {"noise_base": (1e-9,), "iterations": 100}])
    def test_no_noise_no_epsilon_and_no_picture(self, options, tmp_path):
        """1e-5 to the power of 100 is 0 in float64."""
        found = self.statements(**options)
        assert all(row["dp_epsilon"] is None and "no noise" in row["reason"] for row in found)
        config = resolve(Config(scheme=("S2",), **options))
        assert pictures.plot_budgets(tmp_path, config, plan(config)) == []

    def test_self_loops_lower_epsilon(self):
        plain = resolve(Config(graph=("five_agents", "five_agents_self_loops"), scheme=("S2",)))
        found = [budgets.privacy_of(plain, variant, [287] * 5)(400) for variant in plan(plain).values()]
        assert found[1][0]["dp_epsilon"] < found[0][0]["dp_epsilon"]


@pytest.mark.parametrize("scheme", ["S1", "S2"])
def test_curves_end_where_the_schedule_does(scheme):
    """At k = K, with y~_K, which a run with gradients at the broadcast state does not send any more."""
    config = resolve(Config(iterations=6, scheme=(scheme,), num_samples=2))
    (variant,) = plan(config).values()
    schedule = build.make_schedule(config, variant, 6)
    curve = pictures.published(config, variant, schedule)
    assert curve.shape == (7,)
    whole = budgets.privacy_of(config, variant._replace(gradient_at="state"), [287] * 5)(7)[0]
    assert curve[-1] == pytest.approx(whole["dp_epsilon"], rel=1e-9)
    assert (pictures.proven(config, variant, schedule) <= pictures.published(config, variant, schedule)).all()


class TestPlan:
    def test_every_combination_by_name(self):
        config = resolve(
            Config(
                methods=("DP-GT", "noisy-states", "ternary-states", "noisy-outputs"),
                scheme=("S2",),
                noise_base=(0.999, 0.9999),
                noise_gain=(0.1, 0.2),
                graph=("five_agents", "ring"),
                gradient_at=("broadcast", "state"),
            )
        )
        found = plan(config)
        counts = {method: sum(variant.method == method for variant in found.values()) for method in config.methods}
        # noise, gain, point and graph; without graph; without noise; without point
        assert counts == {"DP-GT": 16, "noisy-states": 8, "ternary-states": 2, "noisy-outputs": 4}
        name = "DP-GT, p = 0.999, noise x 0.1, gradient at state, five_agents"
        assert found[name] == Variant("DP-GT", "S2", 0.999, 0.1, "state", "five_agents")
        assert found["ternary-states, gradient at state"].noise_gain == 0
        assert found["noisy-outputs, p = 0.9999, noise x 0.2"].graph == "ring"

    def test_schemes_have_noise_of_their_own(self):
        config = resolve(Config(noise_exponent=(0.1, 0.2)))
        names = ["DP-GT, S1, p = 0.1", "DP-GT, S1, p = 0.2", "DP-GT, S2"]
        assert [(name, variant.noise) for name, variant in plan(config).items()] == list(
            zip(names, (0.1, 0.2, 0.99959), strict=True)
        )

    def test_one_variant_has_the_method_as_its_name(self):
        assert list(plan(resolve(Config(scheme=("S1",))))) == ["DP-GT"]

    @pytest.mark.parametrize(
        ("method", "point", "rounds"),
        [
            ("DP-GT", "broadcast", 6),
            ("DP-GT", "state", 7),
            ("noisy-states", "broadcast", 6),
            ("noisy-states", "state", 7),
            ("noisy-outputs", "broadcast", 7),
            ("noisy-outputs", "state", 7),
        ],
    )
    def test_rounds_until_all_is_broadcast(self, method, point, rounds):
        config = resolve(Config(iterations=6, methods=(method,), scheme=("S1",)))
        (variant,) = plan(config).values()
        assert build.num_rounds(config, variant._replace(gradient_at=point)) == rounds


class TestPresets:
    @pytest.mark.parametrize("name", list(experiment.PRESETS))
    def test_gives_a_configuration(self, name):
        parsed, preset = parse(["--preset", name], Config, experiment.PRESETS)
        assert preset == name
        options = experiment.PRESETS[name].options
        for config in (resolve(parsed), resolve(parsed, Config(**options))):
            assert {key: getattr(config, key) for key in options} == options
        for variant in plan(config).values():
            schedule = build.make_schedule(config, variant, config.iterations)
            assert schedule.state_noise_scale.shape == (5, 2001)
            # Section 4.1: alpha 0.04, beta 0.005, gamma 0.05, m 53; 0.1, 0.01, 0.1, 55.
            steps = (schedule.state_mixing, schedule.tracker_mixing, schedule.step_size, schedule.num_samples)
            paper = (0.04, 0.005, 0.05, 53) if variant.scheme == "S1" else (0.1, 0.01, 0.1, 55)
            assert steps == pytest.approx(paper, rel=0.01)
            expected = 2000 + (variant.gradient_at == "state" or variant.method == "noisy-outputs")
            assert build.num_rounds(config, variant) == expected
            if variant.method == "DP-GT":
                build.make_pair(config, variant.graph)
                # With L = 1 the paper's own runs break some, but for the middle one of the levels of noise of (S1).
                broken = budgets.broken_conditions(config, variant, 1.0)
                assert bool(broken) == (variant.scheme == "S2" or variant.noise != 0.09)

    def test_an_option_that_a_preset_sets_is_not_the_users(self):
        """fig2 gives noise of Scheme (S1), which Scheme (S2) has no use for."""
        parsed, _ = parse("--preset fig2 --scheme S2".split(), Config, experiment.PRESETS)
        assert resolve(parsed, Config(**experiment.PRESETS["fig2"].options)).scheme == ("S2",)

    def test_listed(self, capsys):
        assert experiment.main(["--list-presets"]) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in experiment.PRESETS)


def config_for(**options):
    return resolve(Config(nodes=4, graph=("ring",), **options))


CHAIN = np.eye(4, k=-1)  # agent i hears i - 1: agent 0 reaches all


class TestPairs:
    def test_named(self):
        pair = build.make_pair(resolve(Config()), "five_agents")
        np.testing.assert_array_equal(pair.state_weights, five_agents().state_weights)

    def test_the_same_graph_twice(self):
        config = resolve(Config(nodes=8, graph=("directed_ring",)))
        pair = build.make_pair(config, "directed_ring")
        np.testing.assert_array_equal(pair.state_weights, graphs.directed_ring(8).mixing_matrix(0))
        np.testing.assert_array_equal(pair.tracker_weights, pair.state_weights)

    def test_a_period_is_averaged(self):
        """Three agents: half to the next in even rounds, half to the one after it in odd ones."""
        pair = build.make_pair(resolve(Config(nodes=3, graph=("exponential",))), "exponential")
        np.testing.assert_allclose(pair.state_weights, np.full((3, 3), 0.25) + 0.25 * np.eye(3))

    def test_of_a_file(self, tmp_path):
        np.save(tmp_path / "pair.npy", np.stack([CHAIN, CHAIN.T]))
        pair = build.make_pair(config_for(), str(tmp_path / "pair.npy"))
        np.testing.assert_array_equal(pair.state_weights, CHAIN)
        np.testing.assert_array_equal(pair.tracker_weights, CHAIN.T)

    def test_baseline_graphs_are_doubly_stochastic(self):
        for name in ("ring", "complete", "star"):
            graph = build.make_baseline_graph(config_for(methods=("DP-GT", "noisy-states"), baseline_graph=name))
            np.testing.assert_allclose(graph.mixing_matrix(0).sum(axis=0), 1)
            np.testing.assert_allclose(graph.mixing_matrix(0).sum(axis=1), 1)
