"""Columns of your own data, as they stand in a text file, a .parquet or .npz file, or a data set of Hugging Face."""

from __future__ import annotations

import collections
import importlib
import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.core import tables as rules
from jaxfl.data.sources import NAMES

OPTIONS = ("label_column", "site_column", "id_column", "input_columns", "drop_columns")  # of `load_file`, on columns
_TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_ENDINGS = (*_TEXT, ".parquet", ".npz")
_HUB = "hf:"
_READABLE = "must be a readable .csv, .tsv, .csv.gz, .parquet or .npz file, or hf:NAME"
_ARRAYS = ("inputs", "labels", "sites", "ids")


class Columns(NamedTuple):
    """The columns of a table, or the arrays of a file, as they stand there."""

    values: dict[str, Any]  # name, or "column k" where there is none -> (N,) text or numbers, or (N, ...) lists, images
    rows: Sequence[int]  # number of each row in the file; a heading is row 1, and arrays count from 0
    separator: str | None = None
    class_names: Mapping[str, Sequence[str]] = {}  # of columns whose classes the source knows

    def place(self, path: str, name: str) -> Callable[[int], str]:
        """Position -> where it stands, for errors."""
        return lambda position: f"row {self.rows[position]} of {path} in column {name}"

    def column(self, path: str, name: str) -> Any:
        """The values of a column, which each split must have."""
        if name not in self.values:
            raise ArgumentError(
                "dataset", "must have the same columns in each split", f"{path} lacks {name}", "Add it."
            )
        return self.values[name]


def column_name(text: Any) -> str:
    """A column's name as it is compared: in Unicode's composed form, without blanks at its ends."""
    return unicodedata.normalize("NFC", str(text)).strip()


def is_file(dataset: str) -> bool:
    """Tell your own data, a file or a name after hf:, from the name of a known data set."""
    return dataset.lower().endswith(_ENDINGS) or dataset.startswith(_HUB)


def has_columns(dataset: str) -> bool:
    """Tell whether this is your own data with named columns."""
    return is_file(dataset) and (dataset.startswith(_HUB) or not dataset.lower().endswith(".npz"))


def short_name(dataset: str) -> str:
    """The name for titles and folders: without the file's folders and ending."""
    return Path(dataset.removeprefix(_HUB).replace(":", "-").removesuffix(".gz")).stem if is_file(dataset) else dataset


def refuse_other_file(dataset: str) -> None:
    """Raise for what looks like a file, or a folder, of a kind that is not read."""
    if not is_file(dataset) and dataset not in NAMES and ("." in dataset or os.sep in dataset):
        requirement = f"must be a known data set, a {', '.join(_ENDINGS)} file, or hf:NAME"
        remedy = "Save a table as .csv, arrays by numpy.savez, or use jaxfl.data.from_arrays; folders: hf:FOLDER."
        raise ArgumentError("dataset", requirement, f"got {dataset}", remedy)


def read_columns(path: str) -> dict[str, Columns]:
    """The columns of a file or a data set of the hub: by the splits train and test, or of the whole.

    Raises:
        ArgumentError: what cannot be read, or has a column twice, a row of another length, or lists of several shapes.
    """
    if path.startswith(_HUB):
        return _of_hub(path)
    if path.lower().endswith(_TEXT):
        return {"whole": _of_text(path)}
    file = Path(os.path.expanduser(path))
    try:
        rules.regular_size(file)
        if file.suffix.lower() == ".npz":
            return _of_arrays(path, file)
        table = _imported("pyarrow.parquet").ParquetFile(file).read()  # a folder's name is no column here
        values = {column_name(name): _of_arrow(table.column(name)) for name in table.column_names}
        return {"whole": Columns(values, range(2, table.num_rows + 2))}
    except ArgumentError:
        raise
    except Exception as error:  # damaged archives raise nearly anything, and so does Arrow for types that NumPy lacks
        text = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__
        remedy = "Store text by .astype(str)." if "allow_pickle" in text else "Check the path, and that it is whole."
        raise ArgumentError("dataset", _READABLE, f"{path}: {text}", remedy) from None


