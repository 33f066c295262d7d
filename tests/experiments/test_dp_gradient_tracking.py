"""The experiment end to end through its command line: what a run leaves, conditions, refusals, resuming, variants."""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from experiments import dp_gradient_tracking as experiment
from experiments.tracking import budgets, build, pictures
from experiments.tracking import config as config_of
from experiments.tracking.config import Config, plan, resolve
from jaxfl.data import load
from jaxfl.graphs import five_agents
from jaxfl.privacy.statements import statement_text
from jaxfl.privacy.tracking import (
    TrackingAgent,
    exponential_schedule,
    participation_epsilon,
    polynomial_schedule,
    proven_sensitivities,
    published_sensitivities,
)
from jaxfl.privacy.tracking_statements import NO_BOUND
from jaxfl.training.records import RunDirectory

TINY = "--iterations 6 --num-samples 2 --quiet --smoothness 2".split()
OPTIONS = [*TINY, *"--seeds 0 1 --evaluate-every 2 --checkpoint-every 1".split()]
SCHEMES = ("DP-GT, S1", "DP-GT, S2")
BASELINES = ("noisy-states", "noisy-quantized-states", "ternary-states", "quantized-states", "noisy-outputs")
# Every condition of Scheme (S1) holds: alpha, beta < 0.4, gamma < n / (4 (v1 . v2) L) = 0.1, noise exponents to 0.14.
STRICT = [*OPTIONS, "--strict", *"--scheme S1 --state-mixing 0.1 --step-size 0.01".split()]
STRICT += "--distribution gaussian --assume-bounded".split()


def run(arguments):
    """Exit code and what was printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = experiment.main(arguments)
    return code, printed.getvalue()


def saved(folder):
    return json.loads((folder / "config.json").read_text())["config"]


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def schedule_of(scheme, num_rounds=6):
    """The schedule of the tiny runs: default noise, 0.003 of the paper's, and two samples."""
    share = np.arange(1, 6) / 5
    if scheme == "DP-GT, S1":
        p = 0.09 + 0.05 * share
        found = polynomial_schedule(num_rounds, state_noise_exponent=p, tracker_noise_exponent=p, horizon_offset=0)
    else:
        p = 0.99959 + 0.00005 * share
        found = exponential_schedule(num_rounds, state_noise_base=p, tracker_noise_base=p)
    scales = {name: 0.003 * getattr(found, name) for name in ("state_noise_scale", "tracker_noise_scale")}
    return found._replace(num_samples=2, **scales)


