"""A table of one's own in every experiment: each site is a node with its name, in data, graph, tables and pictures."""

import json
import re

import jax
import numpy as np
import pytest
from helpers import refused

from experiments import EXPERIMENTS
from jaxfl.analysis.plots import run_title
from jaxfl.frame import flat, main
from jaxfl.frame.experiment import request
from jaxfl.training import read_results

SITES = ("Ghent", "Lund", "Oslo", "Porto", "Riga")
TAKE_TABLES = sorted(name for name, one in EXPERIMENTS.items() if {"partition", "site_column"} <= {*flat(one.base)})
OWN = {"label_column": "ill", "site_column": "town"}


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{SITES[k % 5]},{b:.3f},{int(a > b)}" for k, (a, b) in enumerate(rng.normal(size=(200, 2)))]
    (tmp_path / "patients.csv").write_text("\n".join(["age,town,dose,ill", *rows]) + "\n")
    return str(tmp_path / "patients.csv")


def test_all_experiments_with_a_partition_take_tables():
    assert {"ali_dpfl", "dp_gradient_tracking", "dzofl", "embracing_fl", "privsgp_vr"} <= {*TAKE_TABLES}


@pytest.mark.parametrize("name", [name for name in TAKE_TABLES if name != "similarity"])
def test_each_site_is_a_node(name, table):
    silent = {"validation": 0.0} if name == "comparison" else {}  # which holds samples out by default
    query = request(EXPERIMENTS[name], {"dataset": table, "model": "mlp", **silent, **OWN})
    config, values = query.config, flat(query.config)
    assert (values["nodes"], values["partition"]) == (5, "sites")
    own = config.agents if name == "dp_gradient_tracking" else config.clients
    of_seed = own.data(config.data, 5, (0,)) if name == "embracing_fl" else own.data(config.data)
    assert of_seed(0).names == SITES
    assert of_seed(0).sizes.tolist() == [32] * 5
    jax.eval_shape(config.task().init, jax.random.key(0))


def test_what_is_said_goes_before_what_follows(table):
    query = request(EXPERIMENTS["privsgp_vr"], {"dataset": table, "partition": "iid", "nodes": 4, **OWN})
    assert (query.config.clients.nodes, query.config.clients.partition) == (4, "iid")
    four = request(EXPERIMENTS["privsgp_vr"], {"dataset": table, "nodes": 4, **OWN}).config
    refused(lambda: four.clients.data(four.data)(0), "num_nodes", "5")
    refused(lambda: request(EXPERIMENTS["privsgp_vr"], {"site_column": "town"}), "site_column")
    refused(lambda: request(EXPERIMENTS["privsgp_vr"], {"dataset": table, "data_dir": "x", **OWN}), "data_dir")
    misspelled = {"graph": "randon", "edge_probability": 0.5}  # the cause, not the option that it makes idle
    refused(lambda: request(EXPERIMENTS["privsgp_vr"], misspelled), "graph", "randon", "exponential")
    refused(lambda: request(EXPERIMENTS["privsgp_vr"], {**misspelled, "graph": "ring"}), "edge_probability", "random")
    network = request(EXPERIMENTS["privsgp_vr"], {"dataset": table, "model": "cnn", **OWN}).config
    refused(network.task, "model", "mlp")


