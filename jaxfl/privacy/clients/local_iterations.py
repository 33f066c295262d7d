"""ALI-DPFL's accountant, as published: Renyi DP of DP-SGD's local iterations, integer orders 2 to 64.

In one local iteration of a client every sample joins the batch independently with probability q = B / |D_i|
(`sampling_rate`), clipped gradients are summed, and the sum gets Gaussian noise of standard deviation sigma
(`noise_multiplier`) times the clip norm. Equation (17) gives the Renyi divergence of this, for integer orders alpha:

    R(alpha) = log(sum_{k=0..alpha} binom(alpha, k) (1 - q)^(alpha - k) q^k exp((k^2 - k) / (2 sigma^2))) / (alpha - 1).

T iterations add up to T R(alpha), and epsilon = min_alpha T R(alpha) + log(1 / delta) / (alpha - 1). This is a valid
bound for data sets that differ by adding or removing one sample, but a loose one: privacy loss distributions allow 5.4
times the iterations at epsilon 1.55. It covers the noisy models alone, not the estimates rho_i, beta_i and xi_i that
clients also send in Algorithm 2.

Differences from the paper: equations (14) and (18) as printed lack the logarithm (epsilon 10.4 instead of 1.55 after
79 iterations), have i where k is meant, and sum over T + 1 iterations. Algorithm 2 adds up epsilons; what adds up is
R(alpha). The paper's own counts for |D_i| = 5000, B = 75 exceed the exact ones by 1 to 5, and by 48 at epsilon 3.75.

References:
    X. Ling, J. Fu, K. Wang, H. Liu, Z. Chen, "ALI-DPFL: Differentially Private Federated Learning with Adaptive Local
    Iterations": Theorem 3, Lemma 2, Definitions 3 to 5.
    I. Mironov, K. Talwar, L. Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", 2019,
    arXiv:1908.10530, section 3.3.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from jaxfl.core import check

ORDERS = np.arange(2, 65)  # (63,), int64


def renyi_divergences(*, sampling_rate: float, noise_multiplier: float) -> np.ndarray:
    """R(alpha) of one iteration, equation (17).

    Args:
        sampling_rate: q, in (0, 1].
        noise_multiplier: sigma, noise standard deviation divided by the clip norm, positive.

    Returns:
        (63,), float64, one for each of `ORDERS`.

    Raises:
        ArgumentError: a rate outside (0, 1], or a multiplier that is not positive.

    Guarantees:
        - it is the Renyi divergence of the two outputs' densities.
        - at sampling rate 1 it is that of the Gaussian mechanism, alpha / (2 sigma^2).
    """
    check.positive(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)
    check.probability(sampling_rate=sampling_rate)

    def divergence(order: int) -> float:
        # The weights of the sum are probabilities: A - 1 = sum of weight (exp(x) - 1) loses no digits if A is near 1.
        k = np.arange(2, order + 1)
        x = (k**2 - k) / (2 * noise_multiplier**2)
        # xlogy and xlog1py take 0 log 0 for 0, which sampling rate 1 needs.
        log_weight = np.log(scipy.special.binom(order, k)) + scipy.special.xlog1py(order - k, -sampling_rate)
        log_weight = log_weight + scipy.special.xlogy(k, sampling_rate)
        log_excess = np.logaddexp.reduce(log_weight + x + np.log(-np.expm1(-x)))
        return np.logaddexp(0.0, log_excess) / (order - 1)

    return np.array([divergence(int(order)) for order in ORDERS])


def local_iterations_epsilon(
    num_iterations: int, *, sampling_rate: float, noise_multiplier: float, dp_delta: float
) -> float:
    """Epsilon after a number of local iterations, whatever their division into rounds.

    Args:
        num_iterations: T, at least 0, all local iterations of the client in the whole run.
        sampling_rate: q = B / |D_i|, in (0, 1].
        noise_multiplier: sigma, positive.
        dp_delta: in (0, 1].

    Returns:
        dp_epsilon, neighboring relation "add_or_remove_one". Zero iterations reveal nothing: 0.

    Raises:
        ArgumentError: a number outside its range.

    Examples:
        >>> client = {"sampling_rate": 75 / 5000, "noise_multiplier": 1.1, "dp_delta": 1e-5}
        >>> round(local_iterations_epsilon(79, **client), 4)
        1.5504
    """
    check.at_least(0, num_iterations=num_iterations)
    check.positive(dp_delta=dp_delta)
    check.probability(dp_delta=dp_delta)
    divergences = renyi_divergences(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)
    return converted_epsilon(num_iterations * divergences, dp_delta) if num_iterations else 0.0


def converted_epsilon(divergences: np.ndarray, dp_delta: float) -> float:
    """The smallest R(alpha) + log(1 / delta) / (alpha - 1) over `ORDERS`, Definition 5, for the R(alpha) of a run."""
    return float(np.min(divergences - math.log(dp_delta) / (ORDERS - 1)))
