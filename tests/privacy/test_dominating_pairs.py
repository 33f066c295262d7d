"""Privacy curves against direct integration, against dp-accounting and against exact values."""

import math

import dp_accounting.pld.privacy_loss_distribution as pld
import numpy as np
import pytest
import scipy.integrate
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
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


def test_gaussian_values():
    assert pairs.gaussian_delta(1.0, 1.0) == pytest.approx(0.12693674, abs=1e-8)
    assert pairs.gaussian_delta(0.5, 2.0) == pytest.approx(0.59918562, abs=1e-8)
    assert pairs.gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.377178, abs=1e-6)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 7.0])
@pytest.mark.parametrize("dp_delta", [1e-12, 1e-5])
def test_gaussian_epsilon_is_that_of_the_library(mu, dp_delta):
    found, expected = pairs.gaussian_epsilon(mu, dp_delta), get_epsilon_gaussian(1 / mu, dp_delta)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert pairs.gaussian_delta(found, mu) <= dp_delta


def test_gaussian_epsilon_at_the_ends():
    assert pairs.gaussian_epsilon(0.0, 1e-5) == 0.0
    assert pairs.gaussian_epsilon(1e-7, 1e-5) == 0.0
    assert pairs.gaussian_epsilon(1.0, 0.0) == math.inf
    huge = pairs.gaussian_epsilon(1e4, 1e-5)
    assert 5e7 < huge < 5.1e7


def test_participation_is_the_mean_over_counts():
    mus, chances = np.array([0.5, 1.0, 3.0]), np.array([0.7, 0.25, 0.05])
    found = pairs.participation_epsilon(mus, chances, 1e-3)
    total = sum(p * float(pairs.gaussian_delta(found, mu)) for mu, p in zip(mus, chances, strict=True))
    assert total == pytest.approx(1e-3, rel=1e-6)
    assert total <= 1e-3


@pytest.mark.parametrize(("q", "low", "high"), [(0.1, 0.0, 1.0), (0.1, 0.05, 0.95), (0.3, 0.4, 2.0)])
def test_one_sampled_release_against_integration(q, low, high):
    """The hockey-stick divergence of Theorem S's pair, both directions."""
    forward, backward = (composed(one, 1) for one in pairs.sampled(q, low, high, 1e-3))
    with_sample, without = mixture(q, low, high), norm.pdf(X)
    for dp_epsilon in (0.0, 0.05, 0.3, 1.0, 2.5):
        for curve, upper, lower in ((forward, with_sample, without), (backward, without, with_sample)):
            exact, found = hockey_stick(upper, lower, dp_epsilon), composition.curve_delta(curve, dp_epsilon)
            assert exact - 1e-9 <= found <= exact * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize(("q", "low", "high"), [(0.02, 0.0, 0.5), (0.02, 0.01, 0.99), (0.2, 0.05, 0.45)])
@pytest.mark.quick_cases(1)
def test_sampled_releases_against_the_library(q, low, high):
    """Another discretization, another composition: the same epsilon."""
    step, rounds = 2e-3, 200
    forward, backward = (composed(one, rounds) for one in pairs.sampled(q, low, high, step))
    theirs = pld.from_mixture_gaussian_mechanism(1.0, [low, high], [1 - q, q], value_discretization_interval=step)
    theirs = theirs.self_compose(rounds)
    for dp_delta in (1e-3, 1e-6):
        found = max(float(composition.curve_epsilon(curve, dp_delta)) for curve in (forward, backward))
        assert found == pytest.approx(theirs.get_epsilon_for_delta(dp_delta), rel=1e-4)


def test_sampled_epsilon_is_below_its_renyi_form():
    """A_alpha = sum_k C(alpha, k) q^k (1-q)^(alpha-k) exp(((kM + (alpha-k)U)^2 - k M^2 - (alpha-k) U^2) / 2)."""
    q, z, rounds, dp_delta = 64 / 3125, 4.848, 3120, 1e-5
    low, high = q / z, (2 - q) / z
    orders = np.arange(2, 40)
    x = np.linspace(-12, 12, 20_001)
    density = norm.pdf(x)
    ratio = (1 - q) * np.exp(low * x - low**2 / 2) + q * np.exp(high * x - high**2 / 2)
    renyi = []
    for alpha in orders:
        k = np.arange(alpha + 1)
        exponent = ((k * high + (alpha - k) * low) ** 2 - k * high**2 - (alpha - k) * low**2) / 2
        forward = sum(
            math.comb(alpha, int(j)) * q**j * (1 - q) ** (alpha - j) * math.exp(e)
            for j, e in zip(k, exponent, strict=True)
        )
        backward = scipy.integrate.trapezoid(density * ratio ** (1.0 - alpha), x)
        assert scipy.integrate.trapezoid(density * ratio**alpha, x) == pytest.approx(forward, rel=1e-6)
        renyi.append(math.log(max(forward, backward)) / (alpha - 1))
    by_renyi = np.min(rounds * np.array(renyi) + np.log1p(-1 / orders) - np.log(dp_delta * orders) / (orders - 1))
    curves = pairs.sampled_curves(q, low, high, q / (20 * z), rounds, dp_delta)
    found = max(float(composition.curve_epsilon(curve, dp_delta)) for curve in curves)
    assert found < by_renyi < 1.2 * found


