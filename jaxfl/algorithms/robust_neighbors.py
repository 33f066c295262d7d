"""Robust means among neighbors, and nodes that attack: arguments `aggregate` and `attack` of `d_psgd`.

    clipped_gossip:   x_i + sum_j W_ij min(1, tau_i / |q_j - x_i|) (q_j - x_i)
    others:           a mean of `clients/robust.py` of x_i and of the q_j, which weigh alike

q_j is what j sends: x_j, or another vector where j attacks. A message that is lost or not finite counts as none: its
weight stays with its receiver. Over links that round, x_i is rounded here, too, and i keeps the error.

ClippedGossip moves j by the opposite of what it moves i: with equal tau and a symmetric W it keeps the mean of the
nodes. The others do not, on any graph: nodes with other neighbors have other medians.

ClippedGossip: He, Karimireddy, Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022,
arXiv:2202.01545. Its nodes mix after the step, and their steps have momentum: `d_psgd(optimizer=optax.sgd(0.1,
momentum=0.9))` mixes before it. Its tau_i follows from the honest neighbors' distances, which no node knows; here it is
a number. Attackers are those of `jaxfl.uplink`: they act on messages, which are models here, and send one to all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.robust import Aggregate, Attack, AttackDraws
from jaxfl.algorithms.exchange import Exchange, exchange, message_bits
from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import LOST_MESSAGES, PLAIN
from jaxfl.core import ArgumentError, Array, check
from jaxfl.core.algorithm import at_round
from jaxfl.core.info import Discarded
from jaxfl.core.tree import flattener, number_type, root
from jaxfl.graphs import Graph
from jaxfl.graphs.lossy_mixing import messages_lost
from jaxfl.graphs.mixing import slot_of
from jaxfl.graphs.neighbor_lists import lists_of_round

DISCARDED_MESSAGES = "discarded_messages"
"""Name of the count of messages that were not finite, 1 for each sender and round."""


class ClippedGossip(NamedTuple):
    """Mixing whose differences are clipped, made by `clipped_gossip`."""

    radius: float | Array | Callable[[Array], Array] | None  # tau: (), (n,) or a schedule; None clips nothing


class Draws(NamedTuple):
    """The random numbers of one round's messages."""

    links: LinkDraws
    attack: AttackDraws | None  # None without attackers


def clipped_gossip(radius: float | np.ndarray | Array | Callable[[Array], Array]) -> ClippedGossip:
    """Mix by differences to the neighbors, each clipped to an L2 norm.

    Args:
        radius: tau: a number, one for each node (n,), or a schedule of the round index; may be traced. About the
            distance between honest neighbors.

    Guarantees:
        - a node moves by at most the weights of its neighbors times its radius, whatever they send.
        - with equal radii, a symmetric matrix and symmetric losses the mean of the nodes stays.

    Examples:
        >>> import jax.numpy as jnp, jaxfl
        >>> way = robust_exchange(jaxfl.graphs.complete(2), None, clipped_gossip(1.0), None)
        >>> way.send(way.draw(jax.random.key(0), 0), jnp.array([[0.0], [8.0]]), 0)[0].tolist()
        [[0.5], [7.5]]
    """
    check.positive(radius=radius)
    return ClippedGossip(jnp.asarray(radius) if isinstance(radius, np.ndarray) else radius)


