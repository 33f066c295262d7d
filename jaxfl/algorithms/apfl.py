"""APFL: each client mixes a model of its own with the common one, by a share that it adapts.

Client i makes steps of w_i, from w_i = x, and of its own v_i, both gradients on one batch:

    m_i = a_i v_i + (1 - a_i) w_i
    w_i <- w_i - gamma g_i(w_i)
    v_i <- v_i - gamma a_i g_i(m_i)
    a_i <- clip(a_i - gamma <g_i(m_i), v_i - w_i>, 0, 1)        with v_i and w_i of before the step

x is then the mean of the w_i, as in `jaxfl.fed_avg`; v_i and a_i stay at their client.

| symbol | here |
|---|---|
| x; v_i, a_i | `State.params`; `own`, `share` of `State.memory`, which start at x, `share` |
| gamma, g_i | the optimizer of `clients`, their gradient |

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, Algorithm 1.

Differences from the paper: those of `jaxfl.fed_avg`. a_i moves in every step as in the paper's text, in the first step
of a round as in the authors' code, or not at all (`adapts`). The authors' code also adds a decay of a_i, which is not
here. Where a_i is clipped to 0, v_i stays until a_i rises again, as in the paper.

With noise in local steps w_i is noisy as in `jaxfl.fed_avg`, and its statement covers x. v_i, a_i stay at home: they
are no release, and not covered where they are published.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.steps import StepGradient
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import by_optimizer, first_step_size, require_linear, server_rounds
from jaxfl.core import Algorithm, Array, PyTree, Task, Variables, check
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import number_type, replicate, scale


class Personal(NamedTuple):
    """What a client keeps."""

    own: Variables  # v, like x, and the statistics of the mixed model
    share: Array  # a, (), in [0, 1]


@constructor
def apfl(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    share: float | Array = 0.5,
    adapts: str = "steps",
    uplink: Uplink | None = None,
) -> Algorithm:
    """APFL.

    `node_params` gives the mixed models a_i v_i + (1 - a_i) x; where steps or updates are private it gives x, which
    statements cover.

    Args:
        task, num_active, uplink: as for `jaxfl.fed_avg`.
        clients: with SGD, or SGD with momentum; each step takes two gradients.
        share: a_i at the start, in [0, 1]; may be traced.
        adapts: when a_i moves: in all "steps" (the paper's text), once a "round" (the authors' code), or "never".
            Static.

    Guarantees:
        - x is that of fed_avg, bit for bit.
        - what clients keep that are not active stays.
    """
    check.scalar(share=share)
    check.probability(share=share)
    check.one_of(("steps", "round", "never"), adapts=adapts)
    require_linear(clients, " or momentum, the same for both models", "TraceState")

    def train(at):
        def wrap(gradient_of):
            def gradient(params, carried, step):
                (w, v), (state, own_state, a, is_first) = params, carried
                of_w, of_mixed = gradient_of(w, state, step), gradient_of(_mixed(a, v, w), own_state, step)
                slopes = jax.tree.map(lambda g, v, w: jnp.sum(g * (v - w)), of_mixed.gradient, v, w)
                slope = sum(jax.tree.leaves(slopes))
                moved = jnp.clip(a - at.public * slope, 0, 1).astype(a.dtype)
                new = a if adapts == "never" else moved if adapts == "steps" else jnp.where(is_first, moved, a)
                counts = {"gradient_evaluations": step.mask.sum(dtype=jnp.int32)}  # of the second gradient
                info = of_w.info.plus(counts, client_loss=of_mixed.info.loss)
                carried = of_w.model_state, of_mixed.model_state, new, jnp.zeros_like(is_first)
                return StepGradient((of_w.gradient, scale(a, of_mixed.gradient)), carried, info)

            return gradient

        sent, own = at.sent, at.memory.own
        carried = sent.model_state, own.model_state, at.memory.share, jnp.bool_(True)
        start = Variables((sent.params, own.params), carried)
        (w, v), (state, own_state, a, _), info = at.run(wrap, start=start)
        return (w, state, info.plus(own_share=a)), Personal(Variables(v, own_state), a)

    def node_params(state):
        own, a = state.memory.own, state.memory.share
        mixed = jax.vmap(_mixed)(a, own.params, replicate(state.params, len(a)))
        return mixed if task.train_loss is None else Variables(mixed, own.model_state)

    def start(model):
        return Personal(model, jnp.asarray(share, number_type(model.params)))

    is_private = clients.is_private or (uplink is not None and uplink.is_private)
    rule = by_optimizer(optax.sgd(1.0), memory=start, train=train, public=partial(first_step_size, clients))
    return server_rounds(
        task,
        clients=clients,
        num_active=num_active,
        uplink=uplink,
        rule=rule,
        node_params=None if is_private else node_params,
    )


def _mixed(share: Array, own: PyTree, common: PyTree) -> PyTree:
    """share own + (1 - share) common."""
    return jax.tree.map(lambda v, w: share * v + (1 - share) * w, own, common)
