"""Run directories: what is refused, what is compared, which lines stay."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfl.core import ArgumentError
from jaxfl.training import open_run, read_run
from jaxfl.training.environment import git_revision
from jaxfl.training.json_files import jsonable, read_json, refuse_difference, write_json

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


def test_unwritable_output_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run")):
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
    run.record_program(0, {"strategy": "side by side"})
    with pytest.raises(ArgumentError, match=r"^step_size: .* has 0\.1, this call has no such key"):
        open_run(tmp_path, {name: CONFIG[name] for name in ("graph", "clip_norm")}, experiment="toy", resume=True)
    with pytest.raises(ArgumentError, match=r"^experiment: "):
        open_run(tmp_path, CONFIG, experiment="other", resume=True)
    run = open_run(tmp_path, CONFIG, experiment="toy", resume=True)
    run.record_training({"num_rounds": 10, "seeds": [0, 1]})  # what was chosen is no setting
    assert run.recorded_programs() == [{"strategy": "side by side"}]
    with pytest.raises(ArgumentError, match=r"^seeds: .* has \[0, 1\], this call has \[0, 2\]"):
        run.record_training({"num_rounds": 10, "seeds": [0, 2]})


def test_the_first_difference_in_the_order_given_is_named():
    with pytest.raises(ArgumentError, match=r"^b: "):
        refuse_difference({"a": 1, "b": 2, "c": 3}, {"c": 3, "b": 0, "a": 0}, Path("x"))
    refuse_difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}, Path("x"))


def test_another_platform_is_warned_of(tmp_path):
    run = open_run(tmp_path, CONFIG)
    environment = {**run.config["environment"], "jaxlib": "0.0.1"}
    write_json(tmp_path / "config.json", {**run.config, "environment": environment})
    with pytest.warns(UserWarning, match=r"jaxlib 0\.0\.1 -> "):
        open_run(tmp_path, CONFIG, resume=True)


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
    assert len(run.read_metrics()) == 5
    (tmp_path / "metrics.jsonl").write_bytes(whole[:30] + whole[40:])
    with pytest.raises(ArgumentError, match="line 1 is not"):
        run.read_metrics()


def test_exactly_the_lines_up_to_the_checkpoint_remain(tmp_path):
    run, whole = _written(tmp_path)
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
        own = run.keep_metrics_until(lanes, round_index)
        assert path.read_bytes() == b"".join(lines[:kept])
        assert own == [line for line in map(json.loads, lines[:kept]) if (line["variant"], line["seed"]) in lanes]


def test_a_lane_is_finished_only_with_its_lines(tmp_path):
    run, whole = _written(tmp_path)
    lanes = [("A", 0), ("A", 1)]
    assert run.finished(lanes) == {}
    run.mark_finished("A", 0, {"round": 20})
    assert run.finished(lanes) == {("A", 0): {"round": 20}}
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert run.finished(lanes) == {}
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    run.forget_finished("A", 0)
    assert run.finished(lanes) == {}


def test_summary_is_read_back_and_dropped_on_resume(tmp_path):
    run = open_run(tmp_path, CONFIG)
    run.write_summary({"status": "finished", "value": np.float64(2.5)})
    assert read_run(tmp_path).read_summary() == {"status": "finished", "value": 2.5}
    open_run(tmp_path, CONFIG, resume=True)
    assert not (tmp_path / "summary.json").exists()
    with pytest.raises(ArgumentError, match=r"run: must be a directory with a config\.json"):
        read_run(tmp_path / "none")


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
