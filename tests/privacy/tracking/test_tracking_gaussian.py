"""Gaussian noise in gradient tracking, against the composition of its mechanisms computed directly."""

import math

import numpy as np
import pytest
import scipy.stats

from jaxfl.privacy import tracking
from jaxfl.privacy.tracking import TrackingAgent, TrackingSchedule, gaussian_shift, shifted_epsilon

DELTA = 1e-5
AGENTS = TrackingAgent(2.0, np.array([1.5, 1.0]), np.array([0.8, 1.2]))


def case(num_iterations=15):
    scales = np.random.default_rng(0).uniform(0.5, 3.0, (2, 2, num_iterations + 1))
    schedule = TrackingSchedule(0.3, 0.2, 0.25, 4, *scales)
    return schedule, tracking.proven_sensitivities(schedule, AGENTS)


def multipliers(schedule, sensitivities, node):
    """Noise over sensitivity of every broadcast that changes at all."""
    pairs = zip(sensitivities, (schedule.state_noise_scale, schedule.tracker_noise_scale), strict=True)
    each = [scale[node, k] / d[node, k] for d, scale in pairs for k in range(16) if d[node, k] > 0]
    assert len(each) == 31
    return each


@pytest.mark.parametrize("node", [0, 1])
def test_epsilon_is_that_of_one_shift_of_the_composed_length(node):
    schedule, sensitivities = case()
    actual = shifted_epsilon(gaussian_shift(schedule, sensitivities), DELTA)
    assert actual.shape == (2,)
    mu = math.sqrt(sum(1 / z**2 for z in multipliers(schedule, sensitivities, node)))
    normal, epsilon = scipy.stats.norm, float(actual[node])
    delta = normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)
    np.testing.assert_allclose(delta, DELTA, rtol=1e-5)


def test_infinite_noise_costs_nothing():
    schedule, sensitivities = case()
    without = schedule._replace(tracker_noise_scale=np.full(16, np.inf))
    silent = sensitivities._replace(tracker=np.zeros((2, 16)))
    np.testing.assert_array_equal(gaussian_shift(without, sensitivities), gaussian_shift(schedule, silent))
