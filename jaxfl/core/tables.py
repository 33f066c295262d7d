"""One rulebook for names and numbers from outside: tables, arrays, graphs, budgets and partitions follow it.

A name is text without blanks at its ends, in Unicode's composed form. A whole number in any spelling is that number: 1,
1.0 and 1e0 are one name, but 007 is text. Names are in ascending order, as numbers where all of them are. Names that
differ by blanks or case only are refused, and so is a missing name in any spelling (`MISSING`).
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import itertools
import math
import os
import re
import stat
import unicodedata
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core.check import ArgumentError

MISSING = frozenset(("", "?", "#n/a", "<na>", "n/a", "na", "nan", "nat", "none", "null"))  # in any case
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.0*)?(e\+?[0-9]+)?", re.IGNORECASE)
_DIGITS = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")  # longer ones stay text
_EXACT = 2.0**53  # floats count whole numbers exactly up to here
_GZIP_MAGIC = b"\x1f\x8b"


class Rows(NamedTuple):
    """Rows of a table in a text file."""

    cells: list[tuple[int, list[str]]]  # number of the row in the file, from 1, and its cells; rows without any are out
    separator: str  # a key of SEPARATORS


class Numbered(NamedTuple):
    """Names by number."""

    names: tuple[str, ...]  # distinct, ascending
    numbers: np.ndarray  # (N,), int64: the position of each value's name in `names`


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes; OSError for a folder, or a pipe, a socket or a device, which may not end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise OSError(errno.EINVAL, f"is {kind}")
    return status.st_size


def read_rows(path: str, argument: str, requirement: str, remedy: str) -> Rows:
    """Read a table in a text file (UTF-8, perhaps gzip), separated by commas, semicolons, tabs or bars.

    The separator gives the first two rows equally many cells, and most; a comma, or a tab in a .tsv file, goes first.

    Args:
        path: the file; `~` is expanded.
        argument, requirement, remedy: of the error.

    Raises:
        ArgumentError: a file that is not regular, cannot be read or decoded, or begins with a comment.
    """
    file = Path(os.path.expanduser(path))
    try:
        regular_size(file)
        with file.open("rb") as raw:
            opened = gzip.open if raw.read(2) == _GZIP_MAGIC else open
        with opened(file, "rt", newline="", encoding="utf-8-sig") as stream:
            text = stream.read()
        first = list(itertools.islice(filter(str.strip, io.StringIO(text, newline=None)), 2))
        if any(";" in line for line in first):  # and the commas between digits stand before decimals
            first = [re.sub("(?<=[0-9]),(?=[0-9])", ".", line) for line in first]
        counts = {one: [len(next(csv.reader([line], delimiter=one), [])) for line in first] for one in SEPARATORS}
        order = "\t,;|" if ".tsv" in file.name.lower() else ",;\t|"
        separator = max(
            order, key=lambda one: (max(counts[one], default=0) > 1 and len({*counts[one]}) == 1, *counts[one])
        )
        rows = enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True), start=1)
        cells = [(number, row) for number, row in rows if any(map(str.strip, row))]
    except UnicodeDecodeError as error:
        raise ArgumentError(argument, requirement, f"{path}: {error}", "Save it as UTF-8.") from None
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        found = f"{path}: {getattr(error, 'strerror', None) or error}"
        raise ArgumentError(argument, requirement, found, remedy) from None
    if cells and cells[0][1][0].lstrip().startswith("#"):
        raise ArgumentError(argument, requirement, f"{path} begins with a comment", "Remove such lines.")
    return Rows(cells, separator)


def as_name(value: Any) -> str | None:
    """Return a value as a name; None where it is missing.

    Examples:
        >>> as_name(" Oslo "), as_name("1.0"), as_name(1), as_name("007"), as_name("1e3"), as_name("N/A")
        ('Oslo', '1', '1', '007', '1000', None)
    """
    text = unicodedata.normalize("NFC", _text(value)).strip()
    if text.casefold() in MISSING:
        return None
    if _DIGITS.fullmatch(text):
        return str(int(text))
    return str(int(float(text))) if _WHOLE.fullmatch(text) and abs(float(text)) <= _EXACT else text


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return "" if value is None else str(value)


def is_whole(name: str) -> bool:
    """Tell whether a name is a whole number, as `as_name` writes it."""
    return _DIGITS.fullmatch(name) is not None


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names: as numbers where all are whole numbers, else as text.

    Examples:
        >>> in_order(["10", "9"]), in_order(["10", "9", "b"])
        (['9', '10'], ['10', '9', 'b'])
    """
    distinct = list(names)
    return sorted(distinct, key=int) if all(map(is_whole, distinct)) else sorted(distinct)


