"""Result pages name their commits and files; `test_results_report.py` compares their tables with these."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

RESULTS = Path(__file__).parent.parent / "experiments" / "results"


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*/*.md")), ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_names_the_commits_at_which_its_commands_give_its_numbers(page):
    """Random numbers change with the way in which keys are made."""
    named = set(re.findall(r"\b[0-9a-f]{7}\b", page.read_text()))
    assert named
    if page.parent.name != "embracing_fl":  # whose files hold no revision
        configurations = [json.loads(path.read_text()) for path in page.parent.glob("*_config.json")]
        assert {one["environment"]["git_revision"][:7] for one in configurations} <= named


def test_the_list_of_figures_and_tables_is_whole_and_its_files_are_there():
    text = (RESULTS / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 46 + 1  # and section III of DZOFL's paper
    for item, preset, mark, files, remark in rows:
        assert mark in ("at size", "reduced", "not run", "–"), item
        assert remark if mark != "at size" else files or "counted" in remark, item
        assert (mark == "reduced") <= bool(files), item
        assert preset or mark == "–", item
        for file in re.findall(r"\]\((.+?)\)", files):
            assert (RESULTS / file).is_file(), item


def test_the_leads_of_privsgp_vr_are_differences_of_its_curves():
    folder = RESULTS / "privsgp_vr"
    settings = {
        "clipped, noise 0.1": "fig9",
        "unclipped, noise 0.1": "fig9_unclipped",
        "unclipped, no noise": "fig9_silent",
        "clipped, noise 0.1, batch 32": "fig9_batch32",
    }
    curves = {}
    for setting, name in settings.items():
        for line in (folder / f"{name}_metrics.jsonl").read_text().splitlines():
            one = json.loads(line)
            curves[setting, one["case"], one["seed"], one["round"]] = one
    with open(folder / "fig9_lead_results.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["setting"] for row in rows} == set(settings)
    for row in rows:
        at = int(row["seed"]), int(row["round"])
        reduced, plain = (curves[row["setting"], method, *at] for method in ("PrivSGP-VR", "PrivSGP"))
        for metric in ("test_accuracy", "test_accuracy_average_model"):
            assert float(row[f"{metric}_lead"]) == pytest.approx(reduced[metric] - plain[metric], abs=1e-8)


def rows_of(page, name):
    with open(RESULTS / page / f"{name}.csv", newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_leads_of_ali_dpfl_are_differences_of_its_results():
    columns = [(0.5, 2.0), (0.5, 2.25), (0.5, 2.5), (0.2, 2.75), (0.2, 3.25), (0.2, 3.75)]
    accuracy = {}  # network, column, tau or 0 for ALI-DPFL, step size, seed
    for network, name, step in (("MLP", "own", None), ("MLP", "limited", 10.0), ("CNN", "cnn", 5.0)):
        for row in rows_of("ali_dpfl", f"{name}_results"):
            at = float(row["round_ratio"]), float(row["target_epsilon"])
            if at in columns and (row["method"] == "DPFL" or float(row.get("kappa", 1e6)) == 1e6):
                tau = int(row["local_steps"]) if row["method"] == "DPFL" else 0
                key = network, at, tau, step or float(row["step_size"]), row["seed"]
                accuracy[key] = 100 * float(row["test_accuracy"])
    rows = rows_of("ali_dpfl", "lead_results")
    for setting, minus, seed in dict.fromkeys((row["setting"], row["minus"], row["seed"]) for row in rows):
        network, step = ("CNN", 5.0) if setting == "CNN, step 5" else ("MLP", 10.0)
        leads = []
        for at in columns:
            own = {key: value for key, value in accuracy.items() if key[:2] == (network, at) and key[3] == step}
            means = {
                tau: np.mean([value for key, value in own.items() if key[2] == tau])
                for tau in dict.fromkeys(key[2] for key in own if key[2])
            }
            best, follows = max(means, key=lambda tau: means[tau]), round(1 / at[0])
            tau = {"the best tau of each column": best, "tau = R_c / R_s": follows}.get(minus)
            words = minus.split()
            tau = int(words[2]) if tau is None else tau
            of_fixed = float(words[5]) if setting == "own steps" else step
            leads.append(own[network, at, 0, step, seed] - accuracy[network, at, tau, of_fixed, seed])
        written = [row for row in rows if (row["setting"], row["minus"], row["seed"]) == (setting, minus, seed)]
        assert [row["target_epsilon"] for row in written] == [*(str(at[1]) for at in columns), "all six"]
        expected = [*leads, np.mean(leads)]
        assert [100 * float(row["test_accuracy_lead"]) for row in written] == pytest.approx(expected, abs=6e-3)


def rounds_to(name, accuracy):
    """The least round at which the mean over seeds of some line of a run of DZOFL's page has an accuracy."""
    values = {}
    for line in (RESULTS / "dzofl" / f"{name}_metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        values.setdefault((entry["variant"].split(",")[0], entry["variant"], entry["round"]), []).append(entry)
    means = {key: np.mean([entry["test_accuracy"] for entry in own]) for key, own in values.items()}
    return {
        method: min((key[2] for key, mean in means.items() if key[0] == method and mean >= accuracy), default=None)
        for method in {key[0] for key in means}
    }


def test_the_times_of_dzofl_and_fed_avg_are_equal_where_its_page_says():
    page = (RESULTS / "dzofl" / "README.md").read_text()
    ratios, level = {}, []
    for size, accuracy in (("full", 0.98), ("full", 0.99), ("half", 0.98)):
        lines = json.loads((RESULTS / "dzofl" / f"{size}_config.json").read_text())["training"]["variants"]
        forward = next(iter(lines.values()))["ledger"]["forward_operations"]
        of_round = {
            row["variant"].split(",")[0]: float(row["seconds"])
            for row in rows_of("dzofl", f"{size}_costs")
            if row["reading"] == "counted"
        }
        zero, first = rounds_to(size, accuracy)["DZOFL"], rounds_to(f"{size}_fedavg", accuracy)["FedAvg"]
        assert zero is not None
        assert first is not None
        works = 20 * zero * forward, 30 * first * forward
        waits = zero * of_round["DZOFL"] - works[0] / 4e9, first * of_round["FedAvg"] - works[1] / 4e9
        level.append((works[0] - works[1]) / (waits[1] - waits[0]))
        for rate in (1e9, 2e9, 4e9, 6e9, 1e10, 2e10, 1e11):
            ratios.setdefault(rate, []).append((works[0] / rate + waits[0]) / (works[1] / rate + waits[1]))
    assert rounds_to("half", 0.99)["DZOFL"] is None
    for rate, own in ratios.items():
        name = f"{rate:.0e}".replace("e+0", "e").replace("e+", "e") + (", the default" if rate == 4e9 else "")
        assert f"| {name} | {' | '.join(f'{ratio:.2f}' for ratio in own)} |" in page
    assert "| level at | 6.14e9 | 1.07e10 | 3.20e8 |" in page
    np.testing.assert_allclose(level, [6.14e9, 1.07e10, 3.20e8], rtol=5e-3)
