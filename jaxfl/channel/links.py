"""Links that drop messages and quantise what they carry: a component of algorithms that exchange parameters.

A message arrives whole or not at all. Arrival is drawn anew in each round for each message, independently of the data
and of the messages (an assumption about real links). A quantiser rounds what a node sends, once a round; all of its
receivers get the same numbers. Losses and rounding have keys of their own, so that batches and noise are those of the
same run without links.

Losses may come in bursts, by a chain a link (Gilbert, "Capacity of a burst-noise channel", 1960; Elliott 1963): good ->
bad with probability a = 1 - `success`, bad -> good with r = `recovery`, once an exchange. A message arrives in the good
state only.

No algorithm keeps the chain's state. With u the number of a link in an exchange, it is good where u is below both of
1 - a and r, and bad where u is above both, whatever it was; in between it stays, or turns where r is above 1 - a. So
the state follows from the numbers back to the last exchange that decides it: coupling from the past (Propp, Wilson
1996), exact, stationary from the start, and over all links about log(links) / -log |1 - a - r| exchanges long. Each
exchange's keys are drawn from again for that, on purpose.

Each algorithm says what becomes of a lost message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.channel.quantize import Quantizer
from jaxfl.core import Array, Key, Purpose, PyTree, check, leaf_key, node_keys, one_kernel, purpose_key
from jaxfl.core.check import ArgumentError
from jaxfl.core.devices import varying_like
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import copied

LOST_MESSAGES = "lost_messages"
"""Name of the count of messages that a node sent and that did not arrive; present if a message may be lost."""
QUANTIZER_OVERFLOW = "quantizer_overflow"
"""Name of the count of numbers that a node sent beyond its quantizer's range; present with a quantizer."""
_FLOAT_BITS = 32.0  # sent per number without a quantizer
_MEMORY, _LONGEST = 0.99, 4096  # most |1 - a - r|, and exchanges back: 0.99^4096 is 1e-18


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
    awake: Array | None = None  # (n,), bool, nodes that do not sleep; None: all


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
    recovery: float | np.ndarray | Array | None = None  # of arrival after a loss, shaped as `success`; None: `success`

    __repr__ = short_repr

    @property
    def rate(self) -> float | np.ndarray | Array:
        """Share of messages that arrive in the long run."""
        if self.recovery is None:
            return self.success
        return self.recovery / (self.recovery + (1 - self.success))

    @property
    def probabilities(self) -> dict[str, float | np.ndarray | Array]:
        """The probabilities that were given, by name."""
        return {"success": self.success} | ({} if self.recovery is None else {"recovery": self.recovery})

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
        for name, value in self.probabilities.items():
            if jnp.ndim(value) == 2:
                found, remedy = f"got shape {jnp.shape(value)}", "Pass one number, or one for each client."
                raise ArgumentError(name, "must be by sender where a server receives", found, remedy)
        self.check_num_nodes(num_nodes)
        rounding, arrived = self.draw_rounding(key, round_index, num_nodes), None
        if self.may_lose:
            arrived = self._arrived(
                lambda k: self._arrival_numbers(key, k, num_nodes, ()), round_index, (num_nodes,), key
            )
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
        shape = num_nodes, num_nodes
        # Entry (i, j) is number i of sender j's stream, whose first numbers do not depend on their count.
        arrived = self._arrived(
            lambda k: self._arrival_numbers(key, k, num_nodes, shape[1:]).T, round_index, shape, key
        )
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

    def _arrived(self, numbers: Callable[[Any], Array], place: int | Array, shape: tuple[int, ...], key: Key) -> Array:
        """Which messages of an exchange arrive, bool of this shape, by the uniform numbers of each exchange."""

        def of_links(value):
            value = jnp.asarray(value, jnp.float32)
            return value.reshape((1,) * (len(shape) - value.ndim) + value.shape)

        success = of_links(self.success)
        if self.recovery is None:
            return numbers(place) < success
        recovery = of_links(self.recovery)
        low, high = jnp.minimum(success, recovery), jnp.maximum(success, recovery)

        def back(carry):
            lag, is_known, arrived = carry
            number = numbers(place - lag)
            here = (number < low) ^ ((success < recovery) & (lag % 2 == 1))  # turned once in each exchange since
            return lag + 1, is_known | (number < low) | (number >= high), jnp.where(is_known, arrived, here)

        unknown = varying_like(jnp.zeros(shape, bool), key, place)
        first = jnp.int32(0), unknown, unknown
        return jax.lax.while_loop(lambda carry: ~carry[1].all() & (carry[0] < _LONGEST), back, first)[2]

    def _arrival_numbers(self, key: Key, round_index: int | Array, num_nodes: int, shape: tuple[int, ...]) -> Array:
        """Uniform numbers on [0, 1), (n, *shape), float32: a stream for each sender."""
        keys = node_keys(purpose_key(key, Purpose.ARRIVAL, round_index), num_nodes)
        return jax.vmap(lambda sender: jax.random.uniform(one_kernel(sender), shape, jnp.float32))(keys)

    def check_num_nodes(self, num_nodes: int) -> None:
        """Refuse probabilities of a shape that is neither (), (n,) nor (n, n)."""
        for name, value in self.probabilities.items():
            shape = jnp.shape(value)
            if shape not in ((), (num_nodes,), (num_nodes, num_nodes)):
                requirement = f"must hold one number, one for each sender, or one for each pair of {num_nodes} nodes"
                remedy = f"Pass shape (), ({num_nodes},) or ({num_nodes}, {num_nodes})."
                raise ArgumentError(name, requirement, f"got shape {shape}", remedy)


