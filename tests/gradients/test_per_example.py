"""Clipped sums: the bound holds, padding is nothing, both routes agree with per-sample gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flat, rows_of
from problems import linear_task, small_task

from jaxfl import ArgumentError, from_functions, gradients
from jaxfl.gradients import per_example
from jaxfl.models import classification, sequential
from jaxfl.models.kernels import position_sums
from jaxfl.models.layers import conv, dense, reshape

weighted_sum, per_sample = (
    jax.jit(fn, static_argnums=0, static_argnames="clip_order")
    for fn in (per_example.weighted_sum, per_example.per_sample)
)


def batch(features=6, size=9):
    rng = np.random.default_rng(2)
    inputs = 3 * rng.normal(size=(size, features)).astype(np.float32)
    return jnp.asarray(inputs), jnp.asarray(rng.integers(0, 3, size).astype(np.int32))


def plain_per_sample(task, params, inputs, labels):
    """Gradients by vmap of grad, the route that the engine avoids, (b, d) float64."""
    one = jax.grad(lambda values, x, y: task.loss(values, x[None], y[None])[0])
    return rows_of(jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))(params, inputs, labels))


@pytest.mark.parametrize("task", [small_task(), linear_task()], ids=["factored", "one_sample"])
@pytest.mark.parametrize(("clip_norm", "clip_order"), [(0.8, 1), (0.8, 2), (None, 2), (1e6, 1)])
def test_weighted_sum_equals_clipped_per_sample_gradients(task, clip_order, clip_norm):
    params = task.init(jax.random.key(1))
    inputs, labels = batch()
    weights = jnp.asarray(np.random.default_rng(0).normal(size=9).astype(np.float32)).at[3].set(0.0)
    expected = plain_per_sample(task, params, inputs, labels)
    norms = np.linalg.norm(expected, ord=clip_order, axis=1)
    scale = np.ones(9) if clip_norm is None else np.minimum(1.0, clip_norm / norms)
    actual = weighted_sum(task, params, inputs, labels, weights, clip_norm=clip_norm, clip_order=clip_order)
    np.testing.assert_allclose(flat(actual.gradient), (np.asarray(weights) * scale) @ expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(actual.clipped, scale < 1)
    np.testing.assert_allclose(actual.losses, task.loss(params, inputs, labels), rtol=1e-6)
    rows = per_sample(task, params, inputs, labels, clip_norm=clip_norm, clip_order=clip_order)
    np.testing.assert_allclose(rows_of(rows.gradient), scale[:, None] * expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("clip_norm", "holds"), [(1e-12, True), (1e-17, False)])
def test_a_million_small_coordinates_are_clipped_at_the_smallest_clip_norm(clip_norm, holds):
    """Each has a square that float32 may not hold, which is why `check.clip_norm` refuses smaller ones."""
    size = 10**6
    task = from_functions(lambda key: jnp.zeros(size), lambda params, inputs, labels: inputs @ params)
    inputs = jnp.full((1, size), 10 * clip_norm / np.sqrt(size), jnp.float32)
    params, labels = jnp.zeros(size), jnp.zeros(1, jnp.int32)
    actual = weighted_sum(task, params, inputs, labels, jnp.ones(1), clip_norm=jnp.float32(clip_norm))
    norm = np.linalg.norm(np.asarray(actual.gradient, np.float64))
    assert (norm <= clip_norm * (1 + 1e-4)) == holds


@pytest.mark.parametrize("clip_order", [1, 2])
def test_the_bound_holds_where_the_terms_of_a_convolution_cancel(clip_order):
    """Large weights of opposite sign send errors to the positions that nearly sum to zero: float32 sums are all error.

    The squared norm from products of pairs of positions was off by their rounding: clipped norms of 8, or NaN.
    """
    layers = [("conv", conv(64, 64, (1, 1))), ("flat", reshape((256,))), ("out", dense(256, 2))]
    task, clip_norm = classification(sequential(layers)), 1.0
    params = jax.tree.map(jnp.zeros_like, task.init(jax.random.key(0)))

    @jax.jit
    def both(params, inputs):
        arguments = (task, params, inputs, jnp.zeros(1, jnp.int32))
        options = {"clip_norm": clip_norm, "clip_order": clip_order}
        total = per_example.weighted_sum(*arguments, jnp.ones(1), **options).gradient
        return total, per_example.per_sample(*arguments, **options).gradient

    for seed, close in enumerate((1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e2) * 2):
        rng = np.random.default_rng(seed)
        weights = 1e4 * rng.normal(size=(64, 2))
        kernel = np.concatenate([sign * weights + close * rng.normal(size=(64, 2)) for sign in (1, -1, 1, -1)])
        params["out"]["kernel"] = jnp.asarray(kernel, jnp.float32)
        inputs = jnp.asarray(np.tile(rng.normal(size=(1, 1, 1, 64)), (1, 2, 2, 1)), jnp.float32)
        for gradient in both(params, inputs):
            assert np.linalg.norm(flat(gradient), ord=clip_order) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("task", [small_task(), linear_task()], ids=["factored", "one_sample"])
def test_a_sample_of_weight_0_contributes_exactly_zero(task):
    params = task.init(jax.random.key(1))
    inputs, labels = batch()
    weights = jnp.ones(9).at[4].set(0.0)
    other = inputs.at[4].set(17.0)
    for clip_norm in (None, 0.8):
        actual = [weighted_sum(task, params, x, labels, weights, clip_norm=clip_norm) for x in (inputs, other)]
        np.testing.assert_array_equal(flat(actual[0].gradient), flat(actual[1].gradient))


def test_a_zero_gradient_is_not_scaled_and_has_a_finite_derivative():
    task = linear_task()
    params = {"w": jnp.zeros(6), "b": jnp.float32(0.0)}
    inputs, labels = jnp.ones((2, 6)), jnp.zeros(2, jnp.int32)

    def size(clip_norm):
        actual = per_example.weighted_sum(task, params, inputs, labels, jnp.ones(2), clip_norm=clip_norm)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(actual.gradient))

    value, slope = jax.value_and_grad(size)(jnp.float32(1.0))
    assert float(value) == 0.0
    assert np.isfinite(float(slope))


def test_routes():
    assert per_example.route(small_task(), None) == "backward"
    assert per_example.route(small_task(), 1.0) == "factored"
    assert per_example.route(linear_task(), 1.0) == "one_sample"


def test_no_per_sample_gradient_is_formed_for_dense_layers():
    """The program for a clipped mean holds no array as large as b times the weights."""
    task = small_task(features=200, hidden=100)
    params = jax.eval_shape(task.init, jax.random.key(0))
    arrays = (jax.ShapeDtypeStruct((32, 200), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32))
    weights = jax.ShapeDtypeStruct((32,), jnp.float32)

    def clipped(params, inputs, labels, weights):
        return per_example.weighted_sum(task, params, inputs, labels, weights, clip_norm=1.0).gradient

    memory = jax.jit(clipped).lower(params, *arrays, weights).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 32 * 200 * 100 * 4 / 4


@pytest.mark.parametrize("bad", [{"clip_norm": 0.0}, {"clip_norm": -1.0}, {"clip_norm": 1.0, "clip_order": 3}])
def test_bad_clipping_is_refused(bad):
    with pytest.raises(ArgumentError, match="clip_"):
        gradients.mini_batch(**bad)


def image_task():
    """Convolutions, which have factors of their own."""
    layers = [("conv", conv(1, 2, (2, 2))), ("flat", reshape((12,))), ("out", dense(12, 3))]
    return classification(sequential([("image", reshape((2, 3, 1))), *layers]), preprocess=lambda inputs: inputs)


def test_a_clipped_sum_of_what_is_kept_equals_that_of_what_is_made_twice(monkeypatch):
    """The convolution's kernels, of the size that is allowed and below it."""
    task = image_task()
    params, (inputs, labels), weights = task.init(jax.random.key(1)), batch(), jnp.linspace(0.0, 1.0, 9)
    actual = []
    for allowed in (4 * 9 * 8, 4 * 9 * 8 - 1):
        monkeypatch.setattr(position_sums, "GROUP_BYTES", allowed)
        clipped = jax.jit(lambda *arguments: per_example.weighted_sum(task, *arguments, clip_norm=4.0))
        actual.append(clipped(params, inputs, labels, weights))
        assert task.layers[0].kept is not None
        kept = task.layers[0].kept(jnp.ones((9, 2, 3, 1)), jnp.ones((9, 2, 3, 2)))
        assert (kept is None) == (allowed < 4 * 9 * 8)
    assert 0 < float(actual[0].clipped.sum()) < 9
    for once, twice in zip(jax.tree.leaves(actual[0]), jax.tree.leaves(actual[1]), strict=True):
        np.testing.assert_allclose(once, twice, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("value", "clip_order"), [(np.nan, 1), (np.inf, 2)])
