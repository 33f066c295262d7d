"""Zero-concentrated DP: what releases of small pure epsilons cost together, at a delta above 0.

Rho-zCDP bounds every Renyi divergence: D_alpha(P | Q) <= alpha rho for all alpha > 1. A release that is eps-DP at
delta 0 is eps^2 / 2-zCDP (Bun and Steinke, Proposition 1.4), and rhos add up under adaptive composition (their Lemma
1.7): K releases of eps cost about eps sqrt(2 K log(1 / delta)) instead of K eps.

Where rho is random and does not depend on the data, rho_j with probability p_j, exp((alpha - 1) D_alpha) is jointly
convex, so that D_alpha <= log(sum_j p_j exp((alpha - 1) alpha rho_j)) / (alpha - 1).

References:
    M. Bun, T. Steinke, "Concentrated Differential Privacy: Simplifications, Extensions, and Lower Bounds", TCC 2016,
    arXiv:1605.02065.
    C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, arXiv:2004.00010,
    Proposition 12 (from Renyi divergences to delta).
    T. van Erven, P. Harremoes, "Renyi Divergence and Kullback-Leibler Divergence", 2014, arXiv:1206.2459, Theorem 13
    (convexity).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy

from jaxfl.core import check


def concentrated_epsilon(rho: float | np.ndarray, dp_delta: float, probabilities: np.ndarray | None = None) -> float:
    """epsilon of rho-zCDP: min over alpha > 1 of D_alpha + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1).

    Args:
        rho: at least 0; () or (m,).
        dp_delta: in (0, 1).
        probabilities: (m,), of each rho, sum at most 1; None for one rho. The probability missing to 1 counts as an
            infinite loss, which the caller takes out of delta.

    Returns:
        dp_epsilon, at least 0. Each alpha gives a bound, so that a search that ends early only loosens it.

    Raises:
        ArgumentError: a negative rho, or a delta outside (0, 1).

    Guarantees:
        - of one rho it is above the epsilon of N(mu, 1) against N(0, 1), which is mu^2 / 2-zCDP.

    Examples:
        >>> print(round(concentrated_epsilon(0.5, 1e-5), 3))  # mu = 1, which costs 4.377
        4.728
    """
    check.non_negative(rho=rho)
    check.open_unit(dp_delta=dp_delta)
    rhos = np.atleast_1d(np.asarray(rho, float))
    if not rhos.any():
        return 0.0
    with np.errstate(divide="ignore"):  # a probability of 0 counts for nothing
        logs = np.zeros(1) if probabilities is None else np.log(probabilities)

    def bound(log_excess: Any) -> np.ndarray:  # log(alpha - 1), () or (g,)
        excess = np.exp(log_excess)
        alpha = 1 + excess
        # By hand: scipy.special.logsumexp takes 0.2 ms a call.
        terms = np.multiply.outer(excess * alpha, rhos) + logs
        top = terms.max(axis=-1)
        divergence = (top + np.log(np.exp(terms - top[..., None]).sum(axis=-1))) / excess
        return divergence + log_excess - np.log(alpha) - np.log(dp_delta * alpha) / excess

    guess = 0.5 * math.log(math.log(1 / dp_delta) / rhos.max())  # of the simpler conversion
    grid = guess + np.linspace(-6, 8, 57)
    start = grid[int(np.argmin(bound(grid)))]
    refined: Any = scipy.optimize.minimize_scalar(bound, bounds=(start - 0.25, start + 0.25), method="bounded")
    return max(0.0, float(refined.fun)) * (1 + 1e-12)
