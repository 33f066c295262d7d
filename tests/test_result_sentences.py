"""Numbers of a result page's verdicts come from files, by a comment `<!-- value`, or stand in a list that says why."""

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "experiments" / "results"
SECTIONS = ("Result", "What is seen", "Claim by claim", "The study")
# Numbers of a setting or of a paper, as they stand on the page.
ELSEWHERE = {
    "ali_dpfl/README": (
        *("sigma = 1.1, C = 0.1", "the column of 2.75", "step size is 0.5, here 0.5 to 160 were tried"),
        *("at 10 to 40, and level at 5 and at 0.5", "; not at 0.5", "kappa (1, 1e4, 1e6)"),
    ),
    "comparison/README": ("momentum (0.9)",),
    "dp_gradient_tracking/README": (
        *("edge weights of 0.01", "step 0.05", "step 0.1", "p is 0.09 (S1) and 0.99959 (S2)"),
        "adds 0.01 i (S1) or 0.00001 i (S2)",
    ),
    "dzofl/README": ("98 %", "99 %"),  # the levels to which costs are counted
    "embracing_fl/README": ("the first 45 %", "weak ones 20 %", "section 3.2"),
    "embracing_fl/similarity": (
        *("appendix 6.3", "Dirichlet 0.1", "step size 0.1, momentum 0.9", "step size 0.4"),
        "differences of 0.1 are of the size of the curves' own swings",
    ),
    "methods/README": (
        *("α = 0.1", "momentum 0.9, adaptive server step 0.03, proximal weight 0.01, ProxSkip's probability 0.3"),
        *("largest 10 %", "consensus step 0.3"),
    ),
    "trust/README": ("30 % of them lost",),
}
_BOUND = re.compile(r"<!-- value .*?-->-?\d+(?:,\d{3})*(?:\.\d+)?(?: ± \d+(?:\.\d+)?)?")
_NUMBER = re.compile(r"(?<![\w.:])[+-]?\d[\d,]*(?:\.\d+(?:e\d+)?|e\d+)|\b\d+(?= %)|± ?\d+")


def unbound(text: str, elsewhere: tuple[str, ...] = ()) -> list[str]:
    """Numbers with a point, an exponent, a % or a ± in a page's head and its sections of verdicts, outside of comments.

    Code, tables under a comment, tables of the head and a paper's own columns are left out.
    """
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    kept = list[str]()
    for section in (head, *(section for section in sections if section.startswith(SECTIONS))):
        names = list[str]()  # of a table's columns
        for line in section.splitlines():
            cells = [cell.strip() for cell in _BOUND.sub("#", line).split("|")] if line.startswith("|") else []
            names = (names or cells) if cells else ["made"] if line.startswith("<!-- table ") else []
            if section is not head and names != ["made"]:
                kept += [cell for cell, name in zip(cells, names, strict=False) if name not in ("the paper", "figure")]
            if not cells and not line.startswith(("    ", "<!-- ", "![")):
                kept.append(_BOUND.sub("#", line))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|(?i:jax) [\d.]+", "", " ".join(kept))
    prose = " ".join(prose.split())
    for one in elsewhere:
        prose = prose.replace(one, "")
    return _NUMBER.findall(prose)


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*/*.md")), ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_numbers_of_verdicts_come_from_files(page):
    elsewhere = ELSEWHERE.get(f"{page.parent.name}/{page.stem}", ())
    text = " ".join(page.read_text().split())
    assert [one for one in elsewhere if " ".join(one.split()) not in text] == []
    assert unbound(page.read_text(), elsewhere) == []


def test_a_number_without_a_file_is_seen():
    bound = "it has <!-- value x where=a:1 -->84.3 ± 0.2 % after `--step 0.1`"
    assert unbound(f"{bound}\n## Setting\n\nstep 0.5") == []
    assert unbound(f"{bound}, by 1.2 points\n## What is seen\n- 15 % and 1e9, ± 3\n| the paper | here |\n| 99 % | 80.5 |") == [
        *("1.2", "15", "1e9", "± 3", "80.5")
    ]
    assert unbound("a node has 12.5 %", ("12.5 %",)) == []
