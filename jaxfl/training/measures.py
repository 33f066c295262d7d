"""Measurements at evaluations: scores on test sets, with calibrated batch statistics or without; stationarity.

For each metric of the task three numbers are reported: `test_<name>` (mean over nodes), `test_<name>_worst_node`, and
`test_<name>_average_model` (the metric of the mean over nodes of `node_params`). `jaxfl.training.class_scores`
adds two metrics that are no means over samples.

Calibration: static batch normalization tracks no statistics while it trains. HeteroFL's server asks the clients for
them after training; here they are measured on a few of their samples, drawn once a seed.

Stationarity: the objective is F = (1/n) sum_i f_i with f_i the mean loss over node i's samples. The analyses of
decentralised methods bound |grad F|^2 for it, at the mean over nodes of `node_params`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import (
    ArgumentError,
    Array,
    FederatedData,
    Purpose,
    PyTree,
    Task,
    Variables,
    leaf_key,
    over_nodes,
    purpose_key,
)
from jaxfl.core.check import at_least, finite
from jaxfl.core.tasks import calibrated_state, sample_losses, sample_metrics
from jaxfl.core.tree import consensus_distance
from jaxfl.data.pool import SomeSamples, some_samples
from jaxfl.training.case import EvaluationSet, Measure, Scores, larger_is_worse
from jaxfl.training.chunks import Diverged

_OF_CLASSES = ("balanced_accuracy", "auc")


def evaluation_set(inputs: Any, labels: Any, batch_size: int = 256) -> EvaluationSet:
    """Upload a test set once, cut into batches.

    Args:
        inputs: (N, *sample), any dtype that the task takes.
        labels: (N, ...).
        batch_size: samples in one batch; bounds the memory of an evaluation.

    Returns:
        The batches on the device.

    Raises:
        ArgumentError: the test set is empty, inputs and labels differ in length, or numbers are not finite.

    Examples:
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
    finite(test_inputs=inputs, test_labels=labels)
    batch_size = min(batch_size, size)
    num_batches = -(-size // batch_size)
    # The last batch is filled with a real sample, the last one, so that no metric meets unusual values.
    rows = np.minimum(np.arange(num_batches * batch_size), size - 1).reshape(num_batches, batch_size)
    counts = np.arange(num_batches * batch_size).reshape(num_batches, batch_size) < size
    return EvaluationSet(inputs=jnp.array(inputs[rows]), labels=jnp.array(labels[rows]), counts=jnp.array(counts))


def average_model(node_params: PyTree) -> PyTree:
    """The mean over nodes of leaves (n, *leaf), in their dtypes."""
    return jax.tree.map(lambda leaf: leaf.mean(axis=0).astype(leaf.dtype), node_params)


def model_scores(task: Task, nodes: PyTree, average: PyTree, test: EvaluationSet) -> Scores:
    """The task's metrics of every node's model, leaves (n, *leaf), and of the average model, leaves (*leaf).

    Guarantees:
        - copies that fill the last batch never count; the batch size changes nothing beyond rounding.
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


def worst(name: str, values: np.ndarray) -> Any:
    """The worst node's value of a metric, from values (n,), or (lanes, n).

    Examples:
        >>> worst("accuracy", np.array([0.5, 0.9])), worst("loss", np.array([0.5, 0.9]))
        (0.5, 0.9)
    """
    return (values.max(axis=-1) if larger_is_worse(name) else values.min(axis=-1)).tolist()


def flatten_scores(scores: Scores, measure: str = "test") -> dict[str, Any]:
    """The named numbers of a metrics line: mean, worst node and average model of each metric, accuracy first.

    Scores with an axis of lanes in front give lists of numbers.
    """
    line: dict[str, Any] = {}
    size = np.asarray(scores.num_samples, np.float64)
    for name in sorted(scores.nodes, key=lambda name: (name != "accuracy", name)):
        values = np.asarray(scores.nodes[name], dtype=np.float64) / size[..., None]
        line[f"{measure}_{name}"] = values.mean(axis=-1).tolist()
        line[f"{measure}_{name}_worst_node"] = worst(name, values)
        line[f"{measure}_{name}_average_model"] = (np.asarray(scores.average_model[name], np.float64) / size).tolist()
    return line


def node_scores(scores: Scores, measure: str) -> dict[str, list[Any]]:
    """Name -> every node's value, of the first metric in a line of `flatten_scores` and those of `class_scores`.

    Lanes in front stay there.
    """
    first = min(scores.nodes, key=lambda name: (name != "accuracy", name))
    size = np.asarray(scores.num_samples)[..., None]
    names = [first, *(name for name in _OF_CLASSES if name in scores.nodes and name != first)]
    return {f"{measure}_{name}": (np.asarray(scores.nodes[name], np.float64) / size).tolist() for name in names}


def refuse_bad_scores(
    measured: Mapping[str, PyTree],
    case: str,
    seed: int,
    since: int,
    round_index: int,
    names: Sequence[str] | None = None,
) -> None:
    """Raise `Diverged` if a number measured for a lane is not finite; `since` is the round of its last line."""
    named: list[tuple[str, Any]] = []
    # Numbers of nodes first: they show the cause.
    for measure, values in sorted(measured.items(), key=lambda each: not isinstance(each[1], Scores)):
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


def test_scores(task: Task, test: EvaluationSet) -> Measure:
    """The standard evaluation: the task's metrics of every node's model and the average model on a test set."""

    def compute(node_params: PyTree, batches: EvaluationSet) -> Scores:
        return model_scores(task, node_params, average_model(node_params), batches)

    return Measure(compute=compute, prepare=lambda key, data: test)


def _distance(node_params: PyTree, nothing: tuple[()]) -> dict[str, Array]:
    params = node_params.params if isinstance(node_params, Variables) else node_params
    alone = len(jax.tree.leaves(params)[0]) == 1
    return {} if alone else {"consensus_distance": consensus_distance(params)}


CONSENSUS = Measure(compute=_distance, prepare=lambda key, data: ())
"""The nodes' `consensus_distance`, which is measured in every run; an algorithm with one model has none."""


test_scores.__test__ = False  # pytest must not take it for a test  # pyright: ignore[reportFunctionMemberAccess]


class CalibrationSet(NamedTuple):
    """Training samples on the device in batches; the last is filled up with samples of weight 0."""

    inputs: Array  # (m, b, *sample)
    labels: Array  # (m, b, ...)
    weights: Array  # (m, b), float32, 1 for a sample and 0 for filling
    key: Array  # (), typed, for dropout


def calibrated_scores(task: Task, test: EvaluationSet, num_samples: int) -> Measure:
    """The standard evaluation with batch statistics measured on training samples; the entry "test" of the measures.

    Args:
        task: one with model state.
        test: the test set. Statistics are taken over batches of its size.
        num_samples: drawn once for each seed from all nodes' samples; a smaller pool is taken whole.

    Raises:
        ArgumentError: a number below 1, or a task without model state.

    Guarantees:
        - statistics are calibrated for each model by itself.
    """
    _check_calibration(task, num_samples)
    draw = jax.jit(partial(calibration_set, num_samples=num_samples, batch_size=test.counts.shape[1]))

    def compute(node_params: PyTree, arrays: tuple[EvaluationSet, CalibrationSet]) -> Scores:
        batches, calibration = arrays
        average = _calibrated(task, average_model(node_params), calibration)
        nodes = over_nodes(lambda params: _calibrated(task, params, calibration), task.node_loop)(node_params)
        return model_scores(task, nodes, average, batches)

    return Measure(compute=compute, prepare=lambda key, data: (test, draw(key, data)))


def calibration_set(key: Array, data: FederatedData, num_samples: int, batch_size: int) -> CalibrationSet:
    """Draw samples of the clients' pooled training data, uniformly without replacement. Each belongs to some node.

    Args:
        key: the run's base key.
        data: on the device.
        num_samples: how many; a smaller pool is taken whole.
        batch_size: b, samples in one batch, whose statistics are taken together.

    Guarantees:
        - every sample of the pool is drawn at most once, and padding never.

    Examples:
        >>> data = FederatedData(jnp.arange(4.0), jnp.arange(4), jnp.array([[3, 0], [1, 2]]), jnp.array([1, 2]))
        >>> drawn = calibration_set(jax.random.key(0), data, num_samples=4, batch_size=2)
        >>> sorted(drawn.inputs[drawn.weights > 0].tolist())
        [1.0, 2.0, 3.0]
    """
    at_least(1, num_samples=num_samples, batch_size=batch_size)
    base = purpose_key(key, Purpose.CALIBRATION)
    held = jnp.arange(data.max_size)[None, :] < data.sizes[:, None]
    # Each slot gets a random number, padding the largest ones. The slots with the smallest numbers are drawn.
    numbers = jax.random.bits(leaf_key(base, 0), held.shape, jnp.uint32) >> 1
    order = jnp.argsort(jnp.where(held, numbers, jnp.uint32(2**32 - 1)).reshape(-1))[:num_samples]
    count = len(order)
    batch_size = min(batch_size, count)
    order = jnp.pad(order, (0, -count % batch_size)).reshape(-1, batch_size)
    filling = jnp.arange(order.size).reshape(order.shape) >= count
    weights = (held.reshape(-1)[order] & ~filling).astype(jnp.float32)
    rows = data.indices.reshape(-1)[order]
    return CalibrationSet(data.inputs[rows], data.labels[rows], weights, leaf_key(base, 1))


def _check_calibration(task: Task, num_samples: int) -> None:
    """Refuse to calibrate a task without batch statistics."""
    at_least(1, calibration_samples=num_samples)
    if task.init_state is None or not jax.tree.leaves(jax.eval_shape(task.init_state)):
        found = f"got {num_samples} for a task without it"
        raise ArgumentError("calibration_samples", "must be left out without model state", found, "Leave it out.")


def _calibrated(task: Task, variables: Variables, calibration: CalibrationSet) -> Variables:
    """One node's variables with statistics of the calibration set, its parameters as they are."""
    inputs, labels, weights, key = calibration
    state = calibrated_state(task, variables.params, inputs, labels, weights, key)
    return Variables(params=variables.params, model_state=state)


def stationarity(task: Task, most_samples: int, *, at_nodes: bool = False) -> Measure:
    """Make the measure of the average model on training data: its metrics, and the objective's squared gradient norm.

    Args:
        task: its loss and metrics.
        most_samples: m, training samples of each node that are used; a node with fewer uses all.
        at_nodes: also take the mean over i of |grad F(z_i)|^2 at the nodes' own models, which costs n times as much.

    Returns:
        The measurement of `train_<metric>_average_model` for each metric, a mean over nodes of means over samples, and
        `gradient_norm_squared_average_model`, |grad F|^2, L2; with `at_nodes` also `gradient_norm_squared`.

    Raises:
        ArgumentError: a number below 1.

    Guarantees:
        - the squared norm is that of the mean gradient, 0 at a minimum of F.
        - model state is held fixed: the gradient is with respect to parameters only.
    """
    at_least(1, most_samples=most_samples)

    def of_node(average: PyTree, samples: SomeSamples) -> tuple[PyTree, dict[str, Array]]:
        has_state = task.train_loss is not None

        def loss(params):
            values = Variables(params, average.model_state) if has_state else params
            return jnp.sum(samples.weights * sample_losses(task, values, samples.inputs, samples.labels))

        gradient = jax.grad(loss)(average.params if has_state else average)
        named = sample_metrics(task, average, samples.inputs, samples.labels)
        return gradient, {name: jnp.sum(samples.weights * value) for name, value in named.items()}

    def compute(node_params: PyTree, samples: SomeSamples) -> dict[str, Array]:
        def at(model):
            gradients, metrics = over_nodes(lambda part: of_node(model, part), task.node_loop)(samples)
            return jnp.stack([jnp.sum(leaf.mean(axis=0) ** 2) for leaf in jax.tree.leaves(gradients)]).sum(), metrics

        squared, metrics = at(average_model(node_params))
        named = {f"train_{name}_average_model": values.mean() for name, values in metrics.items()}
        of_nodes = {"gradient_norm_squared": jax.lax.map(lambda model: at(model)[0], node_params).mean()}
        return {**named, "gradient_norm_squared_average_model": squared, **(of_nodes if at_nodes else {})}

    return Measure(compute=compute, prepare=jax.jit(lambda key, data: some_samples(data, most_samples)))


def own_scores(task: Task, held: Callable[[int], FederatedData]) -> Measure:
    """Make the measure of every node's model on test samples of its own, which suits personal models.

    Args:
        task: its metrics.
        held: seed -> the nodes' test samples, `federate` of the partition for testing that `jaxfl.data.hold_out` makes.

    Returns:
        The measurement. Each metric is averaged over a node's samples: `own_<metric>` is the mean of this over nodes,
        `own_<metric>_worst_node` the worst node's, and `own_<metric>_spread` the standard deviation over nodes.
        `own_accuracy_nodes` (n,) has every node's accuracy; a run keeps it in sites.csv, as own_accuracy.

    Guarantees:
        - every node counts the same, whatever the number of its samples.
    """

    def of_node(values: tuple[PyTree, SomeSamples]) -> dict[str, Array]:
        params, samples = values
        named = sample_metrics(task, params, samples.inputs, samples.labels)
        return {name: jnp.sum(samples.weights * value) for name, value in named.items()}

    def compute(node_params: PyTree, samples: SomeSamples) -> dict[str, Array]:
        line, num_nodes = {}, len(samples.weights)
        # An algorithm with a server has one model, which is then every node's.
        node_params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_nodes, *leaf.shape[1:])), node_params)
        for name, values in over_nodes(of_node, task.node_loop)((node_params, samples)).items():
            worst_of = jnp.max if larger_is_worse(name) else jnp.min
            line |= {f"own_{name}": values.mean(), f"own_{name}_worst_node": worst_of(values)}
            line[f"own_{name}_spread"] = values.std()
            line |= {f"own_{name}_nodes": values} if name == "accuracy" else {}
        return line

    return Measure(compute, prepare=lambda key, data: some_samples(data, data.max_size), data=held)
