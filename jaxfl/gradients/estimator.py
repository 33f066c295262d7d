"""Interface between algorithms and gradient estimators, and the plain mini-batch estimate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import (
    ArgumentError,
    Array,
    FederatedData,
    Info,
    Purpose,
    PyTree,
    Task,
    node_keys,
    over_nodes,
    purpose_key,
)
from jaxfl.core.algorithm import constructor
from jaxfl.core.info import Count, Discarded, Fatal
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses, check_task, of_samples
from jaxfl.core.tree import norm, number_type, replicate
from jaxfl.gradients import per_example
from jaxfl.gradients.microbatches import over_used_slots
from jaxfl.gradients.per_example import DISCARDED
from jaxfl.gradients.samplers import BATCH_OVERFLOW, Batch, Sampler, check_counts, draw_batch, fixed, uniform


class KeyedDraws(NamedTuple):
    """Draws of an estimator for a task that takes keys while it trains."""

    draws: Any  # of the estimator
    keys: Array  # (n,), typed, consumed by dropout


class Sampling(NamedTuple):
    """Facts of an estimate that decide how far one sample moves it, for `jaxfl.privacy.statements`."""

    estimator: str  # "mini_batch" or "saga"
    sampler: str  # "uniform", "fixed" or "poisson"
    batch_size: int  # b, in entries
    clip_norm: float | Array | None  # bound on each sample's gradient norm; None: not clipped
    entry_size: int = 1  # samples of an entry
    storage: str = "float32"  # of a table's entries


class GradientEstimator(NamedTuple):
    """A way to estimate every node's gradient, as pure functions.

    Attributes:
        init: (task, key, params (n, *leaf), data) -> state of the estimator (None when it keeps nothing).
        draw: (key, round_index, data) -> its draws of the round.
        estimate: (task, params (n, *leaf), state, data, draws, round_index) -> (gradient (n, *leaf), state,
            `Info` of (n,)).
        refresh: (task, params (n, *leaf), state, data, due () bool) -> state, where `due` without the rounding errors
            that have added up; None where none add up.
        sampling: what one sample has to do with an estimate; None where no accountant knows the estimator.
    """

    init: Callable[[Task, Array, PyTree, FederatedData], Any]
    draw: Callable[[Array, Array, FederatedData], Any]
    estimate: Callable[[Task, PyTree, Any, FederatedData, Any, Array], tuple[PyTree, Any, Info]]
    refresh: Callable[[Task, PyTree, Any, FederatedData, Array], Any] | None = None
    sampling: Sampling | None = None

    __repr__ = short_repr

    def draw_for(self, task: Task, key: Array, round_index: Array, data: FederatedData) -> Any:
        """`draw`, as `KeyedDraws` for a task with batch statistics or dropout."""
        draws = self.draw(key, round_index, data)
        if task.train_loss is None:
            return draws
        return KeyedDraws(draws, node_keys(purpose_key(key, Purpose.DROPOUT, round_index), data.num_nodes))

    def upkeep(self, task: Task) -> Callable[[Any, FederatedData, Array], Any] | None:
        """`Algorithm.upkeep` of an algorithm whose state has `params` and, as `gradient`, this estimator's."""
        refresh = self.refresh
        if refresh is None:
            return None
        return lambda state, data, due: state._replace(gradient=refresh(task, state.params, state.gradient, data, due))


def gather(data: FederatedData, positions: Array) -> tuple[Array, Array]:
    """The samples at each node's positions (n, c): inputs (n, c, *sample) and labels (n, c, ...).

    A position beyond a node's samples stands for its last one.

    Guarantees:
        - a pool that is cut by owner gives the same samples, and sends none between devices.
    """
    rows = data.places(positions)
    if data.parts is None:
        return data.inputs[rows], data.labels[rows]
    count = data.parts.count
    length = len(data.inputs) // count
    firsts = jnp.arange(0, count * length, length, dtype=rows.dtype)
    offsets = rows.reshape(count, -1) - firsts[:, None]

    def take(pool):
        parts = pool.reshape(count, length, *pool.shape[1:])
        return jax.vmap(lambda part, rows: part[rows])(parts, offsets).reshape(*rows.shape, *pool.shape[1:])

    return take(data.inputs), take(data.labels)


