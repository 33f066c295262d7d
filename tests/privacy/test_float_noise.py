"""Leakage by noise in float32, and none by noise on a grid: which numbers a state can release at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfl
from jaxfl.core.normals import _pair
from jaxfl.privacy import grid_noise
from jaxfl.privacy.dominating_pairs import gaussian_epsilon

D, KEY = 20_000, jax.random.key(1)
# Of noise that makes one release cost epsilon 0.1, where one sample changes it by 1: in the L2 norm, at delta 1e-5, for
# Gaussian noise, in the L1 norm for Laplace noise.
GAUSSIAN_STD = 30.7496
LAPLACE_SCALE = 10.0


@jax.jit  # as the samplers are: an operation by itself may round otherwise
def every_normal_and_laplace_number():
    """All numbers that JAX's samplers can give: one for each of 23 random bits."""
    bits = jnp.arange(2**23, dtype=jnp.uint32) | np.uint32(0x3F800000)
    unit = jax.lax.bitcast_convert_type(bits, jnp.float32) - np.float32(1)

    def between(low):
        return jnp.maximum(low, unit * (np.float32(1) - low) + low)

    normal = np.float32(np.sqrt(2)) * jax.lax.erf_inv(between(np.nextafter(np.float32(-1), np.float32(0))))
    signed = between(np.float32(-1 + np.finfo(np.float32).epsneg))
    return {"gaussian": normal, "laplace": jnp.sign(signed) * jnp.log1p(-jnp.abs(signed))}


@pytest.fixture(scope="module")
def standard():
    return {name: np.sort(numbers) for name, numbers in every_normal_and_laplace_number().items()}


def share_possible(released, values, noises):
    """Share of the released float32 numbers that are the sum of the value and one of the sorted noises."""
    wanted = released.astype(np.float64) - values
    reach = np.spacing(np.maximum(np.abs(released), np.abs(values))).astype(np.float64)
    first = np.searchsorted(noises, (wanted - reach).astype(np.float32))
    last = np.searchsorted(noises, np.nextafter((wanted + reach).astype(np.float32), np.float32(np.inf)), "right")
    possible = np.zeros(len(released), bool)
    for step in range(int((last - first).max())):
        place = np.minimum(first + step, len(noises) - 1)
        possible |= (values + noises[place] == released) & (first + step < last)
    return possible.mean()


def share_of_pairs_possible(released, values, std, num_pairs, num_angles):
    """Share of the first released pairs that some words give at these values: all near the exact ones are tried."""
    found, make_pairs = 0, jax.jit(_pair)
    for place in range(0, 2 * num_pairs, 2):
        mine, state = released[place : place + 2], values[place : place + 2]
        x, y = (mine.astype(np.float64) - state) / std
        reach = np.spacing(np.maximum(np.abs(mine), np.abs(state))).max() / std
        radius = np.hypot(x, y)
        # Radii half a float apart, as exp(-radius^2 / 2) = (high + 1 / 2) 2^-32.
        radii = radius + (1.5 * reach + 4e-7 * radius) * np.linspace(-1, 1, 48)
        high = np.rint(np.exp(-(radii**2) / 2) * 2.0**32 - 0.5).clip(0, 2**32 - 1)
        is_swapped = abs(x) < abs(y)
        sine, cosine = (x, y) if is_swapped else (y, x)
        angle = np.arctan2(np.copysign(1, cosine) * sine, abs(cosine))
        steps = np.floor(angle / (np.pi / 2) * 2**30) + np.arange(-num_angles, num_angles)
        low = steps.clip(-(2**29), 2**29 - 1) % 2**30 + 2.0**30 * is_swapped + 2.0**31 * (cosine < 0)
        words = np.repeat(high, len(low)).astype(np.uint32), np.tile(low, len(high)).astype(np.uint32)
        pairs = map(np.asarray, make_pairs(*words))
        sums = [value + np.float32(std) * number for value, number in zip(state, pairs, strict=True)]
        found += ((sums[0] == mine[0]) & (sums[1] == mine[1])).any()
    return found / num_pairs


def neighbors(rng, size, order):
    """Two states whose difference has norm 1."""
    values, change = (size * rng.normal(size=D)).astype(np.float32), rng.normal(size=D)
    return values, (values + change / np.linalg.norm(change, order)).astype(np.float32)


@pytest.mark.parametrize(
    ("noise", "size", "share"),
    [
        (jaxfl.gaussian(GAUSSIAN_STD, generator="inverse"), 0.1, 0.12),
        (jaxfl.laplace(LAPLACE_SCALE), 0.1, 0.09),
        (jaxfl.gaussian(GAUSSIAN_STD, generator="inverse"), 6.5 * GAUSSIAN_STD, 0.66),
        (jaxfl.laplace(LAPLACE_SCALE), 6.0 * LAPLACE_SCALE, 0.58),
    ],
)
def test_float_noise_tells_neighboring_states_apart(noise, size, share, standard):
    """At epsilon 0.1: every released number can come from the true state, a part of them from the other."""
    values, other = neighbors(np.random.default_rng(0), size, 2 if noise.distribution == "gaussian" else 1)
    row = jnp.asarray(values)[None]
    released = np.asarray(noise.release(row, noise.draw(KEY, row)))[0]
    noises = np.float32(noise.noise_scale) * standard[noise.distribution]
    assert share_possible(released, values, noises) == 1
    assert share_possible(released, other, noises) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("size", "share", "num_pairs", "num_angles"), [(0.1, 0.63, 500, 300), (6.5 * GAUSSIAN_STD, 0.95, 100, 3000)]
)
def test_pairs_of_float_noise_do_as_well(size, share, num_pairs, num_angles):
    """Radii are floats: circles that are an ulp apart pass by some pairs of floats."""
    values, other = neighbors(np.random.default_rng(0), size, 2)
    noise, row = jaxfl.gaussian(GAUSSIAN_STD), jnp.asarray(values)[None]
    released = np.asarray(noise.release(row, noise.draw(KEY, row)))[0]
    true, neighboring = (
        share_of_pairs_possible(released, state, GAUSSIAN_STD, num_pairs, num_angles) for state in (values, other)
    )
    assert true > 0.96, "1 where users run: the programs of tests round a few pairs otherwise than the sampler's"
    assert neighboring == pytest.approx(share, abs=0.04)


def test_the_noise_is_that_of_the_epsilon_that_is_named():
    assert gaussian_epsilon(1 / GAUSSIAN_STD, 1e-5) == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("size", [0.1, 6.5 * GAUSSIAN_STD])
def test_grid_noise_does_not(size):
    """Every released number can come from both: as a step that noise reaches from either."""
    values, other = neighbors(np.random.default_rng(0), size, 2)
    noise, bits = jaxfl.grid_gaussian(GAUSSIAN_STD), 12
    row = jnp.asarray(values)[None]
    released = np.asarray(noise.release(row, noise.draw(KEY, row)))[0]
    largest = len(grid_noise._thresholds(bits))
    step = np.float32(GAUSSIAN_STD) * np.float32(2.0**-bits)
    assert (values != other).mean() > 0.99
    for state in (values, other):
        start = jnp.asarray(state)[None]
        steps = np.rint(released / step) - np.rint(
            np.asarray(noise.release(start, jnp.zeros((1, D), jnp.int32)))[0] / step
        )
        assert np.abs(steps).max() <= largest
        again = noise.release(start, jnp.asarray(steps, jnp.int32)[None])
        np.testing.assert_array_equal(again[0], released)
