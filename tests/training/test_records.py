"""Run directories: what is refused, what is compared, which lines stay."""

import json
import os
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfl.core import ArgumentError
from jaxfl.training import open_run, read_run
from jaxfl.training.environment import git_revision
from jaxfl.training.json_files import jsonable, read_json, refuse_difference, write_json

PROGRAM = {"lanes": [["A", 0]], "lanes_a_pass": 1, "at_once": 1, "strategy": "side by side"}
CONFIG = {"step_size": 0.1, "graph": {"kind": "ring", "nodes": 8}, "clip_norm": float("inf")}


def _line(variant, seed, round_index):
    return {"variant": variant, "seed": seed, "round": round_index, "test_loss": 1.0 / 3}


def test_config_holds_everything_resolved(tmp_path):
    run = open_run(tmp_path / "a" / "b", CONFIG, experiment="toy", preset="figure_1")
    content = json.loads((tmp_path / "a" / "b" / "config.json").read_bytes())
    assert content == run.config
    assert content["config"] == {**CONFIG, "clip_norm": "inf"}
    assert (content["experiment"], content["preset"]) == ("toy", "figure_1")
    environment = content["environment"]
    assert environment["jax"] == jax.__version__
    expected = {"python", "jaxlib", "flax", "optax", "orbax-checkpoint", "platform", "device_kind", "git_revision"}
    assert expected <= set(environment)


def test_a_directory_that_holds_a_run_is_never_written_to_without_resume(tmp_path):
    open_run(tmp_path, CONFIG)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ArgumentError, match=r"^out: must not hold a run yet; .* holds one\. Resume it"):
        open_run(tmp_path, {"step_size": 3})
    assert (tmp_path / "config.json").read_bytes() == before
    (tmp_path / "config.json").unlink()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ArgumentError, match=r"^out: must not hold a run yet"):
        open_run(tmp_path, CONFIG)
    with pytest.raises(ArgumentError, match=r"^out: must hold config\.json"):
        open_run(tmp_path, CONFIG, resume=True)


def test_other_files_do_not_matter_and_resume_may_begin_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert not open_run(tmp_path, CONFIG, resume=True).resumed
    assert open_run(tmp_path, CONFIG, resume=True).resumed
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_is_withdrawn_leaves_no_directory_that_was_made_for_it(tmp_path):
    (tmp_path / "there").mkdir()
    open_run(tmp_path / "there" / "a" / "b" / "c", CONFIG).withdraw()
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    (tmp_path / "there" / "a").mkdir()
    run = open_run(tmp_path / "there" / "a" / "b" / "c", CONFIG)
    (tmp_path / "there" / "a" / "b" / "notes.txt").write_text("mine")
    run.withdraw()
    assert {path.name for path in tmp_path.rglob("*")} == {"there", "a", "b", "notes.txt"}


def test_unwritable_output_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / ("x/" * 2000), tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run")):
        with pytest.raises(ArgumentError, match=r"^out: must be a writable directory; .*Name a directory"):
            open_run(out, CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_size": 0.2}, r"^step_size: .* has 0\.1, this call has 0\.2\. Pass 0\.1, or start"),
        ({"graph": {"kind": "ring", "nodes": 9}}, r"^graph\.nodes: .* has 8, this call has 9"),
        ({"momentum": 0.9}, r"^momentum: .* has no such key, this call has 0\.9"),
        ({"clip_norm": 1.0}, r'^clip_norm: .* has "inf", this call has 1\.0'),
    ],
)
def test_resume_with_another_configuration_is_refused(tmp_path, change, message):
    open_run(tmp_path, CONFIG)
    with pytest.raises(ArgumentError, match=message):
        open_run(tmp_path, {**CONFIG, **change}, resume=True)
    assert open_run(tmp_path, CONFIG, resume=True).resumed


def test_a_missing_key_an_experiment_and_a_setting_are_compared_too(tmp_path):
    run = open_run(tmp_path, CONFIG, experiment="toy")
    run.record_training({"num_rounds": 10, "seeds": (0, 1)})
    run.record_program(0, PROGRAM)
    with pytest.raises(ArgumentError, match=r"^step_size: .* has 0\.1, this call has no such key"):
        open_run(tmp_path, {name: CONFIG[name] for name in ("graph", "clip_norm")}, experiment="toy", resume=True)
    with pytest.raises(ArgumentError, match=r"^experiment: "):
        open_run(tmp_path, CONFIG, experiment="other", resume=True)
    run = open_run(tmp_path, CONFIG, experiment="toy", resume=True)
    run.record_training({"num_rounds": 10, "seeds": [0, 1]})  # what was chosen is no setting
    assert run.recorded_programs() == [PROGRAM]
    with pytest.raises(ArgumentError, match=r"^seeds: .* has \[0, 1\], this call has \[0, 2\]"):
        run.record_training({"num_rounds": 10, "seeds": [0, 2]})


