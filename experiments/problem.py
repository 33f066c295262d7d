"""What experiments that classify share: data sets cut to size, models by name, partitions."""

from __future__ import annotations

import numpy as np

from jaxfl import models
from jaxfl.core import ArgumentError, FederatedData, Task, check, over_nodes
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
        train_writers=None if dataset.train_writers is None else dataset.train_writers[train],
        test_inputs=dataset.test_inputs[test],
        test_labels=dataset.test_labels[test],
    )


def shrunk(dataset: Dataset, factor: int) -> Dataset:
    """The data set with its uint8 images averaged over blocks of so many pixels a side, rounded; 1 changes nothing."""
    check.at_least(1, shrink=factor)
    if factor == 1:
        return dataset

    def averaged(images: np.ndarray) -> np.ndarray:
        size, height, width = images.shape[:3]
        if images.dtype != np.uint8 or height % factor or width % factor:
            found = f"got {factor} for {images.dtype} images of {height}x{width}"
            remedy = "Pass a factor of both sides, or leave it out."
            raise ArgumentError("shrink", "must divide the sides of uint8 images", found, remedy)
        blocks = images.reshape(size, height // factor, factor, width // factor, factor, *images.shape[3:])
        return np.rint(blocks.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)

    return dataset._replace(train_inputs=averaged(dataset.train_inputs), test_inputs=averaged(dataset.test_inputs))


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


def check_resnet_widths(widths: tuple[int, ...]) -> None:
    """Refuse channels that normalization cannot split into groups of equal size, of which there are at most 32."""
    for width in widths:
        if width < 1 or (width > 32 and width % 32):
            remedy = "Pass for example 8 16 32 64."
            raise ArgumentError("resnet_widths", "must be 1 to 32, or a multiple of 32", f"got {width}", remedy)


def residual_network(dataset: Dataset, widths: tuple[int, ...]) -> Task:
    """ResNet-18, or one with these channels a stage."""
    shape, blocks = image_shape(dataset), (2,) * len(widths)
    return models.classification(models.resnet18(shape, dataset.num_classes, widths=widths, blocks=blocks))


def with_node_loop(task: Task, node_loop: str) -> Task:
    """The task, run over nodes as an option says.

    Args:
        task: a classification.
        node_loop: "vmap", "map" or "chunk:k", or one of these behind "devices:" (see `jaxfl.core.node_loop`); "auto"
            leaves the choice to the model.

    Raises:
        ArgumentError: `node_loop` is none of these.
    """
    if node_loop == "auto":
        return task
    try:
        over_nodes(lambda: None, node_loop)
    except ArgumentError as error:
        requirement = "must be auto, vmap, map or chunk:k with k at least 1, the last three also behind devices:"
        raise ArgumentError("node_loop", requirement, error.found, "Choose one of these.") from None
    return task._replace(node_loop=node_loop)


def partitioned(
    dataset: Dataset, scheme: str, num_nodes: int, seed: int, *, alpha: float | None, shards_per_node: int | None
) -> FederatedData:
    """The nodes' training data; every seed has its own partition."""
    check.one_of(("iid", "dirichlet", "shards"), scheme=scheme)
    parts = partition_dataset(
        dataset, scheme=scheme, num_nodes=num_nodes, seed=seed, alpha=alpha, shards_per_node=shards_per_node
    )
    return federate(dataset.train_inputs, dataset.train_labels, parts)
