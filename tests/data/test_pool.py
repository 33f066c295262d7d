"""Partitions by name, and from arrays and a partition to FederatedData."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused

from jaxfl.core import ArgumentError
from jaxfl.data import dirichlet, federate, from_arrays, iid, label_shards, partition_dataset, whole_writers

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


def test_samples_of_nodes_are_found_through_the_table():
    labels = np.arange(500) % 7
    parts = dirichlet(labels, 9, 0.2, 0)
    data = federate(np.arange(500, dtype=np.float32), labels, parts)
    for node, part in enumerate(parts):
        valid = np.arange(data.max_size) < int(data.sizes[node])
        np.testing.assert_array_equal(np.asarray(data.inputs[data.indices[node]])[valid], part.astype(np.float32))
        assert not np.asarray(data.indices[node])[~valid].any()


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
        with pytest.raises(ArgumentError, match=r"^inputs: must be uint8, int32 or float32; got float64\. Convert it"):
            federate(inputs, LABELS, PARTS)


@pytest.mark.parametrize(
    ("changes", "argument", "words"),
    [
        ({"parts": [[0], []]}, "parts", ["node 1 has none", "give it a sample"]),
        ({"parts": []}, "parts", ["at least one node", "got none"]),
        ({"parts": [[0], [1, 6]]}, "parts", ["[0, 6)", "node 1 has 6 at position 1"]),
        ({"parts": [[-1], [1]]}, "parts", ["node 0 has -1 at position 0"]),
        ({"parts": [[0, 3], [1], [2, 3]]}, "parts", ["sample 3: node 0 and node 2 hold it"]),
        ({"parts": [[0], [2, 1, 2]]}, "parts", ["sample 2: node 1 holds it twice"]),
        ({"parts": [[0.0]]}, "parts", ["vectors of integers", "float64"]),
        ({"parts": [[[0]]]}, "parts", ["vectors of integers", "shape (1, 1)"]),
        ({"parts": [[True, False]]}, "parts", ["vectors of integers", "bool"]),
        ({"inputs": INPUTS.astype(np.int64)}, "inputs", ["uint8, int32", "got int64"]),
        ({"inputs": INPUTS[:5]}, "labels", ["one entry per sample", "(6,)", "(5, 2)"]),
        ({"inputs": np.float32(0)}, "labels", ["one entry per sample"]),
        ({"labels": np.array(0)}, "labels", ["one entry per sample"]),
        ({"labels": LABELS.astype(np.float16)}, "labels", ["integers", "float32", "got float16"]),
        ({"labels": LABELS > 0}, "labels", ["got bool"]),
        ({"labels": LABELS + 2**31}, "labels", ["int32", "2147483650"]),
    ],
)
def test_bad_arguments(changes, argument, words):
    refused(lambda: federate(**{"inputs": INPUTS, "labels": LABELS, "parts": PARTS, **changes}), argument, *words)


class TestPartitionDataset:
    dataset = from_arrays(np.zeros((60, 1), np.float32), np.arange(60) % 3, np.zeros((1, 1), np.float32), [0])

    def test_schemes(self):
        labels = self.dataset.train_labels
        for parts, expected in (
            (partition_dataset(self.dataset, "iid", 4, 5), iid(60, 4, 5)),
            (partition_dataset(self.dataset, "dirichlet", 4, 5, alpha=0.3), dirichlet(labels, 4, 0.3, 5)),
            (partition_dataset(self.dataset, "shards", 4, 5, shards_per_node=3), label_shards(labels, 4, 3, 5)),
        ):
            assert [part.tolist() for part in parts] == [part.tolist() for part in expected]

    def test_writers_of_the_data_set(self):
        writers = np.arange(60) // 4
        dataset = from_arrays(*self.dataset[1:5], train_writers=writers)
        parts = partition_dataset(dataset, "writers", 4, 5, writers_per_node=2)
        assert [part.tolist() for part in parts] == [part.tolist() for part in whole_writers(writers, 4, 2, 5)]
        cut = dataset._replace(train_inputs=dataset.train_inputs[:9], train_labels=dataset.train_labels[:9])
        with pytest.raises(ArgumentError, match=r"^dataset: .*; arrays has 60 for 9"):
            partition_dataset(cut, "writers", 2, 5, writers_per_node=1)

    @pytest.mark.parametrize(
        ("scheme", "numbers", "argument", "word"),
        [
            ("random", {}, "scheme", "iid, dirichlet, shards, writers"),
            ("writers", {}, "writers_per_node", "must be given"),
            ("writers", {"writers_per_node": 2}, "dataset", "writer of each training sample; arrays has none"),
            ("iid", {"writers_per_node": 2}, "writers_per_node", "left out for the iid partition"),
            ("dirichlet", {}, "alpha", "must be given"),
            ("shards", {}, "shards_per_node", "must be given"),
            ("iid", {"alpha": 1.0}, "alpha", "left out for the iid partition"),
            ("dirichlet", {"alpha": 1.0, "shards_per_node": 2}, "shards_per_node", "left out for the dirichlet"),
            ("dirichlet", {"alpha": 0.0}, "alpha", "positive"),
        ],
    )
    def test_bad_arguments(self, scheme, numbers, argument, word):
        with pytest.raises(ArgumentError, match=rf"^{argument}: .*{word}"):
            partition_dataset(self.dataset, scheme, 4, 5, **numbers)
