"""Particulars of experiments.dp_gradient_tracking: conditions, budgets, statements, programs of many levels."""

import contextlib
import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leave_undrawn, leave_untrained
from problems import start
from run_files import run_lines

from experiments.dp_gradient_tracking import EXPERIMENT
from experiments.dp_gradient_tracking.pictures import plot_budgets
from experiments.dp_gradient_tracking.prepare import prepare
from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.frame import main, override
from jaxfl.frame.experiment import request
from jaxfl.privacy.tracking import (
    NO_BOUND,
)

TINY = {
    "iterations": 6,
    "batch_size": 2,
    "distribution": "laplace",
    "smoothness": 2.0,
    "evaluate_every": 2,
    "quiet": True,
}
SCHEMES = ("DP-GT, S1", "DP-GT, S2")
# Every condition of Scheme (S1) holds: alpha, beta < 0.4, gamma < n / (4 (v1 . v2) L) = 0.1, noise exponents to 0.14.
STRICT = {**TINY, "strict": True, "scheme": "S1", "state_mixing": 0.1, "step_size": 0.01}
STRICT |= {"distribution": "gaussian", "assume_bounded": True}


def prepared(changes, **axes):
    """Prepare a run from options and axes of one option each."""
    grid = tuple({name: values} for name, values in axes.items())
    return prepare(request(EXPERIMENT, changes, grid).rows)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of both schemes: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = "--iterations 6 --batch-size 2 --smoothness 2 --evaluate-every 2 --seeds 0 1 --quiet --out"
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        assert main(EXPERIMENT, ["--distribution", "laplace", *options.split(), str(folder)]) == 0
    return folder, printed.getvalue()


class TestFinishedRun:
    def test_measures_what_the_theory_bounds(self, finished):
        lines = run_lines(finished[0])
        assert {line["case"] for line in lines} == set(SCHEMES)
        for line in lines:
            assert line["gradient_norm_squared_average_model"] > 0
            assert 0 <= line["train_accuracy_average_model"] <= 1
            assert line["round"] == 0 or line["consensus_distance"] > 0
            assert line["total_gradient_evaluations"] == line["round"] * 5 * 2

    def test_broken_conditions_are_named_with_their_numbers_before_the_run(self, finished):
        """alpha = 72 / 6^0.987, more than Lemma 1 allows on five agents: 1 for row sums of 1, 0.4 for eigenvalues."""
        alpha, lines = 72 / 6**0.987, finished[1].splitlines()
        warnings = [line for line in lines if line.startswith("warning: ")]
        actual = f"found {alpha:.6g}, required"
        assert f"warning: Assumption 4: alpha < 1 / max_i sum_j R_ij fails: {actual} 1 (DP-GT, S1)" in warnings
        assert any(f"of L1 fails: {actual} 0.4 (DP-GT, S1)" in line for line in warnings)
        gamma = "warning: Assumption 5: gamma < n / (20 (v1 . v2) L) fails: found 0.1, required 0.02 (DP-GT, S2)"
        assert gamma in lines
        assert lines[: len(warnings)] == warnings
        recorded = json.loads((finished[0] / "conditions.json").read_text())
        assert [len(recorded[name]) for name in SCHEMES] == [4, 4]
        assert all(f"warning: {text} ({name})" in warnings for name in SCHEMES for text in recorded[name])


