"""From lines of experiments.privsgp_vr to variants: checks, noise, statements, and what is told before the run."""

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
from jaxfl.frame import Finished, Line, Prepared, few, flat, lay, programs, variants_of
from jaxfl.frame.options import text_of
from jaxfl.gradients import per_example
from jaxfl.gradients.memory import require_fits
from jaxfl.privacy.gossip import ProblemConstants
from jaxfl.privacy.stored_gradients import THEOREM
from jaxfl.training.chunks import check_start

from .options import METHODS, Point, check_point
from .spending import privacy_of, rounds_allowed, settled

NUM_PROBES, PROBE_STEP_SIZE = 20, 0.1  # of the probing run of `--iterations auto`
# Option that gets its number here -> the word that stands for it, and a number that passes all checks.
_OPEN = {"iterations": ("auto", 1), "step_size": ("theory", 1.0), "noise_std": ("calibrated", 0.0)}


def prepare(lines: Mapping[str, Line]) -> Prepared:
    """The variants of all lines; what cannot run is refused before noise is calibrated."""
    sizes = {name: _sizes(line) for name, line in lines.items()}
    for line in lines.values():
        check_point(line.point)
    _refuse_impossible(lines)
    ready = settled(lines, sizes, functools.lru_cache(maxsize=8)(_constants))
    allowed = {name: rounds_allowed(name, lines[name].point, ready[name].point, sizes[name]) for name in lines}

    def of_line(name: str, line: Line) -> dict[str, Any]:
        point: Point = line.point
        return {
            "data": point.clients.data(point.data),
            "num_rounds": point.learning.iterations,
            "privacy": privacy_of(point, sizes[name]),
            "covered": True,
            "max_rounds": allowed[name],
        }

    variants = variants_of(ready, Point.algorithm, of_line)
    points = [line.point for line in ready.values()]
    saved: dict[str, Any] = {"variants": {name: _kept(line.point) for name, line in ready.items()}}
    files = {point.topology: point.clients.nodes for point in points if point.topology.graph.endswith(".npy")}
    if files:  # another matrix may come by the same name
        matrices = [topology.build(nodes).mixing_matrices.tobytes() for topology, nodes in files.items()]
        saved["graph_crc32"] = [zlib.crc32(matrix) for matrix in matrices]
    return Prepared(variants, [*_description(ready), *_table(points)], saved)


def _kept(point: Point) -> dict[str, Any]:
    """Entries of config.json on a settled line: its numbers, and the theorem by which a table is accounted for.

    The theorem comes first, so that it is what a resumed run is refused for where another one gave its noise.
    """
    is_amplified = point.learning.has_table and point.learning.sampler == "poisson"
    theorem = {"table_theorem": THEOREM} if is_amplified else {}
    return {**theorem, **{key: flat(point)[key] for key in _OPEN}}


def finish(finished: Finished) -> list[Path]:
    """The picture of the first line's partition."""
    point: Point = next(iter(finished.lines.values())).point
    dataset, data = point.data.load(), point.clients.data(point.data)(point.run.seed)
    path = finished.run.path / "plots" / "partition.png"
    return [plot_partition(data, dataset.train_labels, dataset.num_classes, path)]


def _sizes(line: Line) -> list[int]:
    """Samples of every node, over all seeds."""
    data_of = line.point.clients.data(line.point.data)
    return np.concatenate([np.asarray(data_of(seed).sizes) for seed in line.seeds]).tolist()


def _refuse_impossible(lines: Mapping[str, Line]) -> None:
    """Say what is wrong with any line and seed before noise is calibrated; computes and writes nothing."""
    trial = {}  # with numbers for what is not known yet, which decides nothing of what is checked here
    for name, line in lines.items():
        values = flat(line.point)
        numbers = {key: number for key, (word, number) in _OPEN.items() if values[key] == word}
        trial[name] = line._replace(point=lay(line.point, numbers))
    checked = set()
    for name, (build, _) in programs(trial, Point.algorithm).items():
        point = trial[name].point
        algorithm, data_of = point.algorithm(), point.clients.data(point.data)
        for seed in lines[name].seeds:
            data = data_of(seed)
            counts = build, tuple(np.asarray(data.sizes).tolist())
            if counts not in checked:  # what an algorithm needs of the data is in their sizes
                checked.add(counts)
                state = check_start(algorithm, jax.random.key(seed), data)
                require_fits("hidden" if point.network.model == "mlp" else "model", num_bytes(state), {})


