"""Links that drop messages and quantise what they carry: a component of algorithms that exchange parameters.

A message arrives whole or not at all. Arrival is drawn anew in each round for each message, independently of the data
and of the messages (an assumption about real links). A quantiser rounds what a node sends, once a round; all of its
receivers get the same numbers. Losses and rounding have keys of their own, so that batches and noise are those of the
same run without links.

Each algorithm says what becomes of a lost message.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.channel.quantize import Quantizer
from jaxfl.core import Array, Key, Purpose, PyTree, check, leaf_key, node_keys, one_kernel, purpose_key
from jaxfl.core.check import ArgumentError
from jaxfl.core.tree import copied

LOST_MESSAGES = "lost_messages"
"""Name of the count of messages that a node sent and that did not arrive; present if a message may be lost."""
QUANTIZER_OVERFLOW = "quantizer_overflow"
"""Name of the count of numbers that a node sent beyond its quantizer's range; present with a quantizer."""
_FLOAT_BITS = 32.0  # sent per number without a quantizer


class RoundingKeys(NamedTuple):
    """Uniform numbers that are drawn when they are needed: stored, they would take as much memory as the messages."""

    keys: Array  # typed, (n,), one for each sender

    def draw(self, like: PyTree) -> PyTree:
        """Numbers on [0, 1) in the shapes and dtypes of `like`, leaves (n, *leaf)."""
        leaves, structure = jax.tree.flatten(like)

        def of_leaf(index, leaf):
            def of_node(key):
                return jax.random.uniform(one_kernel(leaf_key(key, index)), leaf.shape[1:], leaf.dtype)

            return jax.vmap(of_node)(self.keys)

        return structure.unflatten([of_leaf(index, leaf) for index, leaf in enumerate(leaves)])


class RoundingValues(NamedTuple):
    """Uniform numbers from another source, in place of `RoundingKeys`."""

    values: PyTree  # leaves (n, *leaf), on [0, 1)

    def draw(self, like: PyTree) -> PyTree:
        """As `RoundingKeys.draw`."""
        del like
        return self.values


class LinkDraws(NamedTuple):
    """The random numbers of one round."""

    # Arrivals, bool: (n,), from each client at a server; or (n, n), entry (i, j) from j at i, True on the diagonal.
    # None if nothing can be lost.
    arrived: Array | None
    rounding: RoundingKeys | RoundingValues | None  # of what each node sends; None without a quantizer


class Sent(NamedTuple):
    """Messages that nodes send in one round."""

    values: PyTree  # leaves (n, *leaf): what a receiver gets
    counts: dict[str, Array]  # with a quantizer, (n,), int32, its overflows: numbers beyond its range


class Links(NamedTuple):
    """Model of the links that messages travel over, made and checked by `links`."""

    success: (
        float | np.ndarray | Array
    )  # probability that a message arrives: (), (n,) by sender, (n, n) entry (i, j) from j to i
    quantizer: Quantizer | None  # of what is sent; None sends 32 bits a number
    symmetric: bool  # two nodes lose both of their messages to each other, or none

    @property
    def bits(self) -> float:
        """Bits sent per number."""
        return _FLOAT_BITS if self.quantizer is None else self.quantizer.bits

    @property
    def may_lose(self) -> bool:
        """True if a message may be lost. False for a success of 1 that is not traced."""
        return check.is_traced(self.success) or bool(np.any(np.asarray(self.success) != 1))

    @property
    def is_plain(self) -> bool:
        """True for links that neither lose nor round."""
        return self.quantizer is None and not self.may_lose

    def draw_to_server(self, key: Key, round_index: int | Array, num_nodes: int) -> LinkDraws:
        """Draw the losses and the rounding of clients' messages to a server in one round.

        Args:
            key: the run's base key.
            round_index: (), int32.
            num_nodes: n, of all clients, whether they send or not.

        Raises:
            ArgumentError: `success` is not () or (n,).

        Guarantees:
            - a client's losses and rounding do not depend on the number of clients.
        """
        if jnp.ndim(self.success) == 2:
            found, remedy = f"got shape {jnp.shape(self.success)}", "Pass one number, or one for each client."
            raise ArgumentError("success", "must be by sender where a server receives", found, remedy)
        self.check_num_nodes(num_nodes)
        rounding, arrived = self.draw_rounding(key, round_index, num_nodes), None
        if self.may_lose:
            arrived = self._arrival_numbers(key, round_index, num_nodes, ()) < jnp.asarray(self.success, jnp.float32)
        return LinkDraws(arrived=arrived, rounding=rounding)

    def draw_between(self, key: Key, round_index: int | Array, num_nodes: int) -> LinkDraws:
        """Draw the losses and the rounding of messages between nodes in one round.

        It draws (n, n) numbers, whatever the graph.

        Args:
            key: the run's base key.
            round_index: (), int32.
            num_nodes: n.

        Raises:
            ArgumentError: `success` is for another number of nodes.

        Guarantees:
            - a pair's losses and a node's rounding do not depend on the number of nodes.
        """
        self.check_num_nodes(num_nodes)
        rounding = self.draw_rounding(key, round_index, num_nodes)
        if not self.may_lose:
            return LinkDraws(arrived=None, rounding=rounding)
        # Entry (i, j) is number i of sender j's stream, whose first numbers do not depend on their count.
        numbers = self._arrival_numbers(key, round_index, num_nodes, (num_nodes,)).T
        success = jnp.asarray(self.success, jnp.float32)
        arrived = numbers < success.reshape((1,) * (2 - success.ndim) + success.shape)
        if self.symmetric:
            above = jnp.triu(arrived, 1)
            arrived = above | above.T
        return LinkDraws(arrived=arrived | jnp.eye(num_nodes, dtype=bool), rounding=rounding)

    def draw_rounding(self, key: Key, round_index: int | Array, num_nodes: int) -> RoundingKeys | None:
        """The source of the random numbers that round one round's messages; None without a quantizer."""
        if self.quantizer is None:
            return None
        return RoundingKeys(node_keys(purpose_key(key, Purpose.MESSAGE_ROUNDING, round_index), num_nodes))

    def send(self, tree: PyTree, rounding: RoundingKeys | RoundingValues | None) -> Sent:
        """Make the nodes' messages for a tree with leaves (n, *leaf): its values, quantized.

        Args:
            tree: leaves (n, *leaf).
            rounding: of `LinkDraws`, for the same n nodes.
        """
        if self.quantizer is None or rounding is None:
            return Sent(values=tree, counts={})
        return Sent(
            values=jax.tree.map(self.quantizer.apply, tree, rounding.draw(tree)),
            counts={QUANTIZER_OVERFLOW: overflows(self.quantizer, tree)},
        )

    def with_error(self, total: PyTree, value: PyTree, other: PyTree) -> PyTree:
        """total + (value - other), leaves (n, *leaf), with a quantizer: who sends keeps the error of its rounding."""
        if self.quantizer is None:
            return total
        return jax.tree.map(lambda t, one, rounded: t + (one - rounded), total, value, other)

    def _arrival_numbers(self, key: Key, round_index: int | Array, num_nodes: int, shape: tuple[int, ...]) -> Array:
        """Uniform numbers on [0, 1), (n, *shape), float32: a stream for each sender."""
        keys = node_keys(purpose_key(key, Purpose.ARRIVAL, round_index), num_nodes)
        return jax.vmap(lambda sender: jax.random.uniform(one_kernel(sender), shape, jnp.float32))(keys)

    def check_num_nodes(self, num_nodes: int) -> None:
        """Refuse `success` of a shape that is neither (), (n,) nor (n, n)."""
        shape = jnp.shape(self.success)
        if shape not in ((), (num_nodes,), (num_nodes, num_nodes)):
            requirement = f"must hold one number, one for each sender, or one for each pair of {num_nodes} nodes"
            remedy = f"Pass shape (), ({num_nodes},) or ({num_nodes}, {num_nodes})."
            raise ArgumentError("success", requirement, f"got shape {shape}", remedy)


