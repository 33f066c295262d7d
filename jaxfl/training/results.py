"""results.csv: a row a case and seed with the options that vary, last metrics, costs, epsilon and how it ended."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfl.training.json_files import jsonable, write_atomically

RESULTS = "results.csv"
_EPSILON = ("dp_epsilon", "dp_delta", "neighboring_relation")
_BOUNDS = ("proven", "published", "reconstructed")

Statements = Callable[..., Sequence[Mapping[str, Any]]]


def write_results(
    path: Path,
    lanes: Mapping[tuple[str, int], Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    privacy: Mapping[str, Statements],
) -> None:
    """Replace the table of results.

    Args:
        path: of the file.
        lanes: (case, seed) -> how it ended, as `sweep.Lockstep.run` gives it, in the order of the rows. A row's
            statements are those of its own "until" and "released".
        lines: of metrics.jsonl.
        settings: case -> the options that vary.
        privacy: case -> function from the rounds that ran, and totals by name, to statements.

    Guarantees:
        - resumed equals uninterrupted, byte for byte, but for the last column, the seconds that the rounds took.
    """
    last = {(line["case"], line["seed"]): line for line in lines}
    metrics = list(dict.fromkeys(name for lane in lanes for name in last.get(lane, ())))[3:]
    options = list(dict.fromkeys(name for case, _ in lanes for name in settings[case]))
    stated = {
        lane: privacy[lane[0]](record["until"], **record.get("released", {})) if lane[0] in privacy else ()
        for lane, record in lanes.items()
    }
    stated_bounds = {statement["bound"] for statements in stated.values() for statement in statements}
    bounds = [bound for bound in _BOUNDS if bound in stated_bounds]
    header = ["case", "seed", *options, "status", "rounds", *metrics]
    header += [f"{bound}_{name}" for bound in bounds for name in _EPSILON] + ["reason", "seconds"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for (case, seed), record in lanes.items():
        line = last.get((case, seed), {})
        row = [case, seed, *(settings[case].get(name) for name in options), record["status"], record["until"]]
        row += [line.get(name) for name in metrics]
        for bound in bounds:
            first = next((each for each in stated[case, seed] if each["bound"] == bound), {})
            row += [first.get(name) for name in _EPSILON]
        row += [record["reason"], f"{record['seconds']['run']:.3f}"]
        writer.writerow([jsonable(value, name) for value, name in zip(row, header, strict=True)])
    write_atomically(path, text.getvalue().encode())


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a results.csv, or of that in a run directory: numbers as numbers, empty cells as None."""
    path = Path(path)
    with open(path / RESULTS if path.is_dir() else path, newline="") as file:
        return [
            {name: text if name == "case" else _value(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None
