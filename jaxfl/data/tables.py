"""A data set of your own: a table, arrays (.npz), or one of the Hugging Face hub (hf:NAME).

A file may name the site of each sample, for instance a hospital; a site then becomes a node.

    .csv, .tsv, .parquet    a row for each sample: a column of labels, perhaps one of sites, perhaps one of identifiers,
                            and numbers in all others; or, in a .parquet file, one column of lists of numbers, of the
                            same length in each row. Text may be compressed (.csv.gz)
    .npz                    `inputs`, `labels`, and perhaps `sites` and `ids`; or, split by yourself, `train_inputs`,
                            `train_labels`, `test_inputs`, `test_labels` and perhaps `train_sites`
    hf:NAME                 a data set by the name (or folder) for `datasets.load_dataset`, perhaps hf:NAME:CONFIG:
                            columns as in a table, or a column of images; its own test split, if it has one

Labels and sites are integers or text, by the rules of `jaxfl.core.tables`. Their names, in ascending order, are the
classes 0, 1, ... and the sites. Numbers are not rescaled: bring them to about [-1, 1] by public constants. A scale
computed from the data would reveal something about them.

Each sample is taken by itself: whether it tests follows from its place within its site, or from its identifier.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import re
import unicodedata
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.core import tables as rules
from jaxfl.data.partition import held_places
from jaxfl.data.sources import NAMES, Dataset, Reading, from_arrays

_TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_ENDINGS = (*_TEXT, ".parquet", ".npz")
_SPLIT = ("train_inputs", "train_labels", "test_inputs", "test_labels")
_HUB = "hf:"
_READABLE = "must be a readable .csv, .tsv, .csv.gz, .parquet or .npz file, or hf:NAME"
_KEY = b"jaxfl: does this sample test?"
_INT32 = np.iinfo(np.int32)


def is_file(dataset: str) -> bool:
    """Tell your own data, a file or a name after hf:, from the name of a known data set."""
    return dataset.lower().endswith(_ENDINGS) or dataset.startswith(_HUB)


def has_columns(dataset: str) -> bool:
    """Tell whether this is your own data with named columns."""
    return is_file(dataset) and not dataset.lower().endswith(".npz")


def short_name(dataset: str) -> str:
    """The name for titles and folders: without the file's folders and ending."""
    return Path(dataset.removeprefix(_HUB).replace(":", "-").removesuffix(".gz")).stem if is_file(dataset) else dataset


def refuse_other_file(dataset: str) -> None:
    """Raise for what looks like a file, or a folder, of a kind that is not read."""
    if not is_file(dataset) and dataset not in NAMES and ("." in dataset or os.sep in dataset):
        remedy = "Save the table as .csv, make arrays for numpy.savez, or use jaxfl.data.from_arrays; folders: hf:FOLDER."
        raise ArgumentError("dataset", "must be .csv, .tsv, .csv.gz, .parquet, .npz, or hf:NAME", f"got {dataset}", remedy)


class Columns(NamedTuple):
    """The columns of a table, as they stand in it."""

    values: dict[str, Any]  # name -> (N,) text or numbers, or (N, ...) lists and images; "column k" where the name lacks
    rows: Sequence[int]  # number of each row; the heading is row 1
    separator: str | None = None
    class_names: Mapping[str, Sequence[str]] = {}  # of columns whose classes the source knows


class _Part(NamedTuple):
    """Samples of one file, or of one split of it."""

    inputs: np.ndarray
    names: dict[str, Any]  # labels, perhaps sites, perhaps ids -> (N,)
    where: str  # place of a sample, with {row}
    rows: Sequence[int]


