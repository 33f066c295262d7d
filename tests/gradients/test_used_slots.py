"""Slots of Poisson batches that no node uses are left out on a CPU; what is computed stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from problems import irregular_graph, small_task, start, uneven_data

import jaxfl
from jaxfl import gradients
from jaxfl.core.platform import tracing_for
from jaxfl.gradients import Batch, SagaDraws
from jaxfl.gradients.microbatches import over_used_slots

BATCH, CAPACITY = 2, 13  # parts of three slots follow the first two, and the last part is short
COMPUTED = {0: 2, 1: 2, 2: 2, 3: 5, 5: 5, 6: 8, 11: 11, 12: 14, 13: 14}  # slots in use at the fullest node -> computed
KEY = jax.random.key(3)
ESTIMATORS = {
    "clipped": lambda sampler: gradients.mini_batch(sampler=sampler, clip_norm=0.5),
    "plain": lambda sampler: gradients.mini_batch(sampler=sampler),
    "factored": lambda sampler: gradients.saga(sampler=sampler, table="factored", clip_norm=0.5),
    "dense": lambda sampler: gradients.saga(sampler=sampler, storage="bfloat16"),
}


def used(count):
    """(5, c) bool: `count` slots of node 2, and at most one of the others."""
    counts = np.minimum(count, [1, 0, count, 1, 1])
    return jnp.asarray(np.arange(CAPACITY) < counts[:, None])


def count_slots(slots, mask):
    """Sums and numbers of slots that show which slots were computed."""
    return (jnp.sum(jnp.where(mask, slots, 0), axis=1), jnp.full(len(mask), mask.shape[1])), slots + 1


def of_counts(mask):
    return over_used_slots(count_slots, jnp.broadcast_to(jnp.arange(CAPACITY), mask.shape), mask, BATCH)


@pytest.mark.parametrize("count", COMPUTED)
def test_as_many_parts_are_computed_as_the_fullest_node_needs(count):
    (sums, computed), numbers = jax.jit(of_counts)(used(count))
    np.testing.assert_array_equal(sums, np.sum(np.arange(CAPACITY) * np.asarray(used(count)), axis=1))
    assert set(computed.tolist()) == {COMPUTED[count]}
    was_computed = np.arange(CAPACITY) < COMPUTED[count]
    np.testing.assert_array_equal(numbers, np.tile(np.where(was_computed, np.arange(CAPACITY) + 1, 0), (5, 1)))
    with tracing_for("gpu"):
        assert set(jax.jit(of_counts)(used(count))[0][1].tolist()) == {CAPACITY}


def test_lanes_have_the_bits_of_single_runs():
    masks = jnp.stack([used(count) for count in COMPUTED])
    (sums, _), _ = jax.jit(jax.vmap(of_counts))(masks)
    np.testing.assert_array_equal(sums, [jax.jit(of_counts)(mask)[0][0] for mask in masks])


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.quick_cases(2)
def test_an_estimate_is_that_of_all_slots(kind, monkeypatch):
    monkeypatch.setattr("jaxfl.gradients.samplers.poisson_capacity", lambda *_: CAPACITY)
    data, task = uneven_data(sizes=(14, 13, 15, 13, 14)), small_task()
    gradient = ESTIMATORS[kind](gradients.poisson(BATCH))
    state = start(jaxfl.push_sum(task, graph=irregular_graph(), gradient=gradient, step_size=0.1), KEY, data)
    order = jnp.tile(jnp.arange(CAPACITY, dtype=jnp.int32), (5, 1))

    def estimate(mask):
        batch = Batch(indices=jnp.where(mask, order, 0), mask=mask, overflow=jnp.zeros(5, jnp.int32))
        held, draws = state.gradient, batch
        if held is not None:
            rows = held.table[jnp.arange(5)[:, None], batch.indices]
            held, draws = held._replace(rows=rows, row_indices=batch.indices), SagaDraws(batch, batch)
        return gradient.estimate(task, state.params, held, data, draws, jnp.int32(0))

    def whole(mask):
        with tracing_for("gpu"):
            return estimate(mask)

    masks = jnp.stack([used(count) for count in COMPUTED])
    expected = [jax.jit(whole)(mask) for mask in masks]
    for actual, wanted in zip([jax.jit(estimate)(mask) for mask in masks], expected, strict=True):
        assert_close(actual, wanted, 2e-6)
    lanes = jax.jit(jax.vmap(estimate))(masks)
    for lane, wanted in enumerate(expected):
        assert_close(jax.tree.map(lambda leaf, lane=lane: leaf[lane], lanes), wanted, 2e-6)
    if kind in ("clipped", "plain"):  # of an empty batch
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.jit(estimate)(masks[0])[0]))


def test_derivatives_of_both_modes_are_those_of_all_slots():
    """By what the function closes over, in lanes as well: a step size or a clip norm may be learned."""
    values = jax.random.normal(KEY, (5, CAPACITY))

    def loss(scale, mask, whole):
        def sums(slots, mask):
            return jnp.sum(jnp.where(mask, jnp.sin(scale * slots), 0.0), axis=1), scale * slots

        total, rows = sums(values, mask) if whole else over_used_slots(sums, values, mask, BATCH)
        return jnp.sum(total**2) + jnp.sum(jnp.where(mask, rows, 0.0))

    masks, scales = jnp.stack([used(count) for count in (1, 6, 13)]), jnp.array([0.3, 0.7, 1.1])
    for derivative in (jax.grad, jax.jacfwd, lambda fn: jax.grad(jax.grad(fn))):
        expected = [
            derivative(lambda s, mask=mask: loss(s, mask, True))(s) for s, mask in zip(scales, masks, strict=True)
        ]
        lanes = jax.vmap(lambda s, mask, fn=derivative: fn(lambda s: loss(s, mask, False))(s))
        np.testing.assert_allclose(lanes(scales, masks), expected, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(lanes)(scales, masks), expected, rtol=1e-5)
