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
    if page.stem != "similarity":  # whose files hold no revision
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


def best_curves(name, value):
    """The step with the largest mean of a value over seeds, and its curves: seed -> round -> accuracy."""
    folder, steps = RESULTS / "embracing_fl", {}
    options = json.loads((folder / f"{name}_config.json").read_text())["config"]
    for line in (folder / f"{name}_metrics.jsonl").read_text().splitlines():
        one = json.loads(line)
        step = options["cases"][one["case"]].get("step_size", options["step_size"])
        steps.setdefault(str(step), {}).setdefault(str(one["seed"]), {})[one["round"]] = one["test_accuracy"]
    return max(steps.items(), key=lambda item: np.mean([value(curve) for curve in item[1].values()]))


def test_the_leads_and_rounds_of_embracing_fl_are_those_of_its_curves():
    """Each method with its best step of a case; a seed's target is the lower of the best evaluations."""
    runs = {
        "4 strong, 28 weak": {
            **{"EmbracingFL": "emb_c7", "width reduction": "wid_c7"},
            **{"width reduction, masked loss": "msk_c7", "FjORD": "ord_c7"},
        },
        "4 strong, 28 moderate": {"EmbracingFL": "emb_c4", "width reduction": "wid_c4"},
    }
    values = {"end": lambda curve: curve[100], "best": lambda curve: max(curve.values())}
    leads = rows_of("embracing_fl", "leads_results")
    assert {(row["clients"], row["rival"]) for row in leads} == {
        (clients, rival) for clients, methods in runs.items() for rival in [*methods][1:]
    }
    for row in leads:
        for which, value in values.items():
            methods = runs[row["clients"]]
            (step, first), (other, second) = (
                best_curves(methods[method], value) for method in ("EmbracingFL", row["rival"])
            )
            assert (row[f"step_{which}"], row[f"rival_step_{which}"]) == (step, other)
            lead = value(first[row["seed"]]) - value(second[row["seed"]])
            assert float(row[f"test_accuracy_lead_{which}"]) == pytest.approx(lead, abs=1e-6)
    rounds = rows_of("embracing_fl", "rounds_results")
    for clients, methods in runs.items():
        own = {method: best_curves(names, values["best"])[1] for method, names in [*methods.items()][:2]}
        seeds = set.intersection(*({*curves} for curves in own.values()))
        of_case = [row for row in rounds if row["clients"] == clients]
        assert {(row["method"], row["seed"]) for row in of_case} == {(method, seed) for method in own for seed in seeds}
        for row in of_case:
            target = min(values["best"](curves[row["seed"]]) for curves in own.values())
            reached = [k for k, accuracy in own[row["method"]][row["seed"]].items() if accuracy >= target]
            assert (row["target"], row["rounds_to_target"]) == (f"{100 * target:.1f} %", str(min(reached)))


def rows_of(page, name):
    with open(RESULTS / page / f"{name}.csv", newline="") as lines:
        return list(csv.DictReader(lines))


def test_ali_dpfl_with_one_kappa_is_ahead_of_one_fixed_tau_by_what_its_page_says():
    accuracy = {
        (float(row["round_ratio"]), float(row["target_epsilon"]), row["kappa"] or row["local_steps"]): row
        for row in rows_of("ali_dpfl", "tables_results")
    }
    columns = [(0.5, 2.0), (0.5, 2.25), (0.5, 2.5), (0.2, 2.75), (0.2, 3.25), (0.2, 3.75)]
    page = (RESULTS / "ali_dpfl" / "README.md").read_text()
    names = {"tau = 1": "111111", "tau = 3": "333333", "tau = 5": "555555", "the best tau of each column": "222555"}
    for name, taus in names.items():
        pairs = [(accuracy[*at, "1000000.0"], accuracy[*at, tau]) for at, tau in zip(columns, taus, strict=True)]
        ahead = [100 * (float(ali["test_accuracy"]) - float(fixed["test_accuracy"])) for ali, fixed in pairs]
        cells = [f"{value:+.2f}".replace("-", "−") for value in (*ahead, np.mean(ahead))]
        assert f"| {name} | {' | '.join(cells)} ± {np.std(ahead, ddof=1) / 6**0.5:.2f} |" in page
    for at, tau in zip(columns, "222555", strict=True):
        fixed = {key[2]: row["test_accuracy"] for key, row in accuracy.items() if key[:2] == at and row["local_steps"]}
        assert max(fixed, key=lambda key: fixed[key]) == tau


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
