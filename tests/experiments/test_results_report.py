"""experiments.report: what directives make of files, and that no published table differs from its file."""

import csv
import json
import re
from pathlib import Path

import pytest

from experiments.report.__main__ import RESULTS
from jaxfl.analysis import page_pictures as pictures
from jaxfl.analysis.page_tables import cell
from jaxfl.analysis.pages import rewritten
from jaxfl.core import ArgumentError

ROWS = [
    {"method": method, "step_size": step, "target_epsilon": budget, "seed": seed, "test_accuracy": accuracy}
    for method, step, budget, *accuracies in (
        ("A", "0.1", "1", "0.5", "0.7"),
        ("A", "1", "1", "0.8", "0.8"),
        ("A", "10", "1", "0.9", ""),  # one seed diverged
        ("A", "0.1", "8", "0.95", "0.93"),
        ("B", "0.1", "1", "0.2", "0.4"),
    )
    for seed, accuracy in zip("01", accuracies, strict=True)
]


@pytest.fixture
def page(tmp_path):
    with open(tmp_path / "x_results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)

    def make(*lines):
        path = tmp_path / "README.md"
        path.write_text("\n".join(lines) + "\n")
        return path

    return make


def test_a_table_replaces_what_stood_there(page):
    path = page("# T", "<!-- table x rows=method columns=target_epsilon best=step_size -->", "| old |", "", "After.")
    text, drawn = rewritten(path, pictures=True)
    assert text.splitlines() == [
        "# T",
        "<!-- table x rows=method columns=target_epsilon best=step_size -->",
        "| method | ε = 1 | ε = 8 |",
        "|---|---|---|",
        "| A | 80.0 (step 1) | 94.0 ± 1.4 (step 0.1) |",  # a step at which a seed diverged is none; 1 is no end
        "| B | 30.0 ± 14.1 (step 0.1) |  |",
        "",
        "After.",
    ]
    assert drawn == []
    path.write_text(text)
    assert rewritten(path, pictures=False)[0] == text


def test_the_best_step_at_an_end_is_said_so(page):
    directive = "<!-- table x rows=method columns=target_epsilon best=step_size where=step_size:!10,method:A -->"
    assert "| A | 80.0 (step 1, at an end) |" in rewritten(page(directive), pictures=False)[0]


def test_a_seed_without_a_number_is_no_mean(page):
    assert cell([{"test_accuracy": "0.9"}, {"test_accuracy": ""}], "test_accuracy") == "diverged"


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1"), (2.0001, "2.01"), (0.012341, "0.0124"), (999.01, "1,000"), (5090.2, "5,100")]
)
def test_epsilons_are_rounded_up(value, text):
    assert cell([{"proven_dp_epsilon": repr(value)}], "proven_dp_epsilon") == text


def test_the_largest_epsilon_over_seeds_is_shown():
    assert cell([{"proven_dp_epsilon": "2"}, {"proven_dp_epsilon": "2.006"}], "proven_dp_epsilon") == "2.01"


def test_a_page_has_words_for_lines_and_axes(page, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure) or path)
    words = '<!-- words A:"the first" "step {}":"step of {}" test_accuracy:"accuracy, %" -->'
    directive = "<!-- picture x x=target_epsilon lines=method,step_size bottom=0.5 level=0.9 -->"
    rewritten(page(words, directive, "![T](x.png)"), pictures=True)
    (axes,) = figures[0].axes
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == ["the first, step of 0.1", "the first, step of 1", "B, step of 0.1"]
    assert axes.get_ylabel() == "accuracy, %"
    assert axes.get_ylim()[0] == 0.5


def test_pictures_are_drawn_beside_the_page(page, monkeypatch):
    lines = '<!-- picture x x=target_epsilon lines=method best=step_size title="T" -->', "![T](x.png)"
    figures, save = [], pictures.save_figure
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure) or save(figure, path))
    _, drawn = rewritten(page(*lines), pictures=True)
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["A", "B"]
    assert [path.name for path in drawn] == ["x.png"]
    assert drawn[0].stat().st_size > 1000


def test_a_file_without_seeds_gives_lines_by_formula_on_logarithmic_axes(page, tmp_path, monkeypatch):
    with open(tmp_path / "f_results.csv", "w", newline="") as file:
        csv.writer(file).writerows([("rate", "speed", "ratio"), *(("1", 10**k, 10**-k) for k in range(3))])
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure) or path)
    line = '<!-- picture f x=speed lines=rate y=ratio log=x,y level=0.1 title="T" -->'
    rewritten(page(line, "![T](f.png)"), pictures=True)
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    curve, level = axes.get_lines()
    assert list(level.get_ydata()) == [0.1, 0.1]
    assert list(curve.get_ydata()) == [1, 0.1, 0.01]
    assert any("by formula" in text.get_text() for text in figures[0].findobj(lambda one: hasattr(one, "get_text")))


