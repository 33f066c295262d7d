"""Privacy of a learner: it says itself what its nodes release, and its epsilon is that of what runs.

    account = jaxfl.privacy.account(learner, data, dp_delta=1e-5)
    account.epsilon(num_rounds), account.statements(num_rounds)

A release that somebody writes beside a learner may describe another mechanism: a learner with uniform batches and a
release that says "poisson" have an epsilon of 1.2 where 4.9 is the bound of what runs. Releases by hand are for plans
without a learner (`jaxfl.privacy.gossip`, `jaxfl.privacy.clients`, `jaxfl.privacy.tracking`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.core.calls import by_name
from jaxfl.privacy.accountant import Account, smallest_noise
from jaxfl.privacy.statements import Statement


class Releases(NamedTuple):
    """Releases of the nodes of a learner, and the account of its family.

    Attributes:
        each: release of each node in the order of nodes, run after run where there are several.
        account: (each, *, dp_delta, ...) -> `Account`.
    """

    each: tuple[Any, ...]
    account: Callable[..., Account]


def releases_of(learner: Any, sizes: Any) -> Releases:
    """Ask a learner what its nodes release.

    Args:
        learner: an `Algorithm` with `releases`, whose clip norms and noise are numbers and not traced.
        sizes: samples of each node, n integers of at least 1, or the `FederatedData`; (runs, n) for several runs.

    Raises:
        ArgumentError: a learner that does not say it.
    """
    ask = getattr(learner, "releases", None)
    if not callable(ask):
        found = f"got {type(learner).__name__} without `releases`"
        remedy = "Give jaxfl.core.algorithm(..., releases=...), or account for a plan by jaxfl.privacy.gossip, say."
        raise ArgumentError("learner", "must be an algorithm that says what it releases", found, remedy)
    counts = np.asarray(getattr(sizes, "sizes", sizes))
    if counts.ndim not in (1, 2) or not counts.size or counts.dtype.kind not in "iu" or counts.min() < 1:
        found, remedy = f"got {counts.dtype} of shape {counts.shape}", "Pass the data, or one integer a node."
        raise ArgumentError("sizes", "must hold the samples of each node, at least 1", found, remedy)
    rows = [*map(tuple, np.atleast_2d(counts).tolist())]
    of_sizes = {row: cast(Releases, ask([*row])) for row in dict.fromkeys(rows)}
    runs = [of_sizes[row] for row in rows]
    return runs[0]._replace(each=tuple(release for run in runs for release in run.each))


@by_name
def account(learner: Any, sizes: Any, **options: Any) -> Account:
    """Account for a run of a learner, which says itself what its nodes release.

    Args:
        learner: an algorithm that says what it releases: `push_sum`, `d_psgd`, `dp2_sgd`, `a_dp2_sgd`, `fed_avg`,
            `ali_dpfl`, `gradient_tracking`, `perturbed_gossip`, `output_perturbation`, or one of your own.
        sizes: as for `releases_of`.
        options: `dp_delta`, and others of the family's account (`jaxfl.privacy.gossip`, `.clients`, `.tracking`).

    Returns:
        An account whose rounds are those of the learner.

    Raises:
        ArgumentError: a learner that does not say what it releases, or whose clip norm or noise is traced, or an option
            out of range.

    Guarantees:
        - the release that is accounted for is that of the learner: sampler, batch, clip norm, noise and table.

    Examples:
        >>> import jax.numpy as jnp, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> for sampler in (jaxfl.gradients.poisson, jaxfl.gradients.uniform):
        ...     gradient = jaxfl.mini_batch(sampler=sampler(64), clip_norm=1.0)
        ...     learner = jaxfl.push_sum(task, graph=jaxfl.graphs.directed_ring(4), step_size=0.1, gradient=gradient,
        ...         noise=jaxfl.gaussian(0.05))
        ...     print(round(account(learner, [1200] * 4, dp_delta=1e-5).epsilon(300), 2))
        1.15
        4.86
    """
    releases = releases_of(learner, sizes)
    return releases.account(releases.each, **options)


@by_name
def statements(learner: Any, sizes: Any, num_rounds: int, **options: Any) -> list[Statement]:
    """List the privacy statements on rounds that really ran: `account(learner, ...).statements(num_rounds)`."""
    return account(learner, sizes, **options).statements(num_rounds)


@by_name
def epsilon(
    learner: Any,
    sizes: Any,
    num_rounds: int,
    *,
    bound: str = "proven",
    neighboring_relation: str | None = None,
    **options: Any,
) -> float:
    """epsilon of the worst node of a learner: `account(learner, ...).epsilon(num_rounds, ...)`."""
    return account(learner, sizes, **options).epsilon(num_rounds, bound, neighboring_relation)


@by_name
def most_rounds(
    learner: Any,
    sizes: Any,
    target_epsilon: float,
    limit: int,
    *,
    bound: str = "proven",
    neighboring_relation: str | None = None,
    **options: Any,
) -> int:
    """Most rounds of a learner that a budget pays for: `account(learner, ...).most_rounds(target_epsilon, ...)`."""
    return account(learner, sizes, **options).most_rounds(target_epsilon, limit, bound, neighboring_relation)


@by_name
def calibrate(
    learner_of: Callable[[float], Any],
    sizes: Any,
    num_rounds: int,
    target_epsilon: float,
    *,
    bound: str = "proven",
    neighboring_relation: str | None = None,
    **options: Any,
) -> float:
    """Smallest noise with which no node of a learner spends more than a budget, to 0.1 %, in six digits.

    `Account.calibrate` finds the factor on the noise of a learner. This finds the argument of a function that makes
    learners, whatever else follows from it there.

    Args:
        learner_of: noise above 0 -> the learner with it, whose epsilon falls with the noise.
        sizes, options: as for `account`.
        num_rounds, target_epsilon, bound, neighboring_relation: as for `Account.calibrate`.

    Raises:
        ArgumentError: as for `Account.calibrate`.

    Guarantees:
        - never overspends: the epsilon of the result is at most target_epsilon.

    Examples:
        >>> import jax.numpy as jnp, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> gradient = jaxfl.mini_batch(sampler=jaxfl.gradients.poisson(64), clip_norm=1.0)
        >>> settings = {"graph": jaxfl.graphs.directed_ring(4), "step_size": 0.1, "gradient": gradient}
        >>> def learner_of(noise_std):
        ...     return jaxfl.push_sum(task, noise=jaxfl.gaussian(noise_std), **settings)
        >>> print(round(calibrate(learner_of, [1200] * 4, 300, 3.0, dp_delta=1e-5), 4))
        0.024
    """
    if not callable(learner_of):
        remedy = "Pass lambda noise: the learner with jaxfl.gaussian(noise), say."
        raise ArgumentError("learner_of", "must be a function of the noise", f"got {type(learner_of).__name__}", remedy)
    claim = {"bound": bound, "neighboring_relation": neighboring_relation}
    guess = account(learner_of(1.0), sizes, **options).calibrate(num_rounds, target_epsilon, **claim)
    if not guess:
        return 0.0

    def epsilon_of(noise: float) -> float:
        return account(learner_of(noise), sizes, **options).epsilon(num_rounds, **claim)

    return smallest_noise(epsilon_of, target_epsilon, guess)
