"""Probability that the proven bounds may leave out, and its cost."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from jaxfl.privacy.gossip import proven
from jaxfl.privacy.gossip.proven import Release, proven_bound


@pytest.mark.parametrize("num_releases", [1, 50, 3120, 10**6])
@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.5, 1.0])
def test_how_often_a_sample_is_drawn_leaves_out_next_to_nothing(num_releases, rate):
    counts = proven._likely_counts(num_releases, rate)
    np.testing.assert_array_equal(np.diff(counts), 1)
    missing = binom.cdf(counts[0] - 1, num_releases, rate) + binom.sf(counts[-1], num_releases, rate)
    assert missing < proven._UNLIKELY
    assert len(counts) <= 20 * math.sqrt(num_releases * rate * (1 - rate)) + 123


def test_a_delta_below_what_is_left_out_has_no_epsilon():
    one = Release("saga", "fixed", 10, 1000, clip_norm=1.0, noise_std=2.0)
    assert proven_bound(one, "replace_one", 1000, 2e-20).dp_epsilon < math.inf
    assert proven_bound(one, "replace_one", 1000, 0.9e-20).dp_epsilon == math.inf
