"""Ditto: federated averaging, beside which each client keeps a model of its own near the common one.

    x <- as in `jaxfl.fed_avg`,   v_i <- v_i - gamma_v (g_i(v_i) + lambda (v_i - x))   s times, x as sent in this round

v_i starts as x and is that of the last round in which client i was active. Its batches are draws of their own.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, arXiv:2012.04221,
Algorithm 1. Differences from the paper: those of `jaxfl.fed_avg`; any optimizer makes the steps.

Privacy statements cover x. v_i stays at its client, is no release, and is not covered where it is published.
"""

from __future__ import annotations

import jax
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import by_optimizer, server_rounds
from jaxfl.core import Algorithm, Array, Task, Variables, check
from jaxfl.core.algorithm import constructor


@constructor
def ditto(
    task: Task,
    *,
    clients: LocalSteps,
    own: LocalSteps,
    num_active: int,
    proximal: float | Array,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Ditto; `node_params` gives the clients' own models.

    Args:
        task, clients, num_active, uplink: as for `jaxfl.fed_avg`.
        own: the steps of a client's own model in a round in which it is active; its weighting does not count.
        proximal: lambda, at least 0, of the order of 0.01 to 2; may be traced. With 0 each client learns alone.

    Guarantees:
        - x is that of fed_avg, bit for bit.
        - the own models of clients that are not active stay.
    """
    check.scalar(proximal=proximal)
    check.non_negative(proximal=proximal)

    def train(at):
        def toward(g, v):
            return jax.tree.map(lambda g, v, x: g + proximal * (v - x), g, v, at.sent.params)

        params, model_state, info = at.run()
        own_params, own_state, measured = at.run(toward, start=at.memory, which=1)
        return (params, model_state, info.plus(own_loss=measured.loss)), Variables(own_params, own_state)

    def node_params(state):
        return state.memory if task.train_loss is not None else state.memory.params

    rule = by_optimizer(optax.sgd(1.0), memory=lambda model: model, train=train, more=(own,))
    return server_rounds(
        task, clients=clients, num_active=num_active, uplink=uplink, rule=rule, node_params=node_params
    )