def test_theorem_s_holds_for_adaptive_tables():
    """Two rounds of SAGA in one dimension, the past draw hidden, gradients chosen after the first release."""
    q, z, generator = 0.3, 1.0, np.random.default_rng(0)
    x = np.linspace(-9.0, 11.0, 801)
    cell = (x[1] - x[0]) ** 2
    forward, backward = (composed(one, 2) for one in pairs.sampled(q, q / z, (2 - q) / z, 1e-3))
    tightest = 0.0
    for trial in range(12):
        # Stored at the start, fresh in round 1, fresh in round 2 by the sign of what was released: all in [-1, 1].
        stored, first, low, high = np.ones(4) if trial == 0 else generator.choice([-1.0, -0.4, 0.3, 1.0], 4)
        second = np.where(x > 0.5, high, low)[:, None]

        def density(point, table, fresh):
            absent, present = q * table / z, (fresh - (1 - q) * table) / z
            return [norm.pdf(point, absent), norm.pdf(point, present)]

        start = density(x[:, None], stored, first)
        later = [density(x[None, :], table, second) for table in (stored, first)]
        chances = (1 - q, q)
        with_sample = sum(chances[b] * start[b] * sum(chances[c] * later[b][c] for c in (0, 1)) for b in (0, 1))
        without = norm.pdf(x)[:, None] * norm.pdf(x)[None, :]
        for dp_epsilon in (0.0, 0.2, 0.7, 1.5, 3.0):
            scale = math.exp(dp_epsilon)
            ahead = cell * np.maximum(with_sample - scale * without, 0.0).sum()
            back = cell * np.maximum(without - scale * with_sample, 0.0).sum()
            assert ahead <= composition.curve_delta(forward, dp_epsilon) + 1e-6
            assert back <= composition.curve_delta(backward, dp_epsilon) + 1e-6
            tightest = max(tightest, ahead / composition.curve_delta(forward, dp_epsilon))
    assert tightest > 0.5  # the instances come near the bound, so a bound half as large would be seen to fail


