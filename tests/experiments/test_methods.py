"""experiments.methods: every method trains on unequal data, and its table says what the lines say."""

import numpy as np
import pytest
from run_files import run_lines

from experiments.methods import EXPERIMENT
from experiments.methods.options import COMPARED, GRAPH, METHODS, SERVER
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
@pytest.mark.parametrize("kind", ["server", "graph"])
def test_every_method_trains(tmp_path, kind):
    names = SERVER if kind == "server" else GRAPH
    length = ["--rounds", "60", "--evaluate-every", "60", "--step-size", "0.1"]
    assert main(EXPERIMENT, ["--method", *names, *length, *SMALL, "--out", str(tmp_path / "run")]) == 0
    lines = {(line["case"], line["round"]): line for line in run_lines(tmp_path / "run")}
    for name in names:
        assert lines[name, 60]["test_loss_average_model"] < lines[name, 0]["test_loss_average_model"], name
    assert {*SERVER, *GRAPH} == {*METHODS} == {*COMPARED, "q-FedAvg"}


def test_a_robust_rule_outlives_an_attack_that_the_mean_does_not(tmp_path):
    attack = ["--attack", "random", "--attackers", "1", "--partition", "iid", "--step-size", "0.3"]
    options = ["--method", "FedAvg", "--aggregate", "mean", "median", "--rounds", "20", "--evaluate-every", "20"]
    assert main(EXPERIMENT, [*options, *attack, *SMALL, "--out", str(tmp_path / "run")]) == 0
    ends = {line["aggregate"]: line["test_accuracy"] for line in read_results(tmp_path / "run" / "methods.csv")}
    assert ends["median"] > ends["mean"] + 0.2
