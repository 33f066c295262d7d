"""q-FedAvg: clients with a larger loss weigh more, so that losses become more equal.

Client i of the active ones S has the loss F_i over all its samples at x, and changes x by Delta_i in its local steps:

    x <- x + sum_S F_i^q Delta_i / sum_S (F_i^q + q F_i^(q-1) |Delta_i|^2 / gamma)

| symbol | here |
|---|---|
| x, q | `State.params`, `fairness` |
| F_i, |Delta_i|^2 | `client_loss`, `squared_change` of the info |
| gamma = 1 / L | step size of the first local step of `clients` |

Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv:1905.10497, Algorithm 2.

Differences from the paper: those of `jaxfl.fed_avg`; clients are drawn uniformly, and their weighting multiplies F_i^q,
where the paper draws them by their sizes. F_i + 1e-10 stands for F_i, as in the authors' code.

Does not claim: privacy. It refuses noise.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import Rule, first_step_size, require_linear, server_rounds
from jaxfl.core import Algorithm, ArgumentError, Array, Task, check
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import scale, squared_norm


@constructor
def q_fed_avg(
    task: Task, *, clients: LocalSteps, num_active: int, fairness: float | Array, uplink: Uplink | None = None
) -> Algorithm:
    """q-FedAvg.

    Args:
        task, num_active: as for `jaxfl.fed_avg`; losses must not be negative.
        clients: without noise, and with SGD, whose step size says how far the server goes.
        fairness: q, at least 0, of the order of 0.1 to 5; may be traced.
        uplink: as for `jaxfl.fed_avg`, with links only. Two numbers more reach the server.

    Guarantees:
        - with q = 0 it is fed_avg.
        - where all losses are F, x moves by mean Delta / (1 + q mean |Delta|^2 / (gamma F)).
    """
    check.scalar(fairness=fairness)
    check.non_negative(fairness=fairness)
    require_linear(clients, ": L is 1 over their step size")
    if clients.noise is not None or (uplink is not None and uplink.is_private):
        requirement = "must be None: losses and norms of updates would be further releases"
        found, remedy = "got noise, and a quotient of noisy sums has no stable form", "Pass fed_avg, or no noise."
        raise ArgumentError("noise", requirement, found, remedy)
    if uplink is not None and uplink.more_than_mean:
        requirement = "must leave updates as they are: clients report their norms"
        raise ArgumentError("uplink", requirement, f"got {uplink.more_than_mean}", "Leave it out.")

    def train(at):
        params, model_state, info = at.run()
        loss, count = at.own_loss()
        change = jax.tree.map(lambda y, x: (y - x)[None], params, at.sent.params)
        numbers = {"client_loss": loss + 1e-10, "squared_change": squared_norm(change)[0]}
        return (params, model_state, info.plus(numbers, forward_evaluations=count)), ()

    def weigh(weights, info):
        return weights * (info.client_loss / info.client_loss.max()) ** fairness  # shares are the same, and finite

    def serve(at):
        squares = jnp.where(at.public > 0, at.info.squared_change / jnp.where(at.public > 0, at.public, 1), 0)
        return scale(1 / (1 + fairness * (at.shares @ (squares / at.info.client_loss))), at.change), ()

    rule = Rule(serve, train, public=partial(first_step_size, clients), weigh=weigh, numbers_up=2)
    learner = server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)
    return learner._replace(releases=None)
