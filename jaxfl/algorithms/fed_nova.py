"""FedNova: clients make different numbers of steps, and the server averages their changes by step.

Client i makes tau_i steps from y_i = x. The sum of what its optimizer would move against gradients of 1 is its mass

    r_i = gamma |a_i|_1,    SGD: gamma tau_i,    momentum: gamma (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)
    x <- x + (sum_S p_i r_i) sum_S p_i (y_i - x) / r_i,        p_i = J_i / sum_S J_j

| symbol | here |
|---|---|
| x, tau_i | `State.params`, `num_steps` |
| gamma, rho, p_i | the optimizer and weighting of `clients`; r_i follows from the optimizer itself |

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, arXiv:2007.07481, section 4.

Differences from the paper: no proximal term. Clients send (y_i - x) r / r_i, with r the mean of r_j over all clients,
so that a clip norm means what it means for equal steps; the server multiplies by sum p_i r_i / r.

Private updates clip these changes. The factor is 1 then: who takes part must not move it. The numbers of steps are
public, and must not follow from private sizes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import Rule, require_linear, server_rounds, step_mass
from jaxfl.core import Algorithm, ArgumentError, Array, Task
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import scale


@constructor
def fed_nova(
    task: Task, *, clients: LocalSteps, num_active: int, num_steps: Array | np.ndarray, uplink: Uplink | None = None
) -> Algorithm:
    """FedNova.

    Args:
        task, num_active, uplink: as for `jaxfl.fed_avg`.
        clients: with SGD, or SGD with momentum, which starts anew in each round. `max_steps` bounds the steps.
            A round has a reverse derivative with `differentiable=True`.
        num_steps: tau_i of every client, (n,), int32, from 1 to `max_steps`.

    Guarantees:
        - with gradients that are constant, x moves by their p-weighted mean, whatever the numbers of steps.
        - clients that do not move leave x, bit for bit.
        - equal numbers of steps give fed_avg.
    """
    require_linear(clients, " or momentum: r_i is a multiple of its gradients", "TraceState")
    counts = np.asarray(num_steps)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or counts.min() < 1 or counts.max() > clients.max_steps:
        requirement = f"must hold one integer from 1 to max_steps, {clients.max_steps}, for each client"
        found = f"got {counts.dtype}{list(counts.shape)}" + f" from {counts.min()} to {counts.max()}" * (
            counts.size > 0
        )
        raise ArgumentError("num_steps", requirement, found, "Pass their numbers, or raise max_steps.")
    if clients.num_steps is not None:
        found = f"got {clients.num_steps!r}"[:40]
        raise ArgumentError("clients", "must leave num_steps to fed_nova", found, "Leave it out of local_steps.")
    steps = jnp.asarray(counts, jnp.int32)

    def public(round_index, x):
        return jax.vmap(lambda count: step_mass(clients, round_index, x, count))(steps)

    def train(at):
        params, model_state, info = at.run(count=steps[at.number])
        factor, x = at.public.mean() / at.public[at.number], at.sent.params
        sent = jax.tree.map(jnp.add, x, scale(factor, jax.tree.map(jnp.subtract, params, x)))
        return (sent, model_state, info), ()

    def serve(at):
        effective = at.shares @ at.public[at.active] / at.public.mean()
        return scale(jnp.where(at.is_private, 1.0, effective), at.change), ()

    rule = Rule(serve, train, public=public, num_steps=steps, by_changes=True, own_noise=True)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)
