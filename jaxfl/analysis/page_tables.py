"""Tables of a result page, from a CSV file with one row for each case and seed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.core.outputs import read_csv
from jaxfl.privacy.statements import RELATIONS, rounded_up

Row = Mapping[str, str]
ACCURACY = "test_accuracy"
ACCURACIES = (ACCURACY, "own_accuracy")  # columns that begin so are shares
BEST = f"{ACCURACY}_best"
_COLUMNS = {
    ACCURACY: "test accuracy, %",
    f"{ACCURACY}_worst_node": "worst node, %",
    f"{ACCURACY}_average_model": "average model, %",
    "own_accuracy": "own samples, %",
    "own_accuracy_worst_node": "own samples, worst node, %",
    BEST: "best evaluation of each seed, %",
    "num_steps": "local iterations τ",
    "total_local_iterations": "local iterations of a client",
    "total_bits_sent": "bits sent",
    "total_simulated_seconds": "simulated seconds",
}
OPTIONS = {
    **{"target_epsilon": "ε", "iterations": "K", "step_size": "step", "num_active": "senders"},
    "decay_rounds": "step cut after rounds",
}
_OF_TABLES, _OF_VALUES = ("rows", "columns", "value", "best", "where"), ("value", "best", "where", "less", "unit")


class Directive(NamedTuple):
    """A comment of a page that says what follows it."""

    kind: str  # table, picture or value
    names: tuple[str, ...]  # of the files
    rows: tuple[str, ...] = ()  # options whose values name the rows of a table
    columns: tuple[str, ...] = ()  # one option whose values head the columns, or columns of the file
    lines: tuple[str, ...] = ()  # options whose values name the lines of a picture, or with `best` its curves
    x: tuple[str, ...] = ()  # option or column along the horizontal axis
    y: tuple[str, ...] = (ACCURACY,)  # columns along the vertical axes, a panel each
    value: tuple[str, ...] = (ACCURACY,)  # column that a cell or a value shows; `best_of` says how it decides
    best: tuple[str, ...] = ()  # option whose best value each cell, point or curve takes
    where: tuple[str, ...] = ()  # OPTION:VALUE to keep, OPTION:!VALUE to leave out; ", " does not end a value
    curves: tuple[str, ...] = ()  # draw curves over rounds, one for each value of this entry
    title: tuple[str, ...] = ()
    log: tuple[str, ...] = ()  # axes that are logarithmic: x, y
    level: tuple[str, ...] = ()  # heights at which a dotted line is drawn
    bottom: tuple[str, ...] = ()  # the lower end of the vertical axis, of shares
    bands: tuple[str, ...] = ()  # none: curves have no bands
    marks: tuple[str, ...] = ()  # places of vertical lines
    panels: tuple[str, ...] = ()  # an entry of curves whose values have a panel each, of one height
    steps: tuple[str, ...] = ()  # y: curves of whole numbers that hold for a round each
    less: tuple[str, ...] = ()  # conditions in place of those of `where`: a value is less the number there
    unit: tuple[str, ...] = ()  # by which a value is divided, 1e6 for Mbit
    words: Mapping[str, str] = {}  # of the page, for names; no option of a comment

    @classmethod
    def parse(cls, line: str) -> Directive | None:
        """Parse the directive in a line of a page; None for another line.

        Raises:
            ArgumentError: an option that its kind does not have, no name of a file, an open quote.

        Examples:
            >>> Directive.parse("<!-- table fig7 rows=step_size columns=iterations -->").rows
            ('step_size',)
            >>> Directive.parse('<!-- picture half curves=case where="case:!FedAvg, step size 1,seed:0" -->').where
            ('case:!FedAvg, step size 1', 'seed:0')
        """
        text = line.strip()
        kind = next((kind for kind in ("table", "picture", "value") if text.startswith(f"<!-- {kind} ")), None)
        if kind is None or not text.endswith("-->"):
            return None
        try:
            name, *words = shlex.split(text.removeprefix(f"<!-- {kind}").removesuffix("-->"))
        except ValueError:
            found = f"got {text!r}"
            raise ArgumentError("directive", "must name a file, with closed quotes", found, "Mend the page.") from None
        options: dict[str, Any] = {}
        others = ("rows", "columns", "value", "less", "unit", "words")
        known = {"table": _OF_TABLES, "value": _OF_VALUES}.get(kind, [k for k in cls._fields[2:] if k not in others])
        for word in words:
            key, _, value = word.partition("=")
            if key not in known:
                found = f"got {key!r}"
                raise ArgumentError("directive", f"of a {kind} has {', '.join(known)}", found, "Mend the page.")
            options[key] = (value,) if key == "title" else tuple(re.split(",(?! )", value))
        return cls(kind, tuple(name.split("+")), **options)


def words_of(line: str) -> dict[str, str]:
    """The words in a line of a page; none in another line."""
    text = line.strip()
    if not (text.startswith("<!-- words ") and text.endswith("-->")):
        return {}
    pairs = [word.partition(":") for word in shlex.split(text.removeprefix("<!-- words").removesuffix("-->"))]
    return {key: value for key, _, value in pairs}


def worded(text: str, words: Mapping[str, str]) -> str:
    """A name in the words of a page.

    Examples:
        >>> worded("A_1, num active 5, cut ", {"A_1": "A", "num active {}": "{} senders", "cut": ""})
        'A, 5 senders'
    """
    if text in words:
        return words[text]
    parts = list[str]()
    for part in map(str.strip, text.split(", ")):
        matches = ((re.fullmatch(re.escape(key).replace(r"\{\}", "(.+)"), part), words[key]) for key in words)
        parts.append(next((value.format(*match.groups()) for match, value in matches if match), part))
    return ", ".join(filter(None, parts))


def read_rows(directive: Directive, folder: Path) -> list[Row]:
    """The rows of the directive's files that it keeps.

    Raises:
        ArgumentError: a file that is missing, or no row that fits.
    """
    rows: list[Row] = []
    for name in directive.names:
        path = folder / f"{name}_results.csv"
        path = path if path.exists() or not (folder / f"{name}.csv").exists() else folder / f"{name}.csv"
        if not path.exists():
            raise ArgumentError("directive", "must name a file beside the page", f"{path} is missing", "Keep it there.")
        rows += _with_more(directive, folder / name, [*read_csv(path)])
    check_conditions(directive, rows)
    rows = [row for row in rows if is_kept(directive, row)]
    if not rows:
        raise ArgumentError("directive", "must keep some rows", f"got where={directive.where}", "Mend the page.")
    return rows


def read_lines(name: str, folder: Path) -> list[dict[str, Any]]:
    """The lines of NAME_metrics.jsonl.

    Raises:
        ArgumentError: the file is missing.
    """
    path = folder / f"{name}_metrics.jsonl"
    if not path.exists():
        raise ArgumentError("directive", "must name a file beside the page", f"{path} is missing", "Keep it there.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _with_more(directive: Directive, path: Path, rows: list[Row]) -> list[Row]:
    """Add the named options that stand in the run's configuration alone, and each seed's best evaluation.

    An option that is on becomes its name; one that is off or None becomes nothing.
    """
    named = {*directive.rows, *directive.columns, *directive.lines, *directive.x, *directive.best}
    named |= {condition.partition(":")[0] for condition in directive.where}
    missing = named - {*rows[0]} if rows else set()
    config = path.with_name(f"{path.name}_config.json")
    if missing and config.exists():
        base = json.loads(config.read_text(encoding="utf-8")).get("config", {})
        of_case = {name: {**base, **changes} for name, changes in base.get("cases", {}).items()}
        rows = [{**_texts(missing, of_case.get(row.get("case", ""), {})), **row} for row in rows]
    if BEST in (*directive.value, *directive.columns, *directive.y) and rows and BEST not in rows[0]:
        best: dict[Any, float] = {}
        for line in read_lines(path.name, path.parent):
            if line.get(ACCURACY) is not None:
                key = line.get("case"), str(line["seed"])
                best[key] = max(best.get(key, 0.0), line[ACCURACY])
        if not all((row.get("case"), row.get("seed")) in best for row in rows):
            found = f"{path.name}_metrics.jsonl lacks some"
            raise ArgumentError("directive", f"must have every case and seed for {BEST}", found, "Keep them there.")
        rows = [{**row, BEST: str(best[row["case"], row["seed"]])} for row in rows]
    return rows


def _texts(names: Collection[str], options: Mapping[str, Any]) -> dict[str, str]:
    """The named options of a case as cells."""
    return {
        name: name.replace("_", " ") if value is True else "" if value is None or value is False else str(value)
        for name, value in options.items()
        if name in names
    }


def check_conditions(directive: Directive, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a condition on what no row has."""
    for key in (condition.partition(":")[0] for condition in directive.where):
        if not any(key in row for row in rows):
            raise ArgumentError("directive", "must name columns of its file", f"got where={key!r}", "Mend the page.")


