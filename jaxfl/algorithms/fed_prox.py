"""FedProx: federated averaging with a proximal term, which holds clients near the model that they got.

Client i makes its steps from the server's model x, y_i = x, along

    g_i(y_i) + mu (y_i - x)

and the server averages. The term is the gradient of (mu / 2) |y - x|^2.

| symbol | here |
|---|---|
| mu | `proximal` |
| y_i, g_i | `clients`: `jaxfl.local_steps` |

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv:1812.06127, Algorithm 2.

Differences from the paper: steps of an optimizer in place of an inexact minimiser; clients are drawn uniformly and
weighed as `clients` says, where the paper draws them by p_i and weighs them alike.

The term comes after clipping and noise, as a function of what was released.
"""

from __future__ import annotations

import jax
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import by_optimizer, server_rounds
from jaxfl.core import Algorithm, Array, Task, check
from jaxfl.core.algorithm import constructor


@constructor
def fed_prox(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    proximal: float | Array,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Federated averaging with a proximal term.

    Args:
        task, clients, num_active, uplink: as for `jaxfl.fed_avg`. A weight decay of the clients' optimizer is added to
            the term.
        proximal: mu, at least 0, of the order of 0.001 to 1; may be traced.

    Guarantees:
        - with mu = 0 it is fed_avg, bit for bit.
        - where the loss is flat clients stay at x.
    """
    check.scalar(proximal=proximal)
    check.non_negative(proximal=proximal)

    def train(at):
        x = at.sent.params
        return at.run(lambda g, y: jax.tree.map(lambda g, y, x: g + proximal * (y - x), g, y, x)), ()

    rule = by_optimizer(optax.sgd(1.0), train=train)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)
