"""A run in parts, put together, is the run that one process makes."""

import shutil

import jax
import numpy as np
import pytest
from toy_problem import toy_variant, toy_with_numbers, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import open_run, read_results, restore_state, train
from jaxfl.training.parts import divide, has_ended, merge, part_of

CONFIG = {"step_size": 0.2}


def grid(**fields):
    """Two programs: one has five lanes, and a lane that diverges; the other has two, with other numbers."""
    numbers = [{"step_size": step, "bad_round": bad} for step, bad in ((0.1, 1e9), (0.2, 13.0), (0.3, 1e9))]
    variants = {f"step {row['step_size']}": toy_variant(toy_with_numbers, numbers=row, **fields) for row in numbers}
    variants["step 0.3"] = variants["step 0.3"]._replace(seeds=(1,))
    return {**variants, "plain": toy_variant(toy_with_numbers, numbers={"step_size": 0.2}, **fields)}


def open_part(path):
    """A part's directory, begun or found."""
    part = open_run(path, CONFIG, experiment="toy", resume=True)
    part.is_part = True
    return part


def train_parts(folder, variants, parts):
    """Lanes -> directory, trained."""
    directories = {lanes: open_part(folder / str(number)) for number, lanes in enumerate(parts)}
    for lanes, part in directories.items():
        train(part_of(variants, lanes), run=part, quiet=True, checkpoint_every=1)
    return directories


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(variants, directory of one process, parts and their directories)."""
    folder, variants = tmp_path_factory.mktemp("parts"), grid()
    train_toy(folder / "whole", variants, config=CONFIG)
    parts = divide(variants, 6)
    return variants, folder / "whole", train_parts(folder, variants, parts)


def merged(path, variants, parts):
    """The parts put together, with what `train` adds."""
    run = open_run(path, CONFIG, experiment="toy")
    merge(run, variants, parts)
    return run, train(variants, run=run, quiet=True)


def rows(path):
    return [{**row, "seconds": 0} for row in read_results(path)]


@pytest.mark.parametrize("at_once", [1, 2, 3, 6, 100])
def test_every_lane_is_in_one_part(at_once):
    variants = grid()
    parts = divide(variants, at_once)
    lanes = [lane for part in parts for lane in part]
    assert sorted(lanes) == sorted((name, seed) for name, variant in variants.items() for seed in variant.seeds)
    assert len(parts) == {1: 2, 2: 2, 3: 4, 6: 5, 100: 7}[at_once]
    assert all(len({name == "plain" for name, _ in part}) == 1 for part in parts)


@pytest.mark.parametrize("fields", [{"budgets": {"bits_sent": 1e4}}, {"max_rounds": 7}])
def test_a_program_whose_lanes_may_end_apart_stays_whole(fields):
    variants = grid()
    variants["step 0.1"] = variants["step 0.1"]._replace(**fields)
    assert [len(part) for part in divide(variants, 100)] == [5, 1, 1]


def test_metrics_jsonl_is_that_of_one_process_byte_for_byte(trained, tmp_path):
    variants, whole, parts = trained
    run, summary = merged(tmp_path / "run", variants, parts)
    assert (run.path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert rows(run.path) == rows(whole)
    assert summary["variants"]["step 0.2"]["status"] == ["diverged", "diverged"]


def test_a_lone_lane_of_a_part_that_diverges_ends_with_its_reason(tmp_path):
    variants = grid()
    lanes = (("step 0.2", 1),)
    train_parts(tmp_path, variants, [lanes])
    assert has_ended(tmp_path / "0", lanes)
    assert not has_ended(tmp_path / "0", (("step 0.1", 1),))
    assert not has_ended(tmp_path / "none", lanes)


def test_states_come_over_bit_for_bit(trained, tmp_path):
    variants, whole, parts = trained
    run, _ = merged(tmp_path / "run", variants, parts)
    of_whole = open_run(whole, CONFIG, experiment="toy", resume=True)
    for name, variant in variants.items():
        for seed in variant.seeds:
            (end, state), (end_again, again) = (restore_state(r, name, variant, seed) for r in (of_whole, run))
            assert end == end_again
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
                np.testing.assert_array_equal(a, b)


def test_the_environment_is_that_of_the_first_part(trained, tmp_path):
    variants, _, parts = trained
    first = next(iter(parts.values()))
    before = first.config
    first.config = {**before, "environment": {**before["environment"], "device_kind": "another"}}
    try:
        _, summary = merged(tmp_path / "run", variants, parts)
    finally:
        first.config = before
    assert summary["environment"]["device_kind"] == "another"


def test_the_parts_stay_as_they_are(trained, tmp_path):
    variants, _, parts = trained
    files = {path: path.read_bytes() for part in parts.values() for path in part.path.rglob("*") if path.is_file()}
    merged(tmp_path / "run", variants, parts)
    again = {path: path.read_bytes() for part in parts.values() for path in part.path.rglob("*") if path.is_file()}
    assert files == again


def test_a_merge_that_was_cut_off_is_made_again(trained, tmp_path, monkeypatch):
    variants, whole, parts = trained
    run = open_run(tmp_path / "run", CONFIG, experiment="toy")
    for interrupted in ("mark_finished", "lane_directory", "append_metrics"):
        with monkeypatch.context() as patch:
            patch.setattr(type(run), interrupted, _interrupt)
            with pytest.raises(KeyboardInterrupt):
                merge(run, variants, parts)
    merge(run, variants, parts)
    assert (run.path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def _interrupt(*args):
    raise KeyboardInterrupt


def test_a_lane_that_has_not_ended_is_named(trained, tmp_path):
    variants, _, parts = trained
    (lanes, part), *others = parts.items()
    shutil.copytree(part.path, tmp_path / "part")
    short = open_part(tmp_path / "part")
    short.forget_finished(*lanes[0])
    run = open_run(tmp_path / "run", CONFIG, experiment="toy")
    with pytest.raises(ArgumentError, match=r"^parts: must hold the end of every lane; step 0\.1, seed 0, has not"):
        merge(run, variants, {lanes: short, **dict(others)})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
