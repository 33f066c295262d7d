"""K-GT: gradient tracking over a graph with K local steps between two exchanges.

    from v_i = x_i, K times:   v_i <- v_i - gamma (g_i(v_i) + c_i)
    z_i = mean of the K directions g_i(v_i) + c_i
    c_i <- c_i - z_i + sum_j W_ij z_j,   x_i <- sum_j W_ij (x_j - K eta gamma z_j)

| symbol | here |
|---|---|
| x_i; c_i | `State.params`; `State.memory["correction"]`, which starts at 0 |
| g_i | `gradient`, with `noise` |
| K, gamma, eta, W | `num_local_steps`, `step_size`, `communication_step`, `graph` |

Liu, Lin, Koloskova, Stich, "Decentralized gradient tracking with local steps", Optimization Methods and Software 2024,
arXiv:2301.01313, Algorithm 1. On a complete graph it is SCAFFOLD with all clients: c_i here is c - c_i there.

Differences from the paper: noise; links with symmetric losses; more than one exchange in a round. The paper divides
x_i - v_i by K gamma, which loses |x| eps / (K gamma) in float32; here the directions are added up. c_i moves by
differences (`gossip_rule`).

Does not claim: a privacy guarantee. The noise has the scale that the caller passes. A round releases K noisy gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.algorithms.gossip_rule import Rule, by_rule, moved, zeros
from jaxfl.channel import Links
from jaxfl.core import Algorithm, Array, Task, check
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.tree import descend, scale
from jaxfl.gradients import GradientEstimator
from jaxfl.graphs import Graph
from jaxfl.privacy import NoiseMechanism


@constructor
def k_gt(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    num_local_steps: int,
    communication_step: float | Array = 1.0,
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """Gradient tracking with local steps.

    Args:
        task, graph, gradient, noise, links, num_mixings: as for `diging`; the graph may change over rounds.
        step_size: gamma of the local steps: a number, a traced scalar, or a schedule of the round index.
        num_local_steps: K, 2 to 20. Each takes a gradient with samples and noise of its own. Static.
        communication_step: eta, positive; may be traced. 0.5 to 1.

    Returns:
        An `Algorithm`; x and z go to every neighbor, twice the bits of `d_psgd`. The loss is the mean over the steps.

    Guarantees:
        - the corrections sum to 0, and the mean of the nodes moves by the mean of all noisy gradients.
        - with full batches it reaches the minimum of the mean loss, and stays there.
        - a round whose corrections are 0 is one of local SGD and mixing; of one step, D-PSGD that mixes after it.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = jaxfl.k_gt(task, graph=jaxfl.graphs.complete(2), step_size=0.1, num_local_steps=3)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.bits_sent.tolist()
        ([3, 3], [128.0, 128.0])
    """
    check.at_least(1, num_local_steps=num_local_steps)
    check.scalar(communication_step=communication_step)
    check.positive(communication_step=communication_step)

    def direction(memory, noisy):
        return jax.tree.map(jnp.add, noisy, memory["correction"])

    def step(x, memory, total, this):
        outer = this.step_size * at_round(communication_step, this.round_index, x)
        sent = descend(x, outer, total), scale(jnp.float32(1 / num_local_steps), total)
        d, d_of_z = this.apart(sent)
        return moved(sent[0], d), {"correction": moved(memory["correction"], d_of_z)}

    reason, steps = "its corrections sum to 0", {"num_steps": num_local_steps, "direction": direction}
    rule = Rule("K-GT", lambda x: {"correction": zeros(x)}, step, needs_sum=reason, **steps)
    return by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings)
