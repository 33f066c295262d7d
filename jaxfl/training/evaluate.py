"""Evaluation between chunks: every node's model and the average model on one test set.

For each metric of the task three numbers are reported: `test_<name>` (mean over nodes), `test_<name>_worst_node`, and
`test_<name>_average_model` (the metric of the mean over nodes of `node_params`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, PyTree, Task, over_nodes
from jaxfl.core.check import at_least
from jaxfl.core.tasks import sample_metrics
from jaxfl.training.chunks import Diverged

LARGER_IS_WORSE = ("loss", "error", "perplexity", "distance")
"""Endings of metric names whose worst node has the largest value; for all others it has the smallest."""


class EvaluationSet(NamedTuple):
    """A test set on the device in equal batches; the last is filled up with copies that do not count."""

    inputs: Array  # (m, b, *sample)
    labels: Array  # (m, b, ...)
    counts: Array  # (m, b), bool, False for the filling


class Scores(NamedTuple):
    """Metrics of one evaluation, each a sum over the test set; the division is left to float64 on the host."""

    nodes: dict[str, Array]  # name -> (n,) float
    average_model: dict[str, Array]  # name -> () float
    num_samples: Array  # (), int32


def evaluation_set(inputs: Any, labels: Any, batch_size: int = 256) -> EvaluationSet:
    """Upload a test set once, cut into batches.

    Args:
        inputs: (N, *sample), any dtype that the task takes.
        labels: (N, ...).
        batch_size: samples in one batch; bounds the memory of an evaluation.

    Returns:
        The batches on the device.

    Raises:
        ArgumentError: the test set is empty, or inputs and labels differ in length.

    Example:
        >>> batches = evaluation_set(np.zeros((5, 3), np.float32), np.zeros(5, np.int32), batch_size=2)
        >>> batches.inputs.shape, int(batches.counts.sum())
        ((3, 2, 3), 5)
    """
    at_least(1, batch_size=batch_size)
    inputs, labels = np.asarray(inputs), np.asarray(labels)
    size = len(inputs)
    if size == 0:
        raise ArgumentError("test_inputs", "must hold at least one sample", "got none", "Pass a test set.")
    if len(labels) != size:
        found = f"got {len(labels)} labels for {size} inputs"
        raise ArgumentError("test_labels", "must hold one label per test input", found, "Pass the matching labels.")
    batch_size = min(batch_size, size)
    num_batches = -(-size // batch_size)
    # The filling repeats the last sample: a real one, so that no metric meets values it was not made for.
    rows = np.minimum(np.arange(num_batches * batch_size), size - 1).reshape(num_batches, batch_size)
    counts = np.arange(num_batches * batch_size).reshape(num_batches, batch_size) < size
    return EvaluationSet(inputs=jnp.array(inputs[rows]), labels=jnp.array(labels[rows]), counts=jnp.array(counts))


def average_model(node_params: PyTree) -> PyTree:
    """The mean over nodes of leaves (n, *leaf), in their dtypes."""
    return jax.tree.map(lambda leaf: leaf.mean(axis=0).astype(leaf.dtype), node_params)


def model_scores(task: Task, nodes: PyTree, average: PyTree, test: EvaluationSet) -> Scores:
    """The task's metrics of every node's model, leaves (n, *leaf), and of the average model, leaves (*leaf).

    Guarantees:
        - the filling of the last batch never counts; the batch size changes nothing beyond rounding.
    """

    def sums(params: PyTree, batch: EvaluationSet) -> dict[str, Array]:
        values = sample_metrics(task, params, batch.inputs, batch.labels)
        return {name: jnp.where(batch.counts, value, 0).astype(float).sum() for name, value in values.items()}

    def batch_scores(batch: EvaluationSet) -> Scores:
        return Scores(
            nodes=over_nodes(lambda params: sums(params, batch), task.node_loop)(nodes),
            average_model=sums(average, batch),
            num_samples=batch.counts.sum(dtype=jnp.int32),
        )

    return jax.tree.map(lambda part: part.sum(axis=0, dtype=part.dtype), jax.lax.map(batch_scores, test))


def worst(name: str, values: np.ndarray) -> float:
    """The worst node's value of a metric.

    Example:
        >>> worst("accuracy", np.array([0.5, 0.9])), worst("loss", np.array([0.5, 0.9]))
        (0.5, 0.9)
    """
    return float(values.max() if name.endswith(LARGER_IS_WORSE) else values.min())


def flatten_scores(scores: Scores, measure: str = "test") -> dict[str, float]:
    """The named numbers of a metrics line: mean, worst node and average model of each metric, accuracy first."""
    line: dict[str, float] = {}
    size = int(scores.num_samples)
    for name in sorted(scores.nodes, key=lambda name: (name != "accuracy", name)):
        values = np.asarray(scores.nodes[name], dtype=np.float64) / size
        line[f"{measure}_{name}"] = float(values.mean())
        line[f"{measure}_{name}_worst_node"] = worst(name, values)
        line[f"{measure}_{name}_average_model"] = float(scores.average_model[name]) / size
    return line


def refuse_bad_scores(
    measured: Mapping[str, PyTree],
    case: str,
    seed: int,
    since: int,
    round_index: int,
    names: Sequence[str] | None = None,
) -> None:
    """Raise `Diverged` where a number measured for a lane, whose last line is of round `since`, is not finite."""
    named: list[tuple[str, Any]] = []
    for measure, values in measured.items():
        if isinstance(values, Scores):
            named += [(f"{measure}_{name}", value) for name, value in values.nodes.items()]
            named += [(f"{measure}_{name}_average_model", value) for name, value in values.average_model.items()]
        else:
            named += values.items()
    for name, values in named:
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise Diverged(
                case,
                seed,
                name,
                rounds=(min(since + 1, round_index), round_index),
                first_round=round_index,
                node=int(bad[0]) if np.ndim(values) and len(bad) == 1 else None,
                value=float(np.ravel(values)[bad[0]]),
                names=names,
            )
