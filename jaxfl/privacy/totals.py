"""Cost of several runs on the same data together: their releases composed, in place of their epsilons added up.

A run that begins after others may depend on what they released, as a round depends on earlier rounds: a dominating pair
of each round composes adaptively, whichever run the round belongs to. So runs whose releases are alike cost as much as
one run with all their rounds. A table of stored gradients that begins anew is one more past that the bound of a round
holds for. Poisson-sampled Gaussian releases of several kinds compose, too (`clients.sampled_releases`). A larger rate
and less noise dominate: where a sample may be at any node, each run counts with the largest rate and the least noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxfl.privacy.accountant import Account
from jaxfl.privacy.clients import accounting, client_level
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon
from jaxfl.privacy.gossip.accountant import Spent


def total_epsilons(
    runs: Sequence[tuple[Account, int]], neighboring_relation: str, *, nodes_agree: bool = True
) -> list[float] | None:
    """Compose the proven epsilons of several runs, at the delta of their accounts.

    Args:
        runs: (account, rounds that ran) of each; all accounts have the same delta, which is that of the total.
        neighboring_relation: of the epsilons.
        nodes_agree: whether a sample is at the same node in all runs. Otherwise it may be at the worst one in each.

    Returns:
        epsilon of each node, or of the worst one; None where nothing better than adding up is known here.

    Examples:
        >>> from jaxfl.privacy import PRIVSGP, Release, gossip
        >>> release = Release("mini_batch", "poisson", 100, 400, clip_norm=1.0, noise_std=0.07415)
        >>> one = gossip.account(PRIVSGP, [release] * 2, dp_delta=1e-4)
        >>> together = total_epsilons([(one, 60)] * 10, "zero_out")
        >>> [round(epsilon, 2) for epsilon in together], round(10 * one.epsilon(60), 2)
        ([3.07, 3.07], 8.33)
    """
    spent = []
    for account, num_rounds in runs:
        plans = [claim.plans for claim in account.claims if claim[:2] == ("proven", neighboring_relation)]
        each = [account.family.spent(plan, num_rounds, 1.0) for plan in plans[-1]] if plans else []
        if not each or not isinstance(each[0], (Spent, accounting.Spent, client_level.Spent)):
            return None
        if any(account.family.reason(one, "proven") is not None for one in each):
            return None
        if nodes_agree:
            spent.append(each)
        else:
            spent.append(each[:1] if len(set(each)) == 1 else [_worst(each)])
    if len({len(each) for each in spent}) > 1:
        return None
    nodes = list(zip(*spent, strict=True))
    delta = runs[0][0].claims[-1].plans[0].dp_delta
    known = {node: _together(node, runs[0][0], neighboring_relation, delta) for node in dict.fromkeys(nodes)}
    epsilons = [known[node] for node in nodes]
    return epsilons if all(map(math.isfinite, epsilons)) else None


def _worst(each: Sequence[Any]) -> tuple[SampledReleases, ...] | None:
    """Kinds of releases that dominate those of every node; None where they are of other kinds."""
    kinds = [_kinds(one) for one in each]
    if any(one is None or len(one) != len(kinds[0] or ()) for one in kinds):
        return None
    columns = (zip(*same, strict=True) for same in zip(*(one or () for one in kinds), strict=True))
    return tuple(SampledReleases(max(rates), min(noises), max(counts)) for rates, noises, counts in columns)


def _together(node: tuple[Any, ...], account: Account, relation: str, dp_delta: float) -> float:
    """epsilon of what one node spent in all runs; infinite where it is not known."""
    if all(isinstance(one, Spent) for one in node):
        all_rounds = node[0]._replace(num_rounds=sum(one.num_rounds for one in node))
        if all(one._replace(num_rounds=all_rounds.num_rounds) == all_rounds for one in node):
            return account.family.epsilon(all_rounds, "proven", relation)
    counts: dict[tuple[float, float], int] = {}
    for one in node:
        kinds = _kinds(one)
        if kinds is None:
            return math.inf
        for rate, multiplier, count in kinds:
            counts[rate, multiplier] = counts.get((rate, multiplier), 0) + count
    kinds = [SampledReleases(*kind, count) for kind, count in counts.items()]
    return sampled_epsilon(kinds, dp_delta, exchange=relation == "replace_one")[0]


def _kinds(spent: Any) -> Sequence[SampledReleases] | None:
    """Poisson-sampled Gaussian releases of a node, or of the worst one; None where it has others."""
    if spent is None or type(spent) is tuple:
        return spent
    if isinstance(spent, client_level.Spent):
        release = spent.release
        return [SampledReleases(release.participation_rate, release.noise_multiplier, spent.num_rounds)]
    if isinstance(spent, accounting.Spent):
        return accounting.kinds_of(spent)
    if not isinstance(spent, Spent) or spent.accountant.wakes_at_random:
        return None
    release = spent.release
    if (release.estimator, release.sampler, release.grid) != ("mini_batch", "poisson", None):
        return None
    assert release.clip_norm is not None
    multiplier = release.noise_std * release.batch_size / release.clip_norm
    return [SampledReleases(release.batch_size / release.num_entries, multiplier, spent.num_rounds)]
