"""One account for all families of algorithms: epsilon, the least noise and the most rounds of a budget, statements.

A family of algorithms says which curve its releases have under a neighboring relation: a Gaussian, a pair of
distributions on a grid (`jaxfl.privacy.dominating_pairs`), Renyi divergences, or pure bounds that add up. It brings a
`Family`, and plans: the checked releases of each node. Gossip, samples of clients, whole clients and gradient tracking
are such families. An `Account` is built once of a run's plans, and has the four verbs. An epsilon never comes without
its bound, its neighboring relation and its delta.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import scipy

from jaxfl.core import ArgumentError, check
from jaxfl.privacy.statements import NO_NOISE, RELATIONS, Statement, statement

UNCLIPPED = "Gradients are not clipped, so one sample can change a release by any amount, and noise protects nothing."
SILENT = f"{NO_NOISE}, so the releases are not private."
_REMEDIES = {UNCLIPPED: "Clip, or choose another bound.", SILENT: "Pass releases with noise, 1 say."}
_PRECISION = 2e-4  # relative, of a noise
_MAX_DOUBLINGS = 100
_DIGITS = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)
_Release = TypeVar("_Release", bound=Any)
_T = TypeVar("_T")


class Bound(NamedTuple):
    """An epsilon and where it comes from."""

    dp_epsilon: Any  # of one node, or (n,) of nodes that are one account
    accountant: str
    dp_delta: float | None = None  # where it differs from the account's
    notes: tuple[str, ...] | None = None  # its assumptions, in place of the account's
    reason: str | None = None  # why it is infinite


NOTHING = Bound(0.0, "nothing was released")


class Family(NamedTuple):
    """Facts of one family of algorithms that its accounting needs.

    A plan has the checked releases of one node. What the node has spent follows from it: the plan after some rounds,
    with a factor on all noise.

    Attributes:
        spent: (plan, number of rounds, factor on all noise) -> what was spent, the argument of the others.
        reason: (spent, bound) -> why there is no epsilon; None where there is one, or where nothing was released.
        cost: (spent, bound, relation) -> its `Bound`, where `reason` gives None.
        words: (spent of each node, spent, bound, relation, its `Bound`) -> arguments of
            `jaxfl.privacy.statements.statement`: "gradients", "setting" and others that depend on the family. The
            statement is made on the node of `spent`.
        records: spent -> samples, or clients, that it protects at a node, on average; 0: unknown.
        search: (factor -> spent, bound, relation, target) -> (factor -> epsilon, a guess of the factor that meets the
            target); refuses a target that no noise meets.
    """

    spent: Callable[[Any, int, float], Any]
    reason: Callable[[Any, str], str | None]
    cost: Callable[[Any, str, str], Bound]
    words: Callable[[Sequence[Any], Any, str, str, Bound], dict[str, Any]]
    records: Callable[[Any], float]
    search: Callable[[Callable[[float], Any], str, str, float], tuple[Callable[[float], float], float]]

    def epsilon(self, spent: Any, bound: str, relation: str) -> float:
        """epsilon of a node; infinite where there is none."""
        if self.reason(spent, bound) is not None:
            return math.inf
        return float(np.max(self.cost(spent, bound, relation).dp_epsilon))


class Claim(NamedTuple):
    """A bound under a neighboring relation, and the plans that it is stated for."""

    bound: str  # "published", "reconstructed" or "proven"
    relation: str
    plans: Sequence[Any]  # of each node, or of the nodes of several runs


class Account(NamedTuple):
    """Releases of a run's nodes, which can be accounted for.

    `jaxfl.privacy.account(learner, ...)` builds it of a learner, and `jaxfl.privacy.gossip`, `.clients` and `.tracking`
    of releases by hand. All verbs speak of the worst node. Their arguments:

    - num_rounds: at least 0. Nothing is spent in 0 rounds.
    - bound: "proven", or "published", which stands for the reconstructed one where a paper's could not be obtained. Of
      several claims at different deltas the last one counts, at a delta above 0.
    - neighboring_relation: default: the first that the bound is stated for. Others are refused.

    Examples:
        >>> from jaxfl.privacy import PRIVSGP, Release, gossip
        >>> release = Release("mini_batch", "poisson", 64, 3125, clip_norm=1.0, noise_std=1.764 / 64)
        >>> account = gossip.account(PRIVSGP, [release] * 16, dp_delta=1e-5)
        >>> round(account.epsilon(3120), 2), account.most_rounds(3.0, limit=3000)
        (2.99, 3000)
        >>> round(account.calibrate(3120, 1.5), 2)
        1.74
    """

    family: Family
    claims: tuple[Claim, ...]
    num_nodes: int  # of one run

    def epsilon(self, num_rounds: int, bound: str = "proven", neighboring_relation: str | None = None) -> float:
        """epsilon of the worst node under one neighboring relation; infinite where there is none.

        Guarantees:
            - more rounds or less noise never lower it.
        """
        check.at_least(0, num_rounds=num_rounds)
        claim = self._claim(bound, neighboring_relation)
        return max(self._epsilon(claim, plan, num_rounds) for plan in self._kinds(claim))

    def calibrate(
        self, num_rounds: int, target_epsilon: float, bound: str = "proven", neighboring_relation: str | None = None
    ) -> float:
        """Smallest factor on all noise with which no node spends more than a budget, to 0.1 %, in six digits.

        Of releases whose noise is 1 it is the noise. It is 0 for 0 rounds.

        Raises:
            ArgumentError: no noise gives this bound, or meets the target, or all noise does.

        Guarantees:
            - never overspends: epsilon is at most target_epsilon at every node.
            - tight: 0.1 % less noise overspends.
        """
        check.at_least(0, num_rounds=num_rounds)
        target_epsilon, claim = positive(target_epsilon=target_epsilon), self._claim(bound, neighboring_relation)
        factor, plans = 0.0, self._kinds(claim) if num_rounds else []
        for plan in plans:
            reason = self.family.reason(self.family.spent(plan, num_rounds, 1.0), claim.bound)
            if reason is not None:
                remedy = _REMEDIES.get(reason, "Take another bound, or other releases.")
                raise ArgumentError("bound", f"must exist to be {bound} for these releases", reason.rstrip("."), remedy)

            def spent(factor: float, plan: Any = plan) -> Any:
                return self.family.spent(plan, num_rounds, factor)

            epsilon_of, guess = self.family.search(spent, claim.bound, claim.relation, target_epsilon)
            if factor == 0 or epsilon_of(factor) > target_epsilon:
                factor = max(factor, smallest_noise(epsilon_of, target_epsilon, guess))
        # A search over positive definite matrices (`tracking.joint_bound`) may end elsewhere at other noise.
        while any(self._epsilon(claim, plan, num_rounds, factor) > target_epsilon for plan in plans):
            factor *= 1 + _PRECISION
        return factor

    def most_rounds(
        self, target_epsilon: float, limit: int, bound: str = "proven", neighboring_relation: str | None = None
    ) -> int:
        """Most rounds, 0 ... limit, that a budget pays for at every node.

        Returns:
            Rounds; 0 where the budget does not pay for one, or where there is no such bound.

        Guarantees:
            - one more round overspends at some node, unless the limit is reached.
        """
        check.at_least(0, limit=limit)
        target_epsilon, claim = positive(target_epsilon=target_epsilon), self._claim(bound, neighboring_relation)
        costs = [lambda rounds, plan=plan: self._epsilon(claim, plan, rounds) for plan in self._kinds(claim)]
        return most_rounds(costs, target_epsilon, limit)

    def statements(self, num_rounds: int) -> list[Statement]:
        """List the privacy statements on rounds that really ran: the published one where there is one, then the proven.

        Guarantees:
            - dp_epsilon is that of the worst node, node_epsilons those of all, dp_delta the largest.
            - where nothing is clipped, no noise is added or nothing is published there is a reason and no epsilon.
        """
        check.at_least(0, num_rounds=num_rounds)
        return [self._stated(claim, num_rounds) for claim in self.claims]

    def _epsilon(self, claim: Claim, plan: Any, num_rounds: int, factor: float = 1.0) -> float:
        return self.family.epsilon(self.family.spent(plan, num_rounds, factor), claim.bound, claim.relation)

    def _kinds(self, claim: Claim) -> Sequence[Any]:
        """Each kind of plan once, of small nodes first. They mostly spend most; with a table of batches not always."""
        if len(claim.plans) == 1:
            return claim.plans
        return sorted(dict.fromkeys(claim.plans), key=lambda plan: self.family.records(self.family.spent(plan, 0, 1.0)))

    def _claim(self, bound: str, relation: str | None) -> Claim:
        """The claim on a bound under a relation; refuse a relation that the bound is not stated for."""
        check.one_of(("published", "proven"), bound=bound)
        claims = [claim for claim in self.claims if (claim.bound == "proven") == (bound == "proven")]
        if not claims:
            raise ArgumentError("bound", "must be stated for these releases", f"got {bound}", "Take the other one.")
        known = tuple(dict.fromkeys(claim.relation for claim in claims))
        relation = known[0] if relation is None else relation
        check.one_of(tuple(RELATIONS), neighboring_relation=relation)
        if relation not in known:
            remedy = "Choose another relation or bound."
            if relation == "add_or_remove_one":
                remedy = "Sizes and batches are public, so that a missing sample counts as a gradient of 0: zero_out."
            requirement = f"must be {' or '.join(known)} for the {bound} bound"
            raise ArgumentError("neighboring_relation", requirement, f"got {relation}", remedy)
        return [claim for claim in claims if claim.relation == relation][-1]

    def _stated(self, claim: Claim, num_rounds: int) -> Statement:
        """The statement on the worst node, or on the first that has no epsilon."""
        bound, relation = claim.bound, claim.relation
        of_nodes = once(lambda plan: self.family.spent(plan, num_rounds, 1.0), claim.plans)
        cost, costs, kinds = Bound(math.inf, "none"), {}, {id(one): one for one in of_nodes}.values()
        spent, reason = next(((one, why) for one in kinds if (why := self.family.reason(one, bound))), (None, None))
        if spent is None:
            costs = {id(one): self.family.cost(one, bound, relation) for one in kinds}
            spent = max(kinds, key=lambda one: float(np.max(costs[id(one)].dp_epsilon)))
            cost = costs[id(spent)]
            reason = cost.reason
        lists = {which: np.atleast_1d(each.dp_epsilon).tolist() for which, each in costs.items()}
        arguments = {
            "bound": bound,
            "dp_delta": max(one.dp_delta for one in of_nodes) if cost.dp_delta is None else cost.dp_delta,
            "notes": cost.notes or (),
            "num_records": self.num_nodes * float(np.mean(once(self.family.records, of_nodes))),
            "node_epsilons": [epsilon for one in of_nodes for epsilon in lists.get(id(one), ())],
        }
        return statement(
            relation=relation,
            dp_epsilon=None if reason else float(np.max(cost.dp_epsilon)),
            accountant=cost.accountant,
            nodes=self.num_nodes,
            reason=reason,
            **{**arguments, **self.family.words(of_nodes, spent, bound, relation, cost)},
        )


def plain(releases: _Release | Sequence[_Release]) -> list[_Release]:
    """List the releases, one or several; numbers of NumPy and JAX become Python's, which can be hashed."""
    listed: list[Any] = [releases] if hasattr(releases, "_fields") else list(cast(Sequence[Any], releases))
    if not listed:
        raise ArgumentError("releases", "must hold one release a node", "got none", "Pass a non-empty sequence.")

    def with_numbers(release: _Release) -> _Release:
        arrays = {name: value for name, value in release._asdict().items() if hasattr(value, "dtype")}
        return release._replace(**{name: number(**{name: value}) for name, value in arrays.items()})

    return once(with_numbers, listed)


def once(call: Callable[..., _T], *columns: Sequence[Any]) -> list[_T]:
    """The call of each row of the columns, once for the same objects: runs of many seeds share most releases."""
    rows = [*zip(*columns, strict=True)]
    keys = [tuple(map(id, row)) for row in rows]
    results = {key: call(*row) for key, row in dict(zip(keys, rows, strict=True)).items()}
    return [results[key] for key in keys]


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
