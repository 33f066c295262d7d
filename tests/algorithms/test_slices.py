"""Slices of models: what is taken and put, and that a narrow model is the full one whose other parameters are zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.algorithms.clients.slices import leading_slices
from jaxfl.core import Variables
from jaxfl.models import bilstm_classifier, cnn, resnet20

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)


def randomized(tree):
    """Numbers away from where training starts, above 0 for variances."""
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.uniform(0.1, 1.0, leaf.shape) - 0.2, jnp.float32), tree)


def shapes(model):
    state = jax.eval_shape(model.init_state) if model.has_training_mode else None
    return Variables(jax.eval_shape(model.init, KEY), state)


def text(**options):
    return bilstm_classifier(11, 5, dropout=0.0, **options)


def residual(width, shortcut):
    return resnet20((5, 4, 3), 5, widths=(5, 7), blocks=(1, 1), width=width, shortcut=shortcut)


def images(channels, hidden):
    return cnn((6, 5, 2), channels=(channels,), window=3, hidden=hidden)


CNN_GROUPS = {"dense_1/kernel": {0: 3 * 2}}  # 6 x 5 pixels, halved once
LSTM_GROUPS = {"lstm/kernel": {2: 4}, "lstm/recurrent_kernel": {2: 4}, "lstm/bias": {1: 4}, "dense/kernel": {0: 2}}
CASES = {
    "cnn": (images(5, 7), images(3, 4), CNN_GROUPS, (6, 5, 2)),
    "bilstm": (text(embedding_features=6, units=5), text(embedding_features=4, units=3), LSTM_GROUPS, None),
    "resnet": (residual(1.0, "projection_all"), residual(0.6, "projection_all"), {}, (5, 4, 3)),
    "resnet, padding": (residual(1.0, "padding"), residual(0.6, "padding"), {}, (5, 4, 3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick_cases(1)
def test_a_narrow_model_is_the_full_one_whose_other_parameters_are_zero(case):
    """In evaluation and in training; without the groups, where there are any, it is another function."""
    full, narrow, axis_groups, sample_shape = CASES[case]
    inputs = jnp.asarray(RNG.integers(0, 11, (4, 5)), jnp.int32)
    if sample_shape is not None:
        inputs = jnp.asarray(RNG.normal(size=(4, *sample_shape)), jnp.float32)

    def outputs(model, variables):
        if not model.has_training_mode:
            return model.apply(variables.params, inputs)
        logits, state = model.apply_train(variables.params, variables.model_state, inputs, jnp.ones(4), KEY)
        return logits, model.apply(Variables(variables.params, state), inputs)

    @jax.jit
    def both(variables):
        actual = []
        for groups in (axis_groups, {}):
            slices = leading_slices(shapes(full), shapes(narrow), groups)
            part = slices.take(variables)
            embedded = slices.put(jax.tree.map(jnp.zeros_like, variables), part)
            actual.append((outputs(narrow, part), outputs(full, embedded)))
        return actual

    variables = Variables(randomized(shapes(full).params), None)
    if full.has_training_mode:
        variables = Variables(variables.params, jax.tree.map(lambda s: s + 0.5, randomized(shapes(full).model_state)))
    (ours, theirs), (wrong, other) = both(variables)
    for mine, whole in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-5)
        assert np.ptp(mine) > 1e-3
    if axis_groups:
        assert np.abs(np.asarray(wrong) - np.asarray(other)).max() > 1e-3


def test_what_is_put_is_taken_back_and_all_else_stays_bit_for_bit():
    """A slice of every run is taken: axis 0 holds three of them."""

    def of(values):
        return Variables({"a": {"b": jnp.asarray(values)}}, None)

    array, part = (RNG.normal(size=shape).astype(np.float32) for shape in ((6, 4, 5), (3, 2, 5)))
    slices = leading_slices(of(array), of(part), {"a/b": {0: 3, 1: 1}})
    held = np.ix_([0, 2, 4], [0, 1], range(5))
    np.testing.assert_array_equal(slices.take(of(array)).params["a"]["b"], array[held])
    actual = slices.put(of(array), of(part))
    np.testing.assert_array_equal(slices.take(actual).params["a"]["b"], part)
    array[held] = part
    np.testing.assert_array_equal(actual.params["a"]["b"], array)
