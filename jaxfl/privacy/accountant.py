"""Accounting for all families of algorithms: epsilon, the least noise and the most releases of a budget, statements.

A family of algorithms says which curve its releases have under a neighboring relation: a Gaussian, a pair of
distributions on a grid (`jaxfl.privacy.dominating_pairs`), Renyi divergences, or pure bounds that add up. It brings a
`Family` and accounts: the releases of one node in a whole run, checked. Gossip, samples of clients, whole clients and
gradient tracking are such families. An epsilon never comes without its bound, its neighboring relation and its delta.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import scipy

from jaxfl.core import ArgumentError, check
from jaxfl.privacy.statements import RELATIONS, Statement, statement

UNCLIPPED = "Gradients are not clipped, so one sample can change a release by any amount, and noise protects nothing."
SILENT = "No noise is added, so the releases are not private."
_PRECISION = 2e-4  # relative, of a noise
_MAX_DOUBLINGS = 100
_DIGITS = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)


class Bound(NamedTuple):
    """An epsilon and where it comes from."""

    dp_epsilon: Any  # of one node, or (n,) of nodes that are one account
    accountant: str
    dp_delta: float | None = None  # where it differs from the account's
    notes: tuple[str, ...] | None = None  # its assumptions, in place of the account's
    reason: str | None = None  # why it is infinite


NOTHING = Bound(0.0, "nothing was released")


class Family(NamedTuple):
    """Facts of one family of algorithms that its accounting needs, as functions of an account.

    Attributes:
        reason: (account, bound) -> why there is no epsilon; None where there is one, or where nothing was released.
        cost: (account, bound, relation) -> its `Bound`, where `reason` gives None.
        words: (accounts, account, bound, relation, found) -> arguments of `jaxfl.privacy.statements.statement`:
            "gradients", "setting" and others that depend on the family. `account` is the one of `accounts` on
            which the statement is made.
        records: account -> samples, or clients, that it protects at a node, on average; 0: unknown.
    """

    reason: Callable[[Any, str], str | None]
    cost: Callable[[Any, str, str], Bound]
    words: Callable[[Sequence[Any], Any, str, str, Bound], dict[str, Any]]
    records: Callable[[Any], float]


def epsilon(family: Family, account: Any, bound: str, relation: str) -> float:
    """epsilon of an account, of its worst node; infinite where there is none."""
    if family.reason(account, bound) is not None:
        return math.inf
    return float(np.max(family.cost(account, bound, relation).dp_epsilon))


def statements(
    family: Family, accounts: Sequence[Any], claims: Iterable[tuple[str, str]], num_nodes: int
) -> list[Statement]:
    """List a statement for each claim, on the worst node, or on the first that has no epsilon.

    Args:
        family: of the accounts.
        accounts: of each node, or of the nodes of several runs.
        claims: (bound, relation) of each.
        num_nodes: n of one run.

    Raises:
        ArgumentError: no node.

    Guarantees:
        - dp_epsilon is that of the worst node, node_epsilons those of all, dp_delta the largest.
    """
    check.at_least(1, num_nodes=num_nodes)
    return [_stated(family, accounts, bound, relation, num_nodes) for bound, relation in claims]


def _stated(family: Family, accounts: Sequence[Any], bound: str, relation: str, num_nodes: int) -> Statement:
    found, each = Bound(math.inf, "none"), []
    account, reason = next(
        ((account, why) for account in accounts if (why := family.reason(account, bound))), (None, None)
    )
    if account is None:
        each = [family.cost(account, bound, relation) for account in accounts]
        account, found = max(zip(accounts, each, strict=True), key=lambda pair: float(np.max(pair[1].dp_epsilon)))
        reason = found.reason
    arguments = {
        "bound": bound,
        "dp_delta": max(account.dp_delta for account in accounts) if found.dp_delta is None else found.dp_delta,
        "notes": found.notes or (),
        "num_records": num_nodes * float(np.mean([family.records(one) for one in accounts])),
        "node_epsilons": [float(value) for one in each for value in np.atleast_1d(one.dp_epsilon)],
    }
    return statement(
        relation=relation,
        dp_epsilon=None if reason else float(np.max(found.dp_epsilon)),
        accountant=found.accountant,
        nodes=num_nodes,
        reason=reason,
        **{**arguments, **family.words(accounts, account, bound, relation, found)},
    )


def chosen_relation(known: Sequence[str], asked: str | None, whose: str, public: str) -> str:
    """The relation that is asked for, or the first that a bound is stated for.

    Args:
        known: relations that the bound is stated for.
        asked: None for the first of them.
        whose: the bound, in words.
        public: what neighboring runs have in common, in words.

    Raises:
        ArgumentError: a relation that the bound is not stated for.
    """
    if asked is None:
        return known[0]
    check.one_of(tuple(RELATIONS), neighboring_relation=asked)
    if asked not in known:
        remedy = "Choose another relation or bound."
        if asked == "add_or_remove_one":
            remedy = f"{public} are public here, so that a missing sample counts as a gradient of 0: pass zero_out."
        requirement = f"must be {' or '.join(known)} for {whose}"
        raise ArgumentError("neighboring_relation", requirement, f"got {asked}", remedy)
    return asked


def require_any(releases: Sequence[Any]) -> None:
    """Refuse no releases."""
    if not len(releases):
        raise ArgumentError("releases", "must hold one release a node", "got none", "Pass a non-empty sequence.")


def kinds(releases: Sequence[Any]) -> set[Any]:
    """Each kind of release once; numbers of NumPy and JAX become Python's, which can be hashed."""
    require_any(releases)
    found = set()
    for release in releases:
        arrays = {name: value for name, value in release._asdict().items() if hasattr(value, "dtype")}
        found.add(release._replace(**{name: number(**{name: value}) for name, value in arrays.items()}))
    return found


