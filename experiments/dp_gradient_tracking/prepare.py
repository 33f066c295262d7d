"""Cases from options of experiments.dp_gradient_tracking: checks, conditions, statements, and the description of the
run."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.core import ArgumentError
from jaxfl.core.conditions import Condition, warnings
from jaxfl.core.tree import num_bytes, size
from jaxfl.frame import Prepared, Row, cases_of, few
from jaxfl.gradients.memory import require_fits
from jaxfl.graphs.files import is_graph_file, tracking_pair
from jaxfl.training import stationarity
from jaxfl.training.chunks import check_start

from .budgets import broken_conditions, calibrated, privacy_of
from .options import Configuration, check_config

PROBING = {"num_probes": 10, "step_size": 0.05, "max_samples_per_node": 128}  # for the estimate of L


class Context(NamedTuple):
    """Facts of a run that its pictures and files need."""

    failures: Mapping[str, Sequence[Condition]]  # name of a row -> broken conditions
    configs: Mapping[str, Configuration]  # with noise as a number


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows; rows that cannot run are refused, with --strict also rows that break a condition."""
    for row in rows.values():
        row.config.agents.data(row.config.data)(row.seeds[0])  # refuses more agents than there are samples
        check_config(row.config)
    sizes = {name: _sizes(name, row) for name, row in rows.items()}
    rows = {name: row._replace(config=calibrated(row.config, sizes[name])) for name, row in rows.items()}
    ready = {name: row._replace(config=row.config.settled()) for name, row in rows.items()}
    measure = functools.cache(stationarity)  # the same object for cases that share a program

    def of_row(name: str, row: Row) -> dict[str, Any]:
        config: Configuration = rows[name].config
        data_of = config.agents.data(config.data)
        key, option = jax.random.key(row.seeds[0]), "hidden" if config.network.model == "mlp" else "model"
        # Before noise of that size is traced, which has a refusal of its own.
        require_fits(option, config.agents.nodes * num_bytes(jax.eval_shape(config.task().init, key)), {})
        require_fits(option, num_bytes(check_start(row.config.algorithm(), key, data_of(row.seeds[0]))), {})
        return {
            "data": data_of,
            "num_rounds": config.num_rounds,
            "measures": {"stationarity": measure(config.task(), config.theory.train_samples)},
            "privacy": privacy_of(config, sizes[name]),
            "final_params_are_private": config.learning.method == "DP-GT"
            and config.learning.gradient_at == "broadcast",
        }

    cases = cases_of(ready, Configuration.algorithm, of_row)
    failures, lines, rates = _conditions(rows)
    lines += [
        *_description(rows, sizes),
        *few(rates),
        *few([f"{name}: {_row(row.config)}" for name, row in rows.items()]),
    ]
    graphs = {(row.config.weights.graph, row.config.agents.nodes) for row in rows.values()}
    # A file of the same name may hold other weights at a resume.
    files = sorted(file for file in graphs if is_graph_file(file[0]))
    checksums = [zlib.crc32(np.stack(tracking_pair(*file)).tobytes()) for file in files]
    facts: dict[str, Any] = {"graph_crc32": checksums} if files else {}
    of_budgets = [name for name, row in rows.items() if row.config.has_budget]
    if of_budgets:
        noises = {name: rows[name].config.noise for name in of_budgets}
        facts["settled"] = {
            name: {"noise_gain": noise.noise_gain, **({"agent_gains": noise.agent_gains} if noise.agent_gains else {})}
            for name, noise in noises.items()
        }
    return Prepared(cases, lines, facts, Context(failures, {name: row.config for name, row in rows.items()}))


