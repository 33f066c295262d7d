"""The epsilons of the result pages' tables are those of the files beside them, rounded up."""

import csv
import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "experiments" / "results"
RELATIONS = {"replace one": "replace_one", "zero out": "zero_out", "add/remove": "add_or_remove_one"}
PAGES = ("dp_gradient_tracking",)


def epsilon_cells(page):
    """Variant, heading and cell of each epsilon in a table of a page; the names of the pictures above the table."""
    headings = pictures = None
    for line in (RESULTS / page / "README.md").read_text().splitlines():
        if line.startswith("###"):
            pictures = []
        elif line.startswith("!["):
            pictures = re.findall(r"\((\w+)_[a-z]+\.png\)", line)
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:1] == ["variant"]:
            headings = cells
        elif headings and len(cells) == len(headings) and not cells[0].startswith("-"):
            rows = zip(headings, cells, strict=True)
            yield from ((pictures, cells[0], heading, cell) for heading, cell in rows if heading.startswith("ε"))
        elif not cells:
            headings = None


def bounds_of(statements, heading):
    """The epsilons of a variant's statements that a column is about."""
    bound, relation, at_delta = (
        heading.split()[1].strip(","),
        RELATIONS.get(heading.partition(", ")[2]),
        "δ = 1e-5" in heading,
    )
    for each in statements:
        if each["bound"] != bound or each["dp_epsilon"] is None:
            continue
        if each["neighboring_relation"] == relation or (relation is None and (each["dp_delta"] > 0) == at_delta):
            yield each["dp_epsilon"]


@pytest.mark.parametrize("page", PAGES)
def test_no_epsilon_of_a_table_is_below_its_file(page):
    seen, below = 0, []
    for pictures, variant, heading, cell in epsilon_cells(page):
        assert pictures is not None
        try:
            stated = float(cell.replace(",", ""))
        except ValueError:  # "none", or empty
            continue
        for name in pictures:
            variants = json.loads((RESULTS / page / f"{name}_summary.json").read_text())["variants"]
            for true in bounds_of(variants[variant]["privacy"], heading):
                seen += 1
                below += [(name, variant, heading, cell, true)] if stated < true else []
                assert stated < 1.1 * true, (name, variant, heading, cell, true)
    assert seen > 40
    assert below == []


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*/*.md")), ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_names_the_commits_at_which_its_commands_give_its_numbers(page):
    """Random numbers change with the way in which keys are made."""
    named = set(re.findall(r"\b[0-9a-f]{7}\b", page.read_text()))
    assert named
    if page.parent.name not in (*PAGES, "embracing_fl"):  # whose revisions came before they were recorded, or changed
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
        if files:
            assert (RESULTS / files).is_file(), item


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
