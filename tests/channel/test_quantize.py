"""Quantisers: unbiased, of bounded variance, within their range, and how far apart two outputs can be."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import refusals

from jaxfl.channel import dithered_quantizer, float_quantizer, ternary_quantizer, uniform_quantizer

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
    "dithered": dithered_quantizer(2, STEP),
}
RANGES = {name: (-0.5, 0.5) for name in QUANTIZERS} | {"uniform": (-np.inf, np.inf), "six levels": (-1.5, 1.0)}
# The same formats, of bytes and two bytes, from another library.
FORMATS = {
    (3, 4): ml_dtypes.float8_e3m4,
    (4, 3): ml_dtypes.float8_e4m3,
    (5, 2): ml_dtypes.float8_e5m2,
    (5, 10): np.float16,
    (8, 7): ml_dtypes.bfloat16,
}


def outputs(name):
    """Every value under every uniform number, (values, uniform), float64."""
    apply = jax.vmap(QUANTIZERS[name].apply, in_axes=(None, 0), out_axes=1)
    rows = jnp.broadcast_to(UNIFORM.reshape(-1, 1), (NUM_UNIFORM, len(VALUES)))
    return np.asarray(apply(jnp.asarray(VALUES, jnp.float32), rows), np.float64)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_unbiased_in_the_range_and_saturated_beyond(name):
    np.testing.assert_array_equal(outputs(name).mean(axis=1), np.clip(VALUES, *RANGES[name]))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_in_equal_steps_the_error_is_below_a_step_and_the_variance_at_most_a_quarter_of_its_square(name):
    actual = outputs(name)
    variance = actual.var(axis=1)
    assert variance.max() == STEP**2 / 4
    assert np.abs(actual - np.clip(VALUES, *RANGES[name])[:, None]).max() < STEP
    if name == "ternary":
        size = np.minimum(np.abs(VALUES), STEP)
        np.testing.assert_allclose(variance, size * (STEP - size), atol=1e-15)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_values_are_on_the_grid_and_in_the_range(name):
    actual = outputs(name)
    np.testing.assert_array_equal(np.unique(actual), np.unique(np.clip(np.arange(-3, 4) * STEP, *RANGES[name])))
    zero = int(np.flatnonzero(VALUES == 0)[0])
    assert (actual[zero] == 0).all(), "zero stays zero"
    assert not np.signbit(actual[actual == 0]).any(), "a zero tells no sign"
    if name == "ternary":
        assert (actual * VALUES[:, None] >= 0).all(), "never of the other sign"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_in_equal_steps_distributions_are_at_most_the_distance_in_steps_apart(name):
    """At most |x - x'| / step for all pairs of values, reached by some of every distance up to a step."""
    actual = outputs(name)
    distributions = (actual[:, :, None] == np.unique(actual)).mean(axis=1)  # (values, outputs)
    variation = np.abs(distributions[:, None] - distributions[None]).sum(axis=2) / 2
    distance = np.abs(VALUES[:, None] - VALUES[None])
    assert (variation <= distance / STEP + 1e-12).all()
    for steps in range(NUM_UNIFORM + 1):
        pairs = np.isclose(distance, steps * STEP / NUM_UNIFORM)
        np.testing.assert_allclose(variation[pairs].max(), steps / NUM_UNIFORM, atol=1e-12)


def format_numbers(exponent_bits, mantissa_bits):
    """The finite numbers of a format that are at least 0, ascending, float64; normal ones where XLA has no others."""
    dtype = FORMATS[exponent_bits, mantissa_bits]
    patterns = np.arange(2 ** (exponent_bits + mantissa_bits), dtype=f"uint{8 * np.dtype(dtype).itemsize}")
    with np.errstate(invalid="ignore"):  # of NaN
        numbers = patterns.view(dtype).astype(np.float64)
    smallest = 2.0**-126 if exponent_bits == 8 else 0
    return numbers[np.isfinite(numbers) & (numbers >= smallest)]


