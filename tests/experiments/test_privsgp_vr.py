"""The experiment end to end through its command line: what a run leaves, refusals beside a run, resuming, diverging."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from experiments import privsgp_vr
from experiments.privsgp.config import DEFAULTS, Config, plan, resolve
from experiments.privsgp.spending import privacy_of, release_of, rounds_allowed, settle
from jaxfl import graphs
from jaxfl.analysis.plots import privacy_notes
from jaxfl.privacy.accounting import Release, epsilon, statements
from jaxfl.privacy.published import CIFAR10_CONSTANTS
from jaxfl.privacy.statements import statement_text
from jaxfl.training.records import RunDirectory

OPTIONS = "--nodes 4 --hidden 4 --iterations 6 --checkpoint-every 1 --seeds 0 1 --quiet".split()
SET = ["--set", "evaluate_every=2", "--set", "noise_std=0.05", "--set", "batch_size=2"]
METHODS = ("PrivSGP-VR", "PrivSGP")


def command(out, *more):
    return [*OPTIONS, *SET, "--out", str(out), *more]


def content(folder):
    """Bytes of every file below a run directory."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def text_of(part):
    """What is printed: of a table its caption."""
    return str(getattr(part, "caption", part))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(privsgp_vr.Console, "print", lambda self, *parts, **_: printed.extend(map(text_of, parts)))
        assert privsgp_vr.main(command(folder)) == 0
    return folder, "\n".join(printed)


def all_statements(summary):
    return [statement for row in summary["variants"].values() for statement in row["privacy"]]


class TestFinishedRun:
    def test_config_holds_every_option_that_decides_results(self, finished):
        written = json.loads((finished[0] / "config.json").read_text())
        fields = {field.name for field in dataclasses.fields(privsgp_vr.Config)}
        assert set(written["config"]) == (fields - {"data_dir", "out", "quiet", "resume"}) | {"variants"}
        assert written["config"]["variants"]["PrivSGP"]["noise_std"] == 0.05
        assert written["config"]["batch_size"] == [2]
        assert written["config"]["evaluate_every"] == 2
        assert written["config"]["noise_std"] == [0.05]
        assert all(written["config"][name] is not None for name in DEFAULTS["digits"])
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

    def test_every_epsilon_has_its_bound_relation_and_delta(self, finished):
        """In summary.json, in the closing table and in the caption of the picture: those of the rounds that ran."""
        summary = json.loads((finished[0] / "summary.json").read_text())
        required = {"bound", "dp_epsilon", "dp_delta", "neighboring_relation", "accountant", "nodes", "assumptions"}
        table = " ".join(finished[1].split())
        for method, row in summary["variants"].items():
            estimator = "saga" if method == "PrivSGP-VR" else "mini_batch"
            release = Release(estimator, "poisson", 2, 359, clip_norm=2.0, noise_std=0.05)
            proven = [s.dp_epsilon for s in statements(method, [release], 6, dp_delta=1e-5) if s.bound == "proven"]
            assert [s["dp_epsilon"] for s in row["privacy"] if s["bound"] == "proven"] == proven
            for statement in row["privacy"]:
                assert set(statement) == required | {"reason"}
                assert statement["nodes"] == 4
                assert (statement["dp_epsilon"] is None) == (statement["reason"] is not None)
                assert f"{method}: {statement_text(statement)}" in table
        notes = privacy_notes(finished[0])
        assert len(notes) == len({(s["bound"], s["neighboring_relation"]) for s in all_statements(summary)})
        assert all("δ = 1e-05" in note and "ε" in note for note in notes)

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


@pytest.mark.slow
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
    arguments += ["--graph", str(graph), "--step-size", "1e30", "--clip-norm", "None", "--noise-std", "0"]
    arguments += ["--batch-size", "1", "--out", str(folder)]
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


