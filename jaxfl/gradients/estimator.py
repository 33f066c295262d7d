"""Interface between algorithms and gradient estimators, and the plain mini-batch estimate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import Array, FederatedData, PyTree, Task, over_nodes
from jaxfl.core.tasks import check_sample_losses, check_task
from jaxfl.core.tree import norm, number_type
from jaxfl.gradients import per_example
from jaxfl.gradients.samplers import Batch, Sampler, check_counts, draw_batch, uniform


class GradientInfo(NamedTuple):
    """Measurements of one round's gradients, node by node."""

    loss: Array  # (n,), float32, batch sum of losses over batch_size: unbiased for the local mean loss
    gradient_norm: Array  # (n,), float32, L2 norm of the estimate before noise
    clipped_fraction: Array  # (n,), float32, batch samples whose gradient was scaled down, over batch_size
    discarded_gradients: Array  # (n,), int32, not finite, and counted as zero under a clip norm
    gradient_evaluations: Array  # (n,), int32, per-sample gradients that count (padding excluded)
    forward_evaluations: Array  # (n,), int32, samples run forward without a backward pass
    batch_overflow: Array  # (n,), int32, see Batch.overflow
    prefetch_misses: Array  # (n,), int32, table rows read ahead for another batch than the one used


class GradientEstimator(NamedTuple):
    """A way to estimate every node's gradient, as pure functions.

    Attributes:
        init: (task, key, params (n, *leaf), data) -> state of the estimator (None when it keeps nothing).
        draw: (key, round_index, data) -> its draws of the round.
        estimate: (task, params (n, *leaf), state, data, draws, round_index) -> (gradient (n, *leaf), state,
            GradientInfo).
        refresh: (task, params (n, *leaf), state, data, due () bool) -> state, without the rounding errors that have
            added up, where that is due; None where none do.
    """

    init: Callable[[Task, Array, PyTree, FederatedData], Any]
    draw: Callable[[Array, Array, FederatedData], Any]
    estimate: Callable[[Task, PyTree, Any, FederatedData, Any, Array], tuple[PyTree, Any, GradientInfo]]
    refresh: Callable[[Task, PyTree, Any, FederatedData, Array], Any] | None = None

    def upkeep(self, task: Task) -> Callable[[Any, FederatedData, Array], Any] | None:
        """`Algorithm.upkeep` of an algorithm whose state has `params` and, as `gradient`, this estimator's."""
        refresh = self.refresh
        if refresh is None:
            return None
        return lambda state, data, due: state._replace(gradient=refresh(task, state.params, state.gradient, data, due))


def gather(data: FederatedData, positions: Array) -> tuple[Array, Array]:
    """The samples at each node's positions (n, c): inputs (n, c, *sample) and labels (n, c, ...).

    Guarantees:
        - a pool that is cut by owner gives the same samples, and sends none between devices.
    """
    rows = jnp.take_along_axis(data.indices, positions, axis=1)
    if data.parts is None:
        return data.inputs[rows], data.labels[rows]
    count = data.parts.count
    length = len(data.inputs) // count
    firsts = jnp.arange(0, count * length, length, dtype=rows.dtype)
    own = rows.reshape(count, -1) - firsts[:, None]

    def taken(pool):
        parts = pool.reshape(count, length, *pool.shape[1:])
        return jax.vmap(lambda part, rows: part[rows])(parts, own).reshape(*rows.shape, *pool.shape[1:])

    return taken(data.inputs), taken(data.labels)


def mini_batch(
    *, sampler: Sampler | None = None, clip_norm: float | Array | None = None, clip_order: int = 2
) -> GradientEstimator:
    """The mean of a batch's (clipped) per-sample gradients: g_i = (1/b) sum over the batch.

    Args:
        sampler: how the batch is drawn; default `uniform(1)`, the paper's.
        clip_norm: bound on each sample's gradient norm; None does not clip. May be traced.
        clip_order: 2 for the L2 norm, 1 for the L1 norm.

    Raises:
        ArgumentError: a clip norm that is not positive; from `init`, a batch larger than a node's data, or a task with
            `train_loss`.

    Guarantees:
        - unbiased for the mean of the clipped local gradients under every sampler.
    """
    chosen = uniform(1) if sampler is None else sampler
    per_example.check_clipping(clip_norm, clip_order)

    def init(task, key, params, data):
        check_sample_losses(task)
        check_task(task, data)
        check_counts(chosen, data.sizes, data.names)

    def draw(key, round_index, data):
        return draw_batch(chosen, key, round_index, data.sizes)

    def estimate(task, params, state, data, draws: Batch, round_index):
        def one_node(node_params, inputs, labels, mask):
            weights = mask.astype(number_type(node_params)) / chosen.batch_size
            total = per_example.weighted_sum(
                task, node_params, inputs, labels, weights, clip_norm=clip_norm, clip_order=clip_order
            )
            return total.gradient, batch_sums(total, weights, mask)

        inputs, labels = gather(data, draws.indices)
        gradient, sums = over_nodes(one_node, task.node_loop)(params, inputs, labels, draws.mask)
        return gradient, state, batch_info(gradient, sums, draws)

    return GradientEstimator(init=init, draw=draw, estimate=estimate)


class BatchSums(NamedTuple):
    """Measurements of one batch, at one node () or at all (n,), float32."""

    loss: Array  # over batch_size
    clipped: Array  # over batch_size
    discarded: Array  # a number of gradients


def batch_sums(measured: Any, weights: Array, mask: Array) -> BatchSums:
    """Sums over one node's batch (b,) of what a `GradientSum`, or a table's `Rows`, measured."""
    return BatchSums(
        loss=jnp.sum(weights * measured.losses),
        clipped=jnp.sum(weights * measured.clipped),
        discarded=jnp.sum(jnp.where(mask, measured.discarded, 0.0)),
    )


def batch_info(
    gradient: PyTree,
    sums: BatchSums,
    batch: Batch,
    *,
    evaluations: Array | None = None,
    prefetch_misses: Array | None = None,
) -> GradientInfo:
    """A round's GradientInfo; evaluations default to the valid slots of the batch, misses to none."""
    return GradientInfo(
        loss=sums.loss,
        gradient_norm=norm(gradient),
        clipped_fraction=sums.clipped,
        discarded_gradients=sums.discarded.astype(jnp.int32),
        gradient_evaluations=jnp.sum(batch.mask, axis=1, dtype=jnp.int32) if evaluations is None else evaluations,
        forward_evaluations=jnp.zeros_like(batch.overflow),
        batch_overflow=batch.overflow,
        prefetch_misses=jnp.zeros_like(batch.overflow) if prefetch_misses is None else prefetch_misses,
    )
