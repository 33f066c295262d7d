"""Privacy of a node's releases: the epsilon that a paper states and the epsilons that are proven.

The epsilon of a paper is "published", or "reconstructed" where its formula could not be had.

In every round a node releases a mean gradient with Gaussian noise. All its messages follow from these releases and from
what it received, so a node's guarantee is that of its releases composed, whatever the graph. An epsilon never comes
without its bound, its neighboring relation and its delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import calibration, grid_noise
from jaxfl.privacy.dominating_pairs import unresolved_delta
from jaxfl.privacy.gossip.accountant import C2_OF_THE_PAPER, Accountant, Case, Published, checked, positive
from jaxfl.privacy.gossip.proven import PROVEN_RELATIONS, Bound, Release, proven_bound, sensitivities
from jaxfl.privacy.statements import ASSUMED, RELATIONS, Statement, is_unbounded, statement

_UNCLIPPED = "Gradients are not clipped, so one sample can change a release by any amount."
_ROUNDED_SUM = "A table entry of several samples is rounded to bfloat16 as a sum, which may exceed its bound."
_SETTING = (
    "all messages of a node are visible and nothing else (no losses, no metrics)",
    "a sample is held by one node, and where samples are placed (by label, say) does not depend on the changed one",
    "the node's number of entries J, the batch b and q = b / J are public and fixed",
)


def statements(
    accountant: Accountant,
    releases: Sequence[Release],
    num_rounds: int,
    *,
    dp_delta: float | Sequence[float],
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
    neighboring_relation: str | None = None,
) -> list[Statement]:
    """List the privacy statements on a run: the published or reconstructed one, then the proven ones.

    Args:
        accountant: of the algorithm: `PRIVSGP`, `PRIVSGP_VR`, `DP2_SGD` or `A_DP2_SGD`, or one of another algorithm.
        releases: of each node, or of the nodes of several runs. A run without noise or clipping is stated too, with a
            reason and no epsilon.
        num_rounds: rounds that really ran; for A(DP)2SGD a round is as many events as there are nodes.
        dp_delta: one for all releases, or one for each.
        c2: constant of equation (11), for the published statement of PrivSGP-VR.
        num_nodes: n of the network; by default there is a release for each.
        neighboring_relation: of the first proven statement; default: the main one, zero_out.

    Raises:
        ArgumentError: an argument out of range, or an estimator that the algorithm does not have.

    Guarantees:
        - dp_epsilon is that of the worst node, node_epsilons those of each release.
        - where nothing is clipped, no noise is added or nothing is published there is a reason and no epsilon.
        - nothing is spent in 0 rounds.

    Example:
        >>> from jaxfl.privacy import PRIVSGP_VR
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0757)
        >>> for found in statements(PRIVSGP_VR, [release] * 16, 3120, dp_delta=1e-5):
        ...     print(found.bound, found.neighboring_relation, round(found.dp_epsilon, 1))
        published replace_one 0.9
        proven zero_out 1.1
        proven replace_one 2.3
    """
    if not len(releases):
        raise ArgumentError("releases", "must hold one release a node", "got none", "Pass a non-empty sequence.")
    check.at_least(0, num_rounds=num_rounds)
    check.per_node(len(releases), dp_delta=dp_delta)
    num_nodes = len(releases) if num_nodes is None else num_nodes
    deltas = [dp_delta] * len(releases) if np.ndim(dp_delta) == 0 else cast(Sequence[float], dp_delta)
    cases = [checked(accountant, *pair, c2, num_nodes) for pair in zip(releases, deltas, strict=True)]
    first = _relation(accountant, "proven", cases[0].release, neighboring_relation)
    claims = sorted(_claims(accountant, cases[0].release), key=lambda claim: claim[0] == "proven" and claim[1] != first)
    return [_stated(cases, bound, relation, num_rounds) for bound, relation in claims]


def epsilon(
    accountant: Accountant,
    bound: str,
    release: Release,
    num_rounds: int,
    *,
    dp_delta: float,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
    neighboring_relation: str | None = None,
) -> float:
    """epsilon of one node under one neighboring relation; infinite where there is none.

    Args:
        accountant: as for `statements`.
        bound: "published", which stands for the reconstructed formula where nothing was published, or "proven".
        release: of the node.
        num_rounds: at least 0.
        dp_delta: in (0, 1).
        c2: constant of equation (11).
        num_nodes: n; required for A(DP)2SGD, where it decides how often a node wakes.
        neighboring_relation: "zero_out" or "replace_one"; default: the formula's own, and zero_out of what is proven.

    Raises:
        ArgumentError: as for `statements`, no num_nodes for A(DP)2SGD, or a relation that the bound is not stated for.

    Guarantees:
        - more rounds or less noise never lower it, nor do fewer entries while a batch is at most half of them.

    Example:
        >>> from jaxfl.privacy import PRIVSGP
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> round(epsilon(PRIVSGP, "proven", release, 3120, dp_delta=1e-5), 2)
        2.99
    """
    check.at_least(0, num_rounds=num_rounds)
    case = checked(accountant, release, dp_delta, c2, num_nodes, bound)
    relation = _relation(accountant, bound, release, neighboring_relation)
    return _epsilon(case, bound, relation, num_rounds)


def calibrate_noise_std(
    accountant: Accountant,
    bound: str,
    release: Release,
    num_rounds: int,
    *,
    target_epsilon: float,
    dp_delta: float,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
    neighboring_relation: str | None = None,
) -> float:
    """Smallest noise_std that meets a budget under one neighboring relation, to 0.1 %.

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
        >>> from jaxfl.privacy import PRIVSGP_VR
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0)
        >>> found = calibrate_noise_std(PRIVSGP_VR, "proven", release, 3120, target_epsilon=3.0, dp_delta=1e-5)
        >>> round(found * 64, 1)
        2.7
    """
    target_epsilon = positive(target_epsilon=target_epsilon)
    check.at_least(0, num_rounds=num_rounds)
    case = checked(accountant, release._replace(noise_std=1.0), dp_delta, c2, num_nodes, bound)
    relation = _relation(accountant, bound, release, neighboring_relation)
    if num_rounds == 0:
        return 0.0
    reason = _reason(accountant, bound, case.release)
    if reason is not None:
        remedies = {_UNCLIPPED: "Clip, or choose another bound.", _ROUNDED_SUM: "Store the table in float32."}
        remedy = remedies.get(reason, "Take the proven bound.")
        raise ArgumentError("bound", "must exist for this release", reason.rstrip("."), remedy)

    def epsilon_of(noise_std: float) -> float:
        noisy = case._replace(release=case.release._replace(noise_std=noise_std))
        return _epsilon(noisy, bound, relation, num_rounds)

    if bound == "published" and cast(Published, accountant.published).inverse:
        return epsilon_of(1.0) / target_epsilon * (1 + 1e-12)  # so that rounding does not overspend
    sampling_rate = min(1.0, release.batch_size / release.num_entries)
    present = sensitivities(case.release._replace(grid=None), relation).present
    if bound == "proven" and release.grid is not None:
        grid_noise.check_rounding(epsilon_of, target_epsilon, present)
    if bound == "proven" and case.dp_delta <= unresolved_delta(num_rounds) and math.isinf(epsilon_of(1e6 * present)):
        left_out = f"{unresolved_delta(num_rounds):.1g}, what accounting leaves out in {num_rounds} rounds"
        raise ArgumentError("dp_delta", f"must be above {left_out}", f"got {case.dp_delta:g}", "Pass a larger one.")
    spread = sampling_rate * math.sqrt(num_rounds) * math.sqrt(2 * math.log(1.25 / case.dp_delta)) / target_epsilon
    return calibration.smallest_noise(epsilon_of, target_epsilon, guess=present * max(spread, 0.4))


def max_rounds(
    accountant: Accountant,
    bound: str,
    release: Release,
    *,
    target_epsilon: float,
    dp_delta: float,
    limit: int,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
    neighboring_relation: str | None = None,
) -> int:
    """Most rounds that a budget pays for under one neighboring relation, 0 ... limit.

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
        >>> from jaxfl.privacy import PRIVSGP
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> max_rounds(PRIVSGP, "proven", release, target_epsilon=3.0, dp_delta=1e-5, limit=100)
        100
    """
    target_epsilon = positive(target_epsilon=target_epsilon)
    check.at_least(0, limit=limit)
    case = checked(accountant, release, dp_delta, c2, num_nodes, bound)
    relation = _relation(accountant, bound, release, neighboring_relation)
    return calibration.most_rounds(lambda rounds: _epsilon(case, bound, relation, rounds), target_epsilon, limit)


def _claims(accountant: Accountant, release: Release) -> list[tuple[str, str]]:
    """Bounds with their relations: the published one, then the proven ones, the main relation first."""
    published = accountant.published
    relation = "replace_one" if isinstance(published, str) else published.relation(release)
    return [("published", relation), *(("proven", proven) for proven in PROVEN_RELATIONS)]


def _relation(accountant: Accountant, bound: str, release: Release, asked: str | None) -> str:
    """The relation that is asked for, or the first that the bound is stated for."""
    known = [relation for name, relation in _claims(accountant, release) if name == bound]
    if asked is None:
        return known[0]
    check.one_of(tuple(RELATIONS), neighboring_relation=asked)
    if asked not in known:
        requirement = f"must be {' or '.join(known)} for the {accountant.bound_name(bound)} bound of {accountant.label}"
        remedy = "Choose another relation or bound."
        if asked == "add_or_remove_one":
            remedy = "J and b are public here, so that a missing sample is one whose gradient is 0: pass zero_out."
        raise ArgumentError("neighboring_relation", requirement, f"got {asked}", remedy)
    return asked


def _reason(accountant: Accountant, bound: str, release: Release) -> str | None:
    """Why there is no epsilon, or None."""
    if bound == "published" and isinstance(accountant.published, str):
        return accountant.published
    if is_unbounded(release, bound):
        return _UNCLIPPED
    if release.noise_std == 0:
        return "No noise is added, so the releases are not private."
    if bound == "published":
        return cast(Published, accountant.published).reason(release)
    return _ROUNDED_SUM if release.entry_size > 1 and release.storage == "bfloat16" else None


def _bound_on_gradients(release: Release) -> str:
    """Describe the bound on one sample's gradient."""
    single, norm = release.entry_size == 1, f"{release.clip_norm:g}"
    if release.assumed:
        what = "per-sample gradients stay" if single else "what a sample adds to its entry's gradient stays"
        return f"{what} below the norm {norm}: {ASSUMED}"
    how = f"to the L2 norm {norm}" if single else f"to add at most {norm} (L2) to its entry's"
    return f"every sample's gradient is clipped {how}, before it is stored anywhere"


