"""Robust means of clients' updates, and clients that attack: arguments of `jaxfl.uplink`.

c updates Delta_i arrive, as rows of a matrix (slots, d) under a mask. None of these means is a sum of bounded parts, so
that private updates are refused beside them; noise of local steps keeps its statement. Updates that are not finite
count as lost. A round with fewer updates than a mean needs is void: it leaves the server's model and is counted.

Coordinate median, trimmed mean: Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv:1803.01498. Krum, multi-Krum:
Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, arXiv:1703.02757. Geometric median: Pillutla, Kakade,
Harchaoui, IEEE TSP 2022, arXiv:1912.13445, Algorithm 2. Centered clipping: Karimireddy, He, Jaggi, ICML 2021,
arXiv:2012.10333. ALIE: Baruch, Baruch, Goldberg, NeurIPS 2019, arXiv:1902.06156.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, Key, Purpose, check, node_keys, purpose_key
from jaxfl.core.algorithm import constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import root


class Aggregate(NamedTuple):
    """A robust mean."""

    least: int  # updates below which a round is void
    combine: Callable[..., Array]  # (updates (c, d), arrived (c,), last result (d,)) -> (d,); rows that are lost are 0
    keeps: bool = False  # whether `combine` reads the last result, 0 at first; else it is None

    __repr__ = short_repr


class AttackDraws(NamedTuple):
    """The attackers of a round, and their random numbers."""

    attackers: Array  # (f,), int32, the same in all rounds
    keys: Array | None  # (n,), typed, of what attackers send; None where they draw nothing


class Attack(NamedTuple):
    """What some clients send in place of their updates."""

    attackers: np.ndarray | int  # (f,), int32, numbers of the clients; or f, where they are drawn
    act: Callable[..., Array]  # (updates (c, d), honest (c,), normal numbers (c, d)) -> what attackers send, (c, d)
    draws: bool  # whether `act` takes normal numbers

    __repr__ = short_repr

    @property
    def num_attackers(self) -> int:
        """f."""
        return self.attackers if isinstance(self.attackers, int) else len(self.attackers)

    def check(self, num_nodes: int) -> None:
        """Refuse attackers that are no clients."""
        if not isinstance(self.attackers, int):
            check.below(num_nodes, attackers=self.attackers)
        elif self.attackers > num_nodes:
            found = f"got {self.attackers} for data of {num_nodes} clients"
            raise ArgumentError("attackers", "must be at most the number of clients", found, "Pass fewer.")

    def draw(self, key: Key, round_index: Array, num_nodes: int) -> AttackDraws:
        """Draw the attackers where only their number is given, and the keys of what they send."""
        numbers = self.attackers
        if isinstance(numbers, int):
            numbers = jax.random.choice(purpose_key(key, Purpose.ATTACKERS), num_nodes, (numbers,), replace=False)
        keys = node_keys(purpose_key(key, Purpose.ATTACK, round_index), num_nodes) if self.draws else None
        return AttackDraws(jnp.asarray(numbers, jnp.int32), keys)


@constructor
def trimmed_mean(num_trimmed: int) -> Aggregate:
    """Mean of each coordinate without its f smallest and f largest values; the paper's beta is f / c.

    Args:
        num_trimmed: f; a round needs 2 f + 1 updates, and one with fewer leaves the server's model as it is.

    Guarantees:
        - the order of clients changes no bit.
        - f arbitrary values leave the mean within the range of the others.

    Examples:
        >>> trimmed_mean(1).combine(jnp.array([[1.0], [2.0], [9.0], [4.0]]), jnp.ones(4, bool), None).tolist()
        [3.0]
    """
    check.at_least(0, num_trimmed=num_trimmed)

    def combine(updates, arrived, last):
        count, place = arrived.sum(dtype=jnp.int32), jnp.arange(len(updates), dtype=jnp.int32)[:, None]
        kept = (place >= num_trimmed) & (place < count - num_trimmed)
        total = jnp.where(kept, _in_order(updates, arrived), 0).sum(axis=0)
        return total / jnp.maximum(count - 2 * num_trimmed, 1).astype(updates.dtype)

    return Aggregate(2 * num_trimmed + 1, combine)


def coordinate_median() -> Aggregate:
    """Median of each coordinate, the mean of the two middle values where their number is even."""

    def combine(updates, arrived, last):
        in_order, count = _in_order(updates, arrived), jnp.maximum(arrived.sum(dtype=jnp.int32), 1)
        return (in_order[(count - 1) // 2] + in_order[count // 2]) / 2

    return Aggregate(1, combine)


@constructor
def krum(num_attackers: int) -> Aggregate:
    """The update nearest to its c - f - 2 nearest others by the sum of squared distances; the first of equal ones.

    Args:
        num_attackers: f; a round needs 2 f + 3 updates, and one with fewer leaves the server's model as it is.

    Guarantees:
        - the result is one of the updates, bit for bit.
    """
    return multi_krum(num_attackers, num_kept=1)


@constructor
def multi_krum(num_attackers: int, *, num_kept: int) -> Aggregate:
    """Mean of the m updates that `krum` would choose one after the other by one scoring.

    Args:
        num_attackers: f; a round needs 2 f + 3 updates, and m.
        num_kept: m. The paper's bound is c - 2 f - 3, libraries also take c - f.
    """
    check.at_least(0, num_attackers=num_attackers)
    check.at_least(1, num_kept=num_kept)

    def combine(updates, arrived, last):
        slots = jnp.arange(len(updates), dtype=jnp.int32)

        def score(own):
            # Of differences: squares of whole updates would lose all digits near consensus.
            distances = jnp.sum((updates - updates[own][None]) ** 2, axis=1)
            others = jnp.sort(jnp.where(arrived & (slots != own), distances, jnp.inf))
            return jnp.where(slots < arrived.sum(dtype=jnp.int32) - num_attackers - 2, others, 0).sum()

        scores = jnp.where(arrived, jax.lax.map(score, slots), jnp.inf)
        kept = jnp.argsort(scores, stable=True)[:num_kept]
        return updates[kept].sum(axis=0) / num_kept

    return Aggregate(max(2 * num_attackers + 3, num_kept), combine)


def geometric_median(num_iterations: int = 8, *, guard: float | Array = 1e-6) -> Aggregate:
    """Smoothed geometric median by Weiszfeld's iterations from the mean, with uniform weights.

    Args:
        num_iterations: R, 3 to 10.
        guard: nu, below which a distance counts as nu: absolute, positive; may be traced.

    Guarantees:
        - no iteration raises the sum of smoothed distances.
    """
    check.at_least(1, num_iterations=num_iterations)
    check.positive(guard=guard)

    def combine(updates, arrived, last):
        present = arrived.astype(updates.dtype)

        def mean(weights):
            return jnp.matmul(weights, updates, precision="highest") / jnp.maximum(
                weights.sum(), jnp.finfo(updates.dtype).tiny
            )

        def nearer(_, center):
            distances = root(jnp.sum((updates - center[None]) ** 2, axis=1))
            return mean(present / jnp.maximum(distances, guard))

        return jax.lax.fori_loop(0, num_iterations, nearer, mean(present))

    return Aggregate(1, combine)


@constructor
def sign_flip(attackers: Sequence[int] | int, *, scale: float | Array = 1.0) -> Attack:
    """Attackers send -s times their update.

    Args:
        attackers: numbers of the clients, or how many. These are then drawn once, by the half of a `RunKey` that all
            runs of a base key share: runs that are compared have the same ones.
        scale: s, 1 to 10.

    Guarantees:
        - attackers that are drawn are the same in all rounds, and in all runs of a base key.
    """
    return Attack(_attackers(attackers), lambda updates, honest, normal: -scale * updates, False)


def centered_clipping(clip_norm: float | Array, *, num_iterations: int = 1) -> Aggregate:
    """The last round's result v, moved by the mean of the updates' clipped distances from it.

    v <- v + (1 / c) sum (Delta_i - v) min(1, tau / |Delta_i - v|), from v = 0 in the first round. The paper's proof
    needs clients that send a momentum: `jaxfl.uplink(aggregate=..., feedback=client_momentum(0.9))`.

    Args:
        clip_norm: tau, positive, of the size of honest distances; may be traced. A very large one gives the mean.
        num_iterations: 1 to 5.

    Guarantees:
        - an iteration moves v by at most tau.
    """
    check.at_least(1, num_iterations=num_iterations)
    check.clip_norm(clip_norm=clip_norm)

    def combine(updates, arrived, last):
        count = jnp.maximum(arrived.sum(dtype=jnp.int32), 1).astype(updates.dtype)
        radius = jnp.asarray(clip_norm, updates.dtype)

        def nearer(_, center):
            apart = updates - center[None]
            distances = root(jnp.sum(apart**2, axis=1))
            weights = jnp.where(arrived, radius / jnp.maximum(distances, radius), 0)
            return center + jnp.matmul(weights, apart, precision="highest") / count

        return jax.lax.fori_loop(0, num_iterations, nearer, last)

    return Aggregate(1, combine, keeps=True)


@constructor
def random_updates(attackers: Sequence[int] | int, *, std: float | Array) -> Attack:
    """Attackers, given as for `sign_flip`, send Gaussian noise of this standard deviation, 1 to 200."""
    return Attack(_attackers(attackers), lambda updates, honest, normal: std * normal, True)


@constructor
def alie(
    attackers: Sequence[int] | int, *, num_active: int | None = None, num_std: float | Array | None = None
) -> Attack:
    """Attackers all send mean - z std of the honest updates, by coordinate: "a little is enough".

    Args:
        attackers: f numbers of clients, or f, as for `sign_flip`.
        num_active: c, from which the paper's z follows; needed where `num_std` is None.
        num_std: z; None: Phi^-1((c - f - s) / (c - f)), s = floor(c / 2 + 1) - f, which must be positive.

    Examples:
        >>> attack = alie([0], num_std=2.0)  # the standard deviation is over the number of honest ones
        >>> attack.act(jnp.array([[9.0], [1.0], [3.0]]), jnp.array([False, True, True]), None)[0].tolist()
        [0.0]
    """
    who = _attackers(attackers)
    if num_std is None:
        count = who if isinstance(who, int) else len(who)
        if num_active is None:
            requirement = "must be the clients of a round where no num_std is given: z follows from it"
            raise ArgumentError("num_active", requirement, "got neither", "Pass one of the two.")
        check.at_least(count + 1, num_active=num_active)
        honest = num_active - count
        share = (honest - (num_active // 2 + 1 - count)) / honest
        if not 0.5 < share < 1:
            found, remedy = f"got {count} of {num_active}, z at the share {share:.2f}", "Pass num_std."
            raise ArgumentError("attackers", "must be few enough to hide and enough for z > 0", found, remedy)
        num_std = NormalDist().inv_cdf(share)

    def act(updates, honest, normal):
        count = jnp.maximum(honest.sum(dtype=jnp.int32), 1).astype(updates.dtype)
        mean = jnp.where(honest[:, None], updates, 0).sum(axis=0) / count
        variance = jnp.where(honest[:, None], (updates - mean[None]) ** 2, 0).sum(axis=0) / count
        return jnp.broadcast_to((mean - num_std * root(variance))[None], updates.shape)

    return Attack(who, act, False)


def _in_order(updates: Array, arrived: Array) -> Array:
    """Each coordinate's values in ascending order, those that are lost behind all others."""
    return jnp.sort(jnp.where(arrived[:, None], updates, jnp.inf), axis=0)


def _attackers(attackers: Sequence[int] | int) -> np.ndarray | int:
    """Numbers of clients, (f,), or how many."""
    if np.ndim(attackers) == 0:
        check.at_least(0, attackers=attackers)
        return int(attackers)  # pyright: ignore[reportArgumentType]
    numbers = np.asarray(attackers)
    numbers = numbers if numbers.size else numbers.astype(int)
    check.integers(attackers=numbers)
    check.non_negative(attackers=numbers)
    return numbers.astype(np.int32)
