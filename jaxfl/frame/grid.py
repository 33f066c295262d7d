"""Grids: lists of configurations, from the command line, a file, given ranges, or Python.

An axis is a mapping from options to equally many values, which go together value by value. A grid is the product of its
axes; the first varies slowest.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.data.files import read_bytes
from jaxfl.frame.options import Option, named, unknown, value_of, varies_by_words

Axis = Mapping[str, Sequence[Any]]
Grid = Sequence[Axis]
MOST_CONFIGURATIONS = 10_000  # of one command: each is checked and compared before the first one trains
_MOST_BYTES = 10**8  # of a file
_WRITE = "Write for example --grid step_size=0.1,0.2, or nodes=25,50 iterations=200,100 for values that go together."


def axis(options: Mapping[str, Option], **values: Sequence[Any]) -> Axis:
    """An axis, checked.

    Raises:
        ArgumentError: an unknown option, no value, or options with different numbers of values.

    Examples:
        >>> axis({"nodes": Option("data", int, False, True, True)}, nodes=(4, 8))
        {'nodes': (4, 8)}
    """
    for name in values:
        if name not in options:
            raise unknown(name, options)
    lengths = {name: len(sequence) for name, sequence in values.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        requirement = "must give options that go together equally many values, at least one"
        raise ArgumentError("--grid", requirement, f"got {lengths}", _WRITE)
    return {name: tuple(sequence) for name, sequence in values.items()}


def parse_axis(tokens: Sequence[str], options: Mapping[str, Option]) -> Axis:
    """The axis of one `--grid OPTION=VALUE,VALUE,... [OPTION=...]`; a value of several words is quoted by the shell."""
    values: dict[str, list[Any]] = {}
    for token in tokens:
        word, equals, words = token.partition("=")
        name = named(word, options)
        if not equals or name in values:
            raise ArgumentError(
                "--grid", "must be OPTION=VALUE,VALUE,... with each option once", f"got {token!r}", _WRITE
            )
        kind = options[name].kind if name in options else str
        refuse_many(words.count(",") + 1)
        values[name] = [value_of(name, kind, text.split()) for text in words.split(",")]
    return axis(options, **values)


def read_axis(path: str, options: Mapping[str, Option]) -> Axis:
    """The axis in a file: a row a configuration, CSV with a heading of options, or one JSON object a line.

    Raises:
        ArgumentError: the file cannot be read, is empty, names an option twice, or its rows name different options.
    """
    file = Path(path).expanduser()
    requirement, remedy = (
        "must be a .csv or .jsonl file with a row a configuration",
        "Name the options in the first row.",
    )
    named_row = functools.partial(_row, options)
    try:
        text = read_bytes(file, remedy, _MOST_BYTES).decode("utf-8-sig")  # which Excel begins by a mark
        if file.suffix == ".jsonl":
            lines = filter(str.strip, text.splitlines())
            rows: list[Any] = [json.loads(line, object_pairs_hook=named_row) for line in lines]
        else:
            heading, *cells = [*filter(None, csv.reader(io.StringIO(text, newline="")))] or [[]]
            columns = len(heading)
            rows = [named_row([*zip(heading, row, strict=True)]) if len(row) == columns else None for row in cells]
    except ArgumentError as error:
        raise ArgumentError("--grid-file", error.requirement, error.found, error.remedy) from None
    except (ValueError, csv.Error, RecursionError):  # no JSON, no UTF-8
        raise ArgumentError("--grid-file", requirement, f"{path} is none", remedy) from None
    if not rows or any(not isinstance(row, dict) or set(row) != set(rows[0]) for row in rows):
        found = f"{path} has {len(rows)} rows" if not rows else f"{path} has rows of different options"
        raise ArgumentError("--grid-file", requirement, found, remedy)
    refuse_many(len(rows), "--grid-file")
    for name in rows[0]:
        if name not in options:
            raise ArgumentError("--grid-file", "must name options in its heading", f"{path} names {name!r}", remedy)
    values = {name: [value_of(name, options[name].kind, _tokens(row[name])) for row in rows] for name in rows[0]}
    return axis(options, **values)


def _row(options: Mapping[str, Option], pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A row by option. Two spellings of one option are refused: a reader of the file cannot know which one counts."""
    row = {named(name, options): value for name, value in pairs}
    if len(row) < len(pairs):
        found = f"got {' '.join(name for name, _ in pairs)}"
        raise ArgumentError("--grid-file", "must name each option once", found, "Leave one out.")
    return row


