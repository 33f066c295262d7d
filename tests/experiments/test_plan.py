"""The plan: the best step of each budget and baseline, with commands that make the rows again."""

import csv
import json
import re
import shlex

import numpy as np
import pytest

from experiments import EXPERIMENTS
from experiments.plan.request import PLAN, STEPS, arguments_of
from experiments.plan.table import _HOW, best_guess
from jaxfl.analysis.report import write_report
from jaxfl.frame import main
from jaxfl.frame.experiment import BASELINES
from jaxfl.training import read_results


def write_table(path, sizes):
    """A table of sites with these numbers of samples: 20 numbers, labels of a logistic model; and a directed graph."""
    rng = np.random.default_rng(0)
    slope = rng.normal(size=20)
    with open(path / "clinics.csv", "w", newline="") as data, open(path / "roads.csv", "w", newline="") as edges:
        rows, links = csv.writer(data), csv.writer(edges)
        rows.writerow(["site", *(f"x{k}" for k in range(20)), "y"])
        links.writerow(["from", "to"])
        for site, size in enumerate(sizes):
            links.writerows([[f"s{site}", f"s{(site + hop) % len(sizes)}"] for hop in (1, 7)])
            inputs = rng.uniform(-1, 1, (size, 20))
            chance = 1 / (1 + np.exp(-1.3 * inputs @ slope))
            rows.writerows(
                [f"s{site}", *x.round(4), int(p > u)] for x, p, u in zip(inputs, chance, rng.random(size), strict=True)
            )


def plan(words):
    return main(PLAN, arguments_of(["clinics.csv", *"--label-column y --site-column site --quiet".split(), *words]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    write_table(tmp_path, [40, 80, 120, 60, 50])
    return tmp_path


def test_the_table_has_the_best_step_of_each_row_and_commands_that_make_them_again(folder, capsys):
    words = "--epsilon 1 8 --step-size 0.1 1 --iterations 6 --seeds 0 1 --out run --hidden 4"
    words = f"{words} --baselines alone without_noise".split()
    assert plan(words) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    results, summary = read_results(folder / "run"), json.loads((folder / "run" / "summary.json").read_text())
    assert len(summary["cases"]) == 4 + 2 + 2
    assert len([*(folder / "run" / "passes").iterdir()]) == 3, "the budgets share a program"
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("  jaxfl privsgp_vr")]
    for budget, command in zip((1, 8), commands, strict=True):
        means = {}
        for step in (0.1, 1):
            own = [r for r in results if (r["target_epsilon"], r["step_size"], r["baseline"]) == (budget, step, None)]
            assert [row["proven_dp_epsilon"] for row in own] == pytest.approx([budget] * 2, rel=0.01)
            means[step] = [row["test_accuracy"] for row in own]
        best = max(means, key=lambda step: np.mean(means[step]))
        assert main(EXPERIMENTS["privsgp_vr"], [*command[2:], "--out", f"again{budget}", "--quiet"]) == 0
        again = read_results(folder / f"again{budget}")
        chosen = [r for r in results if (r["target_epsilon"], r["step_size"], r["baseline"]) == (budget, best, None)]
        measured = [name for name in again[0] if name.startswith(("test_", "train_", "total_", "proven_"))]
        assert {"train_loss", "test_auc", "test_balanced_accuracy_worst_node"} <= {*measured}
        for one, other in zip(again, chosen, strict=True):
            assert {name: one[name] for name in measured} == {name: other[name] for name in measured}
        wanted = rf"│ {budget} +│ together +│ step {best:g}\* +│ +{100 * np.mean(means[best]):.1f}"
        assert re.search(wanted, printed.replace("\xa0", " ")), printed
    assert "no ε pays for that choice" in printed
    assert (folder / "run" / "plots" / "plan.png").stat().st_size > 10_000
    assert plan([*words, "--resume"]) == 0
    assert printed.rpartition("What accuracy")[2] == capsys.readouterr().out.rpartition("What accuracy")[2]
    page = write_report([folder / "run"], folder / "report.html").read_text()
    own, levels = summary["table"], [["none", "alone"], ["none", "without noise"]]
    assert [row[:2] for row in own["rows"]] == [["1", "together"], ["8", "together"], *levels]
    assert page.index(own["notes"][0]) < page.index(">Results<"), "the plan's own table stands first"
    assert all("".join(f"<td>{cell}</td>" for cell in row) in page for row in own["rows"])
    sites = read_results(folder / "run" / "sites.csv")
    assert {"test_balanced_accuracy", "test_auc", "test_accuracy_alone"} <= {*sites[0]}
    own = {row["site"]: row["noise_std"] for row in sites if row["case"].startswith("PrivSGP, ε = 1, step 1")}
    assert sorted(own, key=lambda site: own[site]) == ["s2", "s1", "s3", "s4", "s0"]  # the largest has the least
    (named,) = [note for note in summary["table"]["notes"] if note.startswith("worst site")]
    means = {}
    for row in sites:
        means.setdefault(row["case"], {}).setdefault(row["site"], []).append(row["test_accuracy"])
    of_case = {case: min(each, key=lambda site: np.mean(each[site])) for case, each in means.items()}
    for budget, how, step, *_ in summary["table"]["rows"]:
        is_private = how == "together"
        case = f"PrivSGP, ε = {budget}, {step}" if is_private else f"PrivSGP, {step}, {how.replace(' ', '_')}"
        place = f"{how} at ε = {budget}" if is_private else how
        assert re.search(rf"{of_case[case.replace('*', '')]} \([^)]*{place}", named), named


def test_its_words_for_rows_are_those_of_baselines():
    """One word for one thing: `--baselines`, files, and the table."""
    assert {name: how for name, how in _HOW.items() if how != name.replace("_", " ")} == {"": "together"}
    assert {*_HOW} == {"", *BASELINES}


def test_without_a_file_it_says_for_which_data_it_plans_and_how_to_give_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--epsilon 8 --step-size 0.1 --iterations 2 --seeds 0 --hidden 2 --nodes 2 --baselines alone --quiet"
    assert main(PLAN, arguments_of(words.split())) == 0, capsys.readouterr()
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "jaxfl plan FILE" in line]
    assert "data set digits" in said
    assert "--label-column" in said


