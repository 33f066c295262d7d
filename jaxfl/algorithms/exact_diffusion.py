"""Exact methods over one symmetric matrix: exact diffusion, D2, EXTRA, NIDS, ProxSkip; duals sum to 0.

    exact_diffusion, ...:   z = x - gamma g - s,   d = share (z - W z),   s <- s + d,       x <- z - d
    extra:                  d = x - W x,   x <- x - d - gamma g - s,      s <- s + d / 2

`prox_skip` has s <- s + p d, and d = 0 in rounds that send nothing; its paper's h is -s / gamma. s_i starts at 0, and
lies in `State.memory["dual"]`. In textbook form the first line is x^1 = V (x^0 - gamma g^0), and x^{k+1} = V (2 x^k -
x^{k-1} - gamma g^k + gamma g^{k-1}), with V = I - share (I - W). In float32 its roundings move the mean of the nodes
for ever. Here x and s move by the same d, made of differences (`gossip_rule`), and the error stays.

| method | V | first round | source |
|---|---|---|---|
| `exact_diffusion`, "ed" | (I + W) / 2 | as all | Yuan, Ying, Zhao, Sayed, TSP 2019, arXiv:1702.05122 |
| `exact_diffusion`, "d2" | W | as all | Tang, Lian, Yan, Zhang, Liu, ICML 2018, arXiv:1803.07068, Algorithm 1 |
| `nids` | (I + W) / 2 | x^1 = x^0 - gamma g^0 | Li, Shi, Yan, TSP 2019, arXiv:1704.07807, c = 1 / (2 gamma), no r |
| `prox_skip` | (I + W) / 2, with probability p | as all | Mishchenko et al., ICML 2022, arXiv:2202.09357, Algorithm 5 |
| `extra` | | x^1 = W x^0 - gamma g^0 | Shi, Ling, Wu, Yin, SIAM J. Optim. 25(2), 2015, arXiv:1404.6264 |

Differences from the papers: gradients may be of batches and noisy; links with symmetric losses; more than one exchange
in a round (then W is a power). A noisy gradient counts twice in the textbook form, with the same noise: one release.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.gossip_rule import Rule, by_rule, moved, zeros
from jaxfl.channel import Links
from jaxfl.core import Algorithm, ArgumentError, Array, Purpose, Task, check, purpose_key
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import descend, number_type, scale
from jaxfl.gradients import GradientEstimator
from jaxfl.graphs import Graph
from jaxfl.privacy import NoiseMechanism

_ZERO_SUM = "its duals sum to 0 over the nodes"


@constructor
def exact_diffusion(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    variant: str = "ed",
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """Exact diffusion, or D2: D-PSGD without the bias by differences between the nodes' data.

    Args:
        task, step_size, gradient, noise: as for `d_sgdm`. Steps up to about 1 / L are stable, whatever the graph.
        graph: one symmetric, doubly stochastic mixing matrix for all rounds, connected.
        variant: "ed" mixes by (I + W) / 2, "d2" by W, whose eigenvalues must then exceed -1/3. Static.
        links: messages may be rounded, and lost by two nodes together.
        num_mixings: M, exchanges of a round. Static.

    Guarantees:
        - the duals sum to 0, and the mean of the nodes moves by minus step_size times the mean noisy gradient.
        - with full batches it reaches the minimum of the mean loss, and stays there.
        - a round whose duals are 0 is D-PSGD that mixes after the step.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> jaxfl.exact_diffusion(task, graph=jaxfl.graphs.ring(4), step_size=0.1, variant="d2")
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: graph: the eigenvalues of D2's matrix must exceed -1/3; the least of ring(4) ...
    """
    check.one_of(("ed", "d2"), variant=variant)
    rule = _diffusion("D2" if variant == "d2" else "exact diffusion", 1.0 if variant == "d2" else 0.5)
    learner = by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings)
    matrix = graph.rounds[0]
    # By Gershgorin's discs the eigenvalues exceed 2 min W_ii - 1. A power of W has the powers of its eigenvalues.
    if variant == "d2" and num_mixings % 2 and 2 * matrix.diagonal().min() - 1 <= -1 / 3:
        least = float(np.linalg.eigvalsh(matrix.toarray())[0]) ** num_mixings
        if least < -1 / 3 + 1e-6:
            found, remedy = f"the least of {graph.name} is {least:.3g}", 'Pass variant="ed", or larger self-weights.'
            raise ArgumentError("graph", "the eigenvalues of D2's matrix must exceed -1/3", found, remedy)
    return learner


@constructor
def nids(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """NIDS for smooth losses, with one step size: exact diffusion whose first round sends nothing.

    Args:
        task, graph, step_size, gradient, noise, links, num_mixings: as for `exact_diffusion`.

    Guarantees:
        - those of `exact_diffusion`; the first round is a gradient step of each node by itself.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = jaxfl.nids(task, graph=jaxfl.graphs.complete(2), step_size=0.1)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.bits_sent.tolist(), learner.round(key, state, data)[1].bits_sent.tolist()
        ([0.0, 0.0], [64.0, 64.0])
    """
    rule = _diffusion("NIDS", 0.5, sends=lambda this: this.round_index > 0)
    return by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings)


@constructor
def extra(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """EXTRA with (I + W) / 2 as its second matrix: D-PSGD without the bias by differences between the nodes' data.

    Args:
        task, graph, gradient, noise, links, num_mixings: as for `exact_diffusion`.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index. It must be below (1 + the least
            eigenvalue of W) / L, which is less than `exact_diffusion` takes.

    Guarantees:
        - the duals sum to 0, and the mean of the nodes moves by minus step_size times the mean noisy gradient.
        - with full batches it reaches the minimum of the mean loss, and stays there.
        - a round whose duals are 0 is one of d_psgd.
    """

    def step(x, memory, g, this):
        d = this.apart(x)
        dual = jax.tree.map(lambda s, d: s + 0.5 * d, memory["dual"], d)
        return moved(descend(x, this.step_size, g), d, memory["dual"]), {"dual": dual}

    rule = Rule("EXTRA", lambda x: {"dual": zeros(x)}, step, one_matrix=True, needs_sum=_ZERO_SUM)
    return by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings)


@constructor
def prox_skip(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    exchange_probability: float | Array,
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """ProxSkip over a graph: exact diffusion that sends in a random share of its rounds.

    Args:
        task, graph, step_size, gradient, noise, links, num_mixings: as for `exact_diffusion`. A noisy gradient is
            released in every round, sent or not.
        exchange_probability: p, in (0, 1], of one coin for all nodes; may be traced. About 1 / sqrt(L / mu) is best.

    Guarantees:
        - those of `exact_diffusion`; with p = 1 it gives its rounds.
    """
    check.scalar(exchange_probability=exchange_probability)
    check.positive(exchange_probability=exchange_probability)
    check.probability(exchange_probability=exchange_probability)

    def toss(key, k, params):
        return jax.random.uniform(purpose_key(key, Purpose.PARTICIPATION, k), dtype=number_type(params))

    def sends(this):
        return this.draws < jnp.asarray(exchange_probability, this.draws.dtype)

    rule = _diffusion("ProxSkip", 0.5, sends, exchange_probability)._replace(draw=toss)
    return by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings)


def _diffusion(label: str, share: float, sends: Callable = lambda this: None, dual_step: Any = 1.0) -> Rule:
    """The rule of exact diffusion, D2, NIDS and ProxSkip."""

    def step(x, memory, g, this):
        z = moved(descend(x, this.step_size, g), memory["dual"])
        d = scale(jnp.float32(share), this.apart(z, sends=sends(this)))
        return moved(z, d), {"dual": jax.tree.map(jnp.add, memory["dual"], scale(dual_step, d))}

    return Rule(label, lambda x: {"dual": zeros(x)}, step, one_matrix=True, needs_sum=_ZERO_SUM)