def test_a_run_on_sites_and_their_edges(table, tmp_path, capsys):
    edges = tmp_path / "roads.csv"
    edges.write_text("from,to\n" + "".join(f"{a},{b}\n" for a, b in zip(SITES, SITES[1:] + SITES[:1], strict=True)))
    words = f"--dataset {table} --label-column ill --site-column town --graph {edges} --method PrivSGP --batch-size 8"
    out = tmp_path / "run"
    budget = "--iterations 4 --target-epsilon 8 --evaluate-every 4 --quiet"
    assert main(EXPERIMENTS["privsgp_vr"], [*f"{words} {budget}".split(), "--out", str(out)]) == 0, capsys.readouterr()
    assert "5 nodes (sites)" in capsys.readouterr().out
    nodes = json.loads((out / "privacy.json").read_text())["PrivSGP"]
    assert "Porto" in json.dumps(nodes)
    budgets = tmp_path / "budgets.csv"
    budgets.write_text("site,epsilon\n" + "".join(f"{site},{2**k}\n" for k, site in enumerate(SITES[::-1])))
    own = f"--iterations 4 --node-epsilons {budgets} --evaluate-every 4 --quiet --out {tmp_path / 'own'}"
    assert main(EXPERIMENTS["privsgp_vr"], f"{words} {own}".split()) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    rows = read_results(tmp_path / "own" / "sites.csv")
    assert [row["site"] for row in rows] == [*SITES]
    for row, query in zip(rows, (16, 8, 4, 2, 1), strict=True):
        assert 0.99 * query < row["dp_epsilon"] <= query
        assert (row["bound"], row["neighboring_relation"], row["samples"]) == ("proven", "zero_out", 32)
        std = re.search(rf"│ {row['site']} +│ +32 │ +[\d.]+ │ +([\d.]+) │", printed)
        assert std is not None
        assert row["noise_std"] <= float(std[1]) < 1.001 * row["noise_std"]
    assert [row["noise_std"] for row in rows] == sorted(row["noise_std"] for row in rows)
    assert (
        "PrivSGP: target: ε = 16 at the worst node, median 4, proven against all other nodes (zero out one sample"
        in " ".join(printed.split())
    )
    budgets.write_text(budgets.read_text().replace("1\n", "3\n"))
    assert main(EXPERIMENTS["privsgp_vr"], f"{words} {own} --resume".split()) == 2
    assert "budgets.PrivSGP" in capsys.readouterr().err
    edges.write_text(edges.read_text().replace("Oslo", "Bergen"))
    assert main(EXPERIMENTS["privsgp_vr"], [*f"{words} {budget}".split(), "--out", str(tmp_path / "other")]) == 2
    assert "Bergen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ({"partition": "sites"}, 22),  # 0.45 of 49
        ({"partition": "iid", "nodes": 4}, 161),  # 646 / 4, as of any data
        ({"partition": "iid", "nodes": 40}, 22),  # 0.45 of 50
        ({"partition": "iid", "nodes": 14}, 63),  # 0.45 of 142
        ({"partition": "iid", "nodes": 12}, 64),  # 0.45 of 166 is above what a default takes
        ({"partition": "dirichlet", "alpha": 1.0, "nodes": 20}, 32),  # its sizes are known once samples are dealt
        ({"partition": "sites", "batch_size": 7}, 7),
        ({"partition": "sites", "own_test": 0.5}, 11),
        ({"partition": "iid", "nodes": 20, "table": "per_batch", "entry_size": 2}, 32),
    ],
)
def test_a_default_batch_follows_the_sizes_of_a_file(words, batch, tmp_path):
    own = [0 if k < 49 else 1 + k % 4 for k in range(2000)]
    arrays = {"train_inputs": np.zeros((2000, 2), np.float32), "train_labels": np.arange(2000) % 2, "train_sites": own}
    arrays |= {"test_inputs": np.zeros((4, 2), np.float32), "test_labels": np.arange(4) % 2}
    np.savez(tmp_path / "many.npz", **arrays)
    options = {"dataset": str(tmp_path / "many.npz"), **words}
    assert flat(request(EXPERIMENTS["privsgp_vr"], options).config)["batch_size"] == batch


def test_gradient_tracking_takes_edges_by_name(table, tmp_path):
    edges = tmp_path / "roads.csv"
    edges.write_text("from,to\n" + "".join(f"{a},{b}\n" for a, b in zip(SITES, SITES[1:] + SITES[:1], strict=True)))
    options = {"dataset": table, "model": "mlp", "graph": str(edges), "iterations": 4, "batch_size": 2, **OWN}
    config = request(EXPERIMENTS["dp_gradient_tracking"], options).config
    data = config.agents.data(config.data)(0)
    config.settled().algorithm().init(jax.random.key(0), data)
    other = tmp_path / "roads.tsv"  # by another ending and separator
    other.write_text(edges.read_text().replace(",", "\t"))
    config = request(EXPERIMENTS["dp_gradient_tracking"], {**options, "graph": str(other)}).config
    config.settled().algorithm().init(jax.random.key(0), data)
    config = request(EXPERIMENTS["dp_gradient_tracking"], options).config
    edges.write_text(edges.read_text().replace("Oslo", "Bergen"))
    refused(lambda: config.settled().algorithm().init(jax.random.key(0), data), "data", "Bergen")


