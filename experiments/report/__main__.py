"""Rewrite tables, pictures and numbers of result pages: python -m experiments.report [PAGE.md ...] [--check].

`jaxfl.analysis.pages` says what comments in a page stand for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from jaxfl.analysis.pages import rewritten
from jaxfl.core import ArgumentError

RESULTS = Path(__file__).parents[1] / "results"


def report(pages: tyro.conf.Positional[tuple[Path, ...]] = (), *, check: bool = False) -> None:
    """Rewrite tables, pictures and numbers in sentences of result pages from the files beside them.

    Args:
        pages: result pages; all of experiments/results by default.
        check: write nothing, draw nothing, and end with exit code 1 if a table or a number differs from its file.
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
