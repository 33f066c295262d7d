"""Every number that a person sees of a run is found in its records by another way than the one that printed it.

Metrics come from the lines of metrics.jsonl and, node by node, from the parameters in final/; epsilons from the toy's
formula and the options of config.json; sizes of sites from the data.
"""

import contextlib
import html.parser
import io
import itertools
import json
import re
import secrets
import shlex
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors
from helpers import leave_undrawn
from printed_experiment import EXPERIMENT, FRAGILE, LARGE, SITES, SIZES, epsilon_of
from run_files import run_lines
from toy_problem import toy_data

from jaxfl.analysis import report
from jaxfl.analysis.page_tables import Directive, table
from jaxfl.core.outputs import varying
from jaxfl.frame import flat, main
from jaxfl.frame.command_line import parse
from jaxfl.privacy.selection import selected_epsilon, selection
from jaxfl.training import load_params, read_results

COMMANDS = {
    "sweep": "--noise 0.4 --grid step_size=0.01,0.02,0.04,0.03,100 --seeds 3 1 --baselines without_noise",
    "search": "--sample step-size=0.01:0.05 --num-samples 4 --private-selection geometric --seed-from-os --publish OUT",
}
METRICS = {  # how headings begin
    "test accuracy": "test_accuracy",
    "test accuracy worst node": "test_accuracy_worst_node",
    "worst node": "test_accuracy_worst_node",
    "test accuracy average model": "test_accuracy_average_model",
    "average model": "test_accuracy_average_model",
    "test loss": "test_loss",
    "train loss": "train_loss",
    "training loss": "train_loss",
}
COSTS = {"bits sent": "total_bits_sent", "simulated time": "total_simulated_seconds", "energy": "total_joules"}
ACCURACY, JOULES, DP_DELTA = "test_accuracy", "total_joules", 1e-5
NUMBER = re.compile(r"(?<![\w.])-?(\d+)(?:\.(\d+))?(?:e([-+]\d+))?(?:\s?([kMGmµ])(?=$|bit|s|J))?")
PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "m": 1e-3, "µ": 1e-6, "": 1.0}


def says(text, values, *, up=False):
    """The numbers in a text are these, to the digits that it has; with `up` they are not below them."""
    actual = [match for match in NUMBER.finditer(text.replace("\xa0", " "))]
    assert len(actual) == len(values), (text, values)
    for match, value in zip(actual, values, strict=True):
        _, decimals, power, prefix = match.groups()
        scale = PREFIXES[prefix or ""] * 10.0 ** int(power or 0)
        number, unit = float(match[0].rstrip("kMGmµ ").partition("e")[0]) * scale, scale * 10.0 ** -len(decimals or "")
        low, high = (-1e-9, 1.0) if up else (-0.500001, 0.500001)
        assert low * unit <= number - value <= high * unit, (text, value)


def over_seeds(values):
    """Mean and sample deviation, as a cell has them."""
    known = [value for value in values if value is not None]
    return [] if not known else [np.mean(known)] if len(known) == 1 else [np.mean(known), np.std(known, ddof=1)]


class Page(html.parser.HTMLParser):
    """Tables of a page by their sections, cell by cell, and the items of its lists."""

    def __init__(self, text):
        super().__init__()
        self.section, self.tables, self.summaries, self.items = "", {}, [], []
        self._into: Any = None  # the list that text goes into
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.setdefault(self.section, []).append([])
        elif tag == "tr":
            self.tables[self.section][-1].append([])
        elif tag in ("td", "th"):
            self._into = self.tables[self.section][-1][-1]
        elif tag in ("h2", "li", "summary"):
            self._into = {"h2": [], "li": self.items, "summary": self.summaries}[tag]
        else:
            return
        if self._into is not None:
            self._into.append("")

    def handle_endtag(self, tag):
        if tag == "h2":
            self.section = self._into[-1]
        if tag in ("td", "th", "h2", "li", "summary"):
            self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data


def printed_tables(lines):
    """Tables on the screen, cell by cell."""
    tables = []
    for line in lines:
        if line.startswith("┏"):
            tables.append([])
        elif line[:1] in ("┃", "│"):
            tables[-1].append([cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]])
    return tables


