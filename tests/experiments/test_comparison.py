"""Every method of experiments.comparison: at its budget, as its own experiment would run it, and laid side by side."""

import csv
import json
from collections.abc import Callable, Mapping
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused
from run_files import run_lines

from experiments import EXPERIMENTS
from experiments.comparison.options import COMPARED, METHODS, OBSERVERS, SILENT, UNMIXED, UPDATES, WITH_SERVER
from experiments.comparison.pictures import best_rows
from experiments.comparison.prepare import _row
from experiments.privsgp_vr.options import CORRECTED
from experiments.privsgp_vr.options import METHODS as ON_A_GRAPH
from jaxfl import privacy
from jaxfl.frame import Finished, Prepared, Row, flat, main
from jaxfl.frame.experiment import request
from jaxfl.training import RunDirectory

COMPARISON = EXPERIMENTS["comparison"]
PREPARE = cast("Callable[[Mapping[str, Row]], Prepared]", COMPARISON.prepare)
SMALL = {"nodes": 5, "rounds": 4, "num_train": 200, "num_test": 40, "batch_size": 4, "hidden": (4,), "step_size": 0.3}
SMALL |= {"evaluate_every": 2}
ON_CLIENTS = ("DPFL", "ALI-DPFL", "SCAFFOLD")


def query(method, **changes):
    more = {"num_active": 2} if method == UPDATES else {}
    return request(COMPARISON, {"method": method, **SMALL, **more, **changes})


@pytest.fixture(scope="module")
def cases():
    rows = {method: next(iter(query(method).rows.values())) for method in METHODS}
    return PREPARE(rows).cases


def stated(case):
    """The first statement on all rounds."""
    return case.privacy(case.last_round)[0]


@pytest.mark.parametrize("method", OBSERVERS)
def test_pairs_keep_the_budget_and_change_the_observer(method, cases):
    """The noise that is seen is the same, and the learner that runs shares it: what it says is what is stated."""
    (row,) = query(method, trust="pairs").rows.values()
    (pairs,) = PREPARE({method: row}).cases.values()
    own, shared = (stated(case) for case in (cases[method], pairs))
    assert shared["dp_epsilon"] == pytest.approx(own["dp_epsilon"], rel=1e-6)
    assert own["observer"] in ("all other nodes", "the server and all other clients")
    assert shared["observer"] == ("the server and any one other node" if method == "DPFL" else "any one other node")
    numbers = {name: jnp.float32(value) for name, value in pairs.numbers.items()}
    (secrets,) = {one.secrets for one in privacy.releases_of(pairs.algorithm(numbers), [32] * 5).each}
    assert (secrets.colluding, secrets.num_nodes) == (1, 5)
    outside = next(iter(query(method, trust="pairs", colluding=0).rows.values()))
    (outside,) = PREPARE({method: outside}).cases.values()
    assert "an outside observer" in stated(outside)["observer"]


def test_a_sweep_over_observers_has_what_methods_have():
    """The others are left out, and one by itself is refused; every epsilon names its observer."""
    trust = ("everyone", "pairs", "sums", "curator")
    axes = ({"trust": trust}, {"method": ("PrivSGP", "DP-GT", "SCAFFOLD", "DPFL")}, {"mixings": (1, 4)})
    actual = request(COMPARISON, SMALL, axes)
    rows = [(flat(row.config), row.settings) for row in actual.rows.values()]
    of_both = {trust: [f"PrivSGP {trust} {mixings}" for mixings in (1, 4)] for trust in ("everyone", "pairs")}
    expected = [*of_both["everyone"], "DP-GT everyone", "SCAFFOLD everyone", "DPFL everyone", *of_both["pairs"]]
    expected += ["DPFL pairs", "DPFL sums", "PrivSGP curator", "DPFL curator"]
    names = [" ".join(map(str, (one["method"], one["trust"], own.get("mixings", "")))).strip() for one, own in rows]
    assert names == expected
    cases = PREPARE(actual.rows).cases
    seen = {}
    for name, case in cases.items():
        config = actual.rows[name].config
        totals = {key: 4 if config.trust.trust == "sums" else 12 for key in case.released}
        assert case.privacy is not None
        first = case.privacy(case.last_round, **totals)[0]
        assert 0.99 * 3 < first["dp_epsilon"] <= 3, name
        seen[config.learning.method, config.trust.trust] = first["observer"]
    assert seen == {
        ("PrivSGP", "everyone"): "all other nodes",
        ("DP-GT", "everyone"): "all other agents",
        ("SCAFFOLD", "everyone"): "the server and all other clients",
        ("DPFL", "everyone"): "the server and all other clients",
        ("PrivSGP", "pairs"): "any one other node",
        ("DPFL", "pairs"): "the server and any one other node",
        ("DPFL", "sums"): "a server that sees sums only and any one other node",
        ("PrivSGP", "curator"): "whoever sees its models",
        ("DPFL", "curator"): "whoever sees its models",
    }
    refused(lambda: PREPARE(query("DP-GT", trust="pairs").rows), "trust", "everyone")
    refused(lambda: PREPARE(query("PrivSGP", trust="sums").rows), "trust", "curator")
    refused(lambda: query("DPFL", trust="sums", local_steps=2), "local_steps")


