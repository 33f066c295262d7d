"""Several kinds of Poisson-sampled Gaussian releases together, against dp-accounting."""

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from helpers import crossed

from jaxfl.privacy.clients import SampledReleases, sampled_epsilon
from jaxfl.privacy.dominating_pairs import gaussian_epsilon

ITERATIONS = SampledReleases(0.015, 1.1, 317)
DELTA = 1e-5


def library(kinds, dp_delta, *, interval=1e-4, exchange=False, pessimistic=True):
    """dp-accounting's epsilon."""
    relation = NeighboringRelation.REPLACE_ONE if exchange else NeighboringRelation.ADD_OR_REMOVE_ONE
    total = None
    for kind in kinds:
        once = pld.from_gaussian_mechanism(
            kind.noise_multiplier,
            sampling_prob=kind.sampling_rate,
            value_discretization_interval=interval,
            neighboring_relation=relation,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,  # which gives no lower bound
        ).self_compose(kind.num_releases)
        total = once if total is None else total.compose(once)
    assert total is not None
    return total.get_epsilon_for_delta(dp_delta)


KINDS = (
    (ITERATIONS,),
    (ITERATIONS, SampledReleases(0.015, 8.0, 60)),
    (ITERATIONS, SampledReleases(0.1, 5.0, 60)),
    (ITERATIONS, SampledReleases(1.0, 40.0, 60)),
    (SampledReleases(0.3, 2.0, 20), SampledReleases(0.01, 0.7, 10), SampledReleases(1.0, 9.0, 3)),
)


@pytest.mark.parametrize(("kinds", "exchange"), crossed(KINDS, [False, True]))
@pytest.mark.quick_cases(2)
def test_it_is_an_upper_bound_within_01_percent_of_dp_accountings(kinds, exchange):
    actual, secret = sampled_epsilon(kinds, DELTA, exchange=exchange)
    assert secret
    theirs = library(kinds, DELTA, exchange=exchange)
    assert actual == pytest.approx(theirs, rel=1e-3)
    # What they know to be too low, but for the rounding of their grid.
    assert actual > 0.99 * library(kinds, DELTA, exchange=exchange, pessimistic=False)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("dp_delta", [1e-5, 1e-14])
def test_one_kind_in_two_parts_is_one_kind(exchange, dp_delta):
    """But not where delta is too small for several kinds: there it is a bound all the same."""
    parts = [ITERATIONS._replace(num_releases=count) for count in (300, 17)]
    (whole, _), (both, secret) = (
        sampled_epsilon(kinds, dp_delta, exchange=exchange) for kinds in ([ITERATIONS], parts)
    )
    if dp_delta == 1e-5:
        assert both == pytest.approx(whole, rel=1e-4)
    else:
        assert not secret
        assert both == pytest.approx(gaussian_epsilon((2 if exchange else 1) * 317**0.5 / 1.1, dp_delta), rel=1e-6)
    assert both >= whole * (1 - 1e-6)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.quick_cases(1)
def test_more_releases_a_larger_rate_or_less_noise_never_lower_it(exchange):
    rng = np.random.default_rng(3)
    for _ in range(15):
        rate, count = float(rng.choice([0.01, 0.05, 0.3, 0.9, 1.0])), int(rng.integers(0, 300))
        kind = SampledReleases(rate, float(rng.uniform(0.6, 8)), count)
        other = SampledReleases(float(rng.uniform(0.005, 0.5)), float(rng.uniform(1, 20)), int(rng.integers(0, 100)))
        changed = [
            kind._replace(num_releases=count + int(rng.integers(1, 20))),
            kind._replace(sampling_rate=min(1.0, rate * float(rng.uniform(1.01, 2)))),
            kind._replace(noise_multiplier=kind.noise_multiplier * float(rng.uniform(0.6, 0.99))),
        ]
        before = sampled_epsilon([kind, other], DELTA, exchange=exchange)[0]
        after = [sampled_epsilon([each, other], DELTA, exchange=exchange)[0] for each in changed]
        assert before <= min(after) * (1 + 1e-9), (kind, other)
        without = [sampled_epsilon([each], DELTA, exchange=exchange)[0] for each in (kind, other)]
        assert before >= max(without)


@pytest.mark.parametrize("exchange", [False, True])
def test_releases_with_next_to_no_loss_never_lower_it(exchange):
    """Two kinds have another grid than one, and by itself it gives less in the fourth digit."""
    alone = sampled_epsilon([ITERATIONS._replace(num_releases=2408)], DELTA, exchange=exchange)[0]
    both = [ITERATIONS._replace(num_releases=2408), SampledReleases(0.0015, 1000.0, 60)]
    assert alone <= sampled_epsilon(both, DELTA, exchange=exchange)[0] <= 1.0005 * alone


def test_at_rate_1_all_is_one_gaussian():
    kinds = [SampledReleases(1.0, 10.0, 20), SampledReleases(1.0, 30.0, 100)]
    for exchange in (False, True):
        mu = (2 if exchange else 1) * (20 / 100 + 100 / 900) ** 0.5
        assert sampled_epsilon(kinds, DELTA, exchange=exchange) == (gaussian_epsilon(mu, DELTA), False)


def test_so_little_noise_that_draws_hide_nothing_is_bounded_all_the_same():
    actual, secret = sampled_epsilon([SampledReleases(0.1, 1e-3, 4), ITERATIONS], DELTA)
    assert not secret
    assert 2e6 < actual < 2.1e6


def test_so_much_noise_that_float64_does_not_resolve_the_losses_is_bounded_all_the_same():
    """Losses of 1e-20 on a grid of their own would need a grid of 1e15 points."""
    others = ITERATIONS._replace(sampling_rate=1.0, noise_multiplier=20.0, num_releases=20_000)
    loud = ITERATIONS._replace(noise_multiplier=2.0**63, num_releases=100_000)
    assert sampled_epsilon([loud, others], DELTA) == (gaussian_epsilon(20_000**0.5 / 20, DELTA), False)
    assert sampled_epsilon([loud], DELTA) == (0.0, False)


def test_nothing_released_is_0():
    assert sampled_epsilon([ITERATIONS._replace(num_releases=0)], DELTA) == (0.0, False)
