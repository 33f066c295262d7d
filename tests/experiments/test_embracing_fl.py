"""The experiment end to end through its command line, and its parts: cases, capacities, sizes, presets, tables."""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import embracing_fl as experiment
from experiments.partial import build, config, costs, networks, paper, pictures, plan, presets, results, tables
from experiments.partial.config import CLASSES, Config, resolve
from experiments.partial.networks import Problem
from jaxfl.channel import cost
from jaxfl.core import ArgumentError
from jaxfl.data import from_arrays, load
from jaxfl.models import classification, layer_sizes, sequential
from jaxfl.models.layers import batch_norm, dense
from jaxfl.training.records import RunDirectory

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


def test_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    stopped, append = [], RunDirectory.append_metrics

    def stop_at(self, line):
        append(self, line)
        if not stopped and (line["variant"], line["seed"], line["round"]) == (VARIANTS[1], 1, 2):
            stopped.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "append_metrics", stop_at)
    folder = tmp_path / "run"
    assert run([*OPTIONS, "--out", str(folder)])[0] == 130
    assert run([*OPTIONS, "--out", str(folder), "--resume"])[0] == 0
    assert (folder / "metrics.jsonl").read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()
    for name, row in summary_of(finished[0])["variants"].items():
        assert summary_of(folder)["variants"][name] == row


def test_collected_runs_stand_beside_the_papers_numbers(finished, tmp_path):
    code, printed = run(["--collect", str(finished[0]), "--out", str(tmp_path / "found")])
    assert code == 0
    text = (tmp_path / "found" / "tables.md").read_text()
    assert text in printed
    row = next(line for line in text.splitlines() if line.startswith("| case 9 | 2 | 4 | 10 | 0.27 |"))
    accuracies = [
        100 * value for value in summary_of(finished[0])["variants"]["case 9 embracing"]["test_accuracy"]["per_seed"]
    ]
    assert f"{np.mean(accuracies):.1f} ± {np.std(accuracies, ddof=1):.1f} (" in row
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"tables.md", "curves.png", "gaps.png"}


def made_result(method, case, accuracies, *, batch_norm="global", counts=None, target=None):
    """A result with these accuracies, one a seed, after 10 rounds."""
    lines = [
        {"seed": seed, "round": k, "test_accuracy": value * k / 10}
        for seed, value in enumerate(accuracies)
        for k in (0, 5, 10)
    ]
    counts = tuple(count // 4 for count in paper.CASES[case]) if counts is None else counts
    return results.Result(method, method, case, counts, batch_norm, target, 0.5, "cifar10", 32, 10, tuple(lines))


class TestTables:
    def test_methods_side_by_side_with_the_gap_of_each_seed(self):
        text = tables.markdown(
            [
                made_result("embracing", 7, [0.5, 0.7]),
                made_result("width_reduction", 7, [0.4, 0.5], batch_norm="static"),
            ]
        )
        row = next(line for line in text.splitlines() if line.startswith("| case 7 "))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:5] == ["4", "0", "28", "0.50 (0.27)"]
        assert cells[5:] == [
            "60.0 ± 14.1 (60.0)",
            "77.0 ± 1.6",
            "45.0 ± 7.1 (45.0)",
            "54.5 ± 2.9",
            "+15.0 ± 7.1",
            "+22.4",
        ]

    def test_batch_normalization(self):
        found = [
            made_result("embracing", 7, [value], batch_norm=mode) for mode, value in (("static", 0.3), ("global", 0.6))
        ]
        assert "| case 7 | EmbracingFL | static | 30.0 (30.0) | 74.5 ± 1.1 |" in tables.markdown(found)

    def test_added_clients(self):
        found = [made_result("embracing", None, [0.3], counts=(4, 0, weak)) for weak in (0, 16)]
        text = tables.markdown(found)
        assert "| 4 | 16 |  | 63.7 ± 3.3 | 30.0 (30.0) | 74.8 ± 0.8 |  |" in text
        assert "Cases" not in text

    def test_rounds_to_a_target(self):
        text = tables.markdown([made_result("embracing", 7, [0.5, 0.9], target=0.45)])
        assert "| case 7 | 45 % | 10, 5 | 54 %: 939 and 572 |" in text

    def test_gaps_and_added_clients_are_drawn(self, tmp_path):
        pairs = [
            made_result(method, case, [0.5, 0.6 + 0.01 * case], batch_norm=mode)
            for case in (1, 2, 7)
            for method, mode in (("embracing", "global"), ("width_reduction", "static"))
        ]
        assert pictures.plot_gaps(pairs, tmp_path / "gaps.png").stat().st_size > 5000
        assert pictures.plot_gaps(pairs[::2], tmp_path / "none.png") is None
        assert pictures.plot_added(pairs, tmp_path / "none.png") is None
        added = [made_result("embracing", None, [0.3], counts=(4, 0, weak)) for weak in (0, 16)]
        assert pictures.plot_added(added, tmp_path / "added.png").stat().st_size > 5000


