"""Searches over a privacy curve: the least noise, and the most rounds, that meet a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import scipy.optimize

from jaxfl.core import ArgumentError

_PRECISION = 2e-4  # relative, of a noise
_MAX_DOUBLINGS = 100


def smallest_noise(epsilon_of: Callable[[float], float], target_epsilon: float, guess: float) -> float:
    """Smallest noise whose epsilon is at most the target, to 0.1 % and never below it.

    Args:
        epsilon_of: noise > 0 -> epsilon, falling, toward 0 for large noise.
        target_epsilon: above 0.
        guess: above 0, of the right order of magnitude.

    Raises:
        ArgumentError: when no noise meets the target.

    Guarantees:
        - never overspends: epsilon_of(result) <= target_epsilon.
        - tight: 0.1 % less noise overspends.

    Example:
        >>> round(smallest_noise(lambda noise: 6 / noise, 3.0, guess=1.0), 2)
        2.0
    """

    def excess(log_noise: float) -> float:
        found = epsilon_of(math.exp(log_noise))
        return math.log(min(max(found, 1e-9 * target_epsilon), 1e9 * target_epsilon) / target_epsilon)

    low = high = math.log(guess)
    value = excess(low)
    toward = math.log(2) if value > 0 else -math.log(2)
    for _ in range(_MAX_DOUBLINGS):
        if value * toward <= 0:
            break
        low, high = (high, high + toward) if toward > 0 else (low + toward, low)
        value = excess(high if toward > 0 else low)
    else:
        found = f"epsilon is {epsilon_of(math.exp(high)):g} at noise {math.exp(high):g}"
        raise ArgumentError("target_epsilon", "must be met by some noise", found, "Pass a larger dp_delta.")
    log_noise = cast(float, scipy.optimize.brentq(excess, low, high, xtol=_PRECISION / 2))
    # The root is good to xtol on either side.
    while excess(log_noise) > 0:
        log_noise += _PRECISION / 2
    return math.exp(log_noise)


def most_rounds(epsilon_of: Callable[[int], float], target_epsilon: float, limit: int) -> int:
    """Most rounds in 0 ... limit whose epsilon is at most the target; 0 when not even one is.

    Args:
        epsilon_of: number of rounds >= 1 -> epsilon, never falling.
        target_epsilon: above 0.
        limit: at least 0.

    Example:
        >>> most_rounds(lambda rounds: 0.5 * rounds, 3.2, limit=100)
        6
    """
    enough, too_many = 0, limit + 1
    # Doubling first: few rounds are much cheaper to account for than many.
    rounds = 1
    while enough + 1 < too_many:
        if epsilon_of(rounds) <= target_epsilon:
            enough = rounds
        else:
            too_many = rounds
        rounds = min(2 * rounds, limit) if too_many > limit else (enough + too_many) // 2
    return enough
