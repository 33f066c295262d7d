"""Numbers in the sentences of a result page, from the files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfl.analysis.page_tables import ACCURACIES, Directive, Row, best_of, cell, read_rows
from jaxfl.core import ArgumentError

_MARK = "<!-- value "
_VALUE = re.compile(rf"({_MARK}.*?-->)(\?|-?\d+(?:,\d{{3}})*(?:\.\d+)?(?: ± \d+(?:\.\d+)?)?)")


def with_values(line: str, folder: Path) -> str:
    """A line of a page with each number that stands behind a comment `<!-- value NAME ... -->` made anew.

    A number with ± keeps one, the standard deviation over seeds, or of a difference (`less`) its standard error.

    Args:
        line: of the page. A question mark stands for a number that is not known yet.
        folder: of the page.

    Raises:
        ArgumentError: a comment without a number behind it in its line, one that begins its line, where Markdown would
            end the paragraph, or as `number_of`.

    Examples:
        >>> with_values("It reaches 98 %.", Path())
        'It reaches 98 %.'
    """

    def anew(match: re.Match[str]) -> str:
        directive = Directive.parse(match[1])
        assert directive is not None
        return match[1] + number_of(directive, folder, has_spread="±" in match[2])

    text, count = _VALUE.subn(anew, line)
    if count != line.count(_MARK) or line.lstrip().startswith(_MARK):
        remedy = "Write both in one line, without a space between them and behind a word."
        raise ArgumentError("directive", "of a value must stand before its number", f"got the line {line!r}", remedy)
    return text


def number_of(directive: Directive, folder: Path, *, has_spread: bool = False) -> str:
    """The number of a directive: an accuracy in per cent, an epsilon rounded up, or three digits in its unit.

    Raises:
        ArgumentError: as `read_rows`; conditions that leave several numbers of a seed, or none; a difference of runs
            whose seeds differ.
    """
    column = directive.value[0]
    kept = _kept(directive, folder)
    values = _by_seed(kept, column)
    if column.endswith("dp_epsilon"):
        return cell(kept, column)
    if directive.less:
        replaced = {condition.partition(":")[0] for condition in directive.less}
        others = (one for one in directive.where if one.partition(":")[0] not in replaced)
        less = _by_seed(_kept(directive._replace(where=(*others, *directive.less)), folder), column)
        if values.keys() != less.keys():
            found = f"got {', '.join(values)} and {', '.join(less)}"
            raise ArgumentError("directive", "of a difference must have equal seeds", found, "Mend the page.")
        values = {seed: value - less[seed] for seed, value in values.items()}
    scale, digits = (100.0, ".1f") if column.startswith(ACCURACIES) else (1.0, ".3g")
    unit = float(directive.unit[0]) if directive.unit else 1.0
    numbers = [*values.values()]
    text = f"{scale * np.mean(numbers) / unit:{digits}}"  # in the order of a table's cell, which rounds alike
    if not has_spread or len(numbers) < 2:
        return text
    spread = scale * np.std(numbers, ddof=1) / unit / (np.sqrt(len(numbers)) if directive.less else 1.0)
    return f"{text} ± {spread:{digits}}"


def _kept(directive: Directive, folder: Path) -> list[Row]:
    return best_of(read_rows(directive, folder), directive.best, directive.value[0])[0]


def _by_seed(rows: Sequence[Row], column: str) -> dict[str, float]:
    """The number of each seed."""
    seeds = [row.get("seed", "") for row in rows]
    if len({*seeds}) < len(seeds) or not all(row.get(column) for row in rows):
        found = f"got {len(rows)} rows of {len({*seeds})} seeds"
        raise ArgumentError("directive", f"must leave one number of {column} a seed", found, "Mend the page.")
    return {seed: float(row[column]) for seed, row in zip(seeds, rows, strict=True)}