@pytest.mark.parametrize("task", [small_task(), linear_task(), image_task()], ids=["factored", "one_sample", "images"])
def test_under_a_clip_norm_a_gradient_that_is_not_finite_counts_as_zero_and_is_counted(task, clip_order, value):
    params = task.init(jax.random.key(1))
    inputs, labels = batch()
    weights, options = jnp.full(9, 1 / 9), {"clip_norm": 0.8, "clip_order": clip_order}
    broken = inputs.at[4, 2].set(value)
    actual = weighted_sum(task, params, broken, labels, weights, **options)
    without = weighted_sum(task, params, inputs, labels, weights.at[4].set(0.0), **options)
    np.testing.assert_allclose(flat(actual.gradient), flat(without.gradient), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(actual.discarded, np.arange(9) == 4)
    np.testing.assert_allclose(actual.losses, without.losses.at[4].set(0.0), rtol=1e-6)
    assert actual.clipped[4] == 0
    rows = per_sample(task, params, broken, labels, **options)
    assert not rows_of(rows.gradient)[4].any()
    np.testing.assert_array_equal(rows.discarded, actual.discarded)
    plain = weighted_sum(task, params, broken, labels, weights)
    assert not np.isfinite(flat(plain.gradient)).all(), "without a clip norm it stays visible"


@pytest.mark.parametrize("clip_order", [1, 2])
@pytest.mark.parametrize("task", [small_task(), linear_task(), image_task()], ids=["factored", "one_sample", "images"])
def test_the_bound_holds_where_a_norm_overflows(task, clip_order):
    """Scaled down or discarded, but never above the bound."""
    params = task.init(jax.random.key(1))
    inputs, labels = batch()
    rows = per_sample(task, params, inputs.at[4, 2].set(1e30), labels, clip_norm=0.8, clip_order=clip_order)
    assert np.linalg.norm(rows_of(rows.gradient), ord=clip_order, axis=1).max() <= 0.8 * (1 + 1e-5)
