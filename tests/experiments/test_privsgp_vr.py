"""The experiment end to end through its command line: what a run leaves, refusals beside a run, resuming, diverging."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from experiments import privsgp_vr
from jaxfl import graphs
from jaxfl.training.records import RunDirectory

OPTIONS = "--nodes 4 --hidden 4 --iterations 6 --checkpoint-every 1 --seeds 0 1 --quiet".split()
SET = ["--set", "evaluate_every=2", "--set", "noise_std=0.05", "--set", "batch_size=2"]
METHODS = ("PrivSGP-VR", "PrivSGP")


def command(out, *more):
    return [*OPTIONS, *SET, "--out", str(out), *more]


def content(folder):
    """Bytes of every file below a run directory."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(privsgp_vr.Console, "print", lambda self, *parts, **_: printed.extend(map(str, parts)))
        assert privsgp_vr.main(command(folder)) == 0
    return folder, "\n".join(printed)


class TestFinishedRun:
    def test_config_holds_every_option_that_decides_results(self, finished):
        written = json.loads((finished[0] / "config.json").read_text())
        fields = {field.name for field in dataclasses.fields(privsgp_vr.Config)}
        assert set(written["config"]) == fields - {"data_dir", "out", "quiet", "resume"}
        assert written["config"]["batch_size"] == [2]
        assert written["config"]["evaluate_every"] == 2
        assert written["config"]["noise_std"] == [0.05]
        assert all(written["config"][name] is not None for name in privsgp_vr.DEFAULTS["digits"])
        assert (written["experiment"], written["preset"]) == ("privsgp_vr", None)
        assert {"jax", "platform", "device_kind", "git_revision"} <= set(written["environment"])

    def test_a_line_per_evaluation(self, finished):
        lines = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
        places = [(line["variant"], line["seed"], line["round"]) for line in lines]
        assert places == [(method, seed, k) for method in METHODS for seed in (0, 1) for k in (0, 2, 4, 6)]
        assert all(0 <= line["test_accuracy_worst_node"] <= line["test_accuracy"] <= 1 for line in lines)

    def test_summary_has_the_documented_fields(self, finished):
        summary = json.loads((finished[0] / "summary.json").read_text())
        names = {"experiment", "preset", "status", "seeds", "variants", "seconds", "environment"}
        assert set(summary) == names
        assert (summary["experiment"], summary["status"], summary["seeds"]) == ("privsgp_vr", "finished", [0, 1])
        assert tuple(summary["variants"]) == METHODS
        assert set(summary["seconds"]) == {"compile", "run", "per_round"}
        lines = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
        for method, row in summary["variants"].items():
            assert row["rounds"] == 6
            last = [line for line in lines if line["variant"] == method and line["round"] == 6]
            for metric in ("test_accuracy", "train_loss"):
                assert row[metric]["per_seed"] == [line[metric] for line in last]
                np.testing.assert_allclose(row[metric]["mean"], np.mean(row[metric]["per_seed"]), rtol=1e-12)
                np.testing.assert_allclose(row[metric]["std"], np.std(row[metric]["per_seed"], ddof=1), rtol=1e-9)
            assert set(row["costs"]) == {"bits_sent", "gradient_evaluations"}
            # Draws of every batch: 2 expected a node and round, whatever the sampler realized is a whole number.
            assert all(value > 0 and value == int(value) for value in row["costs"]["gradient_evaluations"]["per_seed"])

    def test_no_epsilon_is_claimed(self, finished):
        summary = json.loads((finished[0] / "summary.json").read_text())
        required = {"bound", "dp_epsilon", "dp_delta", "neighboring_relation", "accountant", "nodes", "assumptions"}
        for row in summary["variants"].values():
            (statement,) = row["privacy"]
            assert set(statement) == required | {"reason"}
            assert statement["dp_epsilon"] is None
            assert "noise_std" in statement["reason"]
        assert "No epsilon is claimed" in finished[1]

    def test_pictures(self, finished):
        for name in ("training.png", "partition.png"):
            data = (finished[0] / "plots" / name).read_bytes()
            assert data.startswith(b"\x89PNG")
            assert len(data) > 5000

    def test_says_what_ran_and_where_it_is(self, finished):
        folder, printed = finished
        for text in (
            "1437 samples over 4 nodes (iid)",
            "64-4-10",
            "310 parameters",
            "factored gradient table",
            str(folder),
        ):
            assert text in printed


