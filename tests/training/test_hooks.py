"""Hooks at evaluations: what they see, ends that they ask for, trackers and a trace."""

import contextlib
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from run_files import run_bytes, run_lines
from toy_problem import lasting, toy_case, toy_statements, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import Evaluation, early_stop, profile, publish, read_results, read_run, restore_state, tracker
from jaxfl.training.hooks import TRACKERS, all_of
from jaxfl.training.summary import EARLY

CASES = {
    "A": toy_case(privacy=toy_statements, final_params_are_private=True)
}  # two lanes, evaluated in rounds 0, 10, 20 and 25


def at(evaluation, seed, round_index):
    """True if it is this one."""
    return (evaluation.seed, evaluation.round_index) == (seed, round_index)


def test_it_sees_every_line_and_changes_no_byte(tmp_path):
    seen = []
    train_toy(tmp_path / "plain", CASES)
    train_toy(tmp_path / "heard", CASES, hook=seen.append)
    assert run_bytes(tmp_path / "heard") == run_bytes(tmp_path / "plain")
    lines = run_lines(tmp_path / "heard")
    assert [(one.case, one.seed, one.round_index) for one in seen] == [
        (line["case"], line["seed"], line["round"]) for line in lines
    ]
    for one, line in zip(seen, lines, strict=True):
        assert one.metrics == {name: value for name, value in [*line.items()][3:] if value is not None}
        assert {type(value) for value in one.metrics.values()} == {float}
    assert "train_loss" not in seen[0].metrics


def test_a_lane_that_it_ends_has_ended(tmp_path):
    """The other lane has the bytes that it has without; statements count the rounds that ran; nothing is resumed."""
    train_toy(tmp_path / "plain", CASES)
    summary = train_toy(tmp_path / "run", CASES, hook=lambda evaluation: at(evaluation, 1, 10))
    plain, lines = run_lines(tmp_path / "plain"), run_lines(tmp_path / "run")
    assert lines == [line for line in plain if line["seed"] == 0 or line["round"] <= 10]
    row, run = summary["cases"]["A"], read_run(tmp_path / "run")
    assert (row["status"], row["rounds_per_seed"]) == (["finished", "stopped_early"], [25, 10])
    assert row["test_accuracy"]["per_seed"] == [line["test_accuracy"] for line in (lines[-1], lines[3])]
    assert EARLY in row["privacy"][0]["assumptions"]
    rows = read_results(tmp_path / "run")
    assert [(each["status"], each["rounds"], each["proven_dp_epsilon"]) for each in rows] == [
        ("finished", 25, 2.5), ("stopped_early", 10, 1.0)
    ]  # fmt: skip
    assert [restore_state(run, "A", CASES["A"], seed)[0] for seed in (0, 1)] == [25, 10]
    before = run_bytes(tmp_path / "run")
    again = train_toy(tmp_path / "run", CASES, resume=True, hook=lambda evaluation: pytest.fail("it has ended"))
    assert lasting(again) == lasting(summary)
    assert run_bytes(tmp_path / "run") == before
    with pytest.raises(ArgumentError, match="has a public seed"):
        publish(run, CASES, tmp_path / "published")


@pytest.mark.parametrize("last", [0, 25])
def test_all_lanes_may_end_at_once_and_the_last_round_is_no_early_end(tmp_path, last):
    summary = train_toy(tmp_path, CASES, hook=lambda evaluation: evaluation.round_index == last)
    assert summary["cases"]["A"]["status"] == ["stopped_early" if last == 0 else "finished"] * 2
    assert {line["round"] for line in run_lines(tmp_path)} == ({0} if last == 0 else {0, 10, 20, 25})


def test_what_it_raises_ends_a_run_that_can_go_on_and_be_ended_elsewhere(tmp_path):
    """A lane that was to end in a process that died runs on where the hook of the next one does not ask for it."""
    train_toy(tmp_path / "plain", CASES)

    def broken(evaluation):
        if at(evaluation, 0, 20):
            raise RuntimeError("the hook's own")
        return at(evaluation, 1, 10)

    with pytest.raises(RuntimeError, match="the hook's own"):
        train_toy(tmp_path / "run", CASES, checkpoint_every=100, hook=broken)
    train_toy(tmp_path / "run", CASES, resume=True)
    assert run_bytes(tmp_path / "run") == run_bytes(tmp_path / "plain")
    run, whole = read_run(tmp_path / "run"), read_run(tmp_path / "plain")
    (_, state), (_, expected) = (restore_state(each, "A", CASES["A"], 1) for each in (run, whole))
    np.testing.assert_array_equal(state.params["kernel"], expected.params["kernel"])


