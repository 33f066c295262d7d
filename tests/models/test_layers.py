"""Layers against flax's own, and their factored gradients against per-sample ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normals, refusals

from jaxfl.core import ArgumentError
from jaxfl.core.platform import tracing_for
from jaxfl.models import layers
from jaxfl.models.kernels import position_sums

RNG = np.random.default_rng(0)
normal = normals(RNG)


def initial(layer):
    """Parameters of a layer that has some, compiled as one program."""
    assert layer.init is not None
    return jax.jit(layer.init)(jax.random.key(1))


def factored_form(layer):
    assert layer.factored is not None
    return layer.factored("layer", False)


LAYERS = {
    "dense": (layers.dense(7, 4), (5, 7)),
    "conv": (layers.conv(2, 3, (3, 3)), (5, 6, 5, 2)),
    "conv strided": (layers.conv(2, 3, (3, 2), strides=(2, 1)), (5, 7, 5, 2)),
    "conv valid": (layers.conv(3, 4, (3, 3), padding="VALID"), (5, 6, 5, 3)),
    "conv, gram form": (layers.conv(8, 16, (3, 3), strides=(2, 2)), (5, 3, 3, 8)),
    "group norm": (layers.group_norm(6, 2), (5, 4, 3, 6)),
}


def per_sample_gradients(layer, params, inputs, errors):
    """The gradient of each sample's <outputs, errors> by automatic differentiation, leaves (b, *leaf)."""

    def one(one_input, one_error):
        return jax.grad(lambda p: jnp.sum(layer.apply(p, one_input[None])[0] * one_error))(params)

    return jax.jit(jax.vmap(one))(inputs, errors)


def everything_of(factored):
    """Everything that the factored form offers, compiled at once."""

    @jax.jit
    def everything(inputs, errors, weight):
        return {
            "squared_norm": factored.squared_norm(inputs, errors),
            "absolute_norm": factored.absolute_norm(inputs, errors),
            "weighted_sum": factored.weighted_sum(inputs, errors, weight),
            "per_sample": factored.per_sample(inputs, errors),
        }

    return everything


compiled = functools.cache(everything_of)


def in_factored_form(factored, *arguments, compiled=compiled):
    """(inputs, errors, weight) -> its numbers as NumPy arrays."""
    return jax.tree.map(np.asarray, compiled(factored)(*arguments))


@pytest.fixture(scope="module", params=LAYERS, ids=list(LAYERS))
def case(request):
    """(factored layer, its arguments, the per-sample gradients of the same samples)."""
    layer, input_shape = LAYERS[request.param]
    params = initial(layer)
    inputs = normal(*input_shape)
    errors = normal(*jax.eval_shape(layer.apply, params, inputs).shape)
    gradients = jax.tree.map(np.asarray, per_sample_gradients(layer, params, inputs, errors))
    return factored_form(layer), (inputs, errors, normal(input_shape[0])), gradients


def sum_over_leaves(fn, tree):
    return sum(fn(leaf).reshape(leaf.shape[0], -1).sum(axis=1) for leaf in tree.values())


def test_norms_sums_and_singles_agree_with_per_sample_gradients(case):
    factored, (inputs, errors, weight), gradients = case
    results = in_factored_form(factored, inputs, errors, weight)
    np.testing.assert_allclose(results["squared_norm"], sum_over_leaves(np.square, gradients), rtol=1e-5)
    np.testing.assert_allclose(results["absolute_norm"], sum_over_leaves(np.abs, gradients), rtol=1e-5)
    for name, leaf in gradients.items():
        expected = np.tensordot(np.asarray(weight), leaf, axes=1)
        np.testing.assert_allclose(results["weighted_sum"][name], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results["per_sample"][name], leaf, rtol=1e-5, atol=1e-5)


def test_norms_stay_within_1e_4_without_cancellation():
    """White noise at many positions: where the allowance for rounding is largest among ordinary inputs."""
    for layer, inputs_shape in (
        (layers.conv(1, 8, (5, 5)), (2, 28, 28, 1)),
        (layers.conv(32, 64, (5, 5)), (2, 7, 7, 32)),
    ):
        inputs, errors = normal(*inputs_shape), normal(*inputs_shape[:3], 8 if inputs_shape[1] == 28 else 64)
        found = in_factored_form(factored_form(layer), inputs, errors, normal(2))
        gradients = {name: np.asarray(leaf, np.float64) for name, leaf in found["per_sample"].items()}
        np.testing.assert_allclose(np.sqrt(found["squared_norm"] / sum_over_leaves(np.square, gradients)), 1, atol=1e-4)
        np.testing.assert_allclose(found["absolute_norm"], sum_over_leaves(np.abs, gradients), rtol=1e-4)


POINTWISE = {channels: factored_form(layers.conv(channels, channels, (1, 1))) for channels in (64, 2)}


