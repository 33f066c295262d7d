"""Budgets of a whole network: the least noise, and the most rounds, that keep every node within its epsilon."""

from __future__ import annotations

import functools
from typing import Any

from jaxfl.privacy.gossip.accountant import Accountant
from jaxfl.privacy.gossip.accounting import calibrate_noise_std, epsilon, max_rounds
from jaxfl.privacy.gossip.proven import Release


@functools.cache  # points of a sweep share it
def network_noise_std(
    accountant: Accountant,
    bound: str,
    releases: tuple[Release, ...],
    num_rounds: int,
    *,
    target_epsilon: float,
    **options: Any,
) -> float:
    """The least noise with which no node spends more than the budget.

    Args:
        accountant, bound, num_rounds, target_epsilon: as for `calibrate_noise_std`.
        releases: of each node, or of each kind of node; their noise_std is ignored.
        options: dp_delta, c2 and num_nodes of `epsilon`.

    Raises:
        ArgumentError: as for `calibrate_noise_std`.

    Guarantees:
        - no node spends more than its budget.
    """
    noise = 0.0
    # Ascending: the smallest node mostly needs most. With a table of batches another one may.
    for release in sorted(set(releases), key=lambda release: release.num_entries):
        noisy = release._replace(noise_std=noise)
        if noise == 0 or epsilon(accountant, bound, noisy, num_rounds, **options) > target_epsilon:
            least = calibrate_noise_std(accountant, bound, noisy, num_rounds, target_epsilon=target_epsilon, **options)
            noise = max(noise, least)
    return noise


@functools.cache
def network_rounds(
    accountant: Accountant,
    bound: str,
    releases: tuple[Release, ...],
    limit: int,
    *,
    target_epsilon: float,
    **options: Any,
) -> int:
    """The most rounds, 0 ... limit, that the budget pays for at every node; the rest as for `network_noise_std`."""
    rounds = limit
    for release in sorted(set(releases), key=lambda release: release.num_entries):
        if epsilon(accountant, bound, release, rounds, **options) > target_epsilon:
            rounds = max_rounds(accountant, bound, release, target_epsilon=target_epsilon, limit=rounds, **options)
    return rounds
