"""The paper's own numbers, its optimum, and what they leave out."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from jaxfl.privacy.gossip import A_DP2_SGD, DP2_SGD, PRIVSGP_VR, Release, account
from jaxfl.privacy.gossip.privsgp import (
    C2_OF_THE_PAPER,
    CIFAR10_CONSTANTS,
    optimal_iterations,
)

BUDGET: dict[str, Any] = {"dp_epsilon": 3.0, "dp_delta": 1e-5}


def test_numerator_of_the_paper():
    assert CIFAR10_CONSTANTS.numerator == pytest.approx(342_000_036.4, rel=1e-10)


def test_iterations_of_the_paper():
    assert optimal_iterations(CIFAR10_CONSTANTS, **BUDGET, num_nodes=16) == pytest.approx(3120, abs=1)
    unscaled = optimal_iterations(CIFAR10_CONSTANTS, **BUDGET, num_nodes=16, c2=1.0)
    assert unscaled == pytest.approx(432.849, abs=1e-3)


@pytest.mark.parametrize(
    ("num_rounds", "expected"), [(500, 0.09043), (1125, 0.13565), (3120, 0.22590), (6250, 0.31972), (12500, 0.45216)]
)
def test_noise_of_equation_11(num_rounds, expected):
    paper = Release("saga", "uniform", 1, 3125, clip_norm=10.0, noise_std=1.0)
    actual = account(PRIVSGP_VR, paper, dp_delta=1e-5).calibrate(num_rounds, 3.0, "published")
    assert actual == pytest.approx(expected, abs=1e-5)
    back = account(PRIVSGP_VR, paper._replace(noise_std=actual), dp_delta=1e-5).epsilon(num_rounds, "published")
    assert 3.0 * (1 - 1e-5) <= back <= 3.0


def test_it_minimizes_10_with_the_noise_of_11_inserted():
    """Also personalized: every node its own budget."""
    epsilons, deltas, c = [1.0, 2.0, 8.0], [1e-5, 1e-4, 1e-6], CIFAR10_CONSTANTS

    def bound(log_rounds):
        rounds = math.exp(log_rounds)
        noise = [
            3 * C2_OF_THE_PAPER * 10 * math.sqrt(rounds * math.log(1 / d)) / (3125 * e)
            for e, d in zip(epsilons, deltas, strict=True)
        ]
        variance = np.mean(np.square(noise))
        return (c.numerator + 24 * c.smoothness * c.num_params * variance) / math.sqrt(3 * rounds)

    best: Any = scipy.optimize.minimize_scalar(bound, bounds=(0.0, 20.0), method="bounded", options={"xatol": 1e-9})
    budgets = {"dp_epsilon": epsilons, "dp_delta": deltas, "num_nodes": 3}
    assert optimal_iterations(CIFAR10_CONSTANTS, **budgets) == pytest.approx(math.exp(best.x), rel=1e-5)


def reconstructed(accountant, noise_std, sampler="fixed", num_entries=3125):
    """Batches of one, of gradients of norm 1."""
    one = Release("mini_batch", sampler, 1, num_entries, clip_norm=1.0, noise_std=noise_std)
    return account(accountant, one, dp_delta=1e-5, num_nodes=4).epsilon(3120, "published")


def test_basic_composition():
    """5.54 G with the exact Gaussian curve and amplification; the classical bound without it asks for 13,083 G."""
    assert reconstructed(DP2_SGD, 5.5404) == pytest.approx(3.0, rel=1e-4)
    classical = 2 * math.sqrt(2 * math.log(1.25 * 3120 / 1e-5)) * 3120 / 3
    assert classical == pytest.approx(13_083, abs=1)
    assert reconstructed(DP2_SGD, classical, num_entries=1) < 3.0
    assert math.isfinite(reconstructed(DP2_SGD, 2e-4))
    assert reconstructed(DP2_SGD, 2.0, num_entries=10**9) == 0.0


def test_renyi_accounting():
    assert reconstructed(A_DP2_SGD, 8.0, "poisson") == pytest.approx(0.0061, abs=1e-4)
    assert reconstructed(A_DP2_SGD, 8.0) == pytest.approx(0.0302, abs=1e-4)
    assert reconstructed(A_DP2_SGD, 0.01, "poisson") > 1e3
