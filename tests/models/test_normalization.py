"""Group normalization against flax's, and where a fast formula for the variance fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normals, refused

from jaxfl.core.platform import tracing_for
from jaxfl.models.normalization import group_norm

RNG = np.random.default_rng(0)
normal = normals(RNG)


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def platform(request):
    """Every test runs in the form of a CPU, and in that of a GPU."""
    with tracing_for(request.param):
        yield


@pytest.mark.parametrize("num_groups", [1, 3, 6])
def test_equals_flax_group_norm_in_value_and_in_every_gradient(num_groups):
    images, scale, bias, direction = normal(4, 5, 3, 6), normal(6), normal(6), normal(4, 5, 3, 6)

    def ours(images, scale, bias):
        return jnp.sum(group_norm(images, scale, bias, num_groups) * direction)

    def theirs(images, scale, bias):
        module = nnx.GroupNorm(6, num_groups=num_groups, rngs=nnx.Rngs(0))
        nnx.update(module, nnx.State({"scale": scale, "bias": bias}))
        return jnp.sum(module(images) * direction)

    found, expected = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(images, scale, bias) for fn in (ours, theirs))
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_a_samples_output_does_not_depend_on_other_samples():
    images, scale, bias = normal(3, 4, 4, 4), normal(4), normal(4)
    together = group_norm(images, scale, bias, 2)
    changed = group_norm(images.at[1:].multiply(100.0), scale, bias, 2)
    np.testing.assert_array_equal(together[0], changed[0])
    assert np.abs(together[1] - changed[1]).max() > 0


def test_accurate_where_the_mean_is_large_against_the_deviation():
    deviation = RNG.integers(-8, 9, size=(1, 6, 6, 2)) / 8.0  # sums with 4096 are exact in float32
    images = jnp.asarray(4096.0 + deviation, jnp.float32)
    expected = (deviation - deviation.mean()) / deviation.std()
    found = group_norm(images, jnp.ones(2, jnp.float32), jnp.zeros(2, jnp.float32), 1)
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_accurate_where_the_first_row_stands_out():
    """Its mean is what shifts the numbers where they are read once."""
    deviation = RNG.integers(-8, 9, size=(1, 16, 4, 2)) / 8.0
    deviation[:, 0] += 128.0
    images = jnp.asarray(4096.0 + deviation, jnp.float32)
    found = group_norm(images, jnp.ones(2, jnp.float32), jnp.zeros(2, jnp.float32), 1)
    np.testing.assert_allclose(found, (deviation - deviation.mean()) / deviation.std(), atol=1e-4)


def test_equal_numbers_become_the_bias_with_finite_gradients():
    images, bias = jnp.full((1, 2, 2, 2), 5.0), jnp.array([1.0, -2.0])

    def total(images, scale):
        out = group_norm(images, scale, bias, 2)
        return jnp.sum(out * jnp.arange(8.0).reshape(1, 2, 2, 2)), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(images, jnp.ones(2))
    np.testing.assert_array_equal(out, jnp.broadcast_to(bias[None, None, None, :], out.shape))
    assert all(np.isfinite(leaf).all() for leaf in gradients)


@pytest.mark.parametrize("num_groups", [0, 4])
def test_bad_groups_are_named(num_groups):
    refused(lambda: group_norm(normal(1, 2, 2, 6), jnp.ones(6), jnp.zeros(6), num_groups), "num_groups")
