"""Partitions by name, and from arrays and a partition to FederatedData."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals, refused

from jaxfl.data import (
    dirichlet,
    federate,
    few_classes,
    from_arrays,
    iid,
    label_shards,
    partition_dataset,
    whole_writers,
)

INPUTS = np.arange(12, dtype=np.uint8).reshape(6, 2)
LABELS = np.array([0, 1, 2, 0, 1, 2])
PARTS = [np.array([4, 1, 3]), np.array([5]), np.array([2, 0])]


def test_row_begins_with_the_part_and_ends_with_zeros():
    data = federate(INPUTS, LABELS, PARTS)
    assert data.indices.tolist() == [[4, 1, 3], [5, 0, 0], [2, 0, 0]]
    assert data.sizes.tolist() == [3, 1, 2]
    assert (data.num_nodes, data.max_size) == (3, 3)
    assert data.indices.dtype == data.sizes.dtype == data.labels.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(data.inputs), INPUTS, strict=True)
    np.testing.assert_array_equal(np.asarray(data.labels), LABELS.astype(np.int32), strict=True)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(data))


def test_pool_on_the_device_is_not_copied():
    pool = jnp.asarray(INPUTS)
    assert federate(pool, LABELS, PARTS).inputs is pool


def test_sample_may_belong_to_no_node():
    assert federate(INPUTS, LABELS, [[1]]).sizes.tolist() == [1]


def test_targets_stay_float():
    targets = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2)
    np.testing.assert_array_equal(np.asarray(federate(INPUTS, targets, PARTS).labels), targets, strict=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32])
def test_input_dtypes_are_kept(dtype):
    assert federate(INPUTS.astype(dtype), LABELS, PARTS).inputs.dtype == dtype


def test_float64_is_kept_under_x64_and_refused_otherwise():
    inputs = INPUTS.astype(np.float64)
    if jnp.result_type(float) == np.float64:
        assert federate(inputs, LABELS, PARTS).inputs.dtype == np.float64
    else:
        refused(lambda: federate(inputs, LABELS, PARTS), "inputs", "float64")


BAD = {
    "parts": [[], [[0], []], [[0], [1, 6]], [[-1], [1]], [[0, 3], [1], [2, 3]], [[0], [2, 1, 2]]],
    "inputs": [INPUTS.astype(np.int64)],
    "labels": [np.array(0), LABELS.astype(np.float16), LABELS > 0, LABELS + 2**31, LABELS[:5]],
    "names": [["a", "b"], ["a", "b", "b"]],
}
BAD["parts"] += [[[0.0]], [[[0]]], [[True, False]]]


def call(**changes):
    return lambda: federate(**{"inputs": INPUTS, "labels": LABELS, "parts": PARTS, **changes})


test_refusals = refusals(
    [(call(**{argument: value}), argument) for argument, values in BAD.items() for value in values]
    + [(call(inputs=INPUTS[:5]), "labels"), (call(inputs=np.float32(0)), "labels")]
)


def test_who_holds_what_is_said_by_name():
    refused(call(parts=[[0, 3], [1], [2, 3]], names="xyz"), "parts", "sample 3", "x", "z")
    refused(call(parts=[[0], [1, 6]]), "parts", "node 1 has 6")


class TestPartitionDataset:
    dataset = from_arrays(np.zeros((60, 1), np.float32), np.arange(60) % 3, np.zeros((1, 1), np.float32), [0])

    def test_schemes(self):
        labels = self.dataset.train_labels
        for parts, expected in (
            (partition_dataset(self.dataset, "iid", 4, 5), iid(60, 4, 5)),
            (partition_dataset(self.dataset, "dirichlet", 4, 5, alpha=0.3), dirichlet(labels, 4, 0.3, 5)),
            (partition_dataset(self.dataset, "shards", 4, 5, shards_per_node=3), label_shards(labels, 4, 3, 5)),
            (partition_dataset(self.dataset, "quantity", 4, 5, alpha=0.3), dirichlet(np.zeros(60, int), 4, 0.3, 5)),
            (partition_dataset(self.dataset, "classes", 4, 5, classes_per_node=1), few_classes(labels, 4, 1, 5)),
        ):
            assert [part.tolist() for part in parts] == [part.tolist() for part in expected]

    def test_writers_of_the_data_set(self):
        writers = np.arange(60) // 4
        dataset = from_arrays(*self.dataset[1:5], train_writers=writers)
        parts = partition_dataset(dataset, "writers", 4, 5, writers_per_node=2)
        assert [part.tolist() for part in parts] == [part.tolist() for part in whole_writers(writers, 4, 2, 5)]
        cut = dataset._replace(train_inputs=dataset.train_inputs[:9], train_labels=dataset.train_labels[:9])
        refused(lambda: partition_dataset(cut, "writers", 2, 5, writers_per_node=1), "dataset")
        message = refused(
            lambda: partition_dataset(self.dataset, "sites", 4, 5), "dataset", "site of each", "site_column"
        )
        assert not any(word in message for word in ("writer", "femnist"))


OF_SCHEMES: list[tuple[str, dict[str, Any], str]] = [
    ("random", {}, "scheme"),
    ("writers", {}, "writers_per_node"),
    ("writers", {"writers_per_node": 2}, "dataset"),
    ("iid", {"writers_per_node": 2}, "writers_per_node"),
    ("dirichlet", {}, "alpha"),
    ("shards", {}, "shards_per_node"),
    ("classes", {}, "classes_per_node"),
    ("quantity", {"alpha": 1.0, "classes_per_node": 2}, "classes_per_node"),
    ("iid", {"alpha": 1.0}, "alpha"),
    ("dirichlet", {"alpha": 1.0, "shards_per_node": 2}, "shards_per_node"),
    ("dirichlet", {"alpha": 0.0}, "alpha"),
]
test_refusals_of_partition_dataset = refusals(
    [
        (lambda row=row: partition_dataset(TestPartitionDataset.dataset, row[0], 4, 5, **row[1]), row[2])
        for row in OF_SCHEMES
    ]
)