@pytest.mark.parametrize("method", ["PrivSGP", "DPFL"])
def test_a_curator_has_all_samples_and_makes_the_steps_of_the_method(method):
    (row,) = query(method, trust="curator").rows.values()
    theirs = flat(_row(METHODS[method], row).config)
    assert (theirs["nodes"], theirs["batch_size"]) == (1, 5 * 4)
    assert theirs["iterations" if method == "PrivSGP" else "max_iterations"] == (4 if method == "PrivSGP" else 12)
    (case,) = PREPARE({method: row}).cases.values()
    assert np.asarray(case.data(0).sizes).tolist() == [160]
    beside = request(COMPARISON, {"method": "PrivSGP", **SMALL}, baselines=["curator"]).rows["curator"]
    assert (beside.config == row.config) == (method == "PrivSGP")


def test_a_baseline_among_the_methods_is_called_that_of_its_method():
    actual = request(COMPARISON, SMALL, ({"method": ("DPFL", "without_noise")},))
    settings = [case.settings for case in PREPARE(actual.rows).cases.values()]
    assert settings == [{"method": "DPFL"}, {"method": "PrivSGP", "baseline": "without_noise"}]


def test_clients_of_unequal_size_share_one_noise():
    """That of the one which needs the most: pairs could not cancel noise of different scales."""
    (row,) = query("DPFL", trust="pairs", partition="quantity", alpha=2.0, batch_size=2).rows.values()
    assert max(row.samples_per_node()) > 2 * min(row.samples_per_node())
    (case,) = PREPARE({"DPFL": row}).cases.values()
    assert case.privacy is not None
    first = case.privacy(4, local_iterations=12)[0]
    assert 0.99 * 3 < first["dp_epsilon"] <= 3
    assert min(first["node_epsilons"]) < 2.5
    assert case.noise_stds == ()


def test_no_method_trains_on_what_validates(cases):
    """A fifth of the 200 samples; the accuracy on them is measured at every evaluation."""
    for name, case in cases.items():
        assert np.asarray(case.data(0).sizes).sum() == 160, name
        assert "validation" in case.measures, name
    plain = PREPARE(query("PrivSGP", validation=0.0).rows).cases
    (plain,) = plain.values()
    assert np.asarray(plain.data(0).sizes).sum() == 200
    assert "validation" not in plain.measures


def test_shared_noise_of_clients_does_not_follow_from_a_graph():
    for name, value in (("key_graph", "mixing"), ("shared_ratio", "even")):
        refused(lambda name=name, value=value: PREPARE(query("DPFL", trust="pairs", **{name: value}).rows), name)


def test_all_private_methods_are_compared():
    assert {*COMPARED, UPDATES, "alone", *SILENT} == {*METHODS}
    assert len(COMPARED) == 11


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SILENT])
def test_a_method_spends_its_budget_and_no_more(method, cases):
    case = cases[method]
    totals = {"local_iterations": 12, "estimate_releases": 4}  # three iterations a round
    first = case.privacy(case.last_round, **{name: totals[name] for name in case.released})[0]
    assert case.last_round == 4
    assert (first["bound"], first["dp_delta"], first["asked"]) == ("proven", 1e-5, True)
    assert first["neighboring_relation"] == ("zero_out_client" if method == UPDATES else "replace_one")
    assert 0.99 * 3 < first["dp_epsilon"] <= 3


