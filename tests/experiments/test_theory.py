"""Conditions of the theorems: a run names what it breaks, with its numbers, and each system's page lists them."""

from pathlib import Path

import pytest

from experiments import EXPERIMENTS
from experiments.dp_gradient_tracking.budgets import broken_conditions
from jaxfl.core.conditions import Condition, warnings
from jaxfl.frame import main
from jaxfl.frame.experiment import request

DOCS = Path(__file__).parents[2] / "docs"


def described(name, changes):
    """The lines that an experiment prints before its runs."""
    experiment = EXPERIMENTS[name]
    assert experiment.prepare is not None
    return [*experiment.prepare(request(experiment, changes, (), None).rows).description]


def warned(name, **changes):
    """The conditions among these lines, without their numbers."""
    return {
        line.split(" fails")[0].removeprefix("warning: ") for line in described(name, changes) if " fails: " in line
    }


def test_embracing_names_what_theorem_1_allows():
    """eta = 0.04 and tau = 10 allow an L of 1 / (4 * 0.04 * sqrt(90)); with tau = 1 it is 1 / eta."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "step_size": 0.04, "local_steps": 10}
    assert warned("embracing_fl") == {"Theorem 1: momentum <= 0", "Theorem 1: decay <= 0"}
    assert warned("embracing_fl", **plain) == set()
    for local_steps, largest in ((10, "0.659"), (1, "25")):
        lines = described("embracing_fl", plain | {"local_steps": local_steps})
        assert f"Theorem 1 covers losses whose L is at most {largest}" in lines


def test_dzofl_names_the_assumptions_that_links_directions_and_quantizers_break():
    given = {"links": "given", "success": 0.5}
    assert warned("dzofl", **given) == set()
    assert warned("dzofl") == {"Theorem IV.9: max p_i - min p_i <= 0 (Lemma A.1)"}
    (on_directions,) = warned("dzofl", **given, direction="gaussian")
    (on_quantizer,) = warned("dzofl", **given, quantizer="dithered")
    assert "IV.7" in on_directions
    assert "IV.5" in on_quantizer


def test_tracking_states_the_rate_of_its_scheme():
    """theta - p_gamma = 1.78 - 0.69 - 0.997 without growing noise; 1 / p_m against the largest base squared."""
    changes = {"nodes": 5, "graph": "five_agents", "method": "DP-GT"}
    for scheme, rate in (({"scheme": "S1", "noise_exponent": -0.2}, "x = 0.093"), ({"scheme": "S2"}, "r = max(0.9")):
        (row,) = request(EXPERIMENTS["dp_gradient_tracking"], changes | scheme, (), None).rows.values()
        assert rate in broken_conditions(row.config, 1.0)[1]


@pytest.mark.parametrize(("step_size", "breaks"), [(0.01, False), (3.0, True)])
def test_ali_dpfl_compares_its_step_size_with_the_estimated_beta(step_size, breaks, tmp_path, capsys):
    """beta is known at the end of a run; 1 - eta beta / 2, by which phi moves, is printed for each case."""
    words = f"--method ALI-DPFL --constants as_published --rounds 3 --step-size {step_size} --quiet"
    assert main(EXPERIMENTS["ali_dpfl"], [*words.split(), "--out", str(tmp_path / "run")]) == 0
    message = capsys.readouterr().out
    assert ("Theorem 2: eta beta <= 1 fails" in message) == breaks
    assert "omega (1 - eta beta / 2)" in message


def test_a_condition_that_all_cases_break_is_one_line():
    broken, kept = Condition("A: x < 1", False, 2.0, 1.0), Condition("A: y < 1", True, 0.0, 1.0)
    assert warnings({"one": [broken, kept], "two": [broken]}) == [f"warning: {broken} (all cases)"]
    assert warnings({"one": [broken], "two": [kept]}) == [f"warning: {broken} (one)"]


@pytest.mark.parametrize("name", ["ali_dpfl", "dp_gradient_tracking", "dzofl", "embracing_fl", "privsgp_vr"])
def test_each_systems_page_has_differences_and_conditions(name):
    headings = [line for line in (DOCS / f"{name}.md").read_text().splitlines() if line.startswith("## ")]
    assert {"## Differences from the paper", "## Conditions of the theorems"} <= {*headings}
