"""Privacy curves against direct integration and against exact values."""

import math

import numpy as np
import pytest
import scipy.integrate
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from helpers import curve_delta
from scipy.stats import norm

from jaxfl.privacy import composition
from jaxfl.privacy import dominating_pairs as pairs

X = np.linspace(-14.0, 26.0, 400_001)


def hockey_stick(upper, lower, dp_epsilon):
    """H of two densities on X, by the trapezoidal rule."""
    return float(scipy.integrate.trapezoid(np.maximum(upper - math.exp(dp_epsilon) * lower, 0.0), X))


def mixture(q, low, high):
    return (1 - q) * norm.pdf(X, low) + q * norm.pdf(X, high)


def composed(losses, num_times):
    curve = composition.compose(losses, num_times)
    assert curve is not None
    return curve


@pytest.mark.parametrize("mu", [1e-3, 0.3, 7.0])
@pytest.mark.parametrize("dp_delta", [1e-12, 1e-5])
def test_gaussian_epsilon_is_that_of_the_library(mu, dp_delta):
    actual, expected = pairs.gaussian_epsilon(mu, dp_delta), get_epsilon_gaussian(1 / mu, dp_delta)
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert pairs.gaussian_delta(actual, mu) <= dp_delta


def test_gaussian_epsilon_at_the_ends():
    assert pairs.gaussian_epsilon(0.0, 1e-5) == 0.0
    assert pairs.gaussian_epsilon(1e-7, 1e-5) == 0.0
    assert pairs.gaussian_epsilon(1.0, 0.0) == math.inf
    huge = pairs.gaussian_epsilon(1e4, 1e-5)
    assert 5e7 < huge < 5.1e7


def test_participation_is_the_mean_over_counts():
    mus, chances = np.array([0.5, 1.0, 3.0]), np.array([0.7, 0.25, 0.05])
    actual = pairs.mixed_gaussian_epsilon(mus, chances, 1e-3)
    total = sum(p * float(pairs.gaussian_delta(actual, mu)) for mu, p in zip(mus, chances, strict=True))
    assert total == pytest.approx(1e-3, rel=1e-6)
    assert total <= 1e-3


@pytest.mark.parametrize(("q", "shift"), [(0.1, 1.0), (0.1, 0.05), (0.3, 2.0), (0.5, 0.3), (0.3, 4.0), (0.9, 2.0)])
def test_one_release_of_each_pair_against_integration(q, shift):
    """The profile of a batch of fixed size is that of the Poisson pair for e >= 0."""
    with_sample, without, with_another = mixture(q, 0.0, shift), norm.pdf(X), mixture(q, 0.0, -shift)
    forward, backward = pairs.sampled(q, shift, 1e-3)
    for losses, upper, lower in (
        (forward, with_sample, without),
        (backward, without, with_sample),
        (pairs.replaced(q, (shift,), (1.0,), 1e-3), with_sample, without),
        (pairs.exchanged(q, shift, 1e-3), with_sample, with_another),
    ):
        curve = composed(losses, 1)
        for dp_epsilon in (0.0, 0.02, 0.3, 1.0, 2.5):
            exact, actual = hockey_stick(upper, lower, dp_epsilon), curve_delta(curve, dp_epsilon)
            assert exact - 1e-9 <= actual <= exact * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize("others", [0.0, 0.5])
def test_replaced_bounds_a_fixed_size_batch(others):
    """One of ten samples drawn; the changed one gives +1 or -1, the others the same in both data sets."""
    q, noise = 0.1, 0.8
    curve = composed(pairs.replaced(q, (2 / noise,), (1.0,), 1e-3), 1)
    drawn_not = norm.pdf(X, others / noise)
    upper = (1 - q) * drawn_not + q * norm.pdf(X, 1 / noise)
    lower = (1 - q) * drawn_not + q * norm.pdf(X, -1 / noise)
    for dp_epsilon in (0.0, 0.1, 0.5, 1.0):
        assert hockey_stick(upper, lower, dp_epsilon) <= curve_delta(curve, dp_epsilon) + 1e-9


def test_replaced_bounds_a_batch_that_repeats_samples():
    """Two draws with replacement from five samples."""
    rate, chances, noise = 1 - 0.8**2, (2 * 0.2 * 0.8, 0.04), 0.7
    weights = (chances[0] / rate, chances[1] / rate)
    curve = composed(pairs.replaced(rate, (1 / noise, 2 / noise), weights, 1e-3), 1)

    def release(own):  # the others' gradients are -0.5
        means = [-0.5, (own - 0.5) / 2, own]
        return sum(p * norm.pdf(X, m / noise) for p, m in zip([0.64, *chances], means, strict=True))

    for dp_epsilon in (0.0, 0.1, 0.5, 1.0):
        assert hockey_stick(release(1.0), release(-1.0), dp_epsilon) <= curve_delta(curve, dp_epsilon) + 1e-9


def test_a_coarse_grid_overstates_epsilon():
    """Poisson batches of one of 3,125 at z = 8, K = 3,120: the trap of a fixed step, and the rule that avoids it."""
    q, z = 1 / 3125, 8.0

    def actual(step):
        curves = pairs.composed_curves(pairs.sampled, (q, 1 / z), step, 3120, 1e-5)
        return max(float(composition.curve_epsilon(curve, 1e-5)) for curve in curves)

    assert [round(actual(step), 4) for step in (1e-3, 1e-4, 2e-5)] == [0.0272, 0.0075, 0.0051]
    by_rule = actual(pairs.grid_step(q, z, 1 / z))
    assert actual(1e-7) <= by_rule <= 1.01 * actual(1e-7)
    assert pairs.grid_step(q, z, 1 / z) == pytest.approx(q / (20 * z))
    assert pairs.grid_step(1e-6, 0.5, 2.0) == pytest.approx(1e-6 / (5 * 0.5))


def test_an_infinite_loss_stays():
    losses = composition.Losses(0.1, -1, np.array([0.4, 0.2, 0.399]), infinite=1e-3)
    curve = composed(losses, 2)
    assert curve_delta(curve, 50.0) == pytest.approx(1 - 0.999**2, rel=1e-9)
    # By hand at epsilon 0.1: only 0.1 + 0.1 lies above.
    expected = 1 - 0.999**2 + 0.399**2 * (1 - math.exp(0.1 - 0.2))
    assert curve_delta(curve, 0.1) == pytest.approx(expected, rel=1e-9)


def test_a_grid_that_is_too_large_is_made_coarser():
    forward, _ = pairs.composed_curves(pairs.sampled, (1e-3, 100.0), 1e-3 / 5 * 100, 3000, 1e-5)
    assert math.isfinite(float(composition.curve_epsilon(forward, 1e-5)))
    assert len(forward.deltas) <= 2**22


def test_the_curve_is_exact_between_grid_points():
    curve = composed(pairs.sampled(0.1, 1.0, 0.05)[0], 3)
    deltas = np.array([3e-2, 1e-3, 1e-5])
    for dp_delta, dp_epsilon in zip(deltas, composition.curve_epsilon(curve, deltas), strict=True):
        assert curve_delta(curve, float(dp_epsilon)) == pytest.approx(dp_delta, rel=1e-9)
    assert float(composition.curve_epsilon(curve, 0.9)) == 0.0
    assert float(composition.curve_epsilon(curve, 1e-17)) == math.inf
