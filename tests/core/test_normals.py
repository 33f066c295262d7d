"""Normal numbers in pairs: their law, their independence, and how the program makes them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxfl.core import ArgumentError, node_keys
from jaxfl.core.normals import _pair, normals
from jaxfl.core.platform import tracing_for

KEY = jax.random.key(3)
SIZE = 4_000_000
ENDS = np.array([0, 1, 2, 2**29, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 2, 2**32 - 1])


@pytest.fixture(scope="module")
def numbers():
    return np.asarray(jax.jit(normals, static_argnums=1)(KEY, SIZE), np.float64)


def pair_in_float64(high, low):
    """The transform of the module's text, from words of uint32."""
    first, second = high.astype(np.float64), low.astype(np.float64)
    end = (np.minimum(first, 2.0**32 - 1 - first) + 0.5) / 2**32  # the distance to the nearer end of (0, 1), exact
    radius = np.sqrt(-2 * np.where(first < 2**31, np.log(end), np.log1p(-end)))
    # 30 bits of the angle as a number in two's complement, half a step up.
    steps = np.where(second % 2**30 < 2**29, second % 2**30, second % 2**30 - 2**30) + 0.5
    sine, cosine = np.sin(np.pi / 2 * steps / 2**30), np.cos(np.pi / 2 * steps / 2**30)
    radius = np.where(second < 2**31, radius, -radius)
    is_swapped = second % 2**31 >= 2**30
    return radius * np.where(is_swapped, sine, cosine), radius * np.where(is_swapped, cosine, sine)


def test_a_pair_is_that_of_float64():
    rng = np.random.default_rng(0)
    high, low = (np.concatenate([np.repeat(ENDS, len(ENDS)), rng.integers(0, 2**32, 1_000_000)]) for _ in range(2))
    low[: len(ENDS) ** 2] = np.tile(ENDS, len(ENDS))
    pair = jax.jit(_pair)(high.astype(np.uint32), low.astype(np.uint32))
    for actual, expected in zip(pair, pair_in_float64(high, low), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=4e-7)


def test_the_largest_number_is_that_of_33_bits_and_none_is_0():
    high, low = np.array([0, 2**32 - 1], np.uint32), np.zeros(2, np.uint32)
    largest, smallest = np.hypot(*map(np.asarray, jax.jit(_pair)(high, low)))
    assert largest == pytest.approx(np.sqrt(2 * 33 * np.log(2)), rel=1e-6)
    assert smallest == pytest.approx(2.0**-16, rel=1e-6)
    angles = np.concatenate([np.arange(2**16), 2**30 - 1 - np.arange(2**16), ENDS]).astype(np.uint32)
    assert all((np.asarray(number) != 0).all() for number in jax.jit(_pair)(np.full_like(angles, 7), angles))


@pytest.mark.statistical
def test_the_law_is_normal(numbers):
    for part in (numbers[::2], numbers[1::2]):
        assert scipy.stats.kstest(part, "norm").pvalue > 1e-3
        assert scipy.stats.kstest(1.01 * part, "norm").pvalue < 1e-3, "1 % off is seen"
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs((numbers**power).mean() - mean) < 4 * np.sqrt(variance / SIZE)


@pytest.mark.statistical
def test_small_radii_and_far_tails_have_their_share():
    """Beyond 4 to 5 sigma, and where steps of 2^-24 in u would make radii k^(1/2) 3.5e-4."""
    draw = jax.jit(jax.vmap(partial(normals, size=1_000_000)))
    numbers = np.concatenate([np.ravel(draw(node_keys(jax.random.fold_in(KEY, part), 10))) for part in range(2)])
    radii = np.hypot(numbers[::2], numbers[1::2])
    for value, found in {4: np.abs(numbers) > 4, 4.5: np.abs(numbers) > 4.5, 5: np.abs(numbers) > 5}.items():
        expected = 2 * scipy.stats.norm.sf(value) * numbers.size
        assert abs(found.sum() - expected) < 4 * np.sqrt(expected)
    small = radii[radii < 0.006]
    expected = 0.006**2 / 2 * radii.size
    assert abs(small.size - expected) < 4 * np.sqrt(expected)
    assert scipy.stats.kstest(small**2 / 0.006**2, "uniform").pvalue > 1e-3
    assert np.unique(small).size == small.size, "of 302 values, 180 would repeat"