def robust_exchange(
    graph: Graph, links: Links | None, aggregate: Aggregate | ClippedGossip | None, attack: Attack | None
) -> Exchange:
    """Make the way of messages to neighbors that join them robustly, once a round.

    Raises:
        ArgumentError: attackers or radii of another number of nodes, or neighbors too few for the aggregate.
    """
    links, num_nodes, aggregate = links or PLAIN, graph.num_nodes, aggregate or ClippedGossip(None)
    plain = exchange(graph, links)
    if attack is not None:
        attack.check(num_nodes)
    if isinstance(aggregate, ClippedGossip):
        check.per_node(num_nodes, radius=aggregate.radius)
    elif aggregate.keeps:
        requirement = "must be one that keeps nothing between rounds, over a graph"
        raise ArgumentError("aggregate", requirement, "got centered_clipping", "Pass clipped_gossip(...).")
    elif (fewest := int(graph.in_degree.min()) + 1) < aggregate.least:
        requirement = f"must take {fewest} messages, those of the node with the fewest neighbors and its own"
        remedy = "Pass a graph of more neighbors, or clipped_gossip(1.0)."
        raise ArgumentError("aggregate", requirement, f"got one that needs {aggregate.least}", remedy)

    def draw(key, round_index):
        of_attack = None if attack is None else attack.draw(key, round_index, num_nodes)
        return Draws(plain.draw(key, round_index), of_attack)

    def joined(own, sent, arrived, place):
        """What each node makes of its own value and of those that arrive, (n, d), and where it has too few."""
        _, senders, weights = lists_of_round(graph, slot_of(graph, place), number_type(own))
        nodes = jnp.arange(num_nodes, dtype=jnp.int32)
        is_finite, radii = jnp.isfinite(sent).all(axis=1), None
        present = (weights > 0) & arrived[nodes[None], senders] & is_finite[senders]
        if isinstance(aggregate, ClippedGossip):
            of_node = partial(_clipped, sent)
            if aggregate.radius is not None:
                radii = jnp.broadcast_to(at_round(aggregate.radius, place, own), num_nodes)
        else:
            of_node = partial(_combined, aggregate, sent)
        # One node after the other: all neighbors' messages at once would be as many models as edges.
        inputs = own, senders.T, weights.T, present.T, radii
        return *jax.lax.map(lambda one: of_node(*one), inputs), is_finite

    def send_result(draws, fn, operands, round_index):
        tree, exact = fn(*operands)
        assert not jax.tree.leaves(exact)
        flatten, unflatten = flattener(jax.tree.map(lambda leaf: leaf[0], tree))
        messages, overflows = links.send(tree, draws.links.rounding)
        numbers: dict[str, Any] = {**overflows}
        own, arrived = flatten(messages).astype(number_type(tree)), draws.links.arrived
        sent, everywhere = own, jnp.ones((num_nodes, num_nodes), bool)
        if attack is not None:
            hostile, normal = jnp.isin(jnp.arange(num_nodes, dtype=jnp.int32), draws.attack.attackers), None
            if draws.attack.keys is not None:
                normal = jax.vmap(lambda key: jax.random.normal(key, own.shape[1:], own.dtype))(draws.attack.keys)
            sent = jnp.where(hostile[:, None], attack.act(own, ~hostile, normal).astype(own.dtype), own)
        mixture, is_void, is_finite = joined(own, sent, everywhere if arrived is None else arrived, round_index)
        numbers |= {"void_rounds": is_void.astype(jnp.int32)}
        numbers |= {DISCARDED_MESSAGES: Discarded((~is_finite).astype(jnp.int32))}
        if arrived is not None:
            numbers |= {LOST_MESSAGES: messages_lost(graph, arrived, round_index)}
        numbers |= message_bits(graph, round_index, links.bits * own.shape[1])
        mixed = jax.tree.map(lambda new, old: new.astype(old.dtype), unflatten(mixture), tree)
        return (links.with_error(mixed, tree, messages), exact), numbers

    return Exchange(False, draw, send_result, lambda tree, num_rounds: tree)


def _clipped(
    sent: Array, own: Array, senders: Array, weights: Array, present: Array, radius: Array | None
) -> tuple[Array, Array]:
    """A node's value (d,) after clipped differences to its senders (k,); it is never void."""
    apart = jnp.where(present[:, None], sent[senders] - own[None], 0)
    if radius is not None:
        length = root(jnp.sum(apart**2, axis=1))
        weights = weights * jnp.minimum(1, radius / jnp.maximum(length, jnp.finfo(length.dtype).tiny))
    return own + jnp.matmul(weights, apart, precision="highest"), jnp.bool_(False)


def _combined(
    aggregate: Aggregate, sent: Array, own: Array, senders: Array, weights: Array, present: Array, radius: None
) -> tuple[Array, Array]:
    """A node's value (d,) from its own and its senders' (k,) that are present, and whether they are too few."""
    here = jnp.append(present, True)
    values = jnp.where(here[:, None], jnp.append(sent[senders], own[None], axis=0), 0)
    is_void = here.sum(dtype=jnp.int32) < aggregate.least
    return jnp.where(is_void, own, aggregate.combine(values, here, None)), is_void
