"""Privacy spending in experiments.privsgp_vr: noise for a budget, rounds for a noise, statements for a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfl import privacy
from jaxfl.algorithms import theory_step_size
from jaxfl.core import ArgumentError
from jaxfl.data.tables import read_by_site
from jaxfl.frame import Row, override
from jaxfl.privacy.gossip import ProblemConstants, optimal_iterations
from jaxfl.privacy.statements import asked_first

from .options import METHODS, Configuration, quiet_step_size

REACH = 11.0  # D of `--step-size auto`; docs/decisions/experiments.md has the measurements
Sizes = Sequence[int]  # samples of every node; of several seeds with different partitions, of each seed's nodes


def releases_of(config: Configuration, sizes: Sizes, *, assumed: bool = False) -> privacy.Releases:
    """Releases of every node, over all seeds, as the learner says them; of a settled configuration.

    `assumed` takes `gradient_bound` for the bound on unclipped gradients, as the paper's formula does.
    """
    releases = privacy.releases_of(config.algorithm(), np.reshape(sizes, (-1, config.clients.nodes)))
    if not assumed or config.learning.clip_norm is not None:
        return releases
    bound, nodes = config.budget.gradient_bound, list(zip(releases.each, sizes, strict=True))
    shares = [one.num_entries / size if one.entry_size > 1 else 1.0 for one, size in nodes]
    bounds = [None if bound is None else bound * share for share in shares]  # a sample's share of its entry
    each = [one._replace(clip_norm=norm, assumed=True) for one, norm in zip(releases.each, bounds, strict=True)]
    return releases._replace(each=tuple(each))


def with_budgets(config: Configuration) -> Configuration:
    """The configuration with every node's budget as a number, where a file gives them by the names of sites.

    Nodes without names are called 0, 1, ... there.
    """
    path = config.budget.node_epsilons
    if not isinstance(path, str):
        return config
    names = config.clients.data(config.data)(config.run.seed).names
    names = tuple(map(str, range(config.clients.nodes))) if names is None else names
    return override(config, {"node_epsilons": read_by_site(path, names, "node_epsilons")})


def settled(
    rows: Mapping[str, Row], sizes: Mapping[str, Sizes], constants: Callable[[Configuration], ProblemConstants]
) -> dict[str, Row]:
    """The cases with iterations, step size and noise as numbers; a budget that no noise meets is refused.

    `constants` computes the problem's constants; it is called with `--iterations auto` only.
    """
    ready = {name: row._replace(config=_with_iterations(row.config, constants)) for name, row in rows.items()}
    result = {}
    for name, row in ready.items():
        std = _noise(row.config, sizes[name])
        found: dict[str, Any] = {"noise_std": max(std)}
        if len(std) > 1 or row.config.budget.node_noise or row.config.budget.node_epsilons:
            found["node_noise"] = std
        if row.config.learning.step_size == "auto":
            found["step_size"] = _noisy_step_size(row.config, std)
        result[name] = row._replace(config=override(row.config, found))
    return result


def _with_iterations(config: Configuration, constants: Callable[[Configuration], ProblemConstants]) -> Configuration:
    budget, num_nodes, rounds = config.budget, config.clients.nodes, config.learning.iterations
    if rounds == "auto":
        target = budget.node_epsilons or budget.target_epsilon
        options = {"dp_epsilon": target, "dp_delta": budget.dp_delta, "c2": budget.c2, "num_nodes": num_nodes}
        rounds = max(1, round(optimal_iterations(constants(config), **options)))
    changes: dict[str, Any] = {"iterations": rounds}
    if config.run.evaluate_every == 0:
        changes["evaluate_every"] = max(1, rounds // 40)
    if config.learning.step_size == "theory":
        changes["step_size"] = theory_step_size(num_nodes, rounds)
    return override(config, changes)


def _noisy_step_size(config: Configuration, std: tuple[float, ...]) -> float:
    """The step size with which noise of these standard deviations carries the mean model `REACH` far in the whole run.

    SGD on smooth losses wants gamma = min(1 / L, D / (sigma sqrt(K))), with sigma the norm of the noise of a step and D
    a distance (S. Ghadimi, G. Lan, "Stochastic First- and Zeroth-Order Methods for Nonconvex Stochastic Programming",
    SIAM J. Optim. 2013, arXiv:1309.5549, Corollary 2.2). The mean of n nodes has sigma = std sqrt(d / n), so that
    gamma = D sqrt(n / K) / (std sqrt(d)): that of Theorem 1 of the paper, over the noise of a node. The step
    that is best without noise takes the place of 1 / L. Shared noise counts as what it leaves in a node's state, as a
    share of what noise of one's own would. Where nodes differ, std is the largest of a node: the mean of
    n nodes has less noise then, but the noisiest nodes' own models, and what they send, do not.
    """
    learning, keys = config.learning, config.shared_keys()
    noise = math.sqrt(max(std) ** 2 * config.num_params() * (1 if keys is None else keys.variance))
    quiet = quiet_step_size(learning.batch_size)
    if not noise:
        return 0.2 if config.data.dataset == "digits" else quiet
    return min(quiet, REACH * theory_step_size(config.clients.nodes, int(learning.iterations)) / noise)


def _noise(config: Configuration, sizes: Sizes) -> tuple[float, ...]:
    """The noise that was asked for, or the least that meets the budget: of all nodes, or of each."""
    budget = config.budget
    if budget.node_noise:
        return budget.node_noise
    if budget.noise_std != "calibrated":
        return (float(budget.noise_std),)
    trial = override(config, {"noise_std": 1.0, "step_size": 1.0})  # numbers for options that follow from the noise
    rounds = int(config.learning.iterations)
    return tuple(account.calibrate(rounds, target, *_claim(config)) for target, account in _with_limits(trial, sizes))


def _with_limits(config: Configuration, sizes: Sizes) -> Iterator[tuple[float, privacy.Account]]:
    """Every budget with the account, over all seeds, of the nodes that it is for.

    One budget is for all nodes together where they have equally many samples, to within the one that an even deal
    leaves over, and for each node by itself where they have not. Sizes are public, and so is which of the two holds.
    """
    budget, limits = config.budget, config.budget.limits
    releases = releases_of(config, sizes, assumed=budget.bound == "published")
    if len(limits) == 1 and max(sizes) - min(sizes) > 1:
        limits *= config.clients.nodes
    for node, limit in enumerate(limits):
        yield limit, releases.account(releases.each[node :: len(limits)], dp_delta=budget.dp_delta, c2=budget.c2)


def _claim(config: Configuration) -> tuple[str, str | None]:
    """Bound and neighboring relation of the budget; None for the formula's own."""
    relation = config.budget.neighboring_relation
    return config.budget.bound, None if relation == "as_published" else relation


