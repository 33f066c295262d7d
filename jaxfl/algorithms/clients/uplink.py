"""The uplink, by which clients' updates reach the server: links lose and round them, noise may be added to their sum.

Active client i changes its part of the server's model x by Delta_i and has the weight p_i. To each element e of x the
server adds

    plain                   sum p_i Delta_i[e] / sum p_i           over the active clients that hold e
    over links              the same with the rounded Q(Delta_i), over those that arrive; 0 where none does
    private updates         (sum clipped Q(Delta_i)[e] + noise) / E_e,    E_e: how many are expected to hold e, public
    a robust mean           what `clients/robust.py` makes of those Q(Delta_i) that arrive and are finite
    feedback                the same of what `clients/feedback.py` sends for Delta_i

Updates are rounded, not parameters, because many quantizers are finer near 0. A model state travels with its update, in
32 bits a number. With private updates, a lost update counts as zero and E_e stays the same. Noise is added in every
round. Updates are clipped after rounding, so that the clip norm bounds them. Losses and rounding do not depend on the
data, so privacy statements are the same with links as without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.feedback import Feedback, check_feedback
from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.private_updates import DISCARDED_UPDATES, PrivateUpdates
from jaxfl.algorithms.clients.robust import Aggregate, Attack, AttackDraws
from jaxfl.algorithms.clients.selection import Selection
from jaxfl.algorithms.clients.server import at_clients
from jaxfl.channel.links import LOST_MESSAGES, LinkDraws, Links
from jaxfl.channel.links import PLAIN as PLAIN_LINKS
from jaxfl.core import ArgumentError, Array, Info, Key, PyTree, Task, Variables
from jaxfl.core.info import Count, Discarded, Fatal, plain
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import along_nodes, norm, number_type, replicate, weighted_sum
from jaxfl.gradients.samplers import BATCH_OVERFLOW
from jaxfl.privacy.mechanisms import require_own_noise


class UplinkDraws(NamedTuple):
    """The random numbers of one round's way to the server; c slots of active clients."""

    is_active: Array | None = None  # (c,), bool, False for an empty slot; None where all are filled
    overflow: Array | None = None  # (), int32, 1 if a client that was drawn had no slot, which is an error
    links: LinkDraws = LinkDraws(None, None)  # of all n clients
    noise: PyTree | None = None  # like the parameters; None without private updates
    attack: AttackDraws | None = None  # None without attackers
    compressed: Any = None  # what the compressor draws for the active clients; None where it draws nothing


class Kept(NamedTuple):
    """What is kept of updates between rounds; () where nothing is."""

    clients: PyTree = ()  # leaves (n, *leaf), 0 at first
    server: PyTree = ()  # the last change, leaves (*leaf), 0 at first


_NOTHING = Kept()


class Updates(NamedTuple):
    """The active clients' models after their steps, in the forms that the server needs.

    Attributes:
        mean: weights (c,) -> each element's mean over the clients that hold it; the old value where none does. None
            where the changes are to be averaged, so that changes of 0 leave all bits.
        changes: () -> changes of the whole model, leaves (c, *leaf), 0 where the client holds nothing.
        holders: weights (c,) -> their sum over the clients that hold an element, in the structure of the model.
        expected: how many clients are expected to hold an element, in the structure of the parameters.
        num_expected: how many clients are expected in all.
    """

    mean: Callable[[Array], Variables] | None
    changes: Callable[[], Variables]
    holders: Callable[[Array], Variables]
    expected: PyTree
    num_expected: float


class Received(NamedTuple):
    """Result of a round's updates at the server."""

    model: Variables  # x after the change, leaves (*leaf), and the model state
    change: PyTree  # of the parameters, leaves (*leaf)
    any_arrived: Array  # (), bool, False where all updates were lost
    shares: Array  # (c,), float32, what each update weighs in the change
    losses: Array  # (c,), float32, 0 for an update that was discarded
    weights: Array  # (c,), float32, of the losses
    total: Array  # (), float32, by which the weights are divided
    counts: dict[str, Count]  # (c,), int32
    kept: Kept = _NOTHING  # after the round

    @property
    def loss(self) -> Array:
        """Weighted mean of the clients' losses, ()."""
        return jnp.sum(self.weights / self.total * self.losses)


