"""The training loop on a small problem: lines, summary, compiles, stops."""

import json

import numpy as np
import pytest
from toy_problem import NUM_NODES, toy_algorithm, toy_data, toy_task, train_toy

from jaxfl import core
from jaxfl.core import ArgumentError, tree
from jaxfl.training import Diverged, FatalCount, RunDirectory, read_run


def stated(statement):
    """Rounds -> the statement with them."""
    return lambda rounds: [{**statement, "rounds": rounds}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(directory, summary, how often each variant's round was traced) of two variants and two seeds."""
    out = tmp_path_factory.mktemp("run")
    traces = []

    def counted(algorithm, name):
        def update(state, data, draws):
            traces.append(name)
            return algorithm.update(state, data, draws)

        return core.algorithm(algorithm.init, algorithm.draw, update, algorithm.node_params)

    task = toy_task()
    variants = {"Slow": counted(toy_algorithm(task, step_size=0.05), "Slow"), "Fast": counted(toy_algorithm(task), "F")}
    statement = {"bound": "proven", "dp_epsilon": None, "reason": "no noise"}
    summary = train_toy(out, variants=variants, privacy={"Slow": stated(statement)}, chunk_rounds=4)
    return out, summary, traces, variants, statement


def test_a_line_is_written_at_round_zero_every_evaluation_and_the_last_round(run):
    out, *_ = run
    lines = read_run(out).read_metrics()
    expected = [(v, s, r) for v in ("Slow", "Fast") for s in (0, 1) for r in (0, 10, 20, 25)]
    assert [(line["variant"], line["seed"], line["round"]) for line in lines] == expected
    assert len({tuple(line) for line in lines}) == 1  # the same names in the same order in every line
    assert list(lines[0])[:5] == ["variant", "seed", "round", "train_loss", "test_accuracy"]
    assert lines[0]["train_loss"] is None
    assert lines[1]["gradient_evaluations"] == 10 * NUM_NODES
    assert lines[3]["gradient_evaluations"] == 5 * NUM_NODES
    assert lines[3]["total_gradient_evaluations"] == 25 * NUM_NODES
    assert lines[3]["bits_sent"] == 480.0
    assert lines[3]["total_bits_sent"] == 480.0 * 25 * NUM_NODES
    assert lines[15]["test_loss"] < lines[12]["test_loss"]


def test_lines_hold_no_times_and_a_second_run_writes_the_same_bytes(run, tmp_path):
    out, _, _, variants, _ = run
    train_toy(tmp_path, variants={"Slow": variants["Slow"]}, chunk_rounds=4)
    again = (tmp_path / "metrics.jsonl").read_bytes()
    assert again.count(b"\n") == 8
    assert (out / "metrics.jsonl").read_bytes().startswith(again)


def test_seeds_differ(run):
    out, *_ = run
    lines = read_run(out).read_metrics()
    assert lines[3]["train_loss"] != lines[7]["train_loss"]


def test_the_summary_has_the_form_of_the_design(run):
    out, summary, _, _, statement = run
    assert read_run(out).read_summary() == summary
    assert json.loads(json.dumps(summary)) == summary
    keys = ("experiment", "preset", "status", "seeds", "variants", "seconds", "environment")
    assert tuple(summary) == keys
    assert (summary["experiment"], summary["status"], summary["seeds"]) == ("toy", "finished", [0, 1])
    assert list(summary["variants"]) == ["Slow", "Fast"]
    slow = summary["variants"]["Slow"]
    assert (slow["rounds"], slow["rounds_per_seed"], slow["privacy"]) == (
        25,
        [25, 25],
        [{**statement, "rounds": 25}],
    )
    assert summary["variants"]["Fast"]["privacy"] == []
    last = {line["seed"]: line for line in read_run(out).read_metrics() if line["variant"] == "Slow"}
    for name in ("test_accuracy", "train_loss", "test_loss_worst_node", "consensus_distance"):
        values = [last[0][name], last[1][name]]
        assert slow[name]["per_seed"] == values
        np.testing.assert_allclose(slow[name]["mean"], np.mean(values))
        np.testing.assert_allclose(slow[name]["std"], np.std(values, ddof=1))
    assert slow["batch_overflow"] == {"mean": 0.0, "std": 0.0, "per_seed": [0, 0]}
    assert slow["costs"]["gradient_evaluations"]["per_seed"] == [100, 100]
    assert slow["costs"]["bits_sent"]["mean"] == 480.0 * 100
    seconds = summary["seconds"]
    assert set(seconds) == {"compile", "run", "per_round"}
    np.testing.assert_allclose(seconds["per_round"], seconds["run"] / 100)
    assert seconds["compile"] > 10 * seconds["per_round"] > 0


def test_rounds_are_compiled_once_per_variant(run):
    *_, traces, variants, _ = run
    # Traced to compile, and for the shapes of the info; a second seed must add no trace of the compiled kind.
    out, summary = run[:2]
    records = [read_run(out).finished("Slow", seed) or {} for seed in (0, 1)]
    assert records[0]["seconds"]["compile"] > 0
    assert records[1]["seconds"]["compile"] == 0
    assert traces.count("Slow") <= 2 + 3
    assert set(variants) == set(summary["variants"])


def test_finished_variants_and_seeds_are_skipped_on_resume(run, tmp_path):
    out, summary, traces, variants, statement = run
    before, lines = len(traces), (out / "metrics.jsonl").read_bytes()
    again = train_toy(out, resume=True, variants=variants, privacy={"Slow": stated(statement)}, chunk_rounds=4)
    assert len(traces) == before
    assert again == summary
    assert (out / "metrics.jsonl").read_bytes() == lines


def test_data_may_depend_on_the_seed_in_values_and_shapes(tmp_path):
    asked = []

    def data(seed):
        asked.append(seed)
        return toy_data(seed, num_samples=40 if seed == 0 else 60)[0]

    variants = {"A": toy_algorithm(toy_task())}
    summary = train_toy(tmp_path, variants=variants, data=data, num_rounds=10)
    assert asked == [0, 1]
    assert summary["variants"]["A"]["rounds_per_seed"] == [10, 10]


def test_a_bad_loss_stops_the_run_at_the_end_of_the_chunk(tmp_path):
    variants = {"Bad": toy_algorithm(toy_task(), bad_round=16)}
    settings = {"variants": variants, "chunk_rounds": 5, "num_rounds": 40}
    with pytest.raises(Diverged) as caught:
        train_toy(tmp_path, **settings)
    error = caught.value
    assert (error.variant, error.seed, error.metric, error.node) == ("Bad", 0, "loss", 2)
    assert (error.first_round, error.rounds) == (17, (16, 20))
    run = read_run(tmp_path)
    assert [line["round"] for line in run.read_metrics()] == [0, 10]
    summary = run.read_summary()
    assert summary["status"] == "diverged"
    assert summary["variants"]["Bad"]["rounds_per_seed"] == [10, 0]
    assert summary["variants"]["Bad"]["test_accuracy"] == {"mean": None, "std": None, "per_seed": [None, None]}
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(Diverged, match="round 17"):
        train_toy(tmp_path, resume=True, **settings)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_bad_test_metric_stops_the_run(tmp_path):
    task = toy_task()
    algorithm = toy_algorithm(task)

    def node_params(state):
        kernel = state.params["kernel"]
        bad = (state.round_index >= 20) & (np.arange(NUM_NODES) == 3)
        return {**state.params, "kernel": kernel * np.float32(1) + tree.along_nodes(_nan_where(bad), kernel)}

    broken = algorithm._replace(node_params=node_params)
    with pytest.raises(Diverged) as caught:
        train_toy(tmp_path, variants={"A": broken})
    error = caught.value
    assert (error.metric, error.node, error.first_round, error.rounds) == ("test_loss", 3, 20, (11, 20))
    assert [line["round"] for line in read_run(tmp_path).read_metrics()] == [0, 10]


def _nan_where(bad):
    import jax.numpy as jnp

    return jnp.where(bad, jnp.float32(np.nan), jnp.float32(0))


def test_a_batch_overflow_stops_the_run(tmp_path):
    variants = {"Private": toy_algorithm(toy_task(), overflow_round=12)}
    with pytest.raises(FatalCount, match=r"batch_overflow: .* got 3 in rounds 11 to 20 of Private, seed 0, .* node 1"):
        train_toy(tmp_path, variants=variants, privacy={"Private": lambda rounds: [{"rounds": rounds}]})
    summary = read_run(tmp_path).read_summary()
    assert summary["status"] == "stopped"
    assert summary["variants"]["Private"]["privacy"] == [{"rounds": 20}]


def test_a_spent_budget_ends_a_part_at_its_next_evaluation(tmp_path):
    variants = {"A": toy_algorithm(toy_task())}
    settings = {"variants": variants, "num_rounds": 60, "budgets": {"gradient_evaluations": 20 * NUM_NODES}}
    summary = train_toy(tmp_path, **settings)
    assert summary["status"] == "budget_spent"
    assert summary["variants"]["A"]["rounds_per_seed"] == [20, 20]
    assert summary["variants"]["A"]["costs"]["gradient_evaluations"]["per_seed"] == [80, 80]
    assert train_toy(tmp_path, resume=True, **settings) == summary


@pytest.mark.slow
def test_no_variant_runs_more_rounds_than_its_privacy_budget_allows(tmp_path, monkeypatch):
    """Nor does one that is interrupted and resumed: it counts on from its checkpoint."""

    def spent(rounds):
        return [{"bound": "proven", "dp_epsilon": 0.1 * rounds}]

    task = toy_task()
    variants = {"Cheap": toy_algorithm(task), "Dear": toy_algorithm(task)}
    settings = {"variants": variants, "privacy_rounds": {"Cheap": 25, "Dear": 13}, "num_rounds": 25}
    settings["privacy"] = {"Cheap": spent, "Dear": spent}
    summary = train_toy(tmp_path / "whole", **settings)
    assert summary["status"] == "budget_spent"
    assert summary["variants"]["Cheap"]["rounds_per_seed"] == [25, 25]
    assert summary["variants"]["Dear"]["rounds_per_seed"] == [13, 13]
    assert summary["variants"]["Dear"]["privacy"] == spent(13)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert b'"total_gradient_evaluations": %d' % (13 * NUM_NODES) in lines.splitlines()[-1]

    append = RunDirectory.append_metrics

    def interrupted(self, line):
        if (line["variant"], line["seed"], line["round"]) == ("Dear", 0, 13):
            raise KeyboardInterrupt
        append(self, line)

    monkeypatch.setattr(RunDirectory, "append_metrics", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path / "resumed", **settings)
    monkeypatch.setattr(RunDirectory, "append_metrics", append)
    resumed = train_toy(tmp_path / "resumed", resume=True, **settings)
    assert (tmp_path / "resumed" / "metrics.jsonl").read_bytes() == lines
    assert resumed["variants"] == summary["variants"]
    assert resumed["status"] == "budget_spent"


def test_rounds_and_data_may_differ_by_variant(tmp_path):
    task = toy_task()
    variants = {"A": toy_algorithm(task), "B": toy_algorithm(task)}
    small = toy_data(0, num_samples=40)[0]
    summary = train_toy(
        tmp_path,
        variants=variants,
        num_rounds={"A": 5, "B": 12},
        evaluate_every={"A": 5, "B": 10},
        data={"A": lambda seed: small, "B": lambda seed: toy_data(seed, num_samples=60)[0]},
        seeds=(0,),
    )
    assert [summary["variants"][name]["rounds"] for name in variants] == [5, 12]
    assert [(line["variant"], line["round"]) for line in read_run(tmp_path).read_metrics()] == [
        *[("A", k) for k in (0, 5)],
        *[("B", k) for k in (0, 10, 12)],
    ]


def test_what_a_diverging_run_released_is_counted(tmp_path):
    """To the end of the chunk, beyond its last line."""
    variants = {"Bad": toy_algorithm(toy_task(), bad_round=16)}
    privacy = {"Bad": lambda rounds: [{"rounds": rounds}]}
    with pytest.raises(Diverged):
        train_toy(tmp_path, variants=variants, chunk_rounds=5, num_rounds=40, privacy=privacy)
    summary = read_run(tmp_path).read_summary()["variants"]["Bad"]
    assert summary["rounds"] == 10
    assert summary["privacy"] == [{"rounds": 20}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rounds": {"Slow": 3}}, "^num_rounds: must be one for all variants, or name each of them; got Slow for"),
        ({"privacy_rounds": {"Slow": 0}}, "^privacy_rounds: "),
        ({"privacy_rounds": {"Other": 1}}, "^privacy_rounds: must be one of Slow, Fast"),
        ({"num_rounds": 0}, "^num_rounds: "),
        ({"evaluate_every": 0}, "^evaluate_every: "),
        ({"checkpoint_every": 0}, "^checkpoint_every: "),
        ({"chunk_rounds": 0}, "^chunk_rounds: "),
        ({"keep_checkpoints": 0}, "^keep_checkpoints: "),
        ({"test_batch_size": 0}, "^test_batch_size: "),
        ({"seeds": ()}, "^seeds: must be distinct"),
        ({"seeds": (1, 1)}, r"^seeds: must be distinct and at least one; got \[1, 1\]"),
        ({"seeds": (-1,)}, "^seeds: "),
        ({"variants": {}}, "^variants: must hold at least one"),
        ({"variants": {"A b": None, "a-B": None}}, "^variants: .* got 'a-B' beside 'A b'"),
        ({"variants": {"-": None}}, "^variants: "),
        ({"budgets": {"joules": 3}}, "^budgets: must be one of"),
        ({"budgets": {"bits_sent": 0}}, r"^budgets\.bits_sent: must be positive"),
        ({"privacy": {"Other": []}}, "^privacy: must be one of Slow, Fast"),
    ],
)
def test_unusable_arguments_are_named(tmp_path, change, message):
    with pytest.raises(ArgumentError, match=message):
        train_toy(tmp_path, **change)
    assert not (tmp_path / "metrics.jsonl").exists()
