"""Privacy of a node's releases: the epsilon that a paper states and the epsilons that are proven.

A paper's own epsilon is called "published", or "reconstructed" where we could not obtain its formula.

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
from jaxfl.core.calls import by_name
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy import grid
from jaxfl.privacy.accountant import Account, Bound, Claim, Family
from jaxfl.privacy.dominating_pairs import unresolved_delta
from jaxfl.privacy.gossip.accountant import C2_OF_THE_PAPER, Accountant, Published, Spent, checked
from jaxfl.privacy.gossip.proven import PROVEN_RELATIONS, Release, proven_bound, sensitivities
from jaxfl.privacy.statements import ASSUMED, drawn, is_unbounded

_ROUNDED_SUM = "A table entry of several samples is rounded to bfloat16 as a sum, which may exceed its bound."
_SETTING = (
    "the other nodes see all messages, and know data, batches and noise of each other; nobody sees losses or metrics",
    "a sample is held by one node, and where samples are placed (by label, say) does not depend on the changed one",
    "the node's number of entries J, the batch b and q = b / J are public and fixed",
)


@by_name
def account(
    accountant: Accountant,
    releases: Release | Sequence[Release],
    *,
    dp_delta: float | Sequence[float],
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int | None = None,
) -> Account:
    """Account for the releases of the nodes of a graph: the published or reconstructed bound, then the proven ones.

    Args:
        accountant: of the algorithm: `PRIVSGP`, `PRIVSGP_VR`, `DP2_SGD` or `A_DP2_SGD`, or one of another algorithm.
        releases: of each node, or of the nodes of several runs, or one node's.
        dp_delta: in (0, 1), one for all releases, or one for each.
        c2: constant of equation (11), for the published bound of PrivSGP-VR.
        num_nodes: n of the network; by default the number of releases. Of one node's release A(DP)2SGD needs it: n
            decides how often a node wakes.

    Returns:
        An account whose rounds are the algorithm's; for A(DP)2SGD a round is as many wake-ups as there are nodes.

    Raises:
        ArgumentError: an argument out of range, or an estimator that the algorithm does not have.

    Guarantees:
        - fewer entries never lower epsilon while a batch is at most half of them.

    Examples:
        >>> from jaxfl.privacy import PRIVSGP_VR
        >>> release = Release("saga", "poisson", 64, 3125, clip_norm=1.0, noise_std=0.0757)
        >>> for one in account(PRIVSGP_VR, [release] * 16, dp_delta=1e-5).statements(3120):
        ...     print(one.bound, one.neighboring_relation, round(one.dp_epsilon, 1))
        published replace_one 0.9
        proven zero_out 1.1
        proven replace_one 2.3
    """
    listed = verbs.plain(releases)
    check.per_node(len(listed), dp_delta=dp_delta)
    deltas = [dp_delta] * len(listed) if np.ndim(dp_delta) == 0 else cast(Sequence[float], dp_delta)
    if num_nodes is None and not isinstance(releases, Release):
        num_nodes = len(listed)
    plans = verbs.once(lambda one, delta: checked(accountant, one, delta, c2, num_nodes), listed, deltas)
    published = accountant.published
    relation = "replace_one" if isinstance(published, str) else published.relation(plans[0].release)
    claims = [("published", relation), *(("proven", proven) for proven in PROVEN_RELATIONS)]
    return Account(_GOSSIP, tuple(Claim(*claim, plans) for claim in claims), num_nodes or 1)


def _spent(plan: Spent, num_rounds: int, factor: float) -> Spent:
    """A node after some rounds, with a factor on its noise."""
    release = plan.release._replace(noise_std=factor * plan.release.noise_std)
    return plan._replace(release=release, num_rounds=num_rounds * plan.accountant.releases_per_round)


def _search(
    spent: Callable[[float], Spent], bound: str, relation: str, target_epsilon: float
) -> tuple[Callable[[float], float], float]:
    """(factor -> epsilon, a guess of the factor that meets the target); refused where none does."""
    one = spent(1.0)
    release, num_rounds = one.release, one.num_rounds

    def epsilon_of(factor: float) -> float:
        return _GOSSIP.epsilon(spent(factor), bound, relation)

    present = sensitivities(release._replace(grid=None), relation).present / release.noise_std
    if bound == "proven" and release.grid is not None:
        grid.check_rounding(epsilon_of, target_epsilon, present)
    if bound == "proven" and one.dp_delta <= unresolved_delta(num_rounds) and math.isinf(epsilon_of(1e6 * present)):
        rounds = num_rounds // one.accountant.releases_per_round
        left_out = f"{unresolved_delta(num_rounds):.1g}, what accounting leaves out in {rounds} rounds"
        raise ArgumentError("dp_delta", f"must be above {left_out}", f"got {one.dp_delta:g}", "Pass a larger one.")
    sampling_rate = min(1.0, release.batch_size / release.num_entries)
    guess = present * verbs.noise_guess(sampling_rate, num_rounds, one.dp_delta, target_epsilon)
    if guess * release.noise_std > float(np.finfo(np.float32).max):
        needed = f"got {target_epsilon:g}, which needs about {guess * release.noise_std:.2g}"
        requirement = "must need no more noise than float32 holds"
        raise ArgumentError("target_epsilon", requirement, needed, "Pass a larger one.")
    return epsilon_of, guess


def _reason(spent: Spent, bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    release, published = spent.release, spent.accountant.published
    if spent.num_rounds == 0:
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
def _cost(spent: Spent, bound: str, relation: str) -> Bound:
    """The epsilon of a release; `_reason` of it is None."""
    accountant, release, num_rounds, dp_delta, c2, num_nodes = spent
    if num_rounds == 0:
        return verbs.NOTHING
    if bound == "published":
        published = cast(Published, accountant.published)
        return published.bound(release._replace(grid=None), relation, num_rounds, dp_delta, c2)
    num_nodes = num_nodes if accountant.wakes_at_random else 1
    return proven_bound(release, relation, num_rounds * num_nodes, dp_delta, 1 / num_nodes)


def _words(nodes: Sequence[Spent], spent: Spent, bound: str, _relation: str, cost: Bound) -> dict[str, Any]:
    """Arguments of `statement`."""
    differ, secrets = len({one.release.noise_std for one in nodes}) > 1, spent.release.secrets
    return {
        "bound": spent.accountant.bound_name(bound),
        "gradients": None if is_unbounded(spent.release, bound) else _bound_on_gradients(spent.release),
        "setting": _SETTING if secrets is None else (secrets.setting, *_SETTING[1:]),
        "noise": grid.assumption(spent.release.grid),
        "observer": "all other nodes" if secrets is None else secrets.observer,
        "mechanism": _mechanism(spent) + " at the worst node; others have noise of their own" * differ,
        "notes": _notes(spent, bound, float(cost.dp_epsilon)),
    }


def _mechanism(spent: Spent) -> str:
    """Rounds, noise and samples of a node."""
    release, rate = spent.release, min(1.0, spent.release.batch_size / spent.release.num_entries)
    multiplier = math.nan if release.clip_norm is None else release.noise_std * release.batch_size / release.clip_norm
    effective = "" if release.secrets is None else "effective "
    per_round = spent.accountant.releases_per_round
    rounds = f"{spent.num_rounds // per_round} rounds" + f" of {per_round} releases" * (per_round > 1)
    return f"{rounds}, {effective}{drawn('samples', release.sampler, rate, multiplier)}"


def _bound_on_gradients(release: Release) -> str:
    """Describe the bound on one sample's gradient."""
    single, norm = release.entry_size == 1, f"{release.clip_norm:g}"
    if release.assumed:
        what = "per-sample gradients stay" if single else "what a sample adds to its entry's gradient stays"
        return f"{what} below the norm {norm}: {ASSUMED}"
    how = f"to the L2 norm {norm}" if single else f"to add at most {norm} (L2) to its entry's"
    return f"every sample's gradient is clipped {how}, before it is stored anywhere"


def _notes(spent: Spent, bound: str, dp_epsilon: float) -> tuple[str, ...]:
    """List the assumptions of a statement that others do not make."""
    published = spent.accountant.published
    if bound == "published":
        if isinstance(published, str):
            return ()
        stated = dp_epsilon if math.isfinite(dp_epsilon) else None
        rounding = () if spent.release.grid is None else (grid.UNCOUNTED,)
        return (*published.notes(spent.release, spent.num_rounds, spent.dp_delta, stated), *rounding)
    if not spent.accountant.wakes_at_random:
        return ()
    events = spent.num_rounds * spent.num_nodes
    return (f"each of {events} events wakes one of {spent.num_nodes} nodes, drawn evenly, whatever the data are",)


_GOSSIP = Family(
    _spent, _reason, _cost, _words, lambda spent: spent.release.num_entries * spent.release.entry_size, _search
)