def rounds_allowed(name: str, request: Configuration, config: Configuration, sizes: Sizes) -> int | None:
    """Most rounds that the budget pays for at every node, where both noise and budget are given; else None.

    A budget that does not pay for one round is refused; the error names the case. `config` is `request`, settled.
    """
    budget = config.budget
    if request.budget.noise_std == "calibrated" or not budget.limits:
        return None
    rounds, accounts = int(config.learning.iterations), list(_with_limits(config, sizes))
    for target, account in accounts:
        rounds = account.most_rounds(target, rounds, *_claim(config))
    if rounds < 1:
        first = max(account.epsilon(1, *_claim(config)) for _, account in accounts)
        cost = f"costs {first:.3g}" if math.isfinite(first) else "has no such bound"
        bound = METHODS[config.learning.method].accountant.bound_name(budget.bound)
        requirement = f"must pay for one round of {name} ({bound} bound)"
        name = "node_epsilons" if budget.node_epsilons else "target_epsilon"
        raise ArgumentError(name, requirement, f"one round {cost}", "Pass a larger budget, or add noise.")
    return rounds


def privacy_of(config: Configuration, sizes: Sizes) -> Callable[..., list[dict[str, Any]]]:
    """Function from the rounds that really ran, and perhaps a dp_delta, to statements; the configuration is settled."""
    budget, (bound, relation) = config.budget, _claim(config)
    releases = releases_of(
        config, sizes, assumed=config.learning.clip_norm is None and budget.gradient_bound is not None
    )
    named = METHODS[config.learning.method].accountant.bound_name(bound), relation

    @functools.cache
    def stated(rounds: int, dp_delta: float = budget.dp_delta) -> list[dict[str, Any]]:
        account = releases.account(releases.each, dp_delta=dp_delta, c2=budget.c2)
        rows = [statement._asdict() for statement in account.statements(rounds)]
        if config.clients.nodes == 1:  # all samples in one place: there is no other node
            rows = [row | {"observer": "whoever sees its models"} for row in rows]
        return asked_first(rows, *named) if budget.limits else rows

    return stated
