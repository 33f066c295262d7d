"""CSV files of which a spreadsheet runs nothing, and links in the places that a run writes to."""

import csv
import io
import shutil

import jax
import matplotlib.figure
import pytest
from toy_problem import toy_case, toy_training_data, train_toy

from jaxfl.analysis.plots import save_figure
from jaxfl.analysis.report import write_report
from jaxfl.core.outputs import csv_text, read_csv
from jaxfl.core.types import NodeNames
from jaxfl.training import load_params, read_results

FORMULAS = ["=HYPERLINK(0)", "+cmd|' /C calc'!A0", "@SUM(1)", "-1+1", "=1", "'=1", "''+a", "\uff1d1", "-"]
PLAIN = ["Oslo", "'s-Hertogenbosch", "a=b", "é", "007", "", "x, y", 'say "a"', "Saint\xa0Denis", "'", "'-0.5"]
NUMBERS = ["-0.5", "+1", "-1e-05", "-inf", "-.5"]  # as text, too
HOSTILE = ["\x1b[2J", "a\x00", "\u202egpj.exe", "\t=1", "\r=1", "a\nb", "\udcff"]


def cells(text):
    return [row for row in csv.reader(io.StringIO(text, newline=""))]


def test_no_text_runs_and_all_of_it_comes_back(tmp_path):
    rows = [["name", "=head"], *([name, -0.5] for name in (*FORMULAS, *PLAIN, *NUMBERS))]
    (tmp_path / "a.csv").write_text(csv_text(rows), "utf-8", newline="")
    written = cells(csv_text(rows))
    assert not any(row[0][:1] in ("=", "+", "-", "@", "\uff1d") for row in written[1 : 1 + len(FORMULAS)])
    assert [row[0] for row in written[-len(NUMBERS) :]] == NUMBERS
    assert {row[1] for row in written[1:]} == {"-0.5"}, "numbers stay numbers"
    read = read_csv(tmp_path / "a.csv")
    assert [row["name"] for row in read] == [*FORMULAS, *PLAIN, *NUMBERS]
    assert {row["=head"] for row in read} == {"-0.5"}


@pytest.mark.parametrize("name", HOSTILE)
def test_control_letters_are_seen(name):
    text = csv_text([[name]])
    assert text.rstrip("\n").isprintable()
    assert "\\u" in text
    assert cells(text)[0][0][0] not in "=+-@"
    text.encode()


def test_names_of_sites_and_cases_do_nothing_in_the_tables_and_the_page_of_a_run(tmp_path):
    names = ("=HYPERLINK(0)", "@SUM(1)", "-1+1", "a\x1b[2J\u202e")
    case = toy_case(
        seeds=(0,), num_rounds=5, data=lambda seed: toy_training_data(seed)._replace(node_names=NodeNames(names))
    )
    train_toy(tmp_path, {"=A": case})
    for table in ("sites.csv", "results.csv"):
        text = (tmp_path / table).read_text("utf-8")
        assert all(cell[:1] not in ("=", "@") and cell[:2] != "-1" for row in cells(text) for cell in row)
        assert text.replace("\n", "").isprintable()
        assert {row["case"] for row in read_results(tmp_path / table)} == {"=A"}
    assert [row["site"] for row in read_results(tmp_path / "sites.csv")] == [*names[:3], "a\\u001b[2J\\u202e"]
    page = write_report([tmp_path], tmp_path / "page.html").read_text("utf-8")
    assert "<td>=HYPERLINK(0)</td>" in page
    assert not {"\x1b", "\u202e"} & {*page}


def test_a_link_is_replaced_and_not_followed(tmp_path):
    """A picture, the folder of pictures, the folder of parameters, and the page."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    (victim / "file").write_text("mine")
    cases = {"A": toy_case(seeds=(0,), num_rounds=5)}
    (run / "plots").mkdir(parents=True)
    for place, target in ((run / "final", victim), (run / "plots" / "a.png", victim / "file")):
        place.symlink_to(target)
    train_toy(run, cases)
    save_figure(matplotlib.figure.Figure(), run / "plots" / "a.png")
    (run / "page.html").symlink_to(victim / "file")
    write_report([run], run / "page.html")
    shutil.rmtree(run / "plots")
    (run / "plots").symlink_to(victim)
    save_figure(matplotlib.figure.Figure(), run / "plots" / "b.png")
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("file", "mine")]
    assert (run / "plots" / "b.png").read_bytes()[1:4] == b"PNG"
    assert jax.tree.leaves(load_params(run, "A", 0))[0].size
