"""What a line of experiments.privsgp_vr spends: noise for a budget, rounds for a noise, statements for a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.frame import Line, flat, lay
from experiments.privsgp_vr.options import INFINITY, METHODS, Point
from jaxfl import privacy
from jaxfl.algorithms import theory_step_size
from jaxfl.core import ArgumentError
from jaxfl.privacy.gossip import ProblemConstants, network_noise_std, network_rounds, optimal_iterations

ACCOUNTED = ("method", "noise_std")  # options in which lines with a shared noise may differ


def release_of(point: Point, num_samples: int, noise_std: float, *, assumed: bool = False) -> privacy.Release:
    """What a node with this many samples releases in every round.

    Args:
        point: its options.
        num_samples: J of the node.
        noise_std: standard deviation of the noise.
        assumed: take `gradient_bound` for the bound on unclipped gradients, as the paper's formula does.
    """
    learning = point.learning
    assumed = assumed and learning.clip_norm is None
    bound = point.budget.gradient_bound if assumed else learning.clip_norm
    if learning.has_table and learning.table == "per_batch":
        entries = -(-num_samples // (learning.entry_size or 1))
        per_entry = None if bound is None else bound * entries / num_samples  # a sample's share of its entry
        batch_size = learning.batch_size
    else:
        entries, per_entry, batch_size = num_samples, bound, learning.samples_per_batch
    return privacy.Release(
        estimator="saga" if learning.has_table else "mini_batch",
        sampler=learning.sampler,
        batch_size=batch_size,
        num_entries=entries,
        clip_norm=per_entry,
        noise_std=noise_std,
        entry_size=(learning.entry_size or 1) if learning.has_table else 1,
        storage=learning.storage,
        assumed=assumed,
        grid=point.grid(),
    )


def settled(
    lines: Mapping[str, Line],
    sizes: Mapping[str, Sequence[int]],
    constants: Callable[[Point], ProblemConstants],
) -> dict[str, Line]:
    """The lines with iterations, step size and noise as numbers.

    Args:
        lines: as asked for.
        sizes: line -> samples of every node, over all seeds.
        constants: the problem's constants at a point; called for `--iterations auto` only.

    Raises:
        ArgumentError: a budget that no noise meets, or that does not pay for one round.
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
    if point.learning.iterations == "auto":
        rounds = optimal_iterations(
            constants(point),
            dp_epsilon=point.budget.target_epsilon,
            dp_delta=point.budget.dp_delta,
            c2=point.budget.c2,
            num_nodes=point.clients.nodes,
        )
        point = lay(point, {"iterations": max(1, round(rounds))})
    if point.run.evaluate_every == 0:
        point = lay(point, {"evaluate_every": max(1, flat(point)["iterations"] // 40)})
    if point.learning.step_size == "theory":
        step_size = theory_step_size(point.clients.nodes, flat(point)["iterations"])
        point = lay(point, {"step_size": step_size})
    return point


def _noise(point: Point, sizes: Sequence[int]) -> float:
    """The noise that was asked for, or the least that meets the budget at every node."""
    budget = point.budget
    if budget.noise_std != "calibrated":
        return float(budget.noise_std)
    accountant, rounds, options = _accounting(point)
    releases = _releases(point, sizes, 0.0, assumed=budget.bound == "published")
    target = budget.target_epsilon
    return network_noise_std(accountant, budget.bound, releases, rounds, target_epsilon=target, **options)


def _releases(point: Point, sizes: Sequence[int], noise_std: float, *, assumed: bool) -> tuple[privacy.Release, ...]:
    return tuple(release_of(point, size, noise_std, assumed=assumed) for size in sizes)


def _accounting(point: Point) -> tuple[privacy.Accountant, int, dict[str, Any]]:
    """What every call of the accountant needs: itself, the rounds, and its options."""
    relation = point.budget.neighboring_relation
    options = {
        "dp_delta": point.budget.dp_delta,
        "c2": point.budget.c2,
        "num_nodes": point.clients.nodes,
        "neighboring_relation": None if relation == "as_published" else relation,
    }
    return METHODS[point.learning.method].accountant, int(point.learning.iterations), options


def rounds_allowed(name: str, asked: Point, point: Point, sizes: Sequence[int]) -> int | None:
    """Most rounds that the budget pays for at every node, where both noise and budget are given; else None.

    Args:
        name: of the line, for the error.
        asked: the point as asked for.
        point: the same, settled.
        sizes: samples of every node, over all seeds.

    Raises:
        ArgumentError: a budget that does not pay for one round.
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


def privacy_of(point: Point, sizes: Sequence[int]) -> Callable[[int], list[dict[str, Any]]]:
    """Function from the rounds that really ran to the statements of summary.json.

    Args:
        point: settled.
        sizes: samples of every node; of several seeds with different partitions, of each seed's nodes.
    """
    accountant, _, options = _accounting(point)
    if point.budget.bound == "published":
        options["neighboring_relation"] = None  # of the budget's formula alone
    assumed = point.learning.clip_norm is None and point.budget.gradient_bound is not None

    releases = _releases(point, sizes, float(point.budget.noise_std), assumed=assumed)

    @functools.cache
    def stated(rounds: int) -> list[dict[str, Any]]:
        return [statement._asdict() for statement in privacy.statements(accountant, releases, rounds, **options)]

    return stated
