"""The schedules of gradient tracking with Laplace noise.

References:
    J. Chen, J. Wang, J.-F. Zhang, "Differentially Private Gradient-Tracking-Based Distributed Stochastic Optimization
    over Directed Graphs": Schemes (S1) and (S2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxfl.core import check

PerNode = float | np.ndarray  # () or (n,)


class TrackingSchedule(NamedTuple):
    """All step sizes, batch sizes and noise scales of a run of K + 1 iterations, k = 0, ..., K."""

    state_mixing: float  # alpha_K
    tracker_mixing: float  # beta_K
    step_size: float  # gamma_K
    num_samples: int  # m_K, samples of each gradient
    state_noise_scale: np.ndarray  # (K + 1,) or (n, K + 1), Laplace scale b of the state's noise, zeta_k
    tracker_noise_scale: np.ndarray  # (K + 1,) or (n, K + 1), Laplace scale b of the tracker's noise, eta_k


def polynomial_schedule(
    num_iterations: int,
    *,
    state_noise_exponent: PerNode,
    tracker_noise_exponent: PerNode,
    state_mixing: tuple[float, float] = (72, 0.987),
    tracker_mixing: tuple[float, float] = (0.95, 0.69),
    step_size: tuple[float, float] = (98, 0.997),
    num_samples: tuple[float, float] = (0.00007, 1.78),
    horizon_offset: int = 1,
) -> TrackingSchedule:
    """Scheme (S1): step sizes a / (K + 1)^p, m_K = floor(a4 K^p_m) + 1, noise scales (k + 1)^p. Defaults: section 4.1.

    Args:
        num_iterations: K, at least 1.
        state_noise_exponent, tracker_noise_exponent: p_zeta and p_eta, () or (n,).
        state_mixing, tracker_mixing, step_size, num_samples: (a1, p_alpha), (a2, p_beta), (a3, p_gamma), (a4, p_m).
        horizon_offset: 1 for step sizes a / (K + 1)^p, as the scheme defines them; 0 for a / K^p, as in section 4.1.

    Returns:
        The schedule; noise scales (K + 1,) or (n, K + 1), float64.

    Raises:
        ArgumentError: K below 1, an offset other than 0 and 1, or a gain that is not positive.

    Examples:
        >>> schedule = polynomial_schedule(2000, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> round(schedule.state_mixing, 6), round(schedule.tracker_mixing, 6), schedule.num_samples
        (0.039739, 0.005012, 53)
    """
    check.at_least(1, num_iterations=num_iterations)
    check.one_of((0, 1), horizon_offset=horizon_offset)
    check.positive(state_mixing=state_mixing[0], tracker_mixing=tracker_mixing[0])
    check.positive(step_size=step_size[0], num_samples=num_samples[0])
    horizon = float(num_iterations + horizon_offset)
    steps = np.arange(1.0, num_iterations + 2)
    return TrackingSchedule(
        state_mixing=state_mixing[0] / horizon ** state_mixing[1],
        tracker_mixing=tracker_mixing[0] / horizon ** tracker_mixing[1],
        step_size=step_size[0] / horizon ** step_size[1],
        num_samples=math.floor(num_samples[0] * float(num_iterations) ** num_samples[1]) + 1,
        state_noise_scale=steps ** np.asarray(state_noise_exponent, float)[..., None],
        tracker_noise_scale=steps ** np.asarray(tracker_noise_exponent, float)[..., None],
    )


def exponential_schedule(
    num_iterations: int,
    *,
    state_noise_base: PerNode,
    tracker_noise_base: PerNode,
    state_mixing: float = 0.1,
    tracker_mixing: float = 0.01,
    step_size: float = 0.1,
    num_samples_base: float = 1.002,
) -> TrackingSchedule:
    """Scheme (S2): constant step sizes, m_K = floor(p_m^K) + 1, noise scales p^K at every k. Defaults: section 4.1.

    Args:
        num_iterations: K, at least 1.
        state_noise_base, tracker_noise_base: p_zeta and p_eta, () or (n,), positive.
        state_mixing, tracker_mixing, step_size, num_samples_base: alpha, beta, gamma and p_m, positive.

    Returns:
        The schedule; noise scales (K + 1,) or (n, K + 1), float64, the same at every k.

    Raises:
        ArgumentError: K below 1, or a number that is not positive.

    Examples:
        >>> exponential_schedule(2000, state_noise_base=0.9996, tracker_noise_base=0.9996).num_samples
        55
    """
    check.at_least(1, num_iterations=num_iterations)
    check.positive(state_noise_base=state_noise_base, tracker_noise_base=tracker_noise_base)
    check.positive(state_mixing=state_mixing, tracker_mixing=tracker_mixing)
    check.positive(step_size=step_size, num_samples_base=num_samples_base)
    steps = np.ones(num_iterations + 1)
    return TrackingSchedule(
        state_mixing=state_mixing,
        tracker_mixing=tracker_mixing,
        step_size=step_size,
        num_samples=math.floor(num_samples_base**num_iterations) + 1,
        state_noise_scale=np.asarray(state_noise_base, float)[..., None] ** num_iterations * steps,
        tracker_noise_scale=np.asarray(tracker_noise_base, float)[..., None] ** num_iterations * steps,
    )


class Scheme(NamedTuple):
    """Noise of a scheme in the paper's runs: agent i of n has the exponent, or the base, `noise` + `spread` i / n."""

    noise: float
    spread: float


SCHEMES = {"S1": Scheme(0.09, 0.05), "S2": Scheme(0.99959, 5e-5)}


def paper_schedule(scheme: str, num_iterations: int, num_agents: int) -> TrackingSchedule:
    """The schedule of section 4.1, with the middle one of its three levels of noise.

    Args:
        scheme: "S1" or "S2"; `SCHEMES` has its noise.
        num_iterations: K, at least 1.
        num_agents: n, at least 1.

    Returns:
        The schedule; noise scales (n, K + 1), float64.

    Raises:
        ArgumentError: another scheme, or a number below 1.
    """
    check.one_of(tuple(SCHEMES), scheme=scheme)
    check.at_least(1, num_agents=num_agents)
    noise = SCHEMES[scheme].noise + SCHEMES[scheme].spread * (np.arange(1, num_agents + 1) / num_agents)
    if scheme == "S1":
        return polynomial_schedule(
            num_iterations, state_noise_exponent=noise, tracker_noise_exponent=noise, horizon_offset=0
        )
    return exponential_schedule(num_iterations, state_noise_base=noise, tracker_noise_base=noise)
