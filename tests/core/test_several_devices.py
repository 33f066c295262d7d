"""Nodes shared out over devices: in a process whose CPU has three of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OPTIONS = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(TESTS.parent)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `several_devices.py` prints."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "3", **OPTIONS}
    command = [sys.executable, str(TESTS / "several_devices.py"), str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_convolutions_on_a_cpu_of_several_devices_are_shared_out(found):
    assert found["devices"] == 3
    assert (found["automatic"], found["automatic without convolutions"]) == ("devices:map", "vmap")
    assert found["used"] == "devices:map"


@pytest.mark.slow
def test_strategies_agree_to_rounding_where_devices_cannot_share_nodes_evenly(found):
    assert len(found["differences"]) == 10
    assert max(found["differences"].values()) < 1e-6


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_with_the_same_lines(found):
    assert found["resumed alike"]
