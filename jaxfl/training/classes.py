"""Scores of classes: balanced accuracy and the area under the ROC curve, which are no means over samples."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, PyTree, Task
from jaxfl.core.tasks import accuracy
from jaxfl.training.case import EvaluationSet, Measure, Scores
from jaxfl.training.measures import average_model, model_scores


def class_scores(task: Task, test: EvaluationSet) -> Measure:
    """The standard evaluation with balanced accuracy and, for two classes, the area under the ROC curve.

    Args:
        task: one with logits.
        test: the test set.

    Returns:
        The entry "test" of the measures, with `balanced_accuracy`, the mean over the test set's classes of a class's
        accuracy, and `auc`, the chance that a sample of class 1 has more log-odds for it than one of class 0, ties
        counted half. Without both classes in the test set, or with more, `auc` is left out.

    Raises:
        ArgumentError: a task without logits.

    Guarantees:
        - equals scikit-learn's `balanced_accuracy_score` and `roc_auc_score`, to the rounding of float32.
    """
    logits = task.logits
    if logits is None:
        remedy = "Take from_flax or models.classification, or test_scores."
        raise ArgumentError("task", "must have logits for scores of classes", "got one without", remedy)
    labels, counted = (np.asarray(leaf).reshape(-1) for leaf in (test.labels, test.counts))
    classes = np.unique(labels[counted]).tolist()

    def of_model(batches: EvaluationSet, params: PyTree) -> dict[str, Array]:
        outputs = jax.lax.map(lambda inputs: logits(params, inputs), batches.inputs)
        outputs = outputs.reshape(-1, outputs.shape[-1])
        labels, counts = batches.labels.reshape(-1), batches.counts.reshape(-1)
        is_right = accuracy(outputs, labels) > 0
        of_class = [counts & (labels == one) for one in classes]
        recalls = [jnp.sum(is_right & own) / jnp.sum(own) for own in of_class]
        scores = {"balanced_accuracy": jnp.stack(recalls).mean()}
        if classes == [0, 1] and outputs.shape[-1] == 2:
            scores["auc"] = _auc(outputs[:, 1] - outputs[:, 0], *of_class)
        return {name: score * jnp.sum(counts).astype(score.dtype) for name, score in scores.items()}

    def compute(node_params: PyTree, batches: EvaluationSet) -> Scores:
        average = average_model(node_params)
        scores, own = model_scores(task, node_params, average, batches), partial(of_model, batches)
        # One node after the other: the scores of all samples are held at once.
        nodes, of_average = jax.lax.map(own, node_params), own(average)
        return Scores(scores.nodes | nodes, scores.average_model | of_average, scores.num_samples)

    return Measure(compute=compute, prepare=lambda key, data: test)


def _auc(scores: Array, is_negative: Array, is_positive: Array) -> Array:
    """Share of pairs of a positive and a negative, (N,) bool, in which the positive scores more; a tie is half."""
    negatives = jnp.sort(jnp.where(is_negative, scores, jnp.inf))
    below, up_to = (jnp.searchsorted(negatives, scores, side) for side in ("left", "right"))
    shares = (below + up_to) / (2 * jnp.sum(is_negative))
    # A score that is not finite is none, and its lane ends.
    is_bad = jnp.any((is_negative | is_positive) & ~jnp.isfinite(scores))
    return jnp.where(is_bad, jnp.nan, jnp.mean(shares, where=is_positive))
