"""Run directories: what is refused, what is compared."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfl.core import ArgumentError
from jaxfl.training import open_run, read_run
from jaxfl.training.environment import describe_environment, git_revision, warn_of_changes
from jaxfl.training.json_files import jsonable, refuse_difference

LANES = [[("A", 0), ("A", 1)], [("B", 0)]]
CONFIG = {"step_size": 0.1, "graph": {"kind": "ring", "nodes": 8}, "clip_norm": float("inf")}


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
    with pytest.raises(ArgumentError, match=r"^out: must not hold a run yet; .* holds one\. Resume it \(open_run\("):
        open_run(tmp_path, {"step_size": 3})
    assert (tmp_path / "config.json").read_bytes() == before
    (tmp_path / "config.json").unlink()
    (tmp_path / "passes").mkdir()
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
    run.record_passes(LANES)
    with pytest.raises(ArgumentError, match=r"^step_size: .* has 0\.1, this call has no such key"):
        open_run(tmp_path, {name: CONFIG[name] for name in ("graph", "clip_norm")}, experiment="toy", resume=True)
    with pytest.raises(ArgumentError, match=r"^experiment: "):
        open_run(tmp_path, CONFIG, experiment="other", resume=True)
    run = open_run(tmp_path, CONFIG, experiment="toy", resume=True)
    run.record_training({"num_rounds": 10, "seeds": [0, 1]})  # what was chosen is no setting
    assert [list(one.lanes) for one in run.passes] == LANES
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
        ("noise_generator", None, "all random numbers"),  # as in a run of jaxfl 0.3
    ],
)
def test_another_environment_is_warned_of(name, value, what, tmp_path):
    current = describe_environment()
    with pytest.warns(UserWarning, match=rf"{name} {value} -> .*: {what} may differ .*, and .* further releases"):
        warn_of_changes({**current, name: value}, current, tmp_path)


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
        ({"training": {}}, r"training\.passes as list; it does not"),
        ({"training": {"passes": [{}]}}, r"training\.passes as lists of"),
        ({"training": {"passes": [[["A", "0"]]]}}, r"training\.passes as lists of"),
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
    for no_json in ("[" * 10**5, "{"):
        path.write_text(no_json)
        with pytest.raises(ArgumentError, match="must hold JSON; it does not"):
            open_run(tmp_path, CONFIG, resume=True)


def test_a_value_that_json_cannot_hold_is_refused():
    with pytest.raises(ArgumentError, match=r"^config\.model: must be a value that JSON can hold; got object"):
        jsonable({"model": object()}, "config")


def test_the_revision_is_that_of_a_checkout_only(tmp_path):
    assert git_revision(tmp_path) is None