def load_file(
    path: str,
    *,
    label_column: str = "label",
    site_column: str | None = None,
    id_column: str | None = None,
    input_columns: Sequence[str] = (),
    drop_columns: Sequence[str] = (),
    test_split: float = 0.2,
) -> Dataset:
    """A data set from a file, or from the Hugging Face hub.

    Args:
        path: the file; `~` is expanded. Or hf:NAME, which needs the packages of the extra `data`.
        label_column, site_column: names of columns; not used for .npz files. None: no column of sites.
        id_column: identifier of each sample, or of each person with several samples; not used for .npz files.
        input_columns: the columns that are inputs. Default: all but the above and `drop_columns`, or the column of
            lists or images, if there is one.
        drop_columns: columns that are left out.
        test_split: share of the samples for testing, in (0, 1), if the file is not split. With identifiers a hash of
            each decides. Else a sample's place within its site does: the second tests, and then one of every
            1 / test_split, at random, the same places for all sites and files.

    Returns:
        The data set; sites are its `train_writers`, with names. Sites of test samples are dropped.

    Raises:
        ArgumentError: the file cannot be read, lacks a column or an array, or holds something that is not a number. A
            column without a name, or one whose numbers ascend from row to row, is in neither list of columns. Labels
            are no classes. A site has no sample to train on.

    Guarantees:
        - a changed sample changes no other one, nor its part; with identifiers, a removed or added one neither.
        - without identifiers, each site trains on its first sample.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "patients.csv"
        >>> _ = path.write_text("age,site,label\\n" + "".join(f"0.{k},{'AB'[k % 2]},{k % 3}\\n" for k in range(60)))
        >>> data = load_file(str(path), site_column="site")
        >>> data.train_inputs.shape, data.test_inputs.shape, data.class_names, data.writer_names
        ((48, 1), (12, 1), ('0', '1', '2'), ('A', 'B'))
    """
    check.open_unit(test_split=test_split)
    roles = {"label_column": label_column, "site_column": site_column, "id_column": id_column}
    try:
        parts, reading, known = _read(path, roles, tuple(input_columns), tuple(drop_columns))
    except ArgumentError:
        raise
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, MemoryError) as error:
        found = f"{path}: {getattr(error, 'strerror', None) or str(error) or 'it is larger than the memory'}"
        raise ArgumentError("dataset", _READABLE, found, "Check the path.") from None
    numbered = [
        {kind: rules.numbered("dataset", values, _place(part, kind), path) for kind, values in part.names.items()}
        for part in parts
    ]
    labels = [one["labels"] for one in numbered]
    classes = rules.in_order({name for one in labels for name in one.names})
    rules.refuse_alike("dataset", classes, path)
    _refuse_targets(path, classes, sum(len(one.numbers) for one in labels))
    order = classes if known is None else [str(number) for number in range(len(known))]
    unknown = next((name for name in classes if name not in order), None)
    if unknown is not None:
        found = f"{path} has {unknown} among its labels"
        raise ArgumentError("dataset", f"must have labels of its {len(order)} classes", found, "Drop such rows.")
    position = {name: number for number, name in enumerate(order)}
    targets = [np.array([position[name] for name in one.names])[one.numbers] for one in labels]
    sites = numbered[0].get("sites")
    inputs = [_inputs(path, part) for part in parts]
    if len(parts) == 1:
        tests, reading = _tests(path, len(targets[0]), sites, numbered[0].get("ids"), test_split, reading)
        inputs, targets = [inputs[0][~tests], inputs[0][tests]], [targets[0][~tests], targets[0][tests]]
        sites = None if sites is None else sites._replace(numbers=sites.numbers[~tests])
    dataset = from_arrays(
        *(inputs[0], targets[0], inputs[1], targets[1]),
        num_classes=len(order),
        name=path,
        train_writers=None if sites is None else sites.numbers,
    )
    names = tuple(order if known is None else known)
    return dataset._replace(writer_names=None if sites is None else sites.names, class_names=names, reading=reading)


