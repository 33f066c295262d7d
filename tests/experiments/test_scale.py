"""Runs with many nodes: the predicted memory, and the end with its pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import TESTS

WORDS = (
    "--graph exponential --method PrivSGP --hidden 4 --batch-size 1 --iterations 4 --evaluate-every 2 --noise-std 0.1"
)
WORDS += " --seeds 0 --compilation-cache off"
# The largest resident set of a child, as `wait4` tells it, would be at least that of the process that started it.
RUN_AND_TELL = """
import re, sys
from experiments import EXPERIMENTS
from jaxfl.frame import main
code = main(EXPERIMENTS["privsgp_vr"], sys.argv[1:])
print("peak", 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]))
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read a peak from")
@pytest.mark.parametrize("nodes", [1_000, 10_000])
def test_the_predicted_memory_is_within_a_third_of_the_peak(nodes, tmp_path):
    """The whole process with its pictures, as a user starts it."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 5 * nodes)
    inputs = np.eye(4, 16, dtype="float32")[labels] + rng.normal(0, 0.5, (5 * nodes, 16)).astype("float32")
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=labels)
    words = [*WORDS.split(), "--nodes", str(nodes), "--num-test", "500", "--dataset", str(tmp_path / "data.npz")]
    command = [sys.executable, "-c", RUN_AND_TELL, *words, "--out", str(tmp_path / "run")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    environment = {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert (tmp_path / "run" / "plots" / "training.png").exists()
    actual, peak = re.search(r"predicted peak memory ([\d.]+) ([MG])B", text), re.search(r"^peak (\d+)$", text, re.M)
    assert actual, text
    assert peak, text
    predicted = float(actual[1]) * {"M": 1e6, "G": 1e9}[actual[2]]
    assert 1 / 1.3 < int(peak[1]) / predicted < 1.3
