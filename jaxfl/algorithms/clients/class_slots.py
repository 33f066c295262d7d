"""Slots for the clients of each class where the round's clients are drawn from all: how many suffice, and who is where.

The number of a class's active clients is random: hypergeometric where k clients are drawn without replacement, binomial
where each is drawn independently. A class has slots for as many as come in all rounds of a run but with a probability
that is negligible. An active client without a slot is counted, and is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.stats

from jaxfl.core import Array

# Of a run: slots suffice for all of them.
_NUM_ROUNDS = 10**6


class Placed(NamedTuple):
    """Which of the active clients are in the slots of each class."""

    rows: dict[int, Array]  # class -> (slots,), int32, places among the active clients; their number for an empty slot
    overflow: Array | None  # (), int32, active clients without a slot, which is an error; None where all have one


def class_slots(
    members: np.ndarray, num_active: int, *, independent: bool, failure_probability: float = 1e-9
) -> np.ndarray:
    """Slots for each class such that a run of 10^6 rounds has any active client without one with a small probability.

    The probability is bounded by the sum over classes and rounds of each class's tail.

    Args:
        members: (classes,), int, clients of each class; on the host.
        num_active: clients in a round, at most all.
        independent: whether clients are drawn independently, `num_active` expected; or exactly that many, without
            replacement.
        failure_probability: of the run, at most.

    Returns:
        (classes,), int, at most the class's members and, without replacement, at most `num_active`.

    Guarantees:
        - the tails beyond the slots add up to at most the failure probability, and with a slot less they do not.

    Example:
        >>> class_slots(np.array([43, 43, 42]), 32, independent=False).tolist()
        [29, 29, 29]
        >>> class_slots(np.array([3, 0, 125]), 128, independent=True).tolist()
        [3, 0, 125]
    """
    n = int(members.sum())
    share = failure_probability / (_NUM_ROUNDS * np.count_nonzero(members))

    def slots(count: int) -> int:
        most = count if independent else min(count, num_active)
        among = scipy.stats.binom(count, num_active / n) if independent else scipy.stats.hypergeom(n, count, num_active)
        # By the survival function itself: scipy's inverse goes through 1 - p, which is 1 for the tails wanted here.
        return int(np.argmax(among.sf(np.arange(most + 1)) <= share))

    return np.array([slots(int(count)) for count in members])


def place(classes: Array, slots: Mapping[int, int], is_active: Array | None, *, all_fit: bool) -> Placed:
    """Active clients in the slots of their classes, in the order of the active clients.

    Args:
        classes: (k,), int32, of the active clients.
        slots: class -> its slots, at least 1; of each class that a client is of.
        is_active: (k,), bool, False where there is no client; None where there always is.
        all_fit: whether no class can have more active clients than slots.

    Returns:
        `Placed`.

    Guarantees:
        - every active client is in a slot of its class, once, or is counted.

    Example:
        >>> placed = place(jnp.array([1, 0, 1, 1]), {0: 2, 1: 2}, None, all_fit=False)
        >>> {number: rows.tolist() for number, rows in placed.rows.items()}, int(placed.overflow)
        ({0: [1, 4], 1: [0, 2]}, 1)
    """
    k = len(classes)
    # Nobody comes behind all classes.
    sorted_by = classes if is_active is None else jnp.where(is_active, classes, max(slots) + 1)
    order = jnp.argsort(sorted_by, stable=True).astype(jnp.int32)
    rows, beyond = {}, []
    for number, count in slots.items():
        slot = jnp.arange(count, dtype=jnp.int32)
        first, present = (is_such.sum(dtype=jnp.int32) for is_such in (sorted_by < number, sorted_by == number))
        rows[number] = jnp.where(slot < present, order[jnp.minimum(first + slot, k - 1)], k)
        beyond.append(jnp.maximum(present - count, 0))
    return Placed(rows=rows, overflow=None if all_fit else jnp.stack(beyond).sum(dtype=jnp.int32))
