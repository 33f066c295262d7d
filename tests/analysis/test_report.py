"""The report: one page that needs nothing else, and says what the run's files say."""

import html.parser
import json
import re

import pytest
from helpers import refused

from jaxfl.analysis.report import write_report

STATED = {
    "bound": "proven",
    "dp_epsilon": 2.0004,
    "dp_delta": 1e-5,
    "neighboring_relation": "zero_out",
    "assumptions": ["clipped at 1", "only B's"],
    "reason": None,
}


def _run(folder, cases=("A", "B"), name="run"):
    """A run directory of two seeds."""
    folder = folder / name
    (folder / "passes" / "0").mkdir(parents=True)
    (folder / "plots").mkdir()
    lines = [
        {"case": case, "seed": seed, "round": k, "test_accuracy": 0.1 * k + 0.02 * seed, "total_bits_sent": 1e6 * k}
        for case in cases
        for seed in (0, 1)
        for k in (0, 5, 9)
    ]
    (folder / "passes" / "0" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"status": ["finished"] * 2, "test_accuracy": {"mean": 0.91, "std": 0.014, "per_seed": [0.9, 0.92]}}
    stated = {case: [STATED | {"assumptions": STATED["assumptions"][: 1 + (case == "B")]}] for case in cases}
    rows = {case: row | {"privacy": stated[case]} for case in cases}
    (folder / "summary.json").write_text(json.dumps({"cases": rows}))
    nodes = {case: [{"node_epsilons": [[1.0, 2.0004], [1.5, 1.0]]}] for case in cases}
    (folder / "privacy.json").write_text(json.dumps(nodes))
    changed = {case: {"step_size": 0.1 * number, "seeds": [0, 1]} for number, case in enumerate(cases, start=1)}
    config = {"step_size": 0.5, "nodes": 2, "dataset": "digits", "cases": changed, "settled": {}}
    environment = {"jax": "1.2.3"}
    (folder / "config.json").write_text(json.dumps({"experiment": "toy", "config": config, "environment": environment}))
    (folder / "plots" / "budgets.png").write_bytes(b"\x89PNG budgets")
    (folder / "plots" / "training.png").write_bytes(b"\x89PNG curves")
    return folder


class _Checked(html.parser.HTMLParser):
    """Every tag is closed, and nothing is loaded from elsewhere."""

    empty = ("meta", "img")

    def __init__(self):
        super().__init__()
        self.open, self.loaded = [], []

    def handle_starttag(self, tag, attrs):
        self.loaded += [value for key, value in attrs if key in ("src", "href", "xlink:href") and value[:1] != "#"]
        if tag not in self.empty:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _page(*runs, to):
    page = write_report(runs, to / "report.html").read_text()
    checked = _Checked()
    checked.feed(page)
    assert not checked.open
    assert all(link.startswith("data:image/png;base64,") for link in checked.loaded)
    return page, checked.loaded


def test_a_page_says_what_the_files_say(tmp_path):
    page, loaded = _page(_run(tmp_path), to=tmp_path)
    for text in (
        "91.0 ± 1.4 %",
        "ε = 2.001 proven (zero out one sample",
        "2.001 proven",
        "9.00 M",
        "toy, digits",
        "1.2.3",
    ):
        assert text in page, text
    assert len(loaded) == 1  # budgets.png; the page draws the curves itself
    assert page.count("<svg") >= 3  # accuracy against rounds, bits and epsilon
    assert re.findall(r"<td>(\d)</td><td>([\d.]+)</td>", page) == [("0", "1.5"), ("1", "2.001")]  # largest over seeds


def test_what_all_statements_rest_on_stands_once(tmp_path):
    page, _ = _page(_run(tmp_path), to=tmp_path)
    assert page.count("clipped at 1") == 1
    assert page.count("only B&#x27;s") == 1


def test_options_that_differ_stand_apart_from_those_that_all_share(tmp_path):
    page, _ = _page(_run(tmp_path), to=tmp_path)
    assert "<th>case</th><th>step_size</th></tr>" in page
    assert "<td>A</td><td>0.1</td>" in page
    assert "<td>nodes</td><td>2</td>" in page


def test_cases_of_several_runs_stand_beside_each_other(tmp_path):
    page, _ = _page(_run(tmp_path, name="first"), _run(tmp_path, ("<A>",), name="second"), to=tmp_path)
    assert "second: &lt;A&gt;" in page
    assert "<A>" not in page
    assert "first: A" in page


@pytest.mark.parametrize("runs", [[], ["missing"]], ids=["none", "no run"])
def test_a_report_of_nothing_is_refused(tmp_path, runs):
    refused(lambda: write_report([tmp_path / name for name in runs], tmp_path / "report.html"), "run_dirs")
    assert not (tmp_path / "report.html").exists()