class TestStrict:
    def test_refuses_with_the_conditions(self, tmp_path, capsys):
        command = "--iterations 6 --batch-size 2 --smoothness 2 --strict --out".split()
        assert main(EXPERIMENT, [*command, str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        says = r"error: --strict: .* hold; DP-GT, S1: Assumption 4: alpha < .* fails: found 12\.28\d+, required 1; .*\n"
        assert re.fullmatch(says, error), error
        assert not (tmp_path / "run").exists()

    def test_runs_what_meets_every_condition(self):
        made = prepared(STRICT)
        assert made.context.failures == {"DP-GT": []}
        assert "gradients assumed at L2 norm 1, gaussian noise" in made.description[1]
        assert not any("warning" in text for text in made.description)

    def test_smoothness_is_estimated_where_none_is_given(self, monkeypatch):
        """The conditions are those of the estimate, which is told."""
        probed = []

        def probe(*arguments, **options):
            probed.append(estimate_constants(*arguments, **options))
            return probed[-1]

        monkeypatch.setattr(sys.modules[prepare.__module__], "estimate_constants", probe)
        given = {**TINY, "scheme": "S2", "num_train": 60, "smoothness": "estimated"}
        made = prepared(given)
        (constants,) = probed
        assert made.context.failures == prepared({**given, "smoothness": constants.smoothness}).context.failures
        assert made.context.failures != prepared({**given, "smoothness": 1e-3}).context.failures
        assert f"L = {constants.smoothness:.3g}, estimated by a probing run (a lower bound)" in made.description

    def test_constant_steps_meet_them_too(self):
        """The bound alpha < 0.0104 / L is the first to break when L grows."""
        steps = {"scheme": "S2", "state_mixing": 0.001, "tracker_mixing": 0.1, "step_size": 1e-6}
        assert prepared({**TINY, **steps}).context.failures == {"DP-GT": []}
        (broken,) = prepared({**TINY, **steps, "smoothness": 20.0}).context.failures["DP-GT"]
        assert broken.name.startswith("Assumption 5: alpha < sqrt(2)")
        assert (broken.found, broken.required) == (0.001, pytest.approx(0.000521, rel=1e-3))

    def test_assumed_bounds_give_no_epsilon_and_no_clipping(self, tmp_path):
        case = prepared(STRICT, seed=(0,)).cases["DP-GT"]
        assert case.privacy is not None
        published, proven = case.privacy(6)
        assert published["dp_epsilon"] is proven["dp_epsilon"] is None
        assert published["reason"] == "This bound holds for Laplace noise only."
        assert proven["reason"].startswith("Gradients are not clipped")
        configs = {name: line.config for name, line in request(EXPERIMENT, STRICT).rows.items()}
        assert plot_budgets(tmp_path, configs) == []
        data, key, learner = case.data(0), jax.random.key(0), case.algorithm({})
        state = start(learner, key, data)
        assert not jax.jit(learner.round)(key, state, data)[1].clipped_fraction.any()


class TestPrograms:
    @pytest.mark.parametrize(
        ("scheme", "levels"),
        [("S1", {"noise_exponent": (-0.11, 0.19)}), ("S2", {"noise_base": (0.99939, 0.99979)})],
    )
    def test_levels_of_noise_and_steps_share_one_and_keep_their_scales(self, scheme, levels):
        """At K = 2000, where p^K of a p in float32 would be off by 5e-5."""
        query = request(
            EXPERIMENT,
            {**TINY, "iterations": 2000, "scheme": scheme},
            (levels, {"noise_gain": (0.1, 1.0)}, {"step_size": (0.01, 0.1)}),
        )
        made = prepare(query.rows)
        assert len(made.cases) == 8
        assert len({case.algorithm for case in made.cases.values()}) == 1
        first = query.config.settled()
        scales = jax.jit(lambda numbers: override(first, numbers)._schedule().state_noise_scale)
        for name, case in made.cases.items():
            assert set(case.numbers) == {*levels, "noise_gain", "step_size"}
            numbers = {key: jnp.float32(value) for key, value in case.numbers.items()}
            exact = query.rows[name].config.schedule().state_noise_scale
            np.testing.assert_allclose(scales(numbers), exact, rtol=2e-6)

    def test_what_a_method_does_not_use_makes_no_lines(self):
        axes = {
            "method": ("DP-GT", "noisy-states", "ternary-states", "noisy-outputs"),
            "noise_base": (0.999, 0.9999),
            "noise_gain": (0.1, 0.2),
            "gradient_at": ("broadcast", "state"),
            "graph": ("five_agents", "ring"),
        }
        grid = tuple({name: values} for name, values in axes.items())
        lines = request(EXPERIMENT, {"scheme": "S2"}, grid).rows
        counts = [sum(line.config.learning.method == method for line in lines.values()) for method in axes["method"]]
        assert counts == [16, 8, 2, 4]  # all; without graph; without noise; without graph and point
        assert "DP-GT, p = 0.999, noise x 0.1, gradient at state, five_agents" in lines
        assert {"ternary-states, gradient at state", "noisy-outputs, p = 0.9999, noise x 0.2"} < set(lines)

    def test_schemes_have_noise_of_their_own(self):
        lines = request(EXPERIMENT, {}, ({"noise_exponent": (0.1, 0.2)},)).rows
        assert list(lines) == ["DP-GT, S1, p = 0.1", "DP-GT, S2", "DP-GT, S1, p = 0.2"]
        assert list(request(EXPERIMENT, {"scheme": "S1"}).rows) == ["DP-GT"]


METHODS = ("noisy-states", "noisy-quantized-states", "ternary-states", "quantized-states", "noisy-outputs")
OWN = {"iterations": 4, "batch_size": 2, "scheme": "S2", "gradient_at": "state", "quantization_step": 0.5}


@pytest.fixture(scope="module")
def made():
    """Prepared run of all methods but DP-GT."""
    return prepared(OWN, method=METHODS, seed=(0,))


class TestEveryMethod:
    """Scheme (S2) with K = 4, gradients at the agents' own states: what would be stated after all K + 1 broadcasts."""

    def test_gradients_at_the_own_state_have_a_reconstructed_epsilon_alone(self, made):
        assert {case.num_rounds for case in made.cases.values()} == {5}
        for method, case in made.cases.items():
            published, *proven = case.privacy(5)
            assert published["bound"] == "reconstructed"
            if method == "noisy-outputs":  # its own state is known to all
                assert published["dp_epsilon"] == proven[0]["dp_epsilon"] > 0
                assert NO_BOUND not in published["assumptions"]
            else:
                assert NO_BOUND in published["assumptions"]
                assert all("un-noised state" in statement["reason"] for statement in proven)

    def test_budgets_are_drawn(self, tmp_path):
        lines = request(EXPERIMENT, OWN, ({"method": METHODS},)).rows
        (path,) = plot_budgets(tmp_path, {name: line.config for name, line in lines.items()})
        assert path.stat().st_size > 5000


def test_another_file_by_the_same_name_is_not_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chain = np.eye(4, k=-1)  # agent i hears i - 1: agent 0 reaches all
    leave_untrained(monkeypatch)
    np.save("pair.npy", [chain, chain.T])
    arguments = ["--smoothness", "2", "--quiet", "--nodes", "4", "--graph", "pair.npy", "--out", "run"]
    assert main(EXPERIMENT, arguments) == 130
    np.save("pair.npy", [chain / 2, chain.T / 2])
    assert main(EXPERIMENT, [*arguments, "--resume"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: graph_crc32: must be as in the run that is resumed; ")
