"""Gradient tracking on doubly stochastic matrices: DIGing, ATC tracking, Aug-DGM and GT-SAGA.

In round k, with g_i^k at x_i^k, y^{-1} = 0 and g^{-1} = 0:

| method | y^k | x^{k+1} | source |
|---|---|---|---|
| `diging` | W y^{k-1} + g^k - g^{k-1} | W x^k - gamma y^k | Nedic, Olshevsky, Shi, arXiv:1607.03218, Algorithm 1 |
| `atc_tracking`, "next" | W y^{k-1} + g^k - g^{k-1} | W (x^k - gamma y^k) | Di Lorenzo, Scutari, arXiv:1602.00591 |
| `atc_tracking`, "aug_dgm" | W (y^{k-1} + g^k - g^{k-1}), y^0 = g^0 | as above | Xu, Zhu, Soh, Xie, CDC 2015 |
| `gt_saga` | W (y^{k-1} + g^k - g^{k-1}) | as above | Xin, Khan, Kar, arXiv:2011.03853, Algorithm 1 |

`State.memory` holds g^k as "gradient", and as "tracker" what a round leaves of y^k: W y^k in the first two, else y^k.
Its sum over nodes is that of the gradients. So K rounds take K noisy gradients, each used twice with the same noise.

Differences from the papers: gradients may be of batches and noisy; links with symmetric losses; more than one exchange
in a round. GT-SAGA's table replaces the entry that the gradient used, as the method's paper of 2020 (arXiv:1912.04230)
and `saga` do. NEXT is for non-convex parts with a regularizer, and has another step; this is its linear form.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes. `gradient_tracking` has noise on x
and y in place of the gradients, and `ab` directed graphs without noise.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxfl.algorithms.gossip_rule import Rule, by_rule, moved, zeros
from jaxfl.channel import Links
from jaxfl.core import Algorithm, Array, Task, check
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import descend
from jaxfl.gradients import GradientEstimator, saga
from jaxfl.graphs import Graph
from jaxfl.privacy import NoiseMechanism


@constructor
def diging(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """DIGing: each node steps along its tracker of the mean gradient, after mixing.

    Args:
        task, graph, gradient, noise, num_mixings: as for `d_sgdm`; the graph may change over rounds.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index. It must shrink with the spectral
            gap of W; that of `exact_diffusion` need not.
        links: messages may be rounded, and lost by two nodes together between which W is symmetric.

    Returns:
        An `Algorithm`; x and the tracker go to every neighbor, twice the bits of `d_psgd`.

    Guarantees:
        - the trackers sum to the gradients.
        - with full batches it reaches the minimum of the mean loss, and stays there.
    """

    def step(x, memory, g, this):
        y = _tracked(memory, g)
        d, d_tracker = this.apart((x, y))
        return moved(descend(x, this.step_size, y), d), {"tracker": moved(y, d_tracker), "gradient": g}

    return by_rule(_rule("DIGing", step), task, graph, step_size, gradient, noise, links, num_mixings)


@constructor
def atc_tracking(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    variant: str = "next",
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """Gradient tracking that mixes after the step (adapt, then combine).

    Args:
        task, graph, step_size, gradient, noise, links, num_mixings: as for `diging`.
        variant: "next" adds a gradient's change to the mixed tracker; "aug_dgm" mixes it, too, and then sends x in a
            second exchange. Libraries also call the latter ATC-DIGing. Static.

    Guarantees:
        - those of `diging`.
    """
    check.one_of(("next", "aug_dgm"), variant=variant)

    def step(x, memory, g, this):
        y = _tracked(memory, g)
        sent = descend(x, this.step_size, y), y
        x, tracker = moved(sent, this.apart(sent))
        return x, {"tracker": tracker, "gradient": g}

    rule = _augmented("Aug-DGM", mixes_first=False) if variant == "aug_dgm" else _rule("NEXT", step)
    return by_rule(rule, task, graph, step_size, gradient, noise, links, num_mixings)


@constructor
def gt_saga(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    num_mixings: int = 1,
) -> Algorithm:
    """GT-SAGA: tracking of variance-reduced gradients, which reaches the minimum with small batches.

    Args:
        task, graph, step_size, noise, links, num_mixings: as for `diging`.
        gradient: by default `saga()`; with `mini_batch` it is DSGT.

    Guarantees:
        - those of `diging`, with batches of one sample.
    """
    rule, estimator = _augmented("GT-SAGA", mixes_first=True), saga() if gradient is None else gradient
    return by_rule(rule, task, graph, step_size, estimator, noise, links, num_mixings)


def _tracked(memory, g):
    """Add the change of the gradients to the trackers, leaves (n, *leaf)."""
    return jax.tree.map(lambda y, new, old: y + (new - old), memory["tracker"], g, memory["gradient"])


def _rule(label: str, step: Callable, **options) -> Rule:
    reason = "its trackers sum to the gradients"
    return Rule(label, lambda x: {"tracker": zeros(x), "gradient": zeros(x)}, step, needs_sum=reason, **options)


def _augmented(label: str, *, mixes_first: bool) -> Rule:
    """The rule of Aug-DGM, whose first gradients are not mixed, and of GT-SAGA."""

    def step(x, memory, g, this):
        y = _tracked(memory, g)
        y = moved(y, this.apart(y, sends=None if mixes_first else this.round_index > 0))
        z = descend(x, this.step_size, y)
        return moved(z, this.apart(z)), {"tracker": y, "gradient": g}

    return _rule(label, step, num_exchanges=2)
