"""The report: one page that needs nothing else. tests/training/test_printed.py finds its numbers in the records."""

import html.parser
import json
import re

import pytest
from helpers import refused

from jaxfl import command
from jaxfl.analysis.figures import write_figures
from jaxfl.analysis.html_parts import table_of
from jaxfl.analysis.report import write_report
from jaxfl.privacy.statements import ONE_RUN, SECRET, SIMULATED, UNPAID_CHOICE

STATED = {
    "bound": "proven",
    "dp_epsilon": 2.0004,
    "dp_delta": 1e-5,
    "neighboring_relation": "zero_out",
    "assumptions": ["clipped at 1", "only B's"],
    "reason": None,
}


def make_run(folder, cases=("A", "B"), name="run"):
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
    stated = {
        case: [STATED | {"dp_epsilon": 2.0004 + number, "assumptions": STATED["assumptions"][: 1 + (case == "B")]}]
        for number, case in enumerate(cases)
    }
    rows = {case: row | {"privacy": stated[case]} for case in cases}
    (folder / "summary.json").write_text(json.dumps({"cases": rows}))
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
        links = [value for key, value in attrs if key in ("src", "href", "xlink:href") and value]
        self.loaded += [value for value in links if value[0] != "#"]
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


def test_a_page_draws_the_curves_itself_and_takes_in_other_pictures(tmp_path):
    page, loaded = _page(make_run(tmp_path), to=tmp_path)
    assert len(loaded) == 1  # budgets.png
    assert page.count('<figure role="img"') == 3  # accuracy against rounds, bits and epsilon
    assert "toy, digits" in page


def test_what_all_statements_rest_on_stands_once(tmp_path):
    page, _ = _page(make_run(tmp_path), to=tmp_path)
    assert page.count("clipped at 1") == 1
    assert page.count("only B&#x27;s") == 1


def test_a_printed_page_has_all_that_is_folded_or_long_on_a_screen(tmp_path):
    """Claims, then assumptions, then sites, before any picture; no browser is at hand to print it."""
    run = make_run(tmp_path)
    accuracy = {("A", 7): 0.8, ("B", 3): 0.85}  # of the worst sites
    sites = [
        f"{case},{seed},hospital {k},60,2.5,0.1,{accuracy.get((case, k), 0.9)}"
        for case in "AB"
        for seed in (0, 1)
        for k in range(30)
    ]
    heading = "case,seed,site,samples,dp_epsilon,noise_std,test_accuracy"
    (run / "sites.csv").write_text("\n".join([heading, *sites]) + "\n")
    config = json.loads((run / "config.json").read_text())
    config["environment"]["flags"] = "--x " * 100
    (run / "config.json").write_text(json.dumps(config))
    page, _ = _page(run, to=tmp_path)
    text = re.sub(r"<[^>]+>", " ", page.partition("<body>")[2])
    assert text.partition(" Sites ")[2].count("hospital ") == 2 * 30
    assert all(text.count(assumption) == 1 for assumption in ("clipped at 1", "only B&#x27;s"))
    places = [page.index(f"<h2>{name}</h2>") for name in ("Results", "Privacy", "Sites", "Curves")]
    assert places == sorted(places)
    assert "<td class=long>--x" in page
    results = page.partition(">Results<")[2].partition("</table>")[0]
    assert "<th>worst site</th>" in results
    assert re.findall(r"<td>(hospital \d+)</td>", results) == ["hospital 7", "hospital 3"]
    for rule in ("@media print", "details::details-content", "beforeprint"):
        assert rule in page


