"""A data set of your own: a table (.csv, .parquet), arrays (.npz), or one of the Hugging Face hub (hf:NAME).

A file may name the site of each sample, for instance a hospital; a site then becomes a node.

    .csv, .parquet    a row for each sample: a column of labels, perhaps one of sites, and numbers in all others; or,
                      in a .parquet file, one column of lists of numbers, of the same length in each row
    .npz              `inputs`, `labels` and perhaps `sites`; or, split by yourself, `train_inputs`, `train_labels`,
                      `test_inputs`, `test_labels` and perhaps `train_sites`
    hf:NAME           a data set by the name (or folder) for `datasets.load_dataset`, perhaps hf:NAME:CONFIG: columns
                      as in a table, or a column of images; its own test split, if it has one

Labels and sites are integers or text. Their distinct values, in ascending order, are the classes 0, 1, ... and the
names of the sites. Numbers are not rescaled: bring them to about [-1, 1] by public constants. A scale computed from the
data would reveal something about them.
"""

from __future__ import annotations

import csv
import importlib
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.data.sources import Dataset, from_arrays

_SPLIT = ("train_inputs", "train_labels", "test_inputs", "test_labels")
_HUB = "hf:"


def is_file(dataset: str) -> bool:
    """Tell your own data, a file or a name after hf:, from the name of a known data set."""
    return dataset.endswith((".csv", ".npz", ".parquet")) or dataset.startswith(_HUB)


def has_columns(dataset: str) -> bool:
    """Tell whether this is your own data with named columns."""
    return is_file(dataset) and not dataset.endswith(".npz")


def short_name(dataset: str) -> str:
    """The name for titles and folders: without the file's folders and ending."""
    return Path(dataset.removeprefix(_HUB).replace(":", "-")).stem if is_file(dataset) else dataset


def load_file(
    path: str, *, label_column: str = "label", site_column: str | None = None, test_split: float = 0.2
) -> Dataset:
    """A data set from a .csv, .parquet or .npz file, or from the Hugging Face hub.

    Args:
        path: the file; `~` is expanded. Or hf:NAME, which needs the packages of the extra `data`.
        label_column, site_column: names of columns; not used for .npz files. None: no column of sites.
        test_split: share of the samples for testing, in (0, 1), if the file is not split. They are taken evenly from
            each site and label, in the order of the file, the same ones each time.

    Returns:
        The data set; sites are its `train_writers`, with names. Sites of test samples are dropped.

    Raises:
        ArgumentError: the file cannot be read, lacks a column or an array, or holds something that is not a number.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "patients.csv"
        >>> _ = path.write_text("age,site,label\\n" + "".join(f"0.{k},{'AB'[k % 2]},{k % 3}\\n" for k in range(60)))
        >>> data = load_file(str(path), site_column="site")
        >>> data.train_inputs.shape, data.test_inputs.shape, data.num_classes, data.writer_names
        ((48, 1), (12, 1), 3, ('A', 'B'))
    """
    if not 0 < test_split < 1:
        raise ArgumentError("test_split", "must lie between 0 and 1", f"got {test_split}", "Pass 0.2, for instance.")
    roles = {"label_column": label_column, "site_column": site_column}
    try:
        arrays = _read(path, roles)
    except ArgumentError:
        raise
    except (OSError, UnicodeDecodeError, csv.Error, zipfile.BadZipFile, ValueError, EOFError) as error:
        found = f"{path}: {getattr(error, 'strerror', None) or error}"
        requirement = "must be a readable .csv, .parquet or .npz file, or hf:NAME"
        raise ArgumentError("dataset", requirement, found, "Check the path.") from None
    if not {*_SPLIT} <= {*arrays}:
        arrays = _split(path, arrays, test_split)
    labels, sites = np.concatenate([arrays["train_labels"], arrays["test_labels"]]), arrays.get("train_sites")
    classes, numbers = np.unique(labels, return_inverse=True)
    names, writers = (None, None) if sites is None else np.unique(sites, return_inverse=True)
    count = len(arrays["train_labels"])
    dataset = from_arrays(
        _inputs(arrays["train_inputs"]),
        numbers[:count],
        _inputs(arrays["test_inputs"]),
        numbers[count:],
        num_classes=len(classes),
        name=path,
        train_writers=writers,
    )
    return dataset if names is None else dataset._replace(writer_names=tuple(map(str, names.tolist())))


