"""Probabilities of a binomial count by scipy.special: importing scipy.stats takes longer than most epsilons do."""

from __future__ import annotations

import bisect

import numpy as np
import scipy


def above(counts: np.ndarray | int, num_trials: int, rate: np.ndarray | float) -> np.ndarray:
    """P(X > count) for X ~ Binomial(n, p), elementwise.

    Args:
        counts: each -1 ... n.
        num_trials: n.
        rate: p, in [0, 1].

    Examples:
        >>> [round(float(chance), 4) for chance in above(np.arange(3), 2, 0.1)]
        [0.19, 0.01, 0.0]
        >>> float(above(-1, 2, 0.1))
        1.0
    """
    rest = num_trials - np.asarray(counts)
    inside = np.where(rest > 0, scipy.special.betainc(np.maximum(np.add(counts, 1), 1), np.maximum(rest, 1), rate), 0.0)
    return np.where(np.less(counts, 0), 1.0, inside)  # betainc(0, b, p) is no number in SciPy 1.13


def least_count(failure: float, num_trials: int, rate: float) -> int:
    """Least k with P(X > k) at most `failure`.

    Examples:
        >>> least_count(1e-6, 16 * 3120, 1 / 16)
        3380
    """
    return bisect.bisect_left(range(num_trials), True, key=lambda count: above(count, num_trials, rate) <= failure)


def chances(counts: np.ndarray, num_trials: int, rate: float) -> np.ndarray:
    """P(X = count) for consecutive counts, each from the one before it, scaled to their sum.

    Args:
        counts: (m,), k, k + 1, ...
        num_trials: n.
        rate: p, in (0, 1].

    Examples:
        >>> [round(float(chance), 4) for chance in chances(np.arange(2), 2, 0.1)]
        [0.81, 0.18]
    """
    total = above(counts[0] - 1, num_trials, rate) - above(counts[-1], num_trials, rate)
    odds = np.log(rate) - np.log(max(1 - rate, 1e-300))
    steps = np.log(num_trials - counts[:-1]) - np.log(counts[1:]) + odds  # of the logarithm, from count to count
    logs = np.append(0.0, np.cumsum(steps))
    return total * np.exp(logs - np.asarray(scipy.special.logsumexp(logs)))