def test_all_are_measured_after_a_mixing_unless_the_papers_places_are_asked_for():
    """One exchange more of what was released, where a round ends with a node's own noise."""
    places = {}
    for method in ("PrivSGP-VR", "PrivSGP", *CORRECTED, *UNMIXED):
        changes = {"measured": "paper"} if method in UNMIXED else {}
        rows = [next(iter(query(method, **more).rows.values())) for more in ({}, changes)]
        places[method] = [flat(_row(METHODS[method], row).config)["final_mixings"] for row in rows]
    assert places == {method: [int(method in UNMIXED), 0] for method in places}
    refused(lambda: query("PrivSGP", measured="after_mixing"), "measured", "DP2-SGD")
    refused(lambda: query("DP-GT", mixings=2), "mixings", "PrivSGP")
    refused(lambda: query("A(DP)2SGD", mixings=2), "mixings", "PrivSGP")
    refused(lambda: query("QG-DSGDm", final_mixings=1), "final_mixings", "PrivSGP")
    assert flat(_row(METHODS["DP2-SGD"], next(iter(query("DP2-SGD", mixings=3).rows.values()))).config)["mixings"] == 3


def test_momentum_reaches_qg_dsgdm_and_many_values_share_its_program():
    """The default leaves the random numbers of runs from before the option as they are."""
    momenta = (0.5, 0.8, 0.9)
    rows = {str(momentum): next(iter(query("QG-DSGDm", momentum=momentum).rows.values())) for momentum in momenta}
    assert [flat(_row(METHODS["QG-DSGDm"], row).config)["momentum"] for row in rows.values()] == list(momenta)
    cases = PREPARE(rows).cases
    assert len({case.algorithm for case in cases.values()}) == 1
    assert ["momentum" in case.identity for case in cases.values()] == [True, True, False]


def test_nodes_of_unequal_size_spend_the_budget_each():
    """A node of a graph, or a client, has noise of its own, so that none has that of the smallest for nothing."""
    uneven = {"partition": "quantity", "alpha": 2.0, "batch_size": 2}
    rows = {method: next(iter(query(method, **uneven).rows.values())) for method in (*ON_A_GRAPH, *ON_CLIENTS)}
    sizes = rows["PrivSGP"].samples_per_node()
    assert max(sizes) > 2 * min(sizes)
    for method, case in PREPARE(rows).cases.items():
        assert case.privacy is not None
        totals = {"local_iterations": 12, "estimate_releases": 4}
        first = case.privacy(4, **{name: totals[name] for name in case.released})[0]
        assert all(0.99 * 3 < epsilon <= 3 for epsilon in first["node_epsilons"]), method
        assert len(first["node_epsilons"]) == 5
        assert case.noise_stds[int(np.argmin(sizes))] == max(case.noise_stds) > 1.1 * min(case.noise_stds)


@pytest.mark.parametrize("method", SILENT)
def test_what_is_silent_has_no_epsilon(method, cases):
    assert all(stated["dp_epsilon"] is None for stated in cases[method].privacy(4))


def test_all_have_the_same_data(cases):
    parts = [np.asarray(case.data(0).inputs) for name, case in cases.items() if name != "pooled"]
    assert all(np.array_equal(parts[0], part) for part in parts)


@pytest.mark.parametrize(("method", "experiment"), [("PrivSGP", "privsgp_vr"), ("DPFL", "ali_dpfl")])
@pytest.mark.quick_cases(1)
def test_a_row_is_that_of_the_method_s_own_experiment(method, experiment, tmp_path):
    common = "--nodes 5 --num-train 200 --num-test 40 --batch-size 4 --hidden 4 --step-size 0.3 --evaluate-every 2"
    common += (
        f" --clip-norm 1 --target-epsilon 3 --neighboring-relation replace_one --method {method} --seeds 0 --quiet"
    )
    rounds = "--iterations 4" if experiment == "privsgp_vr" else "--rounds 4 --partition iid --max-iterations 12"
    rounds += "" if experiment == "privsgp_vr" else " --local-steps 3 --noise-multiplier calibrated"
    actual = []
    for name, words in ((experiment, rounds), ("comparison", "--rounds 4 --validation 0")):
        out = tmp_path / name
        assert main(EXPERIMENTS[name], f"{common} {words} --out {out}".split()) == 0
        actual.append([{**line, "case": ""} for line in run_lines(out)])
    numbers = [[line[name] for line in lines for name in ("test_accuracy", "train_loss")] for lines in actual]
    assert numbers[0] == numbers[1]


