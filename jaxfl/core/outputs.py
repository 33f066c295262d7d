"""Files for people: CSV tables without formulas for a spreadsheet, and places that no link leads away from."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Text that a spreadsheet runs, and no number; the last four letters are wide forms of the others.
_FORMULA = re.compile("'*(?![+-](inf|[0-9.]+(e[+-]?[0-9]+)?)$)[=+\\-@\uff1d\uff0b\uff0d\uff20]")


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as CSV. Text that would run has a ' before it; control and direction letters are escapes.

    Examples:
        >>> csv_text([["site", -0.5], ["=1+1", "-0.5"]])
        "site,-0.5\\n'=1+1,-0.5\\n"
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [_harmless(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )
    return text.getvalue()


def _harmless(cell: str) -> str:
    text = cell  # without such letters, which are not printable
    if not cell.isprintable():
        text = "".join(f"\\u{ord(one):04x}" if unicodedata.category(one)[0] == "C" else one for one in cell)
    return f"'{text}" if _FORMULA.match(text) else text


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column, without what `csv_text` put before text."""
    with open(path, newline="", encoding="utf-8") as lines:
        heading, *rows = [[_plain(cell) for cell in row] for row in csv.reader(lines) if row] or [[]]
    return [dict(zip(heading, row, strict=False)) for row in rows]


def _plain(cell: str) -> str:
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


def varying(settings: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], dict[str, list[str]]]:
    """Columns of what varies: headings, and each case's cells; the case's name where options do not tell all apart.

    Examples:
        >>> varying({"A, 0.1": {"method": "A", "step_size": 0.1, "nodes": 2}, "B": {"method": "B", "nodes": 2}})
        (['method', 'step size'], {'A, 0.1': ['A', '0.1'], 'B': ['B', '–']})
    """
    names = dict.fromkeys(name for row in settings.values() for name in row)
    differing = [name for name in names if len({repr(row.get(name)) for row in settings.values()}) > 1]
    cells = {case: [_short(row.get(name)) for name in differing] for case, row in settings.items()}
    if not differing or len({*map(tuple, cells.values())}) < len(cells):
        return ["case"], {case: [case] for case in settings}
    return [name.replace("_", " ") for name in differing], cells


def _short(value: Any) -> str:
    """An option's value as a cell."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value))
    return "–" if value is None or value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def drop_link(path: Path) -> Path:
    """Remove a link in the place of a file or folder that is about to be written, so that nobody's file is."""
    if path.is_symlink():
        path.unlink()
    return path