def links(
    success: float | np.ndarray | Array = 1.0, quantizer: Quantizer | None = None, *, symmetric: bool = False
) -> Links:
    """Links that drop messages, quantise what they carry, or both.

    Args:
        success: probability that a message arrives, in [0, 1]: a number, one for each sender (n,), or one for each pair
            (n, n), entry (i, j) from j to i, whose diagonal is not used. May be traced. Losses are independent over
            messages and rounds.
        quantizer: one of `jaxfl.channel`, applied to messages; None sends 32 bits a number.
        symmetric: two nodes lose both messages to each other or none, as if the link fails. The probability is then a
            number, or a symmetric matrix.

    Returns:
        `Links`, for the argument `links` of an algorithm, or for `jaxfl.uplink`.

    Raises:
        ArgumentError: `success` is out of range or of another shape; with `symmetric`, by sender or not symmetric.

    Guarantees:
        - success 1 loses nothing, success 0 everything; a success of 1 that is not traced draws nothing for it.
        - every message arrives with its probability, independently of all others.
        - with symmetric, the message from j reaches i exactly when the message from i reaches j.

    Examples:
        >>> draws = links(0.5).draw_between(jax.random.key(0), 0, 3)
        >>> draws.arrived.astype(int).tolist()
        [[1, 0, 1], [0, 1, 1], [0, 1, 1]]
    """
    check.probability(success=success)
    shape = jnp.shape(success)
    if len(shape) > 2 or len(set(shape)) > 1:
        remedy = "Pass one number, one for each sender, or one for each pair of nodes."
        raise ArgumentError("success", "must have shape (), (n,) or (n, n)", f"got shape {shape}", remedy)
    if symmetric and len(shape) == 1:
        found, remedy = f"got shape {shape}", "Pass one number, or a symmetric matrix."
        raise ArgumentError("success", "must not be by sender where losses are symmetric", found, remedy)
    if symmetric and len(shape) == 2 and not check.is_traced(success):
        matrix = np.asarray(success)
        uneven = np.argwhere(matrix != matrix.T)
        if len(uneven):
            i, j = uneven[0].tolist()
            found = f"got {matrix[i, j]} at ({i}, {j}) and {matrix[j, i]} at ({j}, {i})"
            remedy = "Pass one number for both ways."
            raise ArgumentError("success", "must be symmetric where losses are", found, remedy)
    return Links(success=copied(success), quantizer=quantizer, symmetric=symmetric)


PLAIN = links()
"""Links that lose and round nothing."""


def overflows(quantizer: Quantizer, tree: PyTree) -> Array:
    """Count each node's numbers beyond a quantizer's range, (n,), int32."""
    counts = [jax.vmap(quantizer.overflows)(leaf) for leaf in jax.tree.leaves(tree)]
    return sum(counts[1:], start=counts[0])
