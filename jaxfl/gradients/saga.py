"""SAGA: a mini-batch gradient whose sampling variance vanishes, from a table of every entry's last gradient.

    g_i = (1/b) sum_{xi in batch} ( grad_new(xi) - table_i[xi] ) + mean(table_i)    old table, old mean: equation (6)
    table_i[xi] <- grad_new(xi),  mean(table_i) updated by the change

Zhu, Huang, Wang, Xu, "PrivSGP-VR: Differentially Private Variance-Reduced Stochastic Gradient Push with Tight Utility
Bounds", IJCAI 2024, arXiv:2405.02638, Algorithm 1; SAGA itself: Defazio, Bach, Lacoste-Julien 2014, arXiv:1407.0202.

The gradients that fill the table at the start are no round's work, so `gradient_evaluations` does not count them.

Differences from the paper: gradients may be clipped, and then before they are stored; batches may hold several entries,
drawn by any sampler; an entry may be a fixed batch of samples; tables may be kept in half precision.

The table is written in place. A gather of the old rows followed by a scatter of the new ones makes XLA copy the whole
table each round, so a round writes this round's rows first and then reads ahead the rows of the next round; the state
carries them. That is why `draw` returns the batch of this round and of the next. Rows that were read for another batch
than the one used, as with a new base key in each round, belong to other entries: they are counted in
`prefetch_misses`, and the node's gradient is NaN.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, FederatedData, Key, PyTree, Task, check, over_nodes
from jaxfl.core.algorithm import constructor
from jaxfl.core.devices import on_shares, varying_like
from jaxfl.core.platform import is_cpu
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses, check_task
from jaxfl.core.tree import add_exactly, number_type, scale
from jaxfl.gradients import memory, per_example
from jaxfl.gradients.estimator import GradientEstimator, Sampling, batch_info, batch_sums, gather
from jaxfl.gradients.microbatches import over_used_slots
from jaxfl.gradients.samplers import Batch, Sampler, check_counts, draw_batch, first_occurrence, uniform
from jaxfl.gradients.stores import Store, decode, encode, make_store

PREFETCH_MISSES = "prefetch_misses"
"""Count of table rows that were read ahead for another batch than the one used."""
_CHUNK_BYTES = 16 * 2**20  # rows held at once while the table is built or its mean recomputed
_REFRESH_EVERY = 1000  # rounds, on a CPU, by default
_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}  # of a stored number


class SagaState(NamedTuple):
    """The table and what was read ahead from it; E is the entries of the largest node, F the size of a row."""

    table: Array  # (n, E, F), float32 or float64, or uint16 holding the bits of bfloat16
    table_mean: PyTree  # leaves (n, *leaf), float32, mean over each node's entries
    mean_rounding: PyTree  # leaves (n, *leaf), float32, what rounding took from the mean; None where it is refreshed
    rows: Array  # (n, c, F), like table: the rows of the coming round's batch
    row_indices: Array  # (n, c), int32, the entries whose rows these are

    __repr__ = short_repr


class SagaDraws(NamedTuple):
    """Which entries this round uses, and which the next one will."""

    batch: Batch
    next_batch: Batch


@constructor
def saga(
    *,
    sampler: Sampler | None = None,
    table: str = "dense",
    entry_size: int | None = None,
    storage: str = "float32",
    clip_norm: float | Array | None = None,
    clip_order: int = 2,
    refresh_every: int | Literal["auto", "never"] = "auto",
) -> GradientEstimator:
    """The variance-reduced estimate of PrivSGP-VR.

    Args:
        sampler: how each round's entries are drawn; default `uniform(1)`, the paper's.
        table: content of a row. "dense": the gradient of every sample, d numbers. "factored": the layer inputs and
            output errors that it is the product of (exact; for tasks with `layers`; the sample itself is not stored).
            "per_batch": the local data in fixed batches of `entry_size`, one gradient a batch; `sampler` then draws
            batches.
        entry_size: samples of one entry, for "per_batch" only.
        storage: "float32", or "bfloat16" rounded toward zero, so that no stored gradient exceeds the clip norm. A
            rounded table causes no bias: the estimate adds back the mean of the rounded entries. It adds variance: a
            stored number (in a factored table each of the two factors) is off by less than 2^-7 of itself. A clipped
            gradient of a convolution is a sum of products, and rounding the factors enlarges it where products cancel:
            its factored table must be float32. Params in float64 need "float64"; others cannot take it.
        clip_norm: bound on each sample's gradient norm, applied before storing; None does not clip. May be traced.
        clip_order: 2 for the L2 norm, 1 for the L1 norm.
        refresh_every: rounds after which the mean, else updated by differences, is recomputed from the table, which
            removes the accumulated float32 rounding. (Under `jax.vmap` over states it is computed in every round, and
            an accelerator's host waits in every round to know whether it is due.) "never" carries the mean's rounding
            in one more array of the parameters' size; only the rounding of differences accumulates, and on accelerators
            `jaxfl.training` recomputes the mean every 100,000 rounds (`Algorithm.upkeep`). "auto" is 1000 on a CPU and
            "never" elsewhere, as `init` decides.

    Raises:
        ArgumentError: an argument out of range; from `init`, an unusable task, data or storage, or too little memory.

    Guarantees:
        - unbiased for the mean of the clipped local gradients, given the table.
        - the three tables agree to float32 rounding where the entries are the same.
        - the mean is that of the stored rows.
        - no stored gradient exceeds the clip norm.
        - rows read for another batch make the node's gradient NaN and are counted.
        - no copy of the table in a round.
    """
    scheme = uniform(1) if sampler is None else sampler
    check.one_of(("dense", "factored", "per_batch"), table=table)
    check.one_of(tuple(_BYTES), storage=storage)
    if isinstance(refresh_every, str):
        check.one_of(("auto", "never"), refresh_every=refresh_every)
    else:
        check.at_least(1, refresh_every=refresh_every)
    per_example.check_clipping(clip_norm, clip_order)
    if (entry_size is None) == (table == "per_batch"):
        remedy = 'Pass entry_size with table="per_batch" and with no other.'
        raise ArgumentError("entry_size", 'belongs to table="per_batch"', f"got {entry_size} with {table!r}", remedy)
    check.at_least(1, entry_size=1 if entry_size is None else entry_size)
    samples = 1 if entry_size is None else entry_size
    clipping = {"clip_norm": clip_norm, "clip_order": clip_order}

    def init(task, key, params, data):
        check_sample_losses(task)
        check_task(task, data)
        counts = _entry_counts(data, samples)
        check_counts(scheme, counts, data.names)
        _check_storage(storage, params)
        if storage not in _storages(task, table, clip_norm):
            layer = next(layer.name for layer in task.layers if not layer.is_outer_product)
            raise ArgumentError(
                "storage",
                'must be "float32" for clipped gradients in a "factored" table of a model with convolutions',
                f"got {storage!r} with layer {layer!r}",
                'Rounded factors can exceed the clip norm: pass "float32", or table="dense" or "per_batch".',
            )
        params = varying_like(params, params, key, data)  # gradients to what devices share would be sums over them
        _preflight(task, params, data, scheme, table, samples, storage, clip_norm)
        store = make_store(task, params, data, table=table, entry_size=samples, **clipping)
        carries_rounding = refresh_every == "never" or (refresh_every == "auto" and not is_cpu())
        return jax.jit(partial(_build, store, task, scheme, samples, storage, carries_rounding))(key, params, data)

    def draw(key, round_index, data):
        counts = _entry_counts(data, samples)
        rounds = jnp.stack([round_index, round_index + 1])
        both = jax.vmap(lambda index: draw_batch(scheme, key, index, counts))(rounds)
        this, coming = (jax.tree.map(lambda leaf, i=i: leaf[i], both) for i in range(2))
        return SagaDraws(batch=this, next_batch=coming)

    def estimate(task, params, state, data, draws, round_index):
        store = make_store(task, params, data, table=table, entry_size=samples, **clipping)
        batch, dtype = draws.batch, number_type(params)
        counts = _entry_counts(data, samples)
        # A repeated entry has one gradient, so the mean of the table may count its change only once.
        repeats = scheme.may_repeat and batch.mask.shape[1] > 1
        counts_change = first_occurrence(batch) if repeats else batch.mask
        exact = storage != "bfloat16" and not repeats
        misses = jnp.sum((state.row_indices != batch.indices) & batch.mask, axis=1, dtype=jnp.int32)

        def one_node(node_params, node_inputs, node_labels, node_weights, old, mask, change, count, num_misses):
            new = store.compute(node_params, node_inputs, node_labels, node_weights)
            share = mask.astype(dtype) / scheme.batch_size
            old = jnp.where(num_misses > 0, jnp.nan, decode(old, storage))
            difference = store.difference(new.sample_inputs, new.rows, old, share)
            drift = None  # a multiple of the difference
            if not exact:
                stored = decode(encode(new.rows, storage), storage)
                drift = store.difference(new.sample_inputs, stored, old, change.astype(dtype) / count.astype(dtype))
            evaluations = jnp.sum(node_weights > 0, dtype=jnp.int32)
            return (difference, drift, batch_sums(new, share, mask), evaluations), encode(new.rows, storage)

        def of_slots(slots, mask):
            entries, change, old = slots
            inputs, labels, weights = _entry_samples(data, counts, entries, mask, samples, dtype)
            over = over_nodes(one_node, task.node_loop)
            return over(params, inputs, labels, weights, old, mask, change, counts, misses)

        slots = batch.indices, counts_change, state.rows
        sums, new_rows = over_used_slots(of_slots, slots, batch.mask, scheme.batch_size)
        difference, drift, measured, evaluations = sums
        gradient = jax.tree.map(jnp.add, difference, state.table_mean)
        drift = scale(scheme.batch_size / counts.astype(dtype), difference) if exact else drift
        if state.mean_rounding is None:
            mean, rounding = jax.tree.map(jnp.add, state.table_mean, drift), None
        else:
            mean, rounding = add_exactly(state.table_mean, state.mean_rounding, drift)
        new_table = _write(state.table, batch, new_rows)
        if rounding is None:
            period = _REFRESH_EVERY if isinstance(refresh_every, str) else refresh_every
            mean = jax.lax.cond(
                (round_index + 1) % period == 0,
                lambda values, old_mean: _exact_mean(store, task, samples, storage, values, params, data),
                lambda values, old_mean: old_mean,
                new_table,
                mean,
            )
        info = batch_info(gradient, measured, batch, gradient_evaluations=evaluations, **{PREFETCH_MISSES: misses})
        new_state = SagaState(
            table=new_table,
            table_mean=mean,
            mean_rounding=rounding,
            rows=_read(new_table, draws.next_batch),
            row_indices=draws.next_batch.indices,
        )
        return gradient, new_state, info

    def refresh(task, params, state, data, due):
        if state.mean_rounding is None:
            return state
        store, mean = make_store(task, params, data, table=table, entry_size=samples, **clipping), state.table_mean
        exact = partial(_exact_mean, store, task, samples, storage, state.table, params, data)
        mean_rounding = jax.tree.map(lambda leaf: jnp.where(due, jnp.zeros_like(leaf), leaf), state.mean_rounding)
        return state._replace(table_mean=jax.lax.cond(due, exact, lambda: mean), mean_rounding=mean_rounding)

    sampling = Sampling("saga", scheme.name, scheme.batch_size, clip_norm, samples, storage)
    return GradientEstimator(init, draw, estimate, refresh if isinstance(refresh_every, str) else None, sampling)


def table_bytes(
    task: Task, params: PyTree, data: FederatedData, *, table: str, entry_size: int = 1, storage: str = "float32"
) -> int:
    """Bytes of a gradient table, without building it.

    Args:
        task: the learning task.
        params: arrays or shapes with leaves (n, *leaf).
        data: the nodes' samples.
        table, entry_size, storage: as for `saga`.
    """
    store = make_store(task, params, data, table=table, entry_size=entry_size, clip_norm=None, clip_order=2)
    return data.num_nodes * -(-data.max_size // entry_size) * store.row_size * _BYTES[storage]


def _storages(task: Task, table: str, clip_norm: float | Array | None) -> tuple[str, ...]:
    """The storages that keep clipped gradients clipped: rounding factors toward zero may enlarge a sum of products."""
    sums = any(not layer.is_outer_product for layer in task.layers)
    whole = ("float32", "float64")
    return whole if table == "factored" and sums and clip_norm is not None else (*whole, "bfloat16")


def _check_storage(storage: str, params: PyTree) -> None:
    """Refuse a table that would round params in float64, or be wider than params in float32."""
    dtype = number_type(params).name
    if (storage == "float64") != (dtype == "float64"):
        choices = '"float64"' if dtype == "float64" else '"float32" or "bfloat16"'
        found = f"got {storage!r}, the default being float32"
        raise ArgumentError("storage", f"must be {choices} for params in {dtype}", found, f"Pass {choices}.")


def _entry_counts(data: FederatedData, entry_size: int) -> Array:
    """(n,) int32, entries of each node."""
    return data.sizes if entry_size == 1 else -(-data.sizes // entry_size)


def _entry_samples(
    data: FederatedData, counts: Array, entries: Array, mask: Array, entry_size: int, dtype: np.dtype
) -> tuple[Array, Array, Array]:
    """The samples of each node's entries (n, c): inputs and labels (n, c * s, ...) and weights (n, c * s).

    An entry's gradient is the weighted sum over its samples. The weight count / size (1 when an entry is one sample)
    makes the mean over a node's entries its full gradient even when the last entry is short.
    """
    offsets = jnp.arange(entry_size, dtype=jnp.int32)
    positions = (entries[:, :, None] * entry_size + offsets[None, None, :]).reshape(entries.shape[0], -1)
    valid = jnp.repeat(mask, entry_size, axis=1) & (positions < data.sizes[:, None])
    inputs, labels = gather(data, positions)
    weight = counts.astype(dtype) / data.sizes.astype(dtype)
    return inputs, labels, valid.astype(dtype) * weight[:, None]


def _write(table: Array, batch: Batch, rows: Array) -> Array:
    """The table with the rows of the batch's valid slots replaced; repeated entries carry the same row."""

    def write(table, positions, rows):
        nodes = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
        return table.at[nodes, positions].set(rows, mode="drop")

    return on_shares(write)(table, jnp.where(batch.mask, batch.indices, table.shape[1]), rows)


def _read(table: Array, batch: Batch) -> Array:
    """The rows of the batch's slots, (n, c, F)."""

    def read(table, positions):
        nodes = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
        return table.at[nodes, positions].get(mode="promise_in_bounds")

    return on_shares(read)(table, batch.indices)


def _chunks(data: FederatedData, entry_size: int, row_size: int) -> tuple[int, int, int]:
    """(entries of the largest node, entries a chunk, number of chunks) for passes over the whole table."""
    entries = -(-data.max_size // entry_size)
    chunk = max(1, min(256, entries, _CHUNK_BYTES // (4 * row_size * data.num_nodes)))
    return entries, chunk, -(-entries // chunk)


def _chunk_entries(chunk: Array, size: int, entries: int, counts: Array) -> tuple[Array, Array, Array, Array]:
    """(first entry (), entries (n, size), valid (n, size), not seen in an earlier chunk (size,)) of one chunk.

    The last chunk starts earlier when the table is no multiple of the chunk, so that every slice has the same shape.
    """
    begin = chunk.astype(jnp.int32) * size
    start = jnp.minimum(begin, entries - size)
    row = start + jnp.arange(size, dtype=jnp.int32)
    rows = jnp.broadcast_to(row, (counts.shape[0], size))
    return start, rows, rows < counts[:, None], row >= begin


def _build(
    store: Store,
    task: Task,
    sampler: Sampler,
    entry_size: int,
    storage: str,
    carries_rounding: bool,
    key: Key,
    params: PyTree,
    data: FederatedData,
) -> SagaState:
    """The table of gradients at `params`, chunk by chunk, and the rows of round 0."""
    counts = _entry_counts(data, entry_size)
    entries, size, num_chunks = _chunks(data, entry_size, store.row_size)

    def one_node(node_params, inputs, labels, weights, valid):
        rows = store.compute(node_params, inputs, labels, weights).rows
        return encode(jnp.where(valid[:, None], rows, 0.0), storage)

    def fill(chunk, table):
        start, rows, valid, _ = _chunk_entries(chunk, size, entries, counts)
        inputs, labels, weights = _entry_samples(data, counts, rows, valid, entry_size, number_type(params))
        part = over_nodes(one_node, task.node_loop)(params, inputs, labels, weights, valid)
        return jax.lax.dynamic_update_slice_in_dim(table, part, start, axis=1)

    dtype = jnp.uint16 if storage == "bfloat16" else np.dtype(storage)
    empty = jnp.zeros((data.num_nodes, entries, store.row_size), dtype)
    table = jax.lax.fori_loop(0, num_chunks, fill, varying_like(empty, params, data))
    first = draw_batch(sampler, key, jnp.int32(0), counts)
    mean = _exact_mean(store, task, entry_size, storage, table, params, data)
    return SagaState(
        table=table,
        table_mean=mean,
        mean_rounding=jax.tree.map(jnp.zeros_like, mean) if carries_rounding else None,
        rows=_read(table, first),
        row_indices=first.indices,
    )


def _exact_mean(
    store: Store, task: Task, entry_size: int, storage: str, table: Array, params: PyTree, data: FederatedData
) -> PyTree:
    """Mean over each node's entries of the gradients that the table stands for, in one pass over the table."""
    counts, dtype = _entry_counts(data, entry_size), number_type(params)
    entries, size, num_chunks = _chunks(data, entry_size, store.row_size)

    def one_node(node_params, inputs, labels, rows, weights):
        return store.combine(store.sample_inputs(node_params, inputs, labels), decode(rows, storage), weights)

    def add(chunk, carry):
        start, rows, valid, fresh = _chunk_entries(chunk, size, entries, counts)
        inputs, labels, _ = _entry_samples(data, counts, rows, valid, entry_size, dtype)
        weights = (valid & fresh[None, :]).astype(dtype) / counts.astype(dtype)[:, None]
        part = jax.lax.dynamic_slice_in_dim(table, start, size, axis=1)
        total, rounding = carry
        share = over_nodes(one_node, task.node_loop)(params, inputs, labels, part, weights)
        return add_exactly(total, rounding, share)

    nothing = varying_like(jax.tree.map(jnp.zeros_like, params), params, table, data)
    return jax.lax.fori_loop(0, num_chunks, add, (nothing, nothing))[0]


def _preflight(
    task: Task,
    params: PyTree,
    data: FederatedData,
    sampler: Sampler,
    table: str,
    entry_size: int,
    storage: str,
    clip_norm: float | Array | None,
) -> None:
    """Refuse a table that does not fit in memory, and name the stores that take less."""
    size = partial(table_bytes, task, params, data)
    rows = -(-data.max_size // entry_size)
    num_bytes = size(table=table, entry_size=entry_size, storage=storage) * (rows + sampler.capacity) // rows
    others = {}
    if task.factors is not None and storage in _storages(task, "factored", clip_norm):
        others['table="factored"'] = size(table="factored", storage=storage)
    batch = max(2 * entry_size, 32)
    others[f'table="per_batch" with entry_size={batch}'] = size(table="per_batch", entry_size=batch, storage=storage)
    if storage == "float32" and "bfloat16" in _storages(task, table, clip_norm):
        others['storage="bfloat16"'] = size(table=table, entry_size=entry_size, storage="bfloat16")
    memory.require_fits("table", num_bytes, {name: cost for name, cost in others.items() if cost < num_bytes})