@constructor
def mini_batch(
    batch_size: int | None = None,
    *,
    sampler: Sampler | None = None,
    clip_norm: float | Array | None = None,
    clip_order: int = 2,
) -> GradientEstimator:
    """The mean of a batch's (clipped) per-sample gradients: g_i = (1/b) sum over the batch.

    A task with batch statistics or dropout trains in `push_sum` and `d_psgd` where neither `clip_norm` nor noise is
    given. Each node then keeps statistics of its own, which are not sent.

    Args:
        batch_size: b; stands for the sampler `fixed(b)`, which draws b different samples.
        sampler: how the batch is drawn, in place of `batch_size`; default `uniform(1)`, as in PrivSGP's paper.
        clip_norm: bound on each sample's gradient norm; None does not clip. May be traced.
        clip_order: 2 for the L2 norm, 1 for the L1 norm.

    Raises:
        ArgumentError: a clip norm out of range, or both a size and a sampler; from `init`, too large a batch, or a task
            with `train_loss` under a clip norm.

    Guarantees:
        - unbiased for the mean of the clipped local gradients under every sampler.
    """
    if batch_size is not None and sampler is not None:
        remedy = "Pass mini_batch(32), or mini_batch(sampler=jaxfl.gradients.poisson(32))."
        raise ArgumentError("batch_size", "must be left out beside a sampler, which has one", "got both", remedy)
    scheme = sampler or (uniform(1) if batch_size is None else fixed(batch_size))
    per_example.check_clipping(clip_norm, clip_order)

    def init(task, key, params, data):
        if clip_norm is not None:
            check_sample_losses(task)
        check_task(task, data)
        check_counts(scheme, data.sizes, data.names)
        statistics = None if task.init_state is None else replicate(task.init_state(), data.num_nodes)
        if jax.tree.leaves(statistics) and scheme.batch_size == 1:
            remedy = "Pass mini_batch(32), for instance."
            raise ArgumentError("gradient", "must take several samples for batch statistics", "got one", remedy)
        return statistics

    def draw(key, round_index, data):
        return draw_batch(scheme, key, round_index, data.sizes, data.max_size)

    def train(task, params, state, data, draws: KeyedDraws):
        batch, keys = draws

        def one_node(node_params, model_state, inputs, labels, mask, key):
            def mean(values):
                weights = mask.astype(number_type(values))
                losses, new = task.train_loss(values, model_state, inputs, labels, weights, key)
                return jnp.sum(weights / scheme.batch_size * of_samples("task.train_loss", losses, inputs)), new

            (loss, new), gradient = jax.value_and_grad(mean, has_aux=True)(node_params)
            nothing = {DISCARDED: Discarded(jnp.int32(0))}
            return gradient, new, Info(loss).plus(nothing, clipped_fraction=jnp.zeros_like(loss))

        samples = gather(data, batch.indices)
        over = over_nodes(one_node, task.node_loop)
        gradient, new_state, sums = over(params, state, *samples, batch.mask, keys)
        return gradient, new_state, batch_info(gradient, sums, batch)

    def estimate(task, params, state, data, draws, round_index):
        if task.train_loss is not None:
            if not isinstance(draws, KeyedDraws):
                requirement, remedy = (
                    "must hold keys for batch statistics or dropout",
                    "Draw with gradient.draw_for(task, ...).",
                )
                raise ArgumentError("draws", requirement, "got draws of gradient.draw", remedy)
            return train(task, params, state, data, draws)

        def one_node(node_params, inputs, labels, mask):
            weights = mask.astype(number_type(node_params)) / scheme.batch_size
            total = per_example.weighted_sum(
                task, node_params, inputs, labels, weights, clip_norm=clip_norm, clip_order=clip_order
            )
            return total.gradient, batch_sums(total, weights, mask)

        def of_slots(indices, mask):
            return over_nodes(one_node, task.node_loop)(params, *gather(data, indices), mask), ()

        (gradient, sums), _ = over_used_slots(of_slots, draws.indices, draws.mask, scheme.batch_size)
        return gradient, state, batch_info(gradient, sums, draws)

    sampling = Sampling("mini_batch", scheme.name, scheme.batch_size, clip_norm)
    return GradientEstimator(init=init, draw=draw, estimate=estimate, sampling=sampling)


def batch_sums(measured: Any, weights: Array, mask: Array) -> Info:
    """Sum the measurements of a `GradientSum`, or of a table's `Rows`, over one node's batch (b,), each to ()."""
    return Info(loss=jnp.sum(weights * measured.losses)).plus(
        {DISCARDED: Discarded(jnp.sum(jnp.where(mask, measured.discarded, 0.0)).astype(jnp.int32))},
        clipped_fraction=jnp.sum(weights * measured.clipped),  # samples whose gradient was scaled down, over b
    )


def batch_info(gradient: PyTree, sums: Info, batch: Batch, **others: Count) -> Info:
    """Numbers of one round's gradients, node by node (n,), which all estimators name alike.

    Args:
        gradient: the estimates before noise, leaves (n, *leaf).
        sums: as of `batch_sums`; the loss is the batch's sum over b: unbiased for the local mean loss.
        batch: which samples.
        others: more numbers, or replacements of the defaults: one gradient evaluation for each valid slot of the batch,
            0 forward evaluations without a backward pass, and 0 prefetch misses.
    """
    none = jnp.zeros_like(batch.overflow)
    return sums.plus(
        {BATCH_OVERFLOW: Fatal(batch.overflow)},
        gradient_norm=norm(gradient),  # L2
        gradient_evaluations=jnp.sum(batch.mask, axis=1, dtype=jnp.int32),
        forward_evaluations=none,
        prefetch_misses=Fatal(none),
    ).plus(others)
