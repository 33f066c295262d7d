"""Laplace noise in gradient tracking at a delta: against exact Renyi divergences and enumeration."""

import bisect
import itertools
import math

import numpy as np
import pytest
import scipy.integrate
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy.stats import laplace

from jaxfl import ArgumentError
from jaxfl.privacy import tracking
from jaxfl.privacy.concentrated import concentrated_epsilon
from jaxfl.privacy.dominating_pairs import gaussian_epsilon
from jaxfl.privacy.tracking import TrackingAgent, TrackingSchedule, laplace_epsilon_at_delta
from jaxfl.privacy.tracking.laplace_at_delta import participation_rhos

UNIT = TrackingAgent(1.0, 1.0, 1.0)


def schedule(num_iterations, seed=0, least=0.5):
    scales = np.random.default_rng(seed).uniform(least, 4 * least, (2, num_iterations + 1))
    return TrackingSchedule(0.3, 0.2, 0.25, 4, *scales)


@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.5, 30.0])
@pytest.mark.parametrize("dp_delta", [1e-15, 1e-5, 0.1])
def test_conversion_is_that_of_the_library_and_a_little_above_the_gaussian(rho, dp_delta):
    actual = concentrated_epsilon(rho, dp_delta)
    orders = 1 + np.geomspace(1e-3, 1e6, 4000)
    theirs, _ = rdp.compute_epsilon(orders.tolist(), (orders * rho).tolist(), dp_delta)
    assert actual <= theirs * (1 + 1e-6) + 1e-12
    assert actual >= theirs * (1 - 1e-3) - 1e-12
    exact = gaussian_epsilon(math.sqrt(2 * rho), dp_delta)
    assert exact <= actual
    if dp_delta < 0.1 and rho > 1e-6:
        assert actual < 1.12 * exact


def test_conversion_at_the_ends():
    assert concentrated_epsilon(0.0, 1e-5) == 0.0
    for rho, dp_delta in ((-1.0, 1e-5), (0.1, 0.0), (0.1, 1.0)):
        with pytest.raises(ArgumentError):
            concentrated_epsilon(rho, dp_delta)


def test_worst_gradients_reach_rho():
    """With a coordinate of its own for the change of each gradient, every broadcast's worst case is reached at once.
    The Renyi divergences of pure releases so large are alpha rho: 5 % less would be exceeded."""
    run, alpha = schedule(12, least=8.0), 1.5
    x, divergence = np.linspace(-60.0, 60.0, 240_001), 0.0
    for response, scale in zip(tracking.impulse_responses(run, UNIT), run[-2:], strict=True):
        for k in range(13):
            for moved in np.abs(response[: k + 1]):  # coordinate l of broadcast k, in units of the noise
                own, other = laplace.pdf(x, moved / scale[k]), laplace.pdf(x)
                total = scipy.integrate.trapezoid(own**alpha * other ** (1 - alpha), x)
                divergence += math.log(total) / (alpha - 1) if moved else 0.0
    epsilons = np.concatenate([d / s for d, s in zip(tracking.proven_sensitivities(run, UNIT), run[-2:], strict=True)])
    rho = float((epsilons**2).sum() / 2)
    assert divergence <= alpha * rho
    # Laplace noise in several coordinates is gentler than one coordinate, whose divergence is rho's to first order.
    alone = 0.0
    for eps in epsilons[epsilons > 0]:
        own, other = laplace.pdf(x, eps), laplace.pdf(x)
        alone += math.log(scipy.integrate.trapezoid(own**alpha * other ** (1 - alpha), x)) / (alpha - 1)
    assert 0.95 * alpha * rho < alone <= alpha * rho


@pytest.mark.parametrize("count", [1, 2, 4, 13])
def test_no_set_of_iterations_has_a_larger_rho(count):
    run, agent = schedule(12), TrackingAgent(2.0, 1.5, 0.8)
    (bound,) = participation_rhos(run, agent, np.array([count]))
    rhos = []
    for chosen in itertools.combinations(range(13), count):
        each = 0.0
        for response, scale in zip(tracking.impulse_responses(run, agent), run[-2:], strict=True):
            moved = [sum(abs(response[k - j]) for j in chosen if j <= k) for k in range(13)]
            each += float(np.square(np.array(moved) / scale).sum()) / 2
        rhos.append(each)
    assert max(rhos) <= bound * (1 + 1e-12)
    assert max(rhos) > 0.95**2 * bound, "an epsilon 5 % lower, which is of the order of sqrt(rho), is exceeded"


def test_sampling_costs_no_more_and_nothing_is_gained_where_every_batch_holds_every_sample():
    run = schedule(40, least=2.0)
    every = laplace_epsilon_at_delta(run, UNIT, dp_delta=1e-5)(1.0)
    actual = laplace_epsilon_at_delta(
        run, UNIT._replace(state_in_weight=np.ones(3)), dp_delta=1e-5, num_local_samples=np.array([4, 40, 400])
    )(1.0)
    assert actual[0] == every
    assert (np.diff(actual) < 0).all()


def test_sampled_delta_against_the_mean_over_participations():
    """delta of the run is at most the mean over counts n of what n participations cost: the bound is not below that."""
    run, rate, dp_delta = schedule(30, least=2.0), 4 / 60, 1e-5
    actual = float(laplace_epsilon_at_delta(run, UNIT, dp_delta=dp_delta, num_local_samples=60)(1.0))
    counts = np.arange(1, 32)
    rhos = participation_rhos(run, UNIT, counts)

    def delta(rho):  # smallest delta with concentrated_epsilon(rho, delta) <= found
        grid = [*np.geomspace(1e-14, 0.9, 400), 1.0]  # at 1 epsilon is 0
        return grid[bisect.bisect_left(grid[:-1], True, key=lambda d: concentrated_epsilon(rho, d) <= actual)]

    chances = [math.comb(31, int(n)) * rate**n * (1 - rate) ** (31 - n) for n in counts]
    mean = sum(p * delta(rho) for p, rho in zip(chances, rhos, strict=True))
    assert 0.05 * dp_delta < mean <= dp_delta
