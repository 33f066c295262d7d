"""FedProx, SCAFFOLD, FedDyn and Ditto: federated averaging with a term beside the gradients of clients' steps.

Client i of the active ones S, of N in all, makes steps from y_i = x along the gradient g_i of its batch and a term:

    FedProx    g_i(y_i) + mu (y_i - x)
    SCAFFOLD   g_i(y_i) - c_i + c          c_i <- c_i - c - Delta_i / sum_t gamma_t
    FedDyn     g_i(y_i) - q_i + mu (y_i - x)      q_i <- q_i - mu Delta_i
    Ditto      g_i(y_i), and in steps of its own model v_i, along g_i(v_i) + lambda (v_i - x)

With Delta_i = y_i - x and the mean over S the server computes

    FedProx, Ditto   x <- x + mean Delta
    SCAFFOLD         x <- x + gamma_g mean Delta,     c <- c + (|S| / N) (-c - mean Delta / sum_t gamma_t)
    FedDyn           h <- h - mu (|S| / N) mean Delta,         x <- x + mean Delta - h / mu

| symbol | here |
|---|---|
| x; c or h; c_i, q_i or v_i | `State.params`; `optimizer`; `memory`, that starts at 0, v_i at x |
| mu, lambda; gamma_g | `proximal`; `server_step_size` |
| y_i, g_i, gamma_t | `clients`: `jaxfl.local_steps` |

FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, arXiv:1812.06127, Algorithm 2. SCAFFOLD: Karimireddy,
Kale, Mohri, Reddi, Stich, Suresh, ICML 2020, arXiv:1910.06378, Algorithm 1 with option II. FedDyn: Acar, Zhao, Matas
Navarro, Mattina, Whatmough, Saligrama, ICLR 2021, arXiv:2111.04263, Algorithm 1. Ditto: Li, Hu, Beirami, Smith, ICML
2021, arXiv:2012.04221, Algorithm 1.

Differences from the papers: those of `jaxfl.fed_avg`; steps of an optimizer in place of the minimisers of FedProx and
FedDyn. FedProx draws clients uniformly and weighs them as `clients` says, the paper draws by p_i and weighs alike. In
SCAFFOLD the server computes the change of c from the mean change, so that clients send one vector and not two. FedDyn's
sum in h is over y_i - x, whose parentheses are missing in the paper.

Terms come after clipping and noise, and what a client keeps is a function of its noisy steps: statements are those of
`jaxfl.fed_avg`. With private updates c and h follow from noisy means (in h their noise adds up), and are no longer the
means of c_i and q_i. Ditto's v_i stays at its client: it is no release, and not covered where it is published.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import Rule, by_optimizer, require_linear, server_rounds, step_mass, with_term
from jaxfl.core import Algorithm, Array, PyTree, Task, Variables, check
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import scale


@constructor
def fed_prox(
    task: Task, *, clients: LocalSteps, num_active: int, proximal: float | Array, uplink: Uplink | None = None
) -> Algorithm:
    """Federated averaging with a proximal term, which holds clients near the model that they got.

    Args:
        task, clients, num_active, uplink: as for `jaxfl.fed_avg`. A weight decay of the optimizer is added to the term.
        proximal: mu, at least 0, of the order of 0.001 to 1; may be traced.

    Guarantees:
        - with mu = 0 it is fed_avg, bit for bit.
        - where the loss is flat clients stay at x.
    """
    check.scalar(proximal=proximal)
    check.non_negative(proximal=proximal)
    rule = by_optimizer(optax.sgd(1.0), train=lambda at: (at.run(_toward(at.sent.params, proximal)), ()))
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)


@constructor
def scaffold(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    server_step_size: float | Array = 1.0,
    uplink: Uplink | None = None,
) -> Algorithm:
    """SCAFFOLD: control variates c_i of the clients and c of the server take the drift out of local steps.

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

    def turn(c, change, mass):
        """What a round adds to c_i; nothing where no step is made."""
        inverse = jnp.where(mass > 0, 1 / jnp.where(mass > 0, mass, 1), 0)
        return jax.tree.map(lambda c, d: jnp.where(mass > 0, -c - d, 0), c, scale(inverse, change))

    def train(at):
        trained = at.run(with_term(lambda g, y: jax.tree.map(lambda g, c_i, c: g - c_i + c, g, at.memory, at.server)))
        change = jax.tree.map(jnp.subtract, trained[0], at.sent.params)
        return trained, jax.tree.map(jnp.add, at.memory, turn(at.server, change, at.public))

    def serve(at):
        added = turn(at.memory, at.change, at.public)
        c = jax.tree.map(lambda c, d: c + at.fraction * d, at.memory, added)
        return scale(jnp.asarray(server_step_size), at.change), c

    rule = _with_sums(serve, train, public=partial(step_mass, clients), vectors_down=2)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)


