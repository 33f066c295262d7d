"""The experiment end to end through its command line, every method with a model, what is asked of `train`."""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import shutil

import jax
import numpy as np
import pytest

from experiments import embracing_fl as experiment
from experiments.partial import build, config, costs, networks, plan
from experiments.partial.config import CLASSES, Config, resolve
from jaxfl.data import from_arrays

TINY = "--rounds 4 --evaluate-every 2 --hidden 6 5 --local-steps 2 --batch-size 4 --quiet".split()
OPTIONS = [*TINY, *"--seeds 0 1 --checkpoint-every 1 --target-accuracy 0.05".split()]
VARIANTS = ("case 9 embracing", "case 9 width_reduction", "2 strong fed_avg")


def run(arguments):
    """Exit code and what was printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = experiment.main(arguments)
    return code, printed.getvalue()


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The default run, reduced: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    code, printed = run([*OPTIONS, "--out", str(folder)])
    assert code == 0
    return folder, printed


class TestFinishedRun:
    def test_config_holds_every_option_that_decides_results(self, finished):
        saved = json.loads((finished[0] / "config.json").read_text())["config"]
        fields = {field.name for field in dataclasses.fields(Config)}
        assert set(saved) == (fields - set(experiment.NOT_SAVED)) | {"variants"}
        assert (saved["nodes"], saved["alpha"], saved["partition"], saved["cut_weak"]) == (
            16,
            0.5,
            "dirichlet",
            "dense_3",
        )
        assert saved["variants"]["case 9 embracing"] == {
            "method": "embracing",
            "case": 9,
            "counts": [2, 4, 10],
            "num_active": 4,
            "batch_norm": "global",
            "target_accuracy": 0.05,
        }

    def test_a_line_per_evaluation(self, finished):
        places = [(line["variant"], line["seed"], line["round"]) for line in lines_of(finished[0])]
        assert places == [(name, seed, k) for name in VARIANTS for seed in (0, 1) for k in (0, 2, 4)]

    def test_summary_has_what_clients_cost(self, finished):
        variants = summary_of(finished[0])["variants"]
        assert tuple(variants) == VARIANTS
        strong, whole, last = 64 * 6 + 6 + 6 * 5 + 5 + 5 * 10 + 10, 6 + 5 + 10, 5 * 10 + 10
        row = variants["case 9 embracing"]
        assert row["clients"] == {"strong": 2, "moderate": 4, "weak": 10}
        assert row["trained_params"] == {"strong": strong, "moderate": 95, "weak": last}
        assert row["capacity"]["weak"] == pytest.approx((last + 10) / (strong + whole), rel=1e-12)
        assert row["capacity"]["average"] == pytest.approx((2 * 1.0 + 4 * 0.22 + 10 * 0.14) / 16, rel=1e-12)
        assert set(row["device_seconds_per_round"]["weak"]) == {"forward", "backward", "io", "communication"}
        assert variants["2 strong fed_avg"]["clients"] == {"strong": 2, "moderate": 0, "weak": 0}
        assert list(variants["2 strong fed_avg"]["trained_params"]) == ["strong"]

    def test_summary_has_bits_and_gradient_evaluations(self, finished):
        variants = summary_of(finished[0])["variants"]
        for row in variants.values():
            assert set(row["costs"]) == {"bits_sent", "bits_received", "gradient_evaluations"}
        received = variants["case 9 embracing"]["costs"]["bits_received"]["per_seed"]
        assert received == [4 * 4 * 32 * 485] * 2  # rounds, active clients, the whole model
        assert all(sent < 4 * 4 * 32 * 485 for sent in variants["case 9 embracing"]["costs"]["bits_sent"]["per_seed"])

    def test_rounds_to_the_target_are_the_first_evaluations_that_reach_it(self, finished):
        lines = lines_of(finished[0])
        for name, row in summary_of(finished[0])["variants"].items():
            for seed, found in enumerate(row["rounds_to_target"]["per_seed"]):
                own = [line for line in lines if (line["variant"], line["seed"]) == (name, seed)]
                before = [line for line in own if found is None or line["round"] < found]
                assert all(line["test_accuracy"] < 0.05 for line in before)
                assert found is None or own[len(before)]["test_accuracy"] >= 0.05

    def test_it_says_who_takes_part_and_what_that_costs(self, finished):
        lines = finished[1].splitlines()
        clients = "2 strong (capacity 1.00), 4 moderate (capacity 0.22), 10 weak (capacity 0.14)"
        assert f"case 9 embracing: {clients}, 4 of 16 active a round; average capacity 0.27" in lines
        assert sum(line.startswith("  seconds a round on a OnePlus 9 Pro: strong ") for line in lines) == 3

    def test_pictures(self, finished):
        for name in ("training.png", "cases.png"):
            assert (finished[0] / "plots" / name).stat().st_size > 5000


def test_resumed_equals_uninterrupted(finished, tmp_path):
    """As if it had been killed before its last evaluation was written."""
    folder = shutil.copytree(finished[0], tmp_path / "run")
    last = folder / "checkpoints" / "2-strong-fed-avg" / "seed_1"
    shutil.rmtree(last / "4")
    for gone in (last / "finished.json", folder / "summary.json"):
        gone.unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    assert run([*OPTIONS, "--out", str(folder), "--resume"])[0] == 0
    assert (folder / "metrics.jsonl").read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()
    assert summary_of(folder)["variants"] == summary_of(finished[0])["variants"]


def test_collected_runs_stand_beside_the_papers_numbers(finished, tmp_path):
    code, printed = run(["--collect", str(finished[0]), "--out", str(tmp_path / "found")])
    assert code == 0
    text = (tmp_path / "found" / "tables.md").read_text()
    assert text in printed
    row = next(line for line in text.splitlines() if line.startswith("| case 9 | 2 | 4 | 10 | 4 | 0.27 |"))
    accuracies = [
        100 * value for value in summary_of(finished[0])["variants"]["case 9 embracing"]["test_accuracy"]["per_seed"]
    ]
    assert f"{np.mean(accuracies):.1f} ± {np.std(accuracies, ddof=1):.1f} (" in row
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"tables.md", "curves.png", "gaps.png"}


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("embracing", "resnet8"),
        ("embracing", "bilstm"),
        ("ordered_dropout", "resnet8"),
        ("width_reduction", "femnist_cnn"),
        ("width_reduction", "bilstm"),
        ("random_blocks", "bilstm"),
        ("ordered_dropout", "mlp"),
        ("first_half", "mlp"),
    ],
)
def test_methods_build_with_models(method, model):
    """Traced, not compiled: a round keeps the state's structure, and one task evaluates all methods of a run."""
    methods = (method,) if method == "width_reduction" else (method, "width_reduction")
    options = resolve(Config(model=model, method=methods))
    if model == "resnet8":
        stages = {"resnet_widths": (5, 10), "resnet_blocks": (1, 1), "cut_moderate": "block_2_1", "cut_weak": "dense"}
        options = dataclasses.replace(options, **stages)
    if (method, model) == ("embracing", "bilstm"):
        options = dataclasses.replace(options, frozen_words=5)
    is_text = model == "bilstm"
    shape = (12,) if is_text else (8, 8, 1)
    inputs = np.zeros((64, *shape), np.int32 if is_text else np.float32)
    dataset = from_arrays(inputs, np.arange(64) % 2, inputs[:2], [0, 1])
    problem = networks.problem_of(dataset, model)
    variants = {name: v for name, v in plan.plan(options).items() if v.method == method}
    data = build.data_sources(dataset, {0: [np.arange(4) + 4 * node for node in range(16)]}, variants)
    task = build.evaluated_task(options, problem)
    (name, variant), key = next(iter(variants.items())), jax.eval_shape(lambda: jax.random.key(0))
    algorithm = build.make_algorithm(options, variant, problem)
    before = jax.eval_shape(lambda k: algorithm.init(k, data[name](0)), key)
    after, _ = jax.eval_shape(algorithm.round, key, before, data[name](0))
    assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(lambda leaf: leaf.shape, before)
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), jax.eval_shape(algorithm.node_params, before)
    )
    assert set(jax.eval_shape(task.metrics, one, dataset.test_inputs, dataset.test_labels)) == {"loss", "accuracy"}


