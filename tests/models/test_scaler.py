"""HeteroFL's scaler, alone and in a residual network, whose widths and slices are tested elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.core import Variables
from jaxfl.models import classification, layers, resnet20
from jaxfl.models.composite import scaled

KEY = jax.random.key(0)
INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
WEIGHTS = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("inner", [layers.dense(4, 3), layers.tanh()])
def test_in_training_it_is_the_layer_on_inputs_divided_by_the_ratio_and_evaluation_is_unchanged(inner):
    layer = scaled(inner, 0.25)
    assert layer.train is not None
    assert layer.init_state is not None
    params = None if layer.init is None else layer.init(KEY)
    outputs, state = layer.train(params, layer.init_state(), INPUTS, WEIGHTS, KEY)
    np.testing.assert_array_equal(outputs, inner.apply(params, INPUTS / 0.25))
    np.testing.assert_array_equal(layer.apply(Variables(params, state), INPUTS), inner.apply(params, INPUTS))
    assert state == {}


def test_the_same_for_a_layer_with_state_and_a_key():
    for inner in (layers.batch_norm(4), layers.dropout(0.5)):
        layer = scaled(inner, 0.25)
        assert layer.train is not None
        assert layer.init_state is not None
        assert inner.train is not None
        params = None if layer.init is None else layer.init(KEY)
        actual = layer.train(params, layer.init_state(), INPUTS, WEIGHTS, KEY)
        expected = inner.train(params, layer.init_state(), INPUTS / 0.25, WEIGHTS, KEY)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        variables = Variables(params, actual[1])
        np.testing.assert_array_equal(layer.apply(variables, INPUTS), inner.apply(variables, INPUTS))


def small(**options):
    return resnet20((5, 4, 3), 5, widths=(4,), blocks=(1,), width=0.5, **options)


def test_in_a_residual_network_it_follows_every_convolution():
    """Normalization undoes it in the outputs, its statistics, now of larger numbers, do not."""
    images = jnp.asarray(np.random.default_rng(1).normal(size=(6, 5, 4, 3)), jnp.float32)
    plain, with_scaler = small(), small(scaler=True)
    params, state = plain.init(KEY), plain.init_state()
    assert jax.tree.structure(with_scaler.init_state()) == jax.tree.structure(state)
    # Means start at 0, so that the new ones are in proportion to the batch's.
    run = [jax.jit(model.apply_train)(params, state, images, jnp.ones(6), KEY) for model in (plain, with_scaler)]
    (logits, means), (scaled_logits, scaled_means) = run
    np.testing.assert_allclose(scaled_logits, logits, rtol=1e-2, atol=1e-3)  # `eps` counts for less
    actual = [name for name, _ in jax.tree.leaves_with_path(means) if name[-1].key == "mean"]
    assert len(actual) == 1 + 3
    for (path, mean), larger in zip(jax.tree.leaves_with_path(means), jax.tree.leaves(scaled_means), strict=True):
        if path[-1].key == "mean":
            np.testing.assert_allclose(larger, 2.0 * mean, rtol=1e-2, atol=1e-4)


def test_networks_of_all_widths_have_one_model_state_when_all_have_the_scaler():
    """Also with group normalization, which has none of its own."""
    full, narrow = (classification(resnet20(norm="group", groups=1, width=width, scaler=True)) for width in (1.0, 0.45))
    assert full.init_state is not None
    assert narrow.init_state is not None
    assert jax.tree.structure(full.init_state()) == jax.tree.structure(narrow.init_state())
