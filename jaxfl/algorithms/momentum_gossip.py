"""Momentum of every node over a graph: D-SGDm, and QG-DSGDm, whose momentum follows the consensus.

    D-SGDm:     m_i <- beta m_i + g_i,   x_i <- sum_j W_ij (x_j - gamma m_j)
    QG-DSGDm:   m_i = beta q_i + g_i,    x_i^+ = sum_j W_ij (x_j - gamma m_j),
                q_i <- mu q_i + (1 - mu) (x_i - x_i^+) / gamma

| symbol | here |
|---|---|
| x_i; m_i, q_i | `State.params`; `State.memory["momentum"]`, which starts at 0 |
| g_i | `gradient`, with `noise` |
| gamma, W, beta, mu | `step_size`, `graph`, `momentum`, `memory_decay` |

D-SGDm: Yu, Jin, Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed
Non-Convex Optimization", ICML 2019, arXiv:1905.03817. QG-DSGDm: Lin, Karimireddy, Stich, Jaggi, "Quasi-Global
Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data", ICML 2021, arXiv:2102.04761, Algorithm 1.

Differences from the papers: links; more than one exchange in a round; any gradient estimator; noise. D-SGDm's paper
averages the momentum, too, which `mixes_momentum` does. q is kept as mu q + (1 - mu) (m + d / gamma), with d of
`gossip_rule`: the quotient of the difference of two x would lose |x| eps / gamma. `d_psgd` with an optimizer's momentum
mixes before the step; these mix after it.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.algorithms.activation import Activation
from jaxfl.algorithms.gossip_rule import Rule, by_rule, moved, zeros
from jaxfl.channel import Links
from jaxfl.core import Algorithm, Array, Task, check
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.tree import descend
from jaxfl.gradients import GradientEstimator
from jaxfl.graphs import Graph
from jaxfl.privacy import NoiseMechanism


@constructor
def d_sgdm(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    momentum: float | Array = 0.9,
    mixes_momentum: bool = False,
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
    activation: Activation | None = None,
) -> Algorithm:
    """Decentralised SGD with momentum, mixed after the step.

    Args:
        task, graph: as for `d_psgd`.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index (any optax schedule).
        momentum: beta, at least 0; may be traced. With 0 it is D-PSGD that mixes after the step.
        mixes_momentum: whether m is averaged with the neighbors', too, as in the paper: twice the bits. Static.
        gradient, noise: as for `d_psgd`. Epsilon is that of one noisy gradient a round.
        links, num_mixings, activation: as for `d_psgd`; losses that are not symmetric move the mean.

    Raises:
        ArgumentError: a graph or links that do not qualify, a number out of range, or noise of another size.

    Guarantees:
        - the mean of the nodes moves by minus step_size times the mean momentum.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = jaxfl.d_sgdm(task, graph=jaxfl.graphs.complete(2), step_size=0.1, mixes_momentum=True)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.bits_sent.tolist()
        [128.0, 128.0]
    """
    check.scalar(momentum=momentum)
    check.non_negative(momentum=momentum)

    def step(x, memory, g, this):
        beta = at_round(momentum, this.round_index, x)
        m = jax.tree.map(lambda m, g: beta * m + g, memory["momentum"], g)
        z = descend(x, this.step_size, m)
        sent = (z, m) if mixes_momentum else (z, ())
        z, m_sent = moved(sent, this.apart(sent))
        return z, {"momentum": m_sent if mixes_momentum else m}

    rule = Rule("D-SGDm", lambda x: {"momentum": zeros(x)}, step)
    return by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings, activation)


@constructor
def qg_dsgdm(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    momentum: float | Array = 0.9,
    memory_decay: float | Array | None = None,
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
    activation: Activation | None = None,
) -> Algorithm:
    """Quasi-global momentum: a node's momentum is the mean of its past moves, mixing included.

    Args:
        task, graph, step_size, gradient, noise, links, num_mixings, activation: as for `d_sgdm`. In a round with a step
            size of 0 the moves by mixing do not enter q: their quotient by 0 is none.
        momentum: beta, at least 0; may be traced. With 0 it is D-PSGD that mixes after the step.
        memory_decay: mu, in [0, 1]; None takes `momentum`, as in the paper.

    Guarantees:
        - the mean of q becomes mu times itself plus 1 - mu times the mean of m.
    """
    decay = momentum if memory_decay is None else memory_decay
    check.scalar(momentum=momentum, memory_decay=decay)
    check.non_negative(momentum=momentum)
    check.probability(memory_decay=decay)

    def step(x, memory, g, this):
        q, gamma = memory["momentum"], this.step_size
        beta, mu = (at_round(one, this.round_index, x) for one in (momentum, decay))
        m = jax.tree.map(lambda q, g: beta * q + g, q, g)
        z = descend(x, gamma, m)
        d = this.apart(z)
        per_step = jnp.where(gamma > 0, 1 / jnp.where(gamma > 0, gamma, 1), 0)  # a schedule may end at 0
        q = jax.tree.map(lambda q, m, d: mu * q + (1 - mu) * (m + per_step * d), q, m, d)
        return moved(z, d), {"momentum": q}

    rule = Rule("QG-DSGDm", lambda x: {"momentum": zeros(x)}, step)
    return by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings, activation)