def number(**argument: Any) -> float:
    """The argument as a Python float, which can be hashed; NumPy's and JAX's numbers are taken too."""
    ((name, value),) = argument.items()
    check.scalar(**argument)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(name, "must be a single number", f"got {value!r}", "Pass a float.") from None


def positive(**argument: Any) -> float:
    """A `number` above 0."""
    check.positive(**{name: number(**{name: value}) for name, value in argument.items()})
    return number(**argument)


def noise_guess(sampling_rate: float, num_releases: int, dp_delta: float, target_epsilon: float) -> float:
    """A noise multiplier of the right order of magnitude for a budget of Gaussian releases."""
    return max(sampling_rate * math.sqrt(2 * num_releases * math.log(1.25 / dp_delta)) / target_epsilon, 0.4)


def calibrate(
    epsilons_of: Sequence[Callable[[float], float]], target_epsilon: float, guesses: Sequence[float]
) -> float:
    """Smallest noise with which no node's epsilon is above the target, to 0.1 %.

    Args:
        epsilons_of: functions noise > 0 -> epsilon, one per node or kind of node; as far as known, nodes that need most
            noise come first.
        target_epsilon: above 0.
        guesses: as for `smallest_noise`, one each.
    """
    noise = 0.0
    for epsilon_of, guess in zip(epsilons_of, guesses, strict=True):
        if noise == 0 or epsilon_of(noise) > target_epsilon:
            noise = max(noise, smallest_noise(epsilon_of, target_epsilon, guess))
    return noise


def smallest_noise(epsilon_of: Callable[[float], float], target_epsilon: float, guess: float) -> float:
    """Smallest noise whose epsilon is at most the target, to 0.1 % and never below it, in six digits.

    Args:
        epsilon_of: noise > 0 -> epsilon, falling, toward 0 for large noise.
        target_epsilon: above 0.
        guess: above 0, of the right order of magnitude.

    Raises:
        ArgumentError: when no noise meets the target, or all noise does.

    Guarantees:
        - never overspends: epsilon_of(result) <= target_epsilon.
        - tight: 0.1 % less noise overspends.

    Examples:
        >>> round(smallest_noise(lambda noise: 6 / noise, 3.0, guess=1.0), 2)
        2.0
    """

    def excess(log_noise: float) -> float:
        found = epsilon_of(math.exp(log_noise))
        return math.log(min(max(found, 1e-9 * target_epsilon), 1e9 * target_epsilon) / target_epsilon)

    low = high = math.log(guess)
    value = excess(low)
    toward = math.log(2) if value > 0 else -math.log(2)
    for _ in range(_MAX_DOUBLINGS):
        if value * toward <= 0:
            break
        low, high = (high, high + toward) if toward > 0 else (low + toward, low)
        value = excess(high if toward > 0 else low)
    else:
        found = f"epsilon is {epsilon_of(math.exp(high)):g} at noise {math.exp(high):g}"
        if toward < 0:
            requirement = "must need noise: dp_delta alone allows to leave it out"
            raise ArgumentError("target_epsilon", requirement, found, "Pass a smaller dp_delta.")
        raise ArgumentError("target_epsilon", "must be met by some noise", found, "Pass a larger dp_delta.")
    log_noise = cast(float, scipy.optimize.brentq(excess, low, high, xtol=_PRECISION / 2))
    noise = in_digits(math.exp(log_noise))
    while epsilon_of(noise) > target_epsilon:  # the root is good to xtol on either side
        noise = in_digits(noise * (1 + _PRECISION / 2))
    return noise


def in_digits(noise: float) -> float:
    """Round a noise up to six digits: it enters a run's key, and machines may find other last bits.

    Examples:
        >>> in_digits(1.23456700001), in_digits(0.5)
        (1.23457, 0.5)
    """
    return float(_DIGITS.create_decimal_from_float(noise))


def most_rounds(epsilons_of: Sequence[Callable[[int], float]], target_epsilon: float, limit: int) -> int:
    """Most rounds in 0 ... limit with which no node's epsilon is above the target; 0 when one round is too many.

    Args:
        epsilons_of: functions number of rounds >= 1 -> epsilon, never falling, one per node or kind of node; as far as
            known, nodes whose budget pays for the fewest rounds come first.
        target_epsilon: above 0.
        limit: at least 0.

    Examples:
        >>> most_rounds([lambda rounds: 0.5 * rounds, lambda rounds: 0.6 * rounds], 3.2, limit=100)
        5
    """
    most = limit
    for index, epsilon_of in enumerate(epsilons_of):
        enough, too_many, step = 0, most + 1, 1
        while enough + 1 < too_many:
            # The first node is searched from below: few rounds are much cheaper to account for than many. Others are
            # searched from the rounds that the earlier ones are paid for.
            if index == 0 and too_many > most:
                rounds = min(step, most)
            elif index and enough == 0:
                rounds = max(1, too_many - step)
            else:
                rounds = (enough + too_many) // 2
            step *= 2
            if epsilon_of(rounds) <= target_epsilon:
                enough = rounds
            else:
                too_many = rounds
        most = enough
    return most
