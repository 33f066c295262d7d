"""Networks that experiments name by an option."""

from __future__ import annotations

from typing import Any

from jaxfl import models
from jaxfl.core import ArgumentError, Task, check, over_nodes
from jaxfl.data import Dataset
from jaxfl.frame.choose import Choice


def mlp(dataset: Dataset, *, hidden: tuple[int, ...], activation: str) -> models.Model:
    """Dense layers, as many inputs as a sample has numbers."""
    for units in hidden:
        check.at_least(1, hidden=units)
    return models.mlp((int(dataset.train_inputs[0].size), *hidden, dataset.num_classes), activation=activation)


def _cnn(
    dataset: Dataset, *, channels: tuple[int, ...], window: int, dense_units: int | None = None, activation: str
) -> models.Model:
    for features in channels:
        check.at_least(1, channels=features)
    shape, classes = image_shape(dataset), dataset.num_classes
    check.at_least(1, window=window)
    widest = 2 * max(shape[:2]) - 1
    if window > widest:
        requirement = f"must be at most {widest}: the edge of a larger kernel meets no pixel"
        raise ArgumentError("window", requirement, f"got {window}", "Pass a smaller one.")
    layers: dict[str, Any] = {"channels": channels, "window": window, "hidden": dense_units, "activation": activation}
    return models.cnn(shape, num_classes=classes, **layers)


def _resnet18(dataset: Dataset, *, resnet_widths: tuple[int, ...]) -> models.Model:
    if not resnet_widths:
        raise ArgumentError("resnet_widths", "must hold one number a stage", "got none", "Pass for example 8 16 32 64.")
    for width in resnet_widths:  # normalization splits them into at most 32 groups of equal size
        if width < 1 or (width > 32 and width % 32):
            remedy = "Pass for example 8 16 32 64."
            raise ArgumentError("resnet_widths", "must be 1 to 32, or a multiple of 32", f"got {width}", remedy)
    blocks = (2,) * len(resnet_widths)
    return models.resnet18(image_shape(dataset), dataset.num_classes, widths=resnet_widths, blocks=blocks)


def _dzofl_cnn(dataset: Dataset) -> models.Model:
    height, width, _ = shape = image_shape(dataset)
    if min(height, width) < 14:
        requirement, found = "must fit the images: dzofl_cnn takes 14x14 pixels at least", f"got {height}x{width}"
        raise ArgumentError("model", requirement, found, "Choose another model.")
    return models.dzofl_cnn(shape, dataset.num_classes)


NETWORKS = Choice("model", {"mlp": mlp, "cnn": _cnn, "resnet18": _resnet18, "dzofl_cnn": _dzofl_cnn})


def image_shape(dataset: Dataset) -> tuple[int, int, int]:
    """(height, width, channels) of a sample."""
    if dataset.train_inputs.ndim == 2:
        found = f"{dataset.name} has {dataset.train_inputs.shape[1]} numbers a sample"
        raise ArgumentError("model", "must be mlp where samples are no images", found, "Pass --model mlp.")
    height, width, *channels = dataset.train_inputs.shape[1:]
    return height, width, channels[0] if channels else 1


def with_node_loop(task: Task, node_loop: str) -> Task:
    """The task, run over nodes as an option says; "auto" leaves the choice to the model."""
    if node_loop == "auto":
        return task
    try:
        over_nodes(lambda: None, node_loop)
    except ArgumentError as error:
        requirement = "must be auto, vmap, map or chunk:k with k at least 1, the last three also behind devices:"
        raise ArgumentError("node_loop", requirement, error.found, "Choose one of these.") from None
    return task._replace(node_loop=node_loop)
