"""A data set of your own: a table, arrays (.npz), or one of the Hugging Face hub (hf:NAME).

A file may name the site of each sample, for instance a hospital; a site then becomes a node.

    .csv, .tsv, .parquet    a row for each sample: a column of labels, perhaps one of sites and one of identifiers, and
                            numbers in all others; or, in a .parquet file, one column of lists of equal length. Text may
                            be compressed (.csv.gz)
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

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.core import tables as rules
from jaxfl.core.vocabulary import by_spaces
from jaxfl.data.columns import Columns, column_name, has_columns, read_columns
from jaxfl.data.held_out import held_names, held_places
from jaxfl.data.sources import Dataset, Reading, from_arrays

_INT32 = np.iinfo(np.int32)


def load_file(
    path: str | os.PathLike[str],
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
        label_column, site_column, id_column: names of columns; not used for .npz files. None: there is none. An
            identifier is one of a sample, or of a person with several samples.
        input_columns: the columns that are inputs. Default: all but the above and `drop_columns`, or the column of
            lists or images, if there is one.
        drop_columns: columns that are left out.
        test_split: share of the samples for testing, in (0, 1), if the file is not split: by `held_names` of the
            identifiers, or else by `held_places` of each site.

    Returns:
        The data set; sites are its `train_writers`, with names. Sites of test samples are dropped.

    Raises:
        ArgumentError: the file cannot be read, lacks a column or an array, or holds something that is not a number. A
            column without a name, or one whose numbers ascend from row to row, is in neither list of columns. Labels
            are no classes. A site has no sample to train on.

    Guarantees:
        - a changed sample changes no other one; with identifiers, a removed or added one neither.
        - without identifiers, each site trains on its first sample.

    Examples:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "patients.csv"
        >>> _ = path.write_text("age,site,label\\n" + "".join(f"0.{k},{'AB'[k % 2]},{k % 3}\\n" for k in range(60)))
        >>> data = load_file(str(path), site_column="site")
        >>> data.train_inputs.shape, data.test_inputs.shape, data.class_names, data.writer_names
        ((48, 1), (12, 1), ('0', '1', '2'), ('A', 'B'))
    """
    check.open_unit(test_split=test_split)
    path = os.fspath(path)
    splits = read_columns(path)
    first = next(iter(splits.values()))
    roles: dict[str, str | None] = {"label": label_column, "site": site_column, "id": id_column}
    if not has_columns(path):  # arrays have fixed names
        roles, input_columns, drop_columns = {role: f"{role}s" for role in roles if f"{role}s" in first.values}, (), ()
    taken = {role: column_name(name) for role, name in roles.items() if name is not None}
    names = _input_names(path, first, taken, *(tuple(map(column_name, each)) for each in (input_columns, drop_columns)))
    inputs = [_inputs(path, table, names) for table in splits.values()]
    named = [
        {
            role: rules.numbered("dataset", table.column(path, name), table.place(path, name), path)
            for role, name in taken.items()
            if role == "label" or not number  # sites and identifiers of test samples have no use
        }
        for number, table in enumerate(splits.values())
    ]
    classes = rules.in_order({name for one in named for name in one["label"].names})
    rules.refuse_alike("dataset", classes, path)
    num_samples = sum(len(one["label"].numbers) for one in named)
    if num_samples > 2 and len(classes) > (num_samples - 1 if all(map(rules.is_whole, classes)) else num_samples / 2):
        found = f"{path} has {len(classes)} different labels in {num_samples} samples"
        remedy = "Name another column; for regression give jaxfl.from_functions a squared loss (docs/own_data.md)."
        raise ArgumentError("label_column", "must hold classes, which several samples share", found, remedy)
    class_names = first.class_names.get(taken["label"], classes)
    order = classes if class_names is classes else [str(number) for number in range(len(class_names))]
    if not {*classes} <= {*order}:
        found = f"{path} has the label {min({*classes} - {*order})}"
        raise ArgumentError("dataset", f"must have labels of its {len(order)} classes", found, "Drop such rows.")
    labels = [np.array([order.index(name) for name in one["label"].names])[one["label"].numbers] for one in named]
    sites, how, tests = named[0].get("site"), "those of the split test", np.zeros(0, bool)
    if len(splits) == 1:
        tests, how = _tests(path, len(labels[0]), sites, named[0].get("id"), test_split)
        inputs, labels = [inputs[0][~tests], inputs[0][tests]], [labels[0][~tests], labels[0][tests]]
        sites = None if sites is None else sites._replace(numbers=sites.numbers[~tests])
        if not tests.any():
            found = f"{path} has {num_samples} samples, and none of them tests"
            raise ArgumentError("dataset", f"must have a sample to test ({how})", found, "Take more samples.")
    writers = None if sites is None else sites.numbers
    options: dict[str, Any] = {"num_classes": len(order), "name": path, "train_writers": writers}
    used = {*names, *taken.values()}
    left_out = tuple(name for name in first.values if name not in used)
    ids = named[0].get("id") if len(splits) == 1 else None
    return from_arrays(inputs[0], labels[0], inputs[1], labels[1], **options)._replace(
        train_ids=None if ids is None else np.array(ids.names, object)[ids.numbers[~tests]],
        writer_names=None if sites is None else sites.names,
        class_names=tuple(class_names),
        reading=Reading(first.separator, taken, names, left_out, how),
    )


