"""Partitions: exact cover, least sizes, termination, seeds, and the skew that each scheme promises."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import refusals
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl.data import (
    by_owner,
    dirichlet,
    federate,
    few_classes,
    hold_out,
    iid,
    label_counts,
    label_shards,
    whole_writers,
)
from jaxfl.data.held_out import held_places

few = settings(max_examples=60, derandomize=True, deadline=None)
seeds = st.integers(0, 2**63 - 1)


@st.composite
def labeled(draw):
    """Labels (N,) of up to 6 classes, some absent, and a number of nodes that N suffices for."""
    labels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=120))
    return np.array(labels), draw(st.integers(1, len(labels)))


def assert_cover(parts, num_nodes, num_samples):
    """Every sample is used exactly once, by int32 arrays, and no node is empty."""
    assert len(parts) == num_nodes
    assert all(part.dtype == np.int32 and part.ndim == 1 and len(part) > 0 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_samples))


class TestEveryScheme:
    @few
    @given(labeled(), seeds)
    def test_iid_uses_every_sample_exactly_once(self, case, seed):
        labels, num_nodes = case
        parts = iid(len(labels), num_nodes, seed)
        assert_cover(parts, num_nodes, len(labels))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1

    @few
    @given(labeled(), seeds, st.floats(1e-6, 1e6), st.integers(1, 5))
    def test_dirichlet_uses_every_sample_exactly_once(self, case, seed, alpha, min_size):
        labels, num_nodes = case
        num_nodes = max(1, num_nodes // min_size)
        min_size = min(min_size, len(labels))
        parts = dirichlet(labels, num_nodes, alpha, seed, min_size=min_size)
        assert_cover(parts, num_nodes, len(labels))
        assert min(len(part) for part in parts) >= min_size

    @few
    @given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), seeds)
    def test_few_classes_gives_each_node_as_many(self, num_classes, count, num_nodes, seed):
        labels, count = np.arange(20 * num_classes) % num_classes, min(count, num_classes)
        parts = few_classes(labels, num_nodes, count, seed)
        held = label_counts(parts, labels, num_classes)
        assert ((held > 0).sum(axis=1) == count).all()
        nodes_of_class = (held > 0).sum(axis=0)
        assert nodes_of_class.max() - nodes_of_class.min() <= 1
        for of_class in held.T[nodes_of_class > 0]:
            assert of_class.sum() == 20
            assert np.ptp(of_class[of_class > 0]) <= 1
        used = np.concatenate(parts)
        assert len(set(used.tolist())) == len(used) == held.sum()

    @few
    @given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.floats(0.01, 0.99))
    def test_hold_out_splits_each_node(self, sizes, share):
        parts = np.split(np.arange(sum(sizes)) * 3, np.cumsum(sizes)[:-1])
        train, test = hold_out(parts, share)
        for part, kept, held in zip(parts, train, test, strict=True):
            assert sorted([*kept, *held]) == part.tolist()
            assert 1 <= len(held) < len(part)
            assert abs(len(held) - share * len(part)) <= 1
        for most in (0.001, 0.999):  # by hashes of identifiers, too, each node trains and tests
            assert [len(part) for (part,) in hold_out([np.arange(2)], most, np.array(["a", "b"], object))] == [1, 1]
        owned: Any = hold_out(by_owner(["b", "b", "a", "a"]), 0.5)
        assert [part.names for part in owned] == [("a", "b")] * 2

    @few
    @given(st.integers(2, 60), st.floats(0.01, 0.99))
    def test_a_place_is_held_out_or_not_whatever_stands_behind_it(self, size, share):
        np.testing.assert_array_equal(held_places(size, share), held_places(100, share)[:size])

    @few
    @given(st.integers(1, 200), st.integers(1, 200), seeds)
    def test_train_and_test_samples_of_a_class_have_the_same_shares(self, size, fewer, seed):
        """Two sets of one seed have as many samples of class 0, others of class 1; each node has as many of class 0."""
        first, second = (np.repeat([0, 1], [500, count]) for count in (size, fewer))
        one, other = (dirichlet(labels, 4, 0.3, seed) for labels in (first, second))
        counts = [label_counts(parts, labels, 2)[:, 0] for parts, labels in ((one, first), (other, second))]
        assert np.abs(counts[0] - counts[1]).max() <= 3  # nodes without samples take one

    def test_labels_may_be_large_codes(self):
        labels = np.repeat([7, 10**9], 50)
        assert_cover(dirichlet(labels, 3, 1.0, 0), 3, 100)

    @few
    @given(labeled(), seeds, st.integers(1, 4))
    def test_label_shards_use_every_sample_exactly_once(self, case, seed, shards_per_node):
        labels, num_nodes = case
        shards_per_node = min(shards_per_node, len(labels) // num_nodes)
        parts = label_shards(labels, num_nodes, shards_per_node, seed)
        assert_cover(parts, num_nodes, len(labels))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= shards_per_node

    @few
    @given(st.lists(st.sampled_from(["a", "b", "cc", "d"]), min_size=1, max_size=50))
    def test_by_owner_uses_every_sample_exactly_once(self, owners):
        parts = by_owner(owners)
        assert_cover(parts, len(set(owners)), len(owners))
        for part, owner in zip(parts, sorted(set(owners)), strict=True):
            assert part.tolist() == [sample for sample in range(len(owners)) if owners[sample] == owner]

    @pytest.mark.parametrize(
        "scheme",
        [
            lambda labels, seed: iid(len(labels), 7, seed),
            lambda labels, seed: dirichlet(labels, 7, 0.5, seed),
            lambda labels, seed: label_shards(labels, 7, 2, seed),
            lambda labels, seed: few_classes(labels, 7, 2, seed),
        ],
    )
    def test_seed_decides(self, scheme):
        labels = np.arange(300) % 6
        first, again = scheme(labels, 3), scheme(labels, np.int64(3))
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)
        for seed in (4, 3 + 2**32, 3 + 2**64):
            assert any(a.tolist() != b.tolist() for a, b in zip(first, scheme(labels, seed), strict=True))

    def test_schemes_do_not_share_their_numbers(self):
        # One class: under shared numbers the two shards would hold the same samples as the two nodes of iid.
        dealt = {frozenset(part.tolist()) for part in iid(50, 2, 0)}
        assert dealt != {frozenset(part.tolist()) for part in label_shards(np.zeros(50, int), 2, 1, 0)}


class TestIid:
    def test_sizes_are_kept(self):
        parts = iid(20, 3, 0, sizes=[1, 7, 4])
        assert [len(part) for part in parts] == [1, 7, 4]
        together = np.concatenate(parts)
        assert len(set(together.tolist())) == 12
        assert together.max() < 20

    @pytest.mark.statistical
    def test_labels_are_mixed(self):
        # Each of 20 nodes draws 500 of 10,000 samples, a tenth of them of class 0: the count is hypergeometric with
        # mean 50 and variance 500 * 0.1 * 0.9 * 9500 / 9999; the sum of squared z-values is about chi-squared (19).
        labels = np.repeat(np.arange(10), 1000)
        zeros = label_counts(iid(10_000, 20, 0), labels, 10)[:, 0]
        statistic = ((zeros - 50) ** 2).sum() / (45 * 9500 / 9999)
        assert 19 - 4 * math.sqrt(38) < statistic < 19 + 4 * math.sqrt(38)
        unshuffled = label_counts(np.split(np.arange(10_000), 20), labels, 10)[:, 0]
        assert ((unshuffled - 50) ** 2).sum() / (45 * 9500 / 9999) > 1000


class TestDirichlet:
    def skew(self, alpha, seed=0):
        """Mean over classes of the sum of squared shares of the nodes: 1 / n when even, 1 when at one node."""
        labels = np.arange(20_000) % 10
        counts = label_counts(dirichlet(labels, 16, alpha, seed), labels, 10)
        return float(((counts / 2000) ** 2).sum(axis=0).mean())

    def test_label_skew_grows_as_alpha_falls(self):
        skews = [self.skew(alpha) for alpha in (1e6, 100.0, 10.0, 1.0, 0.1, 0.01, 1e-4)]
        assert np.all(np.diff(skews) > 0)
        np.testing.assert_allclose(skews[0], 1 / 16, rtol=1e-2)
        assert skews[-1] > 0.99

    @pytest.mark.statistical
    @pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 5.0])
    def test_shares_have_the_moments_of_the_distribution(self, alpha):
        # For Dirichlet(alpha, ..., alpha) over n nodes the expected sum of squared shares is
        # (alpha + 1) / (n alpha + 1). 20 seeds of 10 classes give 200 draws.
        draws = np.array([self.skew(alpha, seed) for seed in range(20)])
        error = draws.std(ddof=1) / math.sqrt(len(draws))
        expected = (alpha + 1) / (16 * alpha + 1)
        assert abs(draws.mean() - expected) < 4 * error
        for wrong in (0.5 * alpha, 2.0 * alpha):
            assert abs(draws.mean() - (wrong + 1) / (16 * wrong + 1)) > 4 * error

    @pytest.mark.statistical
    def test_no_node_is_preferred(self):
        # Each of 400 classes sits at one of 8 nodes: counts of classes are multinomial, 50 expected a node.
        labels = np.arange(4000) % 400
        counts = label_counts(dirichlet(labels, 8, 1e-4, 0), labels, 400)
        statistic = (((counts > 5).sum(axis=1) - 50.0) ** 2 / 50).sum()
        assert statistic < 7 + 4 * math.sqrt(14)

    @pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3, 1.0, 1e300])
    @pytest.mark.parametrize("min_size", [1, 390])
    def test_terminates_for_every_alpha(self, alpha, min_size):
        # 0.02 s, and 0.1 s with min_size 390, where up to 49,920 samples move.
        labels = np.arange(50_000) % 10
        parts = dirichlet(labels, 128, alpha, 0, min_size=min_size)
        assert_cover(parts, 128, 50_000)
        assert min(len(part) for part in parts) >= min_size

    def test_exactly_enough_samples(self):
        parts = dirichlet(np.zeros(12, int), 4, 1e-3, 0, min_size=3)
        assert [len(part) for part in parts] == [3, 3, 3, 3]

    def test_only_short_nodes_take_and_only_the_largest_give(self):
        labels = np.arange(400) % 10
        sizes = [len(part) for part in dirichlet(labels, 8, 1.0, 0)]
        assert min(sizes) < 45 < max(sizes)
        for node in range(8):
            while sizes[node] < 45:
                largest = sizes.index(max(sizes))
                sizes[largest] -= 1
                sizes[node] += 1
        assert [len(part) for part in dirichlet(labels, 8, 1.0, 0, min_size=45)] == sizes


class TestLabelShards:
    def test_one_shard_is_one_class(self):
        labels = np.arange(1000) % 10
        counts = label_counts(label_shards(labels, 20, 1, 0), labels, 10)
        np.testing.assert_array_equal(np.sort(counts, axis=1)[:, -2:], np.tile([0, 50], (20, 1)))

    def test_node_sees_at_most_its_shards(self):
        labels = np.arange(1000) % 10
        classes = (label_counts(label_shards(labels, 50, 2, 0), labels, 10) > 0).sum(axis=1)
        assert classes.max() == 2  # 100 shards of 10 within classes of 100
        assert classes.mean() > 1.7  # two shards out of ten classes coincide with probability 9 / 99

    def test_samples_of_a_class_are_shuffled(self):
        parts = label_shards(np.zeros(100, int), 2, 1, 0)
        assert not any(sorted(part.tolist()) == list(range(start, start + 50)) for part in parts for start in (0, 50))


class TestWholeWriters:
    @few
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=80), seeds, st.integers(1, 4))
    def test_writers_are_whole_and_so_many_at_every_node(self, ids, seed, writers_per_node):
        writers = np.array(ids)
        writers_per_node = min(writers_per_node, len(set(ids)))
        num_nodes = len(set(ids)) // writers_per_node
        parts = whole_writers(writers, num_nodes, writers_per_node, seed)
        assert [len(set(writers[part])) for part in parts] == [writers_per_node] * num_nodes
        assert all(part.dtype == np.int32 for part in parts)
        together = np.concatenate(parts)
        assert len(set(together.tolist())) == len(together)
        for part in parts:
            assert len(part) == np.isin(writers, writers[part]).sum()

    def test_the_seed_chooses_among_all_writers(self):
        writers = np.repeat(np.arange(50), 3)
        chosen = [np.unique(writers[np.concatenate(whole_writers(writers, 5, 2, seed))]) for seed in range(40)]
        assert len({tuple(one) for one in chosen}) == 40
        assert len(set(np.concatenate(chosen).tolist())) == 50

    def test_samples_of_two_writers_are_mixed(self):
        writers = np.repeat([3, 8], 50)
        (part,) = whole_writers(writers, 1, 2, 0)
        assert 10 < (writers[part][:50] == 3).sum() < 40


class TestLabelCounts:
    def test_against_a_loop(self):
        labels = np.random.default_rng(0).integers(0, 4, 40)
        parts = dirichlet(labels, 5, 0.5, 0)
        counts = label_counts(parts, labels, 6)
        assert counts.shape == (5, 6)
        for node in range(5):
            for label in range(6):
                assert counts[node, label] == sum(labels[sample] == label for sample in parts[node])

    def test_padding_does_not_count(self):
        labels = np.array([2, 1, 0, 1])
        data = federate(np.zeros((4, 1), np.float32), labels, [np.array([1, 2, 3]), np.array([0])])
        assert label_counts(data, data.labels, 3).tolist() == [[1, 2, 0], [0, 0, 1]]


TEN, WRITERS = np.zeros(10, int), ["a", "b", "c"]
SEEDED = (
    lambda seed: iid(10, 2, seed),
    lambda seed: dirichlet(TEN, 2, 1.0, seed),
    lambda seed: label_shards(TEN, 2, 1, seed),
    lambda seed: few_classes(TEN, 2, 1, seed),
    lambda seed: whole_writers(WRITERS, 1, 1, seed),
)
OF_NODES = (
    lambda num_nodes: iid(10, num_nodes, 0),
    lambda num_nodes: dirichlet(TEN, num_nodes, 1.0, 0),
    lambda num_nodes: label_shards(TEN, num_nodes, 1, 0),
    lambda num_nodes: few_classes(TEN, num_nodes, 1, 0),
    lambda num_nodes: whole_writers(WRITERS, num_nodes, 1, 0),
)
OF_LABELS = (
    lambda labels: dirichlet(labels, 2, 1.0, 0),
    lambda labels: label_shards(labels, 2, 1, 0),
    lambda labels: few_classes(labels, 2, 1, 0),
    lambda labels: label_counts([np.array([0])], labels, 3),
)
BAD_LABELS = ([0.0, 1.0], [], [[0], [1]], [0, -1], ["a", "b"], [True, False])
BAD_IDS = ([], [1.0, np.nan], [["a"]], 3, [None, "a"], ["a", "A"], ["a", "n/a"])


def rows(argument, calls, values):
    """Each call with each value, and the argument that it is."""
    return [(lambda call=call, value=value: call(value), argument) for call in calls for value in values]


test_refusals = refusals(
    [
        *rows("seed", SEEDED, (-1, 1.5, None)),
        *rows("num_nodes", OF_NODES, (0, -1, 2.0, True, 11)),
        *rows("labels", OF_LABELS, BAD_LABELS),
        *rows("labels", [lambda labels: label_counts([np.array([0])], labels, 3)], [[0, 3]]),
        *rows("sizes", [lambda sizes: iid(20, 3, 0, sizes=sizes)], [[1, 2], [1, 0, 2], [1.0] * 3, 4, [], [10, 10, 1]]),
        *rows("alpha", [lambda alpha: dirichlet(TEN, 1, alpha, 0)], [0.0, -1.0, np.inf, np.nan]),
        *rows("min_size", [lambda least: dirichlet(TEN, 1, 1.0, 0, min_size=least)], [0, 1.0]),
        *rows("num_nodes", [lambda least: dirichlet(TEN, 4, 1.0, 0, min_size=least)], [3]),
        *rows("shards_per_node", [lambda shards: label_shards(TEN, 4, shards, 0)], [0, 1.0]),
        *rows("num_nodes", [lambda shards: label_shards(TEN, 4, shards, 0)], [3]),
        *rows("classes_per_node", [lambda count: few_classes(np.arange(9) % 3, 2, count, 0)], [0, 1.5, 4]),
        *rows("share", [lambda share: hold_out([[0, 1]], share)], [0.0, 1.0, -1]),
        *rows("parts", [lambda parts: hold_out(parts, 0.5)], [[[0, 1], [2]]]),
        *rows("owner_ids", [by_owner], BAD_IDS),
        *rows("writer_ids", [lambda ids: whole_writers(ids, 1, 1, 0)], BAD_IDS),
        *rows("writers_per_node", [lambda count: whole_writers(WRITERS, 1, count, 0)], [0, 1.5]),
    ]
)


@pytest.mark.parametrize(
    ("owners", "names"),
    [
        (["10", "9", "2"], ("2", "9", "10")),
        ([10.0, 9.0, 2.0], ("2", "9", "10")),
        (np.array(["b", " a"], object), ("a", "b")),
        (["01", "2"], ("01", "2")),
        (["1", "1.0", "2"], ("1", "2")),
    ],
)
def test_owners_have_the_names_and_the_order_of_sites(owners, names):
    assert by_owner(owners).names == names
