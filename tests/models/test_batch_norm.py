"""Batch normalization against flax's and against a NumPy loop over nodes: values, gradients, running statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, normals, refused

from jaxfl.core import Variables
from jaxfl.core.platform import tracing_for
from jaxfl.models import layers
from jaxfl.models.normalization import batch_norm, batch_statistics, normalize_batch

RNG = np.random.default_rng(0)
normal = normals(RNG)
KEY = jax.random.key(0)


def some_params():
    return {"scale": normal(5), "bias": normal(5)}


def some_state():
    return {"mean": normal(5), "var": jnp.asarray(RNG.uniform(0.5, 2.0, 5), jnp.float32)}


LAYER = layers.batch_norm(5)
assert LAYER.train is not None
assert LAYER.init_state is not None
TRAIN, STATE = LAYER.train, LAYER.init_state()


def train_total():
    """The jitted (params, inputs, state, weights, direction) -> ((total, (outputs, new state)), gradients)."""

    def total(params, inputs, state, weights, direction):
        outputs, new_state = TRAIN(params, state, inputs, weights, KEY)
        counts = (weights > 0).astype(jnp.float32).reshape(-1, *[1] * (outputs.ndim - 1))
        return jnp.sum(outputs * direction * counts), (outputs, new_state)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


TRAINED = train_total()


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 2, 5)], ids=["features", "images"])
@pytest.mark.quick_cases(1)
def test_equals_flax_batch_norm_in_values_gradients_and_running_statistics(shape):
    params, state, inputs, direction = some_params(), some_state(), normal(*shape), normal(*shape)
    structure = nnx.graphdef(nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0)))

    def flax_total(params, inputs):
        module = nnx.merge(structure, nnx.State(params), nnx.State(state))
        outputs = module(inputs)
        return jnp.sum(outputs * direction), (outputs, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)))

    expected = jax.jit(jax.value_and_grad(flax_total, argnums=(0, 1), has_aux=True))(params, inputs)
    assert_close(TRAINED(params, inputs, state, jnp.ones(shape[0]), direction), expected)
    evaluated = nnx.merge(structure, nnx.State(params), nnx.State(state))(inputs, use_running_average=True)
    np.testing.assert_allclose(LAYER.apply(Variables(params, state), inputs), evaluated, rtol=1e-5, atol=1e-5)


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
    found, expected = (gradients(fn)(*arguments) for fn in (at_once, apart))
    for mine, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert mine.dtype == other.dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        mine, other = mine.astype(jnp.float32), other.astype(jnp.float32)
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


def by_hand(inputs, params, state, weights):
    """Outputs and new statistics of one node, in float64, from the samples that count."""
    scale, bias, mean, var = (np.asarray(values, np.float64) for values in (*params.values(), *state.values()))
    rows = inputs[weights > 0].reshape(-1, 5).astype(np.float64)
    center, spread = rows.mean(axis=0), rows.var(axis=0)
    outputs = (inputs - center) / np.sqrt(spread + 1e-5) * scale + bias
    return outputs, {"mean": 0.9 * mean + 0.1 * center, "var": 0.9 * var + 0.1 * spread}


def test_masked_batches_of_nodes_equal_a_loop_in_numpy():
    masks = jnp.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1.0]])
    inputs, params, states = normal(3, 4, 3, 2, 5), some_params(), [some_state() for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    train = jax.jit(jax.vmap(TRAIN, in_axes=(None, 0, 0, 0, None)))
    outputs, new_state = train(params, stacked, inputs, masks / 4, KEY)
    for node, state in enumerate(states):
        expected, statistics = by_hand(np.asarray(inputs[node]), params, state, np.asarray(masks[node]))
        np.testing.assert_allclose(outputs[node], expected, rtol=1e-5, atol=1e-5)
        for name, values in statistics.items():
            np.testing.assert_allclose(new_state[name][node], values, rtol=1e-5, atol=1e-5)


def test_samples_of_weight_0_never_count():
    params, state, inputs, direction = some_params(), some_state(), normal(4, 3, 2, 5), normal(4, 3, 2, 5)
    weights = jnp.array([1.0, 0.0, 1.0, 0.0])
    (value, (outputs, new_state)), gradients = TRAINED(params, inputs, state, weights, direction)
    other = inputs.at[1::2].set(normal(2, 3, 2, 5) * 100)
    (value_2, (outputs_2, new_state_2)), gradients_2 = TRAINED(params, other, state, weights, direction)
    for mine, changed in zip(
        jax.tree.leaves((value, outputs[::2], new_state, gradients)),
        jax.tree.leaves((value_2, outputs_2[::2], new_state_2, gradients_2)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, changed)
    assert not gradients[1][1::2].any()


def test_a_batch_that_is_all_padding_leaves_the_state_as_it_is():
    params, state, inputs = some_params(), some_state(), normal(4, 3, 2, 5)
    (_, (outputs, new_state)), gradients = TRAINED(params, inputs, state, jnp.zeros(4), jnp.ones_like(inputs))
    for name, values in state.items():
        np.testing.assert_array_equal(new_state[name], values)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((outputs, gradients)))


def test_untracked_statistics_stay_and_a_missing_state_is_made_of_the_batch_alone():
    params, state, inputs, weights = some_params(), some_state(), normal(4, 5), jnp.array([1.0, 1.0, 1.0, 0.0])
    static = layers.batch_norm(5, tracked=False).train
    assert static is not None
    outputs, kept = static(params, state, inputs, weights, KEY)
    assert kept is state
    tracked_outputs, moved = TRAIN(params, state, inputs, weights, KEY)
    np.testing.assert_array_equal(outputs, tracked_outputs)
    for train in (static, TRAIN):
        _, made = train(params, None, inputs, weights, KEY)
        np.testing.assert_allclose(made["mean"], np.mean(inputs[:3], axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(made["var"], np.var(inputs[:3], axis=0), rtol=1e-5)
        # Evaluation with it is what training made of these samples.
        np.testing.assert_array_equal(LAYER.apply(Variables(params, made), inputs), outputs)
    assert np.abs(moved["mean"] - state["mean"]).max() > 0.01


def test_accurate_where_the_mean_is_large_against_the_deviation():
    deviation = RNG.integers(-8, 9, size=(12, 5)) / 8.0  # sums with 4096 are exact in float32
    inputs = jnp.asarray(4096.0 + deviation, jnp.float32)
    found = batch_statistics(inputs, jnp.ones(12), STATE)
    np.testing.assert_allclose(found["var"], deviation.var(axis=0), rtol=1e-2)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.0, 0.5, 2.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("row", [0, 1], ids=["first row stands out", "second row stands out"])
def test_on_a_gpu_statistics_read_once_are_accurate(weights, row):
    """The mean is large against the deviation, and the rows that shift the numbers are far from the mean."""
    deviation = RNG.integers(-8, 9, size=(3, 16, 2, 5)) / 8.0
    deviation[:, row] += 128.0
    inputs, counts = jnp.asarray(4096.0 + deviation, jnp.float32), np.asarray(weights)
    with tracing_for("gpu"):
        found = jax.jit(batch_statistics)(inputs, jnp.asarray(weights, jnp.float32), STATE)
    if not any(weights):
        np.testing.assert_array_equal(found["var"], STATE["var"])
        return
    mean = np.average(deviation.mean(axis=(1, 2)), axis=0, weights=counts)
    var = np.average(((deviation - mean) ** 2).mean(axis=(1, 2)), axis=0, weights=counts)
    np.testing.assert_allclose(found["mean"] - 4096.0, mean, atol=1e-3)
    np.testing.assert_allclose(found["var"], var, rtol=1e-5)


def test_on_a_gpu_training_is_that_of_a_cpu():
    params, state, direction, weights = some_params(), some_state(), normal(4, 3, 2, 5), jnp.array([0.0, 1.0, 2.0, 0.0])
    inputs = normal(4, 3, 2, 5).at[0].mul(100.0)  # padding
    with tracing_for("gpu"):
        found = TRAINED(params, inputs, state, weights, direction)
    assert_close(found, TRAINED(params, inputs, state, weights, direction))


def test_equal_numbers_become_the_bias_with_finite_gradients():
    inputs, params = jnp.full((3, 5), 7.0), some_params()
    (_, (outputs, _)), gradients = TRAINED(params, inputs, STATE, jnp.ones(3), normal(3, 5))
    np.testing.assert_array_equal(outputs, jnp.broadcast_to(params["bias"][None, :], (3, 5)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_statistics_of_bfloat16_inputs_are_float32():
    inputs = normal(1000, 5).astype(jnp.bfloat16) + 3
    found = batch_statistics(inputs, jnp.ones(1000), STATE)
    exact = np.asarray(inputs, np.float64)
    np.testing.assert_allclose(found["mean"], exact.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["var"], exact.var(axis=0), rtol=1e-5)
    one = jnp.ones(5, jnp.bfloat16)
    outputs = batch_norm(inputs, one, one, found)
    assert outputs.dtype == jnp.bfloat16
    expected = (exact - exact.mean(axis=0)) / exact.std(axis=0) + 1
    np.testing.assert_allclose(outputs.astype(jnp.float32), expected, atol=2**-8 * 5)


@pytest.mark.parametrize(("arguments", "name"), [((0,), "channels"), ((5,), "momentum")])
def test_bad_arguments_are_named(arguments, name):
    refused(lambda: layers.batch_norm(*arguments, momentum=1.5), name)
