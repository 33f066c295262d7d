"""Nodes that sleep in some rounds: the argument `activation` of `d_psgd`, `push_sum`, `d_sgdm` and `qg_dsgdm`.

A node that sleeps makes no step, sends nothing and hears nothing: its parameters, its memory and its gradient's state
stay bit for bit. Messages to and from it are as lost ones (`lossy_mix`), so that where W is symmetric, or push-sum
weights count, sums over nodes move by the steps of those that are awake only. Who sleeps is drawn without data.
Push-sum divides steps by weights, which sleep makes small at times: it may diverge where `d_psgd` does not.

Privacy: a node releases in the rounds in which it is awake, at most one in each. Statements count all rounds, which
bounds that from above. That others do not know when a node is awake is not assumed, and lowers no epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.channel.links import links
from jaxfl.core import ArgumentError, Array, Info, Key, PyTree, check, stream_key
from jaxfl.core.tree import along_nodes
from jaxfl.gradients import GradientEstimator
from jaxfl.privacy import NoiseMechanism
from jaxfl.privacy.mechanisms import require_own_noise

_STREAM = 1  # of arrivals: those of messages are stream 0


class Activation(NamedTuple):
    """Who is awake in a round."""

    draw: Callable[[Key, Array, int], Array]  # (key, round index, n) -> (n,), bool


def random_activation(rate: float | Array, *, wake_rate: float | Array | None = None) -> Activation:
    """Each node is awake by itself: independently in each round, or by a chain of its own.

    Args:
        rate: probability that a node is awake; with `wake_rate`, in a round after one in which it was. May be traced.
        wake_rate: probability that a node is awake after a round in which it slept, within 0.99 of `rate`: sleep lasts
            1 / wake_rate rounds on average. None: `rate`.

    Examples:
        >>> random_activation(0.5).draw(jax.random.key(0), 0, 6).astype(int).tolist()
        [1, 0, 1, 1, 0, 0]
    """
    check.scalar(rate=rate, **({} if wake_rate is None else {"wake_rate": wake_rate}))
    check.probability(rate=rate, **({} if wake_rate is None else {"wake_rate": wake_rate}))
    chain = links(rate, recovery=wake_rate)

    def draw(key, round_index, num_nodes):
        awake = chain.draw_to_server(stream_key(key, _STREAM), round_index, num_nodes).arrived
        return jnp.ones(num_nodes, bool) if awake is None else awake

    return Activation(draw)


def cyclic_activation(period: int, num_awake: int) -> Activation:
    """Nodes are awake in turn: node i in `num_awake` rounds of each period, from round i mod period on.

    Args:
        period: rounds after which all repeats.
        num_awake: more than half of the period: any two nodes must be awake together, or they never hear each other.

    Examples:
        >>> cyclic_activation(3, 2).draw(jax.random.key(0), 4, 6).astype(int).tolist()
        [1, 1, 0, 1, 1, 0]
    """
    check.at_least(1, period=period, num_awake=num_awake)
    if not period / 2 < num_awake <= period:
        requirement, remedy = f"must exceed half of the period, {period}, and be at most it", "Pass another."
        raise ArgumentError("num_awake", requirement, f"got {num_awake}", remedy)
    return Activation(lambda key, k, n: (k - jnp.arange(n, dtype=jnp.int32)) % period < num_awake)


def check_activation(
    activation: Activation | None, estimator: GradientEstimator, noise: NoiseMechanism, num_nodes: int
) -> None:
    """Refuse estimators and noise that do not go with nodes that sleep."""
    if activation is None:
        return
    jax.eval_shape(lambda key: activation.draw(key, jnp.int32(0), num_nodes), jax.random.key(0))
    require_own_noise("a node that sleeps adds none, so that noise of pairs does not cancel", noise=noise.distribution)
    if estimator.sampling is not None and estimator.sampling.estimator == "saga":
        found, remedy = "got saga", "Pass jaxfl.mini_batch, or leave activation out."
        raise ArgumentError("gradient", "must read no table ahead where nodes sleep", found, remedy)


def if_awake(awake: Array | None, new: PyTree, old: PyTree) -> PyTree:
    """The new values of nodes that are awake and the old ones of others, leaves (n, ...)."""
    if awake is None:
        return new
    return jax.tree.map(lambda one, other: jnp.where(along_nodes(awake, one), one, other), new, old)


def info_of_awake(awake: Array | None, info: Info) -> Info:
    """Counts of 0 for nodes that sleep, and the count "awake"."""
    if awake is None:
        return info
    counts = jax.tree.map(lambda count: jnp.where(awake, count, 0), info.counts)
    return info._replace(counts=counts).plus(awake=awake.astype(jnp.int32))
