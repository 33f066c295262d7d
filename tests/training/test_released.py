"""Statements that depend on counts: on what really ran, of every seed, resumed or not; and budgets of counts."""

import json

import pytest
from run_files import run_bytes
from toy_problem import lasting, toy_case, toy_statements, toy_that_counts, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import read_results, read_run
from jaxfl.training.lockstep import Lockstep
from jaxfl.training.pass_directory import PassDirectory

NUMBERS = {"step_size": 0.2, "bad_round": 1e6}
RELEASED = {"privacy": toy_statements, "released": ("local_iterations",)}


def counting(bad_round=1e6, **fields):
    """A case that counts its local iterations, as many in each as in another."""
    numbers = {**NUMBERS, "bad_round": bad_round}
    return toy_case(toy_that_counts, numbers=numbers, **{**RELEASED, "chunk_rounds": 5, **fields}, identity={"same": 1})


@pytest.fixture(scope="module")
def totals(tmp_path_factory):
    """(seed, round) -> local iterations until then, from a healthy run."""
    out = tmp_path_factory.mktemp("healthy")
    train_toy(out, {"Healthy": counting(evaluate_every=1, num_rounds=40, chunk_rounds=1)})
    made, until = {0: 0, 1: 0}, {}
    for line in read_run(out).read_metrics():
        made[line["seed"]] += line["local_iterations"] or 0
        until[line["seed"], line["round"]] = made[line["seed"]]
    return until


def test_statements_are_of_the_counts_that_ran_the_largest_over_seeds_and_a_rows_own(totals, tmp_path):
    summary = train_toy(tmp_path, {"A": counting()})
    ends = [totals[0, 25], totals[1, 25]]
    assert ends[0] != ends[1]
    assert 25 < min(ends) < max(ends) < 75
    last = {line["seed"]: line for line in read_run(tmp_path).read_metrics()}
    assert [last[seed]["total_local_iterations"] for seed in (0, 1)] == ends
    row = summary["cases"]["A"]
    assert row["costs"]["local_iterations"]["per_seed"] == ends
    (stated,) = row["privacy"]
    assert (stated["rounds"], stated["local_iterations"]) == (25, max(ends))
    (every,) = json.loads((tmp_path / "privacy.json").read_text())["A"]
    assert every["node_epsilons"] == [toy_statements(25, local_iterations=max(ends))[0]["node_epsilons"]]
    for seed, result in enumerate(read_results(tmp_path)):
        assert result["total_local_iterations"] == ends[seed]
        assert result["proven_dp_epsilon"] == toy_statements(25, local_iterations=ends[seed])[0]["dp_epsilon"]


def test_without_released_the_rounds_alone_are_given(tmp_path):
    given = []

    def privacy(*arguments, **totals):
        given.append((arguments, totals))
        return toy_statements(*arguments)

    train_toy(tmp_path, {"A": counting(privacy=privacy, released=())})
    assert given
    assert all(call == ((25,), {}) for call in given)
    assert all("released" not in record for record in read_run(tmp_path).ended().values())


def test_counts_after_the_last_line_of_a_lane_that_diverges_are_counted(totals, tmp_path):
    cases = {"Bad": counting(bad_round=12.0), "Good": counting()}
    summary = train_toy(tmp_path, cases)
    stated = {name: row["privacy"][0] for name, row in summary["cases"].items()}
    assert summary["cases"]["Bad"]["status"] == ["diverged"] * 2
    for name, rounds in (("Bad", 15), ("Good", 25)):
        ends = [totals[seed, rounds] for seed in (0, 1)]
        assert (stated[name]["rounds"], stated[name]["local_iterations"]) == (rounds, max(ends))
        epsilons = [row["proven_dp_epsilon"] for row in read_results(tmp_path) if row["case"] == name]
        assert epsilons == [toy_statements(rounds, local_iterations=end)[0]["dp_epsilon"] for end in ends]
    assert lasting(train_toy(tmp_path, cases, resume=True)) == lasting(summary)


def lines_of(out, name):
    """Raw lines of one case."""
    lines = run_bytes(out).splitlines()
    return [line for line in lines if json.loads(line)["case"] == name]


def test_a_lane_ends_at_the_end_of_the_chunk_in_which_a_budget_is_reached(totals, tmp_path, monkeypatch):
    """It is evaluated there, the others go on with the same bytes, and so it is after a kill."""
    most = totals[0, 13]
    reached = [min(r for r in range(41) if totals[seed, r] >= most) for seed in (0, 1)]
    ends = [-(-r // 5) * 5 for r in reached]
    assert 15 in ends, "not an evaluation"
    cases = {"Poor": counting(budgets={"local_iterations": most}), "Rich": counting()}
    summary = train_toy(tmp_path / "whole", cases)
    row = summary["cases"]["Poor"]
    assert (summary["status"], row["status"]) == ("budget_spent", ["budget_spent"] * 2)
    assert row["rounds_per_seed"] == ends
    counted = [totals[seed, end] for seed, end in enumerate(ends)]
    assert row["reason"] == [f"local_iterations reached {count}" for count in counted]
    assert row["costs"]["local_iterations"]["per_seed"] == counted
    assert (row["privacy"][0]["rounds"], row["privacy"][0]["local_iterations"]) == (max(ends), max(counted))
    assert summary["cases"]["Rich"]["rounds_per_seed"] == [25, 25]
    train_toy(tmp_path / "rich", {"Poor": counting(), "Rich": counting()})
    assert lines_of(tmp_path / "whole", "Rich") == lines_of(tmp_path / "rich", "Rich")

    lines = run_bytes(tmp_path / "whole")
    append, end = PassDirectory.append, Lockstep._end

    def no_line(self, lines):
        if lines[0]["round"] == at:
            raise KeyboardInterrupt
        append(self, lines)

    def no_record(self, lane, *rest, **more):
        if self._round == at:
            raise KeyboardInterrupt
        end(self, lane, *rest, **more)

    # No line of its end; a line, and no record; its end behind the checkpoint, and before it.
    for owner, name, dying, at in (
        (PassDirectory, "append", no_line, 15),
        (Lockstep, "_end", no_record, 15),
        (PassDirectory, "append", no_line, 20),
        (PassDirectory, "append", no_line, 25),
    ):
        out = tmp_path / f"{name} {at}"
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying)
            with pytest.raises(KeyboardInterrupt):
                train_toy(out, cases)
        resumed = train_toy(out, cases, resume=True)
        assert run_bytes(out) == lines
        assert resumed["cases"] == summary["cases"]


def test_a_lane_by_itself_that_spends_its_budget_resumes_at_its_end(totals, tmp_path, monkeypatch):
    cases = {"Poor": counting(budgets={"local_iterations": totals[0, 13]}, seeds=(0,))}
    summary = train_toy(tmp_path / "whole", cases)
    assert summary["cases"]["Poor"]["rounds_per_seed"] == [15]

    def dying(self, *arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PassDirectory, "finish", dying)
        with pytest.raises(KeyboardInterrupt):
            train_toy(tmp_path / "killed", cases)
    assert train_toy(tmp_path / "killed", cases, resume=True)["cases"] == summary["cases"]
    runs = [run_bytes(tmp_path / name) for name in ("whole", "killed")]
    assert runs[0] == runs[1]


def test_other_counts_are_refused_on_resume(tmp_path):
    train_toy(tmp_path, {"A": counting()})
    with pytest.raises(ArgumentError, match=r"released: must be as in the run that is resumed"):
        train_toy(tmp_path, {"A": counting(released=("gradient_evaluations",))}, resume=True)
