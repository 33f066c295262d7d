"""Figures and a table for a paper: formats, sizes, letters, and what LaTeX would take in."""

import json
import re
import struct
import sys

import numpy as np
import pytest
from helpers import refused
from test_report import make_run

from jaxfl import command
from jaxfl.analysis.cases import charts, shown_cases
from jaxfl.analysis.figures import latex_table, write_figures
from jaxfl.analysis.pictures import Mark, Picture, Plot, draw_picture, figures_of, save_picture
from jaxfl.analysis.plots import Panel, new_figure, plot_panels, privacy_notes, read_lines

NASTY = r"R&D_{50 %} #1 $x$ \input ~a^b <c> ε = 3, τ"
BEGINNINGS = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}
CHARTS = {"test_accuracy_rounds", "test_accuracy_bits", "test_accuracy_epsilon"}


@pytest.mark.parametrize("form", BEGINNINGS)
def test_every_chart_is_written_in_the_format_at_the_width_of_a_column(tmp_path, form, capsys):
    run = make_run(tmp_path)
    assert command.main(["report", str(run), "--figures", form]) == 0
    inches = {
        "pdf": lambda content: float(re.findall(rb"/MediaBox \[ 0 0 ([\d.]+)", content)[0]) / 72,
        "svg": lambda content: float(re.findall(rb'width="([\d.]+)pt"', content)[0]) / 72,
        "png": lambda content: struct.unpack(">I", content[16:20])[0] / 300,
    }[form]
    paths = [run / "figures" / f"{name}.{form}" for name in CHARTS]
    assert {*capsys.readouterr().out.split()} == {*map(str, paths), str(run / "figures" / "results.tex")}
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(BEGINNINGS[form])
        assert inches(content) == pytest.approx(3.4, abs=0.01)
    assert not (run / "report.html").exists()
    write_figures([run], tmp_path / "again", form)
    for path in paths:
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("form", BEGINNINGS)
def test_every_picture_of_a_run_is_written_in_the_format(tmp_path, form):
    """Of an experiment's own, of curves, and of final values against options; without what no PNG carries."""
    run = make_run(tmp_path, tuple("ABCD"))
    summary = json.loads((run / "summary.json").read_text())
    steps = [(0.1, 1.0), (0.1, 2.0), (0.2, 1.0), (0.2, 2.0)]
    for row, (step, clip) in zip(summary["cases"].values(), steps, strict=True):
        row["settings"] = {"step_size": step, "clip_norm": clip}
    (run / "summary.json").write_text(json.dumps(summary))
    marks = [
        Mark("bars", [1.0, 8.0], [0.5, 0.7], [0.4, 0.6], [0.6, 0.8], is_points=True),
        Mark("line", [1.0, 8.0], [0.2, 0.3]),
        Mark("level", (), [0.9]),
    ]
    picture = Picture("own", "ours", [Plot("accuracy", "ε", marks, is_accuracy=True, log="x", ticks=[1.0, 8.0])])
    save_picture(run, picture)
    plot_panels(run, read_lines(run), [Panel("total_bits_sent", "bits")], "bits.png")
    names = {path.stem for path in write_figures([run], tmp_path / "a", form)}
    assert names - CHARTS == {"own", "bits", "heat_map", "results"}
    for name in ("own", "bits", "heat_map"):
        assert (tmp_path / "a" / f"{name}.{form}").read_bytes().startswith(BEGINNINGS[form])
    (axes,) = figures_of(run)["own"].axes
    again = draw_picture(picture).axes[0]
    for one, other in zip(axes.lines, again.lines, strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())
        assert (one.get_color(), one.get_linestyle()) == (other.get_color(), other.get_linestyle())
    bars = [np.asarray(line.get_ydata()).tolist() for line in axes.lines if line.get_marker() == "o"]
    assert bars == [[0.5, 0.7]]
    assert (axes.get_xscale(), [tick.get_text() for tick in axes.get_xticklabels()]) == ("log", ["1", "8"])


