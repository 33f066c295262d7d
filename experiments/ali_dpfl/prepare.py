"""From lines of experiments.ali_dpfl to variants: checks, budgets, statements, and what is told before the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.core.tree import size
from jaxfl.frame import Line, Prepared, few, variants_of
from jaxfl.frame.options import text_of
from jaxfl.training.chunks import check_start

from .options import ALI, FIXED, PRIVATE_STEPS, UPDATES, Point, check_point
from .spending import privacy_of, released, rounds_of, settled


def prepare(lines: Mapping[str, Line]) -> Prepared:
    """The variants of all lines; what cannot run is refused before any work."""
    sizes = {name: _sizes(line) for name, line in lines.items()}
    for name, line in lines.items():
        check_point(line.point)
        _check_sizes(line.point, min(sizes[name]))
    ready = {name: line._replace(point=settled(line.point, sizes[name])) for name, line in lines.items()}

    def of_line(name: str, line: Line) -> dict[str, Any]:
        point: Point = line.point
        method, last = point.learning.method, rounds_of(point)
        return {
            "data": point.clients.data(point.data),
            # A budget ends FedAvg's rounds, too, but spends nothing there.
            "num_rounds": point.learning.rounds if method in PRIVATE_STEPS else last,
            "privacy": privacy_of(point, sizes[name]),
            "released": released(point),
            "covered": method in (FIXED, UPDATES) or (method == ALI and point.learning.constants == "private"),
            "max_rounds": last,
            "budgets": {"local_iterations": point.budget.max_iterations} if method == ALI else {},
        }

    variants = variants_of(ready, Point.algorithm, of_line)
    for name in variants:
        point, seeds, _ = ready[name]
        for seed in seeds:
            check_start(point.algorithm(), jax.random.key(seed), point.clients.data(point.data)(seed))
    counts = {name: _counts(line.point) for name, line in ready.items()}
    return Prepared(variants, _description(ready, sizes), {"variants": counts})


def _sizes(line: Line) -> list[int]:
    """Samples of every client, over all seeds."""
    data_of = line.point.clients.data(line.point.data)
    return np.concatenate([np.asarray(data_of(seed).sizes) for seed in line.seeds]).tolist()


def _check_sizes(point: Point, least: int) -> None:
    """Refuse batches that the smallest client cannot draw."""
    learning = point.learning
    private = learning.method == ALI and learning.constants == "private"
    sizes = {"batch_size": learning.batch_size, "constants_batch": (learning.constants_batch or 0) if private else 0}
    for name, wanted in sizes.items():
        if wanted > least:
            requirement = f"must be at most the samples of the smallest client, {least}"
            raise ArgumentError(name, requirement, f"got {wanted}", "Pass a smaller one, or use fewer clients.")
    if learning.method == UPDATES and learning.num_active > point.clients.nodes:
        found, remedy = f"got {learning.num_active}", "Pass fewer."
        raise ArgumentError("num_active", f"must be at most all {point.clients.nodes} clients", found, remedy)


def _counts(point: Point) -> dict[str, object]:
    """Rounds and iterations that follow from the budget."""
    return {"rounds": point.learning.rounds, "max_iterations": point.budget.max_iterations}


def _description(lines: Mapping[str, Line], sizes: Mapping[str, list[int]]) -> list[str]:
    """Describe the run: what all lines share, and one row per line."""
    name, line = next(iter(lines.items()))
    first: Point = line.point
    dataset, task, here = first.data.load(), first.task(), sizes[name]
    num_params = size(jax.eval_shape(task.init, jax.random.key(0)))
    samples = text_of(min(here)) if min(here) == max(here) else f"{min(here)} to {max(here)}"
    told = [
        f"{dataset.name}: {len(dataset.train_labels)} samples over {first.clients.nodes} clients "
        f"({first.clients.partition}, {samples} each), model {first.network.model} with {num_params} parameters, node "
        f"loop {task.node_loop}"
    ]
    rows = []
    for name, line in lines.items():
        learning, budget = line.point.learning, line.point.budget
        steps = "chosen" if learning.method == ALI else text_of(learning.local_steps)
        rows.append(
            f"{name}: R_s = {learning.rounds} rounds, T = {budget.max_iterations} local iterations, tau {steps}, step "
            f"size {learning.step_size:.4g}"
        )
    return [*told, *few(rows), *_remarks(lines, sizes)]


def _remarks(lines: Mapping[str, Line], sizes: Mapping[str, list[int]]) -> list[str]:
    """Warn of lines for which the privacy budget does not hold."""
    points = {name: line.point for name, line in lines.items()}
    told = []
    accounted = {name: point.budget.accounted_samples or 0 for name, point in points.items()}
    over = [name for name in lines if accounted[name] > min(sizes[name])]
    if over:
        least = min(min(sizes[name]) for name in over)
        told.append(
            f"The budget counts {max(accounted.values())} samples a client, and the smallest has {least}: it is "
            "overspent. Statements count each client's own."
        )
    if any(point.learning.method == ALI and point.learning.constants == "as_published" for point in points.values()):
        told.append("ALI-DPFL as published takes its next tau from estimates without noise: it has no epsilon.")
    return told
