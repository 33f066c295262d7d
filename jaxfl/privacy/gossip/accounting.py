"""Privacy of a node's releases: the epsilon that a paper states and the epsilons that are proven.

A paper's own epsilon is called "published", or "reconstructed" where its formula could not be had and is our reading.

In every round a node releases a mean gradient with Gaussian noise. All its messages follow from these releases and from
what it received, so a node's guarantee is that of its releases composed, whatever the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy import grid
from jaxfl.privacy.accountant import Bound, Family
from jaxfl.privacy.dominating_pairs import unresolved_delta
from jaxfl.privacy.gossip.accountant import C2_OF_THE_PAPER, Account, Accountant, Published, checked
from jaxfl.privacy.gossip.proven import PROVEN_RELATIONS, Release, proven_bound, sensitivities
from jaxfl.privacy.statements import ASSUMED, Statement, drawn, is_unbounded

_ROUNDED_SUM = "A table entry of several samples is rounded to bfloat16 as a sum, which may exceed its bound."
_SETTING = (
    "it holds against whoever sees all messages of a node, and no losses or metrics",
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
        num_rounds: rounds that really ran; for A(DP)2SGD a round is as many wake-ups of a node as there are nodes.
        dp_delta: one for all releases, or one for each.
        c2: constant of equation (11), for the published statement of PrivSGP-VR.
        num_nodes: n of the network; by default the number of releases.
        neighboring_relation: of the first proven statement; default: the main one, zero_out.

    Raises:
        ArgumentError: an argument out of range, or an estimator that the algorithm does not have.

    Guarantees:
        - dp_epsilon is that of the worst node, node_epsilons those of each release.
        - where nothing is clipped, no noise is added or nothing is published there is a reason and no epsilon.
        - nothing is spent in 0 rounds.

    Examples:
        >>> from jaxfl.privacy import PRIVSGP_VR
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0757)
        >>> for found in statements(PRIVSGP_VR, [release] * 16, 3120, dp_delta=1e-5):
        ...     print(found.bound, found.neighboring_relation, round(found.dp_epsilon, 1))
        published replace_one 0.9
        proven zero_out 1.1
        proven replace_one 2.3
    """
    verbs.require_any(releases)
    check.per_node(len(releases), dp_delta=dp_delta)
    num_nodes = len(releases) if num_nodes is None else num_nodes
    deltas = [dp_delta] * len(releases) if np.ndim(dp_delta) == 0 else cast(Sequence[float], dp_delta)
    accounts = [
        checked(accountant, release, num_rounds, delta, c2, num_nodes)
        for release, delta in zip(releases, deltas, strict=True)
    ]
    first = _relation(accounts[0], "proven", neighboring_relation)
    claims = sorted(_claims(accounts[0]), key=lambda claim: claim[0] == "proven" and claim[1] != first)
    return verbs.statements(_GOSSIP, accounts, claims, num_nodes)


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
        bound: "published", which stands for the reconstructed formula where a paper's could not be had, or "proven".
        release: of the node.
        num_rounds: at least 0.
        dp_delta: in (0, 1).
        c2: constant of equation (11).
        num_nodes: n; required for A(DP)2SGD, where it decides how often a node wakes.
        neighboring_relation: "zero_out" or "replace_one"; default: the published formula's own, zero_out if proven.

    Raises:
        ArgumentError: as for `statements`, no num_nodes for A(DP)2SGD, or a relation that the bound is not stated for.

    Guarantees:
        - more rounds or less noise never lower it, nor do fewer entries while a batch is at most half of them.

    Examples:
        >>> from jaxfl.privacy import PRIVSGP
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> round(epsilon(PRIVSGP, "proven", release, 3120, dp_delta=1e-5), 2)
        2.99
    """
    account = checked(accountant, release, num_rounds, dp_delta, c2, num_nodes, bound)
    return verbs.epsilon(_GOSSIP, account, bound, _relation(account, bound, neighboring_relation))


def calibrate_noise_std(
    accountant: Accountant,
    bound: str,
    releases: Release | Sequence[Release],
    num_rounds: int,
    *,
    target_epsilon: float,
    dp_delta: float,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
    neighboring_relation: str | None = None,
) -> float:
    """Smallest noise_std with which no node spends more than a budget under one neighboring relation, to 0.1 %.

    Args:
        releases: release of one node, or one release per node or per kind of node; their noise_std is ignored.
        target_epsilon: above 0; the others as for `epsilon`.

    Returns:
        noise_std; 0 for 0 rounds.

    Raises:
        ArgumentError: as for `epsilon`, and where no noise gives this bound.

    Guarantees:
        - never overspends: the epsilon of the result is at most target_epsilon, at every node.
        - tight: 0.1 % less noise overspends.

    Examples:
        >>> from jaxfl.privacy import PRIVSGP_VR
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0)
        >>> found = calibrate_noise_std(PRIVSGP_VR, "proven", release, 3120, target_epsilon=3.0, dp_delta=1e-5)
        >>> round(found * 64, 1)
        2.7
    """
    target_epsilon = verbs.positive(target_epsilon=target_epsilon)
    searches, guesses = [], []
    for release in _kinds(releases):
        account = checked(accountant, release._replace(noise_std=1.0), num_rounds, dp_delta, c2, num_nodes, bound)
        relation = _relation(account, bound, neighboring_relation)
        if num_rounds:
            search, guess = _search(account, bound, relation, target_epsilon)
            searches.append(search)
            guesses.append(guess)
    if bound == "published" and num_rounds and cast(Published, accountant.published).inverse:
        # So that rounding does not overspend.
        return verbs.in_digits(max(epsilon_of(1.0) for epsilon_of in searches) / target_epsilon * (1 + 1e-12))
    return verbs.calibrate(searches, target_epsilon, guesses)


def max_rounds(
    accountant: Accountant,
    bound: str,
    releases: Release | Sequence[Release],
    *,
    target_epsilon: float,
    dp_delta: float,
    limit: int,
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
    neighboring_relation: str | None = None,
) -> int:
    """Most rounds, 0 ... limit, that a budget pays for at every node under one neighboring relation.

    Args:
        releases: release of one node, or one release per node or per kind of node.
        target_epsilon: above 0; the others as for `epsilon`.
        limit: at least 0.

    Returns:
        Rounds; 0 where the budget does not pay for one, or where there is no such bound.

    Raises:
        ArgumentError: as for `epsilon`.

    Guarantees:
        - one more round overspends at some node, unless the limit is reached.

    Examples:
        >>> from jaxfl.privacy import PRIVSGP
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> max_rounds(PRIVSGP, "proven", release, target_epsilon=3.0, dp_delta=1e-5, limit=100)
        100
    """
    target_epsilon = verbs.positive(target_epsilon=target_epsilon)
    check.at_least(0, limit=limit)
    accounts = [checked(accountant, release, limit, dp_delta, c2, num_nodes, bound) for release in _kinds(releases)]
    relation = _relation(accounts[0], bound, neighboring_relation)

    def spent(account: Account) -> Callable[[int], float]:
        return lambda rounds: verbs.epsilon(_GOSSIP, account._replace(num_rounds=rounds), bound, relation)

    return verbs.most_rounds([spent(account) for account in accounts], target_epsilon, limit)


def _kinds(releases: Release | Sequence[Release]) -> list[Release]:
    """Each kind of release once, the smallest node first. It mostly spends most; with a table of batches not always."""
    if isinstance(releases, Release):
        return [releases]
    return sorted(verbs.kinds(releases), key=lambda release: release.num_entries)


def _search(
    account: Account, bound: str, relation: str, target_epsilon: float
) -> tuple[Callable[[float], float], float]:
    """(noise_std -> epsilon, a guess of the noise that meets the target); refused where no noise does."""
    release, num_rounds = account.release, account.num_rounds
    reason = _reason(account, bound)
    if reason is not None:
        remedies = {verbs.UNCLIPPED: "Clip, or choose another bound.", _ROUNDED_SUM: "Store the table in float32."}
        remedy = remedies.get(reason, "Take the proven bound.")
        raise ArgumentError("bound", "must exist for this release", reason.rstrip("."), remedy)

    def epsilon_of(noise_std: float) -> float:
        return verbs.epsilon(_GOSSIP, account._replace(release=release._replace(noise_std=noise_std)), bound, relation)

    present = sensitivities(release._replace(grid=None), relation).present
    if bound == "proven" and release.grid is not None:
        grid.check_rounding(epsilon_of, target_epsilon, present)
    if bound == "proven" and account.dp_delta <= unresolved_delta(num_rounds) and math.isinf(epsilon_of(1e6 * present)):
        left_out = f"{unresolved_delta(num_rounds):.1g}, what accounting leaves out in {num_rounds} rounds"
        raise ArgumentError("dp_delta", f"must be above {left_out}", f"got {account.dp_delta:g}", "Pass a larger one.")
    sampling_rate = min(1.0, release.batch_size / release.num_entries)
    spread = sampling_rate * math.sqrt(num_rounds) * math.sqrt(2 * math.log(1.25 / account.dp_delta)) / target_epsilon
    guess = present * max(spread, 0.4)
    if guess > float(np.finfo(np.float32).max):
        found, remedy = f"got {target_epsilon:g}, which needs about {guess:.2g}", "Pass a larger one."
        raise ArgumentError("target_epsilon", "must need no more noise than float32 holds", found, remedy)
    return epsilon_of, guess


def _claims(account: Account) -> list[tuple[str, str]]:
    """Bounds with their relations: the published one, then the proven ones, the main relation first."""
    published = account.accountant.published
    relation = "replace_one" if isinstance(published, str) else published.relation(account.release)
    return [("published", relation), *(("proven", proven) for proven in PROVEN_RELATIONS)]


def _relation(account: Account, bound: str, asked: str | None) -> str:
    """The relation that is asked for, or the first that the bound is stated for."""
    known = [relation for name, relation in _claims(account) if name == bound]
    whose = f"the {account.accountant.bound_name(bound)} bound of {account.accountant.label}"
    return verbs.chosen_relation(known, asked, whose, "J and b")


def _reason(account: Account, bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    release, published = account.release, account.accountant.published
    if account.num_rounds == 0:
        return None
    if bound == "published" and isinstance(published, str):
        return published
    if is_unbounded(release, bound):
        return verbs.UNCLIPPED
    if release.noise_std == 0:
        return verbs.SILENT
    if bound == "published":
        return cast(Published, published).reason(release)
    return _ROUNDED_SUM if release.entry_size > 1 and release.storage == "bfloat16" else None


@lru_cache(maxsize=4096)
def _cost(account: Account, bound: str, relation: str) -> Bound:
    """The epsilon of a release; `_reason` of it is None."""
    accountant, release, num_rounds, dp_delta, c2, num_nodes = account
    if num_rounds == 0:
        return verbs.NOTHING
    if bound == "published":
        published = cast(Published, accountant.published)
        return published.bound(release._replace(grid=None), relation, num_rounds, dp_delta, c2)
    num_releases, failure = num_rounds, 0.0
    if accountant.waking is not None:
        num_releases, failure = accountant.waking(num_rounds, num_nodes, dp_delta)
    return proven_bound(release, relation, num_releases, dp_delta - failure)


def _words(accounts: Sequence[Account], account: Account, bound: str, _relation: str, found: Bound) -> dict[str, Any]:
    """Arguments of `statement`."""
    differ = len({one.release.noise_std for one in accounts}) > 1
    return {
        "bound": account.accountant.bound_name(bound),
        "gradients": None if is_unbounded(account.release, bound) else _bound_on_gradients(account.release),
        "setting": _SETTING,
        "noise": grid.assumption(account.release.grid),
        "mechanism": _mechanism(account) + " at the worst node; others have noise of their own" * differ,
        "notes": _notes(account, bound, float(found.dp_epsilon)),
    }


def _mechanism(account: Account) -> str:
    """Rounds, noise and samples of a node."""
    release, rate = account.release, min(1.0, account.release.batch_size / account.release.num_entries)
    multiplier = math.nan if release.clip_norm is None else release.noise_std * release.batch_size / release.clip_norm
    return f"{account.num_rounds} rounds, {drawn('samples', release.sampler, rate, multiplier)}"


def _bound_on_gradients(release: Release) -> str:
    """Describe the bound on one sample's gradient."""
    single, norm = release.entry_size == 1, f"{release.clip_norm:g}"
    if release.assumed:
        what = "per-sample gradients stay" if single else "what a sample adds to its entry's gradient stays"
        return f"{what} below the norm {norm}: {ASSUMED}"
    how = f"to the L2 norm {norm}" if single else f"to add at most {norm} (L2) to its entry's"
    return f"every sample's gradient is clipped {how}, before it is stored anywhere"


def _notes(account: Account, bound: str, dp_epsilon: float) -> tuple[str, ...]:
    """List the assumptions of a statement that others do not make."""
    published, waking = account.accountant.published, account.accountant.waking
    if bound == "published":
        if isinstance(published, str):
            return ()
        stated = dp_epsilon if math.isfinite(dp_epsilon) else None
        rounding = () if account.release.grid is None else (grid.UNCOUNTED,)
        return (*published.notes(account.release, account.num_rounds, account.dp_delta, stated), *rounding)
    if waking is None:
        return ()
    most, failure = waking(account.num_rounds, account.num_nodes, account.dp_delta)
    return (f"a node wakes at most {most} times, except with probability {failure:g}, which is part of delta",)


_GOSSIP = Family(_reason, _cost, _words, lambda account: account.release.num_entries * account.release.entry_size)