def read_by_site(path: str, names: Sequence[str], argument: str) -> tuple[float, ...]:
    """Read a number above 0 for each site from a table of two columns, perhaps with a heading: its name and its number.

    Args:
        path: the file; `~` is expanded.
        names: of all sites, in the order of the nodes.
        argument: name of the option, for errors.

    Returns:
        The numbers in the order of the names.

    Raises:
        ArgumentError: the file cannot be read, or a site has no row, several rows, or no number above 0.
    """
    requirement, is_list = "must be a .csv file with a site and its number a row", not path.strip("0123456789., ")
    form = by_spaces([path] * is_list) or "Write Oslo,2.5 in a row, for example."
    table = rules.read_rows(path, argument, requirement, form)
    numbers: dict[str, float] = {}
    has_heading = table.cells and rules.as_name(table.cells[0][1][0]) not in names
    for _, row in table.cells[1:] if has_heading else table.cells:
        if len(row) != 2:
            raise ArgumentError(argument, requirement, f"{path} has a row of {len(row)}: {', '.join(row)[:80]}", form)
        name = rules.as_name(row[0]) or "no name"
        if name not in names or name in numbers:
            found = f"{path} has {name} twice" if name in numbers else f"{path} has {name}, which is not a site"
            remedy = "The sites are " + "; ".join(names[:9]) + ("; ..." if len(names) > 9 else ".")
            raise ArgumentError(argument, "must name each site of the data once", found, remedy)
        numbers[name] = float(rules.as_numbers([row[1]], comma=table.separator == ";")[0])
        if not 0 < numbers[name] < math.inf:
            found = f"{path} has {row[1].strip()!r} for {name}"
            raise ArgumentError(argument, "must give each site a number above 0", found, "Write for example 2.5.")
    missing = [name for name in names if name not in numbers]
    if missing:
        found = f"{path} has none for {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        raise ArgumentError(argument, "must have a row for each site", found, f"Add a row {missing[0]},NUMBER.")
    return tuple(numbers[name] for name in names)


def _input_names(
    path: str, table: Columns, taken: Mapping[str, str], inputs: tuple[str, ...], dropped: tuple[str, ...]
) -> tuple[str, ...]:
    """The columns that are inputs; refuses unknown names, and columns that may number the rows."""
    wanted = [(f"{role}_column", name) for role, name in taken.items()]
    wanted += [("drop_columns", name) for name in dropped] + [("input_columns", name) for name in inputs]
    seen = set()
    for argument, name in wanted:
        if name not in table.values:
            known = [*table.values] if len(table.values) <= 9 else [*[*table.values][:4], "...", *[*table.values][-4:]]
            found = f"{path} has {', '.join(known)}"
            raise ArgumentError(argument, f"must be a column; {name} is not one", found, "Name one of them.")
        if name in seen:
            raise ArgumentError(
                argument, "must name a column once", f"got {name} in another place, too", "Leave it out."
            )
        seen.add(name)
    if inputs:
        return inputs
    others = [name for name in table.values if name not in seen]
    blocks = [name for name in others if getattr(table.values[name], "ndim", 1) > 1]
    if len(blocks) > 1:
        found = f"{path} has {' and '.join(blocks)}"
        raise ArgumentError("dataset", "must have one column of images or lists", found, "Pass --input-columns NAME.")
    for name in [] if blocks or not has_columns(path) else others:
        is_unnamed = re.fullmatch(r"column \d+|Unnamed: \d+|__index_level_\d+__", name)  # the last two are of pandas
        if is_unnamed or _ascends(rules.as_numbers(table.values[name], comma=table.separator == ";")):
            found = f"{name} of {path} {'has no name' if is_unnamed else 'has numbers that ascend from row to row'}"
            remedy = "Name it in --drop-columns or --id-column; if it does describe samples, name all --input-columns."
            raise ArgumentError("dataset", "must have columns that describe samples", found, remedy)
    return tuple(blocks or others)