@pytest.fixture(scope="session", params=COMMANDS)
def ran(request, tmp_path_factory):
    """A run, its records, and what was printed of it."""
    folder = tmp_path_factory.mktemp(request.param)
    words = f"{COMMANDS[request.param].replace('OUT', str(folder / 'published'))} --out {folder / 'run'} --quiet"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as screen:
        leave_undrawn(patch)
        patch.setattr(report, "_svg", lambda chart: "")
        patch.setattr(secrets, "randbits", lambda bits: 5)  # of which three runs are drawn
        patch.setattr(secrets, "token_hex", lambda size: "0123456789abcdef")
        patch.setenv("COLUMNS", "400")
        assert main(EXPERIMENT, words.split()) == 0
        page = report.write_report([folder / "run"], folder / "report.html").read_text()
    out, lines = folder / "run", run_lines(folder / "run")
    config = json.loads((out / "config.json").read_text())
    cases = {name: {**config["config"], **changes} for name, changes in config["config"]["cases"].items()}
    last = {(line["case"], line["seed"]): line for line in lines}
    for (name, seed), line in last.items():
        ended_early = "diverged" if seed == FRAGILE else "budget_spent"
        line["status"] = ended_early if cases[name]["step_size"] > LARGE else "finished"
    return SimpleNamespace(
        out=out,
        published=folder / "published",
        lines=[line.rstrip() for line in screen.getvalue().splitlines()],
        page=Page(page),
        config=config,
        cases=cases,
        baselines={name for name, options in cases.items() if not options["noise"]},
        last=last,
        is_search=request.param == "search",
    )


def ends(ran, name, metric) -> Any:
    """A metric of every seed at its end; None where it diverged."""
    own = [ran.last[name, seed] for seed in ran.cases[name]["seeds"]]
    return [None if line["status"] == "diverged" else line[metric] for line in own]


def epsilons(ran, name, factor=1, dp_delta=DP_DELTA, rounds=None) -> Any:
    """(seeds, sites), of a case after some rounds, by default all of its own; None without noise."""
    options = ran.cases[name]
    rounds = rounds or max(ran.last[name, seed]["round"] for seed in options["seeds"])
    if not options["noise"]:
        return None
    return np.array(
        [
            [factor * epsilon_of(rounds, (1 + i) * options["noise"], size, dp_delta) for i, size in enumerate(SIZES[s])]
            for s in options["seeds"]
        ]
    )


def paid(ran, factor):
    """The epsilon of the best of a random number of runs."""
    name = next(iter(ran.cases))
    return selected_epsilon(lambda delta: epsilons(ran, name, factor, delta).max(), selection("geometric", 4), DP_DELTA)


def winner(ran):
    """The best case that is no baseline."""
    means = {name: np.mean([v for v in ends(ran, name, "test_accuracy") if v is not None]) for name in ran.cases}
    return max(means.keys() - ran.baselines, key=means.__getitem__)


def site_accuracies(ran, name, seed):
    """(n,), of the parameters in final/ on the test samples; None without a file."""
    if ran.last[name, seed]["status"] == "diverged":
        return None
    params = load_params(ran.out, name, seed)
    _, inputs, labels = toy_data()
    logits = inputs @ params["kernel"] + params["bias"][:, None]
    return (logits.argmax(-1) == labels).mean(-1)


def percent(name, values):
    return [100 * value for value in values] if "accuracy" in name else values


def test_both_tables_of_cases(ran):
    on_screen, on_page = printed_tables(ran.lines)[0], ran.page.tables["Results"][0]
    settings = json.loads((ran.out / "summary.json").read_text())["cases"]
    columns, names = varying({name: row["settings"] for name, row in settings.items()})
    case_of = {tuple(cells): name for name, cells in names.items()}
    assert columns == (["step size"] if ran.is_search else ["step size", "baseline"])
    assert {*case_of.values()} == {*ran.cases}
    for heading, *rows in (on_screen, on_page):
        assert heading[: len(columns)] == columns
        assert {tuple(row[: len(columns)]) for row in rows} == {*case_of}
        for row in rows:
            cells, name = dict(zip(heading, row, strict=True)), case_of[tuple(row[: len(columns)])]
            statuses = [ran.last[name, seed]["status"] for seed in ran.cases[name]["seeds"]]
            costs = {cost: over_seeds(ends(ran, name, total))[:1] for cost, total in COSTS.items()}
            for title, cell in list(cells.items())[len(columns) :]:
                title = title.removesuffix(" (%)")
                if title in METRICS:
                    says(cell, percent(METRICS[title], over_seeds(ends(ran, name, METRICS[title]))))
                elif title in costs:
                    says(cell, costs[title])
                elif title == "nodes sent, time, energy":
                    says(cell, [*itertools.chain(*costs.values())])
                elif title == "rounds":
                    says(cell, [max(ran.last[name, seed]["round"] for seed in ran.cases[name]["seeds"])])
                elif title == "ε":
                    own = epsilons(ran, name)
                    price = ran.is_search and name == winner(ran)
                    says(cell, [] if own is None else [paid(ran, 1) if price else own.max()], up=True)
                elif title == "worst site":
                    each = [site_accuracies(ran, name, seed) for seed in ran.cases[name]["seeds"]]
                    means = np.mean([one for one in each if one is not None] or [np.zeros(len(SITES))], axis=0)
                    assert cell == (SITES[int(means.argmin())] if np.ptp(means) else "–")
                else:
                    assert title == "status"
                    assert ("diverged" in cell) == ("diverged" in statuses)
                    if on_screen[0] == heading and "diverged" in statuses:
                        says(cell, [statuses.count("diverged"), len(statuses)])