@pytest.mark.parametrize("bits", FORMATS)
def test_float_is_unbiased_between_all_neighbors_of_the_format(bits):
    """Exactly, under 16 equidistant uniform numbers; among them 0, powers of two and the last two numbers."""
    numbers = format_numbers(*bits)
    below, above = numbers[:-1, None], numbers[1:, None]
    values = (below + (above - below) * np.arange(17) / 16)[..., None]
    uniform = np.broadcast_to(np.arange(16) / 16, (*values.shape[:-1], 16))
    apply = jax.jit(float_quantizer(*bits).apply)
    for sign in (1, -1):
        rows = jnp.asarray(np.broadcast_to(sign * values, uniform.shape), jnp.float32)
        actual = sign * np.asarray(apply(rows, jnp.asarray(uniform, jnp.float32)), np.float64)
        assert ((actual == below[..., None]) | (actual == above[..., None])).all(), "all values are of the format"
        np.testing.assert_array_equal(actual.mean(axis=-1), values[..., 0])


@pytest.mark.parametrize(("mantissa_bits", "largest"), [(0, 0.125), (7, 1.514e-5), (10, 2.382e-7)])
def test_float_variance_in_proportion_to_the_square(mantissa_bits, largest):
    """Below the bound for all normal numbers, and reached; above it below them, but bounded by a quarter step."""
    num_uniform, step = 1024, 2.0**-mantissa_bits
    quantizer = float_quantizer(5, mantissa_bits)
    uniform = jnp.arange(num_uniform, dtype=jnp.float32) / num_uniform

    def variance(values):
        rows = [jnp.broadcast_to(row, (num_uniform, values.size)) for row in (jnp.asarray(values), uniform[:, None])]
        return np.asarray(quantizer.apply(*rows), np.float64).var(axis=0)

    fractions = np.arange(256, dtype=np.float32) / 256
    for smallest in (2.0**-14, 1.0, 2.0**14):
        # In the first and the last step of a power of two, from the smallest normal number on.
        values = np.concatenate([smallest * (1 + step * fractions), smallest * (2 - step * fractions)])
        relative = variance(values) / values.astype(np.float64) ** 2
        assert 0.999 * largest < relative.max() <= step**2 / (4 * (1 + step)) <= 1.001 * largest
    width = 2.0**-14 * step
    values = width * fractions
    assert variance(values).max() == width**2 / 4
    assert (variance(values)[1:] > largest * values[1:] ** 2).any(), "a fixed grid has no such bound"


# Values, what they become under the uniform number 0.5, how many are beyond the range, and what infinity becomes.
BEYOND = {
    "uniform": (uniform_quantizer(0.5), [2.0**30 - 64, -(2.0**30)], [2.0**30 - 64, -(2.0**30)], 1, np.inf),
    "six levels": (QUANTIZERS["six levels"], [-1.5, 1.0, -1.51, 1.01], [-1.5, 1.0, -1.5, 1.0], 2, 1.0),
    "ternary": (ternary_quantizer(0.3), [-0.3, 0.3, -0.30001, 1.0, 0.0], [-0.3, 0.3, -0.3, 0.3, 0.0], 2, 0.3),
    "dithered": (dithered_quantizer(16, 0.3), [-0.3, 0.3, -0.30001, 1.0, 0.0], [-0.3, 0.3, -0.3, 0.3, 0.0], 2, 0.3),
    "float": (float_quantizer(4, 3), [-240.0, 240.0, 240.1, -1e9, 0.0], [-240.0, 240.0, 240.0, -240.0, 0.0], 2, np.inf),
    "float32 itself": (float_quantizer(8, 23), [3.4028235e38, 1.1, -0.3], [3.4028235e38, 1.1, -0.3], 0, np.inf),
}


@pytest.mark.parametrize("name", BEYOND)
def test_values_beyond_the_range_saturate_and_are_counted(name):
    quantizer, values, expected, count, _ = BEYOND[name]
    values = jnp.array(values, jnp.float32)
    np.testing.assert_array_equal(quantizer.apply(values, jnp.full_like(values, 0.5)), np.array(expected, np.float32))
    actual = jax.jit(quantizer.overflows)(values)
    assert (actual.dtype, actual.shape, int(actual)) == (jnp.int32, (), count)
    by_node = jax.vmap(quantizer.overflows)(jnp.stack([values, jnp.zeros_like(values)]))
    np.testing.assert_array_equal(by_node, [count, 0])


