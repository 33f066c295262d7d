"""What the average model makes of the training data: its metrics, and how far from stationary the objective is there.

The objective is F = (1/n) sum_i f_i with f_i the mean loss over node i's samples, as in the analyses of decentralised
methods, whose rates bound |grad F|^2 at the mean over nodes of `node_params`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Wrapped

from jaxfl.core import Array, FederatedData, PyTree, Task, Variables, over_nodes
from jaxfl.core.check import at_least
from jaxfl.training.calibration import CalibrationSet, calibrated


class TrainingSamples(NamedTuple):
    """The samples that are looked at, m of each node."""

    inputs: Array  # (n, m, *sample)
    labels: Array  # (n, m, ...)
    weights: Array  # (n, m), float32, 1 / number of the node's samples looked at, 0 for padding


def training_samples(data: FederatedData, most: int) -> TrainingSamples:
    """At most so many samples of each node, evenly spaced in its list, which may be sorted.

    Args:
        data: on the device.
        most: m, at least 1; a node with fewer samples is seen whole.

    Returns:
        The samples, on the device.

    Guarantees:
        - padding has weight 0, and each node's weights sum to 1.
    """
    at_least(1, most=most)
    slots = jnp.arange(min(most, data.max_size))
    counts = jnp.minimum(data.sizes, len(slots))
    valid = slots[None, :] < counts[:, None]
    # Slot s of m looks at sample floor(s J / m), without the product, which may not fit 32 bits.
    step, rest = jnp.divmod(data.sizes, counts)
    positions = slots[None, :] * step[:, None] + slots[None, :] * rest[:, None] // counts[:, None]
    pool = jnp.take_along_axis(data.indices, jnp.where(valid, positions, 0), axis=1)
    weights = valid.astype(jnp.float32) / counts[:, None].astype(jnp.float32)
    return TrainingSamples(inputs=data.inputs[pool], labels=data.labels[pool], weights=weights)


def training_scores_fn(task: Task, node_params: Callable[[PyTree], PyTree]) -> Wrapped:
    """The jitted measurement of a state on training samples.

    Args:
        task: its loss and metrics.
        node_params: state -> parameters with the node axis first, leaves (n, *leaf).

    Returns:
        (state, TrainingSamples, calibration set or None) -> dict of () float32: `train_<metric>_average_model` for each
        metric, a mean over nodes of means over samples, and `gradient_norm_squared_average_model`, |grad F|^2, L2. The
        average model has batch statistics measured on the calibration set, if there is one.

    Guarantees:
        - the squared norm is that of the mean gradient, 0 at a minimum of F.
        - model state is held fixed: the gradient is to parameters alone.
    """

    def one_node(average: PyTree, samples: TrainingSamples) -> tuple[PyTree, dict[str, Array]]:
        has_state = task.train_loss is not None

        def loss(params):
            values = Variables(params, average.model_state) if has_state else params
            return jnp.sum(samples.weights * task.loss(values, samples.inputs, samples.labels))

        gradient = jax.grad(loss)(average.params if has_state else average)
        named = task.metrics(average, samples.inputs, samples.labels)
        return gradient, {name: jnp.sum(samples.weights * value) for name, value in named.items()}

    def measure(state: PyTree, samples: TrainingSamples, calibration: CalibrationSet | None = None) -> dict[str, Array]:
        average = jax.tree.map(lambda leaf: leaf.mean(axis=0).astype(leaf.dtype), node_params(state))
        if calibration is not None:
            average = calibrated(task, average, calibration)
        gradients, metrics = over_nodes(lambda part: one_node(average, part), task.node_loop)(samples)
        squares = [jnp.sum(leaf.mean(axis=0) ** 2) for leaf in jax.tree.leaves(gradients)]
        named = {f"train_{name}_average_model": values.mean() for name, values in metrics.items()}
        return {**named, "gradient_norm_squared_average_model": jnp.stack(squares).sum()}

    return jax.jit(measure)
