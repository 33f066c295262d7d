"""Parts of an HTML page: a section, a table, a list."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

_LONG = 60  # letters of a cell that is broken into lines
_WIDE = 10  # columns, above which a printed table has smaller letters
_NO_BREAK = re.compile(r"(?<=±) | (?=[%kMGTPmµnp]$)")  # between a number and its sign or unit


def escaped(value: Any) -> str:
    """A value's text, with `<` and `&` escaped."""
    return html.escape(str(value))


def section(heading: str, content: str) -> str:
    """A part of the page; nothing where it has nothing to show."""
    return f"<section><h2>{escaped(heading)}</h2>{content}</section>" if content else ""


def table_of(heading: Sequence[str], rows: Iterable[Sequence[Any]], best: int | None = None) -> str:
    """A table that scrolls by itself where it is wide; row `best` is highlighted. Lines break before a ± only."""

    def td(cell: Any) -> str:
        text = _NO_BREAK.sub("\N{NO-BREAK SPACE}", escaped(cell))
        return f"<td{' class=long' if len(str(cell)) > _LONG else ''}>{text}</td>"

    head = "".join(f"<th>{escaped(name)}</th>" for name in heading)
    body = "".join(
        f"<tr{' class=best' if number == best else ''}>{''.join(map(td, row))}</tr>" for number, row in enumerate(rows)
    )
    wide = " class=wide" if len(heading) > _WIDE else ""
    return f'<div class="scroll"><table{wide}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bullets(texts: Sequence[str]) -> str:
    """A list; nothing where there are no texts."""
    return f"<ul>{''.join(f'<li>{escaped(each)}</li>' for each in texts)}</ul>" if texts else ""
