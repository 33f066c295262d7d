"""Max-pooling against flax's, in value, gradient and at ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxfl.core import ArgumentError
from jaxfl.models.kernels.pooling import max_pool

RNG = np.random.default_rng(0)


def images(*shape, ties):
    values = RNG.integers(0, 3, size=shape) if ties else RNG.permutation(np.prod(shape)).reshape(shape)
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("size", "window"), [((6, 8), (2, 2)), ((7, 5), (2, 2)), ((7, 9), (3, 2))])
@pytest.mark.quick_cases(1)
def test_equals_flax_max_pool_in_value_and_gradient(size, window, ties):
    inputs = images(2, *size, 3, ties=ties)
    ours, pull_back = jax.vjp(lambda x: max_pool(x, window), inputs)
    theirs, flax_pull_back = jax.vjp(lambda x: nnx.max_pool(x, window, strides=window), inputs)
    np.testing.assert_array_equal(ours, theirs)
    direction = jnp.asarray(RNG.normal(size=ours.shape), jnp.float32)
    np.testing.assert_array_equal(pull_back(direction)[0], flax_pull_back(direction)[0])


def test_at_ties_the_whole_gradient_goes_to_the_first_maximum():
    window = jnp.array([[1.0, 5.0], [5.0, 5.0]])[None, :, :, None]
    gradient = jax.grad(lambda x: 2.0 * max_pool(x).sum())(window)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[0.0, 2.0], [0.0, 0.0]])
    constant = jax.grad(lambda x: max_pool(x).sum())(jnp.zeros((1, 2, 2, 1)))
    np.testing.assert_array_equal(constant[0, :, :, 0], [[1.0, 0.0], [0.0, 0.0]])


def test_derivatives_agree_under_vmap_and_in_both_modes():
    inputs, tangents = images(3, 2, 4, 6, 2, ties=True), jnp.asarray(RNG.normal(size=(3, 2, 4, 6, 2)), jnp.float32)

    def along(x, t):
        forward = jax.jvp(max_pool, (x,), (t,))[1].sum()
        return forward, jnp.vdot(jax.grad(lambda x: max_pool(x).sum())(x), t)

    forward, reverse = jax.jit(jax.vmap(along))(inputs, tangents)
    np.testing.assert_allclose(forward, reverse, rtol=1e-5)
    assert np.abs(forward).min() > 0


def test_a_window_larger_than_the_image_is_named():
    with pytest.raises(ArgumentError, match=r"window: must fit into the input; got window \(2, 2\) on .*\(1, 4\)"):
        max_pool(jnp.zeros((1, 1, 4, 1)))
