"""What privacy a node's releases have: the epsilon that a paper states (`published`) and those that are proven.

In every round a node releases a mean gradient with Gaussian noise. All its messages follow from these releases and from
what it received, so a node's guarantee is that of its releases composed, whatever the graph. An epsilon never comes
without its bound, its neighboring relation and its delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import scipy.stats

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import calibration
from jaxfl.privacy.proven import (
    Bound,
    Release,
    Sensitivities,
    constant_gradient_epsilon,
    proven_bound,
    proven_relations,
    sensitivities,
)
from jaxfl.privacy.published import C2_OF_THE_PAPER, published_bound, published_reason, published_relation
from jaxfl.privacy.statements import assumptions

__all__ = [
    "ALGORITHMS",
    "C2_OF_THE_PAPER",
    "Release",
    "Sensitivities",
    "Statement",
    "calibrate_noise_std",
    "epsilon",
    "max_rounds",
    "sensitivities",
    "statements",
]

ALGORITHMS = ("PrivSGP", "PrivSGP-VR", "DP2-SGD", "A(DP)2SGD")
_WAKING_FAILURE = 1e-6  # of A(DP)2SGD: probability that a node wakes more often than is accounted for

_UNCLIPPED = "Gradients are not clipped, so one sample can change a release by any amount."
_ROUNDED_SUM = "A table entry of several samples is rounded to bfloat16 as a sum, which may exceed its bound."


class Statement(NamedTuple):
    """One guarantee, or why there is none."""

    bound: str  # "published" or "proven"
    dp_epsilon: float | None  # of the worst node
    dp_delta: float  # of the node with the largest
    neighboring_relation: str  # "add_or_remove_one", "replace_one" or "zero_out"
    accountant: str  # how epsilon was found
    nodes: int  # of the network
    assumptions: tuple[str, ...]
    reason: str | None  # why dp_epsilon is None


def statements(
    algorithm: str,
    releases: Sequence[Release],
    num_rounds: int,
    *,
    dp_delta: float | Sequence[float],
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
) -> list[Statement]:
    """What can be said about a run: the published statement, then the proven ones, the main relation first.

    Args:
        algorithm: "PrivSGP", "PrivSGP-VR", "DP2-SGD" or "A(DP)2SGD".
        releases: of each node, or of the nodes of several runs. A run without noise or clipping is stated too, with a
            reason and no epsilon.
        num_rounds: rounds that really ran; for A(DP)2SGD a round is as many events as there are nodes.
        dp_delta: one for all releases, or one for each.
        c2: constant of equation (11), for the published statement of PrivSGP-VR.
        num_nodes: n of the network; by default there is a release for each.

    Raises:
        ArgumentError: an argument out of range, or an estimator that the algorithm does not have.

    Guarantees:
        - dp_epsilon is that of the worst node.
        - where nothing is clipped, no noise is added or nothing is published there is a reason and no epsilon.
        - nothing is spent in 0 rounds.

    Example:
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0757)
        >>> for found in statements("PrivSGP-VR", [release] * 16, 3120, dp_delta=1e-5):
        ...     print(found.bound, found.neighboring_relation, round(found.dp_epsilon, 1))
        published replace_one 0.9
        proven zero_out 3.0
        proven replace_one 6.6
    """
    if not len(releases):
        raise ArgumentError("releases", "must hold one release a node", "got none", "Pass a non-empty sequence.")
    check.at_least(0, num_rounds=num_rounds)
    check.per_node(len(releases), dp_delta=dp_delta)
    num_nodes = len(releases) if num_nodes is None else num_nodes
    each_delta = [dp_delta] * len(releases) if np.ndim(dp_delta) == 0 else cast(Sequence[float], dp_delta)
    checked = [_checked(algorithm, *pair, c2, num_nodes) for pair in zip(releases, each_delta, strict=True)]
    c2 = checked[0].c2
    distinct = list(dict.fromkeys((one.release, one.dp_delta) for one in checked))
    first, deltas = checked[0].release, [delta for _, delta in distinct]
    claims = [("published", published_relation(algorithm, first))]
    claims += [("proven", relation) for relation in proven_relations(first)]
    found = []
    for bound, relation in claims:
        reasons = [(_reason(algorithm, bound, one) if num_rounds else None, one) for one, _ in distinct]
        reason, of_release = next((pair for pair in reasons if pair[0] is not None), (None, first))
        delta, worst = deltas[0], Bound(math.inf, "none")
        if reason is None:
            each = [
                (one, delta, _bound(algorithm, bound, one, relation, num_rounds, delta, c2, num_nodes))
                for one, delta in distinct
            ]
            of_release, delta, worst = max(each, key=lambda one: one[2].dp_epsilon)
        dp_epsilon = worst.dp_epsilon if math.isfinite(worst.dp_epsilon) else None
        if reason is None and dp_epsilon is None:
            reason = "No finite epsilon is known at this delta."
        found.append(
            Statement(
                bound=bound,
                dp_epsilon=dp_epsilon,
                dp_delta=max(deltas),
                neighboring_relation=relation,
                accountant=worst.accountant if dp_epsilon is not None else "none",
                nodes=num_nodes,
                assumptions=_assumptions(algorithm, bound, of_release, num_rounds, num_nodes, delta, dp_epsilon),
                reason=reason,
            )
        )
    return found


def epsilon(
    algorithm: str,
    bound: str,
    release: Release,
    num_rounds: int,
    *,
    dp_delta: float,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
) -> float:
    """epsilon of one node under the main neighboring relation; infinite where there is none.

    Args:
        algorithm: as for `statements`.
        bound: "published" or "proven".
        release: of the node.
        num_rounds: at least 0.
        dp_delta: in (0, 1).
        c2: constant of equation (11).
        num_nodes: n; required for A(DP)2SGD, where it decides how often a node wakes.

    Raises:
        ArgumentError: as for `statements`, or no num_nodes for A(DP)2SGD.

    Guarantees:
        - more rounds or less noise never lower it, nor do fewer entries while a batch is at most half of them.

    Example:
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> round(epsilon("PrivSGP", "proven", release, 3120, dp_delta=1e-5), 2)
        2.99
    """
    check.one_of(("published", "proven"), bound=bound)
    check.at_least(0, num_rounds=num_rounds)
    checked = _checked(algorithm, release, dp_delta, c2, num_nodes)
    if num_rounds and _reason(algorithm, bound, checked.release) is not None:
        return math.inf
    relation = _main_relation(algorithm, bound, checked.release)
    return _bound(algorithm, bound, checked.release, relation, num_rounds, *checked[1:]).dp_epsilon


def calibrate_noise_std(
    algorithm: str,
    bound: str,
    release: Release,
    num_rounds: int,
    *,
    target_epsilon: float,
    dp_delta: float,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
) -> float:
    """Smallest noise_std that meets a budget under the main neighboring relation, to 0.1 %.

    Args:
        release: its noise_std is ignored.
        target_epsilon: above 0; the others as for `epsilon`.

    Returns:
        noise_std; 0 for 0 rounds.

    Raises:
        ArgumentError: as for `epsilon`, and where no noise gives this bound.

    Guarantees:
        - never overspends: the epsilon of the result is at most target_epsilon.
        - tight: 0.1 % less noise overspends.

    Example:
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0)
        >>> found = calibrate_noise_std("PrivSGP-VR", "proven", release, 3120, target_epsilon=3.0, dp_delta=1e-5)
        >>> round(found * 64, 1)
        4.8
    """
    target_epsilon = _positive(target_epsilon=target_epsilon)
    check.one_of(("published", "proven"), bound=bound)
    check.at_least(0, num_rounds=num_rounds)
    release, dp_delta, c2, _ = _checked(algorithm, release._replace(noise_std=1.0), dp_delta, c2, num_nodes)
    if num_rounds == 0:
        return 0.0
    reason = _reason(algorithm, bound, release)
    if reason is not None:
        remedies = {_UNCLIPPED: "Clip, or choose another bound.", _ROUNDED_SUM: "Store the table in float32."}
        remedy = remedies.get(reason, "Take the proven bound.")
        raise ArgumentError("bound", "must exist for this release", reason.rstrip("."), remedy)
    options: dict[str, Any] = {"dp_delta": dp_delta, "c2": c2, "num_nodes": num_nodes}
    if algorithm == "PrivSGP-VR" and bound == "published":
        exact = epsilon(algorithm, bound, release, num_rounds, **options) / target_epsilon
        return exact * (1 + 1e-12)  # so that rounding does not overspend

    def epsilon_of(noise_std: float) -> float:
        return epsilon(algorithm, bound, release._replace(noise_std=noise_std), num_rounds, **options)

    sampling_rate = min(1.0, release.batch_size / release.num_entries)
    present = sensitivities(release, _main_relation(algorithm, bound, release)).present
    spread = sampling_rate * math.sqrt(num_rounds) * math.sqrt(2 * math.log(1.25 / dp_delta)) / target_epsilon
    return calibration.smallest_noise(epsilon_of, target_epsilon, guess=present * max(spread, 0.4))


def max_rounds(
    algorithm: str,
    bound: str,
    release: Release,
    *,
    target_epsilon: float,
    dp_delta: float,
    limit: int,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
) -> int:
    """Most rounds that a budget pays for under the main neighboring relation, 0 ... limit.

    Args:
        target_epsilon: above 0; the others as for `epsilon`.
        limit: at least 0.

    Returns:
        Rounds; 0 where not one is paid for, or where there is no such bound.

    Raises:
        ArgumentError: as for `epsilon`.

    Guarantees:
        - one more round overspends, unless the limit is reached.

    Example:
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> max_rounds("PrivSGP", "proven", release, target_epsilon=3.0, dp_delta=1e-5, limit=100)
        100
    """
    target_epsilon = _positive(target_epsilon=target_epsilon)
    check.at_least(0, limit=limit)
    options: dict[str, Any] = {"dp_delta": dp_delta, "c2": c2, "num_nodes": num_nodes}
    epsilon(algorithm, bound, release, 0, **options)  # refuses what it cannot account for, whatever the limit is
    return calibration.most_rounds(
        lambda rounds: epsilon(algorithm, bound, release, rounds, **options), target_epsilon, limit
    )


class _Checked(NamedTuple):
    """Arguments that can be accounted for, as plain numbers."""

    release: Release
    dp_delta: float
    c2: float
    num_nodes: int


def _checked(algorithm: str, release: Release, dp_delta: Any, c2: Any, num_nodes: int | None) -> _Checked:
    """Refuse what cannot be accounted for."""
    check.one_of(ALGORITHMS, algorithm=algorithm)
    check.one_of(("mini_batch", "saga"), estimator=release.estimator)
    check.one_of(("poisson", "fixed", "uniform"), sampler=release.sampler)
    check.one_of(("float32", "bfloat16"), storage=release.storage)
    check.at_least(1, batch_size=release.batch_size, num_entries=release.num_entries, entry_size=release.entry_size)
    if num_nodes is None and algorithm == "A(DP)2SGD":
        remedy = "Pass the number of nodes, which decides how often one wakes."
        raise ArgumentError("num_nodes", f"must be given for {algorithm}", "got None", remedy)
    num_nodes = 1 if num_nodes is None else num_nodes
    check.at_least(1, num_nodes=num_nodes)
    noise_std, dp_delta = _number(noise_std=release.noise_std), _number(dp_delta=dp_delta)
    check.non_negative(noise_std=noise_std)
    check.open_unit(dp_delta=dp_delta)
    clip_norm = None if release.clip_norm is None else _positive(clip_norm=release.clip_norm)
    if release.sampler != "uniform" and release.batch_size > release.num_entries:
        found = f"got {release.batch_size} of {release.num_entries}"
        raise ArgumentError("batch_size", "must be at most the node's entries", found, "Pass a smaller batch.")
    expected = {"PrivSGP": "mini_batch", "PrivSGP-VR": "saga"}.get(algorithm, release.estimator)
    if release.estimator != expected:
        found = f"got {release.estimator}"
        raise ArgumentError("estimator", f"must be {expected} for {algorithm}", found, "Pass this algorithm's release.")
    if release.estimator == "mini_batch" and release.entry_size > 1:
        found = f"got {release.entry_size} with mini_batch"
        raise ArgumentError("entry_size", "must be 1 without a table", found, "Count batch_size in samples.")
    release = release._replace(clip_norm=clip_norm, noise_std=noise_std)
    return _Checked(release, dp_delta, _positive(c2=c2), num_nodes)


def _number(**argument: Any) -> float:
    """The argument as a Python float, which can be hashed; NumPy's and JAX's numbers are taken too."""
    ((name, value),) = argument.items()
    check.scalar(**argument)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(name, "must be a single number", f"got {value!r}", "Pass a float.") from None


def _positive(**argument: Any) -> float:
    """A `_number` above 0."""
    check.positive(**{name: _number(**{name: value}) for name, value in argument.items()})
    return _number(**argument)


def _main_relation(algorithm: str, bound: str, release: Release) -> str:
    """The relation of `epsilon`."""
    return published_relation(algorithm, release) if bound == "published" else proven_relations(release)[0]


def _reason(algorithm: str, bound: str, release: Release) -> str | None:
    """Why there is no epsilon, or None."""
    if bound == "published" and algorithm == "PrivSGP":
        return published_reason(algorithm, release)
    if release.clip_norm is None or (release.assumed and bound == "proven"):
        return _UNCLIPPED
    if release.noise_std == 0:
        return "No noise is added, so the releases are not private."
    if bound == "proven" and release.entry_size > 1 and release.storage == "bfloat16":
        return _ROUNDED_SUM
    return published_reason(algorithm, release) if bound == "published" else None


def _assumptions(
    algorithm: str, bound: str, release: Release, num_rounds: int, num_nodes: int, dp_delta: float, stated: float | None
) -> tuple[str, ...]:
    """What a statement of this epsilon rests on."""
    leak = waking = None
    if algorithm == "PrivSGP-VR" and bound == "published" and stated:
        leak = constant_gradient_epsilon(release, "replace_one", num_rounds, dp_delta)
        leak = leak if leak > stated else None
    if algorithm == "A(DP)2SGD" and bound == "proven":
        waking = _most_releases(num_rounds, num_nodes, dp_delta), _waking_failure(dp_delta)
    return assumptions(algorithm, bound, release, leak=leak, waking=waking)


def _waking_failure(dp_delta: float) -> float:
    """Probability taken out of delta for a node that wakes too often."""
    return min(_WAKING_FAILURE, dp_delta / 10)


def _most_releases(num_rounds: int, num_nodes: int, dp_delta: float) -> int:
    """How often one of n nodes wakes in n K events, each of which wakes one at random."""
    failure = _waking_failure(dp_delta)
    return int(scipy.stats.binom.isf(failure, num_rounds * num_nodes, 1 / num_nodes))


@lru_cache(maxsize=4096)
def _bound(
    algorithm: str,
    bound: str,
    release: Release,
    relation: str,
    num_rounds: int,
    dp_delta: float,
    c2: float,
    num_nodes: int,
) -> Bound:
    """The epsilon of a release for which `_reason` is None."""
    if num_rounds == 0:
        return Bound(0.0, "nothing was released")
    if bound == "published":
        return published_bound(algorithm, release, relation, num_rounds, dp_delta, c2)
    if algorithm == "A(DP)2SGD":
        releases = _most_releases(num_rounds, num_nodes, dp_delta)
        return proven_bound(release, relation, releases, dp_delta - _waking_failure(dp_delta))
    return proven_bound(release, relation, num_rounds, dp_delta)
