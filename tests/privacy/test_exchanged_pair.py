"""Poisson sampling and one sample exchanged for another: the direct pair against integration and enumeration."""

import itertools
import math

import numpy as np
import pytest
from helpers import curve_delta
from scipy.stats import norm

from jaxfl.privacy import composition
from jaxfl.privacy import dominating_pairs as pairs


def composed(q, shift, num_times, step=1e-3):
    curve = composition.compose(pairs.exchanged(q, shift, step), num_times)
    assert curve is not None
    return curve


@pytest.mark.parametrize(("q", "shift"), [(0.01, 0.5), (0.3, 4.0), (0.5, 80.0)])
def test_losses_are_one_distribution_and_its_mirror(q, shift):
    losses = pairs.exchanged(q, shift, 1e-3)
    assert losses.probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    grid = losses.step * (losses.lowest + np.arange(len(losses.probabilities)))
    assert losses.lowest == -(len(grid) // 2)
    # Under the other distribution: the same masses in reverse.
    other = losses.probabilities * np.exp(-np.clip(grid, -600, 600))
    np.testing.assert_allclose(other[np.abs(grid) < 600], losses.probabilities[::-1][np.abs(grid) < 600], atol=1e-12)


def test_no_two_samples_are_told_apart_better_in_two_dimensions():
    """Gradients v and v' of norm at most 1 in a plane. A pair of half the shift is exceeded."""
    q, shift = 0.3, 1.2
    x = np.linspace(-7.0, 7.0, 281)
    cell = (x[1] - x[0]) ** 2

    def density(v):
        at = [norm.pdf(x, shift * c) for c in v]
        return (1 - q) * norm.pdf(x)[:, None] * norm.pdf(x)[None, :] + q * at[0][:, None] * at[1][None, :]

    curve, generator = composed(q, shift, 1), np.random.default_rng(0)
    halved = composed(q, shift / 2, 1)
    vectors = [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 0.0), (0.0, -0.5)]
    vectors += [(r * math.cos(a), r * math.sin(a)) for r, a in generator.uniform(0, (1, 6.3), (4, 2))]
    densities = [density(v) for v in vectors]
    closest = 0.0
    for upper, lower in itertools.permutations(densities, 2):
        for dp_epsilon in (-0.5, 0.0, 0.2, 0.7, 1.3):
            exact = cell * np.maximum(upper - math.exp(dp_epsilon) * lower, 0.0).sum()
            # Below 0 the curve follows from the other direction, which is the same.
            bound = curve_delta(curve, abs(dp_epsilon))
            if dp_epsilon < 0:
                bound = 1 - math.exp(dp_epsilon) + math.exp(dp_epsilon) * bound
            assert exact <= bound + 3e-5
            if dp_epsilon > 0:
                closest = max(closest, exact / bound)
    assert closest > 0.995
    worst = cell * np.maximum(densities[0] - math.exp(0.7) * densities[1], 0.0).sum()
    assert worst > 1.5 * curve_delta(halved, 0.7)


def test_no_sample_chosen_after_the_first_release_is_told_apart_better():
    """Two rounds; the gradients of both samples in the second round follow from what was released in the first."""
    q, shift = 0.25, 1.0
    x = np.linspace(-7.0, 7.0, 351)
    cell = (x[1] - x[0]) ** 2
    curve, generator, closest = composed(q, shift, 2), np.random.default_rng(1), 0.0

    def density(v):
        return (1 - q) * norm.pdf(x) + q * norm.pdf(x, shift * v)

    for trial in range(30):
        first = (1.0, -1.0) if trial < 4 else generator.uniform(-1, 1, 2)
        cuts = np.sort(generator.uniform(-2, 2, 2))
        regions = np.searchsorted(cuts, x)  # three regions of the first release, each with gradients of its own
        later = [(1.0, -1.0) if trial % 2 else (-1.0, 1.0)] * 3 if trial < 4 else generator.uniform(-1, 1, (3, 2))
        joint = []
        for which in (0, 1):
            second = np.stack([density(pair[which]) for pair in later])
            joint.append(density(first[which])[:, None] * second[regions])
        for dp_epsilon in (0.0, 0.3, 1.0):
            exact = cell * np.maximum(joint[0] - math.exp(dp_epsilon) * joint[1], 0.0).sum()
            bound = curve_delta(curve, dp_epsilon)
            assert exact <= bound + 3e-5
            closest = max(closest, exact / bound)
    assert closest > 0.99
