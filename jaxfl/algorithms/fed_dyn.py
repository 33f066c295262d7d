"""FedDyn: a linear and a proximal term, by which clients' optima agree with the optimum of all.

Client i of the active ones S makes its steps from y_i = x along

    g_i(y_i) - q_i + alpha (y_i - x),   and then    q_i <- q_i - alpha Delta_i,       Delta_i = y_i - x

    h <- h - (alpha / N) sum_S Delta_i,             x <- mean_S y_i - h / alpha       at the server, N: all clients

| symbol | here |
|---|---|
| x, h, q_i | `State.params`, `optimizer`, `memory`; h and q_i start at 0 |
| alpha | `proximal` |

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR
2021, arXiv:2111.04263, Algorithm 1.

Differences from the paper: steps of an optimizer in place of a minimiser; the sum in h is over y_i - x, whose
parentheses are missing in the paper.

The terms come after clipping and noise. With private updates h sums the noisy means, and their noise with them. x may
leave the hull of the y_i: with a small alpha and few active clients it does so at first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import Rule, server_rounds
from jaxfl.core import Algorithm, Array, Task, check
from jaxfl.core.algorithm import constructor


@constructor
def fed_dyn(
    task: Task, *, clients: LocalSteps, num_active: int, proximal: float | Array, uplink: Uplink | None = None
) -> Algorithm:
    """FedDyn.

    Args:
        task, num_active, uplink: as for `jaxfl.fed_avg`; links are refused, since h and q_i move by the same updates.
        clients: what an active client does, with uniform weighting.
        proximal: alpha, positive, of the order of 0.001 to 0.1; may be traced.

    Guarantees:
        - h is the mean of all q_i after every round, whoever takes part.
        - all active, many steps, strongly convex: x goes to the optimum of the uniform mean.
    """
    check.scalar(proximal=proximal)
    check.positive(proximal=proximal)

    def start(model):
        return tuple(jax.tree.map(jnp.zeros_like, model.params) for _ in range(2))

    def train(at):
        q, x = at.memory, at.sent.params
        trained = at.run(lambda g, y: jax.tree.map(lambda g, q, y, x: g - q + proximal * (y - x), g, q, y, x))
        return trained, jax.tree.map(lambda q, y, x: q - proximal * (y - x), q, trained[0], x)

    def serve(at):
        h = jax.tree.map(lambda h, mean: h - proximal * at.fraction * mean, at.memory, at.change)
        return jax.tree.map(lambda mean, h: mean - h / proximal, at.change, h), h

    rule = Rule(serve, train, start, keeps_sums=True, by_changes=True, own_noise=True)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)
