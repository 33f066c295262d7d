"""Factored gradients of a normalization's scale and bias; `test_layers` compares them with per-sample ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.models.normalization import factored_scale_and_bias


@pytest.mark.parametrize("far", [1e-7, 1e-5, 1e-3])
def test_no_norm_is_below_the_gradients_where_its_terms_cancel(far):
    """Errors that alternate in sign over positions with equal inputs, against float64."""
    rng = np.random.default_rng(0)
    signs = np.where(np.arange(48) % 2 == 0, 1.0, -1.0).reshape(1, 48, 1)
    inputs = np.tile(rng.normal(size=(20, 1, 8)), (1, 48, 1)).astype(np.float32)
    errors = (signs * rng.normal(size=(20, 1, 8)) * (1 + far * rng.normal(size=(20, 48, 8)))).astype(np.float32)
    factored = factored_scale_and_bias(lambda values: values)("norm", False)

    @jax.jit
    def norms(inputs, errors):
        return factored.squared_norm(inputs, errors), factored.absolute_norm(inputs, errors)

    squared, absolute = norms(jnp.asarray(inputs), jnp.asarray(errors))
    wide = errors.astype(np.float64)
    rows = np.concatenate([(inputs * wide).sum(axis=1), wide.sum(axis=1)], axis=1)
    assert np.all(squared >= (1 - 1e-6) * (rows**2).sum(axis=1))
    assert np.all(absolute >= (1 - 1e-6) * np.abs(rows).sum(axis=1))
    np.testing.assert_allclose(absolute, np.abs(rows).sum(axis=1), atol=1e-4 * np.abs(errors).sum(axis=(1, 2)).max())