def _ascends(numbers: np.ndarray) -> bool:
    """Tell whether a column has more than two values, all of them numbers, each above the last one."""
    return len(numbers) > 2 and bool((np.diff(numbers.astype(np.float64)) > 0).all())


def _inputs(path: str, table: Columns, names: tuple[str, ...]) -> np.ndarray:
    """The inputs (N, *sample): images and whole numbers of arrays stay integers, all other numbers are float32."""
    columns = [table.column(path, name) for name in names]
    is_block = [getattr(column, "ndim", 1) > 1 for column in columns]
    if not columns or (any(is_block) and len(columns) > 1):
        found = f"{path} has {', '.join(names) or 'none'}"
        raise ArgumentError("dataset", "must have columns of numbers, or one of images or lists", found, "Name inputs.")
    if has_columns(path) and not any(is_block):
        with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite
            numbers = [rules.as_numbers(column, comma=table.separator == ";") for column in columns]
            array = np.array(numbers, np.float64).T.astype(np.float32)
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            position, name = bad[0, 0], names[bad[0, 1]]
            found = f"{table.place(path, name)(position)} has {table.values[name][position]!r}"
            kinds = "Fill or drop such rows; write kinds, True and False as 0 and 1; name the column of sites by"
            remedy = f"{kinds} --site-column, of identifiers by --id-column, others by --drop-columns."
            values = list(map(str, table.values[name]))
            if not np.isfinite(numbers[bad[0, 1]]).any() and len({*values}) == len(values):
                remedy = f"Its values all differ: pass --id-column {name}, or --drop-columns {name}."
            if "," in str(table.values[name][position]):
                remedy = "Write decimals with a point, or separate cells by semicolons; lists need one length."
            raise ArgumentError("dataset", "must hold finite numbers besides labels and sites", found, remedy)
    else:
        array = np.asarray(columns[0])
    if array.dtype.kind not in "biuf" or 0 in array.shape[1:]:
        found = f"{path} has {array.dtype} of shape {array.shape} in column {names[0]}"
        remedy = "Write kinds as columns of 0 and 1, and lists without gaps."
        raise ArgumentError("dataset", "must hold numbers as inputs", found, remedy)
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            found, remedy = f"{path} has {array.min()} to {array.max()}", "Use .astype(numpy.float32)."
            raise ArgumentError("dataset", "must hold integers of 32 bits, or floats", found, remedy)
        return array.astype(np.int32)
    with np.errstate(over="ignore"):
        array = array if array.dtype == np.uint8 else array.astype(np.float32)
    check.finite(table.place(path, names[0]), dataset=array)
    return array


def _tests(
    path: str, num_samples: int, sites: rules.Numbered | None, ids: rules.Numbered | None, share: float
) -> tuple[np.ndarray, str]:
    """Which samples test, (N,) bool, by their identifiers or by their places within their sites; and so in words."""
    site_of = np.zeros(num_samples, np.int64) if sites is None else sites.numbers
    tests = np.zeros(num_samples, bool)
    if ids is None:
        held = [held_places(size, share) for size in np.bincount(site_of).tolist()]
        tests[np.argsort(site_of, kind="stable")] = np.concatenate(held) if held else []
        where = "file" if sites is None else "site"
        return tests, f"the second of each {where}, and one of every {1 / share:.3g} behind it, by place"
    tests = held_names(ids.names, share)[ids.numbers]
    num_training = np.bincount(site_of[~tests], minlength=site_of.max() + 1)
    if num_training.min() == 0:
        found = f"all samples of {path if sites is None else sites.names[int(num_training.argmin())]} test"
        remedy = "Merge or drop it, or leave --id-column out."
        raise ArgumentError("id_column", "must leave each site a sample to train on", found, remedy)
    return tests, f"{share:.3g} of all, by a hash of their identifiers"
