"""experiments.methods: every method trains on unequal data, and its table says what the lines say."""

import numpy as np
import pytest
from run_files import run_lines

from experiments.methods import EXPERIMENT
from experiments.methods.choices import COMPARED, GRAPH, METHODS, PERSONAL, SERVER
from jaxfl.frame import main
from jaxfl.training import read_results

SMALL = ["--nodes", "5", "--hidden", "4", "--num-train", "300", "--num-test", "60", "--quiet"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("methods") / "run"
    options = ["--method", "FedAvg", "NEXT", "--step-size", "0.1", "0.3", "--seeds", "0", "1"]
    length = ["--rounds", "20", "--evaluate-every", "2", "--target-accuracy", "0.3"]
    assert main(EXPERIMENT, [*options, *length, *SMALL, "--out", str(out)]) == 0
    return out


def bits_of(line):
    return line["total_bits_sent"] + (line["total_bits_received"] if line["case"].startswith("FedAvg") else 0)


def test_the_table_compares_by_rounds_and_by_bits(run):
    rows, lines = read_results(run / "methods.csv"), run_lines(run)
    assert [row["method"] for row in rows] == ["FedAvg", "NEXT"]
    curves = {}
    for case in {line["case"] for line in lines}:
        own = sorted(
            (line["round"], line["seed"], bits_of(line), line["test_accuracy"])
            for line in lines
            if line["case"] == case and line["round"]
        )
        curves[case] = [(own[i][2], np.mean([own[i][3], own[i + 1][3]])) for i in range(0, len(own), 2)]
    equal = min(curves[row["case"]][-1][0] for row in rows)
    for row in rows:
        ends = {case: curve[-1][1] for case, curve in curves.items() if case.startswith(row["method"])}
        np.testing.assert_allclose(row["test_accuracy"], max(ends.values()))
        curve = curves[row["case"]]
        assert row["equal_bits"] == equal
        assert row["bits"] == curve[-1][0]
        np.testing.assert_allclose(
            row["test_accuracy_at_equal_bits"], [mean for bits, mean in curve if bits <= equal][-1]
        )
        assert row["bits_to_0.3"] == next((bits for bits, mean in curve if mean >= 0.3), None)
    assert rows[1]["bits"] == 2 * rows[0]["bits"]  # a neighbor's x and tracker, both ways of a ring, beside up and down
    assert (run / "plots" / "methods.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["server", "personal", "graph"])
def test_every_method_trains(tmp_path, kind):
    names = {"server": [name for name in SERVER if name not in PERSONAL], "personal": PERSONAL, "graph": GRAPH}[kind]
    length = ["--rounds", "60", "--evaluate-every", "60", "--step-size", "0.1"]
    own = ["--own-test", "0.2"] if kind == "personal" else []
    assert main(EXPERIMENT, ["--method", *names, *length, *own, *SMALL, "--out", str(tmp_path / "run")]) == 0
    lines = {(line["case"], line["round"]): line for line in run_lines(tmp_path / "run")}
    for name in names:
        metric = "own_loss" if kind == "personal" else "test_loss_average_model"
        assert lines[name, 60][metric] < lines[name, 0][metric], name
    assert {*SERVER, *GRAPH} == {*METHODS} == {*COMPARED, *PERSONAL}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["FedAvg", "--feedback", "error_feedback", "ef21", "client_momentum"],
        ["FedAvg", "--feedback", "ef21", "--compressor", "rand_k", "top_k"],
        ["SCAFFOLD", "--num-active", "3", "--selection", "uniform", "by_size", "by_loss"],
        ["SGP", "D-PSGD", "--sleep", "random", "markov", "cyclic"],
        ["D-PSGD", "--graph", "base", "ring"],
    ],
)
def test_options_of_methods_train(tmp_path, options):
    length = ["--rounds", "60", "--evaluate-every", "60", "--step-size", "0.1"]
    assert main(EXPERIMENT, ["--method", *options, *length, *SMALL, "--out", str(tmp_path / "run")]) == 0
    losses = {}
    for line in run_lines(tmp_path / "run"):
        losses.setdefault(line["case"], []).append(line["test_loss_average_model"])
    assert len(losses) >= 2
    assert all(last < first for first, last in losses.values())
    assert len({last for _, last in losses.values()}) == len(losses)  # every option changes the run


def test_models_of_clients_are_judged_by_their_own_test_samples(tmp_path):
    length = ["--rounds", "20", "--evaluate-every", "20", "--own-test", "0.25", "--step-size", "0.1"]
    names = ["FedAvg", "Per-FedAvg", "alone"]
    options = ["--method", *names, "--inner-step-size", "0", "0.5", *length, *SMALL]
    assert main(EXPERIMENT, [*options, "--out", str(tmp_path / "run")]) == 0
    rows = {row["case"]: row for row in read_results(tmp_path / "run" / "methods.csv")}
    lines = {line["case"]: line for line in run_lines(tmp_path / "run") if line["round"]}
    assert all(rows[case]["own_accuracy"] == line["own_accuracy"] for case, line in lines.items())
    plain, adapted = (lines[f"Per-FedAvg, inner step size {step}"] for step in ("0", "0.5"))
    assert plain["own_loss"] == pytest.approx(lines["FedAvg"]["own_loss"], rel=0.05)  # no step: FedAvg, other draws
    assert [row["inner_step_size"] for row in rows.values()] == [None, 0, 0.5, None]
    assert adapted["own_accuracy"] > plain["own_accuracy"]  # a step on few classes
    assert lines["alone"]["own_accuracy"] > lines["alone"]["test_accuracy"]
    assert lines["alone"]["total_bits_sent"] == 0


def test_a_robust_rule_outlives_an_attack_that_the_mean_does_not(tmp_path):
    attack = ["--attack", "random", "--attackers", "1", "--partition", "iid", "--step-size", "0.3"]
    options = ["--method", "FedAvg", "--aggregate", "mean", "median", "--rounds", "20", "--evaluate-every", "20"]
    assert main(EXPERIMENT, [*options, *attack, *SMALL, "--out", str(tmp_path / "run")]) == 0
    ends = {line["aggregate"]: line["test_accuracy"] for line in read_results(tmp_path / "run" / "methods.csv")}
    assert ends["median"] > ends["mean"] + 0.2
