"""A data set made smaller: fewer samples, fewer classes, smaller images, samples that validate apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.core.tables import as_name, refuse_alike
from jaxfl.data.held_out import held_names, held_places
from jaxfl.data.sources import Dataset


def subset(dataset: Dataset, num_train: int | None, num_test: int | None) -> Dataset:
    """The data set with fewer samples in each split. They are drawn at random, the same ones in every call.

    Args:
        dataset: any.
        num_train, num_test: samples that stay, at least 1; None keeps all.

    Raises:
        ArgumentError: more samples than there are.

    Examples:
        >>> from jaxfl.data import load
        >>> subset(load("digits"), 100, None).train_inputs.shape[0]
        100
    """
    for name, count in (("num_train", num_train), ("num_test", num_test)):
        if count is not None:
            check.at_least(1, **{name: count})
    rng = np.random.default_rng(0)

    def choose(name: str, count: int | None, total: int) -> np.ndarray | slice:
        if count is None:
            return slice(None)
        if count > total:
            found = f"got {count:,} of {total:,}"
            raise ArgumentError(name, "must be at most the number of samples", found, "Pass fewer, or leave it out.")
        return np.sort(rng.permutation(total)[:count])

    train = choose("num_train", num_train, len(dataset.train_labels))
    test = choose("num_test", num_test, len(dataset.test_labels))
    test_set = {"test_inputs": dataset.test_inputs[test], "test_labels": dataset.test_labels[test]}
    return _trained_on(dataset, train)._replace(**test_set)


def _trained_on(dataset: Dataset, train: np.ndarray | slice) -> Dataset:
    """The data set with some of its training samples."""
    return dataset._replace(
        train_inputs=dataset.train_inputs[train],
        train_labels=dataset.train_labels[train],
        train_writers=None if dataset.train_writers is None else dataset.train_writers[train],
        train_ids=None if dataset.train_ids is None else dataset.train_ids[train],
    )


def without_validation(dataset: Dataset, share: float) -> tuple[Dataset, np.ndarray]:
    """Hold training samples out to choose settings by, so that test samples have no say in the choice.

    Args:
        dataset: any.
        share: of the training samples, in (0, 1): by hashes of their identifiers where they have some, else by their
            places among those of the same writer (site), or among all.

    Returns:
        The data set without them, and where they stand among its training samples: (N,), bool.

    Raises:
        ArgumentError: a share out of range, or one that leaves no sample to train on or to validate.

    Guarantees:
        - the same samples in every call; no input, no label and no seed has a say.

    Examples:
        >>> from jaxfl.data import load
        >>> rest, held = without_validation(load("digits"), 0.2)
        >>> len(rest.train_labels), int(held.sum()), len(rest.test_labels)
        (1149, 288, 360)
    """
    check.open_unit(validation=share)
    count, writers = len(dataset.train_labels), dataset.train_writers
    held = np.zeros(count, np.bool_)
    if dataset.train_ids is not None:
        held = held_names(dataset.train_ids.tolist(), share, validate=True)
    elif writers is None:
        held = held_places(count, share)
    else:
        order = np.argsort(writers, kind="stable")
        starts = np.flatnonzero(np.diff(writers[order], prepend=-1))
        held[order] = np.concatenate([held_places(int(own), share) for own in np.diff(starts, append=count)])
    if held.all() or not held.any():
        found, remedy = f"got {share:g} of {count} samples", "Pass another share."
        raise ArgumentError("validation", "must leave samples to train on and to validate", found, remedy)
    return _trained_on(dataset, ~held), held


def only_classes(dataset: Dataset, classes: Sequence[int | str] | None) -> Dataset:
    """The samples of some classes, labelled 0, 1, ... in the order in which the classes are named.

    Args:
        dataset: any.
        classes: labels that stay, at least two different ones, by name where the data set has names; None keeps all as
            they are. Classes so given are public: they do not follow from the samples.

    Raises:
        ArgumentError: fewer than two classes, a repeated one, or an unknown one. Of a file of one's own, one unknown
            class may have no sample here.

    Examples:
        >>> from jaxfl.data import load
        >>> pair = only_classes(load("digits"), (8, 3))
        >>> pair.num_classes, sorted(set(pair.test_labels.tolist())), len(pair.train_labels)
        (2, [0, 1], 286)
    """
    if classes is None:
        return dataset
    known = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
    names = [str(label) if str(label) in known else as_name(label) or "" for label in classes]
    refuse_alike("classes", dict.fromkeys(names), "it")
    if len(names) < 2 or len(set(names)) < len(names):
        text = " ".join(names) or "none"
        raise ArgumentError("classes", "must be at least two, each once", f"got {text}", "Pass for example 0 1.")
    unknown = [name for name in names if name not in known]
    if len(unknown) > (dataset.class_names is not None and len(names) > 2):
        shown = " ".join(known[:12]) + (" ..." if len(known) > 12 else "")
        raise ArgumentError("classes", f"must be labels of {dataset.name}", f"got {unknown[0]}", f"They are {shown}.")
    number = np.full(len(known), -1, np.int32)
    for new, name in enumerate(names):
        if name in known:
            number[known.index(name)] = new
    train, test = number[dataset.train_labels], number[dataset.test_labels]
    return _trained_on(dataset, train >= 0)._replace(
        train_labels=train[train >= 0],
        test_inputs=dataset.test_inputs[test >= 0],
        test_labels=test[test >= 0],
        num_classes=len(names),
        class_names=None if dataset.class_names is None else tuple(names),
    )


def shrunk(dataset: Dataset, shrink: int) -> Dataset:
    """The data set with its images averaged over blocks of pixels, rounded.

    Args:
        dataset: of uint8 images.
        shrink: pixels of a block's side, a factor of both sides; 1 changes nothing.

    Raises:
        ArgumentError: samples that are not such images.
    """
    check.at_least(1, shrink=shrink)
    if shrink == 1:
        return dataset

    def average(images: np.ndarray) -> np.ndarray:
        size, height, width = (*images.shape, 1, 1)[:3]
        if images.dtype != np.uint8 or images.ndim < 3 or height % shrink or width % shrink:
            found = f"got {shrink} for {images.dtype} samples of {height}x{width}"
            remedy = "Pass a factor of both sides, or leave it out."
            raise ArgumentError("shrink", "must divide the sides of uint8 images", found, remedy)
        blocks = images.reshape(size, height // shrink, shrink, width // shrink, shrink, *images.shape[3:])
        return np.rint(blocks.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)

    return dataset._replace(train_inputs=average(dataset.train_inputs), test_inputs=average(dataset.test_inputs))