def test_statements_of_every_case(ran):
    privacy = json.loads((ran.out / "privacy.json").read_text())
    for name, options in ran.cases.items():
        texts = [line.removeprefix(f"{name}: ") for line in ran.lines if line.startswith(f"{name}: ")]
        if options["step_size"] > LARGE:
            note, _, stated = texts.pop().partition(": ")
            says(note, [max(ran.last[name, seed]["round"] for seed in options["seeds"])])
            assert stated in texts
        assert {*texts} <= {*ran.page.items}
        assert len(texts) == 3
        for factor, relation in ((1, "zero out one"), (2, "replace one")):
            own = epsilons(ran, name, factor)
            (text,) = [text for text in texts if " proven" in text and relation in text]
            assert text.startswith("no proven") == (own is None)
            if own is not None:
                epsilon, _, ground = text.partition(" proven")
                says(epsilon, [own.max(), np.median(own)], up=True)
                says(ground, [DP_DELTA, options["noise"]])
                (kept,) = [row for row in privacy[name] if row["neighboring_relation"][:4] == relation[:4]]
                np.testing.assert_allclose(kept["node_epsilons"], own)
                if not ran.is_search:  # what only one case rests on, with its name where others have the same epsilon
                    rest = f"step size {options['step_size']:g}"
                    assert sum(item in (rest, f"{name}: {rest}") for item in ran.page.items) == 2


def test_sites(ran):
    rows = {(row["case"], row["seed"], row["site"]): row for row in read_results(ran.out / "sites.csv")}
    assert len(rows) == len(ran.last) * len(SITES)
    for name, seed in ran.last:
        actual = site_accuracies(ran, name, seed)
        own, options = epsilons(ran, name), ran.cases[name]
        assert (actual is None) == (ran.last[name, seed]["status"] == "diverged")
        if actual is not None:
            assert actual.mean() == pytest.approx(ran.last[name, seed]["test_accuracy"], abs=1e-6)
            assert actual.min() == pytest.approx(ran.last[name, seed]["test_accuracy_worst_node"], abs=1e-6)
        for place, site in enumerate(SITES):
            row = rows[name, seed, site]
            assert row["samples"] == SIZES[seed][place]
            assert row["noise_std"] == ((1 + place) * options["noise"] or None)
            assert row["test_accuracy"] == (None if actual is None else pytest.approx(actual[place], abs=1e-6))
            expected = None if own is None else pytest.approx(own[options["seeds"].index(seed), place])
            assert row["dp_epsilon"] == expected
    shown = dict(zip(ran.page.summaries[-1 - len(ran.cases) : -1], ran.page.tables["Sites"], strict=True))
    assert {*shown} == {*ran.cases}
    heading = ["site", "samples", "ε", "noise", "test accuracy"]
    assert all(rows[0] == heading for rows in shown.values())
    tables = [(name, rows) for name, (_, *rows) in shown.items()]
    if not ran.is_search:
        tables.append((winner(ran), printed_tables(ran.lines)[1][1:]))
    for name, cells in tables:
        seeds, own, noise = ran.cases[name]["seeds"], epsilons(ran, name), ran.cases[name]["noise"]
        accuracies = [actual for seed in seeds if (actual := site_accuracies(ran, name, seed)) is not None]
        for place, (site, samples, epsilon, std, accuracy) in enumerate(cells):
            sizes, on_page = [SIZES[seed][place] for seed in seeds], "%" in accuracy
            assert site == SITES[place]
            says(samples, [np.mean(sizes)] if on_page else [min(sizes), max(sizes)])
            says(epsilon, [] if own is None else [own[:, place].max()], up=True)
            says(std, [(1 + place) * noise] if noise else [])
            says(
                accuracy, [100 * v for v in over_seeds([actual[place] for actual in accuracies])[: 1 if on_page else 2]]
            )


def test_final(ran):
    files = {path: safetensors.safe_open(path, "np").metadata() for path in (ran.out / "final").iterdir()}
    headers = [json.loads(metadata["jaxfl"]) for metadata in files.values()]
    actual = {(header["case"], header["seed"]): header["round"] for header in headers}
    assert actual == {lane: line["round"] for lane, line in ran.last.items() if line["status"] != "diverged"}
    assert all(header["nodes"] == list(SITES) for header in headers)