class Uplink(NamedTuple):
    """The way of clients' updates to their server, made by `uplink`.

    Attributes:
        updates: rule by which updates are clipped and released with noise, and clients drawn independently; None: none.
        aggregate: robust mean of the updates; None: their weighted mean.
        selection: how the clients of a round are chosen where updates are not private.
        feedback: what clients send in place of their changes; None: these.
        bits: of one number of an update; a number of the model state takes 32.
        check: (task, clients, holds_parts=False, keeps_sums=False) -> None; raises for a task or clients that private
            updates do not protect, for noise of pairs where clients hold parts of the model, and for links that lose or
            round where server and clients keep what must move by the same updates.
        init: (key, params, number of clients) -> `Kept`; raises for params that are not of the noise's type, or links
            of another number of clients.
        draw: (key, round index, params, number of clients, number of active ones, () -> active clients (k,) where
            they are not drawn independently) -> (active (c,), `UplinkDraws`).
        send: (draws, active (c,), weights (c,), losses (c,), the server's `Variables`, `Updates`, kept=`Kept`) ->
            `Received`.
    """

    updates: PrivateUpdates | None
    aggregate: Aggregate | None
    selection: Selection
    feedback: Feedback | None
    bits: float
    check: Callable[..., None]
    init: Callable[[Key, PyTree, int], Kept]
    draw: Callable[..., tuple[Array, UplinkDraws]]
    send: Callable[..., Received]

    __repr__ = short_repr

    @property
    def is_private(self) -> bool:
        """True where updates are clipped and released with noise."""
        return self.updates is not None

    @property
    def more_than_mean(self) -> str:
        """What makes the server's change more than the weighted mean of the changes that arrive; "" for nothing."""
        kinds = {"private updates": self.updates, "a robust mean": self.aggregate, "feedback": self.feedback}
        return next((name for name, kind in kinds.items() if kind is not None), "")

    def message_bits(self, num_params: int) -> float:
        """Bits of an update of the whole model."""
        compressor = None if self.feedback is None else self.feedback.compressor
        return self.bits * num_params if compressor is None else compressor.bits(num_params)


