"""ALI-DPFL's accountant: the published table, and the divergence against its definition."""

import numpy as np
import pytest
import scipy.integrate

from jaxfl.privacy.clients import (
    ORDERS,
    ClientRelease,
    local_iterations_epsilon,
    max_iterations,
    renyi_divergences,
)


def most(dp_epsilon, sampling_rate, noise_multiplier, dp_delta):
    """Iterations that a budget pays for, of 6,000 samples."""
    release = ClientRelease("poisson", 6000, round(6000 * sampling_rate), 1.0, noise_multiplier)
    return max_iterations([release], 0, dp_epsilon, "published", dp_delta=dp_delta, limit=10**6)


CIFAR = {"sampling_rate": 75 / 5000, "noise_multiplier": 1.1, "dp_delta": 1e-5}
FASHION_MNIST = {**CIFAR, "sampling_rate": 75 / 6000}
# dp_epsilon, exact T, the paper's T, and the epsilon that the formula gives for the paper's T
TABLE = [
    (1.55, 78, 79, 1.5504),
    (1.65, 118, 122, 1.6569),
    (1.75, 174, 177, 1.7551),
    (1.85, 230, 231, 1.8515),
    (2.0, 314, 317, 2.0050),
    (2.25, 454, 457, 2.2550),
    (2.5, 596, 598, 2.5024),
    (2.75, 770, 775, 2.7562),
    (3.25, 1119, 1123, 3.2554),
    (3.75, 1537, 1585, 3.8063),
]


@pytest.mark.parametrize(("dp_epsilon", "exact", "papers", "epsilon_of_papers"), TABLE)
def test_iterations_at_the_ten_epsilons(dp_epsilon, exact, papers, epsilon_of_papers):
    assert most(dp_epsilon, **CIFAR) == exact
    np.testing.assert_allclose(local_iterations_epsilon(papers, **CIFAR), epsilon_of_papers, atol=5.1e-5)


def test_fashion_mnist_has_more_samples_and_so_more_iterations():
    assert [most(dp_epsilon, **FASHION_MNIST) for dp_epsilon in (1.55, 3.75)] == [174, 2285]


def test_orders_end_at_64():
    """With next to no divergence the largest order converts best: epsilon is at least log(1 / delta) / 63."""
    found = local_iterations_epsilon(1, sampling_rate=0.001, noise_multiplier=100.0, dp_delta=1e-5)
    np.testing.assert_allclose(found, np.log(1e5) / 63, rtol=1e-6)


def test_what_the_papers_misprints_would_give():
    np.testing.assert_allclose(local_iterations_epsilon(79 + 1, **CIFAR), 1.5539, atol=5e-5)  # a sum over t = 0..T
    np.testing.assert_allclose(79 * local_iterations_epsilon(1, **CIFAR), 94.7, atol=0.05)  # adding epsilons


@pytest.mark.parametrize(("sampling_rate", "noise_multiplier"), [(0.015, 1.1), (0.4, 0.8), (1.0, 2.0)])
def test_it_is_the_renyi_divergence_of_the_two_outputs_densities(sampling_rate, noise_multiplier):
    found = renyi_divergences(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)
    assert found.shape == ORDERS.shape

    def density(z, mean):
        return np.exp(-((z - mean) ** 2) / (2 * noise_multiplier**2)) / np.sqrt(2 * np.pi * noise_multiplier**2)

    for order in (2, 3, 8):

        def integrand(z, order=order):
            ratio = 1 - sampling_rate + sampling_rate * density(z, 1.0) / density(z, 0.0)
            return density(z, 0.0) * ratio**order

        value, _ = scipy.integrate.quad(integrand, -12, 20, points=(0, 1, order), limit=200, epsabs=1e-13)
        np.testing.assert_allclose(found[order - 2], np.log(value) / (order - 1), rtol=1e-8)


def test_at_sampling_rate_1_it_is_that_of_the_gaussian_mechanism():
    found = renyi_divergences(sampling_rate=1.0, noise_multiplier=1.5)
    np.testing.assert_allclose(found, ORDERS / (2 * 1.5**2), rtol=1e-12)


def test_small_divergences_keep_their_digits():
    """To first order in q^2, R(alpha) is q^2 alpha (exp(1 / sigma^2) - 1) / 2."""
    found = renyi_divergences(sampling_rate=1e-9, noise_multiplier=10.0)
    np.testing.assert_allclose(found, 1e-18 * ORDERS * np.expm1(0.01) / 2, rtol=1e-6)


@pytest.mark.parametrize("dp_epsilon", [0.1, 0.3, 1.2, 2.0, 9.7, 60.0])
@pytest.mark.parametrize("client", [CIFAR, {"sampling_rate": 0.3, "noise_multiplier": 0.9, "dp_delta": 1e-3}])
def test_so_many_iterations_are_within_the_budget_and_one_more_is_not(dp_epsilon, client):
    found = most(dp_epsilon, **client)
    assert local_iterations_epsilon(found, **client) <= dp_epsilon < local_iterations_epsilon(found + 1, **client)


@pytest.mark.parametrize("num_iterations", [1, 317, 1000])
def test_a_budget_that_is_met_exactly_is_used_up(num_iterations):
    assert most(local_iterations_epsilon(num_iterations, **CIFAR), **CIFAR) == num_iterations


def test_no_iteration_reveals_nothing():
    assert local_iterations_epsilon(0, **CIFAR) == 0.0
    assert most(0.1, **CIFAR) == 0