def test_an_early_stop_counts_evaluations_without_improvement_lane_by_lane(tmp_path):
    values = {0: (0.5, 0.6, 0.6, 0.5), 1: (0.5, 0.4, 0.7, 0.8)}
    for metric, sign in (("test_accuracy", 1.0), ("test_loss", -1.0), ("own_error_worst_node", -1.0)):
        hook = early_stop(metric, patience=2)
        query = {seed: [] for seed in values}
        for index in range(4):
            for seed, of_seed in values.items():
                query[seed].append(hook(Evaluation("A", seed, 10 * index, {metric: sign * of_seed[index]})))
        assert query == {0: [False, False, False, True], 1: [False] * 4}
    with pytest.raises(ArgumentError, match="metric: must be measured; the run measures"):
        train_toy(tmp_path, CASES, hook=early_stop("accuracy", patience=1))


def events(folder):
    """Events of all files of a folder, oldest first: records of a length, its checksum, the event, its checksum."""
    from tensorboardX.proto import event_pb2  # which loads torch where that is installed: half a gigabyte

    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield event_pb2.Event.FromString(content[12 : 12 + length])  # pyright: ignore
            content = content[16 + length :]


def test_tensorboard_reads_what_was_measured_and_hides_what_is_repeated(tmp_path):
    """A resumed process repeats the evaluations behind its checkpoint: their first values are purged."""

    def killed(evaluation):
        if evaluation.round_index == 20 and evaluation.seed == 1:
            raise KeyboardInterrupt

    for resume, hooks in ((False, [killed]), (True, [])):
        with contextlib.suppress(KeyboardInterrupt):
            with tracker("tensorboard", SimpleNamespace(path=tmp_path)) as hook:  # pyright: ignore
                train_toy(tmp_path, CASES, resume=resume, checkpoint_every=1, hook=all_of([hook, *hooks]))
    lines = run_lines(tmp_path)
    for seed in (0, 1):
        shown = {}
        for event in events(tmp_path / "tensorboard" / f"a-seed-{seed}"):
            if event.HasField("session_log"):  # a process begins: what it repeats is hidden
                shown = {step: value for step, value in shown.items() if step < event.step}
            shown.update((event.step, v.simple_value) for v in event.summary.value if v.tag == "test_accuracy")
        own = [line for line in lines if line["seed"] == seed]
        assert shown == {line["round"]: np.float32(line["test_accuracy"]) for line in own}


class Session:
    """Runs of Weights & Biases as its reference documents them: `init`, `define_metric`, `log`, and a context."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.calls.append("finish")

    def init(self, *, project, group, dir, config):
        self.calls.append((project, group, config))
        return self

    def define_metric(self, name, step_metric=None):
        self.calls.append((name, step_metric))

    def log(self, data):
        self.calls.append(data)


def test_weights_and_biases_get_one_run_with_all_lanes(tmp_path, monkeypatch):
    session = Session()
    monkeypatch.setitem(sys.modules, "wandb", session)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    run = SimpleNamespace(path=tmp_path / "mine", config={"experiment": "toy", "config": {"step_size": 0.2}})
    with tracker("wandb", run) as hook:  # pyright: ignore
        assert session.calls == []  # a process that computes nothing opens nothing
        hook(Evaluation("A", 0, 10, {"test_loss": 0.5}))
        hook(Evaluation("A", 1, 10, {"test_loss": 0.25}))
    assert session.calls == [
        ("jaxfl-toy", "mine", {"step_size": 0.2}),
        ("round", None),
        ("*", "round"),
        {"round": 10, "A, seed 0/test_loss": 0.5},
        {"round": 10, "A, seed 1/test_loss": 0.25},
        "finish",
    ]
    with pytest.raises(ArgumentError, match=r"track: needs tensorboardX; it is not installed. Run pip install"):
        next(iter([tracker("tensorboard", run).__enter__()]))  # pyright: ignore
    assert TRACKERS.keys() == {"tensorboard", "wandb"}


def test_a_trace_of_the_rounds_between_two_evaluations(tmp_path):
    with profile(tmp_path / "trace") as hook:
        train_toy(tmp_path / "run", CASES, hook=all_of([hook]))
        (actual,) = tmp_path.glob("trace/plugins/profile/*/*.xplane.pb")  # it ended with the second evaluation
    assert actual.stat().st_size > 1000