def test_results(ran):
    for row in read_results(ran.out):
        name, line = row["case"], ran.last[row["case"], row["seed"]]
        assert row["status"] == line["status"]
        assert all(row[metric] == value for metric, value in line.items() if metric not in ("round", "status"))
        assert row["step_size"] == (None if name in ran.baselines else ran.cases[name]["step_size"])
        if line["status"] == "diverged":  # at the end of the rounds in which it did
            assert f" to {row['rounds']} of {name}, seed {row['seed']}" in row["reason"]
        else:
            assert row["rounds"] == line["round"]
        own = epsilons(ran, name, rounds=row["rounds"])
        assert row["proven_dp_epsilon"] == (None if own is None else pytest.approx(own.max()))
        assert row["published_dp_epsilon"] is None
    (ran.out.parent / "page_results.csv").write_bytes((ran.out / "results.csv").read_bytes())
    directive: Any = Directive.parse(
        "<!-- table page rows=case columns=test_accuracy,proven_dp_epsilon,total_joules -->"
    )
    for line in table(directive, ran.out.parent)[2:]:
        name, accuracy, epsilon, joules = (cell.strip() for cell in line.strip("|").split(" |"))
        own = epsilons(ran, name)
        values = {of: [ran.last[name, seed][of] for seed in ran.cases[name]["seeds"]] for of in (ACCURACY, JOULES)}
        says(accuracy, percent(ACCURACY, over_seeds(values[ACCURACY])))
        says(epsilon, [] if own is None else [own.max()], up=True)
        says(joules, over_seeds(values[JOULES]))


def test_the_winner(ran):
    """Also where a baseline is better than all that are compared."""
    name, lines = winner(ran), ran.lines
    if not ran.is_search:
        assert np.mean(ends(ran, "without_noise", ACCURACY)) > np.mean(ends(ran, name, ACCURACY))
        (line,), compared = [line for line in lines if line.startswith("Best of")], ran.cases.keys() - ran.baselines
        says(line.replace(name, ""), [len(compared), *percent(ACCURACY, over_seeds(ends(ran, name, ACCURACY)))])
        assert f": {name} (" in line
        command = lines[lines.index(line) + 1]
        (again,) = parse(EXPERIMENT, shlex.split(command[command.index(" --") :]))[0].rows.values()
        saved = {key: value for key, value in flat(again.config).items() if key in ran.config["config"]}
        assert saved == {**{key: ran.cases[name][key] for key in saved}, "seed": again.config.run.seed}
        assert list(again.seeds) == ran.cases[name]["seeds"]
        return
    (line,) = [line for line in lines if line.startswith("Selected by")]
    says(line, [ran.cases[name]["step_size"], *percent(ACCURACY, ends(ran, name, ACCURACY))])
    after = lines[lines.index(line) + 1 :]
    before = [line for line in lines if line.startswith("the winner: ")]
    for factor, relation in ((1, "zero out"), (2, "replace")):
        for texts in (after, before):
            (text,) = [text for text in texts if relation in text]
            says(text.partition(" proven")[0], [paid(ran, factor)], up=True)
            says(text.partition(" proven")[2], [DP_DELTA, ran.cases[name]["noise"], 4])
    assert json.loads((ran.out / "summary.json").read_text())["selected"]["case"] == name
    content = json.loads((ran.published / "privacy.json").read_text())
    for key in (content["total"], content["cases"]["selected"]["privacy"]):
        assert [one["dp_epsilon"] for one in key] == [pytest.approx(paid(ran, factor)) for factor in (1, 2)]
    assert content["cases"]["selected"]["settings"] == {"step_size": ran.cases[name]["step_size"]}
    with np.load(ran.published / "parameters" / "selected" / "seed_0.npz") as arrays:
        for leaf, array in load_params(ran.out, name, 0).items():
            np.testing.assert_array_equal(arrays[leaf], array)


def test_options_and_environment(ran):
    differing, same = ran.page.tables["Differences of configuration"]
    for row in differing[1:]:
        cells = dict(zip(differing[0], row, strict=True))
        assert cells == {"case": row[0]} | {key: json.dumps(ran.cases[row[0]][key]) for key in differing[0][1:]}
    shared = dict(same[1:])
    assert shared.keys() | {*differing[0][1:]} == ran.config["config"].keys() - {"cases"}
    for key, text in shared.items():
        assert {json.dumps(options[key]).strip('"') for options in ran.cases.values()} == {text}
    (environment,) = ran.page.tables["How to run it again"]
    (command,) = [item for item in ran.page.items if item.startswith("run: ")]
    words = shlex.split(command.partition(" --")[2])
    again = parse(EXPERIMENT, ["--" + words[0], *words[1:]])[0].rows
    assert ran.is_search or again.keys() == ran.cases.keys()  # a search draws other values from its secret key
    assert dict(environment[1:]) == {key: str(value) for key, value in ran.config["environment"].items()}
