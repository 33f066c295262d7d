"""Result pages name their commits and files; `test_results_report.py` compares their tables with these."""

import json
import re
import zlib
from pathlib import Path

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
        assert mark in ("at size", "reduced", "not run", "–"), item
        assert remark if mark != "at size" else files or "counted" in remark, item
        assert (mark == "reduced") <= bool(files), item
        assert preset or mark == "–", item
        for file in re.findall(r"\]\((.+?)\)", files):
            assert (RESULTS / file).is_file(), item


# Tables made of other files, and the files that they are made of: at commit 54cc34c this file computed each anew.
DERIVED = {
    "privsgp_vr": ("fig9_lead_results.csv", ["fig9", "fig9_unclipped", "fig9_silent", "fig9_batch32"]),
    "embracing_fl": (
        "leads_results.csv rounds_results.csv",
        ["emb_c7", "wid_c7", "msk_c7", "ord_c7", "emb_c4", "wid_c4"],
    ),
    "ali_dpfl": ("lead_results.csv own_results.csv limited_results.csv", []),
    "dp_gradient_tracking": ("fig8_budgets_results.csv", []),
    "dzofl": (
        "reached_results.csv breakeven_results.csv level_results.csv",
        "full half radio again full_fedavg full_weak_fedavg half_fedavg radio_fedavg again_fedavg".split(),
    ),
}


def test_tables_made_of_other_files_and_these_are_as_they_were_checked():
    actual = {}
    for folder, (names, runs) in DERIVED.items():
        files = [*names.split(), *(f"{run}_metrics.jsonl" for run in runs)]
        actual |= {f"{folder}/{name}": zlib.crc32((RESULTS / folder / name).read_bytes()) for name in files}
    assert actual == json.loads((Path(__file__).parent / "pins" / "derived.json").read_text())
