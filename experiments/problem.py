"""What experiments that classify share: data sets cut to size, models by name, partitions."""

from __future__ import annotations

import numpy as np

from jaxfl import models
from jaxfl.core import ArgumentError, FederatedData, Task, check
from jaxfl.data import Dataset, federate, partition_dataset


def subset(dataset: Dataset, num_train: int | None, num_test: int | None) -> Dataset:
    """The data set cut to so many samples of each split, drawn once, the same for every seed."""
    rng = np.random.default_rng(0)

    def chosen(name: str, count: int | None, total: int) -> np.ndarray | slice:
        if count is None:
            return slice(None)
        if count > total:
            found = f"got {count:,} of {total:,}"
            raise ArgumentError(name, "must be at most the samples there are", found, "Pass fewer, or leave it out.")
        return np.sort(rng.permutation(total)[:count])

    train = chosen("num_train", num_train, len(dataset.train_labels))
    test = chosen("num_test", num_test, len(dataset.test_labels))
    return dataset._replace(
        train_inputs=dataset.train_inputs[train],
        train_labels=dataset.train_labels[train],
        test_inputs=dataset.test_inputs[test],
        test_labels=dataset.test_labels[test],
    )


def image_shape(dataset: Dataset) -> tuple[int, int, int]:
    """(height, width, channels) of a sample."""
    height, width, *channels = dataset.train_inputs.shape[1:]
    return height, width, channels[0] if channels else 1


def multilayer_perceptron(dataset: Dataset, hidden: tuple[int, ...], activation: str) -> Task:
    """Dense layers, as many inputs as a sample has numbers."""
    for units in hidden:
        check.at_least(1, hidden=units)
    widths = (int(dataset.train_inputs[0].size), *hidden, dataset.num_classes)
    return models.classification(models.mlp(widths, activation=activation))


def residual_network(dataset: Dataset, widths: tuple[int, ...]) -> Task:
    """ResNet-18, or one with these channels a stage."""
    shape, blocks = image_shape(dataset), (2,) * len(widths)
    return models.classification(models.resnet18(shape, dataset.num_classes, widths=widths, blocks=blocks))


def partitioned(
    dataset: Dataset, scheme: str, num_nodes: int, seed: int, *, alpha: float | None, shards_per_node: int | None
) -> FederatedData:
    """The nodes' training data; every seed has its own partition."""
    parts = partition_dataset(
        dataset, scheme=scheme, num_nodes=num_nodes, seed=seed, alpha=alpha, shards_per_node=shards_per_node
    )
    return federate(dataset.train_inputs, dataset.train_labels, parts)
