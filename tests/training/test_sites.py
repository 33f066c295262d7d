"""sites.csv: what each node has and gets, and the table that a run shows of it."""

import io

import numpy as np
import pytest
import rich.console
from run_files import run_lines
from toy_problem import NUM_NODES, toy_case, toy_statements, toy_training_data, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import Stop, Stopped, read_results
from jaxfl.training.lockstep import Lockstep
from jaxfl.training.pass_directory import PassDirectory
from jaxfl.training.sites import site_table

NOISE = (0.5, 0.25, 0.5, 1.0)


def cases(**fields):
    """Two cases; in one sites learn by themselves, as far as its name says."""
    together = toy_case(num_rounds=20, numbers={"step_size": 0.2}, privacy=toy_statements, noise_stds=NOISE, **fields)
    return {"A": together, "alone": together._replace(numbers={"step_size": 0.05}, privacy=None, noise_stds=())}


def text_of(table):
    console = rich.console.Console(file=io.StringIO(), width=150)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\xa0", " ")


def test_a_row_a_case_seed_and_node(tmp_path):
    train_toy(tmp_path, cases())
    rows = read_results(tmp_path / "sites.csv")
    places = [(case, seed, str(node)) for case in ("A", "alone") for seed in (0, 1) for node in range(NUM_NODES)]
    assert [(row["case"], row["seed"], row["site"]) for row in rows] == places
    accuracy = {(row["case"], row["seed"], row["site"]): row["test_accuracy"] for row in rows}
    last = {(line["case"], line["seed"]): line for line in run_lines(tmp_path)}
    for case, seed in last:
        own = [accuracy[case, seed, str(node)] for node in range(NUM_NODES)]
        assert np.mean(own) == pytest.approx(last[case, seed]["test_accuracy"], abs=1e-12)
        assert min(own) == last[case, seed]["test_accuracy_worst_node"]
    for row in rows:
        assert row["samples"] == int(toy_training_data(0).sizes[int(row["site"])])
        assert row["test_accuracy_alone"] == accuracy["alone", row["seed"], row["site"]]
        (stated,) = toy_statements(20)
        is_private = row["case"] == "A"
        assert row["dp_epsilon"] == (stated["node_epsilons"][int(row["site"])] if is_private else None)
        assert row["noise_std"] == (NOISE[int(row["site"])] if is_private else None)
    shown = text_of(site_table(rows, "A"))
    assert "test accuracy together (%)" in shown
    assert "test accuracy alone (%)" in shown
    assert "ε: proven (zero out one sample, δ = 1e-05)" in shown
    assert site_table(rows, "alone") is None  # neither names nor noise of their own


@pytest.mark.parametrize("behind_the_last_line", [False, True])
def test_a_resumed_run_leaves_the_same_bytes(tmp_path, monkeypatch, behind_the_last_line):
    """Also one that was killed when all lines were written, and the end was not."""
    stop, save = Stop(), Lockstep._save

    def save_and_stop(self):
        save(self)
        stop.request()

    def killed(self, records):
        raise KeyboardInterrupt

    train_toy(tmp_path / "whole", cases())
    with monkeypatch.context() as patch:
        if behind_the_last_line:
            patch.setattr(PassDirectory, "finish", killed)
        else:
            patch.setattr(Lockstep, "_save", save_and_stop)
        with pytest.raises((Stopped, KeyboardInterrupt)):
            train_toy(tmp_path / "part", cases(), stop=stop)
    assert not (tmp_path / "part" / "sites.csv").exists()
    train_toy(tmp_path / "part", cases(), resume=True)
    assert (tmp_path / "part" / "sites.csv").read_bytes() == (tmp_path / "whole" / "sites.csv").read_bytes()


def test_a_lane_that_diverges_has_no_metrics_and_noise_must_fit_the_nodes(tmp_path):
    diverging = toy_case(num_rounds=20, numbers={"bad_round": 12.0})
    train_toy(tmp_path / "run", {"A": diverging, "B": diverging._replace(numbers={"bad_round": 99.0})})
    for row in read_results(tmp_path / "run" / "sites.csv"):
        assert (row["test_accuracy"] is None) == (row["case"] == "A")
    with pytest.raises(ArgumentError, match=r"^noise_stds: must fit the nodes; got 3 for 4\."):
        train_toy(tmp_path / "other", {"A": toy_case(noise_stds=(1.0, 2.0, 3.0))})


def test_each_seed_has_the_epsilons_of_its_nodes(tmp_path):
    """A statement on several seeds lists them seed after seed."""
    (stated,), count = toy_statements(20), 2 * NUM_NODES
    own = {**stated, "dp_epsilon": float(count), "node_epsilons": [float(number) for number in range(1, 1 + count)]}
    train_toy(tmp_path, {"A": toy_case(num_rounds=20, privacy=lambda rounds: [own])})
    found = {(row["seed"], int(row["site"])): row["dp_epsilon"] for row in read_results(tmp_path / "sites.csv")}
    assert found == {(seed, node): 1 + seed * NUM_NODES + node for seed in (0, 1) for node in range(NUM_NODES)}


def test_of_many_sites_the_worst_are_shown():
    rng = np.random.default_rng(0)
    accuracies = rng.permutation(30) / 30
    fixed = {"case": "A", "samples": 9, "dp_epsilon": None, "dp_delta": None, "bound": None}
    fixed |= {"neighboring_relation": None, "noise_std": None}
    rows = [
        {"case": "A", "seed": seed, "site": f"S{node}", **fixed, "test_accuracy": float(accuracy) + seed / 1000}
        for seed in (0, 1)
        for node, accuracy in enumerate(accuracies)
    ]
    table = site_table(rows, "A")
    assert table is not None
    assert list(table.columns[0].cells) == [f"S{node}" for node in np.argsort(accuracies)[:10]]
    assert "the 10 worst of 30 sites; all are in sites.csv" in text_of(table)
