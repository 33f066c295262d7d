"""Distance that one sample moves a rounded float32 sum of a large batch, on data made for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfl
from jaxfl import gradients
from jaxfl.algorithms.clients.bound_constants import Aggregation, Constants, ConstantsDraws, private_constants
from jaxfl.algorithms.clients.steps import Step, over_used_groups
from jaxfl.gradients import per_example
from jaxfl.gradients.microbatches import BLOCK, in_blocks, pairwise_sum
from jaxfl.gradients.stores import make_store

LINEAR = jaxfl.from_functions(lambda key: jnp.zeros(1), lambda w, x, y: x @ w)  # a sample's gradient is the sample
KINDS = ("batch", "table", "clients")
GROUPS = {"slots": 32, "estimates": 64, "mean of the table": BLOCK}  # terms of a group; a loop adds the groups


def values_of(count, period, at_once=1):
    """Numbers of size at most 1 whose sum, added up one after the other, rounds up all along; not without the first.

    The first half adds up to 2^k. There float32 has the step u, and u / 2 below, where the sum without the first number
    stays: 0.7 u up and 0.4375 u down again are rounded to u and 0 there, and to 0.5 u up and down here. (Casacuberta,
    Shoemate, Vadhan, Wagaman 2022, arXiv:2207.10635, repeated rounding.)

    Args:
        count: of numbers; a power of two.
        period: numbers that are added up one after the other.
        at_once: consecutive numbers that are added up as one.
    """
    step = period / 2 * 2.0**-23
    pair = np.repeat([0.7 * step / at_once, -0.4375 * step / at_once], at_once)
    one = np.concatenate([np.ones(period // 2), np.tile(pair, period // 4 // at_once)])
    return np.tile(one, count // period).astype(np.float32)


def summed(kind, values):
    """The sum of clipped gradients, as an algorithm makes it."""
    values, weights = jnp.asarray(values)[:, None], jnp.ones(len(values))
    if kind == "clients":
        updates = jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.gaussian(1.0))
        return updates.sum({"w": values}, jnp.ones(len(values), bool)).total["w"]
    data = jaxfl.federate(np.asarray(values), np.zeros(len(values), np.int32), [np.arange(len(values))])
    if kind == "slots":

        def sums(step):
            inputs, labels, weights = data.inputs[step.samples], data.labels[step.samples], jnp.float32(step.mask)
            return per_example.weighted_sum(LINEAR, jnp.zeros(1), inputs, labels, weights, clip_norm=1.0).gradient, ()

        step = Step(data.indices[0], jnp.ones(len(values), bool), dropout_key=None, noise=None)
        return jax.jit(lambda step: over_used_groups(sums, step)[0])(step)
    if kind == "estimates":  # xi without noise, of a client that all others equal: the norm of its mean gradient
        constants = private_constants(None, clip_norm=1.0, loss_bound=1.0, noise_multiplier=1.0)
        one, zeros = jnp.ones(1), jnp.zeros((1, 1))
        draws = ConstantsDraws(None, jnp.zeros(1, jnp.int32), noise=jnp.zeros((1, 3)))
        aggregation = Aggregation(zeros[0], zeros, zeros[0], one, one, jnp.int32(1), jnp.float32(1.0), jnp.float32(0.0))
        estimate = jax.jit(lambda data: constants.estimate(LINEAR, data, draws, aggregation, Constants(one, one, one)))
        return estimate(data)[0].xi * len(values)
    if kind == "mean of the table":
        estimator = gradients.saga(clip_norm=1.0)
        return estimator.init(LINEAR, jax.random.key(0), jnp.zeros((1, 1)), data).table_mean * len(values)
    if kind == "table":
        shape = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        store = make_store(LINEAR, shape, data, table="dense", entry_size=1, clip_norm=1.0, clip_order=2)
        return store.combine((), values, weights)
    labels = jnp.zeros(len(values), jnp.int32)
    return per_example.weighted_sum(LINEAR, jnp.zeros(1), values, labels, weights, clip_norm=1.0).gradient


def moved(total, values):
    """By how much the sum moves where the first sample's gradient counts as zero."""
    other = values.copy()
    other[0] = 0.0
    return abs(float(np.squeeze(total(values))) - float(np.squeeze(total(other))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1024, 4096])
def test_rounding_lets_a_sample_move_a_sum_by_hardly_more_than_its_norm(kind, count):
    """One after the other it moves it by 1 + count^2 2^-26; in blocks by at most 1 + 2^-8 + count 2^-22."""

    def one_after_the_other(values):
        return np.add.accumulate(values, dtype=np.float32)[-1]

    assert moved(one_after_the_other, values_of(count, count)) == pytest.approx(1 + count**2 * 2.0**-26, rel=1e-2)
    for period in (count, BLOCK):
        assert moved(lambda values: summed(kind, values), values_of(count, period)) <= 1 + 2.0**-8 + count * 2.0**-22


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("count", [4096, 16384])
def test_a_loop_over_groups_does_not_add_up_their_rounding(kind, count):
    """Plain additions move the sum by 1 + count^2 2^-26 / (terms of a group); now at most its last bit comes on top."""

    def plainly(values, size):
        return np.add.accumulate(values.reshape(-1, size).sum(axis=1), dtype=np.float32)[-1]

    for size in {GROUPS[kind], BLOCK}:
        values = values_of(count, count, size)
        plain = moved(lambda values, size=size: plainly(values, size), values)
        assert plain == pytest.approx(1 + count**2 * 2.0**-26 / size, rel=1e-6)
        assert moved(lambda values: summed(kind, values), values) <= 1 + count / 2 * 2.0**-23


@pytest.mark.parametrize("count", [BLOCK, BLOCK + 1, 1000])
@pytest.mark.parametrize("kind", [*KINDS, *GROUPS])
def test_a_sum_of_blocks_is_the_sum(kind, count):
    values = np.random.default_rng(0).uniform(-1, 1, count).astype(np.float32)
    np.testing.assert_allclose(np.squeeze(summed(kind, values)), values.astype(np.float64).sum(), atol=1e-4)


def test_a_short_batch_is_one_call():
    """So that its bits are those of one product."""
    calls = []
    in_blocks(lambda block, weights: (calls.append(len(weights)), ()), jnp.ones(BLOCK), jnp.ones(BLOCK))
    assert calls == [BLOCK]
    assert float(pairwise_sum(jnp.arange(7.0))) == 21.0