def uplink(
    *,
    links: Links | None = None,
    updates: PrivateUpdates | None = None,
    aggregate: Aggregate | None = None,
    attack: Attack | None = None,
    selection: Selection | None = None,
    feedback: Feedback | None = None,
) -> Uplink:
    """The way by which clients' updates reach their server.

    Args:
        links: `jaxfl.links(...)`, over which updates travel, quantised; what the server sends always arrives. None
            loses and rounds nothing.
        updates: `jaxfl.private_updates(...)`, for privacy of whole clients; None for none.
        aggregate: robust mean in place of the weighted one, such as `jaxfl.algorithms.trimmed_mean(2)`; clients weigh
            alike.
        attack: what some clients send in place of their updates, such as `jaxfl.algorithms.sign_flip([0, 3])`, or
            `sign_flip(2)`, which draws them.
        selection: how the clients of a round are chosen, such as `jaxfl.algorithms.by_size()` or `by_loss(20)`. None:
            uniformly, or independently where updates are private.
        feedback: what clients send and keep, such as `jaxfl.algorithms.ef21(jaxfl.channel.top_k(0.1))`, with whole
            updates only. Links, robust means and attacks go with `client_momentum` only, private updates with none.

    Returns:
        The argument `uplink` of algorithms with a server.

    Guarantees:
        - links that lose and round nothing change no bit.
        - an update that is lost and not finite does not count.
        - adding or removing one client moves what is released by at most the clip norm, where updates are private.
        - an attack of nobody changes no bit.

    Examples:
        >>> uplink(links=Links(success=0.5, quantizer=None, symmetric=False)).bits
        32.0
    """
    if updates is not None and updates.noise.secrets is not None and links is not None:
        found, remedy = "got links", "Leave them out, or pass jaxfl.gaussian for the server's noise."
        raise ArgumentError("links", "must be None where pairs of clients share noise, which cancels", found, remedy)
    if updates is not None and aggregate is not None:
        found, remedy = "got private updates", "Leave them out: noise of local steps goes with robust means."
        requirement = "must be None with a robust mean, which is no sum of clipped parts"
        raise ArgumentError("updates", requirement, found, remedy)
    if updates is not None and selection is not None:
        requirement = "must be None where updates are private: their epsilon is that of equal, independent chances"
        found, remedy = f"got by_{'size' if selection.num_candidates is None else 'loss'}", "Leave it out."
        raise ArgumentError("selection", requirement, found, remedy)
    compressor = None if feedback is None else feedback.compressor
    if feedback is not None and updates is not None:
        found, remedy = "got private updates", "Leave feedback out, or add noise to local steps."
        requirement = "must be None with feedback: what a client sends depends on its earlier rounds"
        raise ArgumentError("updates", requirement, found, remedy)
    others = {"links": links, "aggregate": aggregate, "attack": attack}
    if compressor is not None and (found := ", ".join(name for name, other in others.items() if other is not None)):
        requirement = "must come without links, a robust mean and attackers: what client and server keep would part"
        raise ArgumentError("feedback", requirement, f"got {found}", "Leave them out, or pass client_momentum(...).")
    links, chosen = links or PLAIN_LINKS, selection or Selection()
    attack = None if attack is None or attack.num_attackers == 0 else attack

    def check(task, clients, *, holds_parts=False, keeps_sums=False):
        if keeps_sums and not links.is_plain:
            requirement = "must lose and round nothing where server and clients move what they keep by the same updates"
            raise ArgumentError("links", requirement, f"got {links!r}"[:60], "Leave links out.")
        if aggregate is not None:
            _check_robust(task, clients, holds_parts or keeps_sums)
        if attack is not None and (holds_parts or keeps_sums):
            found, remedy = "got attackers", "Leave them out."
            raise ArgumentError("attack", "must be None where more than whole updates counts", found, remedy)
        chosen.check(clients, holds_parts)
        noise = clients.noise
        if feedback is not None:
            check_feedback(feedback, clients, holds_parts or keeps_sums)
        if noise is not None and noise.distribution == "summed_gaussian" and (holds_parts or not links.is_plain):
            requirement = "must reach the server in one sum of whole updates, which no link loses or rounds"
            found, remedy = "got noise of sums", "Pass jaxfl.shared_gaussian, or leave links and parts out."
            raise ArgumentError("noise", requirement, found, remedy)
        if updates is not None:
            if holds_parts:
                require_own_noise("clients hold parts of the model", noise=updates.noise.distribution)
            updates.check(task, clients)

    def init(key, params, num_nodes):
        if attack is not None:
            attack.check(num_nodes)
        if updates is not None:
            jax.eval_shape(updates.draw_noise, key, 0, params)  # which refuses params that are not float32
        jax.eval_shape(partial(links.draw_to_server, key, 0, num_nodes))  # which refuses links that do not fit
        zeros = jax.tree.map(jnp.zeros_like, params)
        keeps = (feedback is not None and feedback.adds) or (aggregate is not None and aggregate.keeps)
        return Kept(() if feedback is None else replicate(zeros, num_nodes), zeros if keeps else ())

    def draw(key, round_index, params, num_nodes, num_active, choose):
        of_links = links.draw_to_server(key, round_index, num_nodes)
        of_attack = None if attack is None else attack.draw(key, round_index, num_nodes)
        if updates is None:
            active, drawn = choose(), None
            if compressor is not None:
                messages = jax.eval_shape(partial(replicate, num_nodes=num_nodes), params)
                drawn = compressor.draw(key, round_index, messages, active)
            return active, UplinkDraws(links=of_links, attack=of_attack, compressed=drawn)
        who = updates.draw(key, round_index, num_active, num_nodes)
        noise = updates.draw_noise(key, round_index, params)
        return who.active, UplinkDraws(who.is_active, who.overflow, of_links, noise, of_attack)

    def send(draws: Any, active, weights, losses, before, clients, kept=_NOTHING):
        shares, counts, any_arrived = weights / weights.sum(), {}, jnp.bool_(True)
        is_plain = links.is_plain and updates is None and aggregate is None and attack is None and feedback is None
        if clients.mean is not None and is_plain:
            model = clients.mean(weights)
            change = jax.tree.map(jnp.subtract, model.params, before.params)
            return Received(model, change, any_arrived, shares, losses, weights, weights.sum(), counts)
        changes, last = clients.changes(), kept.server
        if feedback is not None:
            rows = jax.tree.map(lambda of_all: of_all[active], kept.clients)
            sent, rows = feedback.send(changes.params, rows, draws.compressed)
            changes = Variables(sent, changes.model_state)
            kept = Kept(jax.tree.map(lambda of_all, row: of_all.at[active].set(row), kept.clients, rows), last)
        is_present = jnp.ones(len(active), bool) if draws.is_active is None else draws.is_active
        counts_now = is_present
        if attack is not None:
            changes = changes._replace(params=_attacked(attack, changes.params, active, is_present, draws.attack))
        if draws.links.arrived is not None:
            arrived = draws.links.arrived[active]
            counts_now, counts = counts_now & arrived, {LOST_MESSAGES: (~arrived).astype(jnp.int32)}
        messages = links.send(changes.params, jax.tree.map(lambda of_all: of_all[active], draws.links.rounding))
        changes, counts = Variables(messages.values, changes.model_state), counts | messages.counts
        if aggregate is not None:
            flat, restore = _flat(changes.params)
            finite = jnp.isfinite(norm(changes.params))
            counts_now, lost = counts_now & finite, counts_now & ~finite
            center = _flat(jax.tree.map(lambda leaf: leaf[None], last))[0][0] if aggregate.keeps else None
            mean = aggregate.combine(jnp.where(counts_now[:, None], flat, 0), counts_now, center)
            num_arrived = counts_now.sum(dtype=jnp.int32)
            is_valid = num_arrived >= aggregate.least
            addition = restore(jnp.where(is_valid, mean, 0))
            counts |= {"void_rounds": (~is_valid).astype(jnp.int32)}
            counts |= {DISCARDED_UPDATES: Discarded(lost.astype(jnp.int32))}
            model = Variables(jax.tree.map(jnp.add, before.params, addition), before.model_state)  # which is empty
            shares = _quotient(counts_now.astype(weights.dtype), num_arrived.astype(weights.dtype))
            if aggregate.keeps:
                kept = Kept(kept.clients, jax.tree.map(partial(jnp.where, is_valid), addition, last))
            return Received(model, addition, is_valid, shares, losses, weights, weights.sum(), counts, kept)
        if updates is None:
            masses = jnp.where(counts_now, weights, 0)
            # A product with 0 would keep NaN and infinity.
            clean = jax.tree.map(lambda leaf: jnp.where(along_nodes(counts_now, leaf), leaf, 0), changes)
            addition = jax.tree.map(_quotient, weighted_sum(masses, clean), clients.holders(masses))
            if feedback is not None and feedback.adds:
                share = len(active) / jax.tree.leaves(kept.clients)[0].shape[0]
                addition = addition._replace(params=jax.tree.map(lambda d, q: d + share * q, last, addition.params))
                kept = Kept(kept.clients, addition.params)
            model, shares = jax.tree.map(jnp.add, before, addition), _quotient(masses, masses.sum())
            arrived = counts_now.any()
            return Received(model, addition.params, arrived, shares, losses, weights, weights.sum(), counts, kept)
        clipped_sum = updates.sum(changes.params, counts_now)
        addition = jax.tree.map(_quotient, updates.noise.release(clipped_sum.total, draws.noise), clients.expected)
        return Received(
            model=Variables(jax.tree.map(jnp.add, before.params, addition), before.model_state),  # which is empty
            change=addition,
            any_arrived=any_arrived,
            shares=counts_now.astype(jnp.float32) / clients.num_expected,
            losses=jnp.where(plain(clipped_sum.counts[DISCARDED_UPDATES]) > 0, 0.0, losses),
            weights=is_present.astype(jnp.float32),
            total=jnp.float32(clients.num_expected),
            counts=counts | clipped_sum.counts,
        )

    return Uplink(updates, aggregate, chosen, feedback, links.bits, check, init, draw, send)


