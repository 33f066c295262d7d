"""Samplers: which entries, how often, and what happens at the edges."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxfl import ArgumentError
from jaxfl.core import node_keys
from jaxfl.gradients.samplers import (
    Batch,
    _shuffle,
    check_counts,
    draw_batch,
    first_occurrence,
    fixed,
    poisson,
    poisson_capacity,
    uniform,
)

ROUNDS = 4000
COUNTS = jnp.array([4, 11, 30], jnp.int32)


def inclusion(sampler):
    """Number of draws of each entry of each node, (rounds, n, max count), and the batches."""

    @jax.jit
    def draw(rounds):
        return jax.vmap(lambda round_index: draw_batch(sampler, jax.random.key(5), round_index, COUNTS))(rounds)

    batches = draw(jnp.arange(ROUNDS, dtype=jnp.int32))
    one_hot = (np.asarray(batches.indices)[..., None] == np.arange(30)) & np.asarray(batches.mask)[..., None]
    return one_hot.sum(axis=2), batches


@pytest.fixture(scope="module")
def of_three():
    """`inclusion` of Poisson batches of 3."""
    return inclusion(poisson(3))


@pytest.mark.statistical
@pytest.mark.parametrize("sampler", [uniform(1), uniform(3), fixed(1), fixed(3), poisson(3), poisson(1)])
def test_every_entry_has_its_probability(sampler):
    drawn, batches = inclusion(sampler)
    assert int(batches.overflow.sum()) == 0
    for node, count in enumerate(np.asarray(COUNTS)):
        mean = drawn[:, node, :count].mean(axis=0)
        expected = sampler.batch_size / count
        spread = drawn[:, node, :count].std(axis=0).max() + 1e-3
        np.testing.assert_allclose(mean, expected, atol=4.5 * spread / np.sqrt(ROUNDS))
        assert np.abs(mean - 1.5 * expected).max() > 4.5 * spread / np.sqrt(ROUNDS), "a wrong rate must be seen"
        assert drawn[:, node, count:].sum() == 0


def test_fixed_never_repeats_and_covers_every_subset():
    drawn, _ = inclusion(fixed(3))
    assert drawn.max() == 1
    subsets = {tuple(row) for row in drawn[:, 0, :4]}
    assert len(subsets) == 4  # C(4, 3)
    counts = np.array([sum(tuple(row) == s for row in drawn[:, 0, :4]) for s in subsets])
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


def test_fixed_at_the_full_size_is_a_permutation():
    batch = draw_batch(fixed(4), jax.random.key(0), jnp.int32(0), jnp.array([4], jnp.int32))
    assert sorted(batch.indices[0].tolist()) == [0, 1, 2, 3]


def shuffled(swap_with, count):
    """The first entries of an array that is shuffled step by step."""
    array = np.arange(count)
    for t, target in enumerate(swap_with):
        array[[t, target]] = array[[target, t]]
    return array[: len(swap_with)]


@pytest.mark.parametrize("size", [1, 2, 3, 32, 256, 257, 700])  # from 257 on the steps are sorted
@pytest.mark.quick_cases(1)
def test_the_entries_are_those_of_the_shuffles_first_b_steps(size):
    draw_node, batch_keys = jax.jit(jax.vmap(fixed(size).draw_node, (0, None))), node_keys(jax.random.key(7), 200)
    step = jnp.arange(size, dtype=jnp.int32)
    draw_swaps = jax.jit(
        jax.vmap(lambda key, count: jax.random.randint(key, (size,), step, count, jnp.int32), (0, None))
    )
    for count in (size, size + 1, size + 5, 3 * size, 100_000):
        drawn, _, _ = draw_node(batch_keys, jnp.int32(count))
        swaps = np.asarray(draw_swaps(batch_keys, jnp.int32(count)))
        np.testing.assert_array_equal(drawn, [shuffled(row, count) for row in swaps])


@pytest.mark.parametrize("size", [2, 3, 4, 5, 17, 33, 256, 257, 1025])
def test_chains_of_swaps_are_followed_to_their_end(size):
    step = np.arange(size)
    for swaps in (step + 1, np.full(size, size), np.minimum(step + 1, size - 1)):
        result = jax.jit(_shuffle)(jnp.asarray(swaps, jnp.int32))
        np.testing.assert_array_equal(result, shuffled(swaps, size + 1))


@pytest.mark.statistical
def test_poisson_entries_are_independent(of_three):
    drawn, _ = of_three
    included = drawn[:, 2, :].astype(float)
    sizes = included.sum(axis=1)
    binomial = scipy.stats.binom(30, 0.1)
    np.testing.assert_allclose(sizes.mean(), 3.0, atol=4.5 * binomial.std() / np.sqrt(ROUNDS))
    np.testing.assert_allclose(sizes.var(), binomial.var(), rtol=0.12)
    correlation = np.corrcoef(included.T) - np.eye(30)
    assert np.abs(correlation).max() < 5.0 / np.sqrt(ROUNDS)
    assert (drawn[:, 2].sum(axis=1) == 0).mean() == pytest.approx(0.9**30, abs=0.02), "empty batches do occur"


def test_poisson_overflow_is_reported_not_hidden(of_three, monkeypatch):
    _, roomy = of_three
    monkeypatch.setattr("jaxfl.gradients.samplers.poisson_capacity", lambda *_: 4)
    _, cramped = inclusion(poisson(3))
    sizes = np.asarray(roomy.mask).sum(axis=2)
    assert cramped.mask.shape[2] == 4
    assert (sizes > 4).any()
    np.testing.assert_array_equal(np.asarray(cramped.overflow) > 0, sizes > 4)


def test_poisson_capacity_bounds_the_tail():
    for size in (1, 5, 32, 128):
        capacity = poisson_capacity(size, 10**6, 1e-9)
        assert scipy.stats.poisson.sf(capacity, size) * 10**6 < 1e-9
        for count in (2 * size, 10 * size, 1000 * size):
            assert scipy.stats.binom.sf(capacity, count, size / count) * 10**6 < 1e-9
        assert scipy.stats.poisson.sf(capacity - 3, size) * 10**6 > 1e-9, "not wastefully large"


def test_poisson_capacity_is_the_first_that_is_enough():
    """As counted up by one from the batch size."""
    for size in (1, 2, 3, 7, 32, 100, 999, 20_000):
        for num_draws in (1, 50, 10**4, 10**7, 10**12, 2**62):
            capacities = np.arange(size, size + 3000)
            first = capacities[scipy.stats.poisson.sf(capacities, size) * num_draws < 1e-9][0]
            assert poisson_capacity(size, num_draws, 1e-9) == first


def test_poisson_capacity_of_a_huge_batch_takes_no_time():
    began = time.process_time()
    assert 2**31 < poisson_capacity(2**31, 10**7, 1e-9) < 1.001 * 2**31
    assert time.process_time() - began < 5


def test_poisson_gaps_keep_both_ends_of_the_distribution(monkeypatch):
    """The largest and the smallest random words give the gaps that their probabilities say."""
    waits = {2**32 - 1: 32 * np.log(2.0), 2**32 - 2**8: 24 * np.log(2.0), 2**20: -np.log1p(-(2.0**-12)), 0: 0.0}
    for word, waiting in waits.items():
        monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype, w=word: jnp.full(shape, w, dtype))
        indices, mask, _ = poisson(64).draw_node(jax.random.key(0), jnp.int32(64_000))
        assert bool(mask[0])
        np.testing.assert_allclose(indices[0], np.floor(waiting / -np.log1p(-1e-3)), rtol=1e-4)


def test_traced_sizes_cannot_make_padding_train():
    for sampler in (fixed(5), poisson(5)):
        batch = jax.jit(lambda counts, s=sampler: draw_batch(s, jax.random.key(0), jnp.int32(0), counts))(COUNTS)
        assert batch.overflow.tolist()[0] > 0
        assert batch.overflow.tolist()[1:] == [0, 0]
        assert not np.any(np.asarray(batch.mask[0]) & (np.asarray(batch.indices[0]) >= 4))


def test_draws_depend_on_key_and_round_and_not_on_the_number_of_nodes():
    def indices(key, round_index, counts):
        return draw_batch(uniform(8), jax.random.key(key), jnp.int32(round_index), counts).indices

    many = jnp.full(6, 1000, jnp.int32)
    base = indices(0, 0, many)
    np.testing.assert_array_equal(base[:2], indices(0, 0, many[:2]))
    assert not np.array_equal(base, indices(1, 0, many))
    assert not np.array_equal(base, indices(0, 1, many))
    assert not np.array_equal(base[0], base[1])


@pytest.mark.parametrize(("sampler", "remedy"), [(fixed(5), "uniform sampler"), (poisson(4), "fixed sampler")])
def test_a_batch_larger_than_a_node_is_refused(sampler, remedy):
    with pytest.raises(ArgumentError, match=rf"batch_size: .*node 0 has 4.*{remedy}"):
        check_counts(sampler, COUNTS)
    check_counts(uniform(100), COUNTS)


def test_first_occurrence_counts_an_entry_once():
    batch = Batch(
        indices=jnp.array([[2, 2, 0, 2], [1, 0, 1, 0]], jnp.int32),
        mask=jnp.array([[True, True, True, True], [False, True, True, True]]),
        overflow=jnp.zeros(2, jnp.int32),
    )
    assert first_occurrence(batch).tolist() == [[True, False, True, False], [False, True, True, False]]


def test_a_fixed_batch_of_all_entries_has_them_in_their_order():
    counts = jnp.full(3, 4, jnp.int32)
    batch = draw_batch(fixed(4), jax.random.key(0), jnp.int32(0), counts, 4)
    np.testing.assert_array_equal(batch.indices, np.tile(np.arange(4), (3, 1)))
    assert batch.mask.all()
    assert not batch.overflow.any()
    drawn = draw_batch(fixed(4), jax.random.key(0), jnp.int32(0), counts)
    np.testing.assert_array_equal(np.sort(drawn.indices), batch.indices)
    smaller = draw_batch(fixed(4), jax.random.key(0), jnp.int32(0), jnp.array([4, 3], jnp.int32), 4)
    assert smaller.overflow.tolist() == [0, 1]
    assert smaller.mask.sum(axis=1).tolist() == [4, 3]