def read_by_site(path: str, names: Sequence[str], argument: str) -> tuple[float, ...]:
    """Read a number above 0 for each site from a .csv file: a heading, then rows with a site's name and its number.

    Args:
        path: the file; `~` is expanded.
        names: of all sites, in the order of the nodes.
        argument: name of the option, for errors.

    Returns:
        The numbers in the order of the names.

    Raises:
        ArgumentError: the file cannot be read, or a site has no row, several rows, or no number above 0.
    """
    requirement, form = "must be a .csv file with a site and its number a row", "Write a heading, then Oslo,2.5 a row."
    try:
        with Path(path).expanduser().open(newline="", encoding="utf-8-sig") as lines:
            rows = [[word.strip() for word in row] for row in list(csv.reader(lines))[1:] if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        found = f"{path}: {getattr(error, 'strerror', None) or error}"
        raise ArgumentError(argument, requirement, found, form) from None
    sites = " ".join(names[:9]) + (" ..." if len(names) > 9 else "")
    numbers: dict[str, float] = {}
    for row in rows:
        if len(row) != 2:
            raise ArgumentError(argument, requirement, f"{path} has a row of {len(row)}: {', '.join(row)[:80]}", form)
        name, text = row
        if name not in names:
            found = f"{path} has {name}, which is not a site"
            raise ArgumentError(argument, "must name sites of the data", found, f"The sites are {sites}.")
        if name in numbers:
            raise ArgumentError(argument, "must name each site once", f"{path} has {name} twice", "Remove a row.")
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = math.nan
        if not 0 < numbers[name] < math.inf:
            found = f"{path} has {text!r} for {name}"
            raise ArgumentError(argument, "must give each site a number above 0", found, "Write for example 2.5.")
    missing = [name for name in names if name not in numbers]
    if missing:
        found = f"{path} has none for {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        raise ArgumentError(argument, "must have a row for each site", found, f"Add a row {missing[0]},NUMBER.")
    return tuple(numbers[name] for name in names)


def _read(path: str, roles: Mapping[str, str | None]) -> dict[str, np.ndarray]:
    """The arrays of a file, split or not."""
    if path.startswith(_HUB):
        return _of_hub(path, roles)
    file = Path(path).expanduser()
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as content:
            return dict(content)
    return _of_columns(path, _csv_columns(file) if file.suffix == ".csv" else _parquet_columns(file), roles)


def _csv_columns(file: Path) -> dict[str, tuple[str, ...]]:
    """The columns of a .csv table, as text."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        heading, *rows = list(csv.reader(lines)) or [[]]
    rows = [row for row in rows if row]
    twice = [column for column in heading if heading.count(column) > 1]
    if twice:
        raise ArgumentError("dataset", "must name each column once", f"{file} has {twice[0]!r} twice", "Rename one.")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(heading):
            found = f"row {number} of {file} has {len(row)} of {len(heading)}"
            raise ArgumentError("dataset", "must have a value in each column", found, "Repair this row.")
    return dict(zip(heading, zip(*rows, strict=True) if rows else [()] * len(heading), strict=True))


def _parquet_columns(file: Path) -> dict[str, np.ndarray]:
    table = _imported("pyarrow.parquet").ParquetFile(file).read()  # a folder's name is no column here
    return {name: _of_arrow(table.column(name)) for name in table.column_names}


def _of_arrow(column: Any) -> np.ndarray:
    """A column of pyarrow: numbers and texts (N,), or lists of them in its own dtype, (N, ...)."""
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    if kind == column.type:
        return column.to_numpy()
    values = column.to_pylist()
    if hasattr(column.type, "index_type"):  # dictionary encoding: numbered values
        return np.array(values, object)
    return np.array(values, kind.to_pandas_dtype())


def _of_hub(name: str, roles: Mapping[str, str | None]) -> dict[str, np.ndarray]:
    """The splits train and test of a data set of the hub, or train alone, to be split later."""
    path, _, config = name.removeprefix(_HUB).partition(":")
    datasets = _imported("datasets")
    try:
        splits = datasets.load_dataset(path, config or None)
        if "train" not in splits:
            raise ValueError(f"it has the splits {', '.join(splits)}, but no train")
        parts = {split: _hub_columns(splits[split]) for split in ("train", "test") if split in splits}
    except Exception as error:  # errors of the hub, of its files and of their formats
        found = f"{name}: {next(iter(str(error).splitlines()), type(error).__name__)}"
        raise ArgumentError("dataset", "must be a data set that can be loaded", found, "Check the name.") from None
    train = _of_columns(name, parts["train"], roles)
    if "test" not in parts:
        return train
    test = _of_columns(name, parts["test"], roles)
    whole = {f"{split}_{kind}": part[kind] for split, part in (("train", train), ("test", test)) for kind in part}
    return {key: array for key, array in whole.items() if key != "test_sites"}


def _hub_columns(split: Any) -> dict[str, np.ndarray]:
    table = split.with_format("arrow")[:]
    images = [name for name, feature in split.features.items() if type(feature).__name__ == "Image"]
    columns = {name: _of_arrow(table.column(name)) for name in table.column_names if name not in images}
    return {**columns, **{name: np.stack([np.asarray(image) for image in split[name]]) for name in images}}


def _imported(name: str) -> Any:
    """A module that only some data need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        remedy = f"Run: pip install {package}."
        raise ArgumentError("dataset", f"needs {package}", "it is not installed", remedy) from None


def _of_columns(source: str, columns: Mapping[str, Any], roles: Mapping[str, str | None]) -> dict[str, np.ndarray]:
    """The arrays `inputs`, `labels` and perhaps `sites` of a table."""
    for argument, column in roles.items():
        if column is not None and column not in columns:
            shown = [*columns] if len(columns) <= 9 else [*[*columns][:4], "...", *[*columns][-4:]]
            found = f"{source} has {', '.join(shown)}"
            raise ArgumentError(argument, f"must be a column; {column} is not one", found, "Name one of them.")
    label, site = roles["label_column"], roles["site_column"]
    others = {name: values for name, values in columns.items() if name not in (label, site)}
    blocks = [name for name, values in others.items() if getattr(values, "ndim", 1) > 1]
    if len(blocks) > 1:
        found = f"{source} has {' and '.join(blocks)}"
        raise ArgumentError("dataset", "must have one column of images or lists", found, "Leave the others out.")
    numbers = [] if blocks else [_numbers(source, name, values) for name, values in others.items()]
    inputs = others[blocks[0]] if blocks else np.array(numbers, np.float32).T
    named = {"labels": label, "sites": site}
    kinds = {kind: _kinds(source, name, columns[name]) for kind, name in named.items() if name is not None}
    return {"inputs": inputs, **kinds}


def _kinds(source: str, name: str, values: Any) -> np.ndarray:
    """Integers if all are whole numbers as one writes them, else text; their order is that of classes and nodes."""
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    for number, value in enumerate(listed, start=2):
        if value is None or value != value:
            found = f"row {number} of {source} has none in column {name}"
            raise ArgumentError("dataset", "must say each sample's label and site", found, "Fill or drop such rows.")
    texts = [str(value) for value in listed]
    are_numbers = all(text.isdecimal() and len(text) < 19 and str(int(text)) == text for text in texts)
    return np.array(texts, np.int64 if are_numbers else np.str_)


def _numbers(source: str, name: str, values: Any) -> Any:
    """A column as finite numbers; rows are counted from the heading, which is row 1."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and np.isfinite(values).all():
        return values
    numbers = []
    for number, text in enumerate(values, start=2):
        try:
            numbers.append(float(text))
        except (TypeError, ValueError):
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            found = f"row {number} of {source} has {text!r} in column {name}"
            remedy = "Fill or drop such rows; write kinds as columns of 0 and 1; name the columns of labels and sites."
            raise ArgumentError("dataset", "must hold finite numbers besides labels and sites", found, remedy)
    return numbers


def _split(path: str, arrays: dict[str, np.ndarray], test_split: float) -> dict[str, Any]:
    """Whole arrays, cut into a part to train on and one to test on, each with its share of all sites and labels."""
    if not {"inputs", "labels"} <= {*arrays} or len({len(array) for array in arrays.values() if array.ndim}) > 1:
        found = f"{path} has " + (", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "none")
        requirement = f"must hold inputs and labels of equal length, or {', '.join(_SPLIT)}"
        raise ArgumentError("dataset", requirement, found, "Write it by numpy.savez.")
    inputs, labels, sites = arrays["inputs"], arrays["labels"], arrays.get("sites")
    order = np.lexsort((labels,) if sites is None else (labels, sites))  # stable
    steps = np.floor(np.arange(len(labels) + 1) * test_split)
    tests = np.zeros(len(labels), bool)
    tests[order] = steps[1:] > steps[:-1]
    parts: dict[str, Any] = dict(
        zip(_SPLIT, (inputs[~tests], labels[~tests], inputs[tests], labels[tests]), strict=True)
    )
    return parts if sites is None else {**parts, "train_sites": sites[~tests]}


def _inputs(array: np.ndarray) -> np.ndarray:
    """Images as they are, all other numbers as float32."""
    return array if array.dtype in (np.uint8, np.int32) else array.astype(np.float32)
