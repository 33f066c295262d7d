"""Threefry in one kernel: the numbers of jax.random, bit for bit, without its loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.core import ArgumentError, Purpose, node_keys, one_kernel, purpose_key, run_key
from jaxfl.core.keys import leaf_key, leaf_keys
from jaxfl.core.threefry import fold_in

KEY = jax.random.fold_in(jax.random.key(3), 17)
DRAWS = {
    "normal": lambda key: jax.random.normal(key, (3, 700), jnp.float32),
    "normal bfloat16": lambda key: jax.random.normal(key, (9,), jnp.bfloat16),
    "laplace": lambda key: jax.random.laplace(key, (11,), jnp.float32),
    "bits 32": lambda key: jax.random.bits(key, (2, 3, 4), jnp.uint32),
    "bits 16": lambda key: jax.random.bits(key, (9,), jnp.uint16),
    "bits 8": lambda key: jax.random.bits(key, (9,), jnp.uint8),
    "randint": lambda key: jax.random.randint(key, (40,), 0, 7, jnp.int32),
    "bernoulli": lambda key: jax.random.bernoulli(key, jnp.float32(0.3), (40,)),
    "permutation": lambda key: jax.random.permutation(key, 40),
    "split": lambda key: jax.random.key_data(jax.random.split(key, (2, 3))),
    "fold_in": lambda key: jax.random.key_data(jax.random.fold_in(key, 2**31 + 5)),
    "scalar": lambda key: jax.random.uniform(key, (), jnp.float32),
    "nothing": lambda key: jax.random.normal(key, (0,), jnp.float32),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.quick_cases(2)
def test_numbers_are_those_of_jax_random(name):
    draw = DRAWS[name]
    expected = draw(KEY)
    assert (expected.shape, expected.dtype) == (draw(one_kernel(KEY)).shape, draw(one_kernel(KEY)).dtype)
    np.testing.assert_array_equal(draw(one_kernel(KEY)), expected)


def test_numbers_are_those_of_jax_random_with_64_bits():
    with jax.enable_x64(True):
        for dtype in (jnp.uint64, jnp.uint32):
            draw = jax.random.bits(one_kernel(KEY), (6,), dtype)
            assert draw.dtype == dtype
            np.testing.assert_array_equal(draw, jax.random.bits(KEY, (6,), dtype))


def test_numbers_are_those_of_jax_random_over_nodes_and_in_a_compiled_program():
    keys = node_keys(KEY, 4)
    draw = jax.jit(jax.vmap(lambda key: jax.random.normal(one_kernel(key), (50,), jnp.float32)))
    np.testing.assert_array_equal(draw(keys), [jax.random.normal(key, (50,), jnp.float32) for key in keys])


@pytest.mark.parametrize("data", [0, 5, 2**32 - 1, jnp.int32(7), jnp.uint32(2**31 + 5), jnp.int32(-1)])
def test_the_key_is_that_of_jax_fold_in(data):
    actual = fold_in(KEY, data)
    assert actual.dtype == KEY.dtype
    assert actual == jax.random.fold_in(KEY, data)


def test_keys_of_other_generators_and_shapes_are_left_to_jax():
    """`fold_in` of several keys, or of several numbers, is refused as JAX refuses it."""
    keys = jax.random.split(KEY, 4)
    with pytest.raises(ValueError, match="fold_in accepts a single key"):
        fold_in(keys, 3)
    with pytest.raises(TypeError):
        fold_in(KEY, jnp.arange(2))
    other = jax.random.key(0, impl="rbg")
    assert one_kernel(other).dtype == other.dtype
    assert fold_in(other, 5) == jax.random.fold_in(other, 5)


def test_numbers_follow_the_flag_by_which_jax_counts():
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(jax.random.normal(one_kernel(KEY), (6,)), jax.random.normal(KEY, (6,)))


def test_no_loop_in_the_compiled_program():
    draw = jax.jit(lambda key: jax.random.normal(one_kernel(key), (1000,), jnp.float32))
    text = draw.lower(KEY).compile().as_text()
    assert text is not None
    assert "while(" not in text


@pytest.mark.parametrize("num_leaves", [0, 1, 5])
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_of_leaves_are_those_that_each_gets(implementation, num_leaves):
    key = jax.random.key(3, impl=implementation)
    actual = leaf_keys(key, num_leaves)
    assert actual.shape == (num_leaves,)
    for leaf in range(num_leaves):
        assert actual[leaf] == leaf_key(key, leaf)


def test_a_key_that_is_made_apart_is_the_same():
    key = run_key(KEY, {"noise_std": 0.1}, "")
    for round_index in (0, jnp.int32(7)):
        expected = purpose_key(key, Purpose.BATCH, round_index)
        assert purpose_key(key, Purpose.BATCH, round_index, apart=True) == expected


def test_more_numbers_than_counters_are_refused():
    draw = jax.jit(lambda key: jax.random.bits(one_kernel(key), (2**16, 2**16, 2), jnp.uint32))
    with pytest.raises(ArgumentError, match=r"^shape: must hold at most 2\^32"):
        draw.lower(KEY)
