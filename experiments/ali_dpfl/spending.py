"""Privacy spending in experiments.ali_dpfl: iterations and rounds of a budget, statements for a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfl import privacy
from jaxfl.core import Algorithm, ArgumentError
from jaxfl.frame import override
from jaxfl.privacy import Account, clients
from jaxfl.privacy.statements import asked_first

from .options import ALI, FIXED, PRIVATE_STEPS, UPDATES, Configuration

MOST_ITERATIONS = 10**5  # up to which the iterations of a budget are searched


def _learner(config: Configuration, **changes: Any) -> Algorithm:
    """The learner of a configuration whose open numbers count as 1."""
    learning, budget = config.learning, config.budget
    numbers = {"rounds": learning.rounds, "max_iterations": budget.max_iterations}
    numbers |= {
        "noise_multiplier": budget.noise_multiplier,
        "update_noise_multiplier": learning.update_noise_multiplier,
    }
    ones = {name: 1 for name, value in numbers.items() if isinstance(value, str)}
    return override(config, {**ones, **changes}).algorithm()


def _runs(config: Configuration, sizes: Sequence[int]) -> np.ndarray:
    """(seeds, nodes): samples of each client, from those of one seed after the other."""
    return np.reshape(sizes, (-1, config.clients.nodes))


def account_of(
    config: Configuration, sizes: Sequence[int], num_estimates: int = 0, which: slice = slice(None)
) -> Account:
    """Account for the local iterations of each client, or of some, over all seeds, beside so many estimates.

    Methods without private steps count as one of a fixed tau.
    """
    learning, budget = config.learning, config.budget
    changes = {} if learning.method in PRIVATE_STEPS else {"method": FIXED}
    each = privacy.releases_of(_learner(config, **changes), _runs(config, sizes)).each
    if not num_estimates:
        none = {"estimates": "none", "estimate_batch_size": 0, "estimate_noise_multiplier": 0.0}
        each = [one._replace(**none) for one in each]
    return clients.account(each[which], num_estimates=num_estimates, dp_delta=budget.dp_delta)


def settled(config: Configuration, sizes: Sequence[int]) -> Configuration:
    """The configuration with rounds, iterations, noise and evaluations as numbers; sizes of all clients and seeds."""
    config = _with_noise(config, sizes)
    learning, budget = config.learning, config.budget
    rounds, iterations, noise = learning.rounds, budget.max_iterations, learning.update_noise_multiplier
    price = _iterations(config, sizes, 0) if iterations == "auto" else iterations  # R_c
    if rounds == "auto":
        if learning.round_ratio * price >= 2**31:
            found, remedy = f"got {learning.round_ratio:g} for {price} iterations", "Pass a smaller one."
            raise ArgumentError("round_ratio", "must give fewer than 2^31 rounds", found, remedy)
        rounds = max(1, math.ceil(round(learning.round_ratio * price, 9)))  # 0.7 times 10 is 7
    if iterations == "auto":
        pays_estimates = learning.method == ALI and learning.constants == "private"
        iterations = _iterations(config, sizes, rounds) if pays_estimates else price
        # Updates spend a budget of their own, which their noise is calibrated to.
        iterations = rounds * learning.local_steps if learning.method == UPDATES else iterations
    if learning.method == ALI and learning.constants == "private" and budget.max_iterations != "auto":
        _refuse_overspent(config, sizes, rounds, iterations)
    if learning.method == UPDATES and noise == "calibrated":
        account = privacy.account(_learner(config), _runs(config, sizes), dp_delta=budget.dp_delta)
        noise = account.calibrate(min(rounds, -(-iterations // learning.local_steps)), budget.target_epsilon)
    every = config.run.evaluate_every or max(1, rounds // 20)
    numbers = {"rounds": rounds, "max_iterations": iterations, "update_noise_multiplier": noise}
    return override(config, {**numbers, "evaluate_every": every})


def _with_noise(config: Configuration, sizes: Sequence[int]) -> Configuration:
    """The configuration with the least noise on iterations that meets the budget, where it is asked for.

    Clients have one noise where they share it, or have equally many samples, to within the one that an even deal leaves
    over, and each its own elsewhere. Sizes are public, and so is which of the two holds.
    """
    learning, budget = config.learning, config.budget
    if budget.client_noise:
        return override(config, {"noise_multiplier": max(budget.client_noise)})
    if budget.noise_multiplier != "calibrated":
        return config
    if learning.method not in PRIVATE_STEPS:
        return override(config, {"noise_multiplier": 0.0})  # which counts nowhere
    if learning.rounds == "auto":
        found, remedy = "got auto, which follows from the noise", "Pass a number, or a number for noise_multiplier."
        raise ArgumentError("rounds", "must be a number where noise is calibrated", found, remedy)
    private = learning.method == ALI and learning.constants == "private"
    # Estimates without noise have no epsilon: the iterations beside them get the noise that they need by themselves.
    estimates = learning.rounds * private
    held, target = _held(config), budget.target_epsilon
    estimates_cost = account_of(config, sizes, estimates).epsilon(0, *held)
    if private and estimates_cost >= target:
        requirement = f"must leave something of target_epsilon, {target:g}, to the iterations"
        found = f"got {learning.constants_noise:g}, with which {estimates} estimates only cost {estimates_cost:.4g}"
        raise ArgumentError("constants_noise", requirement, found, "Pass more, or fewer rounds.")
    assert not isinstance(budget.max_iterations, str)
    kinds = config.clients.nodes if max(sizes) - min(sizes) > 1 and not config.shares_noise else 1
    accounts = [account_of(config, sizes, estimates, slice(i, None, kinds)) for i in range(kinds)]
    noise = [account.calibrate(budget.max_iterations, target, *held) for account in accounts]
    return override(config, {"noise_multiplier": max(noise), "client_noise": tuple(noise) if kinds > 1 else ()})


def _held(config: Configuration) -> tuple[str, str | None]:
    """Bound and neighboring relation that hold the budget."""
    return config.budget.bound, config.budget.neighboring_relation if config.budget.bound == "proven" else None


def _iterations(config: Configuration, sizes: Sequence[int], num_estimates: int) -> int:
    """Local iterations that the budget pays for beside this many estimates; a budget for none is refused."""
    budget = config.budget
    samples = sizes if budget.accounted_samples is None else [budget.accounted_samples] * len(sizes)
    account = account_of(config, samples, num_estimates)
    most = account.most_rounds(budget.target_epsilon, MOST_ITERATIONS, *_held(config))
    if most < 1:
        estimates = f" beside {num_estimates} private estimates" if num_estimates else ""
        found = f"got {budget.target_epsilon:g}, which pays for none ({budget.bound} bound)"
        remedy = "Pass a larger budget, or more noise."
        raise ArgumentError("target_epsilon", f"must pay for one local iteration{estimates}", found, remedy)
    return most


def _refuse_overspent(config: Configuration, sizes: Sequence[int], rounds: int, iterations: int) -> None:
    """Refuse estimates that overspend the budget beside iterations that it pays for."""
    target = config.budget.target_epsilon

    def cost(estimates: int) -> float:
        return account_of(config, sizes, estimates).epsilon(iterations, *_held(config))

    # No budget can pay for more iterations than the search allows; their price takes minutes by itself.
    if iterations > MOST_ITERATIONS or cost(0) > target:
        return
    both = cost(rounds)
    if both > target:
        requirement = f"must leave {rounds} estimates within target_epsilon, {target:g}"
        found = f"got {config.learning.constants_noise:g}, with which they and {iterations} iterations cost {both:.4g}"
        raise ArgumentError("constants_noise", requirement, found, "Pass more, or fewer max_iterations.")


def rounds_of(config: Configuration) -> int:
    """Rounds in which a fixed tau spends all iterations, at most all rounds; the configuration is settled."""
    learning, most = config.learning, config.budget.max_iterations
    assert not isinstance(learning.rounds, str)
    assert not isinstance(most, str)
    return learning.rounds if learning.method == ALI else min(learning.rounds, -(-most // learning.local_steps))


def released(config: Configuration) -> tuple[str, ...]:
    """Totals of a run that statements depend on."""
    names = ("local_iterations", "estimate_releases") if config.learning.method == ALI else ("local_iterations",)
    return names if config.learning.method in PRIVATE_STEPS else ()


def asked_of(request: Configuration) -> tuple[str, str | None] | None:
    """Bound and relation by which target_epsilon decides iterations or noise; None where it decides nothing."""
    budget, learning = request.budget, request.learning
    if learning.method == UPDATES:
        return ("proven", None) if learning.update_noise_multiplier == "calibrated" else None
    if budget.max_iterations != "auto" and budget.noise_multiplier != "calibrated":
        return None
    return budget.bound, budget.neighboring_relation if budget.bound == "proven" else None


def privacy_of(
    config: Configuration, sizes: Sequence[int], budget: tuple[str, str | None] | None = None
) -> Callable[..., list[dict[str, Any]]] | None:
    """Function from the rounds and totals that really ran to the statements of summary.json.

    `config` is settled, `budget` its bound and relation.
    """
    learning, usual = config.learning, config.budget.dp_delta
    if learning.method == "FedAvg":
        return None
    releases = privacy.releases_of(config.algorithm(), _runs(config, sizes))

    @functools.cache
    def stated(
        rounds: int, local_iterations: int = 0, estimate_releases: int = 0, dp_delta: float = usual
    ) -> list[dict[str, Any]]:
        ran = {"local_iterations": local_iterations} if learning.method in PRIVATE_STEPS else {}
        account = releases.account(releases.each, dp_delta=dp_delta, **ran)
        found = account.statements(estimate_releases if learning.method == ALI else rounds)
        rows = [statement._asdict() for statement in found]
        return rows if budget is None else asked_first(rows, *budget)

    return stated