def refuse_alike(argument: str, names: Iterable[str], source: str) -> None:
    """Raise for two names that differ by blanks, case or invisible letters only."""
    by_letters: dict[str, str] = {}
    for name in names:
        seen = (one for one in name.casefold() if not one.isspace() and unicodedata.category(one)[0] != "C")
        other = by_letters.setdefault("".join(seen), name)
        if other != name:
            found = f"{source} has {other!r} and {name!r}"
            raise ArgumentError(argument, "must differ by more than blanks and case", found, "Write one of them.")


def numbered(argument: str, values: Any, place: Callable[[int], str], source: str = "it") -> Numbered:
    """Number values by their names, in the order of `in_order`.

    Args:
        argument: for errors.
        values: (N,), text, numbers, booleans, or a mixture as a list or an array of objects.
        place: position -> where it stands, for errors.
        source: where all stand, for errors.

    Raises:
        ArgumentError: no vector of names, a missing name, or names that differ by blanks or case only.

    Examples:
        >>> numbered("sites", ["b", "a ", "b"], "row {}".format)
        Numbered(names=('a', 'b'), numbers=array([1, 0, 1]))
    """
    if isinstance(values, np.ma.MaskedArray):
        values = values.tolist()  # None where it is masked
    array = values if isinstance(values, np.ndarray) else np.array(values, object)
    nested = array.flat if array.dtype.kind == "O" else ()
    odd = [one for one in nested if isinstance(one, Collection | np.ndarray) and not isinstance(one, str | bytes)][:1]
    if array.ndim != 1 or array.dtype.kind not in "biufUSTOMm" or odd:
        found = f"got {odd[0]!r:.40}" if odd else f"got {array.dtype} of shape {array.shape}"
        remedy = "Pass a vector: .ravel() of a column, .argmax(axis=1) of rows with a single 1."
        raise ArgumentError(argument, "must be a vector of integers or text, one entry a sample", found, remedy)
    if array.dtype.kind in "biuf":
        distinct, first, inverse = np.unique(array, return_index=True, return_inverse=True)
        spellings = list(map(str, distinct))
    else:  # dictionaries hold text of any length without padding
        codes: dict[str, int] = {}
        texts = map(_text, array.astype(str).tolist() if array.dtype.kind in "Mm" else array.tolist())
        inverse = np.array([codes.setdefault(text, len(codes)) for text in texts], np.int64)
        first, spellings = np.unique(inverse, return_index=True)[1], list(codes)
    of_values = list(map(as_name, spellings))
    missing = [row for row, name in zip(first.tolist(), of_values, strict=True) if name is None]
    if missing:
        found = f"{place(min(missing))} has none"
        raise ArgumentError(argument, "must be known for each sample", found, "Fill or drop such rows.")
    names = in_order({name for name in of_values if name is not None})
    refuse_alike(argument, names, source)
    position = {name: number for number, name in enumerate(names)}
    return Numbered(tuple(names), np.array([position[str(name)] for name in of_values], np.int64)[inverse])


def as_numbers(values: Sequence[Any] | np.ndarray, *, comma: bool = False) -> np.ndarray:
    """Read a column as numbers, (N,) float64 or the dtype of an array of numbers; NaN for what is none.

    Args:
        values: (N,), numbers or text.
        comma: a comma stands before the decimals.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufMm":  # a date is no number
        return values if values.dtype.kind in "biuf" else np.full(len(values), np.nan)
    texts = [text.replace(",", ".") if comma and isinstance(text, str) else text for text in values]
    try:
        return np.array(texts, np.float64)
    except (TypeError, ValueError):
        return np.array([_number(text) for text in texts], np.float64)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
