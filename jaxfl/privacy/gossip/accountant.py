"""Properties that distinguish the accounting of one algorithm, and what one node has spent: checked, plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import grid
from jaxfl.privacy.accountant import Bound, number, positive
from jaxfl.privacy.gossip.proven import Release

C2_OF_THE_PAPER = 0.37247  # gives the K = 3,120 that PrivSGP-VR's paper finds from (12) with its CIFAR-10 constants


class Published(NamedTuple):
    """Accounting that a paper states for its algorithm.

    Attributes:
        bound: (release, relation, num_rounds, dp_delta, c2) -> the paper's own accounting of a release that is clipped
            and noisy; num_rounds at least 1.
        relation: release -> the neighboring relation.
        notes: (release, num_rounds, dp_delta, epsilon or None) -> assumptions of this epsilon that others do not make.
        reason: release -> why nothing is published for it, or None.
        bound_name: "published"; "reconstructed" where we could not obtain the paper's formula and read it so.
    """

    bound: Callable[[Release, str, int, float, float], Bound]
    relation: Callable[[Release], str]
    notes: Callable[[Release, int, float, float | None], tuple[str, ...]]
    reason: Callable[[Release], str | None]
    bound_name: str = "published"


class Accountant(NamedTuple):
    """Properties that distinguish the accounting of one algorithm from that of others.

    Attributes:
        label: its name in messages.
        published: what its paper states, or why it states nothing.
        estimator: the only gradient estimator that it takes, "mini_batch" or "saga"; None: both.
        wakes_at_random: each of n K events wakes one of n nodes, which releases; else each node does in each round.
        releases_per_round: releases of a node in a round.
    """

    label: str
    published: Published | str
    estimator: str | None = None
    wakes_at_random: bool = False
    releases_per_round: int = 1

    def bound_name(self, bound: str) -> str:
        """Return the name of a bound in statements.

        It is "reconstructed" in place of "published" where the paper's formula could not be obtained.
        """
        return self.published.bound_name if bound == "published" and isinstance(self.published, Published) else bound


class Spent(NamedTuple):
    """Releases of a node in some rounds, as plain numbers."""

    accountant: Accountant
    release: Release
    num_rounds: int  # with one release each: those of the run times `releases_per_round`
    dp_delta: float
    c2: float
    num_nodes: int


def checked(accountant: Accountant, release: Release, dp_delta: Any, c2: Any, num_nodes: int | None) -> Spent:
    """Refuse what cannot be accounted for; nothing is spent yet."""
    if not isinstance(accountant, Accountant):
        remedy = "Pass jaxfl.privacy.PRIVSGP_VR, say."
        raise ArgumentError("accountant", "must be an Accountant", f"got {accountant!r}", remedy)
    check.one_of(("mini_batch", "saga"), estimator=release.estimator)
    check.one_of(("poisson", "fixed", "uniform"), sampler=release.sampler)
    check.one_of(("float32", "bfloat16"), storage=release.storage)
    check.at_least(1, batch_size=release.batch_size, num_entries=release.num_entries, entry_size=release.entry_size)
    grid.check_grid(release.grid)
    if num_nodes is None and accountant.wakes_at_random:
        remedy = "Pass the number of nodes, which decides how often a node wakes."
        raise ArgumentError("num_nodes", f"must be given for {accountant.label}", "got None", remedy)
    num_nodes = 1 if num_nodes is None else num_nodes
    check.at_least(1, num_nodes=num_nodes)
    noise_std, dp_delta = number(noise_std=release.noise_std), number(dp_delta=dp_delta)
    check.non_negative(noise_std=noise_std)
    check.open_unit(dp_delta=dp_delta)
    clip_norm = None if release.clip_norm is None else positive(clip_norm=release.clip_norm)
    if release.sampler != "uniform" and release.batch_size > release.num_entries:
        found = f"got {release.batch_size} of {release.num_entries}"
        raise ArgumentError("batch_size", "must be at most the node's entries", found, "Pass a smaller batch.")
    if accountant.estimator not in (None, release.estimator):
        requirement, remedy = f"must be {accountant.estimator} for {accountant.label}", "Pass this algorithm's release."
        raise ArgumentError("estimator", requirement, f"got {release.estimator}", remedy)
    if release.estimator == "mini_batch" and release.entry_size > 1:
        found = f"got {release.entry_size} with mini_batch"
        raise ArgumentError("entry_size", "must be 1 without a table", found, "Count batch_size in samples.")
    release = release._replace(clip_norm=clip_norm, noise_std=noise_std)
    return Spent(accountant, release, 0, dp_delta, positive(c2=c2), num_nodes)
