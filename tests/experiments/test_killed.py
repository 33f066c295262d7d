"""A real run, killed with SIGKILL at random moments and resumed, ends as if nothing had happened."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import privsgp_vr
from jaxfl.data import load
from jaxfl.training import read_run, restore_state

COMMAND = [
    *(sys.executable, "-m", "experiments.privsgp_vr", "--nodes", "4", "--iterations", "300", "--evaluate-every", "10"),
    *("--checkpoint-every", "2", "--batch-size", "2", "--storage", "bfloat16", "--seeds", "0", "1", "--quiet"),
]


def num_lines(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path):
    root, rng = Path(privsgp_vr.__file__).parent.parent, np.random.default_rng(11)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*COMMAND, "--out", str(whole)], cwd=root, check=True, capture_output=True)
    lengths = []
    for _ in range(3):
        child = subprocess.Popen([*COMMAND, "--out", str(killed), "--resume"], cwd=root, stdout=subprocess.DEVNULL)
        seen = num_lines(killed)
        while child.poll() is None and num_lines(killed) < seen + int(rng.integers(5, 25)):
            time.sleep(0.002)
        time.sleep(float(rng.uniform(0, 0.05)))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "it must die in the middle of its work"
        lengths.append(num_lines(killed))
    assert 0 < lengths[0] < num_lines(whole)
    subprocess.run([*COMMAND, "--out", str(killed), "--resume"], cwd=root, check=True, capture_output=True)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()

    options = privsgp_vr.Config(nodes=(4,), iterations=(300,), batch_size=(2,), storage="bfloat16")
    config, dataset = privsgp_vr.resolve(options), load("digits")
    task = privsgp_vr.make_task(config, dataset)
    variants, _ = privsgp_vr.settled_variants(config, dataset, task, {4: [359, 360]})
    for seed in (0, 1):
        data = privsgp_vr.make_data(config, dataset, seed, nodes=4)
        for name, variant in variants.items():
            algorithm = privsgp_vr.make_algorithm(config, variant, task)
            rounds, state = restore_state(read_run(whole), name, algorithm, seed, data)
            other_rounds, other = restore_state(read_run(killed), name, algorithm, seed, data)
            assert rounds == other_rounds == 300
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_truncated_newest_checkpoint_falls_back_to_the_one_before(tmp_path):
    """With a warning, and with the same end."""
    root = Path(privsgp_vr.__file__).parent.parent
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    command = [argument for argument in COMMAND if argument != "1"]
    subprocess.run([*command, "--out", str(whole)], cwd=root, check=True, capture_output=True)
    shutil.copytree(whole, damaged)
    newest = damaged / "checkpoints" / "privsgp" / "seed_0" / "300"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (newest.parent / "finished.json").unlink()
    done = subprocess.run(
        [*command, "--out", str(damaged), "--resume"], cwd=root, check=True, capture_output=True, text=True
    )
    assert "warning: " in done.stderr
    assert (damaged / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    summaries = [json.loads((out / "summary.json").read_text())["variants"] for out in (whole, damaged)]
    assert summaries[0] == summaries[1]
