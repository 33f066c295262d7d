"""A run whose passes are trained apart, in processes that share no memory, is the run that one process makes."""

import json

import chex
import pytest
from run_files import run_bytes
from toy_problem import shared_programs, toy_case, toy_with_numbers, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import divide_run, open_run, read_results, read_run, restore_state, train
from jaxfl.training.run_directory import held

CONFIG = {"step_size": 0.2}


@pytest.fixture(autouse=True, scope="module")
def _shared():
    with shared_programs():
        yield


def grid(**fields):
    """Two programs: one has five lanes, and a lane that diverges; the other has two, with other numbers."""
    numbers = [{"step_size": step, "bad_round": bad} for step, bad in ((0.1, 1e9), (0.2, 13.0), (0.3, 1e9))]
    cases = {f"step {row['step_size']}": toy_case(toy_with_numbers, numbers=row, **fields) for row in numbers}
    cases["step 0.3"] = cases["step 0.3"]._replace(seeds=(1,))
    return {**cases, "plain": toy_case(toy_with_numbers, numbers={"step_size": 0.2}, **fields)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(cases, directory of one process, directory whose passes were trained apart, its summary)."""
    folder, cases = tmp_path_factory.mktemp("passes"), grid()
    train_toy(folder / "whole", cases, config=CONFIG)
    run = open_run(folder / "apart", CONFIG, experiment="toy")
    for number in reversed(range(divide_run(cases, 6, run=run))):
        assert train(cases, run=read_run(folder / "apart"), quiet=True, checkpoint_every=1, only=number) == {}
    summary = train(cases, run=open_run(folder / "apart", CONFIG, experiment="toy", resume=True), quiet=True)
    return cases, folder / "whole", folder / "apart", summary


def sorted_lines(out):
    return sorted(run_bytes(out).splitlines())


@pytest.mark.parametrize("at_once", [1, 2, 3, 6, 100])
def test_every_lane_is_in_one_pass(at_once, tmp_path):
    cases, run = grid(), open_run(tmp_path, CONFIG)
    assert divide_run(cases, at_once, run=run) == {1: 2, 2: 2, 3: 4, 6: 5, 100: 7}[at_once]
    lanes = [lane for one in run.passes for lane in one.lanes]
    assert sorted(lanes) == sorted((name, seed) for name, case in cases.items() for seed in case.seeds)
    assert all(len({name == "plain" for name, _ in one.lanes}) == 1 for one in run.passes)
    assert divide_run(cases, at_once + 1, run=run) == len(run.passes), "a run is divided once"


@pytest.mark.parametrize("fields", [{"budgets": {"bits_sent": 1e4}}, {"max_rounds": 7}])
def test_a_program_whose_lanes_may_end_apart_stays_whole(fields, tmp_path):
    cases, run = grid(), open_run(tmp_path, CONFIG)
    cases["step 0.1"] = cases["step 0.1"]._replace(**fields)
    divide_run(cases, 100, run=run)
    assert [len(one.lanes) for one in run.passes] == [5, 1, 1]


def test_lines_and_results_are_those_of_one_process(runs):
    _, whole, apart, summary = runs
    assert sorted_lines(apart) == sorted_lines(whole)
    tables = [[{**row, "seconds": 0} for row in read_results(out)] for out in (whole, apart)]
    assert tables[0] == tables[1]
    assert summary["cases"] == read_run(whole).read_summary()["cases"]
    assert summary["cases"]["step 0.2"]["status"] == ["diverged", "diverged"]


def test_states_are_those_of_one_process_bit_for_bit(runs):
    cases, whole, apart, _ = runs
    for name in ("step 0.1", "step 0.3", "plain"):
        for seed in cases[name].seeds:
            ends = [restore_state(read_run(out), name, cases[name], seed) for out in (whole, apart)]
            chex.assert_trees_all_equal(*ends)


def test_a_run_that_one_process_began_goes_on_apart_and_the_other_way_round(runs, tmp_path):
    cases, whole, *_ = runs
    train_toy(tmp_path / "run", cases, config=CONFIG)
    (tmp_path / "run" / "passes" / "1" / "end.json").unlink()
    run = open_run(tmp_path / "run", CONFIG, experiment="toy", resume=True)
    assert divide_run(cases, 4, run=run) == 2
    train(cases, run=run, quiet=True, only=1)
    train(cases, run=run, quiet=True)
    assert run_bytes(tmp_path / "run") == run_bytes(whole)


def test_a_pass_has_one_process_at_a_time(tmp_path):
    cases, run = grid(), open_run(tmp_path, CONFIG)
    divide_run(cases, 2, run=run)
    path = run.passes[1].path
    path.mkdir(parents=True)
    with held(path), pytest.raises(ArgumentError, match="must be used by one process at a time"):
        train(cases, run=run, quiet=True, only=1)


@pytest.mark.parametrize("only", [-1, 2, 0.5])
def test_a_pass_that_is_not_there_is_refused(only, tmp_path):
    cases, run = grid(), open_run(tmp_path, CONFIG)
    with pytest.raises(ArgumentError, match=r"^only: "):
        train(cases, run=run, quiet=True, only=0)
    divide_run(cases, 2, run=run)
    with pytest.raises(ArgumentError, match=r"^only: "):
        train(cases, run=run, quiet=True, only=only)


@pytest.mark.parametrize(
    "passes",
    [[[["plain", 0]]], [[["plain", 0], ["plain", 0]]], [[["plain", 0], ["step 0.1", 0]]], [[["other", 0]]]],
)
def test_lanes_that_are_not_those_of_the_run_are_refused(passes, tmp_path):
    cases = {name: case for name, case in grid().items() if name in ("plain", "step 0.1")}
    run = open_run(tmp_path, CONFIG)
    divide_run(cases, 2, run=run)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = [["plain", 1], ["step 0.1", 1]] if passes[0][-1] == ["step 0.1", 0] else []
    config["training"]["passes"] = [*passes, *([whole] if whole else [])]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=r"config\.json must hold each lane once"):
        train(cases, run=read_run(tmp_path), quiet=True)
