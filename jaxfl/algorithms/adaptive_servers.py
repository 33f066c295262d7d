"""FedAvgM, FedAdagrad, FedAdam and FedYogi: federated averaging whose server has an optimizer with moments.

Delta is the weighted mean change of the clients that arrived, of `jaxfl.fed_avg`'s round:

    FedAvgM      v <- beta v + Delta,  x <- x + eta v
    the others   m <- beta_1 m + (1 - beta_1) Delta,  x <- x + eta m / (sqrt(v) + tau),  with before it
                 v <- v + Delta^2                                      FedAdagrad
                 v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)       FedYogi
                 v <- beta_2 v + (1 - beta_2) Delta^2                  FedAdam

They start at m = 0 and v = tau^2. Moments are not corrected for their start: `optax.adam` as the server's optimizer is
another method.

FedAvgM: Hsu, Qi, Brown, arXiv:1909.06335. The others: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan,
"Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295, Algorithm 2.

Differences from the papers: those of `jaxfl.fed_avg`. `local_steps(weighting=)` says how the mean weighs clients. A
round in which nothing arrives keeps m and v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import Rule, by_optimizer, server_rounds
from jaxfl.core import Algorithm, Array, PyTree, Task, check
from jaxfl.core.algorithm import constructor


class Moments(NamedTuple):
    """State of the server's optimizer."""

    first: PyTree  # m, like x
    second: PyTree  # v, like x, not negative


@constructor
def fed_avgm(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_step_size: float | Array = 1.0,
    server_momentum: float | Array = 0.9,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Federated averaging with momentum at the server.

    Args:
        task, clients, num_active, uplink: as for `jaxfl.fed_avg`.
        server_step_size: eta, positive; may be traced.
        server_momentum: beta, at least 0; may be traced.

    Guarantees:
        - step size 1 and momentum 0 give fed_avg.
    """
    check.scalar(server_step_size=server_step_size, server_momentum=server_momentum)
    check.positive(server_step_size=server_step_size)
    check.non_negative(server_momentum=server_momentum)
    rule = by_optimizer(optax.sgd(server_step_size, server_momentum))  # pyright: ignore[reportArgumentType]
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)


@constructor
def fed_adagrad(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_step_size: float | Array = 0.1,
    beta_1: float | Array = 0.0,
    tau: float | Array = 1e-3,
    first_square: float | Array | None = None,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Federated averaging with AdaGrad at the server; the arguments are those of `jaxfl.fed_adam`."""

    def square(v, s):
        return v + s

    rule = _adaptive(square, server_step_size, beta_1, 0.0, tau, first_square)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)


@constructor
def fed_adam(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_step_size: float | Array = 0.1,
    beta_1: float | Array = 0.9,
    beta_2: float | Array = 0.99,
    tau: float | Array = 1e-3,
    first_square: float | Array | None = None,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Federated averaging with Adam at the server, without corrections of the moments.

    Args:
        task, clients, num_active, uplink: as for `jaxfl.fed_avg`.
        server_step_size: eta, positive; may be traced, as all numbers here.
        beta_1, beta_2: decay of the moments m and v, in [0, 1].
        tau: added to sqrt(v), positive: a small one adapts more.
        first_square: v at the start, not negative; None: tau^2. Flower and fluke take 0.

    Guarantees:
        - v is never negative.
        - a round in which nothing arrives keeps m and v.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0], [1, 2, 3]])
        >>> clients = jaxfl.local_steps(5, batch_size=2, optimizer=optax.sgd(0.1))
        >>> learner = jaxfl.fed_adam(task, clients=clients, num_active=2, server_step_size=0.5)
        >>> key = jax.random.key(0)
        >>> state, _ = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> [round(float(value), 2) for value in state.params]  # 0.5 (0.1 Delta) / (0.1 Delta + 0.001)
        [0.47, 0.48]
    """

    def square(v, s):
        return beta_2 * v + (1 - beta_2) * s

    rule = _adaptive(square, server_step_size, beta_1, beta_2, tau, first_square)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)


@constructor
def fed_yogi(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_step_size: float | Array = 0.1,
    beta_1: float | Array = 0.9,
    beta_2: float | Array = 0.99,
    tau: float | Array = 1e-3,
    first_square: float | Array | None = None,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Federated averaging with Yogi at the server; the arguments are those of `jaxfl.fed_adam`."""

    def square(v, s):
        return v - (1 - beta_2) * s * jnp.sign(v - s)

    rule = _adaptive(square, server_step_size, beta_1, beta_2, tau, first_square)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)


def _adaptive(square: Callable[[Array, Array], Array], step_size, beta_1, beta_2, tau, first_square) -> Rule:
    """Make the rule of a server from (v, Delta^2) -> v."""
    first_square = tau**2 if first_square is None else first_square
    check.scalar(server_step_size=step_size, beta_1=beta_1, beta_2=beta_2, tau=tau, first_square=first_square)
    check.positive(server_step_size=step_size, tau=tau)
    check.non_negative(first_square=first_square)
    check.probability(beta_1=beta_1, beta_2=beta_2)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(first=zeros, second=jax.tree.map(lambda leaf: leaf + first_square, zeros))

    def update(updates, state, params=None):
        first = jax.tree.map(lambda m, g: beta_1 * m + (1 - beta_1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: square(v, g**2), state.second, updates)
        moves = jax.tree.map(lambda m, v: -step_size * m / (jnp.sqrt(v) + tau), first, second)
        return moves, Moments(first, second)

    return by_optimizer(optax.GradientTransformation(init, update))