def _sizes(name: str, row: Row) -> list[int]:
    """Samples of every agent, the least over seeds; refused if some has fewer than a gradient takes."""
    data_of, batch = row.config.agents.data(row.config.data), row.config.learning.batch_size
    sizes = np.min([np.asarray(data_of(seed).sizes) for seed in row.seeds], axis=0).tolist()
    fewest = min(sizes)
    if batch > fewest:
        found = f"{name} draws {batch} and agent {sizes.index(fewest)} has {fewest}"
        remedy = f"Pass --batch-size {fewest} or less, or give agents more data."
        raise ArgumentError("batch_size", "must be at most the samples of every agent and seed", found, remedy)
    return sizes


def _conditions(rows: Mapping[str, Row]) -> tuple[dict[str, list[Condition]], list[str], list[str]]:
    """Conditions of the theorems that each case of gradient tracking breaks, the same in sentences, and its rates."""
    failures: dict[str, list[Condition]] = {}
    estimates: dict[tuple, float] = {}
    rates: dict[str, None] = {}
    for name, (config, *_) in rows.items():
        if config.learning.method != "DP-GT":
            continue
        smoothness = config.theory.smoothness
        if smoothness == "estimated":
            problem = (config.data, config.agents, config.network)
            if problem not in estimates:
                estimates[problem] = _estimate_smoothness(config)
            smoothness = estimates[problem]
        failures[name], rate = broken_conditions(config, smoothness)
        rates[f"{rate}, where no condition fails"] = None
        if config.theory.strict and failures[name]:
            found = f"{name}: " + "; ".join(map(str, failures[name]))
            remedy = "Change steps, noise or graph, or leave --strict out."
            raise ArgumentError("strict", "every condition of the theorems must hold", found, remedy)
    lines = [f"L = {value:.3g}, estimated by a probing run (a lower bound)" for value in estimates.values()]
    return failures, lines + few(warnings(failures)), [*rates]


def _estimate_smoothness(config: Configuration) -> float:
    try:
        seed, data_of = config.run.seed, config.agents.data(config.data)
        return estimate_constants(jax.random.key(seed), config.task(), data_of(seed), **PROBING).smoothness
    except ArgumentError as error:  # names an argument that is no option here
        found = f"the probing run failed: {error.requirement}; {error.found}"
        raise ArgumentError("smoothness", "must be given where it cannot be estimated", found, "Pass L.") from None


def _description(rows: Mapping[str, Row], sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """Describe the run that is about to start, by the first case's options."""
    config: Configuration = next(iter(rows.values())).config
    learning, noise = config.learning, config.noise
    seeds = sorted({seed for row in rows.values() for seed in row.seeds})
    parameters = size(jax.eval_shape(config.task().init, jax.random.key(0)))
    norm = "L1" if noise.distribution == "laplace" else "L2"
    return [
        f"{config.data.dataset}: {sum(next(iter(sizes.values())))} samples over {config.agents.nodes} agents "
        f"({config.agents.partition}), model {config.network.model} with {parameters} parameters",
        f"K = {learning.iterations}, gradients {'assumed' if learning.assume_bounded else 'clipped'} at {norm} norm "
        f"{learning.clip_norm:g}, {noise.distribution} noise, seeds {' '.join(map(str, seeds))}",
    ]


def _row(config: Configuration) -> str:
    """The numbers of a case that its method uses."""
    learning, scales, tracks = config.learning, config.schedule().state_noise_scale, config.learning.method == "DP-GT"
    parts = [f"graph {config.weights.graph if tracks else config.weights.baseline_graph}"]
    parts += [f"alpha {learning.state_mixing:.3g}"] if learning.method != "noisy-outputs" else []
    parts += [f"beta {learning.tracker_mixing:.3g}"] if tracks else []
    noise = f"noise scales {scales.min():.3g} to {scales.max():.3g}" if config.is_noisy else "no noise"
    if config.has_budget:
        noise += f", budget ε = {config.noise.target_epsilon:g} ({config.noise.bound})"
    return ", ".join([*parts, f"gamma {learning.step_size:.3g}", f"m {learning.batch_size}", noise])
