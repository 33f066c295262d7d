"""SCAFFOLD: control variates c_i of the clients and c of the server take the drift out of local steps.

Client i of the active ones S makes K steps from y_i = x, and both sides then change what they keep:

    y_i <- y_i - gamma_t (g_i(y_i) - c_i + c)
    c_i <- c_i - c - Delta_i / sum_t gamma_t,               Delta_i = y_i - x
    x <- x + gamma_g mean_S Delta_i
    c <- c + (|S| / N) (-c - mean_S Delta_i / sum_t gamma_t)

| symbol | here |
|---|---|
| x, c, c_i | `State.params`, `optimizer`, `memory` |
| gamma_t, K | `clients`: `jaxfl.local_steps` with SGD |
| gamma_g, N | `server_step_size`, all clients |

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, arXiv:1910.06378, Algorithm 1 with option II.

Differences from the paper: the server computes the change of c from what it receives anyway, so that clients send one
vector and not two. Clients weigh alike, as in the paper; statistics of a model are averaged and never corrected.

The correction comes after clipping and noise, and c_i is a function of noisy steps. With private updates c is computed
from the noisy mean, and c = mean of c_i no longer holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import Rule, require_linear, server_rounds, step_mass
from jaxfl.core import Algorithm, Array, Task, check
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import scale


@constructor
def scaffold(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_step_size: float | Array = 1.0,
    uplink: Uplink | None = None,
) -> Algorithm:
    """SCAFFOLD with option II.

    Args:
        task, num_active, uplink: as for `jaxfl.fed_avg`; links are refused, since c and c_i move by the same updates.
        clients: with plain SGD and uniform weighting: momentum, weight decay or adam would make Delta_i / sum gamma_t
            no mean gradient.
        server_step_size: gamma_g, positive; may be traced.

    Guarantees:
        - c is the mean of all c_i after every round, whoever takes part.
        - all active, one step, full batches: gradient descent on the mean.
    """
    check.scalar(server_step_size=server_step_size)
    check.positive(server_step_size=server_step_size)
    require_linear(clients, ": c_i is a mean of gradients")

    def start(model):
        return tuple(jax.tree.map(jnp.zeros_like, model.params) for _ in range(2))

    def turn(c, change, mass):
        """What a round adds to c_i; nothing where no step is made."""
        inverse = jnp.where(mass > 0, 1 / jnp.where(mass > 0, mass, 1), 0)
        return jax.tree.map(lambda c, d: jnp.where(mass > 0, -c - d, 0), c, scale(inverse, change))

    def train(at):
        own, c, x = at.memory, at.server, at.sent.params
        trained = at.run(lambda g, y: jax.tree.map(lambda g, c_i, c: g - c_i + c, g, own, c))
        delta = jax.tree.map(jnp.subtract, trained[0], x)
        return trained, jax.tree.map(jnp.add, own, turn(c, delta, at.public))

    def serve(at):
        added = turn(at.memory, at.change, at.public)
        return scale(jnp.asarray(server_step_size), at.change), jax.tree.map(
            lambda c, d: c + at.fraction * d, at.memory, added
        )

    rule = Rule(
        serve,
        train,
        start,
        public=lambda round_index: step_mass(clients, round_index),
        keeps_sums=True,
        by_changes=True,
        vectors_down=2,
        own_noise=True,
    )
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)