def test_an_audit_takes_a_table(table):
    options = {"dataset": table, "label_column": "ill", "site_column": "town", "samples": 30, "canaries": 10}
    _, data = request(EXPERIMENTS["audit"], options).config.problem()
    assert data.sizes.tolist() == [30] * 5
    assert data.inputs.shape == (160, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("privsgp_vr", "--iterations 2 --method PrivSGP"),
        ("dzofl", "--rounds 2"),
        ("dp_gradient_tracking", "--iterations 2 --smoothness 1"),
    ],
)
@pytest.mark.slow
def test_defaults_take_sites_of_few_samples(name, words, tmp_path, capsys, monkeypatch):
    """A default batch is one that the smallest site can draw, and a run on a table comes to its end."""
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table leaves columns out
    rows = [f"{k % 7},{k % 3},{SITES[0 if k < 14 else 1 + k % 3]},{k % 2}" for k in range(160)]
    (tmp_path / "few.csv").write_text("\n".join(["age,dose,town,ill", *rows]) + "\n")
    words = f"--dataset {tmp_path / 'few.csv'} --label-column ill --site-column town --quiet --seeds 0 {words}"
    assert main(EXPERIMENTS[name], [*words.split(), "--out", str(tmp_path / "run")]) == 0, capsys.readouterr()
    assert (tmp_path / "run" / "plots" / "training.png").exists()
    assert "test auc" in re.sub(r"[│┃\s]+", " ", capsys.readouterr().out)
    assert all(0 <= row["test_auc_worst_node"] <= row["test_auc"] <= 1 for row in read_results(tmp_path / "run"))
    options = {"dataset": str(tmp_path / "few.csv"), **OWN}
    expected = int(0.45 * 11)  # of 14 samples of a site 3 test
    assert flat(request(EXPERIMENTS[name], options).config)["batch_size"] in (3, expected)  # 3 is a scheme's own
    assert flat(request(EXPERIMENTS[name], {**options, "batch_size": 9}).config)["batch_size"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ali_dpfl", "dzofl"])
def test_a_server_s_model_is_tested_on_what_each_client_holds_out(name, tmp_path, capsys):
    method = "DPFL --local-steps 2 --batch-size 4" if name == "ali_dpfl" else "FedAvg"
    words = f"--rounds 2 --num-train 200 --own-test 0.2 --seeds 0 --quiet --method {method} --out {tmp_path / 'run'}"
    assert main(EXPERIMENTS[name], words.split()) == 0, capsys.readouterr()
    last = json.loads((tmp_path / "run" / "passes" / "0" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= last["own_accuracy_worst_node"] <= last["own_accuracy"] <= 1
    assert_sites_have_own_accuracies(tmp_path / "run", [last])


def assert_sites_have_own_accuracies(run, lines):
    """sites.csv has the accuracies at the end whose mean, worst and spread the lines tell."""
    sites = read_results(run / "sites.csv")
    for line in lines:
        own = [row["own_accuracy"] for row in sites if (row["case"], row["seed"]) == (line["case"], line["seed"])]
        expected = [line[f"own_accuracy{end}"] for end in ("", "_worst_node", "_spread")]
        assert [np.mean(own), min(own), np.std(own)] == pytest.approx(expected, abs=1e-6)


def test_what_nodes_hold_out_tests_their_own_models(table, tmp_path, capsys):
    words = f"--dataset {table} --label-column ill --site-column town --method PrivSGP --batch-size 8 --own-test 0.25"
    words += f" --iterations 2 --noise-std 0.1 --quiet --seeds 0 1 --out {tmp_path / 'run'}"
    assert main(EXPERIMENTS["privsgp_vr"], words.split()) == 0, capsys.readouterr()
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "passes" / "0" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(line["own_accuracy_worst_node"] <= line["own_accuracy"] <= 1 for line in lines)
    assert all(0 <= line["own_accuracy_spread"] <= 0.5 for line in lines)
    assert_sites_have_own_accuracies(tmp_path / "run", [line for line in lines if line["round"] == 2])
    own = request(EXPERIMENTS["privsgp_vr"], {"dataset": table, "own_test": 0.25, **OWN}).config
    assert own.clients.data(own.data)(0).sizes.tolist() == [24] * 5
    title = run_title(tmp_path / "run" / "config.json")
    assert "patients" in title
    assert "/" not in title