PLAIN = uplink()
"""The way without links and privacy: updates arrive as they were sent."""


def of_whole_models(before: Variables, after: Variables, num_expected: float) -> Updates:
    """The updates of clients that all hold the whole model.

    Args:
        before: the server's.
        after: the active clients', leaves (c, *leaf).
        num_expected: how many active clients are expected.
    """
    return Updates(
        mean=lambda weights: weighted_sum(weights / weights.sum(), after),
        changes=lambda: changed(before, after),
        holders=lambda weights: jax.tree.map(lambda _: weights.sum(), before),
        expected=jax.tree.map(lambda _: float(num_expected), before.params),
        num_expected=num_expected,
    )


def changed(before: PyTree, after: PyTree) -> PyTree:
    """The changes of clients' models, leaves (c, *leaf)."""
    return jax.tree.map(lambda new, old: new - old[None], after, before)


def info_at_clients(info: Info, draws: UplinkDraws, active: Array, num_nodes: int) -> Info:
    """Put the numbers of the active clients (c,) at their places (n,), and count clients that had no slot at all."""
    of_clients = at_clients(info, active, num_nodes, draws.is_active)
    if draws.overflow is None:
        return of_clients
    batches = plain(of_clients.counts.get(BATCH_OVERFLOW, jnp.zeros(num_nodes, jnp.int32)))
    return of_clients.plus({BATCH_OVERFLOW: Fatal(batches + draws.overflow)})


