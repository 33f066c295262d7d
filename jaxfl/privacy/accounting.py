"""What privacy a node's releases have: the epsilon that a paper states (`published`) and those that are proven.

In every round a node releases a mean gradient with Gaussian noise. All its messages follow from these releases and from
what it received, so a node's guarantee is that of its releases composed, whatever the graph. An epsilon never comes
without its bound, its neighboring relation and its delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

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


class Statement(NamedTuple):
    """One guarantee, or why there is none."""

    bound: str  # "published" or "proven"
    dp_epsilon: float | None  # of the worst node
    dp_delta: float  # of the node with the largest
    neighboring_relation: str  # "add_or_remove_one", "replace_one" or "zero_out"
    accountant: str  # how epsilon was found
    nodes: int  # how many nodes it covers
    assumptions: tuple[str, ...]
    reason: str | None  # why dp_epsilon is None


def statements(
    algorithm: str,
    releases: Sequence[Release],
    num_rounds: int,
    *,
    dp_delta: float | Sequence[float],
    c2: float = C2_OF_THE_PAPER,
) -> list[Statement]:
    """What can be said about a run: the published statement, then the proven ones, the main relation first.

    Args:
        algorithm: "PrivSGP", "PrivSGP-VR", "DP2-SGD" or "A(DP)2SGD".
        releases: of each node. A run without noise or clipping is stated too, with a reason and no epsilon.
        num_rounds: rounds that really ran; for A(DP)2SGD a round is as many events as there are nodes.
        dp_delta: one for all nodes, or one for each.
        c2: constant of equation (11), for the published statement of PrivSGP-VR.

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
    deltas = np.broadcast_to(np.asarray(dp_delta, np.float64), len(releases)).tolist()
    distinct = list(dict.fromkeys(zip(releases, deltas, strict=True)))
    for release, delta in distinct:
        _check(algorithm, release, delta, c2, len(releases))
    first = releases[0]
    claims = [("published", published_relation(algorithm, first))]
    claims += [("proven", relation) for relation in proven_relations(first)]
    found = []
    for bound, relation in claims:
        reasons = [_reason(algorithm, bound, release) for release, _ in distinct] if num_rounds else []
        reason = next((text for text in reasons if text is not None), None)
        of_release, delta, worst = first, deltas[0], Bound(math.inf, "none")
        if reason is None:
            each = [
                (one, delta, _bound(algorithm, bound, one, relation, num_rounds, delta, c2, len(releases)))
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
                nodes=len(releases),
                assumptions=_assumptions(algorithm, bound, of_release, num_rounds, len(releases), delta, dp_epsilon),
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
    num_nodes: int = 1,
) -> float:
    """epsilon of one node under the main neighboring relation; infinite where there is none.

    Args:
        algorithm: as for `statements`.
        bound: "published" or "proven".
        release: of the node.
        num_rounds: at least 0.
        dp_delta: in (0, 1).
        c2: constant of equation (11).
        num_nodes: n; it matters for A(DP)2SGD only.

    Raises:
        ArgumentError: as for `statements`.

    Guarantees:
        - more rounds, less noise or a larger sampling rate never lower it.

    Example:
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> round(epsilon("PrivSGP", "proven", release, 3120, dp_delta=1e-5), 2)
        2.99
    """
    check.one_of(("published", "proven"), bound=bound)
    check.at_least(0, num_rounds=num_rounds)
    _check(algorithm, release, dp_delta, c2, num_nodes)
    if num_rounds and _reason(algorithm, bound, release) is not None:
        return math.inf
    relation = _main_relation(algorithm, bound, release)
    return _bound(algorithm, bound, release, relation, num_rounds, dp_delta, c2, num_nodes).dp_epsilon


def calibrate_noise_std(
    algorithm: str,
    bound: str,
    release: Release,
    num_rounds: int,
    *,
    target_epsilon: float,
    dp_delta: float,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int = 1,
) -> float:
    """Smallest noise_std that meets a budget under the main neighboring relation, to 0.1 %.

    Args:
        release: its noise_std is ignored.
        target_epsilon: above 0; the others as for `epsilon`.

    Returns:
        noise_std; 0 for 0 rounds.

    Raises:
        ArgumentError: as for `statements`, and where no noise gives this bound.

    Guarantees:
        - never overspends: the epsilon of the result is at most target_epsilon.
        - tight: 0.2 % less noise overspends.

    Example:
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0)
        >>> found = calibrate_noise_std("PrivSGP-VR", "proven", release, 3120, target_epsilon=3.0, dp_delta=1e-5)
        >>> round(found * 64, 1)
        4.8
    """
    check.positive(target_epsilon=target_epsilon)
    release = release._replace(noise_std=1.0)
    check.one_of(("published", "proven"), bound=bound)
    check.at_least(0, num_rounds=num_rounds)
    _check(algorithm, release, dp_delta, c2, num_nodes)
    if num_rounds == 0:
        return 0.0
    reason = _reason(algorithm, bound, release)
    if reason is not None:
        remedy = "Clip, or choose another sampler or bound."
        raise ArgumentError("bound", "must exist for this release", reason.rstrip("."), remedy)
    options = {"dp_delta": dp_delta, "c2": c2, "num_nodes": num_nodes}
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
    num_nodes: int = 1,
) -> int:
    """Most rounds that a budget pays for under the main neighboring relation, 0 ... limit.

    Args:
        target_epsilon: above 0; the others as for `epsilon`.
        limit: at least 0.

    Guarantees:
        - one more round overspends, unless the limit is reached.

    Example:
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> max_rounds("PrivSGP", "proven", release, target_epsilon=3.0, dp_delta=1e-5, limit=100)
        100
    """
    check.positive(target_epsilon=target_epsilon)
    check.at_least(0, limit=limit)
    options = {"dp_delta": dp_delta, "c2": c2, "num_nodes": num_nodes}
    return calibration.most_rounds(
        lambda rounds: epsilon(algorithm, bound, release, rounds, **options), target_epsilon, limit
    )


