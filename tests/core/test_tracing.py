"""The canonical form: the same numbers, and never taken from a cache of the platform's own."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.tracing import canonical_form, is_canonical, suits_cpu
from jaxfl.models import cnn


def test_the_canonical_form_has_the_same_values():
    model = cnn((9, 9, 3), channels=(5,), window=3, hidden=None)
    params, images = model.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 9, 9, 3), jnp.float32)
    with canonical_form():
        outputs = jax.jit(model.apply)(params, images)
    np.testing.assert_allclose(outputs, jax.jit(model.apply)(params, images), rtol=1e-5, atol=1e-6)


def test_a_function_that_was_traced_before_is_traced_anew(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    forms = jax.jit(lambda x: x + jnp.array([suits_cpu(), is_canonical()], jnp.float32))
    for _ in range(2):
        np.testing.assert_array_equal(forms(jnp.zeros(2, jnp.float32)), [1, 0])
        with canonical_form():
            np.testing.assert_array_equal(forms(jnp.zeros(2, jnp.float32)), [0, 1])