def test_a_ladder_of_steps_is_a_line_for_each_of_the_other_options(tmp_path):
    run = make_run(tmp_path, tuple("ABCDEF"))
    summary = json.loads((run / "summary.json").read_text())
    for number, row in enumerate(summary["cases"].values()):
        row["settings"] = {"target_epsilon": 1.0 + number // 3, "step_size": 10.0 ** (number % 3)}
        row["test_accuracy"] = {"mean": 0.1 * number, "std": 0.0, "per_seed": [0.1 * number, None]}
    (run / "summary.json").write_text(json.dumps(summary))
    (chart,) = [one for one in charts(shown_cases([run])) if one.name == "test_accuracy_step_size"]
    axes = new_figure(4, 3).add_subplot()
    assert {*chart.draw(axes)} == {"ε = 1", "ε = 2"}
    heights = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
    assert [0.0, 0.1, 0.2] in heights
    assert axes.get_xlabel() == "step size"
    for case in "CF":
        summary["cases"].pop(case)
    (run / "summary.json").write_text(json.dumps(summary))
    assert not [one for one in charts(shown_cases([run])) if one.name == "test_accuracy_step_size"]


def test_letters_of_a_vector_picture_are_text(tmp_path):
    run = make_run(tmp_path)
    write_figures([run], tmp_path / "a", "svg")
    write_figures([run], tmp_path / "a", "pdf")
    assert ">bits sent, all nodes</text>" in (tmp_path / "a" / "test_accuracy_bits.svg").read_text()
    assert (
        ">ε (proven, zero out one sample, δ = 1e-05)</text>"
        in (tmp_path / "a" / "test_accuracy_epsilon.svg").read_text()
    )
    content = (tmp_path / "a" / "test_accuracy_bits.pdf").read_bytes()
    assert b"/Type3" not in content, "publishers refuse fonts of type 3"
    assert b"/CIDFontType2" in content


def _cells(table):
    """Rows of a tabular, after a check that its structure holds: columns, escapes, mathematics."""
    table = table.replace("table*", "table").replace("\\small\n\\setlength{\\tabcolsep}{4pt}\n", "")
    before, caption, _, begin, *body, end, after = table.strip().splitlines()
    assert (before, after) == (r"\begin{table}", r"\end{table}")
    assert re.fullmatch(r"\\caption\{[^|~]*\}", caption)
    (columns,) = re.findall(r"^\\begin\{tabular\}\{([lr]+)\}$", begin)
    assert end == r"\end{tabular}"
    rows = [line.removesuffix(r" \\") for line in body if line != r"\hline"]
    assert all(line == r"\hline" or line.endswith(r" \\") for line in body)
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
        assert len(re.findall(r"(?<!\\)\$", row)) % 2 == 0
        outside = re.sub(r"(?<!\\)\$.*?(?<!\\)\$|\\text\w+\{\}|\\[&%#_{}$,]", "", row)
        assert not re.search(r"[\\%#_{}$~^<>]|[^\x00-\x7f]", outside), outside
    return [re.split(r" (?<!\\)& ", row) for row in rows]


def test_a_table_of_latex_has_escaped_names_and_deviations_in_mathematics(tmp_path):
    run = make_run(tmp_path, (NASTY, "B"))
    summary = json.loads((run / "summary.json").read_text())
    for case, row in summary["cases"].items():
        row["settings"] = {"method": case, "step_size": 0.1, "nodes": 1 + len(case)}
    (run / "summary.json").write_text(json.dumps(summary))
    text = write_figures([run], tmp_path / "a", "svg")[-1].read_text()
    heading, first, second = _cells(text)
    assert heading == ["method", "nodes", r"$\varepsilon$"], "what all share is no column"
    assert second == ["B", "$2$", "$3.001$"]
    assert r"R\&D\_\{50 \%\} \#1 \$x\$ \textbackslash{}input" in first[0]
    assert r"\caption{Digits; nodes 2; seeds 0, 1. Mean $\pm$ standard deviation over 2 seeds. $\vare" in text
    assert r"$\varepsilon$: proven, zero out one sample" in text
    assert r"one sample, $\delta$ = 1e-05; largest over nodes" in text
    assert r"The same in all rows: test accuracy 91.0 $\pm$ 1.4 \%." in text


def test_a_caption_says_what_ran(tmp_path):
    """Data set, methods, nodes and seeds of the compared cases; of several runs each."""
    runs = [make_run(tmp_path, tuple("AB"), name=name) for name in ("one", "two")]
    for run, experiment in zip(runs, ("plan", "toy"), strict=True):
        settings = json.loads((run / "config.json").read_text()) | {"experiment": experiment}
        settings["config"] |= {"method": "M1", "dataset": "a/clinics.csv"}
        settings["config"]["cases"]["B"] |= {"method": "M2", "nodes": 1, "seeds": [2]}
        (run / "config.json").write_text(json.dumps(settings))
    every = "method M1, M2; nodes 2, 1; seeds 0, 1, 2. "
    assert rf"\caption{{Clinics; {every}" in write_figures(runs[:1], tmp_path / "a", "svg")[-1].read_text()
    assert rf"\caption{{Clinics; {every}" in write_figures(runs, tmp_path / "b", "svg")[-1].read_text()
    summary = json.loads((runs[0] / "summary.json").read_text())
    summary["cases"]["B"]["settings"] = {"baseline": "pooled"}
    (runs[0] / "summary.json").write_text(json.dumps(summary))
    assert "method M1; nodes 2; seeds" in write_figures(runs[:1], tmp_path / "a", "svg")[-1].read_text()


def test_numbers_of_a_column_have_equal_decimals_and_no_column_stands_twice(tmp_path):
    """Two digits of the largest deviation, the unit of the largest cost, own digits where numbers span much."""
    run = make_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    for row, mean, std, bits, loss in zip(
        summary["cases"].values(), (0.5, 0.9123), (0.0004, 0.0412), (1.2e6, 54.57e6), (0.001, 20.0), strict=True
    ):
        row["test_accuracy"] = row["test_accuracy_worst_node"] = {"mean": mean, "std": std, "per_seed": [mean, mean]}
        row["train_loss"] = {"mean": loss, "std": loss / 10, "per_seed": [loss, loss]}
        row["costs"] = {"bits_sent": {"mean": bits}}
    (run / "summary.json").write_text(json.dumps(summary))
    text = write_figures([run], tmp_path / "a", "svg")[-1].read_text()
    heading, units, *rows = _cells(text)
    assert heading == ["case", r"$\varepsilon$", "test accuracy", "training loss", "bits sent"]
    assert units == ["", "", r"(\%)", "", "(Mbit)"]
    assert sorted(rows) == [
        ["A", "$2.001$", r"$50.0 \pm 0.0$", r"$0.001 \pm 0.0001$", "$1.20$"],
        ["B", "$3.001$", r"$91.2 \pm 4.1$", r"$20 \pm 2$", "$54.57$"],
    ]
    assert "Worst node: as test accuracy." in text


def test_a_table_has_few_columns_one_unit_in_each_and_whose_epsilon_each_row_has(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    for number, row in enumerate(summary["cases"].values()):
        row["settings"] = {"target_epsilon": 2.0 + number, "baseline": ("", "without_noise")[number]}
        row["costs"] = {"joules": {"mean": (1.52, 0.00031665)[number]}}
        row |= {name: {"mean": 1.0 + number, "std": 0.5} for name in ("test_auc", "test_loss", "train_loss")}
        row["privacy"][0] |= {"dp_epsilon": 2.0 + number, "observer": ("a server", "all")[number]}
    (run / "summary.json").write_text(json.dumps(summary))
    text = write_figures([run], tmp_path / "a", "svg")[-1].read_text()
    heading, units, *rows = _cells(text)
    assert heading == ["baseline", r"$\varepsilon$", "kind", "AUC", "test loss", "energy"]
    assert units[-1] == "(mJ)"
    assert [(*row[:3], row[-1]) for row in rows] == [
        ("--", "$2$", "a", "$1520$"),
        ("without noise", "$3$", "b", "$0.317$"),
    ]
    assert "kind a proven against a server, zero out" in text
    assert "kind b proven against all, zero out" in text
    assert "finished" not in text


def test_under_a_picture_stand_the_first_epsilon_of_each_case_and_who_has_none(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    (first,) = summary["cases"]["A"]["privacy"]
    summary["cases"]["A"]["privacy"].append({**first, "neighboring_relation": "replace_one", "dp_epsilon": 9.0})
    summary["cases"]["B"]["privacy"] = [{**first, "dp_epsilon": None, "reason": "No noise is added."}]
    (run / "summary.json").write_text(json.dumps(summary))
    assert privacy_notes(run) == ["proven (zero out one sample, δ = 1e-05): A: ε = 2.01", "no ε: B"]


def test_numbers_that_are_small_large_or_missing_keep_their_form():
    cells = _cells(latex_table(["a", "b"], [["-1.2e-05 ± 3e-06", "–"], ["100.0 %", "2.001 proven"]], ["a note"]))
    assert cells[1:] == [[r"$-1.2e-05 \pm 3e-06$", "--"], [r"$100.0$\,\%", "2.001 proven"]]


def test_a_run_without_results_is_refused_in_one_sentence(tmp_path, capsys):
    run = make_run(tmp_path)
    lines = (run / "passes" / "0" / "metrics.jsonl").read_text().splitlines()
    (run / "passes" / "0" / "metrics.jsonl").write_text(re.sub("test_accuracy", "other", "\n".join(lines)) + "\n")
    assert command.main(["report", str(run), "--figures", "pdf"]) == 2
    assert command.main(["report", str(tmp_path), "--figures", "pdf"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "must hold results to draw" in first
    assert "summary.json" in second
    assert not (run / "figures").exists()
    refused(lambda: write_figures([run], tmp_path / "a", "eps"), "form")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
