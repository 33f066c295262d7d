"""Deltas as small as the rounding of a Fourier transform: tilted curves against exact values, and what says so."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from jaxfl.core import ArgumentError
from jaxfl.privacy import PRIVSGP, composition
from jaxfl.privacy import dominating_pairs as pairs
from jaxfl.privacy.gossip import account
from jaxfl.privacy.gossip.proven import Release, proven_bound


def response(dp_epsilon, step):
    """Losses of randomized response, exactly on the grid."""
    steps = round(dp_epsilon / step)
    probabilities = np.zeros(2 * steps + 1)
    probabilities[[0, -1]] = np.array([1.0, math.exp(dp_epsilon)]) / (1 + math.exp(dp_epsilon))
    return composition.Losses(step, -steps, probabilities, 0.0)


@pytest.mark.parametrize("dp_delta", [1e-9, 1e-12, 1e-15, 1e-30, 1e-60])
def test_composed_randomized_response_is_the_binomial(dp_delta):
    eps, rounds = 0.1, 1000
    curve = composition.compose(response(eps, 0.02), rounds, dp_delta)
    assert curve is not None
    actual = float(composition.curve_epsilon(curve, dp_delta))
    counts = np.arange(rounds + 1)
    losses, chances = (2 * counts - rounds) * eps, binom.pmf(counts, rounds, math.exp(eps) / (1 + math.exp(eps)))

    def exact(dp_epsilon):
        above = losses > dp_epsilon
        return float((chances[above] * -np.expm1(dp_epsilon - losses[above])).sum())

    assert exact(actual) <= dp_delta * (1 + 1e-6)
    assert exact(0.95 * actual) > dp_delta, "an epsilon 5 % lower is wrong"
    assert exact(0.999 * actual) > dp_delta


@pytest.mark.parametrize("dp_delta", [1e-3, 1e-6, 1e-9, 1e-11, 1e-14])
def test_sampling_everyone_gives_the_gaussian(dp_delta):
    mu, rounds, almost = 0.05, 10_000, 1 - 1e-12
    exact = pairs.gaussian_epsilon(mu * math.sqrt(rounds), dp_delta)
    one_sample = (*pairs.sampled(almost, mu, mu / 20), pairs.replaced(almost, (mu,), (1.0,), mu / 20))
    for losses in (*one_sample, pairs.exchanged(almost, mu / 2, mu / 20)):
        curve = composition.compose(losses, rounds, dp_delta)
        assert curve is not None
        assert exact <= float(composition.curve_epsilon(curve, dp_delta)) <= 1.003 * exact


def test_tilted_and_plain_curves_agree_where_both_see():
    losses, rounds = pairs.sampled(0.02, 0.5, 1e-3)[0], 300
    plain = composition.compose(losses, rounds)
    tilted = composition.compose(losses, rounds, 1e-12)
    assert plain is not None
    assert tilted is not None
    assert composition.is_small(1e-12, rounds)
    assert not composition.is_small(1e-5, rounds)
    for dp_delta in (1e-5, 1e-8, 1e-10):
        actual = [float(composition.curve_epsilon(curve, dp_delta)) for curve in (plain, tilted)]
        assert actual[0] == pytest.approx(actual[1], rel=1e-4)
    assert math.isinf(float(composition.curve_epsilon(plain, 1e-13)))
    assert math.isfinite(float(composition.curve_epsilon(tilted, 1e-13)))


RELEASES = {
    "Poisson": (Release("mini_batch", "poisson", 10, 1000, 1.0, 0.2), "zero_out"),
    "exchanged": (Release("mini_batch", "poisson", 10, 1000, 1.0, 0.2), "replace_one"),
    "fixed": (Release("mini_batch", "fixed", 10, 1000, 1.0, 0.4), "replace_one"),
    "fixed zeroed": (Release("mini_batch", "fixed", 10, 1000, 1.0, 0.4), "zero_out"),
    "uniform": (Release("mini_batch", "uniform", 10, 1000, 1.0, 0.8), "replace_one"),
    "table": (Release("saga", "poisson", 10, 1000, 1.0, 0.8), "zero_out"),
    "table exchanged": (Release("saga", "poisson", 10, 1000, 1.0, 0.8), "replace_one"),
}


@pytest.mark.parametrize(("release", "relation"), RELEASES.values(), ids=RELEASES)
def test_sampling_counts_at_deltas_that_rounding_would_drown(release, relation):
    rounds = 10_000
    bounds = [proven_bound(release, relation, rounds, dp_delta) for dp_delta in (1e-7, 1e-9, 1e-11, 1e-13, 1e-15)]
    assert len({bound.accountant for bound in bounds}) == 1
    assert "privacy loss distribution" in bounds[0].accountant
    growth = np.diff([bound.dp_epsilon for bound in bounds])
    assert (growth > 0).all()
    assert growth.max() < 0.35 * bounds[0].dp_epsilon, "no jump"


def test_a_delta_below_what_the_grid_leaves_out_is_stated_with_the_reason():
    release, relation = RELEASES["table"]
    actual = proven_bound(release, relation, 10_000, 1e-18)
    assert math.isfinite(actual.dp_epsilon)
    assert "given how often a sample is drawn" in actual.accountant
    assert "secrecy of the draws counts for nothing" in actual.accountant
    assert "below what its grid leaves out" not in proven_bound(release, relation, 10_000, 1e-15).accountant


@pytest.mark.parametrize("chance", [1.0, 0.2])
def test_a_delta_that_no_grid_resolves_is_renyis(chance):
    release, q, shift = RELEASES["Poisson"][0], 0.01, 0.5

    def log_delta(dp_epsilon):  # of one release: the mass under the mixture less that under N(0, 1), from where on
        start = (math.log(math.exp(dp_epsilon) - (1 - q)) - math.log(q)) / shift + shift / 2
        far, near = norm.logsf(start - shift), norm.logsf(start)
        upper = np.logaddexp(math.log1p(-q) + near, math.log(q) + far)
        return math.log(chance) + upper + math.log(-math.expm1(min(dp_epsilon + near - upper, -1e-15)))

    for dp_delta in (1e-25, 1e-30, 1e-60, 1e-300):
        actual = proven_bound(release, "zero_out", 1, dp_delta, chance)
        assert "Renyi" in actual.accountant
        assert log_delta(actual.dp_epsilon) <= math.log(dp_delta)
        assert log_delta(actual.dp_epsilon / 2) > math.log(dp_delta)
    several = [proven_bound(release, "zero_out", 10_000, 10.0**-power, chance) for power in (15, 16, 20, 30)]
    assert "distribution" in several[0].accountant
    assert "Renyi" in several[-1].accountant
    growth = np.diff([one.dp_epsilon for one in several])
    assert (growth > 0).all()
    assert growth.max() < 0.5 * several[0].dp_epsilon, "no jump"


class TestBelowWhatIsResolved:
    """Probability that grids leave out counts as an infinite loss, so that no noise helps."""

    @pytest.mark.parametrize("num_releases", [1, 400, 10**6])
    def test_no_curve_has_an_epsilon(self, num_releases):
        unresolved = 0.999 * pairs.unresolved_delta(num_releases)
        for curve in pairs.composed_curves(pairs.sampled, (0.1, 1e-3), 1e-3, num_releases, unresolved):
            assert float(composition.curve_epsilon(curve, unresolved)) == math.inf

    @pytest.mark.parametrize("dp_delta", [5e-324, 1e-300, 1e-30])
    @pytest.mark.parametrize("sampler", ["poisson", "fixed", "uniform"])
    def test_a_budget_is_refused_at_once(self, sampler, dp_delta):
        release = Release("mini_batch", sampler, 40, 90, clip_norm=2.0, noise_std=1.0)
        says = r"^dp_delta: must be above 8e-19, what accounting leaves out in 400 rounds; got .* Pass a larger one\."
        with pytest.raises(ArgumentError, match=says):
            account(PRIVSGP, release, dp_delta=dp_delta).calibrate(400, 8.0, "proven", "replace_one")

    @pytest.mark.parametrize("dp_delta", [1e-100, 1e-30])
    def test_a_budget_of_poisson_batches_is_met(self, dp_delta):
        release = Release("mini_batch", "poisson", 40, 90, clip_norm=2.0, noise_std=1.0)
        std = account(PRIVSGP, release, dp_delta=dp_delta).calibrate(400, 8.0)
        louder, quieter = (release._replace(noise_std=factor * std) for factor in (1.0, 0.999))
        assert account(PRIVSGP, louder, dp_delta=dp_delta).epsilon(400) <= 8.0
        assert account(PRIVSGP, quieter, dp_delta=dp_delta).epsilon(400) > 8.0

    def test_a_budget_just_above_is_met(self):
        release = Release("mini_batch", "poisson", 40, 90, clip_norm=2.0, noise_std=1.0)
        std = account(PRIVSGP, release, dp_delta=1e-18).calibrate(400, 8.0)
        assert 0.4 < std < 0.7


@pytest.mark.parametrize("mu", [1e3, 1e5, 1e7, 1e30, 1e149])
def test_epsilon_of_a_shift_of_any_size_is_half_its_square(mu):
    assert pairs.gaussian_epsilon(mu, 1e-5) == pytest.approx(mu**2 / 2, rel=10 / mu + 1e-8)
    assert pairs.gaussian_epsilon(mu, 1e-5) >= mu**2 / 2


def test_a_shift_beyond_float64_has_no_epsilon():
    assert pairs.gaussian_epsilon(1e151, 1e-5) == math.inf
    assert pairs.gaussian_epsilon(1e300, 1e-5) == math.inf