@pytest.mark.slow
def test_the_best_step_of_each_is_that_of_results_csv(tmp_path, capsys):
    out = tmp_path / "run"
    words = "--seeds 0 1 --rounds 4 --neighboring-relation replace_one --nodes 5 --num-train 200 --num-test 40"
    words += f" --batch-size 4 --hidden 4 --baselines pooled alone --quiet --out {out}"
    several = "--method PrivSGP DPFL --step-size 0.01 0.1 1 --target-epsilon 1 8"
    assert main(COMPARISON, f"{several} {words}".split()) == 0, capsys.readouterr()
    ended = (out / "results.csv").read_bytes()
    as_grid = "--grid method=PrivSGP,DPFL --grid step_size=0.01,0.1,1 --grid target_epsilon=1,8"
    assert main(COMPARISON, f"{as_grid} {words} --resume".split()) == 0, capsys.readouterr()
    assert (out / "results.csv").read_bytes() == ended
    with open(out / "comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 + 1  # the pooled data have no budget
    with open(out / "results.csv", newline="") as file:
        results = list(csv.DictReader(file))
    config = json.loads((out / "config.json").read_text())["config"]["cases"]
    for row in rows:
        same = [one for one in results if config[one["case"]].get("method", "PrivSGP") == row["method"]]
        if row["target_epsilon"]:
            budgets = {one["case"]: config[one["case"]].get("target_epsilon", 1.0) for one in same}
            same = [one for one in same if budgets[one["case"]] == float(row["target_epsilon"])]
        means = {}
        for one in same:
            accuracies = [float(one[f"{which}_accuracy"]) for which in ("validation", "test")]
            means.setdefault(one["case"], []).append(accuracies)
        best = {case: np.mean(values, axis=0) for case, values in means.items()}
        assert best[row["case"]][0] == max(mean for mean, _ in best.values())
        assert float(row["test_accuracy"]) == pytest.approx(best[row["case"]][1])
        assert row["observer"] in ("all other nodes", "the server and all other clients", "")
    assert (out / "plots" / "comparison.png").stat().st_size > 10_000


def test_other_options_that_vary_are_places_of_their_own():
    axes = ({"step_size": (0.1, 0.2)}, {"clip_norm": (1.0, 2.0)}, {"seed": (0, 1)})
    actual = request(COMPARISON, {"method": "PrivSGP"}, axes)
    means = dict(zip(actual.rows, (0.1, 0.4, 0.3, 0.2), strict=True))
    one = {"std": 0.0, "costs": {}}
    cases = {name: {"test_accuracy": {**one, "mean": x, "per_seed": [x, x]}, **one} for name, x in means.items()}
    rows = best_rows(Finished(cast("RunDirectory", None), {"cases": cases}, actual.rows, None))
    picked = {row["clip_norm"]: (row["step_size"], row["test_accuracy"], row["at_an_end"]) for row in rows}
    assert picked == {1.0: (0.2, 0.3, True), 2.0: (0.1, 0.4, True)}
    for name, accuracy in zip(cases, (0.9, 0.1, 0.2, 0.3), strict=True):  # what validates decides alone
        cases[name]["validation_accuracy"] = {"mean": accuracy, "per_seed": [accuracy, accuracy]}
    rows = best_rows(Finished(cast("RunDirectory", None), {"cases": cases}, actual.rows, None))
    validated = [(row["step_size"], row["validation_accuracy"], row["test_accuracy"]) for row in rows]
    assert validated == [(0.1, 0.9, 0.1), (0.2, 0.3, 0.2)]
    for case in cases.values():
        del case["validation_accuracy"]
    cases[list(actual.rows)[1]]["test_accuracy"]["per_seed"][1] = None  # the best step of one seed only is none
    rows = best_rows(Finished(cast("RunDirectory", None), {"cases": cases}, actual.rows, None))
    assert [row["step_size"] for row in rows] == [0.2, 0.2]


def test_options_are_those_of_the_comparison_on_every_data_set():
    given = [("ALI-DPFL", {"kappa": 7.0}), ("DPFL", {"local_steps": 2})]
    given += [(method, {"state_mixing": 0.7}) for method in ("DP-GT", "noisy-states")]
    for method, changes in given:
        row = next(iter(query(method, **changes).rows.values()))
        theirs = flat(_row(METHODS[method], row).config)
        assert {name: theirs[name] for name in changes} == changes
    assert flat(_row(METHODS["ALI-DPFL"], next(iter(query("ALI-DPFL").rows.values()))).config)["kappa"] == 30.0
    refused(lambda: query("PrivSGP", state_mixing=0.5), "state_mixing")


def test_estimates_take_their_share_of_epsilon_and_no_more():
    actual = [
        flat(_row(METHODS["ALI-DPFL"], next(iter(query("ALI-DPFL", estimates_share=share).rows.values()))).config)
        for share in (0.1, 0.5)
    ]
    assert actual[0]["constants_noise"] > 2 * actual[1]["constants_noise"]
    assert actual[0]["target_epsilon"] == actual[1]["target_epsilon"] == 3.0
    rows = query("ALI-DPFL", estimates_share=0.1).rows
    (case,) = PREPARE(rows).cases.values()
    assert case.privacy is not None
    spent = case.privacy(4, local_iterations=12, estimate_releases=4)[0]
    assert 0.99 * 3 < spent["dp_epsilon"] <= 3
    rows = query("ALI-DPFL", estimates_share=1.0).rows
    refused(lambda: PREPARE(rows), "estimates_share", "1")
    refused(lambda: query("DPFL", estimates_share=0.1), "estimates_share")


def test_all_samples_of_a_node_are_those_of_the_smallest_over_seeds():
    axes = ({"seed": (0, 1, 2, 3)},)
    actual = request(COMPARISON, {"method": "DP-GT", **SMALL, "partition": "dirichlet", "alpha": 0.5}, axes)
    (row,) = actual.rows.values()
    data_of = row.config.clients.data(row.config.data)
    smallest = min(int(data_of(seed).sizes.min()) for seed in range(4))
    assert flat(_row(METHODS["DP-GT"], row).config)["batch_size"] == smallest
    PREPARE(actual.rows)


def test_other_relations_share_no_picture(tmp_path, capsys):
    words = (
        "--grid method=DP-FedAvg,PrivSGP --step-size 0.1 --seeds 0 --rounds 2 --nodes 5 --num-train 200 --num-test 40"
    )
    words += f" --batch-size 4 --hidden 4 --num-active 3 --quiet --out {tmp_path / 'run'}"
    assert main(COMPARISON, words.split()) == 0, capsys.readouterr()
    assert not (tmp_path / "run" / "plots" / "comparison.png").exists()
    with open(tmp_path / "run" / "comparison.csv", newline="") as file:
        assert {row["neighboring_relation"] for row in csv.DictReader(file)} == {"zero_out_client", "replace_one"}


def test_refusals():
    for method in ("DP-GT", "noisy-states"):
        rows = query(method, neighboring_relation="zero_out").rows
        refused(lambda rows=rows: PREPARE(rows), "neighboring_relation", "replace_one")
    refused(lambda: query("pooled", target_epsilon=2.0), "target_epsilon")


def test_graphs_are_what_methods_can_take():
    refused(lambda: query("DPFL", graph="ring"), "graph")
    for method in METHODS.keys() - {*WITH_SERVER}:
        for graph in ("exponential", "directed_ring", "ring", "complete", "star"):
            theirs = flat(_row(METHODS[method], next(iter(query(method, graph=graph).rows.values()))).config)
            took = theirs.get("baseline_graph" if method == "noisy-states" else "graph", graph)
            needs_undirected = method in ("DP2-SGD", "A(DP)2SGD", "ED", "noisy-states")
            directed = graph in ("exponential", "directed_ring")
            if method not in ("alone", "pooled"):
                assert took == ("ring" if needs_undirected and directed else graph)