class TestCases:
    @pytest.mark.parametrize("case", paper.CASES)
    def test_clients_of_table_3(self, case):
        settings = plan.settings(resolve(Config(dataset="cifar10", cases=(case,))))
        assert settings == [plan.Setting(case, paper.CASES[case])]
        assert sum(paper.CASES[case]) == 128
        reduced = plan.settings(resolve(Config(cases=(case,), nodes=32)))[0].counts
        assert tuple(4 * count for count in reduced) == paper.CASES[case]

    @pytest.mark.parametrize(("dataset", "table"), paper.TABLES_BY_DATASET.items())
    def test_average_capacities_are_the_papers(self, dataset, table):
        found, problem = costs._paper_setting(
            {"cifar10": "resnet20", "femnist": "femnist_cnn", "imdb": "bilstm"}[dataset]
        )
        of_class = costs.class_costs(found, "embracing", problem)
        if dataset == "imdb":  # half of the words: a weak client's LSTM here runs back through all of them
            of_class[2] = of_class[2]._replace(capacity=costs._paper_sizes("bilstm")[2][2])
        for case, counts in paper.CASES.items():
            average = costs.average_capacity(of_class, counts)
            assert abs(average - table.capacity[case]) <= 0.005 + 1e-9, (case, average)

    def test_counts_in_place_of_cases(self):
        config = resolve(Config(strong=(4,), weak=(0, 28), nodes=32))
        assert [setting.counts for setting in plan.settings(config)] == [(4, 0, 0), (4, 0, 28)]
        assert list(plan.plan(config)) == [
            "4 strong embracing",
            "4 strong width_reduction",
            "4 strong fed_avg",
            "4 strong 28 weak embracing",
            "4 strong 28 weak width_reduction",
        ]

    def test_stratified_counts_add_up_by_largest_remainders(self):
        config = resolve(Config(cases=(9,), sampling="stratified", num_active=5))
        assert plan.plan(config)["case 9 embracing"].num_active == (1, 1, 3)  # of 0.625, 1.25 and 3.125

    def test_options_win_over_those_of_a_preset_that_they_replace(self):
        small = Config(**presets.PRESETS["table2_small"].options)
        asked = resolve(dataclasses.replace(small, cases=(7,), num_active=3), small)
        assert (asked.cases, asked.strong, asked.weak, asked.participation_rate) == ((7,), None, None, None)


class TestCosts:
    @pytest.mark.parametrize("name", paper.SIZES)
    def test_sizes_of_tables_1_and_10(self, name):
        for here, there in zip(costs._paper_sizes(name), paper.SIZES[name], strict=True):
            assert here[:2] == there[:2]
            assert abs(here[2] - there[2]) <= 0.005

    @pytest.mark.parametrize("width", [1.0, 0.45])
    @pytest.mark.parametrize(
        ("model", "shape"),
        [("resnet20", (32, 32, 3)), ("resnet8", (16, 16, 3)), ("femnist_cnn", (28, 28, 1)), ("mlp", (8, 8, 1))],
    )
    def test_descriptions_agree_with_the_models(self, model, shape, width):
        options, problem = resolve(Config(model=model)), Problem(shape, 10)
        counted = cost.count(networks.architecture(options, problem, width))
        sizes = layer_sizes(networks.make_network(options, problem, width=width), shape)
        assert counted.parameters == sum(size.params for size in sizes.values())
        assert counted.activations == sum(size.activations for size in sizes.values())
        assert set(sizes) <= {name for name, _ in networks.architecture(options, problem).layers}

    def test_a_client_that_trains_the_input_side_keeps_what_is_behind_it(self):
        options = resolve(Config(method=("first_half", "random_blocks"), hidden=(6, 5)))
        problem = Problem((8, 8, 1), 10)
        half, drawn = (costs.class_costs(options, method, problem) for method in options.method)
        whole = 485 + 21
        assert [entry.capacity for entry in half] == pytest.approx([1.0, (390 + 35 + 21) / whole, (390 + 21) / whole])
        assert [entry.params for entry in drawn] == [485, round(485 * 2 / 3), round(485 / 3)]

    def test_tables_of_sizes_and_timing_train_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "160")
        code, printed = run(["--preset", "sizes"])
        assert code == 0
        assert "272,762 | 272,762" in printed
        assert "655,360 | 655,360" in printed
        code, printed = run(["--preset", "table8"])
        assert code == 0
        assert "419,643.8 | 419,643.8" in printed
        assert list(tmp_path.iterdir()) == []


