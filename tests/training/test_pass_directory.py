"""Directories of passes: lines that stay, marks, ends, and what is refused."""

import os
import zlib

import pytest

from jaxfl.core import ArgumentError
from jaxfl.training.json_files import read_json, write_json
from jaxfl.training.pass_directory import PassDirectory

LANES = [("A", 0), ("A", 1)]
END = {"round": 20, "until": 20, "status": "finished", "reason": None}
END |= {"seconds": {"compile": 1.5, "run": 2, "timed_rounds": 20, "rounds_a_call": 5}}


def _line(case, seed, round_index):
    return {"case": case, "seed": seed, "round": round_index, "test_loss": 1.0 / 3}


def directory(tmp_path):
    return PassDirectory(tmp_path, LANES, "1f2e")


@pytest.fixture
def written(tmp_path):
    """(directory, its lines)."""
    one = directory(tmp_path)
    for round_index in (0, 10, 20):
        one.append([_line(name, seed, round_index) for name, seed in LANES])
    return one, (tmp_path / "metrics.jsonl").read_bytes()


def test_lines_are_read_back_and_a_half_written_one_is_left_out(written, tmp_path):
    one, whole = written
    assert [line["round"] for line in one.lines()] == [0, 0, 10, 10, 20, 20]
    assert next(one.lines())["test_loss"] == 1.0 / 3
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])
    assert len([*directory(tmp_path).lines()]) == 5
    for damaged in (whole[:30] + whole[40:], b"{}\n" + whole, b"[" * 10**5 + b"\n" + whole, b"[1]\n" + whole):
        (tmp_path / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(ArgumentError, match=r"^out: .* must hold JSON lines with case, seed, round; line 1 does"):
            list(directory(tmp_path).lines())


def test_lines_are_on_the_disk_before_a_checkpoint_begins(written, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda number: sizes.append(os.fstat(number).st_size))
    written[0].append([_line("A", 0, 30)])
    assert sizes == [(tmp_path / "metrics.jsonl").stat().st_size]


@pytest.mark.parametrize("order", [(0, 1, 1), (0, 4, 2), (2, 0)])
def test_a_lane_whose_rounds_do_not_ascend_is_refused(order, written, tmp_path):
    lines = written[1].splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[index] for index in order))
    with pytest.raises(ArgumentError, match=rf"every line once, .*; line {len(order)} has round \d+ of A, "):
        list(directory(tmp_path).lines())


@pytest.mark.parametrize("kept", range(7))
def test_exactly_the_lines_up_to_the_checkpoint_remain(kept, written, tmp_path):
    """Half a line behind them goes, too; and where all go, a copy stays."""
    path, whole = tmp_path / "metrics.jsonl", written[1]
    expected = b"".join(whole.splitlines(keepends=True)[:kept])
    path.write_bytes(whole + b'{"case": "A", "se')
    one = directory(tmp_path)
    one.keep_lines([len(expected), zlib.crc32(expected)])
    assert path.read_bytes() == expected
    assert (tmp_path / "metrics.before.jsonl").exists() == (kept == 0)
    one.append([_line("A", 0, 30)])
    assert len([*one.lines()]) == kept + 1


def test_an_end_holds_only_with_its_lines(written, tmp_path):
    one, whole = written
    assert one.end() is None
    one.finish(dict.fromkeys(LANES, END))
    assert directory(tmp_path).end() == dict.fromkeys(LANES, END)
    lines = whole.splitlines(keepends=True)
    edited, exchanged = whole.replace(b"0.333", b"0.334", 1), b"".join([*lines[2:4], *lines[:2], *lines[4:]])
    for content in (edited, exchanged, b"".join(lines[:5]), whole + lines[-1]):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with pytest.raises(ArgumentError, match=r"^out: .*metrics\.jsonl must be as this run wrote it; "):
            directory(tmp_path).end()
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    with pytest.raises(ArgumentError, match=r"^out: must hold passes of its own lanes only"):
        PassDirectory(tmp_path, LANES, "another run").end()


def test_edited_lines_are_noticed_by_the_mark_of_a_checkpoint(written, tmp_path):
    one, whole = written
    mark, path = one.mark(), tmp_path / "metrics.jsonl"
    assert mark == (len(whole), zlib.crc32(whole))
    for content in (whole.replace(b"0.333", b"0.334", 1), whole[:-9]):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=r"^out: .* must be as this run wrote it; "):
            directory(tmp_path).check_lines(mark)
        assert path.read_bytes() == content
    path.write_bytes(whole + b"more")
    directory(tmp_path).check_lines(mark)


@pytest.mark.parametrize("name", ["pass.json", "end.json"])
def test_an_altered_record_is_refused(name, written, tmp_path):
    one = written[0]
    one.begin({"slots": 2, "at_once": 1, "strategy": "one after the other", "environment": {"jax": "1"}})
    one.finish(dict.fromkeys(LANES, END))
    content = read_json(tmp_path / name)
    key = next(iter(content))
    for changed in ({**content, key: 3}, {**content, "more": 1}, {"checksum": content["checksum"]}):
        write_json(tmp_path / name, changed)
        with pytest.raises(ArgumentError, match=r"^out: .* must be as this run wrote it; it was altered"):
            (directory(tmp_path).begun if name == "pass.json" else directory(tmp_path).end)()


@pytest.mark.parametrize("vanished", [False, True])
def test_a_file_that_another_program_changed_is_not_appended_to(vanished, written, tmp_path):
    one, whole = written
    path = tmp_path / "metrics.jsonl"
    path.unlink() if vanished else path.write_bytes(whole * 2)
    with pytest.raises(
        OSError, match=r"No such file" if vanished else r"was changed by another program: it has [\d,]+ b"
    ):
        one.append([_line("A", 0, 30)])
    with pytest.raises(OSError, match="was changed by another program"):
        list(one.lines())
    assert not vanished or not path.exists()


def test_lines_refuse_what_is_not_json(tmp_path):
    one = directory(tmp_path)
    with pytest.raises(ValueError, match="JSON compliant"):
        one.append([{"loss": 1.0}, {"loss": float("nan")}])
    assert [*one.lines()] == []