def is_kept(directive: Directive, row: Mapping[str, Any]) -> bool:
    """True if a row, or a line of a curve, meets each condition of the directive."""
    conditions = [condition.partition(":") for condition in directive.where]
    return all(
        _same(str(row.get(key, "")), value.removeprefix("!")) != value.startswith("!") for key, _, value in conditions
    )


def is_number(text: str) -> bool:
    """True if a cell of a file is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _same(text: str, value: str) -> bool:
    """True if two cells are equal, numbers as numbers."""
    both = is_number(text) and is_number(value)
    return float(text) == float(value) if both else text == value


def _order(text: str) -> tuple[bool, float]:
    """Numbers before words, in ascending order; words stay as they come."""
    return not is_number(text), float(text) if is_number(text) else 0.0


def values_of(rows: Iterable[Row], key: str) -> list[str]:
    """The values that an option has in some row, numbers in ascending order, words in the file's."""
    return sorted(dict.fromkeys(row[key] for row in rows if row.get(key)), key=_order)


def numbers(rows: Sequence[Row], column: str) -> list[float] | None:
    """A column over seeds; None if a seed has no number, for its run diverged."""
    texts = [row.get(column, "") for row in rows]
    return [float(text) for text in texts] if texts and all(texts) else None


def best_of(rows: Sequence[Row], options: Sequence[str], value: str) -> tuple[list[Row], str]:
    """Rows with the best value of an option, and a note that names it.

    The mean of a column decides: of `value`'s like on samples that validate, else of their accuracy, else of `value`.
    """
    if not options:
        return list(rows), ""
    (option,), validated = options, (value.replace("test_", "validation_", 1), "validation_accuracy")
    value = next((one for one in validated if one != value and any(one in row for row in rows)), value)
    tried = values_of(rows, option)
    of_option = {one: [row for row in rows if row.get(option, "") == one] for one in tried}
    means = {one: np.mean(values) for one, own in of_option.items() if (values := numbers(own, value)) is not None}
    if not means:  # all diverged, or the option is none of theirs
        return list(rows), ""
    best = max(means, key=lambda one: means[one])
    is_end = len(tried) > 1 and best in (tried[0], tried[-1])
    return of_option[best], f" ({OPTIONS.get(option, option)} {short(best, {})}{', at an end' if is_end else ''})"


