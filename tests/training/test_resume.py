"""Killed and resumed equals uninterrupted: the lines byte for byte, the parameters bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from run_until_killed import SETTINGS, train
from toy_problem import toy_algorithm, toy_data, toy_task, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import Checkpoints, DamagedCheckpoint, RunDirectory, loop, read_run, restore_state
from jaxfl.training.part import Variant


def _final_states(out, variant, algorithm, seeds):
    data, _, _ = toy_data()
    return {seed: restore_state(read_run(out), variant, algorithm, seed, data) for seed in seeds}


def _assert_same_runs(one, other, variant, algorithm, seeds):
    assert (Path(one) / "metrics.jsonl").read_bytes() == (Path(other) / "metrics.jsonl").read_bytes()
    left, right = (_final_states(out, variant, algorithm, seeds) for out in (one, other))
    for seed in seeds:
        assert left[seed][0] == right[seed][0]
        for leaf, expected in zip(jax.tree.leaves(left[seed][1]), jax.tree.leaves(right[seed][1]), strict=True):
            assert leaf.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    summary = train(whole)
    assert summary["status"] == "finished"
    script = Path(__file__).parent / "run_until_killed.py"
    # The children must compile as conftest.py says for this process: other optimizations, other last bits.
    fewer_optimizations = "0" if os.environ.get("JAXFL_TESTS_OPTIMIZED") == "1" else "1"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": fewer_optimizations,
    }
    rng = np.random.default_rng(7)
    lengths = []
    for _ in range(3):
        lines, seconds = int(rng.integers(1, 6)), float(rng.uniform(0, 0.1))
        command = [sys.executable, str(script), str(killed), str(lines), str(seconds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        lengths.append((killed / "metrics.jsonl").stat().st_size)
        assert not (killed / "summary.json").exists()
    # The kills fell into the middle of the run, not before its beginning.
    assert 0 < lengths[0] < (whole / "metrics.jsonl").stat().st_size
    command = [sys.executable, str(script), str(killed), "0", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    _assert_same_runs(whole, killed, "Toy (fast)", toy_algorithm(toy_task()), SETTINGS["seeds"])
    resumed = read_run(killed).read_summary()
    assert resumed["variants"] == summary["variants"]


@pytest.fixture(autouse=True, scope="module")
def _compile_once():
    """Keep executables between the runs of this process; those killed above are new processes and compile anew."""

    made = {}

    def variant(name, algorithm, task, test, *options):
        key = (name, algorithm, *options)  # task and test set are the same throughout this file
        if key not in made:
            made[key] = Variant(name, algorithm, task, test, *options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Variant", variant)
        yield


class _Killed(BaseException):
    """Stands for a signal between two steps of the loop."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run to compare with, and its settings."""
    task = toy_task()
    algorithms = {"A": toy_algorithm(task)}
    settings = {"variants": algorithms, "seeds": (0,), "num_rounds": 25, "evaluate_every": 10}
    out = tmp_path_factory.mktemp("whole")
    train_toy(out, **settings)
    return out, settings


def _interrupt(monkeypatch, out, settings, owner, method, call, *, after):
    """Run until the given call of a method, and die before or after it."""
    original = getattr(owner, method)
    calls = []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and not after:
            raise _Killed
        original(*args, **kwargs)
        if len(calls) == call and after:
            raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, dying)
        with pytest.raises(_Killed):
            train_toy(out, **settings)


@pytest.mark.parametrize(
    ("owner", "method", "call", "after"),
    [
        (RunDirectory, "record_training", 1, False),  # config.json has no settings yet
        (RunDirectory, "append_metrics", 1, True),  # a line and no checkpoint
        (Checkpoints, "save", 2, False),  # a line without its checkpoint
        (Checkpoints, "save", 3, True),  # everything done but the mark of it
    ],
)
def test_no_line_is_lost_or_doubled_between_any_two_steps(whole, tmp_path, monkeypatch, owner, method, call, after):
    expected, settings = whole
    _interrupt(monkeypatch, tmp_path, settings, owner, method, call, after=after)
    if method == "append_metrics":
        with open(tmp_path / "metrics.jsonl", "ab") as file:
            file.write(b'{"variant": "A", "se')
    train_toy(tmp_path, resume=True, **settings)
    _assert_same_runs(expected, tmp_path, "A", settings["variants"]["A"], (0,))


def _empty_checkpoint(out, round_index):
    for path in (Path(out) / "checkpoints" / "a" / "seed_0" / str(round_index)).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_truncated_newest_checkpoint_falls_back_to_the_one_before_it(whole, tmp_path, monkeypatch):
    expected, settings = whole
    _interrupt(monkeypatch, tmp_path, settings, RunDirectory, "append_metrics", 4, after=False)
    _empty_checkpoint(tmp_path, 20)
    with pytest.warns(DamagedCheckpoint, match="round 20"):
        train_toy(tmp_path, resume=True, **settings)
    _assert_same_runs(expected, tmp_path, "A", settings["variants"]["A"], (0,))


def test_without_a_readable_checkpoint_it_begins_again(whole, tmp_path, monkeypatch):
    expected, settings = whole
    _interrupt(monkeypatch, tmp_path, settings, RunDirectory, "append_metrics", 4, after=False)
    _empty_checkpoint(tmp_path, 10)
    _empty_checkpoint(tmp_path, 20)
    with pytest.warns(DamagedCheckpoint), pytest.warns(UserWarning, match="no readable checkpoint of A, seed 0"):
        train_toy(tmp_path, resume=True, **settings)
    _assert_same_runs(expected, tmp_path, "A", settings["variants"]["A"], (0,))


def test_resume_with_other_settings_is_refused_and_without_effect_ones_pass(whole):
    out, settings = whole
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(ArgumentError, match=r"^num_rounds: .* has 25, this call has 30"):
        train_toy(out, resume=True, **{**settings, "num_rounds": 30})
    with pytest.raises(ArgumentError, match=r"^step_size: .* has 0\.2, this call has 0\.5"):
        train_toy(out, resume=True, config={"step_size": 0.5}, **settings)
    train_toy(out, resume=True, keep_checkpoints=5, checkpoint_every=3, **settings)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_missing_checkpoint_is_named(whole):
    out, settings = whole
    data, _, _ = toy_data()
    with pytest.raises(ArgumentError, match="variant: must have a readable checkpoint"):
        restore_state(read_run(out), "A", settings["variants"]["A"], 5, data)