def test_the_first_difference_in_the_order_given_is_named():
    with pytest.raises(ArgumentError, match=r"^b: "):
        refuse_difference({"a": 1, "b": 2, "c": 3}, {"c": 3, "b": 0, "a": 0}, Path("x"))
    refuse_difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}, Path("x"))


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("jaxlib", "0.0.1", "the last bits"),
        ("vector_instructions", "avx", "the last bits"),
        ("xla_flags", "--xla_cpu_max_isa=AVX2", "the last bits"),
        ("platform_version", "cuda 13000", "the last bits"),
        ("driver", "580.65.06", "the last bits"),
        ("cudnn", "9.12.0.46", "the last bits"),
        ("num_processes", 2, "the last bits"),
        ("git_revision", "0" * 40, "the last bits"),
        ("threefry_partitionable", False, "all random numbers"),
    ],
)
def test_another_environment_is_warned_of(name, value, what, tmp_path):
    run = open_run(tmp_path, CONFIG)
    environment = {**run.config["environment"], name: value}
    write_json(tmp_path / "config.json", {**run.config, "environment": environment})
    with pytest.warns(UserWarning, match=rf"{name} {value} -> .*: {what} may differ .*, and .* further releases"):
        open_run(tmp_path, CONFIG, resume=True)


def test_the_number_of_devices_changes_no_bit(tmp_path, monkeypatch):
    open_run(tmp_path, CONFIG)
    count = "--xla_force_host_platform_device_count=3"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {count}")
    assert open_run(tmp_path, CONFIG, resume=True).resumed


def _written(tmp_path):
    run = open_run(tmp_path, CONFIG)
    for seed in (0, 1):
        for round_index in (0, 10, 20):
            run.append_metrics([_line("A", seed, round_index)])
    return run, (tmp_path / "metrics.jsonl").read_bytes()


def test_lines_are_read_back_and_a_half_written_one_is_left_out(tmp_path):
    run, whole = _written(tmp_path)
    assert [line["round"] for line in run.read_metrics()] == [0, 10, 20] * 2
    assert run.read_metrics()[0]["test_loss"] == 1.0 / 3
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])
    assert len(read_run(tmp_path).read_metrics()) == 5
    for damaged in (whole[:30] + whole[40:], b"{}\n" + whole, b"[" * 10**5 + b"\n" + whole, b"[1]\n" + whole):
        (tmp_path / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(ArgumentError, match=r"^out: .* must hold JSON lines with variant, seed, round; line 1 is"):
            read_run(tmp_path).read_metrics()


@pytest.mark.parametrize("order", [(0, 1, 1), (0, 2, 1), (1, 0)])
def test_a_lane_whose_rounds_do_not_ascend_is_refused(order, tmp_path):
    lines = _written(tmp_path)[1].splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[index] for index in order))
    with pytest.raises(
        ArgumentError, match=rf"every line once, .*; line {len(order)} has round \d+ of A, seed 0, after"
    ):
        read_run(tmp_path).read_metrics()


def test_exactly_the_lines_up_to_the_checkpoint_remain(tmp_path):
    whole = _written(tmp_path)[1]
    lines = whole.splitlines(keepends=True)
    path = tmp_path / "metrics.jsonl"
    for lanes, round_index, kept in [
        ([("A", 1)], 20, 6),
        ([("A", 1)], 10, 5),
        ([("A", 1)], None, 3),
        ([("A", 0)], 10, 2),  # earlier lanes go on again: what was behind them goes
        ([("A", 0)], None, 0),
        ([("B", 0)], None, 6),
        ([("A", 0), ("A", 1)], 10, 5),
        ([("A", 0), ("B", 1)], None, 0),
    ]:
        path.write_bytes(whole + b'{"variant": "B", "se')
        own = read_run(tmp_path).keep_metrics_until(lanes, round_index)
        assert path.read_bytes() == b"".join(lines[:kept])
        assert own == [line for line in map(json.loads, lines[:kept]) if (line["variant"], line["seed"]) in lanes]


END = {"round": 20, "until": 20, "status": "finished", "reason": None}
END |= {"seconds": {"compile": 1.5, "run": 2, "timed_rounds": 20, "rounds_a_call": 5}}


def test_a_lane_is_finished_only_with_its_lines(tmp_path):
    run, whole = _written(tmp_path)
    lanes = [("A", 0), ("A", 1)]
    assert run.finished(lanes) == {}
    run.mark_finished("A", 1, END)
    assert run.finished(lanes) == {("A", 1): END}
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    assert read_run(tmp_path).finished(lanes) == {}
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    run.forget_finished("A", 1)
    assert run.finished(lanes) == {}


