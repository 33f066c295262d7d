"""Cases from options of experiments.privsgp_vr: checks, noise, statements, and the description of the run."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxfl import gradients
from jaxfl.analysis.partition_plot import plot_partition
from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.core import ArgumentError
from jaxfl.core.check import bytes_text
from jaxfl.core.tree import num_bytes, replicate
from jaxfl.frame import Finished, Prepared, Row, cases_of, few, flat, override, programs
from jaxfl.frame.options import text_of
from jaxfl.gradients import per_example
from jaxfl.gradients.memory import require_fits
from jaxfl.graphs.files import is_graph_file
from jaxfl.privacy.gossip import ProblemConstants
from jaxfl.privacy.statements import noise_text
from jaxfl.privacy.stored_gradients import THEOREM
from jaxfl.training import stationarity
from jaxfl.training.chunks import check_start

from .options import METHODS, Configuration, check_config
from .spending import privacy_of, rounds_allowed, settled, with_budgets

NUM_PROBES, PROBE_STEP_SIZE = 20, 0.1  # of the probing run of `--iterations auto`
# Option that may hold a word (auto, calibrated) -> a number that passes all checks, until its own is known.
_OPEN = {"iterations": 1, "step_size": 1.0, "noise_std": 0.0}


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows; rows that cannot run are refused before noise is calibrated."""
    of_file = [name for name, row in rows.items() if isinstance(row.config.budget.node_epsilons, str)]
    rows = {name: row._replace(config=with_budgets(row.config)) for name, row in rows.items()}
    sizes = {name: row.samples_per_node() for name, row in rows.items()}
    for row in rows.values():
        check_config(row.config)
    _refuse_impossible(rows)
    ready = settled(rows, sizes, functools.lru_cache(maxsize=8)(_constants))
    measure = functools.cache(stationarity)  # the same object for cases that share a program
    most_rounds = {name: rounds_allowed(name, rows[name].config, ready[name].config, sizes[name]) for name in rows}

    def of_row(name: str, row: Row) -> dict[str, Any]:
        config: Configuration = row.config
        most = config.learning.stationarity_samples
        return {
            "measures": {"stationarity": measure(config.task(), most, at_nodes=True)} if most else {},
            "data": config.clients.data(config.data),
            "num_rounds": config.learning.iterations,
            "privacy": privacy_of(config, sizes[name]),
            "noise_stds": config.budget.node_noise or (config.budget.noise_std,),
            "final_params_are_private": True,
            "max_rounds": most_rounds[name],
        }

    cases = cases_of(ready, Configuration.algorithm, of_row)
    configs = [row.config for row in ready.values()]
    # A file of the same name may hold other budgets at a resume.
    facts: dict[str, Any] = {"budgets": {name: rows[name].config.budget.node_epsilons for name in of_file}}
    numbers = {name: _facts(rows[name].config, row.config) for name, row in ready.items()}
    facts = {**(facts if of_file else {}), "settled": numbers}
    of_files = [config for config in configs if is_graph_file(config.topology.graph)]
    files = {config.topology: config.clients.nodes for config in of_files}
    if files:  # a file of the same name may hold another matrix at a resume
        matrices = [topology.build(nodes).mixing_matrices.tobytes() for topology, nodes in files.items()]
        facts["graph_crc32"] = [zlib.crc32(matrix) for matrix in matrices]
    return Prepared(cases, [*_description(ready), *_table(configs)], facts)


def _facts(request: Configuration, config: Configuration) -> dict[str, Any]:
    """Facts of a settled row for config.json: the theorem of a table, which a resume compares first, and numbers."""
    is_amplified = config.learning.has_table and config.learning.sampler == "poisson"
    theorem = {"table_theorem": THEOREM} if is_amplified else {}
    by_size = bool(config.budget.node_noise) and not (request.budget.node_noise or request.budget.node_epsilons)
    noise = {"noise_by_size": True} if by_size else {}  # before 2026-11-27 all nodes had the largest
    keys = config.shared_keys()
    shared = {} if keys is None else {"key_graph": keys.key_graph.name, "shared_ratio": keys.ratio}
    return {**theorem, **noise, **shared, **{key: flat(config)[key] for key in _OPEN}}


def finish(finished: Finished) -> list[Path]:
    """The picture of the first case's partition."""
    config: Configuration = next(iter(finished.rows.values())).config
    dataset, data = config.data.load(), config.clients.data(config.data)(config.run.seed)
    path = finished.run.path / "plots" / "partition.png"
    return [plot_partition(data, dataset.train_labels, dataset.num_classes, path)]


