"""ALI-DPFL's accountant: the published table, and the divergence against its definition."""

import numpy as np
import pytest
import scipy.integrate

from jaxfl.privacy.clients import (
    ORDERS,
    ClientRelease,
    account,
    local_iterations_epsilon,
    renyi_divergences,
)


def most(dp_epsilon, sampling_rate, noise_multiplier, dp_delta):
    """Iterations that a budget pays for, of 6,000 samples."""
    release = ClientRelease("poisson", 6000, round(6000 * sampling_rate), 1.0, noise_multiplier)
    return account([release], dp_delta=dp_delta).most_rounds(dp_epsilon, 10**6, "published")


CIFAR = {"sampling_rate": 75 / 5000, "noise_multiplier": 1.1, "dp_delta": 1e-5}
# dp_epsilon, exact T, the paper's T, and the epsilon that the formula gives for the paper's T
TABLE = [
    (1.55, 78, 79, 1.5504),
    (2.0, 314, 317, 2.0050),
    (3.75, 1537, 1585, 3.8063),
]


@pytest.mark.parametrize(("dp_epsilon", "exact", "papers", "epsilon_of_papers"), TABLE)
def test_iterations_at_three_of_the_ten_epsilons(dp_epsilon, exact, papers, epsilon_of_papers):
    assert most(dp_epsilon, **CIFAR) == exact
    np.testing.assert_allclose(local_iterations_epsilon(papers, **CIFAR), epsilon_of_papers, atol=5.1e-5)


def test_orders_end_at_64():
    """With next to no divergence the largest order converts best: epsilon is at least log(1 / delta) / 63."""
    actual = local_iterations_epsilon(1, sampling_rate=0.001, noise_multiplier=100.0, dp_delta=1e-5)
    np.testing.assert_allclose(actual, np.log(1e5) / 63, rtol=1e-6)


@pytest.mark.parametrize(("sampling_rate", "noise_multiplier"), [(0.015, 1.1), (0.4, 0.8), (1.0, 2.0)])
def test_it_is_the_renyi_divergence_of_the_two_outputs_densities(sampling_rate, noise_multiplier):
    actual = renyi_divergences(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)
    assert actual.shape == ORDERS.shape

    def density(z, mean):
        return np.exp(-((z - mean) ** 2) / (2 * noise_multiplier**2)) / np.sqrt(2 * np.pi * noise_multiplier**2)

    for order in (2, 3, 8):

        def integrand(z, order=order):
            ratio = 1 - sampling_rate + sampling_rate * density(z, 1.0) / density(z, 0.0)
            return density(z, 0.0) * ratio**order

        value, _ = scipy.integrate.quad(integrand, -12, 20, points=(0, 1, order), limit=200, epsabs=1e-13)
        np.testing.assert_allclose(actual[order - 2], np.log(value) / (order - 1), rtol=1e-8)


def test_small_divergences_keep_their_digits():
    """To first order in q^2, R(alpha) is q^2 alpha (exp(1 / sigma^2) - 1) / 2."""
    actual = renyi_divergences(sampling_rate=1e-9, noise_multiplier=10.0)
    np.testing.assert_allclose(actual, 1e-18 * ORDERS * np.expm1(0.01) / 2, rtol=1e-6)


@pytest.mark.parametrize("num_iterations", [1, 317, 1000])
def test_a_budget_that_is_met_exactly_is_used_up(num_iterations):
    assert most(local_iterations_epsilon(num_iterations, **CIFAR), **CIFAR) == num_iterations


def test_no_iteration_reveals_nothing():
    assert local_iterations_epsilon(0, **CIFAR) == 0.0
    assert most(0.1, **CIFAR) == 0