def _stated(cases: Sequence[Case], bound: str, relation: str, num_rounds: int) -> Statement:
    """The statement of the worst case, or of the first that has none."""
    reasons = [_reason(case.accountant, bound, case.release) if num_rounds else None for case in cases]
    reason, case = next(((reason, case) for reason, case in zip(reasons, cases, strict=True) if reason), (None, None))
    worst, bounds = Bound(math.inf, "none"), []
    if case is None:
        bounds = [_bound(case, bound, relation, num_rounds) for case in cases]
        case, worst = max(zip(cases, bounds, strict=True), key=lambda pair: pair[1].dp_epsilon)
    return statement(
        case.accountant.bound_name(bound),
        relation,
        dp_epsilon=None if reason else worst.dp_epsilon,
        dp_delta=max(case.dp_delta for case in cases),
        accountant=worst.accountant,
        nodes=case.num_nodes,
        gradients=None if is_unbounded(case.release, bound) else _bound_on_gradients(case.release),
        setting=_SETTING,
        noise=grid_noise.assumption(case.release.grid),
        notes=_notes(case, bound, num_rounds, worst.dp_epsilon),
        reason=reason,
        node_epsilons=[each.dp_epsilon for each in bounds],
    )


def _notes(case: Case, bound: str, num_rounds: int, dp_epsilon: float) -> tuple[str, ...]:
    """List the assumptions of a statement that others do not make."""
    published, waking = case.accountant.published, case.accountant.waking
    if bound == "published":
        if isinstance(published, str):
            return ()
        stated = dp_epsilon if math.isfinite(dp_epsilon) else None
        rounding = () if case.release.grid is None else (grid_noise.UNCOUNTED,)
        return (*published.notes(case.release, num_rounds, case.dp_delta, stated), *rounding)
    if waking is None:
        return ()
    most, failure = waking(num_rounds, case.num_nodes, case.dp_delta)
    return (f"a node wakes at most {most} times but for a probability {failure:g}, part of delta",)


def _epsilon(case: Case, bound: str, relation: str, num_rounds: int) -> float:
    """epsilon under a relation that the bound is stated for; infinite where there is none."""
    if num_rounds and _reason(case.accountant, bound, case.release) is not None:
        return math.inf
    return _bound(case, bound, relation, num_rounds).dp_epsilon


@lru_cache(maxsize=4096)
def _bound(case: Case, bound: str, relation: str, num_rounds: int) -> Bound:
    """The epsilon of a release; `_reason` of it is None."""
    if num_rounds == 0:
        return Bound(0.0, "nothing was released")
    if bound == "published":
        published, release = cast(Published, case.accountant.published), case.release._replace(grid=None)
        return published.bound(release, relation, num_rounds, case.dp_delta, case.c2)
    num_releases, failure = num_rounds, 0.0
    if case.accountant.waking is not None:
        num_releases, failure = case.accountant.waking(num_rounds, case.num_nodes, case.dp_delta)
    return proven_bound(case.release, relation, num_releases, case.dp_delta - failure)
