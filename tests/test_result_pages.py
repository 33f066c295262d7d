"""Result pages name their commits and files; `test_results_report.py` compares their tables with these."""

import csv
import functools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import dzofl
from experiments.dp_gradient_tracking import EXPERIMENT, budgets
from jaxfl.frame.command_line import parse

RESULTS = Path(__file__).parent.parent / "experiments" / "results"


@pytest.mark.parametrize("folder", sorted({page.parent for page in RESULTS.glob("*/*.md")}), ids=lambda one: one.name)
def test_pages_name_the_commits_at_which_their_commands_give_their_numbers(folder):
    """Random numbers change with the way in which keys are made."""
    named = [set(re.findall(r"\b[0-9a-f]{7}\b", page.read_text())) for page in folder.glob("*.md")]
    assert all(named)
    configurations = [json.loads(path.read_text()) for path in folder.glob("*_config.json")]
    assert {one["environment"]["git_revision"][:7] for one in configurations} <= set().union(*named)


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*/*.md")), ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_picture_is_made_by_report_or_has_the_configuration_of_its_run_beside_it(page):
    lines = page.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        for name in re.findall(r"^!\[.*\]\((\w+)\.png\)", line):
            has_run = (page.parent / f"{name}_config.json").exists()
            assert (page.parent / f"{name}.png").exists(), name
            assert above.startswith("<!-- picture ") or has_run or name == "spanning_tree", name


def test_the_list_of_figures_and_tables_is_whole_and_its_files_are_there():
    text = (RESULTS / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 46 + 1  # and section III of DZOFL's paper
    for item, preset, mark, files, remark in rows:
        assert mark in ("at size", "reduced", "in part, reduced", "modelled", "not run", "–"), item
        assert remark if mark != "at size" else files or "counted" in remark, item
        assert mark.endswith("reduced") <= bool(files), item
        assert preset or mark == "–", item
        for file in re.findall(r"\]\((.+?)\)", files):
            assert (RESULTS / file).is_file(), item


def test_the_page_on_trust_has_the_numbers_of_its_runs():
    """The short table of docs/trust.md: each cell is that of the result page, which is made from files."""
    rows = {
        line.split("|")[1].strip(): line
        for line in (RESULTS / "trust" / "README.md").read_text().splitlines()[::-1]
        if line.startswith("| ")
    }  # of equal heads the first on the page
    named = {
        "everyone | 1": "1",
        "everyone | 4": "4",
        "pairs, one colludes | 1": "1, 1",
        "pairs, one colludes | 4": "4, 1",
        "a curator": "curator",
    }
    table = (RESULTS.parents[1] / "docs" / "trust.md").read_text().partition("## What it brings")[2]
    seen = 0
    for line in table.splitlines():
        for start, head in named.items():
            if line.startswith(f"| {start}"):
                numbers = re.findall(r"(?<=\| )\d+\.\d(?= \|)", line)
                assert numbers == re.findall(r"(?<=\| )\d+\.\d(?= ±)", rows[head])
                seen += len(numbers)
    assert seen == 15


def test_what_is_said_of_the_steps_of_methods_is_in_their_tables():
    """Numbers of the sentences come from files; these have none."""
    tables = {name: rows_of("methods", f"{name}_methods") for name in ("digits", "mnist")}
    (fewest,) = {row["equal_bits"] for row in tables["digits"]}
    assert [row["method"] for row in tables["digits"] if row["bits"] == fewest] == ["CHOCO-SGD"]
    largest = rows_of("methods", "mnist_step_1_results")
    for best in tables["mnist"]:
        own = [float(row["test_accuracy"] or 0) for row in largest if row["method"] == best["method"]]
        assert np.mean(own) < float(best["test_accuracy"]), best["method"]
    assert {row["method"] for row in tables["digits"] if row["step_size"] == "0.1"} == {"DIGing"}


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


def test_embracing_fl_leads_with_each_seed_of_four_cases_at_2000_steps():
    ours, rival = (
        {(row["case"].split()[1], row["seed"]): float(row["test_accuracy"]) for row in rows_of("embracing_fl", name)}
        for name in ("emb_2000_results", "wid_2000_results")
    )
    assert {*ours} == {*rival} == {(case, seed) for case in "4679" for seed in "012"}
    assert all(ours[key] > rival[key] for key in ours)


def rows_of(page, name):
    with open(RESULTS / page / f"{name}.csv", newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_leads_of_ali_dpfl_are_differences_of_its_results():
    columns = [(0.5, 2.0), (0.5, 2.25), (0.5, 2.5), (0.2, 2.75), (0.2, 3.25), (0.2, 3.75)]
    accuracy = {}  # column, tau or 0 for ALI-DPFL, step size, seed
    for name in ("own", "limited"):
        for row in rows_of("ali_dpfl", f"{name}_results"):
            at = float(row["round_ratio"]), float(row["target_epsilon"])
            tau = int(row["local_steps"]) if row["method"] == "DPFL" else 0
            key = at, tau, float(row["step_size"]) if name == "own" else 10.0, row["seed"]
            accuracy[key] = 100 * float(row["test_accuracy"])
    rows = rows_of("ali_dpfl", "lead_results")
    for setting, minus, seed in dict.fromkeys((row["setting"], row["minus"], row["seed"]) for row in rows):
        leads = []
        for at in columns:
            own = {key: value for key, value in accuracy.items() if (key[0], key[2]) == (at, 10.0)}
            means = {
                tau: np.mean([value for key, value in own.items() if key[1] == tau])
                for tau in dict.fromkeys(key[1] for key in own if key[1])
            }
            best, follows = max(means, key=lambda tau: means[tau]), round(1 / at[0])
            tau = {"the best tau of each column": best, "tau = R_c / R_s": follows}.get(minus)
            words = minus.split()
            tau = int(words[2]) if tau is None else tau
            of_fixed = float(words[5]) if setting == "own steps" else 10.0
            leads.append(own[at, 0, 10.0, seed] - accuracy[at, tau, of_fixed, seed])
        written = [row for row in rows if (row["setting"], row["minus"], row["seed"]) == (setting, minus, seed)]
        assert [row["target_epsilon"] for row in written] == [*(str(at[1]) for at in columns), "all six"]
        expected = [*leads, np.mean(leads)]
        assert [100 * float(row["test_accuracy_lead"]) for row in written] == pytest.approx(expected, abs=6e-3)


def cumulative_budgets():
    """(scheme, method, weights, bound) -> the epsilon of iterations 0 to 2,000, at the noise of figure 8's paper."""
    curves, both = {}, "noisy-states, noisy-quantized-states"
    for weights in ("0.01", "1"):
        line = f"--preset fig8 --noise-gain 1 --edge-weight {weights}"
        for row in parse(EXPERIMENT, line.split())[0].rows.values():
            learning = row.config.learning
            names = {"noisy-states": both, "noisy-quantized-states": both}
            own = learning.scheme, names.get(learning.method, learning.method)
            if learning.method == "DP-GT":
                curves[*own, weights, "published"] = budgets.published(row.config)
                curves[*own, weights, "proven"] = budgets.proven(row.config)
            elif row.config.is_noisy:
                bounds = "reconstructed, proven" if learning.method == "noisy-outputs" else "reconstructed"
                np.testing.assert_array_equal(budgets.published(row.config), budgets.proven(row.config))
                curves[*own, "", bounds] = budgets.published(row.config)
            elif learning.method == "ternary-states":  # delta is 1 from the iteration on that the page names
                assert np.argmax(budgets.deltas(row.config) >= 1) == {"S1": 8, "S2": 6}[learning.scheme]
    return curves


def test_the_budgets_of_gradient_trackings_figure_8_are_the_formulas():
    rows, curves = rows_of("dp_gradient_tracking", "fig8_budgets_results"), cumulative_budgets()
    keys = [(row["scheme"], row["method"], row["weights"], row["bound"]) for row in rows]
    assert set(keys) == set(curves)
    for key, row in zip(keys, rows, strict=True):
        expected = float(curves[key][int(row["iteration"])])
        assert float(row["cumulative_dp_epsilon"]) == pytest.approx(expected, rel=1e-6)


def test_what_is_said_of_the_step_of_s1_is_in_its_curves():
    """On its page and in docs/dp_gradient_tracking.md."""
    values = {}
    for line in (RESULTS / "dp_gradient_tracking" / "digits_s1_metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        values.setdefault((entry["case"], entry["round"]), []).append(100 * entry["test_accuracy"])
    formula, default = (
        [f"{np.mean(values[f'DP-GT, step size {step}', k]):.1f}" for k in (100, 200)] for step in (0.497851, 0.3)
    )
    page = " ".join((RESULTS / "dp_gradient_tracking" / "README.md").read_text().split())
    falls = f"falls from {formula[0]} % after 100 iterations to {formula[1]} % after 200"
    assert falls in page
    assert f"it is {default[0]} and {default[1]} %" in page
    assert falls in " ".join((RESULTS.parent.parent / "docs" / "dp_gradient_tracking.md").read_text().split())


COSTS = ("rounds", "step_size", "joules", "seconds", "charged_joules", "charged_seconds")
SLOT = 0.125e-3
SETTING = ("method", "num_active", "lost", "transmit_dbm", "path_loss_db", "uplink_bits_per_second")


def reached(name):
    """For each setting of a run of DZOFL's page and each accuracy: the first round at whose evaluation the mean over
    seeds has the accuracy, by the step that does so first (of equals the first in the file), and the costs so far."""
    given = json.loads((RESULTS / "dzofl" / f"{name}_config.json").read_text())["config"]
    key = "case" if "case" in rows_of("dzofl", f"{name}_costs")[0] else "variant"  # in runs of older commits
    charged = {row[key]: row for row in rows_of("dzofl", f"{name}_costs") if row["reading"] == "published"}
    rows = {row[key]: {**given, **row, "charged": charged[row[key]]} for row in rows_of("dzofl", f"{name}_results")}
    values = {}
    for line in (RESULTS / "dzofl" / f"{name}_metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        values.setdefault((entry["round"], list(rows).index(entry[key])), []).append(entry)
    actual = {}
    for (number, place), own in sorted(values.items()):
        row = list(rows.values())[place]
        setting = {option: str(row["nodes"] if row.get(option) is None else row[option]) for option in SETTING}
        setting |= {"lost": ""} if row["method"] == "DZOFL" else {}  # which does without what is lost
        step = float(row["step_size" if row["method"] == "DZOFL" else "sgd_step_size"])
        for accuracy in (0.98, 0.99):
            if np.mean([entry["test_accuracy"] for entry in own]) >= accuracy:
                mean = [np.mean([entry[f"total_{key}"] for entry in own]) for key in ("joules", "simulated_seconds")]
                joules = sum(float(row["charged"][f"{part}_joules"]) for part in ("computing", "sending"))
                costs = [*mean, number * joules, number * float(row["charged"]["seconds"])]
                actual.setdefault((*setting.values(), str(accuracy)), [number, step, *costs])
    return actual


def test_the_costs_to_an_accuracy_of_dzofls_page_are_those_of_its_curves():
    rows = rows_of("dzofl", "reached_results")
    for name in {row["run"] for row in rows}:
        actual = reached(name)
        own = [row for row in rows if row["run"] == name]
        assert len(own) == len(actual)
        for row in own:
            values = actual[*(row[option] for option in SETTING), row["accuracy"]]
            np.testing.assert_allclose([float(row[key]) for key in COSTS], values, rtol=1e-5)


def test_what_is_said_of_dzofls_default_run_is_in_its_curves():
    """On its page, in README and in docs/dzofl.md."""
    values = {}
    for line in (RESULTS / "dzofl" / "digits_metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        values.setdefault((entry["case"], entry["round"]), []).append(entry)
    costs = {}
    for row in rows_of("dzofl", "reached_digits_results"):
        means = {
            k: np.mean([e["test_accuracy"] for e in own]) for (case, k), own in values.items() if case == row["method"]
        }
        first = min(k for k, mean in means.items() if mean >= float(row["accuracy"]))
        own = values[row["method"], first]
        names = ("total_bits_sent", "total_joules", "total_simulated_seconds")
        expected = [first, *(np.mean([entry[name] for entry in own]) for name in names)]
        actual = [
            float(row[name]) * unit for name, unit in (("rounds", 1), ("Mbit", 1e6), ("joules", 1), ("seconds", 1))
        ]
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        costs[row["accuracy"], row["method"]] = np.array(actual[1:])
    loose, tight = (costs[level, "FedAvg"] / costs[level, "DZOFL"] for level in ("0.95", "0.97"))
    page = " ".join((RESULTS / "dzofl" / "README.md").read_text().split())
    assert f"97 % DZOFL sends {tight[0]:.0f} times fewer bits, and takes {1 / tight[1]:.1f} times the joules" in page
    assert f"and {1 / tight[2]:.1f} times the seconds. At 95 % it sends {loose[0]:.0f} times fewer bits" in page
    assert f"takes {loose[1]:.1f} times less energy and {loose[2]:.1f} times less time" in page
    root = RESULTS.parent.parent
    assert (
        f"97 % with {tight[0]:.0f} times fewer bits than FedAvg, and twice its joules"
        in (root / "README.md").read_text()
    )
    text = " ".join((root / "docs" / "dzofl.md").read_text().split())
    said = {}
    for key, (bits, joules, seconds) in costs.items():
        size = f"{bits / 1e3:.0f} kbit" if bits < 1e6 else f"{bits / 1e6:.1f} Mbit"
        said[key] = f"{size}, {joules:.2f} J and {seconds:.2f} s"
    assert f"after {said['0.95', 'DZOFL']} of DZOFL, and after {said['0.95', 'FedAvg']} of FedAvg" in text
    assert f"To 97 % DZOFL needs {said['0.97', 'DZOFL']}: {tight[0]:.0f} times fewer bits" in text


def seconds_to(accuracy, size="full", rounds=None):
    """Two functions of operations, uplink and downlink bits a second: DZOFL's and FedAvg's seconds to an accuracy on
    images of 28x28 (full) or 14x14 (half), by the formulas of the page; and the operations at which they are level."""
    config = json.loads((RESULTS / "dzofl" / f"{size}_config.json").read_text())["training"]
    cases = config.get("cases") or config["variants"]
    forward = next(iter(cases.values()))["ledger"]["forward_operations"]
    bits = 16 * {"full": 45_362, "half": 40_322}[size]
    setting = ("23.0", "128.1", "10000000.0", accuracy)
    zero, first = rounds or (
        reached(size)["DZOFL", "50", "", *setting][0],
        reached(f"{size}_fedavg")["FedAvg", "50", "resend", *setting][0],
    )

    def zero_order(operations, uplink, downlink):
        return zero * (20 * forward / operations + SLOT * (1 + (downlink < math.inf)))

    def fed_avg(operations, uplink, downlink):
        return first * (30 * forward / operations + bits / (smallest(uplink) * uplink) + 2 * bits / downlink)

    def level(uplink, downlink):
        waits = [seconds(math.inf, uplink, downlink) for seconds in (zero_order, fed_avg)]
        return forward * (20 * zero - 30 * first) / (waits[1] - waits[0])

    return zero_order, fed_avg, level


@functools.cache
def smallest(uplink):
    """The smallest probability among the 50 devices that a message arrives at a rate."""
    line = f"--dataset fashion_mnist --method FedAvg --uplink-bits-per-second {uplink}"
    (row,) = parse(dzofl.EXPERIMENT, line.split())[0].rows.values()
    return float(row.config.success().min())


def test_the_times_of_dzofl_and_fed_avg_are_equal_where_its_page_says():
    of_accuracy = {accuracy: seconds_to(accuracy) for accuracy in ("0.98", "0.99")}
    for row in rows_of("dzofl", "breakeven_results"):
        at = float(row["operations_per_second"]), 1e6 * float(row["uplink"]), 10e6
        zero, first, _ = of_accuracy[row["accuracy"]]
        assert float(row["ratio"]) == pytest.approx(zero(*at) / first(*at), rel=1e-4)
    for row in rows_of("dzofl", "level_results"):
        uplink = 1e6 * float(row["uplink"])
        assert float(row["smallest probability"]) == pytest.approx(smallest(uplink), rel=1e-3)
        for accuracy, (*_, level) in of_accuracy.items():
            for name, downlink in (("D = 10", 10e6), ("D = R", uplink), ("D free", math.inf)):
                column = f"{100 * float(accuracy):.0f} %: {name}"
                assert 1e9 * float(row[column]) == pytest.approx(level(uplink, downlink), rel=1e-3)


def test_the_levels_of_single_seeds_are_those_of_the_curves():
    """At the steps that the mean over seeds chooses."""
    cases = {"DZOFL": "DZOFL, smoothing 1, step size 2", "FedAvg": "FedAvg, sgd step size 0.01"}
    for row in rows_of("dzofl", "level_seeds_results"):
        rounds = []
        for method, suffix in (("DZOFL", ""), ("FedAvg", "_fedavg")):
            lines = (RESULTS / "dzofl" / f"{row['draw']}{suffix}_metrics.jsonl").read_text().splitlines()
            own = (json.loads(line) for line in lines)
            own = [one for one in own if cases[method] in one.values() and str(one["seed"]) == row["seed"]]
            rounds.append(min(one["round"] for one in own if one["test_accuracy"] >= float(row["accuracy"])))
        level = seconds_to(row["accuracy"], rounds=rounds)[2](10e6, 10e6)
        assert float(row["level"]) == pytest.approx(level / 1e9, rel=1e-3)


def test_the_numbers_of_readme_are_those_of_the_pages_rounded():
    readme = " ".join((RESULTS.parents[1] / "README.md").read_text().split())
    study = (RESULTS / "comparison" / "README.md").read_text()
    match = re.search(r"they reach (\d+) % where .*?, (\d+) % if they mix .*?, and (\d+) % if .*? has (\d+) %", readme)
    assert match is not None
    rows = ("PrivSGP, everyone, 1", "PrivSGP, everyone, 4", "PrivSGP, pairs, 4", "PrivSGP, curator")
    observers = study[study.index("<!-- table study_observers ") :]
    for row, number in zip(rows, match.groups(), strict=True):
        cells = next(line for line in observers.splitlines() if line.startswith(f"| {row} |")).split("|")
        assert round(float(cells[3].split(" ±")[0])) == int(number), row  # the column of epsilon 3
    mnist = study[study.index("<!-- table study_mnist ") :]
    own = ("DPFL, everyone", "PrivSGP, everyone, 1", "each node by itself")
    for row, words in zip(own, ("with DPFL", "with PrivSGP", "each by itself"), strict=True):
        cells = next(line for line in mnist.splitlines() if line.startswith(f"| {row} |")).split("|")
        assert f"{cells[3].split(' (')[0].strip()} % {words}" in readme
