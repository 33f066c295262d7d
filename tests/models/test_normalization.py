"""Normalization: padding, states, accuracy where a fast formula for the variance fails; its values are in test_flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normals

from jaxfl.core import Variables
from jaxfl.core.platform import tracing_for
from jaxfl.models import layers
from jaxfl.models.normalization import batch_norm, batch_statistics, group_norm, normalize_batch

RNG = np.random.default_rng(0)
normal = normals(RNG)
KEY = jax.random.key(0)
LAYER = layers.batch_norm(5)
assert LAYER.train is not None
assert LAYER.init_state is not None
TRAIN, STATE = LAYER.train, LAYER.init_state()


@pytest.fixture(params=["cpu", "gpu"])
def platform(request):
    """In the form of a CPU, and in that of a GPU, which reads all numbers once."""
    with tracing_for(request.param):
        yield


def some_params():
    return {"scale": normal(5), "bias": normal(5)}


def some_state():
    return {"mean": normal(5), "var": jnp.asarray(RNG.uniform(0.5, 2.0, 5), jnp.float32)}


@jax.jit
def trained(params, inputs, state, weights, direction):
    """(total over samples that count, outputs, new state), gradients of the total to parameters and inputs."""

    def total(params, inputs):
        outputs, new_state = TRAIN(params, state, inputs, weights, KEY)
        counts = (weights > 0).astype(jnp.float32).reshape(-1, *[1] * (outputs.ndim - 1))
        return jnp.sum(outputs * direction * counts), (outputs, new_state)

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, inputs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (0.5, 0.0, 2.0, 1.0), (0.0, 0.0, 0.0, 0.0)])
def test_gradients_equal_those_of_statistics_and_normalization_apart(weights, dtype):
    """Also where the statistics themselves are made use of."""
    params, state, direction, weights = some_params(), some_state(), normal(4, 3, 2, 5), jnp.array(weights)

    def apart(inputs, scale, bias):
        statistics = batch_statistics(inputs, weights, state)
        return batch_norm(inputs, scale, bias, statistics), statistics

    def at_once(inputs, scale, bias):
        return normalize_batch(inputs, weights, scale, bias, state)

    def gradients(fn):
        def total(*arguments):
            outputs, statistics = fn(*arguments)
            used = jnp.sin(outputs.astype(jnp.float32)) * direction
            return jnp.sum(used) + jnp.sum(jnp.cos(3 * statistics["mean"])) + jnp.sum(statistics["var"] ** 2)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))

    arguments = (normal(4, 3, 2, 5).astype(dtype), params["scale"].astype(dtype), params["bias"].astype(dtype))
    actual, expected = (gradients(fn)(*arguments) for fn in (at_once, apart))
    for mine, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert mine.dtype == other.dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        mine, other = mine.astype(jnp.float32), other.astype(jnp.float32)
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


def test_masked_batches_of_nodes_equal_a_loop_in_numpy(platform):
    masks = jnp.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1.0]])
    inputs, params, states = normal(3, 4, 3, 2, 5), some_params(), [some_state() for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    train = jax.jit(jax.vmap(TRAIN, in_axes=(None, 0, 0, 0, None)))
    outputs, new_state = train(params, stacked, inputs, masks / 4, KEY)
    for node, state in enumerate(states):
        wide = np.asarray(inputs[node], np.float64)
        rows = wide[masks[node] > 0].reshape(-1, 5)
        center, spread = rows.mean(axis=0), rows.var(axis=0)
        expected = (wide - center) / np.sqrt(spread + 1e-5) * np.asarray(params["scale"]) + np.asarray(params["bias"])
        np.testing.assert_allclose(outputs[node], expected, rtol=1e-5, atol=1e-5)
        for name, statistic in {"mean": center, "var": spread}.items():
            moved = 0.9 * np.float64(state[name]) + 0.1 * statistic
            np.testing.assert_allclose(new_state[name][node], moved, rtol=1e-5, atol=1e-5)


def test_samples_of_weight_0_never_count():
    params, state, inputs, direction = some_params(), some_state(), normal(4, 3, 2, 5), normal(4, 3, 2, 5)
    weights, other = jnp.array([1.0, 0.0, 1.0, 0.0]), inputs.at[1::2].set(normal(2, 3, 2, 5) * 100)

    def what_counts(inputs):
        (value, (outputs, new_state)), gradients = trained(params, inputs, state, weights, direction)
        return value, outputs[::2], new_state, gradients

    jax.tree.map(np.testing.assert_array_equal, what_counts(inputs), what_counts(other))
    assert not what_counts(inputs)[3][1][1::2].any()


def test_a_batch_that_is_all_padding_leaves_the_state_as_it_is():
    params, state, inputs = some_params(), some_state(), normal(4, 3, 2, 5)
    (_, (outputs, new_state)), gradients = trained(params, inputs, state, jnp.zeros(4), jnp.ones_like(inputs))
    jax.tree.map(np.testing.assert_array_equal, new_state, state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((outputs, gradients)))


def test_untracked_statistics_stay_and_a_missing_state_is_made_of_the_batch_alone():
    params, state, inputs, weights = some_params(), some_state(), normal(4, 5), jnp.array([1.0, 1.0, 1.0, 0.0])
    static = layers.batch_norm(5, tracked=False).train
    assert static is not None
    outputs, kept = static(params, state, inputs, weights, KEY)
    assert kept is state
    tracked_outputs, moved = TRAIN(params, state, inputs, weights, KEY)
    np.testing.assert_array_equal(outputs, tracked_outputs)
    assert np.abs(moved["mean"] - state["mean"]).max() > 0.01
    for train in (static, TRAIN):
        _, made = train(params, None, inputs, weights, KEY)
        np.testing.assert_allclose(made["mean"], np.mean(inputs[:3], axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(made["var"], np.var(inputs[:3], axis=0), rtol=1e-5)
        # Evaluation with it is what training made of these samples.
        np.testing.assert_array_equal(LAYER.apply(Variables(params, made), inputs), outputs)


@pytest.mark.parametrize("row", [None, 0, 1], ids=["rows alike", "first row stands out", "second row stands out"])
def test_accurate_where_the_mean_is_large_against_the_deviation(row, platform):
    """On a GPU the first row's mean shifts the numbers, and may itself be far from the mean."""
    deviation = RNG.integers(-8, 9, size=(3, 16, 2, 5)) / 8.0  # sums with 4096 are exact in float32
    if row is not None:
        deviation[:, row] += 128.0
    inputs, tolerance = jnp.asarray(4096.0 + deviation, jnp.float32), 1e-5 if row is not None else 1e-2
    for weights in ((1.0, 1.0, 1.0), (0.0, 0.5, 2.0)):
        actual = jax.jit(batch_statistics)(inputs, jnp.asarray(weights, jnp.float32), STATE)
        mean = np.average(deviation.mean(axis=(1, 2)), axis=0, weights=weights)
        var = np.average(((deviation - mean) ** 2).mean(axis=(1, 2)), axis=0, weights=weights)
        np.testing.assert_allclose(actual["mean"] - 4096.0, mean, atol=1e-3)
        np.testing.assert_allclose(actual["var"], var, rtol=tolerance)
    one = deviation[:1]
    actual = jax.jit(lambda *args: group_norm(*args, num_groups=1))(inputs[:1], jnp.ones(5), jnp.zeros(5))
    np.testing.assert_allclose(actual, (one - one.mean()) / one.std(), atol=2e-3)


