"""From lines of experiments.embracing_fl to variants, what runs add to their summary, and reports in place of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxfl.core import Algorithm, check
from jaxfl.core.tree import size
from jaxfl.frame import Finished, Line, Prepared, Request, variants_of
from jaxfl.frame.run import run
from jaxfl.training import Variant
from jaxfl.training.chunks import check_start
from jaxfl.training.summary import rounds_to_target, spread

from .costs import class_costs, cost_lines, described, sizes_table, timing_table
from .defaults import check_point
from .options import Point
from .pictures import plot_added, plot_curves, plot_gaps
from .results import COMPARED, read_results
from .tables import markdown

MOST_TOLD = 14  # lines of a grid that are told one by one


def prepare(lines: Mapping[str, Line]) -> Prepared:
    """The variants of all lines, and what their clients cost.

    Raises:
        ArgumentError: what cannot run.
    """
    for line in lines.values():
        check_point(line.point)
    variants = variants_of_clients(lines, Point.algorithm)
    costs = {name: class_costs(line.point, line.point.problem()) for name, line in lines.items()}
    told = _description(lines)
    for name, line in list(lines.items())[:MOST_TOLD]:
        told += cost_lines(name, line.point, costs[name])
    told += [f"... and {len(lines) - MOST_TOLD} more"] if len(lines) > MOST_TOLD else []
    first = next(iter(variants.values()))
    return Prepared(variants, told, {"node_loop": first.task.node_loop}, costs)  # auto's, which decides last bits


def variants_of_clients(lines: Mapping[str, Line], algorithm: Callable[[Any], Algorithm]) -> dict[str, Variant]:
    """Variants to train, of points that say their own counts of clients and measures.

    Raises:
        ArgumentError: what an algorithm refuses when it is built or begins.
    """

    def of_line(name: str, line: Line) -> dict[str, Any]:
        point, seeds = line.point, line.seeds
        data = point.clients.data(point.data, sum(point.counts), seeds)
        check_start(algorithm(point), jax.random.key(seeds[0]), data(seeds[0]))
        return {"data": data, "num_rounds": point.steps.rounds, "measures": point.measures()}

    return variants_of(lines, algorithm, of_line)


def finish(finished: Finished) -> Sequence[Path]:
    """Add to the summary what clients cost and in which round targets were reached; draw accuracy by comparison."""
    metrics = finished.run.read_metrics()
    for name, line in finished.lines.items():
        row, target = finished.summary["variants"][name], line.point.learning.target_accuracy
        row.update(described(finished.context[name]))
        if target is not None:
            of_line = [entry for entry in metrics if entry["variant"] == name]
            row["target_accuracy"] = target
            row["rounds_to_target"] = spread(rounds_to_target(of_line, line.seeds, target))
    if {name for line in finished.lines.values() for name in line.settings} - {*COMPARED}:
        return []  # of a sweep
    plots = finished.run.path / "plots"
    plots.mkdir(exist_ok=True)
    x = next(iter(finished.lines.values())).point.run.x
    return [plot_curves(read_results([str(finished.run.path)]), plots / "cases.png", x)]


def _description(lines: Mapping[str, Line]) -> list[str]:
    """Describe in a few lines the run that is about to start."""
    first = next(iter(lines.values()))
    point: Point = first.point
    clients, steps = point.clients, point.steps
    sizes = np.asarray(point.clients.data(point.data, clients.nodes, first.seeds)(first.seeds[0]).sizes)
    parameters = size(jax.eval_shape(point.task().init, jax.random.key(0)))
    how = clients.partition + (f" {clients.alpha:g}" if clients.partition == "dirichlet" else "")
    decay = f", a tenth after {' and '.join(map(str, steps.decay_rounds))}" if steps.decay_rounds else ""
    seeds = dict.fromkeys(seed for line in lines.values() for seed in line.seeds)
    return [
        f"{point.data.dataset}: {sizes.sum()} samples over {clients.nodes} clients ({how}: {sizes.min()} to "
        f"{sizes.max()} in seed {first.seeds[0]}), model {point.network.model} with {parameters} parameters",
        f"{steps.rounds} rounds of {steps.local_steps} steps with batches of {steps.batch_size}, step size "
        f"{steps.step_size:g}{decay}, momentum {steps.momentum:g}, weight decay {steps.weight_decay:g}, seeds "
        f"{' '.join(map(str, seeds))}",
    ]


def run_or_report(asked: Request) -> int:
    """Train, or what --show and --collect ask for; returns the exit code."""
    report, batch_size = asked.point.report, asked.point.steps.batch_size
    if report.collect:
        _collect(report.collect, asked.point.run.out)
    elif report.show == "sizes":
        Console(markup=False).print(sizes_table())
    elif report.show == "timing":
        check.at_least(1, batch_size=batch_size)
        Console(markup=False).print(timing_table(batch_size))
    else:
        return run(asked)
    return 0


def _collect(directories: Sequence[str], out: str | None) -> None:
    """Tables and pictures of several runs."""
    results = read_results(directories)
    text = markdown(results)
    print(text)
    if out is None:
        return
    directory = Path(out).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tables.md").write_text(text)
    pictures = {"curves.png": plot_curves, "gaps.png": plot_gaps, "added.png": plot_added}
    drawn = [plot(results, directory / name) for name, plot in pictures.items()]
    files = [directory / "tables.md", *(path for path in drawn if path is not None)]
    Console(markup=False).print(f"Written: {', '.join(map(str, files))}", soft_wrap=True)
