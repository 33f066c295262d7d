"""Data sets as NumPy arrays: scikit-learn's digits, the files of standard benchmarks, or your own arrays."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.reprs import short_repr
from jaxfl.core.tables import numbered
from jaxfl.data import cifar, femnist, idx, imdb

NAMES = ("digits", "mnist", "fashion_mnist", "cifar10", "femnist", "imdb")
_INPUT_DTYPES = ("uint8", "int32", "float32")
_DIGITS = "datasets/data/digits.csv.gz"  # of scikit-learn
_TEST_STRIDE = 5


class Reading(NamedTuple):
    """Facts about the reading of a file of one's own."""

    separator: str | None  # of a table in a text file
    roles: Mapping[str, str]  # label, site, id -> column or array
    inputs: tuple[str, ...]  # columns or arrays
    left_out: tuple[str, ...]  # columns that have no role and are no inputs
    tests: str  # which samples test, in words


class Dataset(NamedTuple):
    """A data set for classification, on the host.

    Images keep the channel axis last and stay uint8 until they are used.
    """

    name: str
    train_inputs: np.ndarray  # (N, *sample), uint8 images, float32 features or int32 tokens
    train_labels: np.ndarray  # (N,), int32, in [0, num_classes)
    test_inputs: np.ndarray  # (N_test, *sample), same dtype as train_inputs
    test_labels: np.ndarray  # (N_test,), int32, in [0, num_classes)
    num_classes: int
    train_writers: np.ndarray | None = None  # (N,), int32, who made each training sample, if that is known
    writer_names: tuple[str, ...] | None = None  # names of a file's sites, by their numbers in train_writers
    train_ids: np.ndarray | None = None  # (N,), text, identifiers of a file's training samples
    class_names: tuple[str, ...] | None = None  # (num_classes,), names of a file's classes, by their numbers in labels
    reading: Reading | None = None  # of a file of one's own

    __repr__ = short_repr


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """A data set by name.

    | name | samples | shape, dtype | files in `data_dir` |
    | --- | --- | --- | --- |
    | digits | 1,437 / 360 | (8, 8, 1) float32 in [0, 1] | none, part of scikit-learn |
    | mnist, fashion_mnist | 60,000 / 10,000 | (28, 28, 1) uint8 | the four IDX files, gzip or not |
    | cifar10 | 50,000 / 10,000 | (32, 32, 3) uint8 | the six binary files, or the six published pickles |
    | femnist | 805,263 in all | (28, 28, 1) float32 in [0, 1] | `train` and `test` as LEAF's scripts make them |
    | imdb | 25,000 / 25,000 | (256,) int32 tokens below 10,000 | `aclImdb` or its archive |

    The split of digits is fixed: with the 1,797 samples sorted by class (stable), every fifth from the first on is for
    testing; within both parts the samples keep scikit-learn's order. `jaxfl.data.imdb` says how reviews become tokens.
    femnist also gives the writer of each training sample.

    Args:
        name: one of digits, mnist, fashion_mnist, cifar10, femnist, imdb.
        data_dir: the folder with the files; `~` is expanded. Must be left out for digits.

    Raises:
        ArgumentError: an unknown name, or a file that is missing or unusable.

    Guarantees:
        - the digits split is stratified: per class a fifth of the samples, to within one.

    Examples:
        >>> digits = load("digits")
        >>> digits.train_inputs.shape, digits.test_inputs.shape, digits.train_labels[:5].tolist()
        ((1437, 8, 8, 1), (360, 8, 8, 1), [1, 3, 5, 6, 7])
    """
    check.one_of(NAMES, dataset=name)
    if name == "digits":
        if data_dir is not None:
            requirement = "must be left out for digits, which comes with scikit-learn"
            raise ArgumentError("data_dir", requirement, f"got {data_dir!r}", "Leave it out or name another dataset.")
        return _load_digits()
    if name == "femnist":
        *arrays, writers = femnist.load_femnist(data_dir)
        return from_arrays(*arrays, num_classes=femnist.NUM_CLASSES, name=name, train_writers=writers)
    readers = {
        "cifar10": (cifar.load_cifar10, cifar.NUM_CLASSES),
        "imdb": (imdb.load_imdb, imdb.NUM_CLASSES),
    }
    read, num_classes = readers.get(name, (partial(idx.load_idx, name), idx.NUM_CLASSES))
    return from_arrays(*read(data_dir), num_classes=num_classes, name=name)


def _load_digits() -> Dataset:
    """The 8 by 8 digits of scikit-learn, values divided by their maximum 16."""
    # The package's own reader imports SciPy and pandas: more than a second of a core.
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin if package is not None and package.origin else "").parent / _DIGITS
    if file.exists():
        table = np.loadtxt(file, delimiter=",")  # which unpacks it
        images, labels = table[:, :-1], table[:, -1].astype(int)
    else:  # a version that keeps it elsewhere
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    inputs = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    is_test = np.zeros(len(labels), bool)
    is_test[np.argsort(labels, kind="stable")[::_TEST_STRIDE]] = True
    return from_arrays(
        inputs[~is_test], labels[~is_test], inputs[is_test], labels[is_test], num_classes=10, name="digits"
    )