class TestPresets:
    @pytest.mark.parametrize("name", presets.PRESETS)
    def test_every_preset_resolves_to_variants(self, name):
        options = Config(**presets.PRESETS[name].options)
        assert plan.plan(resolve(options, options))

    def test_tables_of_the_paper_have_presets(self):
        assert {*(f"table{number}" for number in range(2, 10)), "sizes", "fig4"} <= set(presets.PRESETS)

    def test_table_3_is_the_papers_setting(self):
        found = resolve(Config(**presets.PRESETS["table3"].options))
        assert (found.model, found.nodes, found.participation_rate, found.alpha) == ("resnet20", 128, 0.25, 0.1)
        assert (found.rounds, found.step_size, found.decay_rounds) == (1000, 0.4, (800, 900))
        assert (found.local_steps, found.batch_size, found.momentum, found.weight_decay) == (10, 32, 0.9, 1e-4)
        assert len(plan.plan(found)) == 10

    def test_tables_4_and_5_are_the_papers_settings(self):
        found = resolve(Config(**presets.PRESETS["table4"].options))
        assert (found.rounds, found.step_size, found.decay_rounds, found.writers_per_node) == (200, 0.04, (), 2)
        found = resolve(Config(**presets.PRESETS["table5"].options))
        assert (found.rounds, found.step_size, found.decay_rounds) == (400, 0.1, (200, 300))

    def test_batch_normalization_is_static_for_narrow_clients_alone(self):
        modes = {
            name: v.batch_norm for name, v in plan.plan(resolve(Config(**presets.PRESETS["table2"].options))).items()
        }
        assert all(mode == ("static" if "width" in name else "global") for name, mode in modes.items())


def test_all_seeds_run_the_same_programs():
    """Index tables of different partitions are padded to one length; sizes stay their own."""
    options = resolve(Config())
    dataset, variants = load("digits"), plan.plan(options)
    sources = build.data_sources(dataset, build.make_parts(options, dataset), variants)
    first, second = (sources["case 9 embracing"](seed) for seed in (0, 1))
    assert first.indices.shape == second.indices.shape
    assert first.sizes.tolist() != second.sizes.tolist()
    alone = sources["2 strong fed_avg"](0)
    assert alone.sizes.tolist() == first.sizes[:2].tolist()
    assert sources["case 9 embracing"] is sources["case 9 width_reduction"]


def test_the_step_size_falls_after_its_rounds(monkeypatch):
    taken = {}
    monkeypatch.setattr(build, "fed_avg", lambda task, **options: taken.update(options))
    options = resolve(Config(method=("fed_avg",), rounds=10, decay_rounds=(4, 8), step_size=0.5))
    build.make_algorithm(options, plan.plan(options)["2 strong fed_avg"], Problem((8, 8, 1), 10))
    found = [float(taken["step_size"](jnp.int32(k))) for k in (0, 3, 4, 7, 8, 9)]
    np.testing.assert_allclose(found, [0.5, 0.5, 0.05, 0.05, 0.005, 0.005], rtol=1e-6)


@pytest.mark.parametrize("model", ["resnet8", "femnist_cnn", "bilstm", "mlp"])
@pytest.mark.parametrize("method", ["embracing", "first_half", "random_blocks", "width_reduction", "ordered_dropout"])
def test_every_method_builds_with_every_model(method, model):
    """Traced, not compiled: a round keeps the state's structure, and one task evaluates all methods of a run."""
    options = resolve(
        Config(model=model, method=(method, "width_reduction") if method != "width_reduction" else (method,))
    )
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


def test_static_statistics_are_those_of_training_samples():
    task = classification(sequential([("norm", batch_norm(2, tracked=False)), ("dense", dense(2, 2))]))
    rng = np.random.default_rng(0)
    inputs = rng.normal(3.0, 2.0, (8, 2)).astype(np.float32)
    dataset = from_arrays(inputs, np.arange(8) % 2, inputs[:1], [0], num_classes=2)
    options = resolve(Config(method=("fed_avg",), strong=(2,), nodes=2))
    data = build.data_sources(dataset, {0: [np.arange(5), np.arange(5, 8)]}, plan.plan(options))["2 strong fed_avg"](0)
    algorithm = build.fed_avg(task, num_active=1, num_local_steps=1, batch_size=2, step_size=0.1)
    state = algorithm.init(jax.random.key(0), data)
    found = build.with_measured_statistics(algorithm, task, data, 8, 8).node_params(state)
    np.testing.assert_allclose(found.model_state["norm"]["mean"], [inputs.mean(axis=0)], rtol=1e-5)
    np.testing.assert_allclose(found.model_state["norm"]["var"], [inputs.var(axis=0)], rtol=1e-5)