def test_edited_lines_are_noticed_by_the_marks_of_ends_and_checkpoints(tmp_path):
    run, whole = _written(tmp_path)
    mark = run.mark()
    assert mark == (len(whole), zlib.crc32(whole))
    run.append_metrics([_line("B", 0, 0)])
    run.mark_finished("B", 0, END | {"round": 0})
    path, longer = tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").read_bytes()
    lines = longer.splitlines(keepends=True)
    edited = longer.replace(b"0.333", b"0.334", 1)
    exchanged = b"".join([*lines[3:6], *lines[:3], *lines[6:]])
    for content in (edited, exchanged):
        path.write_bytes(content)
        with pytest.raises(
            ArgumentError, match=r"^out: .* as this run wrote it; its first [\d,]+ bytes were altered\."
        ):
            read_run(tmp_path).finished([("B", 0)])
        with pytest.raises(ArgumentError, match="bytes were altered"):
            read_run(tmp_path).keep_metrics_until([("A", 1)], 20, mark)
        assert path.read_bytes() == content
    path.write_bytes(b"".join(lines[:4]))
    with pytest.raises(ArgumentError, match=r"must hold the lines of every checkpoint; it ends before byte \d+"):
        read_run(tmp_path).keep_metrics_until([("A", 1)], 20, mark)
    path.write_bytes(longer)
    assert len(read_run(tmp_path).keep_metrics_until([("A", 1)], 20, mark)) == 3
    assert path.read_bytes() == whole


@pytest.mark.parametrize("vanished", [False, True])
def test_a_file_that_another_program_changed_is_not_appended_to(vanished, tmp_path):
    run, whole = _written(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.unlink() if vanished else path.write_bytes(whole * 2)
    with pytest.raises(
        OSError, match=r"No such file" if vanished else r"was changed by another program: it has [\d,]+ b"
    ):
        run.append_metrics([_line("A", 2, 0)])
    with pytest.raises(OSError, match="was changed by another program"):
        run.read_metrics()
    assert not vanished or not path.exists()


def test_parts_that_began_before_an_earlier_one_ended_are_refused(tmp_path):
    run, whole = _written(tmp_path)
    parts = [[("A", 0)], [("A", 1)], [("B", 0), ("B", 1)]]
    with pytest.raises(
        ArgumentError, match=r"every run's end; that of A, seed 0, does not, .*Restore .*finished\.json"
    ):
        run.refuse_gaps(parts)
    run.refuse_gaps([[("A", 1), ("A", 0)], *parts[2:]])
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_summary_is_read_back_and_dropped_when_training_goes_on(tmp_path):
    run = open_run(tmp_path, CONFIG)
    run.write_summary({"status": "finished", "value": np.float64(2.5)})
    assert read_run(tmp_path).read_summary() == {"status": "finished", "value": 2.5}
    open_run(tmp_path, CONFIG, resume=True).drop_summary()
    assert not (tmp_path / "summary.json").exists()
    with pytest.raises(ArgumentError, match=r"run: must be a directory with a config\.json"):
        read_run(tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "as dict|must hold dict; it holds list"),
        ({}, "must hold experiment as str; it does not"),
        ({"experiment": "custom", "preset": 3, "config": {}, "environment": {}}, "preset as str or null; it holds int"),
        ({"training": []}, "must hold training as dict|must hold dict; it holds list"),
        ({"training": {}}, r"training\.programs as list; it does not"),
        ({"training": {"programs": [{}]}}, r"training\.programs\[0\]\.lanes as list"),
        ({"training": {"programs": [PROGRAM | {"lanes_a_pass": 0}]}}, "lanes_a_pass: must be an integer of at least"),
    ],
)
def test_json_of_another_shape_is_refused_in_a_sentence(content, message, tmp_path):
    open_run(tmp_path, CONFIG)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_bytes())
    path.write_text(json.dumps({**whole, **content} if "training" in content else content))
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=message):
        open_run(tmp_path, CONFIG, resume=True)
    assert path.read_bytes() == before
    path.write_text("[" * 10**5)
    with pytest.raises(ArgumentError, match="must hold JSON; it does not"):
        open_run(tmp_path, CONFIG, resume=True)


@pytest.mark.parametrize("change", [{"until": None}, {"round": "20"}, {"seconds": {}}, {"metrics": 3}])
def test_a_record_of_an_end_of_another_shape_is_refused(change, tmp_path):
    run = _written(tmp_path)[0]
    run.mark_finished("A", 1, END)
    path = run.lane_directory("A", 1) / "finished.json"
    write_json(path, {**read_json(path), **change})
    with pytest.raises(
        ArgumentError, match=r"^out: .*finished\.json must hold (until|round|seconds\.compile|metrics) as"
    ):
        run.finished([("A", 1)])


def test_a_config_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="must hold JSON"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ArgumentError, match=r"^config\.model: must be a value that JSON can hold; got object"):
        jsonable({"model": object()}, "config")


def test_metrics_lines_refuse_what_is_not_json(tmp_path):
    run = open_run(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="JSON compliant"):
        run.append_metrics([{"loss": 1.0}, {"loss": float("nan")}])
    assert run.read_metrics() == []


def test_the_revision_is_that_of_a_checkout_only(tmp_path):
    assert git_revision(tmp_path) is None