@pytest.mark.parametrize(("q", "shift"), [(0.1, 1.0), (0.4, 2.5)])
def test_one_replaced_release_against_integration(q, shift):
    """The profile is that of the Poisson pair for e >= 0, and its mirror below."""
    losses = pairs.replaced(q, np.array([shift]), np.ones(1), 1e-3)
    curve = composed(losses, 1)
    for dp_epsilon in (0.0, 0.02, 0.3, 1.0):
        exact = hockey_stick(mixture(q, 0.0, shift), norm.pdf(X), dp_epsilon)
        gauss = q * float(pairs.gaussian_delta(math.log1p(math.expm1(dp_epsilon) / q), shift))
        assert gauss == pytest.approx(exact, rel=1e-4)
        assert exact - 1e-9 <= composition.curve_delta(curve, dp_epsilon) <= exact * (1 + 1e-3) + 1e-6
    # Mirrored: a loss and its negative have probabilities in the ratio exp(loss).
    above = losses.probabilities[len(losses.probabilities) // 2 + 1 :]
    below = losses.probabilities[: len(losses.probabilities) // 2][::-1]
    grid = losses.step * np.arange(1, len(above) + 1)
    np.testing.assert_allclose(below, above * np.exp(-grid), rtol=1e-6, atol=1e-13)
    assert losses.probabilities.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("others", [0.0, 0.5])
def test_replaced_bounds_a_fixed_size_batch(others):
    """One of ten samples drawn; the changed one gives +1 or -1, the others the same in both data sets."""
    q, noise = 0.1, 0.8
    curve = composed(pairs.replaced(q, np.array([2 / noise]), np.ones(1), 1e-3), 1)
    drawn_not = norm.pdf(X, others / noise)
    upper = (1 - q) * drawn_not + q * norm.pdf(X, 1 / noise)
    lower = (1 - q) * drawn_not + q * norm.pdf(X, -1 / noise)
    for dp_epsilon in (0.0, 0.1, 0.5, 1.0):
        assert hockey_stick(upper, lower, dp_epsilon) <= composition.curve_delta(curve, dp_epsilon) + 1e-9


def test_replaced_bounds_a_batch_that_repeats_samples():
    """Two draws with replacement from five samples."""
    rate, chances = 1 - 0.8**2, np.array([2 * 0.2 * 0.8, 0.04])
    noise = 0.7
    curve = composed(pairs.replaced(rate, np.array([1.0, 2.0]) / noise, chances / rate, 1e-3), 1)

    def release(own):  # the others' gradients are -0.5
        means = [-0.5, (own - 0.5) / 2, own]
        return sum(p * norm.pdf(X, m / noise) for p, m in zip([0.64, *chances], means, strict=True))

    for dp_epsilon in (0.0, 0.1, 0.5, 1.0):
        assert (
            hockey_stick(release(1.0), release(-1.0), dp_epsilon) <= composition.curve_delta(curve, dp_epsilon) + 1e-9
        )


@pytest.mark.parametrize("dp_delta", [1e-3, 1e-6, 1e-9])
def test_sampling_everyone_gives_the_gaussian(dp_delta):
    mu, rounds = 0.05, 1000
    exact = pairs.gaussian_epsilon(mu * math.sqrt(rounds), dp_delta)
    almost = 1 - 1e-12
    forward, backward = (composed(one, rounds) for one in pairs.sampled(almost, 0.0, mu, mu / 20))
    both = composed(pairs.replaced(almost, np.array([mu]), np.ones(1), mu / 20), rounds)
    for curve in (forward, backward, both):
        assert exact <= float(composition.curve_epsilon(curve, dp_delta)) <= 1.002 * exact


def test_a_coarse_grid_overstates_epsilon():
    """Poisson batches of one of 3,125 at z = 8, K = 3,120: the trap of a fixed step, and the rule that avoids it."""
    q, z = 1 / 3125, 8.0

    def found(step):
        curves = pairs.sampled_curves(q, 0.0, 1 / z, step, 3120, 1e-5)
        return max(float(composition.curve_epsilon(curve, 1e-5)) for curve in curves)

    assert [round(found(step), 4) for step in (1e-3, 1e-4, 2e-5)] == [0.0272, 0.0075, 0.0051]
    by_rule = found(pairs.grid_step(q, z, 1 / z))
    assert found(1e-7) <= by_rule <= 1.01 * found(1e-7)
    assert pairs.grid_step(q, z, 1 / z) == pytest.approx(q / (20 * z))
    assert pairs.grid_step(1e-6, 0.5, 2.0) == pytest.approx(1e-6 / (5 * 0.5))


def test_an_infinite_loss_stays():
    losses = composition.Losses(0.1, -1, np.array([0.4, 0.2, 0.399]), infinite=1e-3)
    curve = composed(losses, 2)
    assert composition.curve_delta(curve, 50.0) == pytest.approx(1 - 0.999**2, rel=1e-9)
    # By hand at epsilon 0.1: only 0.1 + 0.1 lies above.
    expected = 1 - 0.999**2 + 0.399**2 * (1 - math.exp(0.1 - 0.2))
    assert composition.curve_delta(curve, 0.1) == pytest.approx(expected, rel=1e-9)


def test_a_grid_that_is_too_large_is_made_coarser():
    forward, _ = pairs.sampled_curves(1e-3, 0.0, 100.0, 1e-3 / 5 * 100, 3000, 1e-5)
    assert math.isfinite(float(composition.curve_epsilon(forward, 1e-5)))
    assert len(forward.deltas) <= 2**22


def test_the_curve_is_exact_between_grid_points():
    curve = composed(pairs.sampled(0.1, 0.0, 1.0, 0.05)[0], 3)
    deltas = np.array([3e-2, 1e-3, 1e-5])
    for dp_delta, dp_epsilon in zip(deltas, composition.curve_epsilon(curve, deltas), strict=True):
        assert composition.curve_delta(curve, float(dp_epsilon)) == pytest.approx(dp_delta, rel=1e-9)
    assert float(composition.curve_epsilon(curve, 0.9)) == 0.0
    assert float(composition.curve_epsilon(curve, 1e-17)) == math.inf


def test_triangle_against_a_search_over_the_library_deltas():
    q, low, high, rounds, step, dp_delta = 0.05, 0.02, 0.8, 50, 2e-3, 1e-5
    forward, backward = pairs.sampled_curves(q, low, high, step, rounds, dp_delta)
    found = composition.triangle_epsilon(forward, backward, dp_delta)
    theirs = pld.from_mixture_gaussian_mechanism(1.0, [low, high], [1 - q, q], value_discretization_interval=step)
    theirs = theirs.self_compose(rounds)
    first = np.linspace(0.0, found, 300)
    remove = np.array([theirs._pmf_remove.get_delta_for_epsilon(e) for e in first])

    def delta(dp_epsilon):
        add = np.array([theirs._pmf_add.get_delta_for_epsilon(dp_epsilon - e) for e in first])
        return float(np.min(remove + np.exp(first) * add))

    assert delta(found * 1.001) <= dp_delta
    assert delta(found * 0.98) > dp_delta
