"""Privacy of a learner: it says itself what its nodes release, and its epsilon is that of what runs.

    jaxfl.privacy.statements(learner, data, num_rounds, dp_delta=1e-5)

A release that somebody writes beside a learner may describe another mechanism: a learner with uniform batches and a
release that says "poisson" have an epsilon of 1.2 where 4.9 is the bound of what runs. Releases by hand are for plans
without a learner (`jaxfl.privacy.gossip`, `jaxfl.privacy.clients`, `jaxfl.privacy.tracking`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.statements import Statement


class Releases(NamedTuple):
    """Releases of the nodes of a learner, and the statements of its family.

    Attributes:
        each: release of each node in the order of nodes, or one where all nodes have the same.
        stated: (each, num_rounds, *, dp_delta, ...) -> statements.
    """

    each: tuple[Any, ...]
    stated: Callable[..., list[Statement]]


def releases_of(learner: Any, sizes: Any) -> Releases:
    """Ask a learner what its nodes release.

    Args:
        learner: an `Algorithm` with `releases`, whose clip norms and noise are numbers and not traced.
        sizes: samples of each node, n integers of at least 1, or the `FederatedData`.

    Raises:
        ArgumentError: a learner that does not say it.
    """
    ask = getattr(learner, "releases", None)
    if not callable(ask):
        found = f"got {type(learner).__name__} without `releases`"
        remedy = "Give jaxfl.core.algorithm(..., releases=...), or account for a plan by jaxfl.privacy.gossip, say."
        raise ArgumentError("learner", "must be an algorithm that says what it releases", found, remedy)
    counts = np.asarray(getattr(sizes, "sizes", sizes))
    if counts.ndim != 1 or not counts.size or counts.dtype.kind not in "iu" or counts.min() < 1:
        found, remedy = f"got {counts.dtype} of shape {counts.shape}", "Pass the data, or one integer a node."
        raise ArgumentError("sizes", "must hold the samples of each node, at least 1", found, remedy)
    return cast(Releases, ask(counts.tolist()))


def statements(learner: Any, sizes: Any, num_rounds: int, **options: Any) -> list[Statement]:
    """List the privacy statements on a run of a learner: the published one where there is one, then the proven ones.

    Args:
        learner: an algorithm that says what it releases: `push_sum`, `d_psgd`, `dp2_sgd`, `a_dp2_sgd`, `fed_avg`,
            `ali_dpfl`, `gradient_tracking`, `perturbed_gossip`, `output_perturbation`, or one of your own.
        sizes: samples of each node, (n,), or the `FederatedData`.
        num_rounds: rounds that really ran, at least 0.
        options: `dp_delta`, and others of the family's `statements` (`jaxfl.privacy.gossip`, `.clients`, `.tracking`).

    Raises:
        ArgumentError: as of the family's `statements`; a learner that does not say what it releases, or whose clip norm
            or noise is traced.

    Guarantees:
        - the release that is accounted for is that of the learner: sampler, batch, clip norm, noise and table.
        - dp_epsilon is that of the worst node.

    Examples:
        >>> import jax.numpy as jnp, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> for sampler in (jaxfl.gradients.poisson, jaxfl.gradients.uniform):
        ...     gradient = jaxfl.mini_batch(sampler=sampler(64), clip_norm=1.0)
        ...     learner = jaxfl.push_sum(task, graph=jaxfl.graphs.directed_ring(4), step_size=0.1, gradient=gradient,
        ...         noise=jaxfl.gaussian(0.05))
        ...     print(round(statements(learner, [1200] * 4, 300, dp_delta=1e-5)[1].dp_epsilon, 2))
        1.15
        4.86
    """
    asked = releases_of(learner, sizes)
    return asked.stated(asked.each, num_rounds, **options)


def epsilon(
    learner: Any,
    sizes: Any,
    num_rounds: int,
    *,
    bound: str = "proven",
    neighboring_relation: str | None = None,
    **options: Any,
) -> float:
    """epsilon of the worst node of a learner under one neighboring relation; infinite where there is none.

    Args:
        learner, sizes, num_rounds, options: as for `statements`.
        bound: "proven", or "published", which stands for a reconstructed one where a paper's could not be had. Of
            several statements at different deltas the last one counts, at a delta above 0.
        neighboring_relation: of the statement; default: the first that the bound is stated for.

    Raises:
        ArgumentError: as for `statements`, or a relation that the bound is not stated for.
    """
    check.one_of(("proven", "published"), bound=bound)
    rows = statements(learner, sizes, num_rounds, **options)
    rows = [row for row in rows if (row.bound == "proven") == (bound == "proven")]
    relations = tuple(dict.fromkeys(row.neighboring_relation for row in rows))
    if not relations:
        raise ArgumentError("bound", "must be stated for the learner", f"got {bound}", "Take the other one.")
    relation = relations[0] if neighboring_relation is None else neighboring_relation
    check.one_of(relations, neighboring_relation=relation)
    value = [row.dp_epsilon for row in rows if row.neighboring_relation == relation][-1]
    return math.inf if value is None else value


def calibrate(
    learner_of: Callable[[float], Any],
    sizes: Sequence[int] | Any,
    num_rounds: int,
    *,
    target_epsilon: float,
    guess: float = 1.0,
    **options: Any,
) -> float:
    """Smallest noise with which no node of a learner spends more than a budget, to 0.1 %, in six digits.

    Args:
        learner_of: noise above 0 -> the learner with it, whose epsilon falls with the noise.
        sizes, num_rounds: as for `statements`.
        target_epsilon: above 0.
        guess: noise of the right order of magnitude, which saves time.
        options: as for `epsilon`.

    Raises:
        ArgumentError: as for `epsilon`, and where no noise meets the budget, or all noise does.

    Guarantees:
        - never overspends: the epsilon of the result is at most target_epsilon.

    Examples:
        >>> import jax.numpy as jnp, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> gradient = jaxfl.mini_batch(sampler=jaxfl.gradients.poisson(64), clip_norm=1.0)
        >>> settings = {"graph": jaxfl.graphs.directed_ring(4), "step_size": 0.1, "gradient": gradient}
        >>> def learner_of(noise_std):
        ...     return jaxfl.push_sum(task, noise=jaxfl.gaussian(noise_std), **settings)
        >>> print(round(calibrate(learner_of, [1200] * 4, 300, target_epsilon=3.0, dp_delta=1e-5), 4))
        0.024
    """
    target_epsilon, guess = verbs.positive(target_epsilon=target_epsilon), verbs.positive(guess=guess)
    return verbs.smallest_noise(
        lambda noise: epsilon(learner_of(noise), sizes, num_rounds, **options), target_epsilon, guess
    )