def from_arrays(
    train_inputs: Any,
    train_labels: Any,
    test_inputs: Any,
    test_labels: Any,
    *,
    num_classes: int | None = None,
    name: str = "arrays",
    train_writers: Any = None,
) -> Dataset:
    """A data set from arrays in memory, checked.

    Args:
        train_inputs: (N, *sample), uint8, int32 or float32; not cast, so float64 is refused.
        train_labels: (N,), any integer dtype, in [0, num_classes); stored as int32. Or text, names of classes by the
            rules of `jaxfl.core.tables`.
        test_inputs: (N_test, *sample), as train_inputs.
        test_labels: (N_test,), as train_labels.
        num_classes: number of classes; default: one more than the largest label.
        name: name of the data set in records.
        train_writers: (N,), any integer dtype, or text: who made each training sample, for a partition by writers;
            stored as int32. None if that is not known.

    Returns:
        The data set; inputs are not copied.

    Raises:
        ArgumentError: lengths, shapes or dtypes that do not fit, a label out of range, or inputs that are not finite.

    Examples:
        >>> inputs = np.zeros((4, 2), np.float32)
        >>> from_arrays(inputs, [0, 1, 2, 1], inputs[:1], [0]).num_classes
        3
        >>> from_arrays(inputs, [0, 1, 2], inputs[:1], [0])
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: train_labels: must hold one label per sample; got 3 labels for 4 samples. ...
    """
    train_inputs = _input_array("train_inputs", train_inputs)
    test_inputs = _input_array("test_inputs", test_inputs)
    train, test = ((array.shape[1:], array.dtype) for array in (train_inputs, test_inputs))
    if train != test:
        found = f"got {test[1]} {test[0]} against {train[1]} {train[0]}"
        remedy = "Prepare both with the same code."
        raise ArgumentError("test_inputs", "must have the sample shape and dtype of train_inputs", found, remedy)
    class_names, writer_names = None, None
    if np.array(np.asarray(train_labels).tolist()).dtype.kind in "UO":  # an array of objects may hold integers
        both = numbered("train_labels", [*train_labels, *test_labels], "label {} of train and test".format)
        class_names, train_labels, test_labels = both.names, *np.split(both.numbers, [len(train_labels)])
    if np.asarray(train_writers).dtype.kind in "UO" and train_writers is not None:
        writer_names, train_writers = numbered("train_writers", train_writers, "sample {}".format)
    train_labels = _label_array("train_labels", train_labels, len(train_inputs))
    test_labels = _label_array("test_labels", test_labels, len(test_inputs))
    if num_classes is None:
        num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    check.at_least(1, num_classes=num_classes)
    check.below(num_classes, train_labels=train_labels, test_labels=test_labels)
    writers = None if train_writers is None else _label_array("train_writers", train_writers, len(train_inputs))
    return Dataset(
        name=name,
        train_inputs=train_inputs,
        train_labels=train_labels.astype(np.int32),
        test_inputs=test_inputs,
        test_labels=test_labels.astype(np.int32),
        num_classes=int(num_classes),
        train_writers=None if writers is None else writers.astype(np.int32),
        writer_names=writer_names,
        class_names=class_names,
    )


def _input_array(argument: str, inputs: Any) -> np.ndarray:
    """`inputs` as an array that can be trained on."""
    array = np.asarray(inputs)
    if array.dtype.name not in _INPUT_DTYPES:
        requirement = f"must be an array of {', '.join(_INPUT_DTYPES[:-1])} or {_INPUT_DTYPES[-1]}"
        dtype = "int32" if array.dtype.kind in "iu" else "float32"
        raise ArgumentError(argument, requirement, f"got {array.dtype}", f"Convert it, e.g. with .astype(np.{dtype}).")
    if array.ndim == 0 or len(array) == 0:
        raise ArgumentError(argument, "must hold at least one sample", f"got shape {array.shape}", "Pass (N, *sample).")
    check.finite(**{argument: array})
    return array


def _label_array(argument: str, labels: Any, num_samples: int) -> np.ndarray:
    """`labels` as an integer vector of the right length."""
    array = np.asarray(labels)
    array = np.array(array.tolist()) if array.dtype.kind == "O" else array
    if array.dtype.kind in "iu" and array.size and max(abs(int(array.min())), int(array.max())) >= 2**31:
        found = f"got values from {array.min()} to {array.max()}"
        raise ArgumentError(argument, "must fit into int32", found, "Number them from 0, or pass text.")
    check.integers(**{argument: array})
    if len(array) != num_samples:
        what = argument.removeprefix("train_").removeprefix("test_")
        found = f"got {len(array)} {what} for {num_samples} samples"
        requirement = f"must hold one {what.removesuffix('s')} per sample"
        raise ArgumentError(argument, requirement, found, "Check that both were cut in the same way.")
    return array