class TestBesideAFinishedRun:
    def refused(self, folder, arguments, capsys):
        """The error line; nothing of the run has changed."""
        before = content(folder)
        assert privsgp_vr.main(arguments) == 2
        error = capsys.readouterr().err
        assert content(folder) == before
        assert error.count("\n") == 1
        return error

    def test_not_overwritten(self, finished, capsys):
        error = self.refused(finished[0], command(finished[0]), capsys)
        assert error.startswith(f"error: --out: must not hold a run yet; {finished[0]} holds one. Resume it (--resume)")

    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("--refresh-every", "500", "has 1000, this call has 500. Pass 1000, or start a new run"),
            ("--graph", "ring", 'has "exponential", this call has "ring". Pass "exponential"'),
            ("--storage", "bfloat16", 'has "float32", this call has "bfloat16". Pass "float32"'),
        ],
    )
    def test_not_resumed_with_another_config(self, option, value, says, finished, capsys):
        error = self.refused(finished[0], command(finished[0], option, value, "--resume"), capsys)
        assert error.startswith(f"error: {option}: must be as in the run that is resumed; {finished[0]} {says}")

    @pytest.mark.parametrize("bad", [["--clip-norm", "-1"], ["--table", "nothing"], ["--checkpoint-every", "0"]])
    def test_bad_options_change_nothing(self, bad, finished, capsys):
        options = [] if bad[0] == "--checkpoint-every" else ["--checkpoint-every", "1"]
        arguments = ["--nodes", "4", *options, *bad, "--resume", "--out", str(finished[0])]
        assert self.refused(finished[0], arguments, capsys).startswith(f"error: {bad[0]}: ")

    def test_resuming_a_finished_run_repeats_its_summary(self, finished, tmp_path):
        shutil.copytree(finished[0], tmp_path / "run")
        assert privsgp_vr.main(command(tmp_path / "run", "--resume")) == 0
        for name in ("metrics.jsonl", "summary.json"):
            assert (tmp_path / "run" / name).read_bytes() == (finished[0] / name).read_bytes()


def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch, capsys):
    append = RunDirectory.append_metrics

    def interrupted(self, line):
        if (line["variant"], line["seed"], line["round"]) == ("PrivSGP-VR", 1, 4):
            raise KeyboardInterrupt
        append(self, line)

    monkeypatch.setattr(RunDirectory, "append_metrics", interrupted)
    folder = tmp_path / "run"
    assert privsgp_vr.main(command(folder)) == 130
    assert capsys.readouterr().err == ("interrupted: the same command with --resume goes on from the last checkpoint\n")
    whole = (finished[0] / "metrics.jsonl").read_bytes()
    part = (folder / "metrics.jsonl").read_bytes()
    assert part.count(b"\n") == 6
    assert whole.startswith(part)
    assert not (folder / "summary.json").exists()

    monkeypatch.setattr(RunDirectory, "append_metrics", append)
    assert privsgp_vr.main(command(folder, "--resume")) == 0
    assert (folder / "metrics.jsonl").read_bytes() == whole
    resumed, uninterrupted = (json.loads((path / "summary.json").read_text()) for path in (folder, finished[0]))
    for summary in (resumed, uninterrupted):
        del summary["seconds"]
    assert resumed == uninterrupted
    for path in (folder, finished[0]):
        assert (path / "plots" / "training.png").exists()


def test_diverging_run_stops_with_metric_rounds_and_node(tmp_path, capsys):
    graph = tmp_path / "graph.npy"
    np.save(graph, graphs.complete(4).mixing_matrix(0))  # a graph of the user's own, here one that runs
    folder = tmp_path / "run"
    arguments = "--nodes 4 --hidden 4 --iterations 6 --evaluate-every 3 --seeds 0 --methods PrivSGP --quiet".split()
    arguments += ["--graph", str(graph), "--step-size", "1e30", "--clip-norm", "None", "--out", str(folder)]
    assert privsgp_vr.main(arguments) == 1
    error = capsys.readouterr().err
    pattern = r"stopped: \w+: must stay finite; got \S+ in round \d \(rounds \d to \d of PrivSGP, seed 0\), which left "
    assert re.match(pattern + r"node \d with parameters that are not\. Use a smaller step size, .*\n$", error), error
    assert error.count("\n") == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "diverged"

    # The file has changed: going on would be another run.
    np.save(graph, graphs.directed_ring(4).mixing_matrix(0))
    assert privsgp_vr.main([*arguments, "--resume"]) == 2
    assert capsys.readouterr().err.startswith("error: graph_crc32: must be as in the run that is resumed; ")
