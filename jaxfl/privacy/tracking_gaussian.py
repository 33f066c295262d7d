"""Gaussian noise in gradient tracking, an option beyond the paper: the same sensitivities, in L2 norm."""

from __future__ import annotations

import numpy as np

from jaxfl.core import check
from jaxfl.privacy import dominating_pairs
from jaxfl.privacy.tracking import Sensitivities, TrackingSchedule, cumulative_epsilon


def gaussian_epsilon(schedule: TrackingSchedule, sensitivities: Sensitivities, *, dp_delta: float) -> np.ndarray:
    """What Gaussian noise costs, exactly where every sensitivity is reached.

    Given everything broadcast before, a broadcast x~_k moves by at most dx_k / s_x,k standard deviations, and y~_k
    likewise. Such mechanisms compose adaptively to that of N(mu, 1) against N(0, 1) with
    mu^2 = sum_k (dx_k / s_x,k)^2 + (dy_k / s_y,k)^2.

    Args:
        schedule: the run; its noise scales are standard deviations.
        sensitivities: in L2 norm, that is, found for a C that bounds L2 changes of one sample's gradient.
        dp_delta: in (0, 1).

    Returns:
        dp_epsilon at dp_delta, () or (n,), neighboring relation "replace_one".

    Raises:
        ArgumentError: noise that is not positive, or a delta outside (0, 1).

    Example:
        >>> numbers = TrackingSchedule(0.5, 0.1, 0.2, 4, np.full(2, 0.5), np.full(2, 2.0))
        >>> moves = Sensitivities(state=np.array([0.0, 0.3]), tracker=np.array([1.6, 0.0]))
        >>> print(round(float(gaussian_epsilon(numbers, moves, dp_delta=1e-5)), 6))  # mu = 1
        4.377178

    References:
        J. Dong, A. Roth, W. Su, "Gaussian Differential Privacy", 2022, arXiv:1905.02383, section 3 (composition).
    """
    check.open_unit(dp_delta=dp_delta)
    squared = schedule._replace(
        state_noise_scale=np.square(schedule.state_noise_scale),
        tracker_noise_scale=np.square(schedule.tracker_noise_scale),
    )
    mu = np.sqrt(cumulative_epsilon(squared, Sensitivities(*(np.square(change) for change in sensitivities))))
    return np.vectorize(dominating_pairs.gaussian_epsilon, otypes=[float])(mu, dp_delta)
