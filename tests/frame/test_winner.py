"""The end of a sweep tells the best cases first, and the best one as a command that asks for it again."""

import shlex

import pytest
from toy_experiment import EXPERIMENT, ask

from jaxfl.frame.command_line import parse
from jaxfl.frame.run import _columns, _winner, words_of
from jaxfl.training import summary_table
from jaxfl.training.summary import ranking


def summary_of(query, means):
    rows = {
        name: {"rounds": 3, "test_accuracy": {"mean": mean, "std": None}}
        for name, mean in zip(query.rows, means, strict=True)
    }
    return {"experiment": "toy", "seeds": [0], "status": "finished", "cases": rows}


def test_the_command_asks_for_the_best_case():
    query = ask("--shape circle --grid step_size=0.1,0.2,0.4 --grid rounds=5,7 --grid fast=true,false --seeds 2 0")
    means = [0.5] * len(query.rows)
    means[7] = 0.9
    summary, best = summary_of(query, means), list(query.rows)[7]
    summary["cases"][best]["status"] = ["diverged", "finished"]  # so that its mean is of the other seed only
    text = _winner(query, summary, ["test_accuracy"])
    assert f"Best of {len(means)} by test accuracy: {best} (90.0, 1 of 2 diverged)" in text
    command = shlex.split(text.splitlines()[1].removeprefix(f"  {EXPERIMENT.command} "))
    (again,) = parse(EXPERIMENT, command)[0].rows.values()
    assert (again.config, again.seeds) == (query.rows[best].config, (2, 0))


def test_samples_that_validate_decide_where_there_are_some():
    query = ask("--shape circle --grid rounds=5,7")
    summary, (first, second) = summary_of(query, (0.9, 0.1)), query.rows
    assert "looks at their test results" in (text := _winner(query, summary, _columns(EXPERIMENT)))
    assert f": {first} (90.0)" in text
    for name, mean in ((first, 0.2), (second, 0.3)):
        summary["cases"][name]["validation_accuracy"] = {"mean": mean, "std": None}
    assert "looks at their validation results" in (text := _winner(query, summary, _columns(EXPERIMENT)))
    assert f"by validation accuracy: {second} (30.0)" in text


@pytest.mark.parametrize(("seeds", "written"), [("--seed 3", (3,)), ("", (0,)), ("--seeds 0", (0,))])
def test_the_command_has_the_seeds_once(seeds, written):
    query = ask(f"--shape circle --grid rounds=5,7 {seeds}")
    with_default = EXPERIMENT._replace(grid=(*EXPERIMENT.grid, {"seed": (0, 1)}))  # as some data sets have
    experiment = with_default if "--seeds" in seeds else EXPERIMENT
    (again,) = parse(experiment, words_of(query, list(query.rows)[1]))[0].rows.values()
    assert again.seeds == written


def test_the_worst_node_may_rank():
    query = ask("--shape circle --grid rounds=1,2,3,4,5,6")
    summary = summary_of(query, [index / 10 for index in range(6)])
    names = list(query.rows)
    for name, worst in zip(names, (0.4, 0.1, 0.5, 0.2, 0.6, 0.3), strict=True):
        summary["cases"][name]["worst"] = {"mean": worst, "std": None}
    for rank_by, order in ((None, (5, 4, 3, 2, 1, 0)), ("worst", (4, 2, 0, 5, 3, 1))):
        table = summary_table(summary, ["test_accuracy", "worst"], rank_by)
        assert list(table.columns[0].cells) == [names[index] for index in order]
        assert f"sorted by {rank_by or 'test accuracy'}" in str(table.caption)
    assert f"by worst: {names[4]} (0.6)" in _winner(query, summary, ["worst", "test_accuracy"])
    few = {**summary, "cases": dict(list(summary["cases"].items())[:4])}
    assert list(summary_table(few, ["test_accuracy"]).columns[0].cells) == names[:4]


def test_the_best_of_many_are_shown_and_the_last():
    query = ask(["--shape", "circle", "--grid", "rounds=" + ",".join(map(str, range(1, 31)))])
    means = [None if index == 11 else index / 30 for index in range(30)]
    summary = summary_of(query, means)
    ranked = ranking(summary, ["missing", "test_accuracy"])
    order = sorted(range(30), key=lambda index: -1.0 if index == 11 else index, reverse=True)
    assert ranked == [list(query.rows)[index] for index in order]
    shown = list(summary_table(summary, ["test_accuracy"]).columns[0].cells)
    assert shown == [*ranked[:10], ranked[-1]]
    losses = {"cases": {name: {"test_loss": {"mean": mean}} for name, mean in zip("ABC", (2.0, 1.0, 3.0), strict=True)}}
    assert ranking(losses, ["test_loss"]) == ["B", "A", "C"]
