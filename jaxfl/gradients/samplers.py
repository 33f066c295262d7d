"""Batches of a node in a round: uniform, fixed or Poisson, each at a cost that does not grow with J.

Every sampler returns a batch of static capacity with a mask, and every estimate divides by `batch_size`, the expected
number of samples and a public constant, never by the number that was realised.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, Key, Purpose, check, node_keys, one_kernel, purpose_key
from jaxfl.core.platform import is_cpu
from jaxfl.core.reprs import short_repr
from jaxfl.core.types import node_text

BATCH_OVERFLOW = "batch_overflow"
"""Count of samples, or of clients, that were drawn and had no slot."""

# Comparing all pairs of b steps against sorting them, two CPU cores: 125 us against 244 for 64 nodes at b = 32, 3.1 ms
# against 1.0 for 10 nodes at b = 500, 150 against 5 at b = 2,000.
_PAIRS_COMPARED = 256


class Batch(NamedTuple):
    """The entries (samples, or fixed batches of them) that each node uses in a round; c is the sampler's capacity."""

    indices: Array  # (n, c), int32, position among the node's own entries, in [0, count); 0 where masked
    mask: Array  # (n, c), bool, False for padding
    overflow: Array  # (n,), int32, entries drawn that the capacity could not hold; anything but 0 is an error


class Sampler(NamedTuple):
    """Method of drawing a batch.

    Attributes:
        name: "uniform", "fixed" or "poisson".
        batch_size: b, the expected number of entries and the divisor of every mean.
        capacity: c, the static number of slots.
        may_repeat: whether an entry can occur twice in one batch.
        draw_node: (key of the node, count of entries () int32) -> (indices (c,), mask (c,), overflow ()).
    """

    name: str
    batch_size: int
    capacity: int
    may_repeat: bool
    draw_node: Callable[[Array, Array], tuple[Array, Array, Array]]

    __repr__ = short_repr


def uniform(batch_size: int = 1) -> Sampler:
    """b independent draws, each uniform over the node's entries (the paper's sampler at b = 1; an entry may repeat).

    Args:
        batch_size: b, at least 1.

    Guarantees:
        - every entry has probability 1/J in every draw.
    """
    check.at_least(1, batch_size=batch_size)

    def draw_node(key, count):
        indices = jax.random.randint(one_kernel(key), (batch_size,), 0, count, jnp.int32)
        return indices, jnp.ones(batch_size, bool), jnp.int32(0)

    return Sampler("uniform", batch_size, batch_size, batch_size > 1, draw_node)


def fixed(batch_size: int) -> Sampler:
    """b different entries, every subset of that size equally likely (sampling without replacement).

    The first b steps of a Fisher-Yates shuffle whose array is never built, all at once: the cost does not grow with J.

    Args:
        batch_size: b, at least 1 and at most the smallest node's number of entries.

    Guarantees:
        - no entry occurs twice in a batch.
        - every entry has probability b/J.
        - the entries are those of the shuffle's first b steps.
    """
    check.at_least(1, batch_size=batch_size)

    def draw_node(key, count):
        step = jnp.arange(batch_size, dtype=jnp.int32)
        swap_with = jax.random.randint(one_kernel(key), (batch_size,), step, count, jnp.int32)
        return _shuffle(swap_with), jnp.ones(batch_size, bool), jnp.int32(0)

    return Sampler("fixed", batch_size, batch_size, False, draw_node)


