"""Cases from options of experiments.embracing_fl, additions to the summary of runs, and counts in place of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxfl.core import Algorithm, check
from jaxfl.core.conditions import Condition, conditions, warnings
from jaxfl.core.tree import size
from jaxfl.frame import Finished, Prepared, Request, Row, cases_of
from jaxfl.frame.run import run
from jaxfl.training import Case
from jaxfl.training.chunks import check_start
from jaxfl.training.summary import rounds_to_target, spread

from .costs import class_costs, cost_lines, described, sizes_table, timing_table
from .defaults import check_config
from .options import Configuration

MOST_TOLD = 14  # most cases of a grid that are described one by one


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows, and the costs of their clients.

    Raises:
        ArgumentError: the case cannot run.
    """
    for row in rows.values():
        check_config(row.config)
    cases = cases_of_clients(rows, Configuration.algorithm)
    costs = {name: class_costs(row.config, row.config.problem()) for name, row in rows.items()}
    lines = _description(rows)
    for name, row in list(rows.items())[:MOST_TOLD]:
        lines += cost_lines(name, row.config, costs[name])
    lines += [f"... and {len(rows) - MOST_TOLD} more"] if len(rows) > MOST_TOLD else []
    first = next(iter(cases.values()))
    return Prepared(cases, lines, {"node_loop": first.task.node_loop}, costs)  # auto's choice decides last bits


def cases_of_clients(rows: Mapping[str, Row], algorithm: Callable[[Any], Algorithm]) -> dict[str, Case]:
    """Cases to train, from configurations with `federated` data and `measures`.

    Raises:
        ArgumentError: the algorithm refuses the case.
    """

    def of_row(name: str, row: Row) -> dict[str, Any]:
        config, seeds = row.config, row.seeds
        data = config.federated(seeds)
        check_start(algorithm(config), jax.random.key(seeds[0]), data(seeds[0]))
        return {"data": data, "num_rounds": config.steps.rounds, "measures": config.measures()}

    return cases_of(rows, algorithm, of_row)


def finish(finished: Finished) -> Sequence[Path]:
    """Add to the summary what clients cost and in which round targets were reached."""
    by_case = finished.run.read_metrics().by_case()
    for name, row in finished.rows.items():
        entry, target = finished.summary["cases"][name], row.config.learning.target_accuracy
        entry.update(described(finished.context[name]))
        if target is not None:
            entry["target_accuracy"] = target
            entry["rounds_to_target"] = spread(rounds_to_target(by_case[name], row.seeds, target))
    return ()


def _description(rows: Mapping[str, Row]) -> list[str]:
    """Describe in a few lines the run that is about to start."""
    first = next(iter(rows.values()))
    config: Configuration = first.config
    clients, steps = config.clients, config.steps
    sizes = np.asarray(config.clients.data(config.data, clients.nodes, first.seeds)(first.seeds[0]).sizes)
    parameters = size(jax.eval_shape(config.task().init, jax.random.key(0)))
    how = clients.partition + (f" {clients.alpha:g}" if clients.partition == "dirichlet" else "")
    decay = f", a tenth after {' and '.join(map(str, steps.decay_rounds))}" if steps.decay_rounds else ""
    seeds = dict.fromkeys(seed for row in rows.values() for seed in row.seeds)
    of_cases = {name: _theorem_1(row.config) for name, row in rows.items() if row.config.learning.method == "embracing"}
    return [
        f"{config.data.dataset}: {sizes.sum()} samples over {clients.nodes} clients ({how}: {sizes.min()} to "
        f"{sizes.max()} in seed {first.seeds[0]}), model {config.network.model} with {parameters} parameters",
        f"{steps.rounds} rounds of {steps.local_steps} steps with batches of {steps.batch_size}, step size "
        f"{steps.step_size:g}{decay}, momentum {steps.momentum:g}, weight decay {steps.weight_decay:g}, seeds "
        f"{' '.join(map(str, seeds))}",
        "A case is a row of the paper's Table 3: how many clients are strong (they train the whole model), moderate "
        "and weak (they train its output side, or a narrow model).",
        *([f"Theorem 1 covers losses whose L is at most {_largest_smoothness(config):.3g}"] if of_cases else []),
        *warnings(of_cases),
    ]


def _theorem_1(config: Configuration) -> list[Condition]:
    """List the theorem's assumptions on local steps; it bounds the step size by L, which nobody estimates here."""
    steps = config.steps
    return conditions("Theorem 1", ("momentum <= 0", steps.momentum, 0), ("decay <= 0", steps.weight_decay, 0))


def _largest_smoothness(config: Configuration) -> float:
    """The largest L with eta <= min(1 / (tau L), 1 / (4 L sqrt(tau (tau - 1))))."""
    eta, tau = config.steps.step_size, config.steps.local_steps
    return 1 / (eta * max(tau, 4 * math.sqrt(tau * (tau - 1))))


def run_or_show(request: Request) -> int:
    """Train, or print what --show requests; returns the exit code."""
    show, batch_size = request.config.report.show, request.config.steps.batch_size
    if show == "sizes":
        Console(markup=False).print(sizes_table())
    elif show == "timing":
        check.at_least(1, batch_size=batch_size)
        Console(markup=False).print(timing_table(batch_size))
    else:
        return run(request)
    return 0