@pytest.mark.statistical
def test_the_two_of_a_pair_and_neighboring_pairs_are_independent(numbers):
    for shift in (1, 2, 3):
        for fn in (np.asarray, np.square, np.abs, np.sign, lambda x: np.abs(x) > 2):
            for first in (0, 1):
                one, other = (fn(numbers[start::2]).astype(float) for start in (first, first + shift))
                correlation = np.corrcoef(one[: len(other)], other[: len(one)])[0, 1]
                assert abs(correlation) < 5 / np.sqrt(SIZE / 2)
    angles = np.arctan2(numbers[1::2], numbers[::2]) / (2 * np.pi) + 0.5
    assert scipy.stats.kstest(angles, "uniform").pvalue > 1e-3


@pytest.mark.statistical
def test_numbers_are_independent_of_what_jax_random_draws_from_the_same_key():
    ours = np.asarray(normals(KEY, 200_000)).reshape(-1, 2)
    words = np.asarray(jax.random.key_data(jax.random.split(KEY, len(ours))), np.float64)  # hashes of the same places
    for mine in (np.hypot(*ours.T), np.arctan2(*ours.T), *ours.T):
        for theirs in (*words.T, words[:, 1] % 2**30, np.asarray(jax.random.normal(KEY, (len(ours),)))):
            ranks = [scipy.stats.rankdata(values) for values in (mine, theirs)]
            assert abs(np.corrcoef(*ranks)[0, 1]) < 5 / np.sqrt(len(ours))


def test_a_number_depends_on_its_key_and_its_place_only():
    for size in (0, 1, 2, 5):
        np.testing.assert_array_equal(normals(KEY, size), normals(KEY, 8)[:size])
    few, many = (jax.vmap(partial(normals, size=7))(node_keys(KEY, count)) for count in (2, 5))
    np.testing.assert_array_equal(few, many[:2])
    np.testing.assert_array_equal(few[1], normals(jax.random.fold_in(KEY, 1), 7))
    assert np.unique(many).size == many.size


def test_lanes_nodes_and_compiled_programs_have_the_same_bits():
    keys = jax.random.split(KEY, 3)
    nodes = jax.vmap(lambda key: jax.vmap(partial(normals, size=501))(node_keys(key, 4)))
    expected = [[normals(node, 501) for node in node_keys(key, 4)] for key in keys]
    np.testing.assert_array_equal(nodes(keys), expected)
    np.testing.assert_array_equal(jax.jit(nodes)(keys), expected)
    scaled = jax.jit(lambda keys: nodes(keys) * np.float32(2) + np.float32(0))  # among other operations
    np.testing.assert_array_equal(scaled(keys), 2 * np.asarray(expected))


def test_accelerators_have_the_same_numbers_to_rounding():
    with tracing_for("gpu"):
        lowered = jax.jit(normals, static_argnums=1).lower(KEY, 1001)
    assert "case" not in lowered.as_text(), "no branch, which an accelerator's host would wait for"
    np.testing.assert_allclose(lowered.compile()(KEY), normals(KEY, 1001), rtol=1e-6)


@pytest.mark.parametrize("lanes", [None, 2])
def test_a_pair_is_hashed_once_on_a_cpu(lanes):
    """In a sweep, too: the branch stays a branch, and only its kernel hashes, of which each of 20 rounds has a xor."""
    draw = partial(normals, size=1000)
    draw, keys = (draw, KEY) if lanes is None else (jax.vmap(draw), jax.random.split(KEY, lanes))
    text = jax.jit(lambda keys, x: x + draw(keys)).lower(keys, jnp.zeros((*keys.shape, 1000))).compile().as_text()
    assert text is not None
    assert text.count("conditional(") == 1
    pairs = "[2,250]" if lanes is None else f"[{lanes},2,250]"
    assert sum(f"u32{pairs}" in line and " xor(" in line for line in text.splitlines()) in range(20, 23)


def test_keys_of_other_generators_are_refused():
    for bad in (jax.random.key(0, impl="rbg"), jax.random.split(KEY, 2)):
        with pytest.raises(ArgumentError, match=r"^key: must be one threefry key"):
            normals(bad, 3)