def _shuffle(swap_with: Array) -> Array:
    """The first b entries of 0, 1, 2, ... after step t = 0, ..., b - 1 swapped t with `swap_with[t]` >= t, (b,) int32.

    Step t takes the number at s[t] and puts there the number at t. The latest step that swapped with a position put its
    number there; without one it is the position's own. So chains of steps lead to numbers. Pointers that jump twice as
    far each time follow all chains at once. A loop of b steps is b times as many launches on a GPU.
    """
    num_steps = len(swap_with)
    step = jnp.arange(num_steps, dtype=jnp.int32)
    if num_steps <= _PAIRS_COMPARED:
        earlier = step[None, :] < step[:, None]

        def latest_before(position):
            return jnp.max(jnp.where((swap_with[None, :] == position[:, None]) & earlier, step[None, :], -1), axis=1)

        put_at_target, put_at_own = latest_before(swap_with), latest_before(step)
    else:
        target, order = jax.lax.sort((swap_with, step), num_keys=1, is_stable=True)
        previous = jnp.where(target[1:] == target[:-1], order[:-1], -1)
        none = jnp.full(num_steps, -1, jnp.int32)
        put_at_target = none.at[order[1:]].set(previous, mode="promise_in_bounds", unique_indices=True)
        # No later step reads what lies where a step swapped with itself.
        put_at_own = none.at[swap_with].max(step, mode="drop")
    origin = jnp.where(put_at_own >= 0, put_at_own, step)
    for _ in range((num_steps - 1).bit_length()):
        origin = origin.at[origin].get(mode="promise_in_bounds")
    return jnp.where(put_at_target >= 0, origin.at[put_at_target].get(mode="clip"), swap_with)


def poisson(batch_size: int, *, num_draws: int = 10**7) -> Sampler:
    """Each entry independently with probability q = b/J, in a masked batch of fixed capacity.

    The gaps between included entries of a Bernoulli process are geometric, so the batch costs `capacity` random numbers
    whatever J is. A batch that exceeds the capacity is reported in `Batch.overflow` and stops the run: it is never
    silently truncated.

    Args:
        batch_size: b, the expected number of entries, at least 1 and at most the smallest node's number of entries.
        num_draws: number of nodes times rounds for which the capacity is chosen (see `poisson_capacity`): the chance of
            an overflow in any of them stays below 1e-9, and below 1e-6 on an accelerator.

    Guarantees:
        - entries are included independently with probability b/J, up to the rounding of 32 random bits and float32
          logarithms: a relative 6e-8 J/b in the probability of one gap, 2^-32 in that of any longer one.
    """
    check.at_least(1, batch_size=batch_size, num_draws=num_draws)
    # A CPU leaves empty slots out, and an accelerator computes them all: 82 in place of 89 of them at b = 32.
    capacity = poisson_capacity(batch_size, num_draws, 1e-9 if is_cpu() else 1e-6)

    def draw_node(key, count):
        rate = jnp.float32(batch_size) / count.astype(jnp.float32)
        # One more gap than there are slots shows whether an included entry found no slot.
        bits = jax.random.bits(one_kernel(key), (capacity + 1,), jnp.uint32)
        # Exponential waiting times from u = bits / 2^32, by log1p(-u) near u = 0 and log(1 - u) near u = 1: float32
        # holds 24 bits, and either form alone would lose the small gaps or cut the tail off.
        step = jnp.float32(2.0**-32)
        near_zero = -jnp.log1p(-bits.astype(jnp.float32) * step)
        near_one = -jnp.log((~bits).astype(jnp.float32) * step + step)
        waiting = jnp.where(bits < jnp.uint32(2**31), near_zero, near_one)
        geometric = jnp.minimum(jnp.floor(waiting / -jnp.log1p(-rate)), count.astype(jnp.float32))
        positions = jnp.cumsum(geometric.astype(jnp.int32) + 1) - 1
        mask = positions < count
        return jnp.where(mask, positions, 0)[:capacity], mask[:capacity], mask[capacity].astype(jnp.int32)

    return Sampler("poisson", batch_size, capacity, False, draw_node)


