"""Batch statistics taken from training data before an evaluation, as HeteroFL's static normalization asks for.

Static batch normalization tracks no statistics while it trains. HeteroFL's server asks the clients for them after
training; here they are measured on a few of their samples, drawn once for a run.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import ArgumentError, Array, FederatedData, Purpose, Task, Variables, leaf_key, purpose_key
from jaxfl.core.check import at_least
from jaxfl.core.tasks import calibrated_state


class CalibrationSet(NamedTuple):
    """Training samples on the device in batches; the last is filled up with samples of weight 0."""

    inputs: Array  # (m, b, *sample)
    labels: Array  # (m, b, ...)
    weights: Array  # (m, b), float32, 1 for a sample and 0 for filling
    key: Array  # (), typed, for dropout


def calibration_set(key: Array, data: FederatedData, num_samples: int, batch_size: int) -> CalibrationSet:
    """Some samples of the clients' pooled training data, uniform without replacement.

    Args:
        key: the run's base key.
        data: on the device. A sample that no node holds is never drawn.
        num_samples: how many; of a smaller pool all are taken.
        batch_size: b, samples in one batch, of which statistics are taken together.

    Returns:
        The samples on the device.

    Guarantees:
        - every sample of the pool is drawn at most once, and padding never.
        - the same key and data give the same samples.

    Example:
        >>> data = FederatedData(jnp.arange(4.0), jnp.arange(4), jnp.array([[3, 0], [1, 2]]), jnp.array([1, 2]))
        >>> found = calibration_set(jax.random.key(0), data, num_samples=4, batch_size=2)
        >>> sorted(found.inputs[found.weights > 0].tolist())
        [1.0, 2.0, 3.0]
    """
    at_least(1, num_samples=num_samples, batch_size=batch_size)
    base = purpose_key(key, Purpose.CALIBRATION)
    held = jnp.arange(data.max_size)[None, :] < data.sizes[:, None]
    # The smallest of random numbers, one for each slot; those of padding are above all others.
    numbers = jax.random.bits(leaf_key(base, 0), held.shape, jnp.uint32) >> 1
    order = jnp.argsort(jnp.where(held, numbers, jnp.uint32(2**32 - 1)).reshape(-1))[:num_samples]
    count = len(order)
    batch_size = min(batch_size, count)
    order = jnp.pad(order, (0, -count % batch_size)).reshape(-1, batch_size)
    filling = jnp.arange(order.size).reshape(order.shape) >= count
    weights = (held.reshape(-1)[order] & ~filling).astype(jnp.float32)
    rows = data.indices.reshape(-1)[order]
    return CalibrationSet(data.inputs[rows], data.labels[rows], weights, leaf_key(base, 1))


def check_calibration(task: Task, calibration_samples: int | None) -> None:
    """Refuse to calibrate what has no statistics.

    Raises:
        ArgumentError: a number below 1, or a task without model state.
    """
    if calibration_samples is None:
        return
    at_least(1, calibration_samples=calibration_samples)
    if task.init_state is None or not jax.tree.leaves(jax.eval_shape(task.init_state)):
        found = f"got {calibration_samples} for a task without"
        raise ArgumentError("calibration_samples", "must be None without model state", found, "Leave it out.")


def calibrated(task: Task, variables: Variables, calibration: CalibrationSet) -> Variables:
    """One node's variables with statistics of the calibration set, its parameters as they are."""
    inputs, labels, weights, key = calibration
    state = calibrated_state(task, variables.params, inputs, labels, weights, key)
    return Variables(params=variables.params, model_state=state)
