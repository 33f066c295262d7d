"""A table for a terminal: its cells stay whole, and where it is too narrow some columns are left out and named."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult

_BESIDE = 3  # letters of a column's frame and padding
_MOST_FOLDED = 16  # letters in a line of a column of texts that may be folded anywhere


class FittingTable(rich.table.Table):
    """A table of rich that leaves out columns of numbers where it is too wide.

    Args:
        file: name of the file that has all columns.
        options: of `rich.table.Table`.

    Guarantees:
        - no number is broken into lines; headings and cells break at spaces, not at no-break spaces.
        - of the columns of numbers the last ones are left out, only as many as needed, and the caption names them.

    Examples:
        >>> table = FittingTable(file="results.csv")
        >>> table.add_column("case"), table.add_numbers("test accuracy"), table.add_numbers("train loss")
        (None, None, None)
        >>> table.add_row("A", "91.2", "0.25")
        >>> console = Console(width=21)
        >>> with console.capture() as shown:
        ...     console.print(table)
        >>> print(*map(str.rstrip, shown.get().splitlines()), sep="\\n")
        ┏━━━━━━┳━━━━━━━━━━━━┓
        ┃      ┃       test ┃
        ┃ case ┃   accuracy ┃
        ┡━━━━━━╇━━━━━━━━━━━━┩
        │ A    │       91.2 │
        └──────┴────────────┘
        left out here: train
        loss; see results.csv
    """

    def __init__(self, *, file: str, **options: Any):
        super().__init__(caption_justify="left", **options)
        self._file, self._numbers = file, list[rich.table.Column]()

    def add_numbers(self, heading: str) -> None:
        """Add a column of numbers. All but the first of these may be left out."""
        self.add_column(heading, justify="right")
        self._numbers.append(self.columns[-1])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = [*self.columns], list[str]()
        for column in reversed(self._numbers[1:]):
            if _room(shown, options) >= 0:
                break
            shown.remove(column)
            left_out.insert(0, str(column.header))
        widths, room = [*map(_least, shown)], _room(shown, options)
        for texts in (_cells, _texts) if room > 0 else ():  # first each cell gets a line, then each heading
            for number, column in enumerate(shown):
                more = max(map(cell_len, texts(column)), default=0) - widths[number]
                more = max(0, min(more, room))
                widths[number], room = widths[number] + more, room - more
        for column, width in zip(shown, widths, strict=True):
            column.width = None if room < 0 else width  # None: rich takes from all
        table = copy.copy(self)
        table.columns = shown
        if left_out:
            note = f"left out here: {', '.join(left_out)}; see {self._file}"
            table.caption = "\n".join([str(self.caption), note] if self.caption else [note])
        yield from rich.table.Table.__rich_console__(table, console, options)


def _cells(column: rich.table.Column) -> list[str]:
    return [*map(str, column.cells)]


def _texts(column: rich.table.Column) -> list[str]:
    return [str(column.header), *_cells(column)]


def _least(column: rich.table.Column) -> int:
    """Least width of a column: of its longest piece that no line may break."""
    longest = max(cell_len(piece) for text in _texts(column) for piece in text.split(" "))
    return min(longest, _MOST_FOLDED) if column.overflow == "fold" else longest


def _room(columns: Sequence[rich.table.Column], options: ConsoleOptions) -> int:
    """Letters of a line that columns of least width leave; negative where they do not fit."""
    return options.max_width - 1 - sum(_BESIDE + _least(column) for column in columns)
