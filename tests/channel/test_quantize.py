"""Quantisers: unbiased, of bounded variance, within their range, and how far apart two outputs can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals

from jaxfl.channel import ternary_quantizer, uniform_quantizer

# Uniform numbers 0, 1/N, ..., (N - 1)/N, values that are multiples of step/N, and a step that is a power of two: the
# exact distribution of the outputs, without rounding.
NUM_UNIFORM, STEP = 64, 0.5
UNIFORM = jnp.arange(NUM_UNIFORM, dtype=jnp.float32) / NUM_UNIFORM
VALUES = np.arange(-160, 161) * STEP / NUM_UNIFORM  # 2.5 steps to both sides
QUANTIZERS = {
    "uniform": uniform_quantizer(STEP),
    "six levels": uniform_quantizer(STEP, levels=6),  # -3 to 2 steps
    "three levels": uniform_quantizer(STEP, levels=3),
    "ternary": ternary_quantizer(STEP),
}
RANGES = {"uniform": (-np.inf, np.inf), "six levels": (-1.5, 1.0), "three levels": (-0.5, 0.5), "ternary": (-0.5, 0.5)}


def outputs(name):
    """Every value under every uniform number, (values, uniform), float64."""
    apply = jax.vmap(QUANTIZERS[name].apply, in_axes=(None, 0), out_axes=1)
    rows = jnp.broadcast_to(UNIFORM.reshape(-1, 1), (NUM_UNIFORM, len(VALUES)))
    return np.asarray(apply(jnp.asarray(VALUES, jnp.float32), rows), np.float64)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_unbiased_in_the_range_and_saturated_beyond(name):
    np.testing.assert_array_equal(outputs(name).mean(axis=1), np.clip(VALUES, *RANGES[name]))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_variance(name):
    found = outputs(name)
    variance = found.var(axis=1)
    assert variance.max() == STEP**2 / 4
    assert np.abs(found - np.clip(VALUES, *RANGES[name])[:, None]).max() < STEP
    if name == "ternary":
        size = np.minimum(np.abs(VALUES), STEP)
        np.testing.assert_allclose(variance, size * (STEP - size), atol=1e-15)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_values_are_on_the_grid_and_in_the_range(name):
    found = outputs(name)
    np.testing.assert_array_equal(np.unique(found), np.unique(np.clip(np.arange(-3, 4) * STEP, *RANGES[name])))
    zero = int(np.flatnonzero(VALUES == 0)[0])
    assert (found[zero] == 0).all(), "zero stays zero"
    if name == "ternary":
        assert (found * VALUES[:, None] >= 0).all(), "never of the other sign"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_total_variation_of_two_values(name):
    """At most |x - x'| / step for all pairs of values, reached by some of every distance up to a step."""
    found = outputs(name)
    distributions = (found[:, :, None] == np.unique(found)).mean(axis=1)  # (values, outputs)
    variation = np.abs(distributions[:, None] - distributions[None]).sum(axis=2) / 2
    distance = np.abs(VALUES[:, None] - VALUES[None])
    assert (variation <= distance / STEP + 1e-12).all()
    for steps in range(NUM_UNIFORM + 1):
        pairs = np.isclose(distance, steps * STEP / NUM_UNIFORM)
        np.testing.assert_allclose(variation[pairs].max(), steps / NUM_UNIFORM, atol=1e-12)


@pytest.mark.statistical
@pytest.mark.parametrize("quantizer", [uniform_quantizer(0.3), ternary_quantizer(1.3)])
def test_unbiased_for_drawn_numbers(quantizer):
    """At values and a step that are no binary fractions, within 5 standard errors."""
    values = jnp.array([-1.17, -0.31, 0.004, 0.46, 1.29])
    draws = 40_000
    rows = jnp.broadcast_to(values, (draws, 5))
    found = np.asarray(quantizer.apply(rows, jax.random.uniform(jax.random.key(0), rows.shape)), np.float64)
    error = found.std(axis=0) / np.sqrt(draws)
    assert (np.abs(found.mean(axis=0) - np.asarray(values)) < 5 * error).all()


def test_bits():
    assert uniform_quantizer(0.1).bits == 32
    assert uniform_quantizer(0.1, levels=256).bits == 8
    np.testing.assert_allclose([uniform_quantizer(0.1, levels=3).bits, ternary_quantizer(1.0).bits], np.log2(3))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_not_a_number_stays(name):
    """Also compiled, where XLA turns a product with 0 or 1 into a selection."""
    for apply in (QUANTIZERS[name].apply, jax.jit(QUANTIZERS[name].apply)):
        assert np.isnan(apply(jnp.full(2, np.nan), jnp.array([0.0, 0.5]))).all()


def test_traced_steps_and_scalars():
    """A step may be swept, and a scalar quantised."""
    values = jax.vmap(lambda step: uniform_quantizer(step, levels=5).apply(jnp.float32(0.8), jnp.float32(0.5)))
    np.testing.assert_allclose(values(jnp.array([0.3, 0.5, 1.0])), [0.6, 1.0, 1.0], rtol=1e-6)
    values = jax.vmap(lambda threshold: ternary_quantizer(threshold).apply(jnp.float32(-0.8), jnp.float32(0.5)))
    np.testing.assert_array_equal(values(jnp.array([1.0, 2.0])), [-1.0, 0.0])


test_refuses = refusals(
    [
        (lambda: uniform_quantizer(0.0), "step"),
        (lambda: uniform_quantizer(jnp.ones(3)), "step"),
        (lambda: uniform_quantizer(0.1, levels=1), "levels"),
        (lambda: uniform_quantizer(0.1, levels=True), "levels"),
        (lambda: ternary_quantizer(-1.0), "threshold"),
        (lambda: ternary_quantizer(np.nan), "threshold"),
    ]
)
