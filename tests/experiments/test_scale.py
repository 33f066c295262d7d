"""Runs with many nodes: the predicted memory, and the end with its pictures."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from processes import TESTS

WORDS = (
    "--graph exponential --method PrivSGP --hidden 4 --batch-size 1 --iterations 4 --evaluate-every 2 --noise-std 0.1"
)
WORDS += " --seeds 0 --compilation-cache off"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1_000, 10_000])
def test_the_predicted_memory_is_within_a_third_of_the_peak(nodes, tmp_path):
    """The whole process with its pictures, as a user starts it."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 5 * nodes)
    inputs = np.eye(4, 16, dtype="float32")[labels] + rng.normal(0, 0.5, (5 * nodes, 16)).astype("float32")
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=labels)
    words = [*WORDS.split(), "--nodes", str(nodes), "--num-test", "500", "--dataset", str(tmp_path / "data.npz")]
    command = [sys.executable, "-m", "experiments.privsgp_vr", *words, "--out", str(tmp_path / "run")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    environment = {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent)}
    with open(tmp_path / "told", "w+") as told:
        child = subprocess.Popen(command, env=environment, stdout=told, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = status
        told.seek(0)
        text = told.read()
    assert status == 0, text
    assert (tmp_path / "run" / "plots" / "training.png").exists()
    found = re.search(r"predicted peak memory ([\d.]+) ([MG])B", text)
    assert found, text
    predicted = float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert 1 / 1.3 < peak / predicted < 1.3
