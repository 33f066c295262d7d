"""Privacy of whole clients: clipped updates of clients that take part at random, and noise on their sum.

In every round each client takes part independently with probability q. Its whole update is clipped to the L2 norm S,
the updates of those that take part are summed, and the sum gets Gaussian noise of standard deviation z S before it is
divided by public constants. Counting a client's updates as zero moves the sum by at most S in rounds where it takes
part, and not at all in others: the run is a composition of Poisson-sampled Gaussian mechanisms with noise multiplier z.
All that a client learns of the others follows from these sums. The server sees single updates, adds the noise and is
trusted. Where pairs of clients share noise, z S is the effective noise of a client's update (`jaxfl.privacy.shared`),
and all clients take part: a server that sees every update finds no more than such sums of one client.

The relation is zero_out_client: the number of clients n, the rate q and the divisor are public and stay.

A fixed number of clients in each round is another mechanism, whose bound would be for one client exchanged for another.

References:
    H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
    2018, arXiv:1710.06963, Algorithm 1 with the estimator of fixed denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxfl.core import check
from jaxfl.core.calls import by_name
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.accountant import Account, Bound, Claim, Family
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon
from jaxfl.privacy.shared import Secrets
from jaxfl.privacy.statements import NO_NOISE, drawn

RELATION = "zero_out_client"
_SETTING = (
    "the other clients see the sums with their noise, and no single update, loss or metric: the server that adds the"
    " noise is trusted",
    "each client takes part in a round independently with the same probability, and who does stays secret",
    "what the sum is divided by is a public constant, and no weight depends on a client's data",
)


class UpdateRelease(NamedTuple):
    """Release of a server in every round: the sum of clipped updates, with noise."""

    sampler: str  # "poisson", or "fixed": a fixed number of clients
    participation_rate: float  # q, in (0, 1], probability that a client takes part in a round
    clip_norm: float | None  # S, L2 norm of a client's whole update; None: not clipped
    noise_multiplier: float  # z, standard deviation of the noise on the sum, over S
    secrets: Secrets | None = None  # of noise that pairs of clients share, z S being the effective one


class Spent(NamedTuple):
    """Releases of a server in some rounds, as plain numbers."""

    release: UpdateRelease
    num_rounds: int
    dp_delta: float


@by_name
def client_level_account(
    releases: UpdateRelease | Sequence[UpdateRelease], *, dp_delta: float, num_clients: int
) -> Account:
    """Account for whole clients: one proven bound, zero_out_client.

    Args:
        releases: of every round.
        dp_delta: in (0, 1).
        num_clients: of the run.

    Raises:
        ArgumentError: a number outside its range, or an unknown sampler.

    Guarantees:
        - epsilon is an upper bound within 0.1 % of dp-accounting's.
        - at participation rate 1 it is that of the Gaussian mechanism.
        - where nothing is clipped, no noise is added or a fixed number of clients takes part there is a reason and no
          epsilon.

    Examples:
        >>> release = UpdateRelease("poisson", 0.01, clip_norm=1.0, noise_multiplier=1.0)
        >>> account = client_level_account(release, dp_delta=1e-5, num_clients=5000)
        >>> round(account.epsilon(1000), 2), round(account.calibrate(1000, 2.0), 2)
        (1.83, 0.96)
    """
    check.at_least(1, num_clients=num_clients)
    dp_delta = verbs.number(dp_delta=dp_delta)
    check.open_unit(dp_delta=dp_delta)
    plans = dict.fromkeys(Spent(_checked(release), 0, dp_delta) for release in verbs.plain(releases))
    return Account(_CLIENTS, (Claim("proven", RELATION, tuple(plans)),), num_clients)


def _checked(release: UpdateRelease) -> UpdateRelease:
    """Refuse a release that cannot be accounted for."""
    check.one_of(("poisson", "fixed"), sampler=release.sampler)
    clip_norm = None if release.clip_norm is None else verbs.positive(clip_norm=release.clip_norm)
    rate = verbs.positive(participation_rate=release.participation_rate)
    check.probability(participation_rate=rate)
    noise = verbs.number(noise_multiplier=release.noise_multiplier)
    check.non_negative(noise_multiplier=noise)
    return UpdateRelease(release.sampler, rate, clip_norm, noise, release.secrets)


def _spent(plan: Spent, num_rounds: int, factor: float) -> Spent:
    """The server after some rounds, with a factor on its noise."""
    release = plan.release._replace(noise_multiplier=factor * plan.release.noise_multiplier)
    return plan._replace(release=release, num_rounds=num_rounds)


def _search(
    spent: Callable[[float], Spent], bound: str, relation: str, target_epsilon: float
) -> tuple[Callable[[float], float], float]:
    """(factor -> epsilon, a guess of the factor that meets the target)."""
    release, num_rounds, dp_delta = spent(1.0)
    guess = verbs.noise_guess(release.participation_rate, num_rounds, dp_delta, target_epsilon)
    return lambda factor: _CLIENTS.epsilon(spent(factor), bound, relation), guess / release.noise_multiplier


def _reason(spent: Spent, _bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    release = spent.release
    if spent.num_rounds == 0:
        return None
    if release.clip_norm is None:
        return "Updates are not clipped, so one client can change a sum by any amount, and noise protects nothing."
    if release.noise_multiplier == 0:
        return f"{NO_NOISE}, so the sums are not private."
    if release.sampler == "fixed" and release.participation_rate < 1:
        return (
            "A fixed number of clients takes part in each round, and the bound is for clients that each take part"
            " independently."
        )
    return None


def _cost(spent: Spent, _bound: str, _relation: str) -> Bound:
    """The epsilon of every client; `_reason` is None."""
    if spent.num_rounds == 0:
        return verbs.NOTHING
    rounds = SampledReleases(spent.release.participation_rate, spent.release.noise_multiplier, spent.num_rounds)
    return Bound(
        sampled_epsilon([rounds], spent.dp_delta)[0], "privacy loss distribution of rounds with Poisson participation"
    )


def _words(_all: Sequence[Spent], spent: Spent, _bound: str, _relation: str, _epsilon: Bound) -> dict[str, Any]:
    """Arguments of `statement`; every client has the same epsilon."""
    norm = spent.release.clip_norm
    clipped = None if norm is None else f"every client's whole update is clipped to the L2 norm {norm:g}"
    release = spent.release
    each = drawn("clients", release.sampler, release.participation_rate, release.noise_multiplier)
    mechanism = f"{spent.num_rounds} rounds, {each}"
    observer, setting, secrets = "all other clients, but not the server", _SETTING, release.secrets
    if secrets is not None:
        observer, known = secrets.with_server
        setting = (*known, _SETTING[-1])
    words = {"gradients": clipped, "setting": setting, "observer": observer}
    return {**words, "node_epsilons": (), "mechanism": mechanism}


_CLIENTS = Family(_spent, _reason, _cost, _words, lambda spent: 1, _search)
