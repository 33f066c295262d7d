"""sites.csv: what each node has and gets, and the table that a run shows of it."""

import io

import numpy as np
import pytest
import rich.console
from helpers import refused
from run_files import run_lines
from toy_problem import NUM_NODES, toy_case, toy_statements, toy_training_data, train_toy

from jaxfl.training import Stop, Stopped, read_results
from jaxfl.training.lockstep import Lockstep
from jaxfl.training.pass_directory import PassDirectory
from jaxfl.training.sites import site_table

NOISE = (0.5, 0.25, 0.5, 1.0)


def cases(**fields):
    """Two cases; in the others sites learn by themselves, as far as the names say."""
    together = toy_case(num_rounds=20, numbers={"step_size": 0.2}, privacy=toy_statements, noise_stds=NOISE, **fields)
    apart = {
        f"b = {b}, alone": together._replace(
            numbers={"step_size": 0.01 * b}, privacy=None, noise_stds=(), settings={"b": b, "baseline": "alone"}
        )
        for b in (1, 5)
    }
    return {"A": together._replace(settings={"b": 5}), **apart}


def text_of(table):
    console = rich.console.Console(file=io.StringIO(), width=150)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\xa0", " ")


def test_a_row_a_case_seed_and_node(tmp_path):
    train_toy(tmp_path, cases())
    rows = read_results(tmp_path / "sites.csv")
    places = [(case, seed, str(node)) for case in cases() for seed in (0, 1) for node in range(NUM_NODES)]
    assert [(row["case"], row["seed"], row["site"]) for row in rows] == places
    accuracy = {(row["case"], row["seed"], row["site"]): row["test_accuracy"] for row in rows}
    last = {(line["case"], line["seed"]): line for line in run_lines(tmp_path)}
    for case, seed in last:
        own = [accuracy[case, seed, str(node)] for node in range(NUM_NODES)]
        assert np.mean(own) == pytest.approx(last[case, seed]["test_accuracy"], abs=1e-12)
        assert min(own) == last[case, seed]["test_accuracy_worst_node"]
    for row in rows:
        assert row["samples"] == int(toy_training_data(0).sizes[int(row["site"])])
        beside = "b = 5, alone" if row["case"] == "A" else row["case"]  # which has the most options in common
        assert row["test_accuracy_alone"] == accuracy[beside, row["seed"], row["site"]]
        (stated,) = toy_statements(20)
        is_private = row["case"] == "A"
        assert row["dp_epsilon"] == (stated["node_epsilons"][int(row["site"])] if is_private else None)
        assert row["noise_std"] == (NOISE[int(row["site"])] if is_private else None)
    shown = text_of(site_table(rows, "A"))
    assert "test accuracy together (%)" in shown
    assert "test accuracy alone (%)" in shown
    assert "ε: proven (zero out one sample, δ = 1e-05)" in shown
    assert site_table(rows, "b = 5, alone") is None  # neither names nor noise of their own


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


def test_noise_must_fit_the_nodes(tmp_path):
    case = toy_case(noise_stds=(1.0, 2.0, 3.0))
    refused(lambda: train_toy(tmp_path, {"A": case}), "noise_stds", "got 3 for 4")


@pytest.mark.parametrize(("metric", "sign"), [("test_accuracy", 1), ("test_loss", -1)])
def test_of_many_sites_the_worst_are_shown(metric, sign):
    values = np.random.default_rng(0).permutation(30) / 30
    fixed = {"case": "A", "samples": 9, "dp_epsilon": None, "dp_delta": None, "bound": None}
    fixed |= {"neighboring_relation": None, "noise_std": None}
    rows = [
        {"case": "A", "seed": seed, "site": f"S{node}", **fixed, metric: float(value) + seed / 1000}
        for seed in (0, 1)
        for node, value in enumerate(values)
    ]
    table = site_table(rows, "A")
    assert table is not None
    assert list(table.columns[0].cells) == [f"S{node}" for node in np.argsort(sign * values)[:10]]
    assert "the 10 worst of 30 sites; all are in sites.csv" in text_of(table)
