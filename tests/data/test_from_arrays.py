"""Data sets from arrays in memory."""

import numpy as np
from helpers import refusals

from jaxfl.data import from_arrays

INPUTS = np.arange(12, dtype=np.float32).reshape(6, 2)


def build(**changes):
    given = {
        "train_inputs": INPUTS[:4],
        "train_labels": [0, 1, 2, 1],
        "test_inputs": INPUTS[4:],
        "test_labels": np.array([0, 1], np.uint8),
        **changes,
    }
    return from_arrays(**given)


def test_arrays_come_back():
    dataset = build()
    assert dataset.name == "arrays"
    assert dataset.num_classes == 3
    assert np.shares_memory(dataset.train_inputs, INPUTS)
    np.testing.assert_array_equal(dataset.train_labels, np.array([0, 1, 2, 1], np.int32), strict=True)
    assert dataset.train_writers is None
    np.testing.assert_array_equal(dataset.test_labels, np.array([0, 1], np.int32), strict=True)


def test_num_classes_counts_test_labels():
    assert build(test_labels=[0, 6]).num_classes == 7
    assert build(num_classes=9, name="mine").num_classes == 9


def test_text_is_numbered_by_its_names():
    labels = {"train_labels": ["yes", "no ", "no", "yes"], "test_labels": np.array(["no", "other"], object)}
    dataset = build(**labels, train_writers=["10", "9", "9", " 10"])
    assert (dataset.class_names, dataset.writer_names) == (("no", "other", "yes"), ("9", "10"))
    assert (dataset.train_labels.tolist(), dataset.test_labels.tolist()) == ([2, 0, 0, 2], [0, 1])
    assert dataset.train_writers is not None
    assert dataset.train_writers.tolist() == [1, 0, 0, 1]


BAD = {
    "train_labels": [["a", "b", "a"], [0, 1, 2], [0, 1, -2, 1], [0.0, 1, 2, 1], np.eye(4, dtype=int)],
    "train_writers": [[0, 1, 2], ["a", "", "c", "d"], ["a", "A", "c", "d"]],
    "test_labels": [[0, 1, 2]],
    "train_inputs": [np.zeros((4, 2)), [["a", "b"]] * 4, np.zeros((0, 2), np.float32)],
    "test_inputs": [np.float32(1), np.zeros((2, 3), np.float32), np.zeros((2, 2), np.uint8)],
    "num_classes": [0, 2.5],
}
BAD["train_inputs"] += [np.where(np.arange(8).reshape(4, 2) == 5, bad, INPUTS[:4]) for bad in (np.nan, np.inf, -np.inf)]

test_refusals = refusals(
    [
        (lambda argument=argument, value=value: build(**{argument: value}), argument)
        for argument, values in BAD.items()
        for value in values
    ]
    + [(lambda: build(test_labels=[0, 3], num_classes=3), "test_labels")]
)
