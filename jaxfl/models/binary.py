"""The task of telling two classes apart by one logit."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from jaxfl.core.check import ArgumentError
from jaxfl.core.tasks import scale_images
from jaxfl.core.types import Array, Task
from jaxfl.models.classification import Model, classification, sequential
from jaxfl.models.layers import elementwise


def binary_classification(
    model: Model,
    *,
    preprocess: Callable[[Array], Array] = scale_images,
    node_loop: str | None = None,
    compute_dtype: str = "float32",
) -> Task:
    """The task of predicting int32 labels 0 or 1 with sigmoid cross entropy.

    Sigmoid cross entropy of a logit z is softmax cross entropy of the two logits 0 and z, of which the second is the
    largest where z > 0. So this is `classification` of a model with a logit 0 put in front of its own.

    Args:
        model: outputs (b, 1) logits.
        preprocess: as of `jaxfl.models.classification`.
        node_loop: likewise.
        compute_dtype: likewise.

    Returns:
        A task with metrics "loss" and "accuracy", otherwise as `jaxfl.models.classification` makes it.

    Guarantees:
        - losses, accuracies and gradients equal those of sigmoid cross entropy.

    Example:
        >>> from jaxfl.models import mlp
        >>> task = binary_classification(mlp((2, 1)))
        >>> params = {"dense_1": {"kernel": jnp.array([[1.0], [0.0]]), "bias": jnp.zeros(1)}}
        >>> inputs = jnp.array([[0.0, 0.0], [3.0, 0.0], [-3.0, 0.0]])
        >>> metrics = task.metrics(params, inputs, jnp.ones(3, jnp.int32))
        >>> [round(loss, 3) for loss in metrics["loss"].tolist()], metrics["accuracy"].tolist()  # log(1 + exp(-z))
        ([0.693, 0.049, 3.049], [0.0, 1.0, 0.0])
    """

    def both_logits(logits):
        if logits.ndim != 2 or logits.shape[1] != 1:
            remedy = "End the model with one output, or use jaxfl.models.classification."
            raise ArgumentError("model", "must output logits (b, 1)", f"got shape {logits.shape}", remedy)
        return jnp.concatenate([jnp.zeros_like(logits), logits], axis=1)

    two_logits = sequential([*model.layers, ("logit_of_0", elementwise(both_logits))])
    return classification(two_logits, preprocess=preprocess, node_loop=node_loop, compute_dtype=compute_dtype)
