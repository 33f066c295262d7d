"""Killed and resumed equals uninterrupted: the lines byte for byte, the parameters bit for bit."""

import csv
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import chex
import numpy as np
import pytest
from run_files import pass_folders, run_bytes
from run_until_killed import sweep, train
from toy_problem import toy_case, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import RunDirectory, load_params, read_run, restore_state
from jaxfl.training.checkpoint import Checkpoints, DamagedCheckpoint
from jaxfl.training.lockstep import Lockstep
from jaxfl.training.pass_directory import PassDirectory


def _results(out):
    """Rows of results.csv without the seconds."""
    with open(Path(out) / "results.csv", newline="") as file:
        return [row[:-1] for row in csv.reader(file)]


def _ends(out, cases):
    """(rounds, state) in which every lane ended."""
    run, ended = read_run(out), read_run(out).ended()
    lanes = [(name, case, seed) for name, case in cases.items() for seed in case.seeds]
    return [restore_state(run, *lane) for lane in lanes if ended[lane[0], lane[2]]["status"] != "diverged"]


def _final(out):
    """Bytes of the files of parameters by name."""
    return {path.name: path.read_bytes() for path in (Path(out) / "final").iterdir()}


def _assert_same_runs(whole, other, cases, ends=None):
    """Lines, results and parameters byte for byte, and the state in which every lane ended."""
    assert _final(whole) == _final(other)
    assert run_bytes(whole) == run_bytes(other)
    assert _results(whole) == _results(other)
    chex.assert_trees_all_equal(_ends(whole, cases) if ends is None else ends, _ends(other, cases))


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path):
    """Six lanes of one program, four of them end early, and one by itself."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    summary = train(whole, checkpoint_minutes=None)
    statuses = {name: row["status"] for name, row in summary["cases"].items()}
    assert statuses["Wild"] == ["diverged"] * 2
    assert statuses["Poor"] == ["budget_spent"] * 2
    assert statuses["Alone"] == ["finished"]
    rng = np.random.default_rng(7)
    lengths = []
    while len(lengths) < 12:
        lines, seconds = int(rng.integers(1, 45)), float(rng.uniform(0, 0.1))
        done = _child(tmp_path, killed, lines, seconds)
        if done.returncode == 0:  # it came to the end: begin again
            _assert_same_runs(whole, killed, sweep())
            killed = tmp_path / f"killed {len(lengths)}"
            continue
        assert done.returncode == -signal.SIGKILL, done.stderr
        lengths.append(len(run_bytes(killed)))
    # The kills fell into the middle of the run, not before its beginning.
    size = len(run_bytes(whole))
    assert len({length for length in lengths if 0 < length < size}) >= 4
    done = _child(tmp_path, killed, 0, 0)
    assert (done.returncode, done.stdout, _own_words(done.stderr)) == (0, "", [])
    _assert_same_runs(whole, killed, sweep())
    assert read_run(killed).read_summary()["cases"] == summary["cases"]


def _own_words(errors):
    """Lines of standard error but warnings of a checkpoint that a kill left without its list.

    Python prints the line of the program that warned below each.
    """
    lines = errors.splitlines()
    warned = {place for place, line in enumerate(lines) if "DamagedCheckpoint" in line}
    below = {place + 1 for place in warned if place + 1 < len(lines) and lines[place + 1].startswith("  ")}
    return [line for place, line in enumerate(lines) if place not in warned | below]


def _child(tmp_path, *arguments):
    """The end of run_until_killed.py with these arguments."""
    script = Path(__file__).parent / "run_until_killed.py"
    # The children must compile as conftest.py says for this process: other optimizations, other last bits.
    fewer_optimizations = "0" if os.environ.get("JAXFL_TESTS_OPTIMIZED") == "1" else "1"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(script.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": fewer_optimizations,
        # Of this test alone, so that each child goes on where the one before it died without compiling for seconds.
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_killed_before_any_operation_on_files_and_resumed_equals_uninterrupted(tmp_path):
    """A spread of moments in each kind of operation, with a checkpoint at the end of every chunk."""
    whole, cases = tmp_path / "whole", sweep(num_rounds=13)
    done = _child(tmp_path, whole, "count", 0)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert set(counts) >= {"open", "os.rename", "os.fsync", "os.mkdir", "orbax.save"}
    assert {"os.remove", "os.rmdir", "shutil.rmtree"} & set(counts)
    ends, rng = _ends(whole, cases), np.random.default_rng(3)
    for kind, count in sorted(counts.items()):
        for number in sorted({1 + int(rng.integers(count)), count}):
            killed = tmp_path / f"{kind} {number}"
            done = _child(tmp_path, killed, kind, number)
            assert done.returncode == -signal.SIGKILL, (kind, number, done.stderr)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedCheckpoint)
                train(killed, cases)
            _assert_same_runs(whole, killed, cases, ends)
            assert not list(killed.rglob("*.tmp")), (kind, number)


@pytest.mark.slow
def test_terminated_at_random_moments_and_resumed_equals_uninterrupted(tmp_path):
    whole, rng = tmp_path / "whole", np.random.default_rng(5)
    train(whole, checkpoint_minutes=None)
    stops = runs = 0
    while stops < 4:
        runs += 1
        assert runs < 5, "most runs must be stopped more than once"
        stopped = tmp_path / f"stopped {runs}"
        while True:
            lines, seconds = int(rng.integers(1, 12)), float(rng.uniform(0, 0.02))
            done = _child(tmp_path, stopped, lines, seconds, "term")
            stops += "stopped on request" in done.stdout
            if done.returncode != 143:
                break
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        _assert_same_runs(whole, stopped, sweep())


LONE = {"A": toy_case(seeds=(0,), chunk_rounds=4)}


class _Killed(BaseException):
    pass


@pytest.fixture(scope="module", params=["one lane", "a sweep"])
def whole(request, tmp_path_factory):
    """(directory, cases, ends) of an uninterrupted run: of one lane, or of lanes that do not all end together."""
    cases = LONE if request.param == "one lane" else sweep(num_rounds=13)
    out = tmp_path_factory.mktemp("whole")
    train_toy(out, cases)
    return out, cases, _ends(out, cases)


def _interrupt(monkeypatch, out, cases, owner, method, call, *, after, minutes=None):
    """Run until the given call of a method, and die before or after it; False if there are fewer calls."""
    original = getattr(owner, method)
    calls = []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and not after:
            raise _Killed
        result = original(*args, **kwargs)
        if len(calls) == call and after:
            raise _Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, dying)
        try:
            train_toy(out, cases, checkpoint_minutes=minutes)
        except _Killed:
            return True
    return False


@pytest.mark.parametrize(
    ("owner", "method", "calls", "after"),
    [
        (RunDirectory, "record_training", (1,), False),  # config.json has no settings yet
        (RunDirectory, "record_passes", (1,), False),  # the lanes are not divided
        (PassDirectory, "begin", (1,), False),  # a choice is not recorded
        (PassDirectory, "append", (1, 3), True),  # lines and no checkpoint
        (Checkpoints, "save", (2, 4, 6, 7), False),  # lines without their checkpoint
        (Checkpoints, "save", (3, 5, 7), True),  # everything done but the mark of it
        (Lockstep, "_end", (1, 3, 6), True),  # some lanes have ended, others not
        (PassDirectory, "finish", (1, 2), False),  # all have, and no record says it
        (PassDirectory, "finish", (1, 2), True),
    ],
)
@pytest.mark.quick_cases(3)
def test_no_line_is_lost_or_doubled_between_any_two_steps(whole, tmp_path, monkeypatch, owner, method, calls, after):
    expected, cases, ends = whole
    for number, call in enumerate(calls):
        out = tmp_path / str(call)
        if not _interrupt(monkeypatch, out, cases, owner, method, call, after=after):
            assert number > 0, "it must die somewhere"
            assert len(cases) == 1, "one lane has fewer steps"
            break
        if method == "append":
            with open(pass_folders(out)[-1] / "metrics.jsonl", "ab") as file:
                file.write(b'{"case": "A", "se')
        train_toy(out, cases, resume=True)
        _assert_same_runs(expected, out, cases, ends)


@pytest.mark.parametrize(
    ("owner", "method", "calls", "after"),
    [
        (PassDirectory, "append", (2, 4), True),  # lines behind a checkpoint between evaluations
        (Checkpoints, "save", (1, 2, 3, 5, 8), True),  # infos since the last lines are in it
        (Lockstep, "_end", (1, 2, 4), False),  # the end of a lane comes again
        (Lockstep, "_end", (1, 3, 5), True),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_checkpoint_between_two_evaluations_changes_no_line(
    whole, tmp_path, monkeypatch, owner, method, calls, after
):
    expected, cases, ends = whole
    for number, call in enumerate(calls):
        out = tmp_path / str(call)
        if not _interrupt(monkeypatch, out, cases, owner, method, call, after=after, minutes=0):
            assert number > 0, "it must die somewhere"
            assert len(cases) == 1, "one lane has fewer steps"
            break
        train_toy(out, cases, resume=True)
        _assert_same_runs(expected, out, cases, ends)


def _empty_checkpoint(out, round_index):
    for path in (Path(out) / "passes" / "0" / "checkpoints" / str(round_index)).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damaged", [(20,), (10, 20)])
def test_a_truncated_newest_checkpoint_falls_back_to_the_one_before_it_or_the_beginning(tmp_path, monkeypatch, damaged):
    train_toy(tmp_path / "whole", LONE)
    out = tmp_path / "damaged"
    assert _interrupt(monkeypatch, out, LONE, PassDirectory, "append", 4, after=False)
    for round_index in damaged:
        _empty_checkpoint(out, round_index)
    with pytest.warns(UserWarning, match="checkpoint") as caught:
        train_toy(out, LONE, resume=True)
    texts = [str(item.message) for item in caught if item.category is DamagedCheckpoint]
    assert len(texts) == len(damaged)
    assert "round 20" in texts[0]
    again = [item for item in caught if "no readable checkpoint of A, seed 0: beginning again" in str(item.message)]
    assert len(again) == (len(damaged) == 2)
    _assert_same_runs(tmp_path / "whole", out, LONE)


def test_resume_with_other_settings_is_refused_and_without_effect_ones_pass(whole):
    out, cases, _ = whole
    before = run_bytes(out)
    name, first = next(iter(cases.items()))
    longer = {**cases, name: first._replace(num_rounds=first.num_rounds + 5)}
    with pytest.raises(ArgumentError, match=r"^cases\..*\.num_rounds: .* this call has"):
        train_toy(out, longer, resume=True)
    with pytest.raises(ArgumentError, match=r"^step_size: .* has 0\.2, this call has 0\.5"):
        train_toy(out, cases, resume=True, config={"step_size": 0.5})
    train_toy(out, cases, resume=True, keep_checkpoints=5, checkpoint_every=3)
    assert run_bytes(out) == before


def test_parameters_at_the_end_are_those_of_the_state_there(whole):
    """Lanes that end before the others leave one, too; one that diverged has none."""
    out, cases, ends = whole
    lanes = [(name, seed) for name, case in cases.items() for seed in case.seeds]
    kept = [lane for lane in lanes if read_run(out).ended()[lane]["status"] != "diverged"]
    assert len(_final(out)) == len(kept) == len(ends)
    for lane, (_, state) in zip(kept, ends, strict=True):
        chex.assert_trees_all_equal(load_params(out, *lane), state.params)


def test_a_missing_checkpoint_is_named(whole):
    out, cases, _ = whole
    with pytest.raises(ArgumentError, match="case: must have a readable checkpoint"):
        restore_state(read_run(out), "Other", next(iter(cases.values())), 5)
