"""An error that stops a resumed run changes nothing: once it is mended, the same command ends with the same bytes."""

import errno
import os
import shutil

import numpy as np
import pytest
from toy_problem import compiled_once, toy_variant, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import RunDirectory, read_run, restore_state
from jaxfl.training.checkpoint import Checkpoints, DamagedCheckpoint

LONE = {"A": toy_variant(seeds=(0,))}


class _Killed(BaseException):
    pass


@pytest.fixture(autouse=True, scope="module")
def _compile_once():
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """(lines of an uninterrupted run, directory of one that died with checkpoints of rounds 10 and 20)."""
    out = tmp_path_factory.mktemp("runs")
    train_toy(out / "whole", LONE)
    append = RunDirectory.append_metrics

    def dying(self, lines):
        if lines[0]["round"] == 25:
            raise _Killed
        append(self, lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "append_metrics", dying)
        with pytest.raises(_Killed):
            train_toy(out / "half", LONE)
    return (out / "whole" / "metrics.jsonl").read_bytes(), out / "half"


@pytest.fixture
def run(half, tmp_path):
    """(lines of an uninterrupted run, a copy of the other one)."""
    shutil.copytree(half[1], tmp_path / "run")
    return half[0], tmp_path / "run"


def _content(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_read_stops_a_resumed_run_and_changes_nothing(run, monkeypatch, number):
    expected, out = run
    before = _content(out)

    def opening(path, *args, **kwargs):
        if "ocdbt" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return open(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("jaxfl.training.file_list.open", opening, raising=False)
        with pytest.raises(OSError, match=os.strerror(number)):
            train_toy(out, LONE, resume=True)
    assert _content(out) == before
    train_toy(out, LONE, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == expected


def test_a_checkpoint_of_another_seed_or_run_is_refused(run, tmp_path):
    expected, out = run
    for other, variants, config, message in [
        ("seed", {"A": toy_variant(seeds=(3,))}, {"step_size": 0.2}, "/10 is of another run"),
        ("config", LONE, {"step_size": 0.3}, "/20 is of another run"),
    ]:
        train_toy(tmp_path / other, variants, config=config, keep_checkpoints=3)
        (own,) = (out / "checkpoints").glob("*/seed_0")
        (foreign,) = (tmp_path / other / "checkpoints").glob("*/seed_*")
        moved = tmp_path / f"before {other}"
        own.rename(moved)
        shutil.copytree(foreign, own)
        shutil.rmtree(own / "25")
        (own / "finished.json").unlink()
        if "10" in message:
            shutil.rmtree(own / "20")
        before = _content(out)
        with pytest.raises(ArgumentError, match=f"^out: must hold checkpoints of its own lanes alone; .*{message}"):
            train_toy(out, LONE, resume=True, config={"step_size": 0.2})
        assert _content(out) == before
        shutil.rmtree(own)
        moved.rename(own)
    train_toy(out, LONE, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == expected


def test_a_checkpoint_of_another_lane_of_the_run_is_refused(tmp_path):
    """Two programs of one run, whose states have the same form."""
    variants = {"A": toy_variant(seeds=(0,)), "B": toy_variant(seeds=(0,))}
    train_toy(tmp_path, variants)
    shutil.rmtree(tmp_path / "checkpoints" / "b" / "seed_0" / "25")
    shutil.copytree(tmp_path / "checkpoints" / "a" / "seed_0" / "25", tmp_path / "checkpoints" / "b" / "seed_0" / "25")
    with pytest.raises(ArgumentError, match="25 is of A, seed 0"):
        restore_state(read_run(tmp_path), "B", variants["B"], 0)


def test_where_lines_are_dropped_the_file_of_before_stays(run):
    """Without a whole checkpoint a lane begins again from round 0."""
    expected, out = run
    lines = (out / "metrics.jsonl").read_bytes()
    assert lines.count(b"\n") == 3
    for _ in range(2):
        for path in out.glob("checkpoints/*/*/[0-9]*/files.json"):
            path.write_text("{}")
        with pytest.warns(UserWarning, match="beginning again|is damaged"):
            train_toy(out, LONE, resume=True)
        assert (out / "metrics.jsonl").read_bytes() == expected
        (end,) = out.glob("checkpoints/*/*/finished.json")
        end.unlink()
    assert (out / "metrics.before.jsonl").read_bytes() == lines
    assert (out / "metrics.before-2.jsonl").read_bytes() == expected
    assert not (out / "metrics.before-3.jsonl").exists()


@pytest.mark.parametrize("cut", [10, 400])
def test_metrics_that_are_not_those_of_the_checkpoint_are_refused_before_anything_changes(run, cut):
    expected, out = run
    path = out / "metrics.jsonl"
    lines = path.read_bytes()
    path.write_bytes(lines[:cut].replace(b"1", b"2", 1) + lines[cut:] if cut == 400 else lines[: len(lines) // 2])
    before = _content(out)
    with pytest.raises(ArgumentError, match=r"^out: "):
        train_toy(out, LONE, resume=True)
    assert _content(out) == before
    path.write_bytes(lines)
    train_toy(out, LONE, resume=True)
    assert path.read_bytes() == expected


def test_a_full_disk_in_a_checkpoint_stops_and_a_resumed_run_equals_uninterrupted(run, tmp_path, monkeypatch):
    expected, out = run[0], tmp_path / "new"
    text = "RESOURCE_EXHAUSTED: Error writing: Failed to write 9 bytes: No space left on device [os_error_code='28']"
    save = Checkpoints.save

    def full(self, round_index, *args, **kwargs):
        if round_index == 20:
            monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", raising)
        return save(self, round_index, *args, **kwargs)

    def raising(*args, **kwargs):
        raise ValueError(text)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            train_toy(out, LONE)
        assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    train_toy(out, LONE, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == expected


def test_a_damaged_list_is_no_other_owner(run):
    """The checkpoint before is taken, with the same end."""
    expected, out = run
    (newest,) = out.glob("checkpoints/*/*/20/files.json")
    content = bytearray(newest.read_bytes())
    rng = np.random.default_rng(2)
    for position in rng.choice(len(content), 3, replace=False):
        content[position] ^= 0x15
    newest.write_bytes(bytes(content))
    with pytest.warns(DamagedCheckpoint, match=r"round 20 .*files\.json is altered"):
        train_toy(out, LONE, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == expected
