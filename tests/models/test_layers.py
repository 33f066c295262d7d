"""Layers against flax's own, and their factored gradients against per-sample ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxfl.core import ArgumentError
from jaxfl.models import layers

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


LAYERS = {
    "dense": (layers.dense(7, 4), (5, 7)),
    "conv": (layers.conv(2, 3, (3, 3)), (5, 6, 5, 2)),
    "conv strided": (layers.conv(2, 3, (3, 2), strides=(2, 1)), (5, 7, 5, 2)),
    "conv valid": (layers.conv(3, 4, (3, 3), padding="VALID"), (5, 6, 5, 3)),
    "conv, gram form": (layers.conv(8, 16, (3, 3), strides=(2, 2)), (5, 3, 3, 8)),
}


def per_sample_gradients(layer, params, inputs, errors):
    """The gradient of each sample's <outputs, errors> by automatic differentiation, leaves (b, *leaf)."""

    def one(one_input, one_error):
        return jax.grad(lambda p: jnp.sum(layer.apply(p, one_input[None])[0] * one_error))(params)

    return jax.lax.map(lambda pair: one(*pair), (inputs, errors))


@pytest.fixture(params=LAYERS, ids=LAYERS.keys())
def case(request):
    layer, input_shape = LAYERS[request.param]
    params = layer.init(jax.random.key(1))
    params["bias"] = normal(*params["bias"].shape)
    inputs = normal(*input_shape)
    errors = normal(*layer.apply(params, inputs).shape)
    return layer.factored("layer", False), per_sample_gradients(layer, params, inputs, errors), inputs, errors


def sum_over_leaves(fn, tree):
    return sum(np.asarray(fn(leaf)).reshape(leaf.shape[0], -1).sum(axis=1) for leaf in jax.tree.leaves(tree))


def test_squared_norm_agrees_with_per_sample_gradients(case):
    factored, gradients, inputs, errors = case
    expected = sum_over_leaves(lambda leaf: leaf**2, gradients)
    np.testing.assert_allclose(factored.squared_norm(inputs, errors), expected, rtol=1e-5)


def test_absolute_norm_agrees_with_per_sample_gradients(case):
    factored, gradients, inputs, errors = case
    expected = sum_over_leaves(jnp.abs, gradients)
    np.testing.assert_allclose(factored.absolute_norm(inputs, errors), expected, rtol=1e-5)


def test_weighted_sum_agrees_with_per_sample_gradients(case):
    factored, gradients, inputs, errors = case
    weight = normal(inputs.shape[0])
    actual = factored.weighted_sum(inputs, errors, weight)
    for name, leaf in gradients.items():
        expected = np.tensordot(np.asarray(weight), np.asarray(leaf), axes=1)
        np.testing.assert_allclose(actual[name], expected, rtol=1e-5, atol=1e-5)


def test_per_sample_agrees_with_per_sample_gradients(case):
    factored, gradients, inputs, errors = case
    actual = factored.per_sample(inputs, errors)
    for name, leaf in gradients.items():
        np.testing.assert_allclose(actual[name], leaf, rtol=1e-5, atol=1e-5)


def test_norms_agree_in_groups_of_samples(case, monkeypatch):
    factored, gradients, inputs, errors = case
    monkeypatch.setattr(layers, "_GROUP_BYTES", 1)
    expected = sum_over_leaves(lambda leaf: leaf**2, gradients)
    np.testing.assert_allclose(factored.squared_norm(inputs, errors), expected, rtol=1e-5)
    monkeypatch.setattr(layers, "_GROUP_BYTES", 4000)  # a few samples at a time, with a remainder
    np.testing.assert_allclose(factored.absolute_norm(inputs, errors), sum_over_leaves(jnp.abs, gradients), rtol=1e-5)


def test_factored_dense_forms_no_per_sample_gradients():
    factored = layers.dense(300, 200).factored("layer", True)
    inputs, errors = normal(64, 300), normal(64, 200)

    def clipped(inputs, errors):
        norm = factored.squared_norm(inputs, errors) + factored.absolute_norm(inputs, errors)
        return factored.weighted_sum(inputs, errors, 1.0 / norm)

    sizes = [out.aval.size for eqn in jax.make_jaxpr(clipped)(inputs, errors).eqns for out in eqn.outvars]
    assert max(sizes) <= 300 * 200


def test_dense_equals_flax_linear():
    linear = nnx.Linear(7, 4, rngs=nnx.Rngs(0))
    linear.bias[...] = normal(4)
    inputs = normal(5, 7)
    params = {"kernel": linear.kernel[...], "bias": linear.bias[...]}
    np.testing.assert_allclose(layers.dense(7, 4).apply(params, inputs), linear(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_conv_equals_flax_conv(padding, strides):
    flax_conv = nnx.Conv(2, 3, (3, 4), strides=strides, padding=padding, rngs=nnx.Rngs(0))
    flax_conv.bias[...] = normal(3)
    inputs = normal(2, 9, 8, 2)
    params = {"kernel": flax_conv.kernel[...], "bias": flax_conv.bias[...]}
    ours = layers.conv(2, 3, (3, 4), strides=strides, padding=padding)
    np.testing.assert_allclose(ours.apply(params, inputs), flax_conv(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layer", "kernel_of"), [(layers.dense(400, 300), 400), (layers.conv(16, 300, (5, 5)), 400)])
def test_kernels_start_lecun_normal_and_biases_zero(layer, kernel_of):
    params = layer.init(jax.random.key(0))
    # 120,000 draws: the relative standard error of their variance is about 0.4 percent.
    np.testing.assert_allclose(np.var(params["kernel"]), 1 / kernel_of, rtol=0.02)
    assert not params["bias"].any()


def test_wrong_inputs_are_named():
    with pytest.raises(ArgumentError, match=r"inputs: must hold samples of 9 numbers.*\(4, 3\)"):
        layers.reshape((3, 3)).apply(None, jnp.zeros((2, 4, 3)))
    conv = layers.conv(3, 4, (3, 3))
    with pytest.raises(
        ArgumentError, match=r"inputs: must be images \(b, height, width, 3\); got shape \(2, 8, 8, 1\)"
    ):
        conv.apply(conv.init(jax.random.key(0)), jnp.zeros((2, 8, 8, 1)))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: layers.dense(0, 3), "in_features"),
        (lambda: layers.conv(1, 0, (3, 3)), "out_channels"),
        (lambda: layers.conv(1, 1, (0, 3)), "window"),
        (lambda: layers.conv(1, 1, (3, 3), strides=(1, 0)), "strides"),
        (lambda: layers.conv(1, 1, (3, 3), padding="REFLECT"), "padding"),
        (lambda: layers.activation("softplus"), "activation"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.argument == name
