"""Output that a person sees: progress on and off a terminal, the closing table."""

import io
import re
import time

import pytest
import rich.console
from toy_problem import toy_case, train_toy

from jaxfl.core import ArgumentError
from jaxfl.core.lines import Lines
from jaxfl.training import read_run, summary_table
from jaxfl.training.progress import ProgressReport
from jaxfl.training.summary import format_spread, spread, summarize_run


def _console(*, terminal):
    return rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)


def _written(console):
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _run(console, *, quiet=False):
    with ProgressReport(40, quiet=quiet, console=console) as progress:
        for seed in (0, 1):
            progress.begin(f"PrivSGP-VR [b=1], seed {seed}", 20)
            progress.skip(10)
            progress.compiled()
            progress.note("test accuracy 0.91")
            progress.advance(10)
            progress.end()
    return _written(console)


def test_without_a_terminal_plain_lines_name_the_case_and_the_seed():
    text = _run(_console(terminal=False))
    lines = text.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("PrivSGP-VR [b=1], seed 0: round 20/20, test accuracy 0.91 (")
    assert "rounds/s" in lines[0]
    assert lines[1].startswith("PrivSGP-VR [b=1], seed 1: round 20/20")
    assert lines[1].endswith("0:00 left)")
    assert "\x1b" not in text


def test_a_long_part_says_something_now_and_then(monkeypatch):
    clock = iter(range(0, 10_000, 4))  # four seconds between any two looks at the clock
    monkeypatch.setattr("jaxfl.training.progress.time.perf_counter", lambda: float(next(clock)))
    console = _console(terminal=False)
    with ProgressReport(100, console=console) as progress:
        progress.begin("A", 100)
        progress.compiled()
        for _ in range(10):
            progress.advance(10)
    shown = _written(console).count("\n")
    assert 2 <= shown < 10


def test_compiling_is_said_until_the_first_rounds_alone(monkeypatch):
    monkeypatch.setattr("jaxfl.training.progress._SECONDS_BETWEEN_LINES", -1.0)
    console = _console(terminal=False)
    with ProgressReport(40, console=console) as progress:
        progress.begin("A", 0)  # a program that is compiled
        progress.begin("B", 20)
        progress.compiled()
        progress.skip(10)
        progress.advance(0)
        progress.begin("C", 20)
        progress.skip(20)  # by an earlier run
        progress.end()
    shown = "A: compiling|B: round 0/20 (compiling)|B: round 10/20|C: round 0/20 (compiling)|C: round 20/20"
    assert _written(console).splitlines() == shown.split("|")


def test_a_line_behind_an_evaluation_shows_its_metric(tmp_path, monkeypatch, capsys):
    """Not that of the evaluation before."""
    monkeypatch.setattr("jaxfl.training.progress._SECONDS_BETWEEN_LINES", -1.0)
    train_toy(tmp_path, {"A": toy_case(seeds=(1,), chunk_rounds=5)}, quiet=False)
    measured = {line["round"]: f"{line['test_accuracy']:.4g}" for line in read_run(tmp_path).read_metrics()}
    shown = re.findall(r"^A, seed 1: round (\d+)/25, test accuracy ([\d.]+), ", capsys.readouterr().out, flags=re.M)
    assert [int(round_index) for round_index, _ in shown] == [5, 10, 15, 20, 25, 25]
    assert len(set(measured.values())) == len(measured)
    for round_index, accuracy in shown:
        assert accuracy == measured[int(round_index) - int(round_index) % 10 if round_index != "25" else 25]


def test_on_a_terminal_a_bar_with_rate_and_time_left():
    text = _run(_console(terminal=True))
    assert "PrivSGP-VR" in text
    assert "20/20 rounds" in text  # of all parts: 40, less the 20 that were skipped
    assert "rounds/s" in text
    assert "left" in text


def test_the_first_call_of_a_program_says_no_time_left(monkeypatch):
    """It may take a hundred times as long as the others do."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = ProgressReport(100, quiet=True)
    progress.begin("A", 100)
    progress.compiled()
    now = 100.0
    progress.advance(1)
    assert progress._rate() == "0.01 rounds/s"
    now = 109.0
    progress.advance(9)
    assert progress._rate() == "1 rounds/s, 1:30 left"


def test_the_time_left_is_that_of_lanes_whose_rate_is_known(monkeypatch):
    """Lanes of a plan's other programs may be ten times as fast."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = ProgressReport(1000, quiet=True)
    shown = []
    for label, num_rounds, seconds in (("slow", 100, 1.0), ("fast", 900, 0.1)):
        progress.begin(label, num_rounds)
        progress.compiled()
        for rounds in (1, 9, num_rounds - 10):
            now += rounds * seconds
            progress.advance(rounds)
            shown.append(progress._rate())
    assert shown[1:3] == ["1 rounds/s, 1:30 left of these runs", "1 rounds/s"]
    assert shown[4:] == ["10 rounds/s, 1:29 left", "10 rounds/s, 0:00 left"]