def without_last_tracker(schedule):
    """Infinite noise on y~_K, which a run of K rounds does not send."""
    scale = schedule.tracker_noise_scale
    return schedule._replace(
        tracker_noise_scale=np.where(np.arange(scale.shape[1]) < scale.shape[1] - 1, scale, np.inf)
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of both schemes: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    code, printed = run([*OPTIONS, "--out", str(folder)])
    assert code == 0
    return folder, printed


class TestFinishedRun:
    def test_config_holds_every_option_that_decides_results(self, finished):
        config = saved(finished[0])
        fields = {field.name for field in dataclasses.fields(Config)}
        extra = {"variants", "graph_crc32"}
        assert set(config) == (fields - {"data_dir", "out", "quiet", "resume", "strict"}) | extra
        assert (config["iterations"], config["num_samples"], config["smoothness"]) == (6, 2, 2.0)
        assert config["variants"]["DP-GT, S2"] == {
            "method": "DP-GT",
            "scheme": "S2",
            "noise": 0.99959,
            "noise_gain": 0.003,
            "gradient_at": "broadcast",
            "graph": "five_agents",
        }
        assert (config["clip_norm"], config["nodes"], config["model"]) == (10.0, 5, "mlp")

    def test_a_line_per_evaluation_with_what_the_theory_bounds(self, finished):
        lines = lines_of(finished[0])
        places = [(line["variant"], line["seed"], line["round"]) for line in lines]
        assert places == [(name, seed, k) for name in SCHEMES for seed in (0, 1) for k in (0, 2, 4, 6)]
        for line in lines:
            assert line["gradient_norm_squared_average_model"] > 0
            assert 0 <= line["train_accuracy_average_model"] <= 1
            assert (line["consensus_distance"] is None) == (line["round"] == 0)
            assert line["round"] == 0 or line["consensus_distance"] > 0
            assert line["total_gradient_evaluations"] == line["round"] * 5 * 2

    def test_summary_has_the_documented_fields(self, finished):
        summary = summary_of(finished[0])
        names = {"experiment", "preset", "status", "seeds", "variants", "seconds", "environment"}
        assert set(summary) == names
        assert (summary["experiment"], summary["status"]) == ("dp_gradient_tracking", "finished")
        assert (summary["seeds"], tuple(summary["variants"])) == ([0, 1], SCHEMES)
        for name, row in summary["variants"].items():
            assert row["rounds"] == 6
            last = [line for line in lines_of(finished[0]) if line["variant"] == name and line["round"] == 6]
            for metric in ("consensus_distance", "gradient_norm_squared_average_model"):
                assert row[metric]["per_seed"] == [line[metric] for line in last]

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_three_statements_of_what_was_sent(self, scheme, finished):
        """x~_0, ..., x~_6 and y~_0, ..., y~_5, of the worst agent, with C = 20 for the clip norm 10."""
        schedule, pair = schedule_of(scheme), five_agents()
        agents = TrackingAgent(20.0, pair.state_weights.sum(axis=1), pair.tracker_weights.sum(axis=0))

        def spent(sensitivities):
            states = sensitivities.state / schedule.state_noise_scale
            trackers = sensitivities.tracker / schedule.tracker_noise_scale
            return (states.sum(axis=1) + trackers[:, :6].sum(axis=1)).max()

        sent = without_last_tracker(schedule)
        config, digits = resolve(Config()), load("digits")
        sizes = np.min([build.make_data(config, digits, seed).sizes for seed in (0, 1)], axis=0)
        by_size = {
            size: participation_epsilon(sent, agents, num_local_samples=size, dp_delta=1e-5) for size in (287, 288)
        }
        counted = max(by_size[size][agent] for agent, size in enumerate(sizes.tolist()))
        found = summary_of(finished[0])["variants"][scheme]["privacy"]
        assert [(row["bound"], row["dp_delta"]) for row in found] == [("published", 0), ("proven", 0), ("proven", 1e-5)]
        assert found[0]["dp_epsilon"] == pytest.approx(spent(published_sensitivities(schedule, agents)), rel=1e-9)
        assert found[1]["dp_epsilon"] == pytest.approx(spent(proven_sensitivities(schedule, agents)), rel=1e-9)
        assert found[2]["dp_epsilon"] == pytest.approx(counted, rel=1e-9)
        assert found[2]["dp_epsilon"] < found[1]["dp_epsilon"] < found[0]["dp_epsilon"]
        for row in found:
            assert (row["neighboring_relation"], row["nodes"], row["reason"]) == ("replace_one", 5, None)
            assert "per-sample gradients are clipped to the L1 norm 10" in row["assumptions"]
            assert f"{scheme}: {statement_text(row)}" in " ".join(finished[1].split())

    def test_pictures(self, finished):
        for name in ("training.png", "convergence.png", "budgets.png"):
            picture = finished[0] / "plots" / name
            assert picture.read_bytes().startswith(b"\x89PNG")
            assert picture.stat().st_size > 5000
            assert str(picture) in finished[1]

    def test_broken_conditions_are_named_with_their_numbers_before_the_run(self, finished):
        """alpha = 72 / 6^0.987, more than Lemma 1 allows on five agents: 1 for row sums of 1, 0.4 for eigenvalues."""
        alpha = 72 / 6**0.987
        lines = finished[1].splitlines()
        warnings = [line for line in lines if line.startswith("warning: ")]
        found = f"found {alpha:.6g}, required"
        assert f"warning: Assumption 4: alpha < 1 / max_i sum_j R_ij fails: {found} 1 (DP-GT, S1)" in warnings
        assert any(f"of L1 fails: {found} 0.4 (DP-GT, S1)" in line for line in warnings)
        assert (
            "warning: Assumption 5: gamma < n / (20 (v1 . v2) L) fails: found 0.1, required 0.02 (DP-GT, S2)" in lines
        )
        assert lines[: len(warnings)] == warnings
        assert lines[len(warnings)].startswith(
            "digits: 1437 samples over 5 agents (iid), model mlp with 650 parameters"
        )
        recorded = json.loads((finished[0] / "conditions.json").read_text())
        assert [len(recorded[name]) for name in SCHEMES] == [4, 4]
        for name in SCHEMES:
            assert all(f"warning: {text} ({name})" in warnings for text in recorded[name])

    def test_says_what_runs(self, finished):
        assert "K = 6, gradients clipped at L1 norm 10, laplace noise, seeds 0 1" in finished[1]
        row = "DP-GT, S2: graph five_agents, alpha 0.1, beta 0.01, gamma 0.1, m 2, noise scales 0.00299 to 0.00299"
        assert row in finished[1].splitlines()


def test_strict_refuses_with_the_conditions(tmp_path, capsys):
    assert experiment.main([*TINY, "--strict", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    pattern = r"error: --strict: .* hold; DP-GT, S1: Assumption 4: alpha < .* fails: found 12\.28\d+, required 1; .*\n"
    assert re.fullmatch(pattern, error), error
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A run that meets every condition, with Gaussian noise and gradients that are assumed to be bounded."""
    folder = tmp_path_factory.mktemp("strict") / "run"
    code, printed = run([*STRICT, "--out", str(folder)])
    assert code == 0
    return folder, printed


@pytest.mark.slow
def test_interrupted_and_resumed_equals_uninterrupted(strict, tmp_path, monkeypatch, capsys):
    append = RunDirectory.append_metrics

    def interrupted(self, line):
        if (line["seed"], line["round"]) == (1, 4):
            raise KeyboardInterrupt
        append(self, line)

    monkeypatch.setattr(RunDirectory, "append_metrics", interrupted)
    folder = tmp_path / "run"
    assert experiment.main([*STRICT, "--out", str(folder)]) == 130
    assert "with --resume goes on from the last checkpoint" in capsys.readouterr().err
    whole, part = ((path / "metrics.jsonl").read_bytes() for path in (strict[0], folder))
    assert part.count(b"\n") == 6
    assert whole.startswith(part)

    monkeypatch.setattr(RunDirectory, "append_metrics", append)
    assert experiment.main([*STRICT, "--resume", "--out", str(folder)]) == 0
    assert (folder / "metrics.jsonl").read_bytes() == whole
    resumed, uninterrupted = (summary_of(path) for path in (folder, strict[0]))
    for summary in (resumed, uninterrupted):
        del summary["seconds"]
    assert resumed == uninterrupted
    assert saved(folder) == saved(strict[0])


@pytest.mark.slow
class TestStrictRun:
    def test_meets_every_condition(self, strict):
        assert "warning" not in strict[1]
        assert json.loads((strict[0] / "conditions.json").read_text()) == {"DP-GT": []}

    def test_so_do_constant_steps(self):
        """Smaller ones, of Scheme (S2). Of what bounds them alpha < 0.0104 / L is broken first when L grows."""
        steps = {"state_mixing": 0.001, "tracker_mixing": 0.1, "step_size": 1e-6}
        config = replace(resolve(Config(iterations=6, scheme=("S2",))), **steps)
        (variant,) = plan(config).values()
        assert budgets.broken_conditions(config, variant, 2.0) == []
        (broken,) = budgets.broken_conditions(config, variant, 20.0)
        assert broken.name.startswith("Assumption 5: alpha < sqrt(2)")
        assert (broken.found, broken.required) == (0.001, pytest.approx(0.000521, rel=1e-3))

    def test_assumed_bounds_give_no_epsilon(self, strict):
        published, proven = summary_of(strict[0])["variants"]["DP-GT"]["privacy"]
        assert published["dp_epsilon"] is proven["dp_epsilon"] is None
        assert published["reason"] == "The published budget is that of Laplace noise."
        assert proven["reason"].startswith("Gradients are not clipped")

    def test_nothing_is_clipped(self, strict):
        assert all(not line["clipped_fraction"] for line in lines_of(strict[0]))
        assert "gradients assumed at L2 norm 1, gaussian noise" in strict[1]

    def test_no_empty_picture_of_budgets(self, strict):
        assert sorted(path.name for path in (strict[0] / "plots").iterdir()) == ["convergence.png", "training.png"]
        assert "budgets.png" not in strict[1]


@pytest.fixture(scope="module")
def every_method(tmp_path_factory):
    """All methods but DP-GT under Scheme (S2), gradients at the agents' own states."""
    folder = tmp_path_factory.mktemp("methods") / "run"
    options = "--iterations 4 --num-samples 2 --seeds 0 --quiet --evaluate-every 5 --train-samples 10"
    more = ["--scheme", "S2", "--gradient-at", "state", "--methods", *BASELINES, "--quantization-step", "0.5"]
    code, printed = run([*options.split(), *more, "--out", str(folder)])
    assert code == 0
    return folder, printed


@pytest.mark.slow
class TestEveryMethod:
    def test_all_run_until_every_broadcast_is_used(self, every_method):
        variants = summary_of(every_method[0])["variants"]
        assert tuple(variants) == BASELINES
        assert {row["rounds"] for row in variants.values()} == {5}  # K + 1

    def test_gradients_at_the_own_state_have_a_published_epsilon_alone(self, every_method):
        for method, row in summary_of(every_method[0])["variants"].items():
            published, *proven = row["privacy"]
            assert published["bound"] == "published"
            if method == "noisy-outputs":  # its own state is known to all
                assert published["dp_epsilon"] == proven[0]["dp_epsilon"] > 0
                assert NO_BOUND not in published["assumptions"]
            else:
                assert NO_BOUND in published["assumptions"]
                assert all("un-noised state" in statement["reason"] for statement in proven)

    def test_epsilons_of_perturbed_states_and_outputs(self, every_method):
        """d_{k+1} = 0.9 d_k + 0.1 C / m and d_k = 0.1 C / m with C / m = 10, over scales 0.003 p^4, k = 0, ..., 4."""
        found = {name: row["privacy"][0] for name, row in summary_of(every_method[0])["variants"].items()}
        scale = 0.003 * (0.99959 + 0.00001) ** 4  # of agent 0, the smallest
        changes = [0.0]
        for _ in range(4):
            changes.append(0.9 * changes[-1] + 1.0)
        assert found["noisy-states"]["dp_epsilon"] == pytest.approx(sum(changes) / scale, rel=1e-9)
        assert found["noisy-quantized-states"]["dp_epsilon"] == found["noisy-states"]["dp_epsilon"]
        assert found["noisy-outputs"]["dp_epsilon"] == pytest.approx(5 * 1.0 / scale, rel=1e-9)

    def test_quantization_alone_gives_a_delta(self, every_method):
        """A change of 1 in x^1 is beyond a step of 0.5 and of 1."""
        for name in ("ternary-states", "quantized-states"):
            published = summary_of(every_method[0])["variants"][name]["privacy"][0]
            assert (published["dp_epsilon"], published["dp_delta"]) == (None, 1.0)
            assert "delta reaches 1 with broadcast 1" in published["reason"]

    def test_only_what_a_method_uses_is_named(self, every_method):
        lines = every_method[1].splitlines()
        assert "ternary-states: graph ring, alpha 0.1, gamma 0.1, m 2, no noise" in lines
        assert "noisy-outputs: graph ring, gamma 0.1, m 2, noise scales 0.003 to 0.003" in lines
        assert not any("beta" in line for line in lines)

    def test_pictures(self, every_method):
        for name in ("training.png", "convergence.png", "budgets.png"):
            assert (every_method[0] / "plots" / name).stat().st_size > 5000


def test_every_option_is_read():
    """As an attribute of the configuration, or by a name in a comprehension over `getattr`."""
    trees = [ast.parse(inspect.getsource(module)) for module in (experiment, build, budgets, pictures, config_of)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    reads = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config"
    }
    for node in nodes:
        if isinstance(node, ast.DictComp) and "getattr(config" in ast.unparse(node.value):
            reads |= {part.value for part in ast.walk(node.generators[0].iter) if isinstance(part, ast.Constant)}
    assert {field.name for field in dataclasses.fields(Config)} <= reads


def test_help_describes_every_option(capsys):
    assert experiment.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in printed