def read_by_site(path: str, names: Sequence[str], argument: str) -> tuple[float, ...]:
    """Read a number above 0 for each site from a table of two columns: a heading, then a site's name and its number.

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
    table = rules.read_rows(path, argument, requirement, form)
    sites = " ".join(names[:9]) + (" ..." if len(names) > 9 else "")
    numbers: dict[str, float] = {}
    for _, row in table.cells[1:]:
        if len(row) != 2:
            raise ArgumentError(argument, requirement, f"{path} has a row of {len(row)}: {', '.join(row)[:80]}", form)
        name, text = rules.as_name(row[0]) or "no name", row[1].strip()
        if name not in names:
            found = f"{path} has {name}, which is not a site"
            raise ArgumentError(argument, "must name sites of the data", found, f"The sites are {sites}.")
        if name in numbers:
            raise ArgumentError(argument, "must name each site once", f"{path} has {name} twice", "Remove a row.")
        found = f"{path} has {text!r} for {name}"
        refusal = ArgumentError(argument, "must give each site a number above 0", found, "Write for example 2.5.")
        numbers[name] = float(rules.as_numbers([text], lambda _, error=refusal: error, table.separator == ";")[0])
        if numbers[name] <= 0:
            raise refusal
    missing = [name for name in names if name not in numbers]
    if missing:
        found = f"{path} has none for {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        raise ArgumentError(argument, "must have a row for each site", found, f"Add a row {missing[0]},NUMBER.")
    return tuple(numbers[name] for name in names)


def read_columns(path: str) -> dict[str, Columns]:
    """The columns of a table: of the splits train and test of a data set of the hub, else of "whole"."""
    if path.startswith(_HUB):
        return _hub_columns(path)
    if not path.lower().endswith(_TEXT):
        file = Path(os.path.expanduser(path))
        rules.regular_size(file)
        table = _imported("pyarrow.parquet").ParquetFile(file).read()  # a folder's name is no column here
        values = {name: _of_arrow(path, name, table.column(name)) for name in table.column_names}
        return {"whole": Columns(values, range(2, table.num_rows + 2))}
    table = rules.read_rows(path, "dataset", _READABLE, "Check the path.")
    (_, heading), *rows = table.cells or [(1, [])]
    names = [
        unicodedata.normalize("NFC", name).strip() or f"column {number}" for number, name in enumerate(heading, start=1)
    ]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError("dataset", "must name each column once", f"{path} has {twice!r} twice", "Rename one.")
    for number, row in rows:
        if len(row) != len(names):
            separator = rules.SEPARATORS[table.separator]
            found = f"row {number} of {path} has {len(row)} of {len(names)}, with the {separator} as separator"
            raise ArgumentError("dataset", "must have a value in each column", found, "Repair this row.")
    columns = zip(*(row for _, row in rows), strict=True) if rows else [()] * len(names)
    return {
        "whole": Columns(dict(zip(names, columns, strict=True)), [number for number, _ in rows], table.separator)
    }


def _read(
    path: str, roles: Mapping[str, str | None], inputs: tuple[str, ...], dropped: tuple[str, ...]
) -> tuple[list[_Part], Reading, Sequence[str] | None]:
    """The samples, whole or as train and test; facts about the reading; names of the classes, if the source knows."""
    if not path.lower().endswith(".npz") or path.startswith(_HUB):
        tables = read_columns(path)
        first = next(iter(tables.values()))
        names = _input_names(path, first, roles, inputs, dropped)
        parts = [_of_columns(path, table, roles, names) for table in tables.values()]
        taken = {kind.removesuffix("_column"): name for kind, name in roles.items() if name is not None}
        left_out = tuple(name for name in first.values if name not in (*names, *taken.values()))
        reading = Reading(first.separator, taken, names, left_out, "those of the split test")
        return parts, reading, first.class_names.get(roles["label_column"] or "")
    file = Path(os.path.expanduser(path))
    rules.regular_size(file)
    with np.load(file, allow_pickle=False) as content:
        arrays = dict(content)
    is_split = {*_SPLIT} <= {*arrays}
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "none"
    requirement = f"must hold inputs and labels of equal length, or {', '.join(_SPLIT)}"
    refusal = ArgumentError("dataset", requirement, f"{path} has {shapes}", "Write it by numpy.savez.")
    parts = []
    for prefix in ("train_", "test_") if is_split else ("",):
        of_part = {kind: arrays[prefix + kind] for kind in ("inputs", "labels", "sites", "ids") if prefix + kind in arrays}
        if not {"inputs", "labels"} <= {*of_part} or any(array.ndim == 0 for array in of_part.values()):
            raise refusal
        if len({len(array) for array in of_part.values()}) > 1:
            raise refusal
        count = len(of_part["inputs"])
        parts.append(_Part(of_part.pop("inputs"), of_part, f"sample {{row}} of {prefix}{{kind}} in {path}", range(count)))
    reading = Reading(None, {kind[:-1]: kind for kind in parts[0].names}, ("inputs",), (), "those of the file")
    return parts, reading, None


def _input_names(
    path: str, table: Columns, roles: Mapping[str, str | None], inputs: tuple[str, ...], dropped: tuple[str, ...]
) -> tuple[str, ...]:
    """The columns that are inputs; refuses unknown names, and columns that number the rows."""
    wanted = [(option, name) for option, name in roles.items() if name is not None]
    wanted += [("input_columns", name) for name in inputs] + [("drop_columns", name) for name in dropped]
    for argument, column in wanted:
        if column not in table.values:
            shown = [*table.values] if len(table.values) <= 9 else [*[*table.values][:4], "...", *[*table.values][-4:]]
            found = f"{path} has {', '.join(shown)}"
            raise ArgumentError(argument, f"must be a column; {column} is not one", found, "Name one of them.")
    used = [name for option, name in wanted if option != "input_columns"]
    twice = next((name for name in (*used, *inputs) if [*used, *inputs].count(name) > 1), None)
    if twice is not None:
        found, remedy = f"{path}: {twice} is named for two", "Name each column once."
        raise ArgumentError("input_columns", "must give each column one role", found, remedy)
    if inputs:
        return inputs
    others = [name for name in table.values if name not in used]
    blocks = [name for name in others if getattr(table.values[name], "ndim", 1) > 1]
    if len(blocks) > 1:
        found = f"{path} has {' and '.join(blocks)}"
        raise ArgumentError("dataset", "must have one column of images or lists", found, "Name one by --input-columns.")
    names = tuple(blocks or others)
    for name in [] if blocks else others:
        unnamed = re.fullmatch(r"column \d+", name) is not None
        if unnamed or _ascends(table.values[name]):
            what = "has no name" if unnamed else "has numbers that ascend from row to row"
            remedy = "Name it in --drop-columns; if it is no row number or identifier, name the inputs in --input-columns."
            raise ArgumentError("dataset", "must have columns that describe samples", f"{name} of {path} {what}", remedy)
    return names


def _ascends(values: Any) -> bool:
    """Tell whether a column has more than two values, all of them numbers, each above the last one."""
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        return False
    return len(numbers) > 2 and bool((np.diff(numbers) > 0).all())


def _of_columns(path: str, table: Columns, roles: Mapping[str, str | None], names: tuple[str, ...]) -> _Part:
    """The samples of a table."""
    absent = next((name for name in (*names, *filter(None, roles.values())) if name not in table.values), None)
    if absent is not None:
        raise ArgumentError("dataset", "must have the same columns in each split", f"{path} lacks {absent}", "Add it.")

    def column(name: str) -> Any:
        values = table.values[name]
        if getattr(values, "ndim", 1) > 1:
            return values

        def refusal(position: int) -> ArgumentError:
            found = f"row {table.rows[position]} of {path} has {values[position]!r} in column {name}"
            remedy = (
                "Fill or drop such rows; write kinds, True and False as 0 and 1; name the columns of labels and sites, and"
                " those that are no inputs (drop_columns)."
            )
            return ArgumentError("dataset", "must hold finite numbers besides labels and sites", found, remedy)

        return rules.as_numbers(values, refusal, table.separator == ";")

    arrays = [column(name) for name in names]
    if not arrays or (len(arrays) > 1 and any(array.ndim > 1 for array in arrays)):
        found = f"{path} has {', '.join(names) or 'none'}"
        raise ArgumentError("dataset", "must have columns of numbers, or one of images or lists", found, "Name inputs.")
    inputs = arrays[0] if arrays[0].ndim > 1 else np.array(arrays, np.float32).T
    kinds = {"labels": roles["label_column"], "sites": roles["site_column"], "ids": roles["id_column"]}
    named = {kind: table.values[name] for kind, name in kinds.items() if name is not None}
    return _Part(inputs, named, f"row {{row}} of {path} in the column of {{kind}}", table.rows)


def _place(part: _Part, kind: str) -> Any:
    return lambda position: part.where.format(row=part.rows[position], kind=kind)


def _refuse_targets(path: str, classes: Sequence[str], count: int) -> None:
    """Refuse labels that are no classes: nearly all different, and no whole numbers, or all different."""
    are_fractions = all(map(_is_number, classes)) and not all(map(rules.is_whole, classes))
    if count > 2 and (len(classes) == count or (are_fractions and 2 * len(classes) > count)):
        found = f"{path} has {len(classes)} different labels in {count} samples"
        remedy = "Name another column; for regression give jaxfl.from_functions a squared loss (docs/own_data.md)."
        raise ArgumentError("label_column", "must be classes, which several samples share", found, remedy)


def _is_number(name: str) -> bool:
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def _tests(
    path: str, count: int, sites: rules.Numbered | None, ids: rules.Numbered | None, share: float, reading: Reading
) -> tuple[np.ndarray, Reading]:
    """Which samples test, (N,) bool: by their identifiers, or by their places within their sites."""
    site_of = np.zeros(count, np.int64) if sites is None else sites.numbers
    if ids is None:
        order = np.argsort(site_of, kind="stable")
        sizes = np.bincount(site_of)
        tests = np.zeros(count, bool)
        tests[order] = np.concatenate([held_places(size, share) for size in sizes.tolist()])
        how = f"the second of each {'site' if sites else 'file'}, and one of every {1 / share:.3g} behind it, by place"
        return tests, reading._replace(tests=how)
    of_id = [hashlib.blake2b(name.encode(), digest_size=7, key=_KEY).digest() for name in ids.names]
    tests = np.array([int.from_bytes(one, "big") < share * 256**7 for one in of_id])[ids.numbers]
    training = np.bincount(site_of[~tests], minlength=site_of.max() + 1)
    if training.min() == 0:
        name = path if sites is None else sites.names[int(training.argmin())]
        found, remedy = f"all of {name} test", "Merge or drop it, choose another --test-split, or leave --id-column out."
        raise ArgumentError("id_column", "must leave each site a sample to train on", found, remedy)
    return tests, reading._replace(tests=f"{share:.3g} of all, by a hash of their identifiers")


def _inputs(path: str, part: _Part) -> np.ndarray:
    """Images and whole numbers stay integers; all other numbers are float32."""
    array = part.inputs
    if array.dtype.kind not in "biuf":
        remedy = "Write kinds as columns of 0 and 1."
        raise ArgumentError("dataset", "must hold numbers as inputs", f"{path} has {array.dtype}", remedy)
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            found = f"{path} has values from {array.min()} to {array.max()}"
            raise ArgumentError("dataset", "must hold integers of 32 bits, or floats", found, "Use .astype(numpy.float32).")
        return array.astype(np.int32)
    with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite
        array = array if array.dtype == np.uint8 else array.astype(np.float32)
    check.finite(_place(part, "inputs"), dataset=array)
    return array


def _of_arrow(source: str, name: str, column: Any) -> np.ndarray:
    """A column of pyarrow: numbers and texts (N,), or lists of them in its own dtype, (N, ...)."""
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    if kind == column.type:
        return column.to_numpy()
    values = column.to_pylist()
    if hasattr(column.type, "index_type"):  # dictionary encoding: numbered values
        return np.array(values, object)
    return _stacked(source, name, [np.array(value, kind.to_pandas_dtype()) for value in values])


def _stacked(source: str, name: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """Lists or images of one shape as an array (N, ...)."""
    odd = next((row for row, value in enumerate(values) if value.shape != values[0].shape), None)
    if odd is not None:
        found = f"row {odd + 2} of {source} has {values[odd].shape} and row 2 {values[0].shape} in column {name}"
        remedy = "Bring all images to one size and mode, and all lists to one length."
        raise ArgumentError("dataset", "must have images, or lists, of one shape", found, remedy)
    return np.stack(values)


def _hub_columns(name: str) -> dict[str, Columns]:
    """The columns of the splits train and test of a data set of the hub, or of train as a whole."""
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
    table = split.with_format("arrow")[:]
    images = [name for name, feature in split.features.items() if type(feature).__name__ == "Image"]
    columns = {name: _of_arrow(source, name, table.column(name)) for name in table.column_names if name not in images}
    columns |= {name: _stacked(source, name, [np.asarray(image) for image in split[name]]) for name in images}
    classes = {name: feature.names for name, feature in split.features.items() if type(feature).__name__ == "ClassLabel"}
    return Columns(columns, range(2, len(split) + 2), class_names=classes)


def _imported(name: str) -> Any:
    """A module that only some data need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        remedy = f"Run: pip install {package}."
        raise ArgumentError("dataset", f"needs {package}", "it is not installed", remedy) from None
