"""Types with JAX_ENABLE_X64, of parameters in float32 and in float64: in one process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from registry import REGISTRY

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
WIDTHS = ("float32", "float64")
# What stays float32 beside params in float64: estimates that choose a number of steps.
KEPT_NARROW = {"ali_dpfl": frozenset({"constants/rho", "constants/beta", "constants/xi"})}
NOISE_REFUSED = r"params: must be float32 where noise is added; \S+ is float64\. .*\."
STORAGE_REFUSED = r"storage: must be .* for params in {}; got '{}'.*\. Pass .*\."
STATE_REFUSED = (
    r"task: must have a model state whose type steps keep; \S+ is float32, and float64 after a step.*\. .*\."
)


@pytest.fixture(scope="module")
def outcomes_of():
    """Output of `float64_rounds.py`."""
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, str(TESTS / "float64_rounds.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_kept(outcome, width, narrow=frozenset()):
    """No type changes in two rounds, none is weak, and what is computed has the width of the parameters."""
    assert "failed" not in outcome, outcome["failed"]
    assert outcome["changed"] == []
    assert outcome["weak"] == []
    floating = {name: dtype for name, dtype in outcome["types"].items() if dtype.startswith("float")}
    assert any(name.startswith("params") for name in floating)
    assert floating == {name: "float32" if name in narrow else width for name in floating}
    if width == "float32":
        assert outcome["wide infos"] == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REGISTRY)
def test_params_in_float64_stay_so_or_init_refuses_them(outcomes_of, name, width):
    """And params in float32 stay float32 beside step sizes and noise scales that are float64 arrays."""
    outcomes, in_float32 = outcomes_of["types"][width][name], outcomes_of["types"]["float32"][name]
    assert outcomes
    for kind, outcome in outcomes.items():
        storage = kind.split()[-1]
        if width == "float64" and in_float32[kind].get("noise"):
            assert re.fullmatch(NOISE_REFUSED, outcome["refused"]), kind
        elif kind.startswith("saga") and (storage == "float64") != (width == "float64"):
            assert re.fullmatch(STORAGE_REFUSED.format(width, storage), outcome["refused"]), kind
        else:
            check_kept(outcome, width, KEPT_NARROW.get(name, frozenset()))


def test_of_every_row_some_kind_is_kept_in_float32(outcomes_of):
    for name, outcomes in outcomes_of["types"]["float32"].items():
        assert any("refused" not in outcome for outcome in outcomes.values()), name
    refused = {
        name for name, of in outcomes_of["types"]["float64"].items() if all("refused" in one for one in of.values())
    }
    kept = set(REGISTRY) - refused
    assert {name for name, row in REGISTRY.items() if not row.noise_draws} <= kept
    assert any(REGISTRY[name].noise_draws for name in kept), "without noise they take float64"


@pytest.mark.parametrize("width", WIDTHS)
def test_clients_that_clip_add_noise_or_keep_statistics_keep_types_or_refuse_them(outcomes_of, width):
    """Statistics in float32 beside params in float64 would change their type in the first step."""
    outcomes = outcomes_of["clients"][width]
    noisy, narrow = ("noisy steps", "noisy updates"), ("statistics in float32", "batch norm in float32")
    assert set(noisy + narrow) < set(outcomes)
    for name, outcome in outcomes.items():
        if width == "float64" and name in noisy + narrow:
            assert re.fullmatch(NOISE_REFUSED if name in noisy else STATE_REFUSED, outcome["refused"]), name
        else:
            constants = KEPT_NARROW["ali_dpfl"] if "constants" in name else frozenset()
            check_kept(outcome, width, constants)


def test_params_in_float64_are_not_rounded_to_float32(outcomes_of):
    """Nothing that the next state hangs on is narrower: without links, whose draws are float32, and with clipping.

    Six rounds equal the float64 loop, where one rounding to float32 makes 1e-9.
    """
    computed = {
        (name, kind): outcome["narrow"]
        for name, outcomes in outcomes_of["types"]["float64"].items()
        for kind, outcome in outcomes.items()
        if "links" not in kind and name not in ("ali_dpfl", "dzofl") and "refused" not in outcome
    }
    assert {kind.split()[0] for _, kind in computed} == {"plain", "clipped", "saga"}
    assert len(computed) >= 11
    assert {case: actual for case, actual in computed.items() if actual} == {}
    assert outcomes_of["error"] < 1e-12
