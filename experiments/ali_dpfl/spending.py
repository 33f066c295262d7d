"""Privacy spending in experiments.ali_dpfl: iterations and rounds of a budget, statements for a run."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxfl import privacy
from jaxfl.core import ArgumentError
from jaxfl.frame import lay
from jaxfl.privacy import clients as accounting
from jaxfl.privacy.clients import ClientRelease
from jaxfl.privacy.statements import asked_first

from .options import ALI, PRIVATE_STEPS, UPDATES, Configuration

MOST_ITERATIONS = 10**5  # up to which the iterations of a budget are searched


def release_of(
    config: Configuration, num_samples: int, multiplier: float | None = None, *, with_estimates: bool = True
) -> ClientRelease:
    """Describe what a client with this many samples releases; its noise multiplier is that of all by default."""
    learning, budget = config.learning, config.budget
    common = 1.0 if budget.noise_multiplier == "calibrated" else budget.noise_multiplier
    multiplier = common if multiplier is None else multiplier
    estimates = learning.constants if learning.method == ALI and with_estimates else "none"
    release = ClientRelease("poisson", num_samples, learning.batch_size, budget.clip_norm, multiplier)
    if estimates == "private":
        size, noise = learning.constants_batch or num_samples, learning.constants_noise
        release = release._replace(estimate_batch_size=size, estimate_noise_multiplier=noise)
    return release._replace(estimates=estimates)


def releases_of(config: Configuration, sizes: Sequence[int], *, with_estimates: bool = True) -> list[ClientRelease]:
    """Describe what each client releases, over all seeds."""
    pairs = zip(sizes, itertools.cycle(config.budget.client_noise or (None,)))  # client after client, seed after seed
    return [release_of(config, size, noise, with_estimates=with_estimates) for size, noise in pairs]


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
        rates = {"participation_rate": learning.num_active / config.clients.nodes, "dp_delta": budget.dp_delta}
        ran = min(rounds, -(-iterations // learning.local_steps))
        noise = accounting.client_noise_multiplier(budget.target_epsilon, ran, **rates)
    every = config.run.evaluate_every or max(1, rounds // 20)
    numbers = {"rounds": rounds, "max_iterations": iterations, "update_noise_multiplier": noise}
    return lay(config, {**numbers, "evaluate_every": every})


def _with_noise(config: Configuration, sizes: Sequence[int]) -> Configuration:
    """The configuration with the least noise on iterations that meets the budget, where it is asked for.

    Clients have one noise where they have equally many samples, to within the one that an even deal leaves over, and
    each its own where they have not. Sizes are public, and so is which of the two holds.
    """
    learning, budget = config.learning, config.budget
    if budget.client_noise:
        return lay(config, {"noise_multiplier": max(budget.client_noise)})
    if budget.noise_multiplier != "calibrated":
        return config
    if learning.method not in PRIVATE_STEPS:
        return lay(config, {"noise_multiplier": 0.0})  # which counts nowhere
    if learning.rounds == "auto":
        found, remedy = "got auto, which follows from the noise", "Pass a number, or a number for noise_multiplier."
        raise ArgumentError("rounds", "must be a number where noise is calibrated", found, remedy)
    private = learning.method == ALI and learning.constants == "private"
    # Estimates without noise have no epsilon: the iterations beside them get the noise that they need alone.
    releases = releases_of(config, sizes, with_estimates=private)
    alone = max(accounting.epsilon(one, 0, learning.rounds * private, **_held(config)) for one in {*releases})
    if private and alone >= budget.target_epsilon:
        requirement = f"must leave something of target_epsilon, {budget.target_epsilon:g}, to the iterations"
        found = f"got {learning.constants_noise:g}, with which {learning.rounds} estimates alone cost {alone:.4g}"
        raise ArgumentError("constants_noise", requirement, found, "Pass more, or fewer rounds.")
    assert not isinstance(budget.max_iterations, str)
    counts = budget.max_iterations, learning.rounds
    settings = {**_held(config), "target_epsilon": budget.target_epsilon}
    kinds = config.clients.nodes if max(sizes) - min(sizes) > 1 else 1
    noise = [accounting.calibrate_noise_multiplier(releases[i::kinds], *counts, **settings) for i in range(kinds)]
    return lay(config, {"noise_multiplier": max(noise), "client_noise": tuple(noise) if kinds > 1 else ()})


def _held(config: Configuration) -> dict[str, Any]:
    """Bound, delta and neighboring relation that hold the budget."""
    budget = config.budget
    relation = budget.neighboring_relation if budget.bound == "proven" else None
    return {"bound": budget.bound, "dp_delta": budget.dp_delta, "neighboring_relation": relation}


def _iterations(config: Configuration, sizes: Sequence[int], num_estimates: int) -> int:
    """Local iterations that the budget pays for beside this many estimates; a budget for none is refused."""
    budget = config.budget
    samples = sizes if budget.accounted_samples is None else [budget.accounted_samples] * len(sizes)
    releases = releases_of(config, samples, with_estimates=num_estimates > 0)
    settings = {**_held(config), "limit": MOST_ITERATIONS}
    most = accounting.max_iterations(releases, num_estimates, budget.target_epsilon, **settings)
    if most < 1:
        estimates = f" beside {num_estimates} private estimates" if num_estimates else ""
        found = f"got {budget.target_epsilon:g}, which pays for none ({budget.bound} bound)"
        remedy = "Pass a larger budget, or more noise."
        raise ArgumentError("target_epsilon", f"must pay for one local iteration{estimates}", found, remedy)
    return most


def _refuse_overspent(config: Configuration, sizes: Sequence[int], rounds: int, iterations: int) -> None:
    """Refuse estimates that overspend the budget beside iterations that it pays for."""
    budget, settings = config.budget, _held(config)

    def cost(with_estimates: bool) -> float:
        releases = {*releases_of(config, sizes, with_estimates=with_estimates)}
        return max(accounting.epsilon(one, iterations, rounds * with_estimates, **settings) for one in releases)

    # No budget can pay for more iterations than the search allows; their price alone takes minutes.
    if iterations > MOST_ITERATIONS or cost(False) > budget.target_epsilon:
        return
    both = cost(True)
    if both > budget.target_epsilon:
        requirement = f"must leave {rounds} estimates within target_epsilon, {budget.target_epsilon:g}"
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
    config: Configuration, sizes: Sequence[int], asked: tuple[str, str | None] | None = None
) -> Callable[..., list[dict[str, Any]]] | None:
    """Function from the rounds and totals that really ran to the statements of summary.json.

    `config` is settled, `asked` bound and relation of its budget.
    """
    learning, nodes, usual = config.learning, config.clients.nodes, config.budget.dp_delta
    if learning.method == "FedAvg":
        return None
    learner, most = config.algorithm(), None
    seeds = [sizes[first : first + nodes] for first in range(0, len(sizes), nodes)]
    releases = [release for of_seed in seeds for release in privacy.releases_of(learner, of_seed).each]
    if learning.method == ALI:
        assert not isinstance(learning.rounds, str)
        assert not isinstance(config.budget.max_iterations, str)
        # Its number of iterations follows from its releases.
        most = config.budget.max_iterations, learning.rounds

    @functools.cache
    def stated(
        rounds: int, local_iterations: int = 0, estimate_releases: int = 0, dp_delta: float = usual
    ) -> list[dict[str, Any]]:
        if learning.method == UPDATES:
            statements = accounting.client_level_statements(releases[0], rounds, num_clients=nodes, dp_delta=dp_delta)
        else:
            ran = local_iterations, estimate_releases
            statements = accounting.statements(releases, *ran, dp_delta=dp_delta, num_clients=nodes, budgeted=most)
        rows = [statement._asdict() for statement in statements]
        return rows if asked is None else asked_first(rows, *asked)

    return stated
