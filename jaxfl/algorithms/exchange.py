"""Exchange of messages between neighbors of a graph: a component of algorithms that mix, over links or without.

With A the matrix of the messages that arrive and q the rounded values, node i gets x_i + sum_j A_ij q_j - q_i; the
plain form is sum_j P_ij x_j. Rounding thus keeps the sums of x that A keeps: the compensating strategy of Carli,
Fagnani, Frasca, Zampieri, "Gossip consensus algorithms via quantized communication", Automatica 46(1), 2010.

A round k has M exchanges, at the places kM, ..., kM + M - 1 of the graph's period. Each draws its own links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.activation import Activation
from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import LOST_MESSAGES, PLAIN
from jaxfl.core import Array, Key, PyTree, check
from jaxfl.core.tree import size
from jaxfl.graphs import Graph, messages_received, messages_sent, mix
from jaxfl.graphs.lossy_mixing import lossy_mix, messages_lost, messages_missed
from jaxfl.graphs.mixing import keeps_ones, mix_result
from jaxfl.privacy.shared import Secrets

_BITS_OF_A_KEY = 256  # a public key on an elliptic curve (X25519, RFC 7748)


class Exchange(NamedTuple):
    """The way of messages between neighbors, made by `exchange`."""

    keeps_ones: bool  # values of one stay one exactly
    draw: Callable[[Key, Array], Any]  # (key, round index) -> losses and rounding, `LinkDraws`, (M, ...) for M > 1
    # (draws, fn, operands, round index) -> (mixtures of both trees fn(*operands), the second never rounded; numbers as
    # below). An elementwise `fn` is computed while mixing.
    send_result: Callable[..., tuple[tuple[PyTree, PyTree], dict[str, Array]]]
    # (tree, rounds completed) -> the tree after the final exchanges, over links that lose and round nothing
    finish: Callable[[PyTree, Array], PyTree]

    def send(self, draws: Any, tree: PyTree, round_index: Array) -> tuple[PyTree, dict[str, Array]]:
        """Return the mixture of a tree (n, *leaf), and bits and counts (n,) of its messages by name, lost ones, too."""
        (mixture, _), numbers = self.send_result(draws, lambda tree: (tree, ()), (tree,), round_index)
        return mixture, numbers


def exchange(
    graph: Graph,
    links: Links | None = None,
    *,
    kept_by: str = "receiver",
    num_mixings: int = 1,
    num_final_mixings: int = 0,
    first_bits: float | None = None,
    activation: Activation | None = None,
) -> Exchange:
    """Make the way by which messages reach neighbors; links that lose and round nothing change no bit.

    Args:
        graph: static.
        links: `jaxfl.links(...)`, for as many nodes; None loses and rounds nothing.
        kept_by: "sender" or "receiver": who keeps the weight of a lost message, see `lossy_mix`.
        num_mixings: M, exchanges of a round.
        num_final_mixings: exchanges after the last round. Their bits count in the first round, so that after each round
            the total is what its parameters would cost.
        first_bits: bits per number in a round's first exchange, where what it sends is rounded already; by default
            those of the links.
        activation: who is awake in a round; all are in the final exchanges. None: all.
    """
    links = links or PLAIN
    links.check_num_nodes(graph.num_nodes)
    check.at_least(1, num_mixings=num_mixings)
    check.at_least(0, num_final_mixings=num_final_mixings)
    first_bits = links.bits if first_bits is None else first_bits

    def draw(key, round_index):
        if num_mixings == 1:
            draws = links.draw_between(key, round_index, graph.num_nodes)
        else:
            places = round_index * num_mixings + jnp.arange(num_mixings, dtype=jnp.int32)
            draws = jax.vmap(lambda place: links.draw_between(key, place, graph.num_nodes))(places)
        return draws if activation is None else draws._replace(awake=activation.draw(key, round_index, graph.num_nodes))

    def send_once(draws, between, fn, operands, place, bits):
        if links.is_plain and between is None:
            both, counts = mix_result(graph, fn, operands, place), {}
        else:
            tree, exact = fn(*operands)
            (messages, counts), arrived = links.send(tree, draws.rounding), draws.arrived
            if between is not None:
                counts = {name: jnp.where(jnp.diagonal(between), count, 0) for name, count in counts.items()}
                arrived = between if arrived is None else arrived & between
                arrived = arrived | jnp.eye(graph.num_nodes, dtype=bool)
            if arrived is None:
                mixture, exact = mix(graph, (messages, exact), place)
            else:
                mixture, exact = lossy_mix(graph, (messages, exact), arrived, place, kept_by=kept_by)
                if draws.arrived is not None:
                    lost = draws.arrived if between is None else draws.arrived | ~between
                    counts = {**counts, LOST_MESSAGES: messages_lost(graph, lost, place)}
            both = links.with_error(mixture, tree, messages), exact
        rounded, exact = (size(tree) // graph.num_nodes for tree in both)
        return both, counts | message_bits(graph, place, bits * rounded + 32 * exact, between)

    def send_result(draws, fn, operands, round_index):
        between, draws = (
            None if draws.awake is None else draws.awake[:, None] & draws.awake[None],
            draws._replace(awake=None),
        )
        if num_mixings == 1:
            both, numbers = send_once(draws, between, fn, operands, round_index, first_bits)
        else:
            place, (first, others) = round_index * num_mixings, _first_and_others(draws)
            both, numbers = send_once(first, between, fn, operands, place, first_bits)

            def again(both, inputs):
                return send_once(inputs[0], between, lambda *both: both, both, inputs[1], links.bits)

            places = place + jnp.arange(1, num_mixings, dtype=jnp.int32)
            both, of_others = jax.lax.scan(again, both, (others, places))
            numbers = jax.tree.map(lambda one, more: one + more.sum(axis=0, dtype=one.dtype), numbers, of_others)
        bits = 32 * (size(both) // graph.num_nodes)
        final = range(num_mixings, num_mixings + num_final_mixings)
        return both, plus_final(numbers, graph, round_index, final, bits)

    def finish(tree, num_rounds):
        if not num_final_mixings:
            return tree
        place = num_rounds * num_mixings
        return jax.lax.fori_loop(0, num_final_mixings, lambda step, tree: mix(graph, tree, place + step), tree)

    return Exchange(links.is_plain and activation is None and keeps_ones(graph), draw, send_result, finish)


def keeps_sum(graph: Graph, links: Links) -> bool:
    """True where mixing by a doubly stochastic graph over these links keeps the sum over nodes."""
    return not links.may_lose or (links.symmetric and all(not (one != one.T).nnz for one in graph.rounds))


def message_bits(graph: Graph, round_index: Array, bits: float, between: Array | None = None) -> dict[str, Array]:
    """Count the bits of messages between neighbors by name, (n,), float32, lost ones, too; a message has `bits`.

    With `between`, (n, n), bool, nodes send to each other only where it is True.
    """
    sent, received = messages_sent(graph, round_index), messages_received(graph, round_index)
    if between is not None:
        between = between | jnp.eye(graph.num_nodes, dtype=bool)
        sent = sent - messages_lost(graph, between, round_index).astype(sent.dtype)
        received = received - messages_missed(graph, between, round_index).astype(received.dtype)
    return {"bits_sent": sent * jnp.float32(bits), "bits_received": received * jnp.float32(bits)}


def _first_and_others(draws: LinkDraws) -> tuple[LinkDraws, LinkDraws]:
    return jax.tree.map(lambda leaf: leaf[0], draws), jax.tree.map(lambda leaf: leaf[1:], draws)


def plus_seeds(numbers: Mapping[str, Array], secrets: Secrets | None, round_index: Array) -> dict[str, Array]:
    """Add the public keys by which pairs of nodes agree on seeds to the bits of the first round."""
    if secrets is None:
        return dict(numbers)
    bits = jnp.where(round_index == 0, jnp.array(secrets.partners, jnp.float32) * _BITS_OF_A_KEY, 0)
    return {**numbers} | {name: numbers[name] + bits for name in ("bits_sent", "bits_received")}


def plus_final(
    numbers: dict[str, Array], graph: Graph, round_index: Array, places: range, bits: int
) -> dict[str, Array]:
    """Add the bits of final exchanges to those of the first round; its place in the period is before `places`."""
    if not places:
        return numbers
    slots, is_first = np.arange(places.start, places.stop) % graph.period, round_index == 0
    sent, received = (degree[slots].sum(axis=0) * np.float32(bits) for degree in (graph.out_degree, graph.in_degree))
    more = {"bits_sent": sent, "bits_received": received}
    return numbers | {name: numbers[name] + jnp.where(is_first, jnp.float32(more[name]), 0) for name in more}