def _refuse_impossible(rows: Mapping[str, Row]) -> None:
    """Refuse cases and seeds that cannot run before noise is calibrated; computes and writes nothing."""
    trial = {}  # with numbers for options that are not known yet; the checks here do not depend on these
    for name, row in rows.items():
        values = flat(row.config)
        numbers = {key: number for key, number in _OPEN.items() if isinstance(values[key], str)}
        trial[name] = row._replace(config=override(row.config, numbers))
    done = set()
    for name, (build, _) in programs(trial, Configuration.algorithm).items():
        config = trial[name].config
        algorithm, data_of = config.algorithm(), config.clients.data(config.data)
        for seed in rows[name].seeds:
            data = data_of(seed)
            counts = build, tuple(np.asarray(data.sizes).tolist())
            if counts not in done:  # an algorithm's checks depend on the sizes of the data only
                done.add(counts)
                state = check_start(algorithm, jax.random.key(seed), data)
                require_fits("hidden" if config.network.model == "mlp" else "model", num_bytes(state), {})


def _constants(config: Configuration) -> ProblemConstants:
    """The problem's constants, by a short probing run with the first seed."""
    data = config.clients.data(config.data)(config.run.seed)
    key = jax.random.key(config.run.seed)
    try:
        constants = estimate_constants(
            key, config.task(), data, num_probes=NUM_PROBES, step_size=PROBE_STEP_SIZE, max_samples_per_node=256
        )
    except ArgumentError as error:  # names an argument that is no option here
        failure = f"the probing run failed: {error.requirement}; {error.found}"
        raise ArgumentError("iterations", "auto needs a probing run", failure, "Pass a number.") from None
    clip_norm = config.learning.clip_norm
    bound = config.budget.gradient_bound if clip_norm is None else clip_norm
    constants = constants if bound is None else constants._replace(gradient_bound=bound)
    Console(markup=False).print(f"Estimated for {config.clients.nodes} nodes: {constants}", soft_wrap=True)
    return constants


def _description(rows: Mapping[str, Row]) -> list[str]:
    """Describe the run: the numbers that all cases share, and one row per case."""
    first: Configuration = next(iter(rows.values())).config
    dataset, task = first.data.load(), first.task()
    flats = [flat(row.config) for row in rows.values()]

    def each(option: str) -> str:
        return " or ".join(dict.fromkeys(text_of(values[option]) for values in flats))

    model = first.network.model
    if model == "mlp":
        model = "-".join(map(str, (dataset.train_inputs[0].size, *first.network.hidden, dataset.num_classes)))
    norms = [values["clip_norm"] for values in flats if values["clip_norm"] is not None]
    clipping = f"at {each('clip_norm')} ({per_example.route(task, norms[0])})" if norms else "off"
    seeds = " ".join(map(str, dict.fromkeys(seed for row in rows.values() for seed in row.seeds)))
    lines = [
        f"{dataset.name}: {len(dataset.train_labels)} samples over {each('nodes')} nodes ({each('partition')}), graph "
        f"{each('graph')}, model {model} with {first.num_params()} parameters",
        f"{each('sampler')} sampling, clipping {clipping}, seeds {seeds}, node loop {task.node_loop}",
    ]
    texts = []
    for name, row in rows.items():
        learning, budget = row.config.learning, row.config.budget
        limits = " to ".join(dict.fromkeys(f"{end(budget.limits):g}" for end in (min, max) if budget.limits))
        bound = METHODS[learning.method].accountant.bound_name(budget.bound)
        target = f", budget ε = {limits} ({bound})" if limits else ""
        grid = f" on a grid of {budget.grid_bits} bits" if budget.grid is not None else ""
        numbers = f"{learning.iterations} iterations, step size {learning.step_size:.4g}"
        noise = " to ".join(
            dict.fromkeys(noise_text(end(budget.node_noise or [budget.noise_std])) for end in (min, max))
        )
        texts.append(f"{name}: {numbers}, noise std {noise}{grid}{_shared(row.config)}{target}")
    return [*lines, *few(texts)]


def _shared(config: Configuration) -> str:
    """Own and shared parts of the noise, where pairs of nodes share some."""
    keys = config.shared_keys()
    secrets = config.mechanism()(np.asarray(config.budget.node_noise) if config.budget.node_noise else 1.0).secrets
    if keys is None or secrets is None:
        return ""
    return f" effective against {secrets.observer} ({keys.key_graph.name} key graph, ratio {keys.ratio:.4g})"


def _table(configs: Sequence[Configuration]) -> list[str]:
    """The bytes of a gradient table, where there is one."""
    config = next((config for config in configs if config.learning.has_table), None)
    if config is None:
        return []
    task, learning, data = config.task(), config.learning, config.clients.data(config.data)(config.run.seed)
    params = jax.eval_shape(lambda: replicate(task.init(jax.random.key(0)), config.clients.nodes))
    options = {"table": learning.table, "entry_size": learning.entry_size or 1, "storage": learning.storage}
    num_bytes = gradients.table_bytes(task, params, data, **options)
    return [f"{learning.table} gradient table in {learning.storage}: {bytes_text(num_bytes)}"]
