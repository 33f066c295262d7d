"""Lines of a metrics.jsonl, held in columns: eight bytes for a number, where a dict of each line takes kilobytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.core.check import ArgumentError

METRICS = "metrics.jsonl"
_FIELDS = {"case": str, "seed": int, "round": int}
_NUMBERS = {int: ("q", "<i8"), float: ("d", "<f8")}  # letters for struct, and for NumPy
_PLACE = "number of the line"  # a field of every table

Label = tuple[str, int]
"""(case, seed) of a lane."""
_Form = tuple[tuple[str, Any], ...]
"""Names of a line's entries in their order, each with the type of its number; all else is a constant, as JSON."""


class Lines(Sequence[dict[str, Any]]):
    """Lines in their order. Those of one form are rows of a table with a column for each number.

    Args:
        lines: each with case, seed, round, and values that JSON can hold.

    Guarantees:
        - a line that is taken out equals the line that was put in, types included.

    Examples:
        >>> lines = Lines({"case": "A", "seed": s, "round": r, "loss": s + r / 2} for r in (0, 1) for s in (0, 4))
        >>> lines[-1], len(lines)
        ({'case': 'A', 'seed': 4, 'round': 1, 'loss': 4.5}, 4)
        >>> [column.tolist() for column in lines.columns("round", "loss")]
        [[0, 0, 1, 1], [0.0, 4.0, 0.5, 4.5]]
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()):
        packed: dict[_Form, tuple[list[str], struct.Struct, bytearray]] = {}
        for place, line in enumerate(lines):
            form = tuple(zip(line, map(_kind, line.values()), strict=True))
            if form not in packed:
                numbers = _numbers(form)
                layout = struct.Struct("<q" + "".join(_NUMBERS[kind][0] for kind in numbers.values()))
                packed[form] = [*numbers], layout, bytearray()
            names, layout, rows = packed[form]
            rows += layout.pack(place, *[line[name] for name in names])
        self._tables = {form: np.frombuffer(rows, _row_type(form)) for form, (_, _, rows) in packed.items()}

    def __repr__(self) -> str:
        return f"Lines({len(self)} lines of {len(self.by_case())} cases: {', '.join(self.names())})"

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        places = [(form, row) for form, table in self._tables.items() for row in range(len(table))]
        for index in np.argsort(_joined([*self._tables.values()], _PLACE), kind="stable").tolist():
            yield self._line(*places[index])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [*self][index]
        place = np.sort(_joined([*self._tables.values()], _PLACE))[index]
        (found,) = [
            (form, row)
            for form, table in self._tables.items()
            for row in np.flatnonzero(table[_PLACE] == place).tolist()
        ]
        return self._line(*found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def names(self) -> dict[str, bool]:
        """Names of all entries, in the order in which they appear -> whether some of its values are integers."""
        found: dict[str, bool] = {}
        for name, kind in (pair for form in self._in_order() for pair in form):
            found[name] = found.get(name, False) or kind is int
        return found

    def by_case(self) -> dict[str, Lines]:
        """Case -> its lines; cases in the order in which they appear."""
        tables: dict[str, dict[_Form, np.ndarray]] = {}
        for form in self._in_order():
            tables.setdefault(_case(form), {})[form] = self._tables[form]
        return {case: self._with(own) for case, own in tables.items()}

    def having(self, *names: str) -> Lines:
        """The lines in which all of these entries are numbers."""
        return self._with({form: own for form, own in self._tables.items() if {*names} <= _numbers(form).keys()})

    def after(self, round_index: int) -> Lines:
        """The lines of later rounds."""
        later = {form: table[table["round"] > round_index] for form, table in self._tables.items()}
        return self._with({form: table for form, table in later.items() if len(table)})

    def columns(self, *names: str) -> list[np.ndarray]:
        """Entries, (lines,) each, int64 or float64, of those lines in which all of them are numbers."""
        tables = [*self.having(*names)._tables.values()]
        order = np.argsort(_joined(tables, _PLACE), kind="stable")
        return [_joined(tables, name)[order] for name in names]

    def ends(self) -> dict[Label, dict[str, Any]]:
        """The last line of each lane; lanes in the order in which they appear."""
        parts: dict[Label, list[tuple[int, int, _Form, int]]] = {}
        for form, table in self._tables.items():
            seeds, firsts = np.unique(table["seed"], return_index=True)
            lasts = len(table) - 1 - np.unique(table["seed"][::-1], return_index=True)[1]
            case, places = _case(form), table[_PLACE].tolist()
            for seed, first, last in zip(*(column.tolist() for column in (seeds, firsts, lasts)), strict=True):
                parts.setdefault((case, seed), []).append((places[first], places[last], form, last))
        in_order = sorted(parts, key=lambda label: min(first for first, *_ in parts[label]))
        return {label: self._line(*max(parts[label], key=lambda part: part[1])[2:]) for label in in_order}

    def sums_of(self, name: str) -> dict[int, Any]:
        """Seed -> the sum of an entry over the lines in which it is a number."""
        sums: dict[int, Any] = {}
        for table in self.having(name)._tables.values():
            order = np.argsort(table["seed"], kind="stable")
            seeds, firsts = np.unique(table["seed"][order], return_index=True)
            for seed, own in zip(seeds.tolist(), np.split(table[name][order], firsts[1:]), strict=True):
                sums[seed] = sums.get(seed, 0) + own.sum().item()
        return sums

    def _in_order(self) -> list[_Form]:
        return sorted(self._tables, key=lambda form: self._tables[form][_PLACE][0])

    def _line(self, form: _Form, row: int) -> dict[str, Any]:
        _, *numbers = self._tables[form][row].item()
        values = iter(numbers)
        return {name: next(values) if kind in _NUMBERS else json.loads(kind) for name, kind in form}

    def _with(self, tables: dict[_Form, np.ndarray]) -> Lines:
        some = Lines()
        some._tables = tables
        return some


def _kind(value: Any) -> Any:
    """The type of a number that 64 bits hold, or the value as JSON."""
    if type(value) is float or (type(value) is int and -(2**63) <= value < 2**63):
        return type(value)
    return _quoted(value) if type(value) is str else json.dumps(value)


_quoted = lru_cache(maxsize=1024)(json.dumps)  # names of cases


def _numbers(form: _Form) -> dict[str, type]:
    """Names of the entries that are numbers -> their type."""
    return {name: kind for name, kind in form if kind in _NUMBERS}


def _row_type(form: _Form) -> np.dtype:
    return np.dtype([(_PLACE, "<i8"), *((name, _NUMBERS[kind][1]) for name, kind in _numbers(form).items())])


def _case(form: _Form) -> str:
    return json.loads(dict(form)["case"])


def _joined(tables: Sequence[np.ndarray], name: str) -> np.ndarray:
    return np.concatenate([table[name] for table in tables]) if tables else np.zeros(0)


def lines_of(paths: Iterable[Path]) -> Lines:
    """All complete lines of these files, in their order; a line that is being written right now is left out.

    Those that were read last are kept for the next call, while the files stay as they are.
    """
    states = [(path.resolve(), path.stat()) for path in paths]
    return _lines_of(*((path, state.st_ino, state.st_size, state.st_mtime_ns) for path, state in states))


@lru_cache(maxsize=1)
def _lines_of(*files: tuple[Path, int, int, int]) -> Lines:
    return Lines(line for path, *_ in files for line in parse_lines(path))


def parse_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics.jsonl, one after the other; a line that is cut off at the end is left out.

    Raises:
        ArgumentError: a line is not of this form, or a lane's rounds do not ascend.
    """
    rounds: dict[Label, int] = {}
    remedy = "Restore the file, or start again with another out."
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict) or any(type(line.get(name)) is not kind for name, kind in _FIELDS.items()):
                requirement = f"{path} must hold JSON lines with {', '.join(_FIELDS)}"
                raise ArgumentError("out", requirement, f"line {number} does not", remedy)
            lane = line["case"], line["seed"]
            if line["round"] <= rounds.get(lane, -1):
                requirement = f"{path} must hold every line once, in the order of its rounds"
                found = f"line {number} has round {line['round']} of {lane[0]}, seed {lane[1]}, after {rounds[lane]}"
                raise ArgumentError("out", requirement, found, remedy)
            rounds[lane] = line["round"]
            yield line
