"""Description of a file of one's own: three lines for a run, and the command `jaxfl data`, which says what was read.

jaxfl data patients.csv --label-column ill --site-column hospital --graph roads.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxfl.core import ArgumentError
from jaxfl.core import tables as rules
from jaxfl.core.parser import Parser
from jaxfl.core.vocabulary import flag
from jaxfl.data.columns import OPTIONS, has_columns, read_columns, refuse_other_file
from jaxfl.data.sources import Dataset
from jaxfl.data.subset import only_classes
from jaxfl.data.tables import load_file
from jaxfl.graphs.files import read_graph

_MOST_NAMES = 8
_LARGE, _SMALL_SITE = 10.0, 10


def reading_lines(dataset: Dataset) -> list[str]:
    """Say in three lines what was read from a file of one's own: roles, inputs, and the samples that train and test."""
    reading = dataset.reading
    assert reading is not None
    separator = "" if reading.separator is None else f", separator {rules.SEPARATORS[reading.separator]}"
    roles = ", ".join(f"{role} {name}" for role, name in reading.roles.items())
    left_out = f"; left out: {_few(reading.left_out)}" if reading.left_out else ""
    sizes = np.zeros(0, int) if dataset.train_writers is None else np.bincount(dataset.train_writers)
    sites = (
        f" at {np.count_nonzero(sizes)} sites ({sizes[sizes > 0].min()} to {sizes.max()} each)" if sizes.size else ""
    )
    dtype, shape = dataset.train_inputs.dtype, dataset.train_inputs.shape[1:]
    return [
        f"{dataset.name}{separator}: {roles}; classes {_few(dataset.class_names or ())}",
        f"inputs: {_few(reading.inputs)}, {dtype} of shape {shape} a sample{left_out}",
        f"{len(dataset.train_labels):,} samples train{sites}, {len(dataset.test_labels):,} test: {reading.tests}",
    ]


def scale_warnings(dataset: Dataset) -> list[str]:
    """Say which input of a file of one's own is large: a sentence that looks at private rows, and says so."""
    reading, inputs = dataset.reading, dataset.train_inputs
    if reading is None or inputs.dtype != np.float32:
        return []
    largest = np.abs(inputs).reshape(len(inputs), -1).max(axis=0)
    if largest.max() <= _LARGE:
        return []
    which = reading.inputs[int(largest.argmax())] if len(reading.inputs) == len(largest) else "an input"
    reaches = f"{which} reaches {largest.max():.4g} (seen in private rows; no ε covers this line)"
    return [f"{reaches}. Bring inputs to about [-1, 1] by public constants."]