class TestBudget:
    """A run with --target-epsilon never spends more, stops when it is spent, says so, and counts on when resumed."""

    OPTIONS = "--nodes 4 --hidden 4 --seeds 0 --methods PrivSGP --batch-size 20 --checkpoint-every 1 --quiet".split()

    @pytest.mark.slow
    def test_stops_when_the_budget_is_spent(self, tmp_path, monkeypatch, capsys):
        options = "--noise-std 0.5 --target-epsilon 0.5 --iterations 400 --evaluate-every 10".split()
        command = [*self.OPTIONS, *options, "--out", str(tmp_path / "whole")]
        assert privsgp_vr.main(command) == 0
        summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
        assert summary["status"] == "budget_spent"
        rounds = summary["variants"]["PrivSGP"]["rounds"]
        printed = " ".join(capsys.readouterr().out.split())
        assert f"PrivSGP: the privacy budget was spent after {rounds} rounds" in printed
        spent = next(s["dp_epsilon"] for s in summary["variants"]["PrivSGP"]["privacy"] if s["bound"] == "proven")
        release = Release("mini_batch", "poisson", 20, 359, clip_norm=2.0, noise_std=0.5)
        assert 0 < rounds < 400
        assert spent <= 0.5 < epsilon("PrivSGP", "proven", release, rounds + 1, dp_delta=1e-5)

        append = RunDirectory.append_metrics

        def interrupted(self, line):
            if line["round"] == 10:
                raise KeyboardInterrupt
            append(self, line)

        monkeypatch.setattr(RunDirectory, "append_metrics", interrupted)
        resumed = [*self.OPTIONS, *options, "--out", str(tmp_path / "resumed")]
        assert privsgp_vr.main(resumed) == 130
        monkeypatch.setattr(RunDirectory, "append_metrics", append)
        assert privsgp_vr.main([*resumed, "--resume"]) == 0
        again = json.loads((tmp_path / "resumed" / "summary.json").read_text())
        assert again["variants"] == summary["variants"]
        assert again["status"] == "budget_spent"

    def test_noise_is_calibrated_to_the_budget(self):
        config = resolve(Config(nodes=(4,), methods=("PrivSGP-VR", "PrivSGP"), target_epsilon=(2.0,), iterations=(50,)))
        own = settle(config, plan(config), {4: [359, 360]}, lambda nodes: CIFAR10_CONSTANTS)
        for variant in own.values():
            release = release_of(config, variant, 359)
            assert 1.98 < epsilon(variant.method, "proven", release, 50, dp_delta=1e-5) <= 2.0
        noise = {method: variant.noise_std or 0.0 for method, variant in own.items()}
        assert 0 < noise["PrivSGP"] < noise["PrivSGP-VR"]
        shared = dataclasses.replace(config, shared_noise=True)
        found = settle(shared, plan(shared), {4: [359, 360]}, lambda nodes: CIFAR10_CONSTANTS)
        assert {variant.noise_std for variant in found.values()} == {own["PrivSGP-VR"].noise_std}

    def test_automatic_iterations_follow_equation_12(self):
        config = resolve(
            Config(
                iterations="auto",
                methods=("PrivSGP-VR",),
                bound=("published",),
                target_epsilon=(3.0, 1.5),
                step_size="theory",
            )
        )
        variants = settle(config, plan(config), {16: [3125]}, lambda nodes: CIFAR10_CONSTANTS)
        assert [variant.iterations for variant in variants.values()] == [3120, 780]
        assert [variant.step_size for variant in variants.values()] == [(16 / 3120) ** 0.5, (16 / 780) ** 0.5]

    def test_a_table_of_batches_is_accounted_by_its_entries(self):
        """Each sample adds its share of the entry: clip norm times entries over samples."""
        config = resolve(Config(nodes=(4,), table="per_batch", entry_size=10, batch_size=(2,), noise_std=(0.1,)))
        vr, plain = (release_of(config, variant, 355) for variant in plan(config).values())
        assert (vr.estimator, vr.batch_size, vr.num_entries, vr.entry_size) == ("saga", 2, 36, 10)
        assert vr.clip_norm == pytest.approx(2.0 * 36 / 355)
        assert (plain.estimator, plain.batch_size, plain.num_entries, plain.clip_norm) == ("mini_batch", 20, 355, 2.0)

    @pytest.mark.parametrize("options", [{}, {"table": "per_batch", "entry_size": 41}])
    def test_no_node_of_any_seed_spends_more_than_its_budget(self, options):
        """Uneven nodes, three seeds, every method; with a table of batches the smallest node is not the worst one."""
        sizes = [287, 288, 328, 329, 400] * 3
        methods = ("PrivSGP-VR", "A(DP)2SGD") if options else ("PrivSGP-VR", "PrivSGP", "DP2-SGD", "A(DP)2SGD")
        settings = {"nodes": (5,), "batch_size": (2,), "iterations": (20,), "graph": "ring", "methods": methods}
        config = resolve(Config(**settings, **options, target_epsilon=(2.0,)))
        for variant in settle(config, plan(config), {5: sizes}, lambda nodes: CIFAR10_CONSTANTS).values():
            main = next(s for s in privacy_of(config, variant, sizes)(20) if s["bound"] == "proven")
            assert 1.9 < main["dp_epsilon"] <= 2.0
            assert main["nodes"] == 5
        rich = resolve(Config(**settings, **options, target_epsilon=(2.0,), noise_std=(1.5,)))
        variants = plan(rich)
        for name, rounds in rounds_allowed(rich, variants, {5: sizes}).items():
            main = next(s for s in privacy_of(rich, variants[name], sizes)(rounds) if s["bound"] == "proven")
            assert main["dp_epsilon"] <= 2.0

    def test_an_assumed_bound_enters_the_published_epsilon_only(self):
        config = resolve(Config(nodes=(4,), clip_norm=None, gradient_bound=10.0, noise_std=(0.5,), batch_size=(4,)))
        found = privacy_of(config, plan(config)["PrivSGP-VR"], [359] * 4)(50)
        assert found[0]["bound"] == "published"
        assert found[0]["dp_epsilon"] > 0
        assert any("assumed, not enforced" in text for text in found[0]["assumptions"])
        assert all(s["dp_epsilon"] is None and "not clipped" in s["reason"] for s in found[1:])


