"""Data sets from arrays in memory."""

import numpy as np
import pytest
from helpers import refused

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


@pytest.mark.parametrize(
    ("changes", "argument", "words"),
    [
        ({"train_labels": [0, 1, 2]}, "train_labels", ["3 labels for 4 samples"]),
        ({"train_writers": [0, 1, 2]}, "train_writers", ["one writer per sample", "3 writers for 4 samples"]),
        ({"train_writers": ["a", "b", "c", "d"]}, "train_writers", ["vector of integers"]),
        ({"test_labels": [0, 1, 2]}, "test_labels", ["3 labels for 2 samples"]),
        ({"train_labels": [0, 1, -2, 1]}, "train_labels", ["[0, 2)", "got -2 at position 2"]),
        ({"test_labels": [0, 3], "num_classes": 3}, "test_labels", ["[0, 3)", "got 3 at position 1"]),
        ({"train_labels": [0.0, 1, 2, 1]}, "train_labels", ["integers", "float64"]),
        ({"train_labels": np.eye(4, dtype=int)}, "train_labels", ["shape (4, 4)", "one-hot"]),
        ({"train_inputs": np.zeros((4, 2))}, "train_inputs", ["float64", "astype(np.float32)"]),
        ({"train_inputs": [["a", "b"]] * 4}, "train_inputs", ["<U1"]),
        ({"train_inputs": np.zeros((0, 2), np.float32)}, "train_inputs", ["at least one sample", "(0, 2)"]),
        ({"test_inputs": np.float32(1)}, "test_inputs", ["at least one sample"]),
        ({"test_inputs": np.zeros((2, 3), np.float32)}, "test_inputs", ["(3,)", "(2,)"]),
        ({"test_inputs": np.zeros((2, 2), np.uint8)}, "test_inputs", ["uint8", "float32"]),
        ({"num_classes": 0}, "num_classes", ["at least 1"]),
        ({"num_classes": 2.5}, "num_classes", ["integer"]),
    ],
)
def test_bad_arrays(changes, argument, words):
    refused(lambda: build(**changes), argument, *words)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(value):
    inputs = INPUTS[:4].copy()
    inputs[2, 1] = value
    refused(lambda: build(train_inputs=inputs), "train_inputs", "finite", f"got {value} in sample 2")