# Arguments, the option that must be named, and what the sentence must say (found and remedy).
BAD = [
    ("--rounds 0", "--rounds", r"got 0\. Pass 1 or more"),
    ("--local-steps 0", "--local-steps", r"got 0\. Pass 1 or more"),
    ("--batch-size 0", "--batch-size", r"got 0\. Pass 1 or more"),
    ("--step-size 0", "--step-size", r"got 0\.0\. Pass a number above 0"),
    ("--momentum -1", "--momentum", r"got -1\.0\. Pass 0 or"),
    ("--participation-rate 1.5", "--participation-rate", r"got 1\.5\. Pass a share"),
    ("--width-weak 0.01", "--width-weak", r"got 0\.01 of 32\. Pass more"),
    ("--width-weak 0.9", "--width-weak", r"got 0\.9 beside 0\.45\. Exchange"),
    ("--target-accuracy 80", "--target-accuracy", r"got 80\.0\. Pass a share"),
    ("--cases 7 --target-accuracy 0.5 0.6", "--target-accuracy", r"got 2 for 1\. Pass as many"),
    ("--cases 11", "--cases", r"got 11"),
    ("--cases 7 7", "--cases", r"got \[7, 7\]\. List each once"),
    ("--cases 7 --strong 2", "--cases", r"got --strong beside them\. Leave one"),
    ("--cases 7 --nodes 12", "--nodes", r"case 7's 16/128, 0/128, 112/128; got 12\. Pass 16"),
    ("--strong 2 3 --weak 1 2 3", "--strong", r"got 2, 3\. Pass as many"),
    ("--strong 20", "--nodes", r"got 16 for 20 \+ 0 \+ 0 clients\. Pass more"),
    ("--weak 4", "--method", r"4 weak has none\. Leave fed_avg out"),
    ("--num-active 3", "--num-active", r"got 3, and 2 strong fed_avg has 2\. Pass fewer"),
    ("--num-active 3 --participation-rate 0.5", "--participation-rate", r"beside --num-active 3\. Leave one"),
    ("--nodes 2000 --strong 1", "--nodes", r"1,437 samples.* Take fewer nodes"),
    ("--seeds -1", "--seeds", r"got -1\. Pass e\.g\. 0 1 2"),
    ("--decay-rounds 200", "--decay-rounds", r"below the 150 rounds; got \[200\]\. Leave it out"),
    ("--cut-weak block_9", "--cut-weak", r"dense_1.*got 'block_9'"),
    ("--method sgd", "--method", r"got 'sgd'\. Write for example --method embracing"),
    ("--sampling all", "--sampling", r"uniform or stratified; got 'all'"),
    ("--partition shards", "--partition", r"got 'shards'\. Choose one"),
    ("--partition writers", "--partition", r"digits has none\. Choose dirichlet or iid"),
    ("--partition iid --alpha 1", "--alpha", r"belongs to dirichlet; got 1\.0 without it\. Leave it out"),
    ("--model bilstm", "--model", r"got bilstm for digits\. Choose another"),
    ("--resnet-widths 4 8 16", "--resnet-widths", r"belongs to resnet20, resnet8; got 4 8 16 without it"),
    ("--channels 4", "--channels", r"belongs to femnist_cnn; got 4 without it"),
    ("--batch-norm static", "--batch-norm", r"belongs to resnet20, resnet8; got static without it"),
    ("--model resnet8 --batch-norm static --frozen-batch-norm running", "--frozen-batch-norm", r"Pass batch"),
    ("--model resnet8 --method first_half --batch-norm static", "--batch-norm", r"Pass global"),
    ("--model resnet8 --method embracing --calibration-samples 9", "--calibration-samples", r"got 9 without it"),
    ("--method fed_avg --cut-weak dense_3", "--cut-weak", r"belongs to embracing, first_half, .*Leave it out"),
    ("--method embracing --without-scaler", "--without-scaler", r"got True without it\. Leave it out"),
    ("--model femnist_cnn --hidden 4 4", "--hidden", r"got 2\. Pass 2048"),
    ("--node-loop all", "--node-loop", r"got 'all'\. Choose one"),
    ("--dataset cifar10", "--data-dir", r"got None"),
    ("--collect nowhere", "--collect", r"nowhere has none\. Name a run directory"),
    ("--resume", "--resume", r"there is no runs/embracing_fl/digits\. Name the run by --out"),
]


@pytest.mark.parametrize(("arguments", "option", "says"), BAD, ids=[row[0] for row in BAD])
def test_refused_in_one_sentence(arguments, option, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert experiment.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option}: ")
    assert re.search(says, error), error
    assert re.fullmatch(r"error: [^:]+: .+; .+[.?] .+\.\n", error), error
    assert list(tmp_path.iterdir()) == []  # no run directory is left behind


def test_runs_of_different_data_are_not_collected(monkeypatch):
    with pytest.raises(ArgumentError, match=r"collect: must hold evaluated runs; got none"):
        results.read_results([])


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