def test_claims_stand_before_results_with_what_neighboring_data_are(tmp_path):
    page, _ = _page(make_run(tmp_path), to=tmp_path)
    parts = [
        "<h2>Results</h2>",
        "B: ε = 3.01",
        "one sample&#x27;s gradient counts as 0 (zero out one sample)",
        "<table",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_lines_of_a_cell_break_before_a_deviation_only():
    """A printed table of thirteen columns broke "63.6 ± 5.1 %" into three lines."""
    page = table_of([f"column {k}" for k in range(13)], [["63.6 ± 5.1 %", "36.42 m", "a site", *"0123456789"]])
    for cell in ("63.6 ±\xa05.1\xa0%", "36.42\xa0m", "a site"):
        assert f"<td>{cell}</td>" in page
    assert "<table class=wide>" in page
    assert "<table>" in table_of(["site"], [["a"]])


def test_what_epsilon_leaves_out_and_how_to_run_again_have_parts_of_their_own(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    for row in summary["cases"].values():
        row["privacy"][0]["assumptions"] += [ONE_RUN, UNPAID_CHOICE, "sizes are public and fixed", SIMULATED]
    summary["command_line"] = "python -m experiments.toy --grid 'step_size=1,2'"
    (run / "summary.json").write_text(json.dumps(summary))
    page, _ = _page(run, to=tmp_path)
    parts = {part.partition("</h2>")[0]: part for part in page.split("<h2>")[1:]}
    left_out = ("of one run", "hyper-parameters", "are public", "take the noise off", "choice among the 2 cases")
    for text in left_out:
        assert page.count(text) == 1
        assert text in parts["What ε does not cover"]
    assert "clipped at 1" in parts["Privacy"]
    again = parts["How to run it again"]
    assert "run: python -m experiments.toy --grid &#x27;step_size=1,2&#x27;" in again
    assert "bit for bit" in again
    assert "1.2.3" in again
    summary["cases"]["B"]["privacy"][0]["assumptions"][-1] = SECRET
    (run / "summary.json").write_text(json.dumps(summary))
    assert "bit for bit" not in _page(run, to=tmp_path)[0], "a secret key gives other noise"


def test_options_that_vary_are_columns_and_the_best_row_is_marked(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    for number, row in enumerate(summary["cases"].values()):
        row["settings"] = {"method": "M", "step_size": 0.1 + number}
        row["test_accuracy"]["mean"] = 0.5 + 0.1 * number
    (run / "summary.json").write_text(json.dumps(summary))
    page, _ = _page(run, to=tmp_path)
    assert "<tr><th>step size</th><th>ε</th>" in page
    assert "<tr><td>0.1</td>" in page
    assert "<tr class=best><td>1.1</td>" in page


def test_the_own_table_of_an_experiment_stands_first_and_names_the_cases_as_it_does(tmp_path):
    run = make_run(tmp_path, ("A", "A, curator"))
    summary = json.loads((run / "summary.json").read_text())
    summary["cases"]["A, curator"]["settings"] = {"baseline": "curator"}
    names = {"": "together", "curator": "all <data>"}
    own = {"title": "What <sites> have", "heading": ["ε", "how"], "rows": [["3", "alone"]], "notes": ["one & two"]}
    (run / "summary.json").write_text(json.dumps(summary | {"table": own | {"baselines": names}}))
    page, _ = _page(run, to=tmp_path)
    assert page.index("What &lt;sites&gt; have") < page.index("<td>3</td><td>alone</td></tr>") < page.index(">Results<")
    assert "one &amp; two" in page
    after = page[page.index(">Results<") :]
    assert "<th>how</th><th>ε</th>" in after
    assert "<td>together</td><td>2.001 proven</td>" in after
    assert "<td>all &lt;data&gt;</td><td>3.001 proven</td>" in after
    assert "A, all &lt;data&gt;" in after
    text = write_figures([run], tmp_path / "a", "svg")[-1].read_text()
    assert r"\caption{What $<$sites$>$ have. Digits; nodes 2; seeds 0, 1. One \& two.}" in text
    assert r"$3$ & alone \\" in text


def test_cases_of_several_runs_stand_beside_each_other(tmp_path):
    page, _ = _page(make_run(tmp_path, name="first"), make_run(tmp_path, ("<A>",), name="second"), to=tmp_path)
    assert "second: &lt;A&gt;" in page
    assert "<A>" not in page
    assert "first: A" in page


def test_many_cases_go_from_best_to_worst_and_what_they_share_stands_once(tmp_path):
    run = make_run(tmp_path, tuple("ABCDEF"))
    rows = json.loads((run / "summary.json").read_text())["cases"]
    for (case, row), mean in zip(rows.items(), (0.3, None, 0.9, 0.5, 0.99, 0.7), strict=True):
        row["test_accuracy"]["mean"] = mean
        row |= {"settings": {"baseline": "pooled"} if case == "E" else {}}
        row["privacy"] = [STATED | {"assumptions": ["of all", f"clipped at {case}"]}]
    (run / "summary.json").write_text(json.dumps({"cases": rows}))
    page, _ = _page(run, to=tmp_path)
    assert re.findall(r"<tr(?: class=best)?><td>(\w)</td><td>2.001 proven</td>", page) == list("CFDABE")
    assert re.findall(r"</svg>(\w)</li>", page) == list("CFDABE")
    assert "<th>case</th><th>ε</th>" in page
    assert "<tr class=best><td>C</td>" in page
    for once in ("<b>6 cases</b>: ε = 2.001 proven", "of all<", "C: clipped at C<"):
        assert page.count(once) == 1


def test_a_statement_without_an_epsilon_stands_without_assumptions(tmp_path):
    run = make_run(tmp_path)
    rows = json.loads((run / "summary.json").read_text())["cases"]
    silent = STATED | {"dp_epsilon": None, "reason": "No noise.", "assumptions": ["clipped at 1", "of nothing"]}
    for row in rows.values():
        row["privacy"].insert(0, silent)
    rows["B"]["privacy"] = [silent]
    (run / "summary.json").write_text(json.dumps({"cases": rows}))
    page, _ = _page(run, to=tmp_path)
    assert page.count("No noise.") >= 2
    assert "of nothing" not in page
    assert page.count("clipped at 1") == 1


def test_without_out_no_page_of_other_runs_is_lost(tmp_path, monkeypatch, capsys):
    first, second = (str(make_run(tmp_path, name=name)) for name in ("first", "second"))
    monkeypatch.chdir(tmp_path)
    assert command.main(["report", first]) == command.main(["report", first, second]) == 0
    assert capsys.readouterr().out == f"{first}/report.html\nreport.html\n"
    before = (tmp_path / "report.html").read_bytes()
    assert command.main(["report", second, first]) == 2
    assert "--out report.html" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_bytes() == before


def test_the_command_writes_the_page_or_says_in_one_sentence_why_not(tmp_path, capsys):
    run, page = str(make_run(tmp_path)), tmp_path / "page.html"
    assert command.main(["report", run, "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    for wrong, named in ((["report", str(tmp_path)], "RUN"), (["report", run, "--out", f"{page}/a.html"], "--out")):
        assert command.main(wrong) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {named}: ")
        assert message.count("\n") == 1


@pytest.mark.parametrize("runs", [[], ["missing"]], ids=["none", "no run"])
def test_a_report_of_nothing_is_refused(tmp_path, runs):
    refused(lambda: write_report([tmp_path / name for name in runs], tmp_path / "report.html"), "run_dirs")
    assert not (tmp_path / "report.html").exists()
