"""Privacy of whole clients: clipped updates of clients that take part at random, and noise on their sum.

In every round each client takes part independently with probability q. Its whole update is clipped to the L2 norm S,
the updates of those that take part are summed, and the sum gets Gaussian noise of standard deviation z S before it is
divided by public constants. Counting a client's updates as zero moves the sum by at most S in rounds where it takes
part, and not at all in others: the run is a composition of Poisson-sampled Gaussian mechanisms with noise multiplier z.
All that a client learns of the others follows from these sums. The server sees single updates, adds the noise and is
trusted.

The relation is zero_out_client: the number of clients n, the rate q and the divisor are public and stay.

A fixed number of clients in each round is another mechanism, whose bound would be for one client exchanged for another.

References:
    H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
    2018, arXiv:1710.06963, Algorithm 1 with the estimator of fixed denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxfl.core import check
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.accountant import Bound, Family
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon
from jaxfl.privacy.statements import Statement, drawn

RELATION = "zero_out_client"
_SETTING = (
    "it holds against whoever sees the sums with their noise, and no single update, loss or metric: the server that"
    " adds the noise is trusted",
    "each client takes part in a round independently with the same probability, and who does stays secret",
    "what the sum is divided by is a public constant, and no weight depends on a client's data",
)


class UpdateRelease(NamedTuple):
    """Release of a server in every round: the sum of clipped updates, with noise."""

    sampler: str  # "poisson", or "fixed": a fixed number of clients
    participation_rate: float  # q, in (0, 1], probability that a client takes part in a round
    clip_norm: float | None  # S, L2 norm of a client's whole update; None: not clipped
    noise_multiplier: float  # z, standard deviation of the noise on the sum, over S


class Account(NamedTuple):
    """Arguments that can be accounted for, as plain numbers."""

    release: UpdateRelease
    num_rounds: int
    dp_delta: float


def client_level_epsilon(
    num_rounds: int, *, participation_rate: float, noise_multiplier: float, dp_delta: float
) -> float:
    """Epsilon of every client after some rounds of Poisson participation; infinite without noise.

    Args:
        num_rounds: K, at least 0.
        participation_rate: q, in (0, 1].
        noise_multiplier: z, at least 0.
        dp_delta: in (0, 1).

    Returns:
        dp_epsilon, neighboring relation "zero_out_client".

    Raises:
        ArgumentError: a number outside its range.

    Guarantees:
        - it is an upper bound within 0.1 % of dp-accounting's.
        - at participation rate 1 it is that of the Gaussian mechanism.

    Examples:
        >>> round(client_level_epsilon(1000, participation_rate=0.01, noise_multiplier=1.0, dp_delta=1e-5), 2)
        1.83
    """
    account = _account(UpdateRelease("poisson", participation_rate, 1.0, noise_multiplier), num_rounds, dp_delta)
    return verbs.epsilon(_CLIENTS, account, "proven", RELATION)


def client_noise_multiplier(
    target_epsilon: float, num_rounds: int, *, participation_rate: float, dp_delta: float
) -> float:
    """Smallest noise multiplier that meets a budget, to 0.1 %; 0 for 0 rounds.

    Args:
        target_epsilon: positive.
        num_rounds, participation_rate, dp_delta: as for `client_level_epsilon`.

    Raises:
        ArgumentError: a number outside its range.

    Guarantees:
        - never overspends, and 0.1 % less noise does.

    Examples:
        >>> round(client_noise_multiplier(2.0, 1000, participation_rate=0.01, dp_delta=1e-5), 2)
        0.96
    """
    target_epsilon = verbs.positive(target_epsilon=target_epsilon)
    account = _account(UpdateRelease("poisson", participation_rate, 1.0, 1.0), num_rounds, dp_delta)
    if num_rounds == 0:
        return 0.0

    def epsilon_of(noise: float) -> float:
        noisy = account._replace(release=account.release._replace(noise_multiplier=noise))
        return verbs.epsilon(_CLIENTS, noisy, "proven", RELATION)

    guess = verbs.noise_guess(participation_rate, num_rounds, account.dp_delta, target_epsilon)
    return verbs.calibrate([epsilon_of], target_epsilon, [guess])


def client_level_statements(
    release: UpdateRelease, num_rounds: int, *, num_clients: int, dp_delta: float
) -> list[Statement]:
    """List the privacy statements on whole clients: one proven statement, or the reason why there is none.

    Args:
        release: of every round.
        num_rounds: rounds that really ran, at least 0.
        num_clients: of the run.
        dp_delta: in (0, 1).

    Raises:
        ArgumentError: a number outside its range, or an unknown sampler.

    Guarantees:
        - where nothing is clipped, no noise is added or a fixed number of clients takes part there is a reason and no
          epsilon.

    Examples:
        >>> release = UpdateRelease("poisson", 0.01, clip_norm=1.0, noise_multiplier=1.0)
        >>> (stated,) = client_level_statements(release, 1000, num_clients=5000, dp_delta=1e-5)
        >>> stated.neighboring_relation, round(stated.dp_epsilon, 2)
        ('zero_out_client', 1.83)
    """
    check.at_least(1, num_clients=num_clients)
    return verbs.statements(_CLIENTS, [_account(release, num_rounds, dp_delta)], [("proven", RELATION)], num_clients)


def _account(release: UpdateRelease, num_rounds: int, dp_delta: Any) -> Account:
    """Refuse what cannot be accounted for."""
    check.one_of(("poisson", "fixed"), sampler=release.sampler)
    check.at_least(0, num_rounds=num_rounds)
    clip_norm = None if release.clip_norm is None else verbs.positive(clip_norm=release.clip_norm)
    rate = verbs.positive(participation_rate=release.participation_rate)
    check.probability(participation_rate=rate)
    noise, dp_delta = verbs.number(noise_multiplier=release.noise_multiplier), verbs.number(dp_delta=dp_delta)
    check.non_negative(noise_multiplier=noise)
    check.open_unit(dp_delta=dp_delta)
    return Account(UpdateRelease(release.sampler, rate, clip_norm, noise), num_rounds, dp_delta)


def _reason(account: Account, _bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    release = account.release
    if account.num_rounds == 0:
        return None
    if release.clip_norm is None:
        return "Updates are not clipped, so one client can change a sum by any amount, and noise protects nothing."
    if release.noise_multiplier == 0:
        return "No noise is added, so the sums are not private."
    if release.sampler == "fixed" and release.participation_rate < 1:
        return (
            "A fixed number of clients takes part in each round, and the bound is for clients that each take part"
            " independently."
        )
    return None


def _cost(account: Account, _bound: str, _relation: str) -> Bound:
    """The epsilon of every client; `_reason` is None."""
    if account.num_rounds == 0:
        return verbs.NOTHING
    rounds = SampledReleases(account.release.participation_rate, account.release.noise_multiplier, account.num_rounds)
    return Bound(
        sampled_epsilon([rounds], account.dp_delta)[0], "privacy loss distribution of rounds with Poisson participation"
    )


def _words(
    _accounts: Sequence[Account], account: Account, _bound: str, _relation: str, _found: Bound
) -> dict[str, Any]:
    """Arguments of `statement`; every client has the same epsilon."""
    norm = account.release.clip_norm
    clipped = None if norm is None else f"every client's whole update is clipped to the L2 norm {norm:g}"
    release = account.release
    each = drawn("clients", release.sampler, release.participation_rate, release.noise_multiplier)
    mechanism = f"{account.num_rounds} rounds, {each}"
    return {"gradients": clipped, "setting": _SETTING, "node_epsilons": (), "mechanism": mechanism}


_CLIENTS = Family(_reason, _cost, _words, lambda account: 1)