def _check_robust(task: Task, clients: LocalSteps, more: bool) -> None:
    """Refuse what a robust mean of whole updates does not cover."""
    found = "got clients that hold parts, or a memory" * more or "got weighting 'data'" * (clients.weighting == "data")
    if task.init_state is not None and jax.tree.leaves(jax.eval_shape(task.init_state)):
        found = "got a task with batch statistics"
    if found:
        requirement = "must be None unless clients send whole updates of parameters, and weigh alike"
        remedy = "Leave it out." if more else "Pass weighting='uniform' to local_steps, or leave aggregate out."
        raise ArgumentError("aggregate", requirement, found, remedy)
    if clients.noise is not None:
        require_own_noise("a robust mean does not cancel it", noise=clients.noise.distribution)


def _attacked(attack: Attack, changes: PyTree, active: Array, is_present: Array, drawn: AttackDraws) -> PyTree:
    """The changes (c, *leaf) with those of attackers in place of what they computed."""
    flat, restore = _flat(changes)
    hostile = (active[:, None] == drawn.attackers[None]).any(axis=1) & is_present
    normal = None
    if drawn.keys is not None:
        normal = jax.vmap(lambda key: jax.random.normal(key, flat.shape[1:], flat.dtype))(drawn.keys[active])
    sent = attack.act(flat, is_present & ~hostile, normal).astype(flat.dtype)
    return jax.vmap(restore)(jnp.where(hostile[:, None], sent, flat))


def _flat(tree: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """The leaves (c, *leaf) as a matrix (c, d), and the way back of one row."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf[0].size for leaf in leaves])

    def restore(row):
        parts = jnp.split(row, ends[:-1])
        old = zip(parts, leaves, strict=True)
        return jax.tree.unflatten(structure, [part.reshape(leaf.shape[1:]).astype(leaf.dtype) for part, leaf in old])

    dtype = number_type(tree)
    return jnp.concatenate([leaf.reshape(len(leaf), -1).astype(dtype) for leaf in leaves], axis=1), restore


def _quotient(total: Array, count: Array | float) -> Array:
    """total / count; 0 where the count is 0."""
    holds = jnp.asarray(count) > 0
    return jnp.where(holds, total / jnp.where(holds, count, 1), 0)