def _tokens(value: Any) -> list[str]:
    """A value of a file as the words of a command line."""
    if isinstance(value, list):
        return [str(part) for part in value]
    if isinstance(value, bool):
        return [str(value).lower()]
    return str(value).split()


def sample_axis(
    ranges: Sequence[str], count: int, seed: int, options: Mapping[str, Option], *, digits: int = 6
) -> Axis:
    """Values drawn at random: `OPTION=LOW:HIGH` uniform, `OPTION=log:LOW:HIGH` uniform in the logarithm.

    Args:
        ranges: one an option; of an option of integers the bounds count, too.
        count: configurations.
        seed: the same seed draws the same configurations; more configurations begin with the same ones.
        options: of the experiment.
        digits: of each value; 17 keep all of it.

    Raises:
        ArgumentError: a range that is none, or an option that is no number.
    """
    check.at_least(1, num_samples=count)
    refuse_many(count, "num_samples")
    values: dict[str, list[Any]] = {}
    for number, text in enumerate(ranges):
        name, _, bounds = text.partition("=")
        name = name.replace("-", "_")
        if name in values:
            raise ArgumentError("--sample", "must name each option once", f"got {name!r} twice", "Leave one out.")
        scale, *ends = bounds.split(":") if bounds.startswith("log:") else ("", *bounds.split(":"))
        try:
            low, high = (float(end) for end in ends)
        except ValueError:
            low, high = 1.0, 0.0
        option = options.get(name)
        integer = option is not None and option.kind is int
        if option is None or not (integer or option.kind is float or (option.traced and varies_by_words(option.kind))):
            raise ArgumentError("--sample", "must name options that are numbers", f"got {name!r}", "See --help.")
        if not (np.isfinite([low, high]).all() and low < high and (scale == "" or low > 0)):
            requirement = "must be OPTION=LOW:HIGH or OPTION=log:LOW:HIGH with LOW below HIGH, above 0 for log"
            raise ArgumentError("--sample", requirement, f"got {text!r}", "Write for example step_size=log:0.01:1.")
        share = np.random.default_rng((seed, number)).random(count)
        ends = np.array([low, high + integer])
        numbers = np.exp(np.log(ends[0]) + share * np.diff(np.log(ends))) if scale else ends[0] + share * np.diff(ends)
        values[name] = [min(int(value), int(high)) if integer else float(f"{value:.{digits}g}") for value in numbers]
    return axis(options, **values)


def refuse_many(count: int, name: str = "--grid") -> None:
    """Refuse more configurations than one command can prepare."""
    if count > MOST_CONFIGURATIONS:
        raise ArgumentError(
            name, f"must ask for at most {MOST_CONFIGURATIONS:,} configurations", f"got {count:,}", "Ask for fewer."
        )


def without(grid: Grid, names: Collection[str]) -> list[Axis]:
    """The grid less some options: an option that a later overlay gives no longer varies."""
    rest = [{name: values for name, values in part.items() if name not in names} for part in grid]
    return [part for part in rest if part]


def configs(grid: Grid) -> Iterator[dict[str, Any]]:
    """The changes of every configuration, the first axis slowest; one without changes where there is no axis."""
    rows = [[dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)] for part in grid]
    for changes in itertools.product(*rows):
        yield {name: value for change in changes for name, value in change.items()}


def seeds_apart(grid: Grid) -> list[tuple[dict[str, Any], list[int]]]:
    """The changes of configurations that differ in more than the seed, with the first seed, and all seeds of each.

    Examples:
        >>> seeds_apart([{"seed": (0, 1)}, {"nodes": (4, 8)}])
        [({'seed': 0, 'nodes': 4}, [0, 1]), ({'seed': 0, 'nodes': 8}, [0, 1])]
    """
    apart: dict[Any, tuple[dict[str, Any], list[int]]] = {}
    for changes in configs(grid):
        others = tuple((name, value) for name, value in changes.items() if name != "seed")
        apart.setdefault(others, (changes, []))[1].extend([changes["seed"]] if "seed" in changes else [])
    return list(apart.values())