def test_a_private_selection_pays_for_the_step(folder, capsys):
    words = "--epsilon 3 --private-selection geometric --num-samples 2 --iterations 3 --hidden 4".split()
    assert plan([*words, "--dp-delta", "1e-6"]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    assert "The choice is paid for" in printed
    assert "no ε pays" not in printed


def test_budgets_of_sites_take_the_place_of_the_ladder_of_budgets(folder, capsys):
    (folder / "budgets.csv").write_text("site,epsilon\n" + "".join(f"s{k},{k + 1}\n" for k in range(5)))
    words = "--node-epsilons budgets.csv --step-size 0.3 1 --iterations 3 --seeds 0 --hidden 4 --baselines alone"
    assert plan([*words.split(), "--out", "run", "--rank-by", "test_auc_worst_node"]) == 0, capsys.readouterr()
    printed, rows = capsys.readouterr().out, read_results(folder / "run")
    own = {row["step_size"]: row["test_auc_worst_node"] for row in rows if row["baseline"] is None}
    assert sorted(own) == [0.3, 1]
    best = max(own, key=lambda step: own[step])
    assert re.search(rf"│ 5 +│ together +│ step {best:g}\*", printed)
    assert re.search(rf"jaxfl privsgp_vr .*--node-epsilons budgets.csv .*--step-size {best:g}", printed)


@pytest.mark.parametrize("dp_epsilon", [0.0, 0.5, 3.0])
def test_the_guess_is_that_of_randomized_response(dp_epsilon):
    """A bit that is told truthfully with chance e^ε / (1 + e^ε) is ε-private, and is guessed right that often."""
    assert best_guess(dp_epsilon, 0.0) == pytest.approx(np.exp(dp_epsilon) / (1 + np.exp(dp_epsilon)))
    assert best_guess(dp_epsilon, 0.1) == pytest.approx(0.9 * best_guess(dp_epsilon, 0.0) + 0.1)


@pytest.mark.slow
def test_fifty_unequal_sites_are_good_at_epsilon_three(tmp_path, monkeypatch, capsys):
    """One noise for all gives 74.7 with 58.6 at the worst site there."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path, np.geomspace(60, 2458, 50).round().astype(int))
    words = "--graph roads.csv --epsilon 3 --step-size 0.03 0.1 0.3 --seeds 1 --out run"
    assert plan(words.split()) == 0, capsys.readouterr()
    rows = [row for row in read_results(tmp_path / "run") if row["baseline"] is None]
    best = max(rows, key=lambda row: row["test_accuracy"])
    assert {row["step_size"] for row in rows} < {*STEPS}
    assert best["test_accuracy"] > 0.8
    assert best["test_accuracy_worst_node"] > 0.72
    assert best["test_auc_worst_node"] > 0.8
