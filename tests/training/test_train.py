"""The training loop on a small problem: lines, summary, compiles, stops."""

import json

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from processes import interrupted
from run_files import run_bytes
from toy_problem import (
    NUM_NODES,
    TASK,
    TOY_LEDGER,
    lasting,
    toy_algorithm,
    toy_case,
    toy_data,
    toy_that_counts,
    toy_training_data,
    train_toy,
)

from jaxfl import core
from jaxfl.core import ArgumentError, tree
from jaxfl.privacy.statements import SIMULATED
from jaxfl.training import Diverged, FatalCount, Measure, load_params, read_run

STATEMENT = {"bound": "proven", "dp_epsilon": None, "reason": "no noise"}


def stated(rounds):
    """Rounds -> the statement with them."""
    return [{**STATEMENT, "rounds": rounds}]


def marked(rounds):
    """The same as the summary has it: of a run whose seed is public."""
    return [{**stated(rounds)[0], "assumptions": [SIMULATED]}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(directory, summary, cases) of two cases that cannot share a program, and two seeds."""
    out = tmp_path_factory.mktemp("run")
    chex.clear_trace_counter()

    def counted(algorithm):
        # Each is traced for the shapes of its info, and to compile; a second seed must add nothing.
        update = chex.assert_max_traces(algorithm.update, n=4)
        return core.algorithm(algorithm.init, algorithm.draw, update, algorithm.node_params)

    algorithms = {"Slow": counted(toy_algorithm(TASK, step_size=0.05)), "Fast": counted(toy_algorithm(TASK))}
    cases = {name: toy_case(algorithm, chunk_rounds=4) for name, algorithm in algorithms.items()}
    cases["Slow"] = cases["Slow"]._replace(privacy=stated)
    return out, train_toy(out, cases, compiled=True), cases


def test_a_line_is_written_at_round_zero_every_evaluation_and_the_last_round(run):
    out, *_ = run
    lines = read_run(out).read_metrics()
    expected = [(v, s, r) for v in ("Slow", "Fast") for r in (0, 10, 20, 25) for s in (0, 1)]
    assert [(line["case"], line["seed"], line["round"]) for line in lines] == expected
    assert len({tuple(line) for line in lines}) == 1  # the same names in the same order in every line
    assert list(lines[0])[:5] == ["case", "seed", "round", "train_loss", "test_accuracy"]
    assert lines[0]["train_loss"] is None
    assert lines[2]["gradient_evaluations"] == 10 * NUM_NODES
    assert lines[6]["gradient_evaluations"] == 5 * NUM_NODES
    assert lines[6]["total_gradient_evaluations"] == 25 * NUM_NODES
    assert lines[6]["bits_sent"] == 480.0
    assert lines[6]["total_bits_sent"] == 480.0 * 25 * NUM_NODES
    assert lines[15]["test_loss"] < lines[9]["test_loss"]
    assert lines[6]["train_loss"] != lines[7]["train_loss"]  # seeds differ


def test_the_summary_has_the_form_of_the_design(run):
    out, summary, _ = run
    assert read_run(out).read_summary() == summary
    assert json.loads(json.dumps(summary)) == summary
    keys = ("experiment", "preset", "status", "seeds", "cases", "seconds", "environment")
    assert tuple(summary) == keys
    assert (summary["experiment"], summary["status"], summary["seeds"]) == ("toy", "finished", [0, 1])
    assert list(summary["cases"]) == ["Slow", "Fast"]
    slow = summary["cases"]["Slow"]
    assert (slow["rounds"], slow["rounds_per_seed"], slow["privacy"]) == (25, [25, 25], marked(25))
    assert slow["status"] == ["finished", "finished"]
    assert "reason" not in slow
    assert summary["cases"]["Fast"]["privacy"] == []
    last = {line["seed"]: line for line in read_run(out).read_metrics() if line["case"] == "Slow"}
    for name in ("test_accuracy", "train_loss", "test_loss_worst_node", "consensus_distance"):
        values = [last[0][name], last[1][name]]
        assert slow[name]["per_seed"] == values
        np.testing.assert_allclose(slow[name]["mean"], np.mean(values))
        np.testing.assert_allclose(slow[name]["std"], np.std(values, ddof=1))
    assert slow["batch_overflow"] == {"mean": 0.0, "std": 0.0, "per_seed": [0, 0]}
    assert slow["costs"]["gradient_evaluations"]["per_seed"] == [100, 100]
    assert slow["costs"]["bits_sent"]["mean"] == 480.0 * 100
    seconds = summary["seconds"]
    assert set(seconds) == {"compile", "run", "per_round", "rounds_a_call", "command"}
    np.testing.assert_allclose(seconds["per_round"], seconds["run"] / 100)
    assert seconds["compile"] > 10 * seconds["per_round"] > 0


def test_lines_have_the_consensus_distance_of_the_nodes_they_measure(run):
    """It is no number of a round: a loop that never reads it never computes it."""
    out, *_ = run
    lines = {(line["case"], line["seed"], line["round"]): line for line in read_run(out).read_metrics()}
    for label in (("Slow", 0), ("Fast", 1)):
        params = load_params(out, *label)
        rows = np.concatenate([np.asarray(leaf, np.float64).reshape(NUM_NODES, -1) for leaf in params.values()], axis=1)
        expected = ((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean()
        np.testing.assert_allclose(lines[(*label, 25)]["consensus_distance"], expected, rtol=1e-5)
        assert lines[(*label, 0)]["consensus_distance"] == 0.0


def test_rounds_are_compiled_once_per_program(run):
    records = read_run(run[0]).ended()
    seconds = {lane: record["seconds"]["compile"] for lane, record in records.items()}
    for name in ("Slow", "Fast"):
        assert seconds[name, 0] > 0
        assert seconds[name, 1] == 0
    np.testing.assert_allclose(run[1]["seconds"]["compile"], sum(seconds.values()))


def test_what_has_ended_is_skipped_on_resume(run):
    out, summary, cases = run
    files = {name: (out / name).read_bytes() for name in ("passes/0/metrics.jsonl", "results.csv", "config.json")}
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=0)
    def untraced(*arguments):
        raise AssertionError("no round is traced")

    for name, case in cases.items():
        algorithm = case.algorithm({})
        broken = core.algorithm(algorithm.init, algorithm.draw, untraced, algorithm.node_params)
        cases = {**cases, name: case._replace(algorithm=lambda numbers, broken=broken: broken)}
    assert lasting(train_toy(out, cases, resume=True)) == lasting(summary)
    assert {name: (out / name).read_bytes() for name in files} == files


def test_data_may_depend_on_the_seed_in_values_and_shapes(tmp_path):
    query = []

    def data(seed):
        query.append(seed)
        return toy_data(seed, num_samples=40 if seed == 0 else 60)[0]

    summary = train_toy(tmp_path, {"A": toy_case(data=data, num_rounds=10)})
    assert query == [0, 1, 0, 1]  # for their digests, and to be uploaded
    assert summary["cases"]["A"]["rounds_per_seed"] == [10, 10]
    assert [len(one.lanes) for one in read_run(tmp_path).passes] == [1, 1]


def test_a_bad_loss_stops_a_single_run_at_the_end_of_the_chunk(tmp_path):
    """The statement counts what the run released until then."""
    bad = toy_case(toy_algorithm(TASK, bad_round=16), chunk_rounds=5, num_rounds=40, seeds=(0,), privacy=stated)
    with pytest.raises(Diverged) as caught:
        train_toy(tmp_path, {"Bad": bad})
    error = caught.value
    assert (error.case, error.seed, error.metric, error.node) == ("Bad", 0, "loss", 2)
    assert (error.first_round, error.rounds) == (17, (16, 20))
    run = read_run(tmp_path)
    assert [line["round"] for line in run.read_metrics()] == [0, 10]
    summary = run.read_summary()
    assert summary["status"] == "diverged"
    row = summary["cases"]["Bad"]
    assert (row["rounds_per_seed"], row["status"], row["reason"]) == ([10], ["diverged"], [str(error)])
    assert row["test_accuracy"] == {"mean": None, "std": None, "per_seed": [None]}
    assert row["privacy"] == marked(20)
    before = run_bytes(tmp_path)
    with pytest.raises(Diverged, match="round 17"):
        train_toy(tmp_path, {"Bad": bad}, resume=True)
    assert run_bytes(tmp_path) == before


def test_a_bad_test_metric_stops_the_run(tmp_path):
    def node_params(state):
        bad = (state.round_index >= 20) & (np.arange(NUM_NODES) == 3)
        kernel = state.params["kernel"]
        return {**state.params, "kernel": kernel + tree.along_nodes(jnp.where(bad, jnp.float32(np.nan), 0.0), kernel)}

    spoiled = toy_algorithm(TASK)._replace(node_params=node_params)
    with pytest.raises(Diverged) as caught:
        train_toy(tmp_path, {"A": toy_case(spoiled, seeds=(0,))})
    error = caught.value
    assert (error.metric, error.node, error.first_round, error.rounds) == ("test_loss", 3, 20, (11, 20))
    assert [line["round"] for line in read_run(tmp_path).read_metrics()] == [0, 10]


def test_a_batch_overflow_stops_the_run(tmp_path):
    private = toy_case(toy_algorithm(TASK, overflow_round=12), seeds=(0,), privacy=stated)
    with pytest.raises(FatalCount, match=r"batch_overflow: .* got 3 in rounds 11 to 20 of Private, seed 0, .* node 1"):
        train_toy(tmp_path, {"Private": private})
    summary = read_run(tmp_path).read_summary()
    assert summary["status"] == "stopped"
    assert summary["cases"]["Private"]["privacy"] == marked(20)


def test_no_case_runs_more_rounds_than_max_rounds(tmp_path):
    """Nor does one that is interrupted and resumed: it counts on from its checkpoint."""
    dear = toy_case(max_rounds=13, privacy=stated)
    cases = {"Cheap": toy_case(max_rounds=25), "Dear": dear, "Alone": dear._replace(seeds=(0,))}
    summary = train_toy(tmp_path / "whole", cases)
    assert summary["status"] == "budget_spent"
    assert [summary["cases"][name]["rounds_per_seed"] for name in cases] == [[25, 25], [13, 13], [13]]
    assert summary["cases"]["Cheap"]["status"] == ["finished"] * 2
    assert summary["cases"]["Dear"]["reason"] == ["the privacy budget pays for 13 rounds"] * 2
    assert summary["cases"]["Dear"]["privacy"] == marked(13)
    lines = run_bytes(tmp_path / "whole")
    assert b'"total_gradient_evaluations": %d' % (13 * NUM_NODES) in lines.splitlines()[-1]

    with interrupted(7), pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path / "resumed", cases)
    resumed = train_toy(tmp_path / "resumed", cases, resume=True)
    assert run_bytes(tmp_path / "resumed") == lines
    assert resumed["cases"] == summary["cases"]


def test_rounds_seeds_and_data_may_differ_by_case(tmp_path):
    cases = {
        "A": toy_case(num_rounds=5, evaluate_every=5, seeds=(0,)),
        "B": toy_case(num_rounds=12, seeds=(3,), data=lambda seed: toy_data(seed, num_samples=60)[0]),
    }
    summary = train_toy(tmp_path, cases)
    assert [summary["cases"][name]["rounds"] for name in cases] == [5, 12]
    assert summary["seeds"] == [0, 3]
    assert [(line["case"], line["round"]) for line in read_run(tmp_path).read_metrics()] == [
        *[("A", k) for k in (0, 5)],
        *[("B", k) for k in (0, 10, 12)],
    ]


def test_a_measure_of_ones_own_is_in_every_line_and_in_the_table(tmp_path):
    """It knows parameters and its arrays, and no algorithm."""

    def compute(node_params, largest):
        return {"kernel_norm": jnp.sqrt(jnp.sum(node_params["kernel"] ** 2)), "largest_input": largest}

    own = Measure(compute, lambda key, data: jnp.abs(data.inputs).max())
    summary = train_toy(tmp_path, {"A": toy_case(measures={"size": own}, num_rounds=10)})
    lines = read_run(tmp_path).read_metrics()
    largest = np.abs(np.asarray(toy_training_data(0).inputs)).max()
    assert [line["largest_input"] for line in lines] == [float(largest)] * 4
    assert lines[-1]["kernel_norm"] > lines[0]["kernel_norm"] > 0
    assert list(lines[0]).index("kernel_norm") == list(lines[0]).index("test_loss_average_model") + 1
    assert summary["cases"]["A"]["kernel_norm"]["per_seed"] == [line["kernel_norm"] for line in lines[2:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_rounds": 0}, "^max_rounds: "),
        ({"num_rounds": 0}, "^num_rounds: "),
        ({"num_rounds": 2**31}, r"^num_rounds: must be below 2\^31"),
        ({"evaluate_every": 0}, "^evaluate_every: "),
        ({"chunk_rounds": 0}, "^chunk_rounds: "),
        ({"seeds": ()}, "^seeds: must be distinct"),
        ({"seeds": (1, 1)}, r"^seeds: must be distinct and at least one; got \[1, 1\]"),
        ({"seeds": (-1,)}, "^seeds: "),
        ({"seeds": (2**32,)}, r"^seeds: must lie in \[0, 2\^32\)"),
        ({"budgets": {"watts": 3}}, "^budgets: must be one of"),
        ({"budgets": {"joules": 3}}, "^budgets: must name what the algorithm counts; joules is none of"),
        (
            {"ledger": TOY_LEDGER},
            "^ledger: needs all counts .*; bits_received and forward_evaluations are none of loss",
        ),
        (
            {"algorithm": toy_that_counts, "ledger": TOY_LEDGER._replace(transmit_watts=np.ones(3))},
            "^ledger: must be for the 4 nodes that the info counts; got one for 3",
        ),
        ({"budgets": {"bits_sent": 0}}, r"^budgets\.bits_sent: must be positive"),
        ({"budgets": {"bits_received": 1}}, "^budgets: must name what the algorithm counts; bits_received is none of"),
        ({"released": ("watts",)}, "^released: must be one of"),
        ({"released": ("local_iterations",)}, "^released: must name what the algorithm counts; local_iterations is"),
        ({"numbers": {"step_size": np.inf}}, r"^numbers\.step_size: must be a finite number; A has inf"),
        ({"numbers": {"step_size": True}}, r"^numbers\.step_size: "),
        ({"numbers": {"step_size": "0.1"}}, r"^numbers\.step_size: "),
        ({"numbers": {"noise": (0.1, np.nan)}}, r"^numbers\.noise: must be a finite number; A has \(0.1, nan\)"),
        ({"measures": {"mine": len}}, r"^measures\.mine: must be a Measure"),
    ],
)
def test_unusable_cases_are_named(tmp_path, change, message):
    with pytest.raises(ArgumentError, match=message):
        train_toy(tmp_path, {"A": toy_case(**change)})
    assert not (tmp_path / "passes").exists()


@pytest.mark.parametrize("cases", [{"A": 3}, {3: toy_case()}, [toy_case()], toy_case()])
def test_what_does_not_map_names_to_cases_is_refused(tmp_path, cases):
    with pytest.raises(ArgumentError, match=r"^cases: must map names to cases; got "):
        train_toy(tmp_path, cases)


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        ((), {}, "^cases: must hold at least one"),
        (("A b", "a-B"), {}, "^cases: .* got 'a-B' beside 'A b'"),
        (("-",), {}, "^cases: "),
        (("A",), {"checkpoint_every": 0}, "^checkpoint_every: "),
        (("A",), {"keep_checkpoints": 0}, "^keep_checkpoints: "),
        *((("A",), {"checkpoint_minutes": bad}, "^checkpoint_minutes: ") for bad in (-1.0, np.nan, np.inf)),
    ],
)
def test_unusable_arguments_are_named(tmp_path, names, settings, message):
    with pytest.raises(ArgumentError, match=message):
        train_toy(tmp_path, dict.fromkeys(names, toy_case()), **settings)
    assert not (tmp_path / "passes").exists()
