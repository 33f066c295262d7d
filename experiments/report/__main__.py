"""Rewrite the tables and pictures of result pages: python -m experiments.report [PAGE.md ...] [--check].

A comment in a page says what the table or the picture after it shows:

    <!-- table fig7 rows=step_size columns=iterations where=method:PrivSGP-VR -->
    <!-- picture fig7 x=iterations lines=step_size title="MNIST, 50 nodes" -->
    <!-- picture fig9 curves=case y=test_accuracy title="MNIST, 50 nodes" -->

`tables.Directive` lists the options. A directive reads NAME_results.csv, one row for each case and seed, or for curves
NAME_metrics.jsonl. Several names with a + between them are read as one file. An option that a file lacks is taken from
NAME_config.json. The column test_accuracy_best is each seed's highest evaluation in NAME_metrics.jsonl.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from experiments.report.pictures import draw
from experiments.report.tables import Directive, table
from jaxfl.core import ArgumentError

RESULTS = Path(__file__).parents[1] / "results"


def rewritten(page: Path, *, pictures: bool) -> tuple[str, list[Path]]:
    """The text of a page with its tables made anew, and its pictures, drawn if asked for.

    Raises:
        ArgumentError: a directive that cannot be read, or a file that is missing.
    """
    lines, written, drawn = page.read_text(encoding="utf-8").splitlines(), list[str](), list[Path]()
    place = 0
    while place < len(lines):
        written.append(lines[place])
        directive = Directive.parse(lines[place])
        place += 1
        if directive is None:
            continue
        if directive.kind == "table":
            written += table(directive, page.parent)
            while place < len(lines) and lines[place].startswith("|"):
                place += 1
        elif pictures:
            drawn.append(draw(directive, page.parent, lines[place] if place < len(lines) else ""))
    return "\n".join(written) + "\n", drawn


def report(pages: tyro.conf.Positional[tuple[Path, ...]] = (), *, check: bool = False) -> None:
    """Rewrite the tables and pictures of result pages from the files beside them.

    Args:
        pages: result pages; all of experiments/results by default.
        check: write nothing, draw nothing, and end with exit code 1 if a table differs from its file.
    """
    differing = []
    for page in pages or sorted(RESULTS.glob("*/*.md")):
        text, drawn = rewritten(page, pictures=not check)
        if text != page.read_text(encoding="utf-8"):
            differing.append(page)
            if not check:
                page.write_text(text, encoding="utf-8")
        print(f"{page}: {'differs' if page in differing else 'as its files say'}; {len(drawn)} pictures drawn")
    if check and differing:
        sys.exit(1)


if __name__ == "__main__":
    try:
        tyro.cli(report, description=__doc__)
    except ArgumentError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