def warnings_of(dataset: Dataset, *, given_classes: bool) -> list[str]:
    """Sentences about what may mislead or harm, though it can be read."""
    reading = dataset.reading
    assert reading is not None
    lines = scale_warnings(dataset)
    if not given_classes:
        lines.append("The classes are taken from the labels. --classes names them, so that no label adds one.")
    if "id" not in reading.roles and "place" in reading.tests:
        lines.append(
            "A removed row moves rows behind it in its site between training and testing. --id-column keeps them where"
            " they are."
        )
    counts = np.bincount(dataset.train_labels, minlength=dataset.num_classes)
    rare = [name for name, count in zip(dataset.class_names or (), counts, strict=True) if count < 2]
    if rare:
        lines.append(f"Classes with fewer than two samples to train on: {_few(rare)}.")
    if dataset.train_writers is not None and dataset.writer_names is not None:
        sizes = np.bincount(dataset.train_writers, minlength=len(dataset.writer_names))
        small = [name for name, size in zip(dataset.writer_names, sizes, strict=True) if size < _SMALL_SITE]
        if small:
            lines.append(f"Sites with fewer than {_SMALL_SITE} samples to train on: {_few(small)}.")
    return lines


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return _listed(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _listed(texts: Sequence[str]) -> str:
    """Names in a row, between semicolons where one holds a comma."""
    return ("; " if any("," in text for text in texts) else ", ").join(texts)


def _columns_table(path: str) -> Table:
    """Type, missing values and range of each column of a table."""
    table = Table("column", "type", "missing", "values")
    for split, columns in read_columns(path).items():
        for name, values in columns.values.items():
            shown = Text(name if split == "whole" else f"{split}: {name}")
            if getattr(values, "ndim", 1) > 1:
                extent = f"{values.min()} to {values.max()}" if values.size and values.dtype.kind in "biuf" else "none"
                table.add_row(shown, f"{values.dtype} {values.shape[1:]}", "0", extent)
                continue
            present = [text for text in map(rules.as_name, values) if text is not None]
            numbers = rules.as_numbers(present, comma=columns.separator == ";")
            kind, extent = "text", ""
            if present and np.isfinite(numbers).all():
                kind = "whole numbers" if all(map(rules.is_whole, present)) else "numbers"
                extent = f"{numbers.min():g} to {numbers.max():g}, "
            table.add_row(shown, kind, str(len(values) - len(present)), f"{extent}{len({*present})} different")
    return table


def main(argv: Sequence[str]) -> int:
    """Say what an experiment would read; returns the exit code, 2 for a file that cannot be used."""
    parser = _parser()
    given, console = parser.parse_args(argv), Console(markup=False, highlight=False)
    try:
        refuse_other_file(given.dataset)
        if has_columns(given.dataset):
            console.print(_columns_table(given.dataset))
        options = {name: getattr(given, name) for name in (*OPTIONS, "test_split")}
        dataset = only_classes(load_file(given.dataset, **options), given.classes)
        _show(console, dataset, given)
    except ArgumentError as error:
        name = flag(error.argument)
        shown = name if name in parser.flags() else error.argument
        print(f"error: {shown}: {error.requirement}; {error.found}. {error.remedy}", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser("data", "What is read from a file of your own.")
    parser.add_argument("dataset", metavar="FILE", help=".csv, .tsv, .csv.gz, .parquet, .npz, or hf:NAME")
    for name in ("label", "site", "id"):
        parser.add_argument(f"--{name}-column", default="label" if name == "label" else None)
    parser.add_argument("--input-columns", nargs="+", default=(), help="inputs; all other columns by default")
    parser.add_argument("--drop-columns", nargs="+", default=(), help="columns that are left out")
    parser.add_argument("--classes", nargs="+", help="labels of the samples that are used, in the order of the classes")
    parser.add_argument("--test-split", type=float, default=0.2, help="share of the samples that test")
    parser.add_argument("--graph", help="file with edges by the names of sites")
    return parser


def flags() -> dict[str, list[str]]:
    """All options, for a shell's completion."""
    return _parser().flags()


def _show(console: Console, dataset: Dataset, given: argparse.Namespace) -> None:
    """Print the three lines, samples by class and site, the graph, and warnings."""
    trained = np.unique([] if dataset.train_writers is None else dataset.train_writers).astype(int)
    sites, lines = [(dataset.writer_names or ())[site] for site in trained], reading_lines(dataset)
    classes = dataset.class_names
    counted: list[tuple[str, Any, Any]] = [
        ("train, by class", classes, dataset.train_labels),
        ("test, by class", classes, dataset.test_labels),
    ]
    counted.append(("by site", dataset.writer_names, dataset.train_writers))
    for what, names, numbers in counted:
        if names and numbers is not None:
            counts = np.bincount(numbers, minlength=len(names)).tolist()
            lines.append(f"{what}: " + _listed([f"{name} {count}" for name, count in zip(names, counts, strict=True)]))
    if given.graph is not None:
        graph = read_graph(given.graph, len(sites))
        odd = sorted({*(graph.names or sites)} ^ {*sites})
        if odd:
            found = f"{odd[0]} is in only one of the two"
            raise ArgumentError("graph", "must name the sites of the data", found, "Rename one.")
        edges = int((graph.mixing_matrix(0) > 0).sum()) - graph.num_nodes
        lines.append(f"graph {given.graph}: {edges} edges between {graph.num_nodes} sites")
    lines += [f"warning: {line}" for line in warnings_of(dataset, given_classes=given.classes is not None)]
    console.print(Text("\n".join(lines)), soft_wrap=True)