@constructor
def fed_dyn(
    task: Task, *, clients: LocalSteps, num_active: int, proximal: float | Array, uplink: Uplink | None = None
) -> Algorithm:
    """FedDyn: a linear and a proximal term, by which clients' optima agree with the optimum of all.

    Args:
        task, num_active, uplink: as for `jaxfl.fed_avg`; links are refused, since h and q_i move by the same updates.
        clients: what an active client does, with uniform weighting.
        proximal: mu, positive, of the order of 0.001 to 0.1, alpha in the paper; may be traced. x may leave the hull
            of the y_i: with a small mu and few active clients it does so at first.

    Guarantees:
        - h is the mean of all q_i after every round, whoever takes part.
        - all active, many steps, strongly convex: x goes to the optimum of the uniform mean.
    """
    check.scalar(proximal=proximal)
    check.positive(proximal=proximal)

    def train(at):
        q, x = at.memory, at.sent.params
        trained = at.run(
            with_term(lambda g, y: jax.tree.map(lambda g, q, y, x: g - q + proximal * (y - x), g, q, y, x))
        )
        return trained, jax.tree.map(lambda q, y, x: q - proximal * (y - x), q, trained[0], x)

    def serve(at):
        h = jax.tree.map(lambda h, mean: h - proximal * at.fraction * mean, at.memory, at.change)
        return jax.tree.map(lambda mean, h: mean - h / proximal, at.change, h), h

    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=_with_sums(serve, train))


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
    """Ditto: beside the common model each client has its own.

    `node_params` gives the own models; where steps or updates are private it gives x, which statements cover.

    Args:
        task, clients, num_active, uplink: as for `jaxfl.fed_avg`.
        own: the steps of a client's own model in a round in which it is active, on batches of their own; their
            weighting does not count.
        proximal: lambda, at least 0, of the order of 0.01 to 2; may be traced. With 0 each client learns alone.

    Guarantees:
        - x is that of fed_avg, bit for bit.
        - the own models of clients that are not active stay.
    """
    check.scalar(proximal=proximal)
    check.non_negative(proximal=proximal)

    def train(at):
        params, model_state, info = at.run()
        *model, measured = at.run(_toward(at.sent.params, proximal), start=at.memory, which=1)
        return (params, model_state, info.plus(client_loss=measured.loss)), Variables(*model)

    def node_params(state):
        return state.memory if task.train_loss is not None else state.memory.params

    is_private = clients.is_private or (uplink is not None and uplink.is_private)
    rule = by_optimizer(optax.sgd(1.0), memory=lambda model: model, train=train, more=(own,))
    return server_rounds(
        task,
        clients=clients,
        num_active=num_active,
        uplink=uplink,
        rule=rule,
        node_params=None if is_private else node_params,
    )


def _toward(x: PyTree, proximal: float | Array):
    """The gradient at y with the proximal term toward x."""
    return with_term(lambda g, y: jax.tree.map(lambda g, y, x: g + proximal * (y - x), g, y, x))


def _with_sums(serve, train, **changes) -> Rule:
    """Make a rule whose server keeps the mean of what clients keep, which starts at 0."""

    def start(model):
        return tuple(jax.tree.map(jnp.zeros_like, model.params) for _ in range(2))

    return Rule(serve, train, start, keeps_sums=True, by_changes=True, own_noise=True, **changes)