def test_a_samples_group_norm_does_not_depend_on_other_samples():
    images, scale, bias = normal(3, 4, 4, 4), normal(4), normal(4)
    together = group_norm(images, scale, bias, 2)
    changed = group_norm(images.at[1:].multiply(100.0), scale, bias, 2)
    np.testing.assert_array_equal(together[0], changed[0])
    assert np.abs(together[1] - changed[1]).max() > 0


def test_equal_numbers_become_the_bias_with_finite_gradients(platform):
    params, inputs, direction = some_params(), jnp.full((3, 2, 2, 5), 7.0), normal(3, 2, 2, 5)

    def grouped(params, inputs):
        outputs = group_norm(inputs, params["scale"], params["bias"], 5)
        return jnp.sum(outputs * direction), outputs

    def batch(params, inputs):
        outputs, _ = TRAIN(params, STATE, inputs, jnp.ones(3), KEY)
        return jnp.sum(outputs * direction), outputs

    for fn in (grouped, batch):
        gradients, outputs = jax.jit(jax.grad(fn, argnums=(0, 1), has_aux=True))(params, inputs)
        np.testing.assert_array_equal(outputs, jnp.broadcast_to(params["bias"].reshape(1, 1, 1, 5), outputs.shape))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_statistics_of_bfloat16_inputs_are_float32():
    inputs = normal(1000, 5).astype(jnp.bfloat16) + 3
    actual = batch_statistics(inputs, jnp.ones(1000), STATE)
    exact = np.asarray(inputs, np.float64)
    np.testing.assert_allclose(actual["mean"], exact.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(actual["var"], exact.var(axis=0), rtol=1e-5)
    one = jnp.ones(5, jnp.bfloat16)
    outputs = batch_norm(inputs, one, one, actual)
    assert outputs.dtype == jnp.bfloat16
    expected = (exact - exact.mean(axis=0)) / exact.std(axis=0) + 1
    np.testing.assert_allclose(outputs.astype(jnp.float32), expected, atol=2**-8 * 5)
