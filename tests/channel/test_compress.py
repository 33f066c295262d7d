"""Compressors: which numbers stay, what they cost, and how far the message is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference.runs import assert_same, by_node

from jaxfl.channel import rand_k, top_k
from jaxfl.core import ArgumentError

KEY = jax.random.key(5)
TREE = {"a": jax.random.normal(KEY, (4, 3, 5)), "b": jax.random.normal(jax.random.key(6), (4, 10))}


def test_top_k_keeps_the_largest_of_the_whole_model():
    sent, values = by_node(top_k(0.2).apply(TREE, None)), by_node(TREE)
    for row, kept in zip(values, sent, strict=True):
        largest = np.sort(np.abs(row))[-5]
        np.testing.assert_array_equal(kept, np.where(np.abs(row) >= largest, row, 0))
    errors = ((values - sent) ** 2).sum(1) / (values**2).sum(1)
    assert np.all(errors <= 1 - 5 / 25)
    assert (top_k(0.2).bits(25), rand_k(0.2).bits(25), top_k(0.01).bits(25)) == (5 * 37, 5 * 32, 37)


def test_the_first_of_equal_numbers_stay():
    assert top_k(0.5).apply(jnp.array([[1.0, -1.0, 1.0, 1.0]]), None).tolist() == [[1.0, -1.0, 0.0, 0.0]]


def test_rand_k_keeps_each_number_equally_often_and_nodes_differ():
    """Within 4 standard errors over 2,000 rounds; 5 of 25 numbers a node and round."""
    compressor = rand_k(0.2)
    rounds = jnp.arange(2000, dtype=jnp.int32)
    sent = jax.vmap(lambda k: compressor.apply(jax.tree.map(jnp.ones_like, TREE), compressor.draw(KEY, k, TREE)))(
        rounds
    )
    kept = np.concatenate([leaf.reshape(2000, 4, -1) for leaf in jax.tree.leaves(sent)], axis=2)
    assert set(np.unique(kept)) == {0.0, 1.0}
    assert np.all(kept.sum(axis=2) == 5)
    assert np.abs(kept.mean(axis=0) - 0.2).max() < 4.5 * np.sqrt(0.2 * 0.8 / 2000)
    assert not np.array_equal(kept[:, 0], kept[:, 1])


@pytest.mark.parametrize("make", [top_k, rand_k])
def test_a_share_of_one_keeps_all_bits(make):
    assert_same(make(1.0).apply(TREE, make(1.0).draw(KEY, jnp.int32(0), TREE)), TREE)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_lies_between_0_and_1(share):
    with pytest.raises(ArgumentError, match=r"^share: "):
        top_k(share)
