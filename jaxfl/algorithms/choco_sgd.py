"""CHOCO-SGD: gossip by compressed differences to copies that all neighbors keep.

    icml:  z_i = x_i - gamma g_i,   xhat_i <- xhat_i + Q(z_i - xhat_i),   x_i <- z_i + zeta sum_j W_ij (xhat_j - xhat_i)
    iclr:  x_i <- x_i - gamma g_i + zeta sum_j W_ij (xhat_j - xhat_i),    xhat_i <- xhat_i + Q(x_i - xhat_i)

xhat starts at 0 and lies in `State.memory["copy"]`; only Q(..) is sent. zeta is the paper's gamma, and Q must be
contractive.

Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication",
ICML 2019, arXiv:1902.00340, Algorithm 2. The second order: Koloskova, Lin, Stich, Jaggi, ICLR 2020, arXiv:1907.09356,
and the authors' code.

Differences from the papers: noise. Copies are mixed as a whole in arithmetic, where the papers add up what arrives.
Links that lose or round messages are no argument: the copies at neighbors would part.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes, and Q acts on released numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.algorithms.gossip_rule import Rule, by_rule, moved, zeros
from jaxfl.channel.compress import Compressor
from jaxfl.core import Algorithm, Array, Task, check
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.tree import descend, scale, size
from jaxfl.gradients import GradientEstimator
from jaxfl.graphs import Graph
from jaxfl.privacy import NoiseMechanism


@constructor
def choco_sgd(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    compressor: Compressor,
    consensus_step: float | Array,
    order: str = "icml",
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
) -> Algorithm:
    """CHOCO-SGD.

    Args:
        task, graph, step_size, gradient, noise: as for `exact_diffusion`; no gossip of several exchanges a round.
        compressor: Q: `jaxfl.channel.top_k(...)` or `rand_k(...)`.
        consensus_step: zeta, positive; may be traced. 1 where Q keeps all; 0.05 to 0.6 for 1 % of the numbers. Larger
            ones diverge.
        order: "icml" compresses after the step and mixes then, "iclr" mixes the copies as they were. Static.

    Guarantees:
        - the mean of the nodes moves by minus step_size times the mean noisy gradient, whatever Q drops.
        - where Q keeps all and zeta is 1, "icml" mixes after the step, and "iclr" gives the rounds of d_psgd.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> from jaxfl.channel import top_k
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> options = {"compressor": top_k(0.5), "consensus_step": 0.4}
        >>> learner = jaxfl.choco_sgd(task, graph=jaxfl.graphs.complete(2), step_size=0.1, **options)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.bits_sent.tolist()  # one number and its place
        [33.0, 33.0]
    """
    check.one_of(("icml", "iclr"), order=order)
    check.scalar(consensus_step=consensus_step)
    check.positive(consensus_step=consensus_step)

    def step(x, memory, g, this):
        copy, zeta = memory["copy"], at_round(consensus_step, this.round_index, x)
        bits = compressor.bits(size(x) // graph.num_nodes)

        def updated(value):
            return jax.tree.map(jnp.add, copy, compressor.apply(moved(value, copy), this.draws))

        z = descend(x, this.step_size, g)
        if order == "iclr":
            x = moved(z, scale(zeta, this.apart(copy, bits=bits)))
            return x, {"copy": updated(x)}
        copy = updated(z)
        return moved(z, scale(zeta, this.apart(copy, bits=bits))), {"copy": copy}

    rule = Rule("CHOCO-SGD", lambda x: {"copy": zeros(x)}, step, one_matrix=True, draw=compressor.draw)
    return by_rule(rule, task, graph, step_size, gradient, noise, None)