@pytest.mark.parametrize("name", BEYOND)
def test_infinities_are_counted_and_not_a_number_is_not(name):
    """Also compiled, where XLA turns a product with 0 into a selection."""
    quantizer, end = BEYOND[name][0], BEYOND[name][-1]
    values = jnp.array([np.inf, -np.inf, np.nan], jnp.float32)
    assert int(quantizer.overflows(values)) == 2
    expected = np.array([end, -1.5 if name == "six levels" else -end, np.nan], np.float32)
    for apply in (quantizer.apply, jax.jit(quantizer.apply)):
        for uniform in (0.0, 0.5):
            np.testing.assert_array_equal(apply(values, jnp.full_like(values, uniform)), expected)


def test_programs_compute_in_the_dtype_of_the_values():
    """In float32 even where float64 is there."""
    values = jnp.ones((3, 4), jnp.float32)
    for quantizer, *_ in BEYOND.values():
        for program in (jax.make_jaxpr(quantizer.apply)(values, values), jax.make_jaxpr(quantizer.overflows)(values)):
            assert not {"float64", "int64", "uint64"} & set(str(program).replace(":", " ").replace("[", " ").split())
        batched = jax.vmap(quantizer.apply)(values, values / 2)
        np.testing.assert_array_equal(batched, quantizer.apply(values, values / 2))
        assert batched.dtype == jnp.float32


def test_bits():
    assert (float_quantizer(4, 3).bits, dithered_quantizer(12, 1.0).bits) == (8, 12)
    assert uniform_quantizer(0.1).bits == 32
    assert uniform_quantizer(0.1, levels=256).bits == 8
    np.testing.assert_allclose([uniform_quantizer(0.1, levels=3).bits, ternary_quantizer(1.0).bits], np.log2(3))


def test_traced_steps_and_scalars():
    """A step may be swept, and a scalar quantised."""
    values = jax.vmap(lambda step: uniform_quantizer(step, levels=5).apply(jnp.float32(0.8), jnp.float32(0.5)))
    np.testing.assert_allclose(values(jnp.array([0.3, 0.5, 1.0])), [0.6, 1.0, 1.0], rtol=1e-6)
    values = jax.vmap(lambda threshold: ternary_quantizer(threshold).apply(jnp.float32(-0.8), jnp.float32(0.5)))
    np.testing.assert_array_equal(values(jnp.array([1.0, 2.0])), [-1.0, 0.0])
    values = jax.vmap(lambda limit: dithered_quantizer(3, limit).apply(jnp.float32(-0.8), jnp.float32(0.5)))
    np.testing.assert_allclose(values(jnp.array([0.6, 3.0])), [-0.6, -1.0], rtol=1e-6)


test_refuses = refusals(
    [
        (lambda: uniform_quantizer(0.0), "step"),
        (lambda: uniform_quantizer(jnp.ones(3)), "step"),
        (lambda: uniform_quantizer(0.1, levels=1), "levels"),
        (lambda: uniform_quantizer(0.1, levels=True), "levels"),
        (lambda: ternary_quantizer(-1.0), "threshold"),
        (lambda: ternary_quantizer(np.nan), "threshold"),
        (lambda: dithered_quantizer(1, 1.0), "bits"),
        (lambda: dithered_quantizer(25, 1.0), "bits"),
        (lambda: dithered_quantizer(8, 0.0), "limit"),
        (lambda: dithered_quantizer(8, jnp.ones(2)), "limit"),
        (lambda: float_quantizer(1, 3), "exponent_bits"),
        (lambda: float_quantizer(9, 3), "exponent_bits"),
        (lambda: float_quantizer(4, -1), "mantissa_bits"),
        (lambda: float_quantizer(4, 24), "mantissa_bits"),
        (lambda: float_quantizer(4, 3).apply(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)), "values"),
    ]
)
