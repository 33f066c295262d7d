"""Numbers in sentences of result pages come from files, by a comment `<!-- value`, or stand in a list of others."""

import csv
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "experiments" / "results"
# Numbers of a setting, of a paper, of a formula, or of a test in test_result_pages.py, as they stand on the page.
ELSEWHERE = {
    "ali_dpfl/README": (
        *("sigma = 1.1, C = 0.1", "step size is 0.5, here 0.5 to 160", "level at 5 and at 0.5", "not at 0.5"),
        *("holds 0.5 for all tau", "the column of 2.75", "at 2.75, and 3 at 3.25 and 3.75", "(1, 1e4, 1e6)"),
        "gain at 1.55",
        "Epsilon is 2.75, 2, 1.75 and 1.55 in the order of the columns",
    ),
    "audit/README": ("95 %", "with 1.25, 1.5, 2, 4 or 0.8"),
    "comparison/varied": (
        *("the estimates alone would spend; 0.5", "p from 0.09 to 0.14", "Scheme S2 has 0.1"),
        "10, 1 and 0.1 are alpha, beta of 1, 0.1 and 0.1, 0.01 and 0.01, 0.001",
    ),
    "dp_gradient_tracking/README": (
        *("p is 0.09 (S1) and 0.99959 (S2)", "adds 0.01 i (S1) or 0.00001 i (S2)", "differs by up to 0.03 points"),
        *("which is 0.0139 for", "self-loops sum to 0.02", "A share of 0.2", "predict 6.4", "then 1.6 times"),
        *(
            "20.8 (53.0), and 35.9 (89.5)",
            "alpha of 0.017 in place of 0.1",
            "has 1.3 at 0.1, 0.23 at 0.017 and 0.042 at 0.003",
            "ratio near 0.07",
            "Weights below 0.01",
        ),
        *("1.25 gamma", "1.01 gamma", "0.497851 is the formula's", "With 0.3, the default, it is 72.4 and 73.1 %"),
        "from 74.9 % after 100 iterations to 65.3 % after 200",
    ),
    "dzofl/README": (
        *("98 %", "99 %", "4e9", "1e9", "128.1 + 37.6", "128.1 dB", "s = 0.125 ms", "slots of 0.125 ms"),
        *("probability 0.484 to 1, 0.747 in the mean", "(1 + k)^-0.26", "makes its 81.25 s"),
        *("At 97 % DZOFL", "takes 2.0 times the joules and 1.4 times the seconds", "At 95 % it sends"),
        "takes 2.3 times less energy and 3.3 times less time",
    ),
    "embracing_fl/README": (
        *("the first 45 %", "weak ones 20 %", "chance, 10 %", "1.57 Gbit and receive 2.02 Gbit", "0.32 Gbit"),
        *("3.8 and 4.1", "took 7.4 to", "targets, 54 % in case 7 and 59 % in case 4"),
        *("The paper has 60.2 (strong alone) and 65.0 %", "60.2 and 77.3 % for EmbracingFL", "74.5 and 77.3 %"),
        *("64.0 (static) and 19.2 % (global)", "82.2 % in case 1 (all strong), 82.6 in case 4 and 74.9 in case 7"),
        *("0.84 and 0.02, not 0.99 and 0.02", "5.1 and 26.5 times fewer operations", "0.71 and 0.47 of its time"),
        *("1.02 and 1.15 times faster", "it is 1.61 and 2.20 times", "0.14 MB a second", "takes 0.5984 s"),
        "differ by 4 % forward and 0.3 % backward",
    ),
    "methods/README": ("largest 10 %", "ProxSkip's probability 0.3"),
    "privsgp_vr/README": ("noise of variance 0.01",),
    "trust/README": ("30 % of them lost",),
}
_BOUND = re.compile(r"<!-- value .*?-->-?\d+(?:,\d{3})*(?:\.\d+)?(?: ± \d+(?:\.\d+)?)?")
_SETTING = re.compile(
    r"`[^`]*`|\]\([^)]*\)|(?i:jax) [\d.]+|\b[\d.]+ (?:hours|minutes)"
    r"|\b(?:epsilon|steps?(?: of)?|step size|momentum|Dirichlet|[Ww]eights?(?: of)?|noise|section|appendix|kappa =|α =)"
    r" \d[\d.e]*\d"
)
_NUMBER = re.compile(r"(?<![\w.:])[+-]?\d[\d,]*(?:\.\d+(?:e\d+)?|e\d+)|\b\d+(?= %)|± ?\d+")


def unbound(text: str, elsewhere: tuple[str, ...] = ()) -> list[str]:
    """Numbers of a page's sentences with a point, an exponent, a % or a ± that stand behind no comment `<!-- value`.

    Of tables only those of claims are sentences, but for a paper's own columns. Code and numbers behind a word of a
    setting ("step 0.1") are left out.
    """
    kept, names, is_claims = list[str](), list[str](), False
    for line in text.splitlines():
        is_claims = line in ("## Claim by claim", "## What is seen") or (is_claims and not line.startswith("## "))
        own = _BOUND.sub("#", line)
        cells = [cell.strip() for cell in own.split("|")] if line.startswith("|") else []
        names = (names or cells) if cells else ["made"] if line.startswith("<!-- table ") else []
        if cells and is_claims and names != ["made"]:
            kept += [cell for cell, name in zip(cells, names, strict=False) if name not in ("the paper", "figure")]
        if not cells and not line.startswith(("    ", "<!-- ", "![")):
            kept.append(own)
    prose = " ".join(_SETTING.sub("", " ".join(" ".join(kept).split())).split())
    for one in elsewhere:
        prose = prose.replace(" ".join(_SETTING.sub("", one).split()), "")
    return _NUMBER.findall(prose)


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*/*.md")), ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_numbers_of_sentences_come_from_files(page):
    elsewhere = ELSEWHERE.get(f"{page.parent.name}/{page.stem}", ())
    text = " ".join(page.read_text().split())
    assert [one for one in elsewhere if one not in text] == []
    assert unbound(page.read_text(), elsewhere) == []


def test_a_number_without_a_file_is_seen():
    bound = "It has <!-- value x where=a:1 -->84.3 ± 0.2 % after `--tau 0.1` with momentum 0.9"
    assert unbound(bound) == []
    assert unbound(f"{bound}, by 1.2 points") == ["1.2"]
    table = "| the paper | here |\n|---|---|\n| 99 % | 80.5 |"
    claims = f"- 15 % and 1e9, ± 3\n## Setting\n{table}\n## What is seen\n\n{table}"
    assert unbound(claims) == ["15", "1e9", "± 3", "80.5"]
    assert unbound(f"## What is seen\n<!-- table x rows=a columns=b -->\n{table}") == []
    assert unbound("a node has 12.5 %", ("12.5 %",)) == []


def test_what_is_said_of_the_audits_mistakes_is_in_their_file():
    with open(RESULTS / "audit" / "mistakes_results.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["refused_by_checks"] for row in rows if row["mistake"] != "none"} == {"1"}
    assert {row["refused"] for row in rows if row["mistake"] == "none"} == {"0"}
    by_guesses = {row["mistake"] for row in rows if float(row["dp_epsilon_lower_bound"]) > 1}
    assert by_guesses == {"noise 4 times too small", "no clipping"}
    assert {row["refused_by_guesses"] for row in rows if row["mistake"] in by_guesses} == {"1"}