def poisson_capacity(batch_size: int, num_draws: int, failure_probability: float) -> int:
    """Slots such that the chance of any overflow in `num_draws` Poisson batches stays below `failure_probability`.

    Binomial(J, b/J) has a lighter upper tail than Poisson(b) for every J (Anderson and Samuels 1967, for values from
    b + 1), so the tail of Poisson(b) beyond the capacity, times num_draws, bounds it for nodes of all sizes.

    Examples:
        >>> poisson_capacity(1, 10**7, 1e-9), poisson_capacity(32, 10**7, 1e-9), poisson_capacity(32, 10**7, 1e-6)
        (17, 89, 82)
    """

    from scipy.special import pdtrc  # a third of a second, for Poisson batches only

    # The survival function itself: scipy's inverse goes through 1 - p, which is 1 for such tails.
    def is_enough(capacity: int) -> bool:
        return bool(pdtrc(capacity, batch_size) * num_draws < failure_probability)

    if is_enough(batch_size):
        return batch_size
    too_few, step = batch_size, 1
    while not is_enough(too_few + step):
        too_few, step = too_few + step, 2 * step
    return too_few + 1 + bisect.bisect_left(range(too_few + 1, too_few + step + 1), True, key=is_enough)


def draw_batch(sampler: Sampler, key: Key, round_index: Array, counts: Array, max_count: int | None = None) -> Batch:
    """The batch of every node in one round.

    Args:
        sampler: how.
        key: base key of the run.
        round_index: (), int32.
        counts: (n,), int32, entries of each node.
        max_count: the largest of the counts, where it is static.

    Guarantees:
        - a fixed batch of all entries has them in their order, and draws nothing.
    """
    if sampler.name == "fixed" and sampler.batch_size == max_count:
        indices = jnp.broadcast_to(jnp.arange(max_count, dtype=jnp.int32), (counts.shape[0], max_count))
        mask, overflow = jnp.ones(indices.shape, bool), jnp.zeros_like(counts)
    else:
        keys = node_keys(purpose_key(key, Purpose.BATCH, round_index), counts.shape[0])
        indices, mask, overflow = jax.vmap(sampler.draw_node)(keys, counts)
    if sampler.name != "uniform":
        # Count a batch larger than the node's data, which `check_counts` could not see where sizes are traced.
        overflow = overflow + jnp.maximum(sampler.batch_size - counts, 0)
        mask = mask & (indices < counts[:, None])
    return Batch(indices=indices, mask=mask, overflow=overflow)


def check_counts(sampler: Sampler, counts: Array, names: Sequence[str] | None = None) -> None:
    """Refuse a batch that is larger than a node's data; traced counts pass. `names` are the nodes' names, if any.

    Raises:
        ArgumentError: fixed or Poisson sampling with batch_size above the smallest count.
    """
    if sampler.name == "uniform" or check.is_traced(counts):
        return
    smallest = int(np.argmin(np.asarray(counts)))
    count = int(np.asarray(counts)[smallest])
    has = f"got {sampler.batch_size}, and {node_text(smallest, names)} has {count}"
    if sampler.batch_size > count:
        raise ArgumentError(
            "batch_size",
            f"must be at most the entries of the smallest node for {sampler.name} sampling",
            has,
            f"Pass {count - (sampler.name == 'poisson')} or less, use the uniform sampler, or give nodes more data.",
        )
    if sampler.name == "poisson" and sampler.batch_size == count:
        raise ArgumentError(
            "batch_size",
            "must be below the entries of the smallest node for Poisson sampling (a sampling rate under 1)",
            has,
            "Pass a smaller batch or use the fixed sampler.",
        )


def first_occurrence(batch: Batch) -> Array:
    """(n, c) bool: True for a valid slot whose entry does not occur in an earlier slot of the same node."""
    slots = batch.indices.shape[1]
    earlier = jnp.asarray(np.tril(np.ones((slots, slots), bool), -1))
    same = batch.indices[:, :, None] == batch.indices[:, None, :]
    repeats = jnp.any(same & earlier[None] & batch.mask[:, None, :], axis=2)
    return batch.mask & ~repeats
