"""Parts of an HTML page: a section, a table, a list."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_LONG = 60  # letters of a cell that is broken into lines


def escaped(value: Any) -> str:
    """A value's text, with `<` and `&` escaped."""
    return html.escape(str(value))


def section(heading: str, content: str) -> str:
    """A part of the page; nothing where it has nothing to show."""
    return f"<section><h2>{escaped(heading)}</h2>{content}</section>" if content else ""


def table_of(heading: Sequence[str], rows: Iterable[Sequence[Any]], best: int | None = None) -> str:
    """A table that scrolls by itself where it is wide; row `best` is highlighted."""

    def td(cell: Any) -> str:
        return f"<td{' class=long' if len(str(cell)) > _LONG else ''}>{escaped(cell)}</td>"

    head = "".join(f"<th>{escaped(name)}</th>" for name in heading)
    body = "".join(
        f"<tr{' class=best' if number == best else ''}>{''.join(map(td, row))}</tr>" for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bullets(texts: Sequence[str]) -> str:
    """A list; nothing where there are no texts."""
    return f"<ul>{''.join(f'<li>{escaped(each)}</li>' for each in texts)}</ul>" if texts else ""
