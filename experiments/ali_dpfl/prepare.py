"""Cases from options of experiments.ali_dpfl: checks, budgets, statements, and the description of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxfl.core import ArgumentError
from jaxfl.core.tree import size
from jaxfl.frame import Prepared, Row, cases_of, few
from jaxfl.frame.options import text_of
from jaxfl.training.chunks import check_start

from .options import ALI, ALONE, FIXED, PRIVATE_STEPS, UPDATES, Configuration, check_config
from .spending import asked_of, privacy_of, released, rounds_of, settled


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows; rows that cannot run are refused before any work."""
    sizes = {name: row.samples_per_node() for name, row in rows.items()}
    for name, row in rows.items():
        check_config(row.config)
        _check_sizes(row.config, min(sizes[name]))
    ready = {name: row._replace(config=settled(row.config, sizes[name])) for name, row in rows.items()}

    def of_row(name: str, row: Row) -> dict[str, Any]:
        config: Configuration = row.config
        method, batch_size, last = config.learning.method, config.learning.batch_size, rounds_of(config)
        multipliers = config.budget.client_noise if method in PRIVATE_STEPS else ()
        return {
            "data": config.clients.data(config.data),
            # FedAvg ends after the rounds of the budget, too, but spends none of it.
            "num_rounds": config.learning.rounds if method in PRIVATE_STEPS else last,
            "privacy": privacy_of(config, sizes[name], asked_of(rows[name].config)),
            "released": released(config),
            "noise_stds": tuple(each * config.budget.clip_norm / batch_size for each in multipliers),
            "final_params_are_private": method == UPDATES
            or (method in PRIVATE_STEPS and (method != ALI or config.learning.constants == "private")),
            "max_rounds": last,
            "budgets": {"local_iterations": config.budget.max_iterations} if method == ALI else {},
        }

    cases = cases_of(ready, Configuration.algorithm, of_row)
    for name in cases:
        config, seeds, _ = ready[name]
        for seed in seeds:
            check_start(config.algorithm(), jax.random.key(seed), config.clients.data(config.data)(seed))
    counts = {name: _counts(row.config) for name, row in ready.items()}
    return Prepared(cases, _description(ready, sizes), {"settled": counts})


def _pooled(row: Row) -> dict[str, Any] | None:
    """One client with all samples and as many rounds and iterations, in batches of as many as all clients take."""
    config: Configuration = row.config
    if config.learning.method == ALI:
        return None  # its number of local iterations is chosen for clients that differ
    counts, nodes = _counts(settled(config, row.samples_per_node())), config.clients.nodes
    place = {"nodes": 1, "partition": "iid", "batch_size": nodes * config.learning.batch_size, "client_noise": ()}
    return {"method": "FedAvg", **counts, **place}


def _curator(row: Row) -> dict[str, Any] | None:
    """The same by DP-SGD, with the least noise that meets the budget of a row of DPFL."""
    if row.config.learning.method != FIXED:
        return None
    return {**(_pooled(row) or {}), "method": FIXED, "noise_multiplier": "calibrated"}


def _of_fixed(method: str) -> Callable[[Row], dict[str, Any] | None]:
    """The baseline that another method makes for rows of DPFL; other rows have none."""
    return lambda row: {"method": method} if row.config.learning.method == FIXED else None


BASELINES = {
    "alone": _of_fixed(ALONE),
    "pooled": _pooled,
    "curator": _curator,
    "without_noise": _of_fixed("FedAvg"),
}


def _check_sizes(config: Configuration, least: int) -> None:
    """Refuse batches that the smallest client cannot draw."""
    learning = config.learning
    private = learning.method == ALI and learning.constants == "private"
    sizes = {"batch_size": learning.batch_size, "constants_batch": (learning.constants_batch or 0) if private else 0}
    for name, count in sizes.items():
        if count > least:
            requirement = f"must be at most the samples of the smallest client, {least}"
            raise ArgumentError(name, requirement, f"got {count}", "Pass a smaller one, or use fewer clients.")
    if learning.method == UPDATES and learning.num_active > config.clients.nodes:
        found, remedy = f"got {learning.num_active}", "Pass fewer."
        raise ArgumentError("num_active", f"must be at most all {config.clients.nodes} clients", found, remedy)


def _counts(config: Configuration) -> dict[str, object]:
    """Rounds and iterations that follow from the budget."""
    return {"rounds": config.learning.rounds, "max_iterations": config.budget.max_iterations}


def _description(rows: Mapping[str, Row], sizes: Mapping[str, list[int]]) -> list[str]:
    """Describe the run: the numbers that all cases share, and one row per case."""
    name, row = next(iter(rows.items()))
    first: Configuration = row.config
    dataset, task, here = first.data.load(), first.task(), sizes[name]
    num_params = size(jax.eval_shape(task.init, jax.random.key(0)))
    samples = text_of(min(here)) if min(here) == max(here) else f"{min(here)} to {max(here)}"
    lines = [
        f"{dataset.name}: {len(dataset.train_labels)} samples over {first.clients.nodes} clients "
        f"({first.clients.partition}, {samples} each), model {first.network.model} with {num_params} parameters, node "
        f"loop {task.node_loop}",
        "R_s: rounds of the run. T: local iterations (steps of SGD with noise) that the budget pays for at a client. "
        "tau (τ in names): local iterations in a round, fixed by DPFL, chosen anew in each round by ALI-DPFL. A "
        "training loss is the mean over the local iterations of a round, so that a large tau begins lower.",
    ]
    texts = []
    for name, row in rows.items():
        learning, budget = row.config.learning, row.config.budget
        steps = "chosen" if learning.method == ALI else text_of(learning.local_steps)
        texts.append(
            f"{name}: R_s = {learning.rounds} rounds, T = {budget.max_iterations} local iterations, tau {steps}, step "
            f"size {learning.step_size:.4g}"
        )
    return [*lines, *few(texts), *_remarks(rows, sizes)]


def _remarks(rows: Mapping[str, Row], sizes: Mapping[str, list[int]]) -> list[str]:
    """Warn of cases for which the privacy budget does not hold."""
    configs = {name: row.config for name, row in rows.items()}
    lines = []
    samples = {name: config.budget.accounted_samples or 0 for name, config in configs.items()}
    over = [name for name in rows if samples[name] > min(sizes[name])]
    if over:
        least = min(min(sizes[name]) for name in over)
        lines.append(
            f"warning: the budget assumes {max(samples.values())} samples of a client, but the smallest has {least}: "
            "it is overspent. Statements count each client's own samples."
        )
    if any(
        config.learning.method == ALI and config.learning.constants == "as_published" for config in configs.values()
    ):
        lines.append("ALI-DPFL as published chooses its next tau by estimates without noise: it has no epsilon.")
    return lines