def _constants(point: Point) -> ProblemConstants:
    """The problem's constants, by a short probing run with the first seed."""
    data = point.clients.data(point.data)(point.run.seed)
    key = jax.random.key(point.run.seed)
    try:
        estimated = estimate_constants(
            key, point.task(), data, num_probes=NUM_PROBES, step_size=PROBE_STEP_SIZE, max_samples_per_node=256
        )
    except ArgumentError as error:  # names an argument that is no option here
        failure = f"the probing run failed: {error.requirement}; {error.found}"
        raise ArgumentError("iterations", "auto needs a probing run", failure, "Pass a number.") from None
    clip_norm = point.learning.clip_norm
    bound = point.budget.gradient_bound if clip_norm is None else clip_norm
    estimated = estimated if bound is None else estimated._replace(gradient_bound=bound)
    Console(markup=False).print(f"Estimated for {point.clients.nodes} nodes: {estimated}", soft_wrap=True)
    return estimated


def _description(lines: Mapping[str, Line]) -> list[str]:
    """Describe the run: what all lines share, and one row per line."""
    first: Point = next(iter(lines.values())).point
    dataset, task = first.data.load(), first.task()
    flats = [flat(line.point) for line in lines.values()]

    def each(option: str) -> str:
        return " or ".join(dict.fromkeys(text_of(values[option]) for values in flats))

    model = first.network.model
    if model == "mlp":
        model = "-".join(map(str, (dataset.train_inputs[0].size, *first.network.hidden, dataset.num_classes)))
    norms = [values["clip_norm"] for values in flats if values["clip_norm"] is not None]
    clipping = f"at {each('clip_norm')} ({per_example.route(task, norms[0])})" if norms else "off"
    seeds = " ".join(map(str, dict.fromkeys(seed for line in lines.values() for seed in line.seeds)))
    told = [
        f"{dataset.name}: {len(dataset.train_labels)} samples over {each('nodes')} nodes ({each('partition')}), graph "
        f"{each('graph')}, model {model} with {first.num_params()} parameters",
        f"{each('sampler')} sampling, clipping {clipping}, seeds {seeds}, node loop {task.node_loop}",
    ]
    rows = []
    for name, line in lines.items():
        learning, budget = line.point.learning, line.point.budget
        limits = " to ".join(dict.fromkeys(f"{end(budget.limits):g}" for end in (min, max) if budget.limits))
        bound = METHODS[learning.method].accountant.bound_name(budget.bound)
        target = f", budget ε = {limits} ({bound})" if limits else ""
        grid = f" on a grid of {budget.grid_bits} bits" if budget.noise == "grid_gaussian" else ""
        numbers = f"{learning.iterations} iterations, step size {learning.step_size:.4g}"
        rows.append(f"{name}: {numbers}, noise std {budget.noise_std:.4g}{grid}{target}")
    return [*told, *few(rows)]


def _table(points: Sequence[Point]) -> list[str]:
    """The bytes of a gradient table, where there is one."""
    point = next((point for point in points if point.learning.has_table), None)
    if point is None:
        return []
    task, learning, data = point.task(), point.learning, point.clients.data(point.data)(point.run.seed)
    params = jax.eval_shape(lambda: replicate(task.init(jax.random.key(0)), point.clients.nodes))
    options = {"table": learning.table, "entry_size": learning.entry_size or 1, "storage": learning.storage}
    taken = gradients.table_bytes(task, params, data, **options)
    return [f"{learning.table} gradient table in {learning.storage}: {bytes_text(taken)}"]
