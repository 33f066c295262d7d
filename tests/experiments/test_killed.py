"""Real runs, killed with SIGKILL at random moments and resumed, end as if nothing had happened."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from run_files import run_bytes

import experiments
from experiments.privsgp_vr import EXPERIMENT
from jaxfl.frame.command_line import parse
from jaxfl.training import read_run, restore_state
from jaxfl.training.summary import read_results

ROOT = Path(next(iter(experiments.__path__))).parent
RUN = "--nodes 4 --iterations 600 --evaluate-every 10 --checkpoint-every 2 --batch-size 2 --quiet --seeds 0 1".split()
LONE = [*RUN[:-1], "--method", "PrivSGP", "--noise-std", "0.1"]
SWEEP = [
    *RUN,
    "--method",
    "PrivSGP-VR",
    "--storage",
    "bfloat16",
    "--noise-std",
    "0.1",
    "--grid",
    "step_size=0.1,0.3,0.2",
]
POINTS = 6


def command(arguments, out):
    return [sys.executable, "-m", "experiments.privsgp_vr", *arguments, "--out", str(out)]


def finish(arguments, out, *more):
    done = subprocess.run([*command(arguments, out), *more], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stderr


def num_lines(out):
    return run_bytes(out).count(b"\n")


def kill_at_random(arguments, out, rng, lines):
    """Start or resume the run, and kill it some lines later; False if it ended before."""
    child = subprocess.Popen([*command(arguments, out), "--resume"], cwd=ROOT, stdout=subprocess.DEVNULL)
    before, more = num_lines(out), int(rng.integers(*lines))
    while child.poll() is None and num_lines(out) < before + more:
        time.sleep(0.002)
    time.sleep(float(rng.uniform(0, 0.05)))
    child.send_signal(signal.SIGKILL)
    return child.wait() == -signal.SIGKILL


def same_end(arguments, whole, other):
    """The same bytes of metrics and results (less seconds), and the same parameters."""
    assert run_bytes(other) == run_bytes(whole)
    tables = [[{**row, "seconds": 0} for row in read_results(out)] for out in (whole, other)]
    assert tables[0] == tables[1]
    assert EXPERIMENT.prepare is not None
    for name, case in EXPERIMENT.prepare(parse(EXPERIMENT, arguments)[0].rows).cases.items():
        for seed in case.seeds:
            rounds, state = restore_state(read_run(whole), name, case, seed)
            rounds_again, again = restore_state(read_run(other), name, case, seed)
            assert rounds == rounds_again == 600
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "kills", "lines"), [(LONE, 3, (3, 9)), (SWEEP, 5, (POINTS, 5 * POINTS))])
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(arguments, kills, lines, tmp_path):
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", np.random.default_rng(11)
    finish(arguments, whole)
    assert all(kill_at_random(arguments, killed, rng, lines) for _ in range(kills)), "it must die in its work"
    assert 0 < num_lines(killed) < num_lines(whole)
    finish(arguments, killed, "--resume")
    same_end(arguments, whole, killed)
