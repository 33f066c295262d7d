"""What a line of experiments.privsgp_vr spends: noise for a budget, rounds for a noise, statements for a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.frame import Line, lay
from experiments.privsgp_vr.options import INFINITY, METHODS, Point
from jaxfl import privacy
from jaxfl.algorithms import theory_step_size
from jaxfl.core import ArgumentError
from jaxfl.privacy.gossip import ProblemConstants, network_noise_std, network_rounds, optimal_iterations

ACCOUNTED = ("method", "noise_std")  # options in which lines with a shared noise may differ
Sizes = Sequence[int]  # samples of every node; of several seeds with different partitions, of each seed's nodes


def release_of(point: Point, num_samples: int, noise_std: float, *, assumed: bool = False) -> privacy.Release:
    """What a node with this many samples releases in every round.

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
    )


def settled(
    lines: Mapping[str, Line], sizes: Mapping[str, Sizes], constants: Callable[[Point], ProblemConstants]
) -> dict[str, Line]:
    """The lines with iterations, step size and noise as numbers; a budget that no noise meets is refused.

    The problem's constants at a point are asked for with `--iterations auto` only.
    """
    known = {name: line._replace(point=_with_iterations(line.point, constants)) for name, line in lines.items()}
    noise = {name: _noise(line.point, sizes[name]) for name, line in known.items()}
    result = {}
    for name, line in known.items():
        std = noise[name]
        if line.point.budget.shared_noise and line.point.budget.noise_std == "calibrated":
            std = max(noise[other] for other in known if _accounted(known[other]) == _accounted(line))
        result[name] = line._replace(point=lay(line.point, {"noise_std": std}))
    return result


def _accounted(line: Line) -> dict[str, Any]:
    return {name: value for name, value in line.settings.items() if name not in ACCOUNTED}


def _with_iterations(point: Point, constants: Callable[[Point], ProblemConstants]) -> Point:
    budget, num_nodes, rounds = point.budget, point.clients.nodes, point.learning.iterations
    if rounds == "auto":
        target = {"dp_epsilon": budget.target_epsilon, "dp_delta": budget.dp_delta, "c2": budget.c2}
        rounds = max(1, round(optimal_iterations(constants(point), **target, num_nodes=num_nodes)))
    changes: dict[str, Any] = {"iterations": rounds}
    if point.run.evaluate_every == 0:
        changes["evaluate_every"] = max(1, rounds // 40)
    if point.learning.step_size == "theory":
        changes["step_size"] = theory_step_size(num_nodes, rounds)
    return lay(point, changes)


def _noise(point: Point, sizes: Sizes) -> float:
    """The noise that was asked for, or the least that meets the budget at every node."""
    budget = point.budget
    if budget.noise_std != "calibrated":
        return float(budget.noise_std)
    accountant, rounds, options = _accounting(point)
    releases = _releases(point, sizes, 0.0, assumed=budget.bound == "published")
    target = budget.target_epsilon
    return network_noise_std(accountant, budget.bound, releases, rounds, target_epsilon=target, **options)


def _releases(point: Point, sizes: Sizes, noise_std: float, *, assumed: bool) -> tuple[privacy.Release, ...]:
    return tuple(release_of(point, size, noise_std, assumed=assumed) for size in sizes)


def _accounting(point: Point) -> tuple[privacy.Accountant, int, dict[str, Any]]:
    """What every call of the accountant needs: itself, the rounds, and its options."""
    options = {"dp_delta": point.budget.dp_delta, "c2": point.budget.c2, "num_nodes": point.clients.nodes}
    return METHODS[point.learning.method].accountant, int(point.learning.iterations), options


def rounds_allowed(name: str, asked: Point, point: Point, sizes: Sizes) -> int | None:
    """Most rounds that the budget pays for at every node, where both noise and budget are given; else None.

    A budget that does not pay for one round is refused; the error names the line. `point` is `asked`, settled.
    """
    budget = point.budget
    if asked.budget.noise_std == "calibrated" or budget.target_epsilon == INFINITY:
        return None
    accountant, limit, options = _accounting(point)
    releases = _releases(point, sizes, float(budget.noise_std), assumed=budget.bound == "published")
    target = budget.target_epsilon
    rounds = network_rounds(accountant, budget.bound, releases, limit, target_epsilon=target, **options)
    if rounds < 1:
        first = max(privacy.epsilon(accountant, budget.bound, release, 1, **options) for release in set(releases))
        cost = f"costs {first:.3g}" if math.isfinite(first) else "has no such bound"
        requirement = f"must pay for one round of {name} ({budget.bound} bound)"
        raise ArgumentError("target_epsilon", requirement, f"one round {cost}", "Pass more, or add more noise.")
    return rounds


def privacy_of(point: Point, sizes: Sizes) -> Callable[[int], list[dict[str, Any]]]:
    """Function from the rounds that really ran to the statements of summary.json; the point is settled."""
    accountant, _, options = _accounting(point)
    assumed = point.learning.clip_norm is None and point.budget.gradient_bound is not None
    releases = _releases(point, sizes, float(point.budget.noise_std), assumed=assumed)

    @functools.cache
    def stated(rounds: int) -> list[dict[str, Any]]:
        return [statement._asdict() for statement in privacy.statements(accountant, releases, rounds, **options)]

    return stated