def test_in_a_notebook_one_line_that_is_written_anew():
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True, width=120)
    with ProgressReport(40, console=console) as progress:
        progress.begin("PrivSGP-VR, seed 0", 40)
        progress.compiled()
        progress.announce("one message")
        progress.advance(20)
        progress.note("test accuracy 0.91")
        progress.end()
    text = _written(console)
    *above, last = text.rstrip("\n").split("\n")
    assert [line.rpartition("\r")[2] for line in above] == ["one message"] * len(above)
    assert text.endswith("\n")
    assert last.rpartition("\r")[2].startswith(
        f"PrivSGP-VR, seed 0 {'━' * 15}{'╌' * 15} 20/40 rounds, test accuracy 0.91, "
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_writes_nothing(terminal):
    assert _run(_console(terminal=terminal), quiet=True) == ""


def _summary():
    return {
        "experiment": "toy",
        "status": "finished",
        "seeds": [0, 1],
        "cases": {
            "A": {"rounds": 20, "test_accuracy": spread([0.5, 0.7]), "train_loss": spread([0.25, 0.75])},
            "B": {"rounds": 10, "test_accuracy": spread([None, None])},
        },
    }


def test_spreads():
    assert spread([]) == {"mean": None, "std": None, "per_seed": []}
    assert spread([2.0]) == {"mean": 2.0, "std": None, "per_seed": [2.0]}
    assert format_spread("test_accuracy", None) == "-"
    assert format_spread("test_loss", {"mean": 1234.567, "std": None}) == "1.23e+03"


def test_a_count_is_summed_over_its_lines_and_a_metric_taken_from_the_last():
    lines = Lines(
        [
            {"case": "A", "seed": 0, "round": 0, "train_loss": None, "dropped": None},
            {"case": "A", "seed": 0, "round": 5, "train_loss": 3.0, "dropped": 4},
            {"case": "A", "seed": 0, "round": 10, "train_loss": 1.0, "dropped": 2},
        ]
    )
    record = {
        "until": 10,
        "status": "finished",
        "seconds": {"compile": 1.0, "run": 4.0, "timed_rounds": 8, "rounds_a_call": 4},
    }
    config = {"experiment": "toy", "preset": None, "environment": {}}
    cases = {"A": {"seeds": [0], "settings": {"step_size": 0.1}}}
    summary = summarize_run(lines, {("A", 0): record}, cases, config=config, status="finished")
    row = summary["cases"]["A"]
    assert row["dropped"]["per_seed"] == [6]
    assert row["train_loss"]["per_seed"] == [1.0]
    assert (row["settings"], row["status"]) == ({"step_size": 0.1}, ["finished"])
    assert summary["seconds"] == {"compile": 1.0, "run": 4.0, "per_round": 0.5, "rounds_a_call": [4, 4]}
    for ended in ({}, {("A", 0): {**record, "status": "diverged"}}):
        row = summarize_run(lines, ended, cases, config=config, status="diverged")["cases"]["A"]
        assert row["train_loss"]["per_seed"] == [None]
        assert row["rounds"] == 10
    with pytest.raises(ArgumentError, match="status: must be one of finished, budget_spent, stopped_early, diverged"):
        summarize_run(lines, {}, cases, config=config, status="done")


def test_the_closing_table_of_many_cases_is_short_and_says_what_failed():
    summary = _summary()
    proven = {"bound": "proven", "dp_epsilon": 2.5, "dp_delta": 1e-5, "neighboring_relation": "zero_out"}
    summary["cases"]["A"]["privacy"] = [proven]
    ended = {"status": ["finished", "diverged"], "rounds": 20, "test_accuracy": spread([0.5, None])}
    summary["cases"] = {f"point {index}": ended if index == 3 else summary["cases"]["A"] for index in range(48)}
    console = _console(terminal=False)
    console.print(summary_table(summary))
    text = _written(console)
    rows = [line for line in text.splitlines() if line.startswith("│ point")]
    assert len(rows) == 11
    assert [("1 of 2 diverged" in row, "point 3 " in row) for row in rows].count((True, True)) == 1
    assert "the best 10 of 48 cases and the last" in " ".join(text.split())
    assert "proven (zero out one sample, δ = 1e-05): ε = 2.5 for 47 of 48 cases" in " ".join(text.split())


def test_claims_stand_before_results_with_what_neighboring_data_are():
    summary = _summary()
    proven = {"bound": "proven", "dp_epsilon": 2.5, "dp_delta": 1e-5, "neighboring_relation": "replace_one"}
    summary["cases"]["A"]["privacy"] = [proven]
    console = _console(terminal=False)
    console.print(summary_table(summary))
    text = _written(console)
    claims = " ".join(text.partition("┏")[0].split())
    meaning = claims.index("another sample stands in the place of one (replace one sample)")
    assert 0 <= claims.index("A: ε = 2.5 proven") < meaning
    assert "ε = 2.5" not in text.partition("┏")[2]
