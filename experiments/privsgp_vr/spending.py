"""Privacy spending in experiments.privsgp_vr: noise for a budget, rounds for a noise, statements for a run."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxfl import privacy
from jaxfl.algorithms import theory_step_size
from jaxfl.core import ArgumentError
from jaxfl.frame import Line, lay
from jaxfl.privacy.gossip import ProblemConstants, optimal_iterations

from .options import METHODS, Point

Sizes = Sequence[int]  # samples of every node; of several seeds with different partitions, of each seed's nodes


def release_of(point: Point, num_samples: int, noise_std: float, *, assumed: bool = False) -> privacy.Release:
    """Describe what a node with this many samples releases in every round.

    `assumed` takes `gradient_bound` for the bound on unclipped gradients, as the paper's formula does.
    """
    learning, entry_size = point.learning, point.learning.entry_size or 1
    assumed = assumed and learning.clip_norm is None
    bound = point.budget.gradient_bound if assumed else learning.clip_norm
    entries, batch_size = num_samples, learning.samples_per_batch
    if learning.has_table and learning.table == "per_batch":
        entries, batch_size = -(-num_samples // entry_size), learning.batch_size
        bound = None if bound is None else bound * entries / num_samples  # a sample's share of its entry
    return privacy.Release(
        estimator="saga" if learning.has_table else "mini_batch",
        sampler=learning.sampler,
        batch_size=batch_size,
        num_entries=entries,
        clip_norm=bound,
        noise_std=noise_std,
        entry_size=entry_size if learning.has_table else 1,
        storage=learning.storage,
        assumed=assumed,
        grid=point.grid(),
    )


def settled(
    lines: Mapping[str, Line], sizes: Mapping[str, Sizes], constants: Callable[[Point], ProblemConstants]
) -> dict[str, Line]:
    """The lines with iterations, step size and noise as numbers; a budget that no noise meets is refused.

    The problem's constants at a point are asked for with `--iterations auto` only.
    """
    known = {name: line._replace(point=_with_iterations(line.point, constants)) for name, line in lines.items()}
    result = {}
    for name, line in known.items():
        std = _noise(line.point, sizes[name])
        of_each = {"node_noise": std} if line.point.budget.node_noise or line.point.budget.node_epsilons else {}
        result[name] = line._replace(point=lay(line.point, {"noise_std": max(std), **of_each}))
    return result


def _with_iterations(point: Point, constants: Callable[[Point], ProblemConstants]) -> Point:
    budget, num_nodes, rounds = point.budget, point.clients.nodes, point.learning.iterations
    if rounds == "auto":
        target = budget.node_epsilons or budget.target_epsilon
        options = {"dp_epsilon": target, "dp_delta": budget.dp_delta, "c2": budget.c2, "num_nodes": num_nodes}
        rounds = max(1, round(optimal_iterations(constants(point), **options)))
    changes: dict[str, Any] = {"iterations": rounds}
    if point.run.evaluate_every == 0:
        changes["evaluate_every"] = max(1, rounds // 40)
    if point.learning.step_size == "theory":
        changes["step_size"] = theory_step_size(num_nodes, rounds)
    return lay(point, changes)


def _noise(point: Point, sizes: Sizes) -> tuple[float, ...]:
    """The noise that was asked for, or the least that meets the budget: of all nodes, or of each."""
    budget = point.budget
    if budget.node_noise:
        return budget.node_noise
    if budget.noise_std != "calibrated":
        return (float(budget.noise_std),)
    accountant, rounds, options = _accounting(point)
    releases = _releases(point, sizes, (0.0,), assumed=budget.bound == "published")
    return tuple(
        privacy.calibrate_noise_std(accountant, budget.bound, own, rounds, target_epsilon=target, **options)
        for target, own in _with_limits(point, releases)
    )


def _releases(point: Point, sizes: Sizes, noise: tuple[float, ...], *, assumed: bool) -> tuple[privacy.Release, ...]:
    """Releases of every node, over all seeds; `noise` of all nodes, or of each."""
    pairs = zip(sizes, itertools.cycle(noise))  # node after node, seed after seed
    return tuple(release_of(point, size, std, assumed=assumed) for size, std in pairs)


def _with_limits(
    point: Point, releases: tuple[privacy.Release, ...]
) -> Iterator[tuple[float, tuple[privacy.Release, ...]]]:
    """Every budget with the releases, over all seeds, of the nodes that it is for."""
    limits = point.budget.limits
    for node, limit in enumerate(limits):
        yield limit, releases if len(limits) == 1 else releases[node :: len(limits)]


def _accounting(point: Point) -> tuple[privacy.Accountant, int, dict[str, Any]]:
    """Arguments of every call of the accountant: itself, the rounds, and its options."""
    relation = point.budget.neighboring_relation
    options = {
        "dp_delta": point.budget.dp_delta,
        "c2": point.budget.c2,
        "num_nodes": point.clients.nodes,
        "neighboring_relation": None if relation == "as_published" else relation,
    }
    return METHODS[point.learning.method].accountant, int(point.learning.iterations), options


def rounds_allowed(name: str, asked: Point, point: Point, sizes: Sizes) -> int | None:
    """Most rounds that the budget pays for at every node, where both noise and budget are given; else None.

    A budget that does not pay for one round is refused; the error names the line. `point` is `asked`, settled.
    """
    budget = point.budget
    if asked.budget.noise_std == "calibrated" or not budget.limits:
        return None
    accountant, rounds, options = _accounting(point)
    releases = _releases(point, sizes, _noise(point, sizes), assumed=budget.bound == "published")
    for target, own in _with_limits(point, releases):
        budgeted = {"target_epsilon": target, "limit": rounds}
        rounds = privacy.max_rounds(accountant, budget.bound, own, **budgeted, **options)
    if rounds < 1:
        first = max(privacy.epsilon(accountant, budget.bound, release, 1, **options) for release in set(releases))
        cost = f"costs {first:.3g}" if math.isfinite(first) else "has no such bound"
        requirement = f"must pay for one round of {name} ({accountant.bound_name(budget.bound)} bound)"
        name = "node_epsilons" if budget.node_epsilons else "target_epsilon"
        raise ArgumentError(name, requirement, f"one round {cost}", "Pass more, or add more noise.")
    return rounds


def privacy_of(point: Point, sizes: Sizes) -> Callable[[int], list[dict[str, Any]]]:
    """Function from the rounds that really ran to the statements of summary.json; the point is settled."""
    accountant, _, options = _accounting(point)
    if point.budget.bound == "published":
        options["neighboring_relation"] = None  # of the budget's formula alone
    assumed = point.learning.clip_norm is None and point.budget.gradient_bound is not None
    releases = _releases(point, sizes, _noise(point, sizes), assumed=assumed)

    @functools.cache
    def stated(rounds: int) -> list[dict[str, Any]]:
        return [statement._asdict() for statement in privacy.statements(accountant, releases, rounds, **options)]

    return stated
