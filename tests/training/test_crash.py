"""A program that ends the process by a signal leaves a sentence, and a run that can go on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import experiments

ROOT = Path(next(iter(experiments.__path__))).parent
SMALL = "--nodes 4 --iterations 4 --evaluate-every 2 --num-train 80 --num-test 20 --batch-size 2 --hidden 4"
CRASHING = (
    "import os, signal, sys; from experiments.privsgp_vr import EXPERIMENT; from jaxfl.frame import main, run;"
    "run.train = lambda *_, **__: os.kill(os.getpid(), signal.SIGSEGV); main(EXPERIMENT, sys.argv[1:])"
)


def ended(*words):
    command = [sys.executable, *words, *SMALL.split(), "--method", "PrivSGP", "--noise-std", "0.1", "--seeds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_crash_is_a_sentence_with_the_run_and_what_helps(tmp_path):
    crashed = ended("-c", CRASHING, "--out", str(tmp_path / "run"))
    assert crashed.returncode == -signal.SIGSEGV
    assert crashed.stderr.startswith("crashed: ")
    assert crashed.stderr.count("\n") == 1
    for word in (str(tmp_path / "run"), "JAX_DISABLE_MOST_OPTIMIZATIONS=1", "--resume"):
        assert word in crashed.stderr
    stack = (tmp_path / "run" / "crash.txt").read_text()
    assert "Segmentation fault" in stack
    assert "in run" in stack