def test_curves_leave_out_names_with_commas_and_the_start_of_a_logarithmic_axis(page, tmp_path, monkeypatch):
    lines = [
        {"case": case, "seed": 0, "round": number, "test_accuracy": 0.5, "total_joules": 2.0 * number}
        for case in ("A, step 1", "A, step 10")
        for number in (0, 1, 2)
    ]
    (tmp_path / "x_metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curves = []
    monkeypatch.setattr(
        pictures, "draw_curve", lambda axes, curve, style: curves.append(curve) or axes.plot(curve.x)[0]
    )
    line = '<!-- picture x curves=case x=total_joules log=x where="case:!A, step 10,seed:0" -->'
    rewritten(page(line, "![T](x.png)"), pictures=True)
    assert [curve.x.tolist() for curve in curves] == [[2.0, 4.0]]


@pytest.fixture
def run(page, tmp_path):
    """The page of a run with two cases, with metrics and configuration."""
    lines = [
        {"case": case, "seed": seed, "round": number, "test_accuracy": accuracy}
        for case, peak in (("step 0.1", 0.6), ("step 1", 0.9))
        for seed in (0, 1)
        for number, accuracy in enumerate((0.1, peak + 0.02 * seed, 0.5))
    ]
    (tmp_path / "y_metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with open(tmp_path / "y_results.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "seed", "step_size", "test_accuracy"])
        writer.writerows([case, seed, case[5:], 0.5] for case in ("step 0.1", "step 1") for seed in (0, 1))
    options: dict[str, object] = {"method": "embracing", "masked": True, "plain": False, "rate": None}
    options |= {"cases": {"step 0.1": {}, "step 1": {}}, "cuts": [80, 90], "uncut": []}
    (tmp_path / "y_config.json").write_text(json.dumps({"config": options}))
    return page


def test_options_of_the_configuration_and_best_evaluations_are_columns(run):
    directive = "<!-- table y rows=method,masked,plain,rate,cuts,uncut columns=step_size value=test_accuracy_best -->"
    lines = rewritten(run("<!-- words embracing:EmbracingFL -->", directive), pictures=False)[0].splitlines()
    assert lines[-1] == "| EmbracingFL, masked, 80, 90, none | 61.0 ± 1.4 | 91.0 ± 1.4 |"


def test_an_evaluation_that_is_not_there_is_refused(run, tmp_path):
    lines = (tmp_path / "y_metrics.jsonl").read_text().splitlines()
    (tmp_path / "y_metrics.jsonl").write_text("\n".join(line for line in lines if '"seed": 0' in line))
    with pytest.raises(ArgumentError, match="lacks some"):
        rewritten(run("<!-- table y rows=method columns=step_size value=test_accuracy_best -->"), pictures=False)


def test_conditions_on_seeds_hold_for_curves_of_the_best_step(run, monkeypatch):
    curves = []
    monkeypatch.setattr(
        pictures, "draw_curve", lambda axes, curve, style: curves.append(curve) or axes.plot(curve.x)[0]
    )
    rewritten(run("<!-- picture y curves=case best=step_size where=seed:1 -->", "![T](y.png)"), pictures=True)
    assert [curve.mean.tolist() for curve in curves] == [[0.1, 0.62, 0.5]]


def test_curves_of_the_best_step_with_a_level_and_marks(run, monkeypatch):
    curves, places = [], []

    def drawn(axes, curve, style):
        curves.append(curve)
        monkeypatch.setattr(axes, "axhline", lambda height, **style: places.append(height))
        monkeypatch.setattr(axes, "axvline", lambda place, **style: places.append(place))
        return axes.plot(curve.x)[0]

    monkeypatch.setattr(pictures, "draw_curve", drawn)
    line = "<!-- picture y curves=case lines=method best=step_size level=0.1 marks=1,2 -->"
    rewritten(run(line, "![T](y.png)"), pictures=True)
    assert [curve.mean.tolist() for curve in curves] == [[0.1, 0.61, 0.5]], "both steps end alike: the first"
    assert places == [0.1, 1.0, 2.0]