def short(text: str, words: Mapping[str, str]) -> str:
    """A cell of a file as a page shows it, a list without its brackets."""
    if text.startswith("["):
        return text.strip("[]") or "none"
    return f"{float(text):g}" if is_number(text) else worded(text, words)


def cell(rows: Sequence[Row], column: str) -> str:
    """A number over seeds: an accuracy in per cent with its spread, the largest epsilon rounded up, or a mean."""
    if column.endswith("dp_epsilon"):
        known = [float(row[column]) for row in rows if row.get(column)]
        if not known or len(known) < len(rows):
            return "none"
        text = rounded_up(max(known), 3)
        return f"{float(text):,.0f}" if float(text) >= 1000 else text
    values = numbers(rows, column)
    if values is None:
        return "diverged" if rows else ""
    share, digits = (100.0, ".1f") if column.startswith(ACCURACIES) else (1.0, ".3g")
    spread = f" ± {share * np.std(values, ddof=1):{digits}}" if len(values) > 1 and np.ptp(values) > 0 else ""
    return f"{share * np.mean(values):{digits}}{spread}"


def heading(rows: Sequence[Row], column: str) -> str:
    """A column's name in words, an epsilon's with its relation."""
    if not column.endswith("dp_epsilon"):
        return _COLUMNS.get(column, column.replace("_", " "))
    bound = column.removesuffix("_dp_epsilon")
    texts = [row.get(f"{bound}_neighboring_relation", "") for row in rows]
    relation = next((RELATIONS.get(text, text) for text in texts if text), "")
    return f"ε {bound}{f', {relation}' if relation else ''}"


def table(directive: Directive, folder: Path) -> list[str]:
    """The lines of a table in Markdown.

    Raises:
        ArgumentError: as read_rows; a table without rows or columns; an option that is no column of the file.
    """
    rows = read_rows(directive, folder)
    if not directive.rows or not directive.columns:
        found = f"got rows={directive.rows}, columns={directive.columns}"
        raise ArgumentError("directive", "must name rows and columns of a table", found, "Mend the page.")
    for key in (*directive.rows, *directive.columns, *directive.best, *directive.value):
        if not any(key in row for row in rows):
            raise ArgumentError("directive", "must name columns of its file", f"got {key!r}", "Mend the page.")
    option = directive.columns[0] if len(directive.columns) == 1 else None
    if option is not None and (option.startswith(ACCURACIES) or option.endswith("dp_epsilon")):
        option = None
    heads = values_of(rows, option) if option else list(directive.columns)
    label = ", ".join(OPTIONS.get(key, key.replace("_", " ")) for key in directive.rows)
    name = OPTIONS.get(option, option.replace("_", " ")) if option else ""
    shown = [f"{name} = {short(head, directive.words)}" if option else heading(rows, head) for head in heads]
    lines = [f"| {label} | {' | '.join(shown)} |", "|---" * (len(heads) + 1) + "|"]
    keys = dict.fromkeys(tuple(row.get(key, "") for key in directive.rows) for row in rows)
    for key in sorted(keys, key=lambda key: [_order(text) for text in key]):
        own = [row for row in rows if tuple(row.get(name, "") for name in directive.rows) == key]
        cells = []
        for head in heads:
            of_cell = [row for row in own if not option or row.get(option, "") == head]
            kept, note = best_of(of_cell, directive.best, directive.value[0])
            cells.append(cell(kept, directive.value[0] if option else head) + note)
        if any(cells):
            lines.append(f"| {', '.join(short(text, directive.words) for text in key if text)} | {' | '.join(cells)} |")
    return lines
