"""What clients send in place of their changes, and keep for later rounds: an argument of `jaxfl.uplink`.

Client i of the active ones S, of N in all, changes x by Delta_i. C is a compressor of `jaxfl.channel`:

    error feedback   sent_i = C(e_i + Delta_i),    e_i <- e_i + Delta_i - sent_i,    Delta = sum_S p_i sent_i
    EF21             sent_i = C(Delta_i - g_i),    g_i <- g_i + sent_i,     Delta <- Delta + (1 / N) sum_S sent_i
    momentum         sent_i = m_i <- beta m_i + (1 - beta) Delta_i,         Delta = sum_S p_i sent_i

e_i, g_i, m_i and EF21's Delta start at 0. They lie in `State.uplink` of `server_rounds.py`; Delta is the mean change of
x that the server's method gets.

Error feedback: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014; Stich, Cordonnier,
Jaggi, NeurIPS 2018, arXiv:1809.07599. EF21: Richtárik, Sokolov, Fatkhullin, NeurIPS 2021, arXiv:2106.05203, Algorithm
2, with -Delta_i for a gradient. Momentum: Karimireddy, He, Jaggi, ICML 2021, arXiv:2012.10333, for robust means.

Differences from the papers: updates of local steps in place of gradients, and clients that are not active, which keep
what they have. EF21's paper starts at g_i = C(Delta_i) of the first model.

Private local steps keep their statement: all of this is a function of what steps released. Private updates are refused:
what a client sends depends on its earlier rounds, and the choice of top-k tells more than the numbers. Links that lose
or round are refused beside a compressor, since what client and server keep would part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.channel.compress import Compressor
from jaxfl.core import ArgumentError, Array, PyTree, check
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import scale
from jaxfl.privacy.mechanisms import require_own_noise


class Feedback(NamedTuple):
    """What clients send and keep, made by `error_feedback`, `ef21` or `client_momentum`."""

    send: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree]]  # (changes, kept, drawn) -> (sent, kept), (c, *leaf)
    compressor: Compressor | None = None
    adds: bool = False  # whether the server adds what arrives to the mean change of the last round

    __repr__ = short_repr


def error_feedback(compressor: Compressor) -> Feedback:
    """Send the compressed sum of the change and of what was not sent before.

    Args:
        compressor: `jaxfl.channel.top_k(...)` or `rand_k(...)`.

    Guarantees:
        - what a client sent and what it keeps sum to its changes.
        - a compressor that keeps all sends the changes.

    Examples:
        >>> from jaxfl.channel import top_k
        >>> error_feedback(top_k(0.5)).send(jnp.array([[3.0, 1.0]]), jnp.array([[0.0, 4.0]]), None)
        (Array([[0., 5.]], dtype=float32), Array([[3., 0.]], dtype=float32))
    """

    def send(changes, kept, drawn):
        total = jax.tree.map(jnp.add, kept, changes)
        sent = compressor.apply(total, drawn)
        return sent, jax.tree.map(jnp.subtract, total, sent)

    return Feedback(send, compressor)


def ef21(compressor: Compressor) -> Feedback:
    """Send the compressed difference to what the server has of the client; clients weigh alike.

    Args:
        compressor: as for `error_feedback`.

    Guarantees:
        - the server's change is the mean of what all clients keep, whoever takes part.
        - a compressor that keeps all gives the mean change, where all clients are active.
    """

    def send(changes, kept, drawn):
        sent = compressor.apply(jax.tree.map(jnp.subtract, changes, kept), drawn)
        return sent, jax.tree.map(jnp.add, kept, sent)

    return Feedback(send, compressor, adds=True)


def client_momentum(momentum: float | Array) -> Feedback:
    """Send the mean of a client's changes with weights that fall by `momentum`, which robust means need in theory.

    Args:
        momentum: beta, in [0, 1); may be traced.

    Guarantees:
        - with 0 it sends the changes, bit for bit.
    """
    check.scalar(momentum=momentum)
    check.non_negative(momentum=momentum)
    check.below(1, momentum=momentum)

    def send(changes, kept, drawn):
        beta = jnp.asarray(momentum)
        sent = jax.tree.map(jnp.add, scale(beta, kept), scale(1 - beta, changes))
        return sent, sent

    return Feedback(send)


def check_feedback(feedback: Feedback, clients: LocalSteps, more: bool) -> None:
    """Refuse clients that feedback does not cover."""
    by_size = feedback.adds and clients.weighting == "data"
    if more or by_size:
        found = "got clients that hold parts, or a memory" if more else "got weighting 'data'"
        remedy = "Leave it out." if more else "Pass weighting='uniform' to local_steps."
        requirement = "must be None unless clients send whole updates, and weigh alike for ef21"
        raise ArgumentError("feedback", requirement, found, remedy)
    if clients.noise is not None:
        require_own_noise("feedback does not cancel it", noise=clients.noise.distribution)