def test_weak_clients_of_the_lstm_train_a_task_of_their_own(monkeypatch):
    """Of the same losses, with other gradients of the LSTM; moderate clients train the common one."""
    given = {}
    monkeypatch.setattr(build, "embracing", lambda task, **options: given.update(options, task=task))
    options = resolve(Config(model="bilstm", method=("embracing",)))
    small = {"frozen_words": 5, "embedding_features": 3, "units": 2, "dropout": 0.0}
    options = dataclasses.replace(options, **small)
    (variant,) = plan.plan(options).values()
    build.make_algorithm(options, variant, networks.Problem((12,), 2))
    common, moderate, weak = given["class_tasks"]
    assert common is moderate is given["task"]
    params = common.init(jax.random.key(0))
    words, labels = np.arange(24, dtype=np.int32).reshape(2, 12), np.array([0, 1])
    (loss, slopes), (other_loss, others) = (
        jax.value_and_grad(lambda p, task=task: task.loss(p, words, labels).sum())(params) for task in (common, weak)
    )
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    assert np.abs(slopes["lstm"]["kernel"] - others["lstm"]["kernel"]).max() > 1e-6


class Trained(Exception):
    """Raised where training would begin."""


def test_static_statistics_are_measured_on_training_samples(tmp_path, monkeypatch):
    """For variants without tracked statistics alone."""
    given = {}

    def train(*_, **options):
        given.update(options)
        raise Trained

    monkeypatch.setattr(experiment, "train", train)
    options = "--model resnet8 --resnet-widths 5 6 7 --calibration-samples 70 --batch-norm static global".split()
    with pytest.raises(Trained):
        run([*options, "--method", "embracing", "width_reduction", "--quiet", "--out", str(tmp_path / "run")])
    expected = {
        f"case 9 {method}, {norm}": 70 if norm == "static" else None
        for method in ("embracing", "width_reduction")
        for norm in ("static", "global")
    }
    assert given["calibration_samples"] == expected


def test_every_option_is_read():
    """As an attribute of the configuration, or by a name in a loop over `getattr`."""
    modules = (experiment, build, config, costs, networks, plan)
    nodes = [node for module in modules for node in ast.walk(ast.parse(inspect.getsource(module)))]
    names = ("config", "options")
    reads = {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in names
    }
    reads |= {*CLASSES, "cut_moderate", "cut_weak"}  # by getattr
    assert {field.name for field in dataclasses.fields(Config)} <= reads


def test_help_describes_every_option(capsys):
    assert experiment.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in printed