def test_panels_of_curves_have_one_height_and_steps_begin_at_zero(page, tmp_path, monkeypatch):
    lines = [
        {"case": case, "seed": 0, "round": number, "num_steps": steps, "test_accuracy": 0.1 * steps}
        for case, steps in (("A", 2), ("B", 5))
        for number in (1, 2)
    ]
    (tmp_path / "x_metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure) or path)
    directive = "<!-- picture x curves=case panels=case y=num_steps steps=y -->"
    rewritten(page(directive, "![T](x.png)"), pictures=True)
    axes = figures[0].axes
    assert [one.get_title() for one in axes] == ["A", "B"]
    assert [one.lines[0].get_ydata().tolist() for one in axes] == [[2.0, 2.0], [5.0, 5.0]]
    assert {one.lines[0].get_drawstyle() for one in axes} == {"steps-mid"}
    (limits,) = {one.get_ylim() for one in axes}
    assert limits[0] == 0
    assert limits[1] > 5
    (legend,) = figures[0].legends
    assert (legend.get_title().get_text(), legend.get_texts()) == ("one seed", [])  # each panel names its line
    directive = "<!-- picture x curves=case panels=case y=num_steps,test_accuracy -->"
    rewritten(page(directive, "![T](x.png)"), pictures=True)
    heights = [one.get_ylim() for one in figures[1].axes]
    assert heights[:2] == heights[2:], "each column has its height"
    assert heights[0] != heights[1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("<!-- table y rows=method columns=seed -->", "is missing"),
        ("<!-- table x rows=method colums=seed -->", "'colums'"),
        ("<!-- table x rows=method columns=seed level=0.5 -->", "of a table has .*'level'"),
        ("<!-- picture x x=seed rows=method -->\n![T](x.png)", "of a picture has .*'rows'"),
        ("<!-- picture x x=seed lines=method log=z -->\n![T](x.png)", "x or y for log"),
        ("<!-- picture x curves=case steps=y log=y -->\n![T](x.png)", "or y for steps"),
        ("<!-- picture x curves=case lines=method -->\n![T](x.png)", "best for lines"),
        ("<!-- table x rows=method columns=budget -->", "'budget'"),
        ("<!-- table x rows=method columns=seed where=method:C -->", "keep some rows"),
        ("<!-- picture x x=seed lines=method -->", "must stand above its picture"),
        ("<!-- picture x x=seed panels=method -->\n![T](x.png)", "panels of one entry"),
        ("<!-- picture x x=seed lines=method steps=y -->\n![T](x.png)", "curves for steps"),
    ],
)
def test_a_directive_that_cannot_be_followed_is_refused(page, line, problem):
    with pytest.raises(ArgumentError, match=problem):
        rewritten(page(line), pictures=True)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.md")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_table_of_a_page_is_that_of_its_file(path):
    assert rewritten(Path(path), pictures=False)[0] == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", "70.0"), (" value=test_accuracy_worst_node", "60.0"), (" value=total_bits_sent", "5")],
)
def test_the_best_step_is_that_of_the_samples_that_validate(tmp_path, value, expected):
    """For every column: test samples and costs choose nothing."""
    rows = [("0.1", "0.9", "0.7", "0.6", "5"), ("1", "0.8", "0.75", "0.7", "6"), ("3", "0.2", "0.95", "0.9", "7")]
    names = ("step_size", "validation_accuracy", "test_accuracy", "test_accuracy_worst_node", "total_bits_sent")
    with open(tmp_path / "v_results.csv", "w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    (tmp_path / "README.md").write_text(f"It has <!-- value v{value} best=step_size -->0.\n")
    assert f" -->{expected}." in rewritten(tmp_path / "README.md", pictures=False)[0]


def test_a_number_in_a_sentence_comes_from_its_file(page, tmp_path):
    with open(tmp_path / "z.csv", "w", newline="") as file:
        csv.writer(file).writerows([("name", "bits", "proven_dp_epsilon"), ("a", "33932800", "2.001")])
    where = "where=method:A,target_epsilon:1"
    lines = [
        f"A has <!-- value x {where} best=step_size -->?%, and <!-- value x {where},step_size:0.1 -->1 ± 2.",
        f"It leads by <!-- value x {where},step_size:0.1 less=method:B -->0.1 ± 0.1.",
        "It sends <!-- value z value=bits unit=1e6 -->0, in Mbit, at <!-- value z value=proven_dp_epsilon -->1,000.",
    ]
    text, _ = rewritten(page(*lines), pictures=False)
    assert re.sub("<!-- value .*? -->", "", text).splitlines() == [
        "A has 80.0%, and 60.0 ± 14.1.",
        "It leads by 30.0 ± 0.0.",
        "It sends 33.9, in Mbit, at 2.01.",
    ]
    assert text.count("<!-- value ") == 5


@pytest.mark.parametrize(
    "line",
    [
        "It has <!-- value x where=method:A,step_size:0.1,target_epsilon:1 --> 60.",  # a space before the number
        "  <!-- value x where=method:A,step_size:0.1,target_epsilon:1 -->60 is at the start of a line.",
        "It has <!-- value x where=method:A,target_epsilon:1 -->60.",  # several steps of a seed
        "It has <!-- value x where=method:A,step_size:10 -->60.",  # a seed that diverged
        "It has <!-- value x where=method:C -->60.",
        "It has <!-- value x rows=method -->60.",
        "It has <!-- value none where=method:A -->60.",
    ],
)
def test_a_number_without_one_source_is_refused(page, line):
    with pytest.raises(ArgumentError, match="directive"):
        rewritten(page(line), pictures=False)