def _of_text(path: str) -> Columns:
    table = rules.read_rows(path, "dataset", _READABLE, "Check the path.")
    (_, heading), *rows = table.cells or [(1, [])]
    names = [column_name(name) or f"column {k}" for k, name in enumerate(heading, start=1)]
    twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
    if not rows:
        found = f"{path} has {len(table.cells)} row"
        raise ArgumentError("dataset", "must have a heading and a row for each sample", found, "Check the file.")
    if twice is not None:
        raise ArgumentError("dataset", "must name each column once", f"{path} has {twice!r} twice", "Rename one.")
    odd = next(((number, row) for number, row in rows if len(row) != len(names)), None)
    if odd is not None:
        separator = rules.SEPARATORS[table.separator]
        found = f"row {odd[0]} of {path} has {len(odd[1])} of {len(names)}, with the {separator} as separator"
        raise ArgumentError("dataset", "must have a value in each column", found, "Repair this row.")
    columns = zip(*(row for _, row in rows), strict=True)
    return Columns(dict(zip(names, columns, strict=True)), [number for number, _ in rows], table.separator)


def _of_arrays(path: str, file: Path) -> dict[str, Columns]:
    with np.load(file, allow_pickle=False) as content:
        arrays = dict(content)
    splits = {}
    for split in ("train", "test") if "train_inputs" in arrays else ("whole",):
        prefix = "" if split == "whole" else f"{split}_"
        values = {name: arrays[prefix + name] for name in _ARRAYS if prefix + name in arrays}
        is_whole = {"inputs", "labels"} <= {*values} and all(array.ndim for array in values.values())
        if not is_whole or len({len(array) for array in values.values()}) > 1:
            names = ", ".join(f"{split}_{name}" for split in ("train", "test") for name in _ARRAYS[:2])
            found = f"{path} has " + (", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "none")
            requirement = f"must hold inputs and labels of equal length, or {names}"
            raise ArgumentError("dataset", requirement, found, "Write it by numpy.savez.")
        splits[split] = Columns(values, range(len(values["labels"])))
    return splits


def _of_arrow(column: Any) -> np.ndarray:
    """A column of pyarrow: numbers and texts (N,), or lists of numbers (N, ...) where all have one shape."""
    if hasattr(column.type, "index_type") or not hasattr(column.type, "value_type"):
        return np.array(column.to_pylist(), object) if hasattr(column.type, "index_type") else column.to_numpy()
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    lists = column.to_pylist()
    try:
        array = np.array(lists)  # without a type, so that None inside stays one
        return array if array.dtype.kind not in "biuf" else array.astype(kind.to_pandas_dtype())
    except ValueError:  # of several lengths
        return np.fromiter(lists, object, len(lists))


def _images(source: str, name: str, images: Sequence[np.ndarray]) -> np.ndarray:
    """Images of one shape as an array (N, ...)."""
    odd = next((row for row, image in enumerate(images) if image.shape != images[0].shape), None)
    if odd is not None:
        found = f"row {odd + 2} of {source} has {images[odd].shape} and row 2 {images[0].shape} in column {name}"
        raise ArgumentError("dataset", "must have images of one shape", found, "Bring all to one size and mode.")
    return np.stack(images)


def _of_hub(name: str) -> dict[str, Columns]:
    """The splits train and test of a data set of the hub, or train as a whole."""
    path, _, config = name.removeprefix(_HUB).partition(":")
    datasets = _imported("datasets")
    try:
        splits = datasets.load_dataset(path, config or None)
        if "train" not in splits:
            raise ValueError(f"it has the splits {', '.join(splits)}, but no train")
        return {split: _of_split(name, splits[split]) for split in ("train", "test") if split in splits}
    except ArgumentError:
        raise
    except Exception as error:  # errors of the hub, of its files and of their formats
        found = f"{name}: {next(iter(str(error).splitlines()), type(error).__name__)}"
        raise ArgumentError("dataset", "must be a data set that can be loaded", found, "Check the name.") from None


def _of_split(source: str, split: Any) -> Columns:
    table, kinds = split.with_format("arrow")[:], {name: type(kind).__name__ for name, kind in split.features.items()}
    images = {name: [np.asarray(image) for image in split[name]] for name, kind in kinds.items() if kind == "Image"}
    values = {name: _of_arrow(table.column(name)) for name in table.column_names if name not in images}
    values |= {name: _images(source, name, column) for name, column in images.items()}
    classes = {name: split.features[name].names for name, kind in kinds.items() if kind == "ClassLabel"}
    return Columns(values, range(2, len(split) + 2), class_names=classes)


def _imported(name: str) -> Any:
    """A module that only some data need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        remedy = f"Run: pip install {package}."
        raise ArgumentError("dataset", f"needs {package}", "it is not installed", remedy) from None