def _check(algorithm: str, release: Release, dp_delta: float, c2: float, num_nodes: int) -> None:
    """Refuse what cannot be accounted for."""
    check.one_of(ALGORITHMS, algorithm=algorithm)
    check.one_of(("mini_batch", "saga"), estimator=release.estimator)
    check.one_of(("poisson", "fixed", "uniform"), sampler=release.sampler)
    check.one_of(("float32", "bfloat16"), storage=release.storage)
    check.at_least(1, batch_size=release.batch_size, num_entries=release.num_entries, entry_size=release.entry_size)
    check.at_least(1, num_nodes=num_nodes)
    check.positive(clip_norm=release.clip_norm, c2=c2, dp_delta=dp_delta)
    check.non_negative(noise_std=release.noise_std)
    if not dp_delta < 1:
        raise ArgumentError("dp_delta", "must be below 1", f"got {dp_delta}", "Pass a small probability, such as 1e-5.")
    if release.sampler != "uniform" and release.batch_size > release.num_entries:
        found = f"got {release.batch_size} of {release.num_entries}"
        raise ArgumentError("batch_size", "must be at most the node's entries", found, "Pass a smaller batch.")
    expected = {"PrivSGP": "mini_batch", "PrivSGP-VR": "saga"}.get(algorithm, release.estimator)
    if release.estimator != expected:
        remedy = "Pass the release of this algorithm."
        raise ArgumentError("estimator", f"must be {expected} for {algorithm}", f"got {release.estimator}", remedy)
    if release.estimator == "mini_batch" and release.entry_size > 1:
        found = f"got {release.entry_size} with mini_batch"
        raise ArgumentError("entry_size", "must be 1 without a table", found, "Count batch_size in samples.")


def _main_relation(algorithm: str, bound: str, release: Release) -> str:
    """The relation of `epsilon`."""
    return published_relation(algorithm, release) if bound == "published" else proven_relations(release)[0]


def _reason(algorithm: str, bound: str, release: Release) -> str | None:
    """Why there is no epsilon, or None."""
    if bound == "published" and algorithm == "PrivSGP":
        return published_reason(algorithm, release)
    if release.clip_norm is None:
        return "Gradients are not clipped, so one sample can change a release by any amount."
    if release.noise_std == 0:
        return "No noise is added, so the releases are not private."
    if bound == "proven" and release.entry_size > 1 and release.storage == "bfloat16":
        return "A table entry of several samples is rounded to bfloat16 as a sum, which can exceed the bound on a change."
    return published_reason(algorithm, release) if bound == "published" else None


def _assumptions(
    algorithm: str,
    bound: str,
    release: Release,
    num_rounds: int,
    num_nodes: int,
    dp_delta: float,
    dp_epsilon: float | None,
) -> tuple[str, ...]:
    """What a statement rests on."""
    if bound == "published" and algorithm == "PrivSGP-VR":
        stated = (
            "Theorem 2 of the paper holds with this c2, which the paper does not state, and epsilon < c1 K / J^2",
            "the paper names no neighboring relation; replace_one is what its sampler means",
        )
        if not dp_epsilon:
            return stated
        leak = constant_gradient_epsilon(release, "replace_one", num_rounds, dp_delta)
        refuted = f"refuted at this noise: gradients that never change already leak epsilon {leak:.3g}"
        return (*stated, refuted) if leak > dp_epsilon else stated
    clipping = "" if release.clip_norm is None else f" (at most {release.clip_norm:g} in an entry's, L2)"
    shared = (
        "one run of one seed; all messages of a node are visible and nothing else (no losses, no metrics)",
        "a sample is held by one node; the node's number of entries J, the batch b and q = b / J are public and fixed",
        f"every sample's gradient is clipped{clipping}, before it is stored anywhere",
        "batches and noise from the threefry pseudo-random generator, in float32, count as ideal",
        "hyper-parameters were not chosen on these data",
    )
    if algorithm != "A(DP)2SGD":
        return shared
    if bound == "published":
        return (*shared, "a node wakes no more often than expected")
    failure = _waking_failure(dp_delta)
    awake = _most_releases(num_rounds, num_nodes, dp_delta)
    return (*shared, f"a node wakes at most {awake} times but for a probability {failure:g}, which delta includes")


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