def test_paired_options_go_together():
    config = resolve(Config(nodes=(4, 8), iterations=(20, 10), pair=("nodes", "iterations"), methods=("PrivSGP",)))
    found = {name: (variant.nodes, variant.iterations) for name, variant in plan(config).items()}
    assert found == {"PrivSGP, 4 nodes, K = 20": (4, 20), "PrivSGP, 8 nodes, K = 10": (8, 10)}
    crossed = resolve(Config(nodes=(4, 8), iterations=(20, 10), methods=("PrivSGP",)))
    assert len(plan(crossed)) == 4


@pytest.mark.slow
def test_all_four_methods_run_together(tmp_path):
    options = "--graph ring --nodes 5 --hidden 4 --iterations 4 --evaluate-every 4 --seeds 0 --noise-std 0.1 --quiet"
    methods = ["--methods", "PrivSGP-VR", "PrivSGP", "DP2-SGD", "A(DP)2SGD"]
    assert privsgp_vr.main([*options.split(), *methods, "--batch-size", "4", "--out", str(tmp_path / "run")]) == 0
    variants = json.loads((tmp_path / "run" / "summary.json").read_text())["variants"]
    assert list(variants) == methods[1:]
    proven = {name: next(s for s in row["privacy"] if s["bound"] == "proven") for name, row in variants.items()}
    assert proven["PrivSGP"]["dp_epsilon"] == proven["DP2-SGD"]["dp_epsilon"] < proven["A(DP)2SGD"]["dp_epsilon"]