def links(
    success: float | np.ndarray | Array = 1.0,
    quantizer: Quantizer | None = None,
    *,
    symmetric: bool = False,
    recovery: float | np.ndarray | Array | None = None,
) -> Links:
    """Links that drop messages, quantise what they carry, or both.

    Args:
        success: probability that a message arrives, in [0, 1]: a number, one for each sender (n,), or one for each pair
            (n, n), entry (i, j) from j to i, whose diagonal is not used. May be traced. Losses are independent over
            messages and rounds.
        quantizer: one of `jaxfl.channel`, applied to messages; None sends 32 bits a number.
        symmetric: two nodes lose both messages to each other or none, as if the link fails. The probability is then a
            number, or a symmetric matrix.
        recovery: probability that a message arrives where the last one on its link was lost, in the shapes of
            `success`, which is then that after one that arrived; may be traced. A link has one chance an exchange,
            used or not. Bursts of losses are 1 / recovery long on average, and `Links.rate` of all messages arrive.
            It must lie within 0.99 of `success`. None: `success`.

    Returns:
        `Links`, for the argument `links` of an algorithm, or for `jaxfl.uplink`.

    Raises:
        ArgumentError: `success` is out of range or of another shape; with `symmetric`, by sender or not symmetric.

    Guarantees:
        - success 1 loses nothing, success 0 everything; a success of 1 that is not traced draws nothing for it.
        - every message arrives with its probability, independently of all others.
        - with symmetric, the message from j reaches i exactly when the message from i reaches j.
        - a recovery equal to success changes no bit.

    Examples:
        >>> draws = links(0.5).draw_between(jax.random.key(0), 0, 3)
        >>> draws.arrived.astype(int).tolist()
        [[1, 0, 1], [0, 1, 1], [0, 1, 1]]
    """
    made = Links(copied(success), quantizer, symmetric, copied(recovery))
    for name, value in made.probabilities.items():
        _check_probability(name, value, symmetric)
    if recovery is not None and not (check.is_traced(success) or check.is_traced(recovery)):
        apart = np.abs(np.asarray(success) - np.asarray(recovery)).max()
        if apart > _MEMORY:
            found, remedy = f"got a difference of {apart:g}", "Pass a larger recovery, or a smaller success."
            raise ArgumentError("recovery", f"must lie within {_MEMORY} of success", found, remedy)
    return made


def _check_probability(name: str, value: float | np.ndarray | Array, symmetric: bool) -> None:
    check.probability(**{name: value})
    shape = jnp.shape(value)
    if len(shape) > 2 or len(set(shape)) > 1:
        remedy = "Pass one number, one for each sender, or one for each pair of nodes."
        raise ArgumentError(name, "must have shape (), (n,) or (n, n)", f"got shape {shape}", remedy)
    if symmetric and len(shape) == 1:
        found, remedy = f"got shape {shape}", "Pass one number, or a symmetric matrix."
        raise ArgumentError(name, "must not be by sender where losses are symmetric", found, remedy)
    if symmetric and len(shape) == 2 and not check.is_traced(value):
        matrix = np.asarray(value)
        uneven = np.argwhere(matrix != matrix.T)
        if len(uneven):
            i, j = uneven[0].tolist()
            found = f"got {matrix[i, j]} at ({i}, {j}) and {matrix[j, i]} at ({j}, {i})"
            remedy = "Pass one number for both ways."
            raise ArgumentError(name, "must be symmetric where losses are", found, remedy)


PLAIN = links()
"""Links that lose and round nothing."""


def overflows(quantizer: Quantizer, tree: PyTree) -> Array:
    """Count each node's numbers beyond a quantizer's range, (n,), int32."""
    counts = [jax.vmap(quantizer.overflows)(leaf) for leaf in jax.tree.leaves(tree)]
    return sum(counts[1:], start=counts[0])