@pytest.mark.parametrize("channels", POINTWISE, ids=["gram form", "direct form"])
@pytest.mark.parametrize("far", [1e-7, 1e-5, 1e-3])
@pytest.mark.quick_cases(1)
def test_no_norm_is_below_the_gradients_where_its_terms_cancel(channels, far):
    """Errors that alternate in sign over positions with nearly equal inputs, against float64."""
    factored = POINTWISE[channels]
    signs = jnp.where(jnp.arange(16) % 2 == 0, 1.0, -1.0).reshape(1, 4, 4, 1)
    inputs = jnp.tile(normal(20, 1, 1, channels), (1, 4, 4, 1))
    errors = signs * normal(20, 1, 1, channels) * (1 + far * normal(20, 4, 4, channels))
    found = in_factored_form(factored, inputs, errors, normal(20))
    rows, columns = (np.asarray(x, np.float64).reshape(20, 16, channels) for x in (inputs, errors))
    exact = {"kernel": np.einsum("bpk,bpo->bko", rows, columns), "bias": columns.sum(axis=1)}
    for gradients in (exact, {name: leaf.astype(np.float64) for name, leaf in found["per_sample"].items()}):
        assert np.all(found["squared_norm"] >= (1 - 1e-6) * sum_over_leaves(np.square, gradients))
        assert np.all(found["absolute_norm"] >= (1 - 1e-6) * sum_over_leaves(np.abs, gradients))


@pytest.mark.parametrize("group_bytes", [1, 6000, 10**9], ids=["one by one", "two and two and one", "all at once"])
def test_norms_agree_in_groups_of_samples(group_bytes, monkeypatch):
    """As on an accelerator, against one sample after the other, as on a CPU."""
    layer, input_shape = LAYERS["conv"]
    inputs, errors, weight = normal(*input_shape), normal(*input_shape[:3], 3), normal(input_shape[0])
    factored = factored_form(layer)
    expected = in_factored_form(factored, inputs, errors, weight)
    monkeypatch.setattr(position_sums, "ACCELERATOR_GROUP_BYTES", group_bytes)
    with tracing_for("gpu"):
        actual = in_factored_form(factored, inputs, errors, weight, compiled=everything_of)  # anew
    for norm in ("squared_norm", "absolute_norm"):
        np.testing.assert_allclose(actual[norm], expected[norm], rtol=1e-5)


def test_factored_dense_forms_no_per_sample_gradients():
    factored = factored_form(layers.dense(300, 200))
    inputs, errors = normal(64, 300), normal(64, 200)

    def clipped(inputs, errors):
        norm = factored.squared_norm(inputs, errors) + factored.absolute_norm(inputs, errors)
        return factored.weighted_sum(inputs, errors, 1.0 / norm)

    sizes = [out.aval.size for eqn in jax.make_jaxpr(clipped)(inputs, errors).eqns for out in eqn.outvars]
    assert max(sizes) <= 300 * 200


def test_dense_equals_flax_linear():
    linear = nnx.Linear(7, 4, rngs=nnx.Rngs(0))
    bias = normal(4)
    inputs = normal(5, 7)
    params = {"kernel": linear.kernel[...], "bias": bias}
    expected = linear(inputs) + bias[None, :]  # flax starts at a zero bias
    np.testing.assert_allclose(layers.dense(7, 4).apply(params, inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("padding", "strides"), [("SAME", (1, 1)), ("SAME", (2, 3)), ("VALID", (2, 1))])
def test_conv_equals_flax_conv(padding, strides):
    flax_conv = nnx.Conv(2, 3, (3, 4), strides=strides, padding=padding, rngs=nnx.Rngs(0))
    bias = normal(3)
    inputs = normal(2, 9, 8, 2)
    params = {"kernel": flax_conv.kernel[...], "bias": bias}
    ours = layers.conv(2, 3, (3, 4), strides=strides, padding=padding)
    expected = flax_conv(inputs) + bias[None, None, None, :]  # flax starts at a zero bias
    np.testing.assert_allclose(ours.apply(params, inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "initializer"), [(1.0, "lecun_normal"), (2.0, "he_normal")])
@pytest.mark.parametrize("shape", [(4, 3), (5, 5, 2, 3)])
def test_kernels_start_as_those_of_jax_nn_initializers(shape, scale, initializer):
    key = jax.random.key(3)
    expected = jax.jit(lambda key: getattr(jax.nn.initializers, initializer)()(key, shape, jnp.float32))(key)
    np.testing.assert_array_equal(jax.jit(lambda key: layers.normal_kernel(key, shape, scale))(key), expected)


def test_kernels_start_lecun_normal_and_biases_zero():
    key = jax.random.key(1)
    for layer, shape in ((layers.dense(4, 3), (4, 3)), (layers.conv(2, 3, (5, 5)), (5, 5, 2, 3))):
        params = initial(layer)
        np.testing.assert_allclose(params["kernel"], layers.normal_kernel(key, shape), rtol=1e-6)
        assert not params["bias"].any()


def test_wrong_inputs_are_named():
    with pytest.raises(ArgumentError, match=r"inputs: must hold samples of 9 numbers.*\(4, 3\)"):
        layers.reshape((3, 3)).apply(None, jnp.zeros((2, 4, 3)))
    conv = layers.conv(3, 4, (3, 3))
    with pytest.raises(
        ArgumentError, match=r"inputs: must be images \(b, height, width, 3\); got shape \(2, 8, 8, 1\)"
    ):
        conv.apply(initial(conv), jnp.zeros((2, 8, 8, 1)))


test_bad_arguments_are_named = refusals(
    [
        (lambda: layers.dense(0, 3), "in_features"),
        (lambda: layers.conv(1, 0, (3, 3)), "out_channels"),
        (lambda: layers.conv(1, 1, (0, 3)), "window"),
        (lambda: layers.conv(1, 1, (3, 3), strides=(1, 0)), "strides"),
        (lambda: layers.conv(1, 1, (3, 3), padding="REFLECT"), "padding"),
        (lambda: layers.activation("softplus"), "activation"),
    ]
)
