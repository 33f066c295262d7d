"""From lines of experiments.privsgp_vr to variants: checks, noise, statements, and what is told before the run."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from experiments.frame import Finished, Line, Prepared, flat, identity, lay, programs
from experiments.frame.options import text_of
from experiments.privsgp_vr.options import INFINITY, Point, check_point
from experiments.privsgp_vr.spending import privacy_of, rounds_allowed, settled
from jaxfl import gradients
from jaxfl.analysis.partition_plot import plot_partition
from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.core import ArgumentError
from jaxfl.core.check import bytes_text
from jaxfl.core.tree import num_bytes, replicate
from jaxfl.gradients import per_example
from jaxfl.gradients.memory import require_fits
from jaxfl.privacy.gossip import ProblemConstants
from jaxfl.training import Variant
from jaxfl.training.chunks import check_start

NUM_PROBES, PROBE_STEP_SIZE = 20, 0.1  # of the probing run of `--iterations auto`


def prepare(lines: Mapping[str, Line]) -> Prepared:
    """The variants of all lines.

    Raises:
        ArgumentError: what cannot run, before noise is calibrated.
    """
    sizes = {name: _sizes(line) for name, line in lines.items()}
    for line in lines.values():
        check_point(line.point)
    _refuse_impossible(lines)
    ready = settled(lines, sizes, functools.lru_cache(maxsize=8)(_constants))
    allowed = {name: rounds_allowed(name, lines[name].point, ready[name].point, sizes[name]) for name in lines}
    variants = {}
    for name, (build, numbers) in programs(ready, Point.algorithm).items():
        point = ready[name].point
        variants[name] = Variant(
            algorithm=build,
            task=point.task(),
            test=point.data.test_set(),
            data=point.clients.data(point.data),
            seeds=ready[name].seeds,
            num_rounds=point.learning.iterations,
            evaluate_every=point.run.evaluate_every,
            numbers=numbers,
            settings=ready[name].settings,
            identity=identity(point),
            privacy=privacy_of(point, sizes[name]),
            covered=True,
            max_rounds=allowed[name],
        )
    facts = {name: {key: flat(line.point)[key] for key in _SETTLED} for name, line in ready.items()}
    first = next(iter(ready.values())).point
    saved = {"variants": facts, "node_loop": first.task().node_loop}  # what auto stands for: another gives other bits
    files = {line.point.topology: line.point.clients.nodes for line in ready.values() if _is_file(line.point)}
    if files:  # another matrix may come by the same name
        matrices = [topology.build(nodes).mixing_matrices.tobytes() for topology, nodes in files.items()]
        saved["graph_crc32"] = [zlib.crc32(matrix) for matrix in matrices]
    return Prepared({name: variants[name] for name in lines}, _description(ready), saved)


def finish(finished: Finished) -> list[Path]:
    """The picture of the first line's partition."""
    point: Point = next(iter(finished.lines.values())).point
    dataset, data = point.data.load(), point.clients.data(point.data)(point.run.seed)
    path = finished.run.path / "plots" / "partition.png"
    return [plot_partition(data, dataset.train_labels, dataset.num_classes, path)]


_SETTLED = ("iterations", "step_size", "noise_std")  # options that may get their numbers here


def _is_file(point: Point) -> bool:
    return point.topology.graph.endswith(".npy")


def _sizes(line: Line) -> list[int]:
    """Samples of every node, over all seeds."""
    data_of = line.point.clients.data(line.point.data)
    return np.concatenate([np.asarray(data_of(seed).sizes) for seed in line.seeds]).tolist()


def _refuse_impossible(lines: Mapping[str, Line]) -> None:
    """Say what is wrong with any line and seed before noise is calibrated; computes and writes nothing."""
    # Noise, iterations and step size may not be known yet; what they are decides nothing of what is checked here.
    open_numbers = {"noise_std": ("calibrated", 0.0), "iterations": ("auto", 1), "step_size": ("theory", 1.0)}
    trial = {}
    for name, line in lines.items():
        values = flat(line.point)
        unknown = {key: number for key, (word, number) in open_numbers.items() if values[key] == word}
        trial[name] = line._replace(point=lay(line.point, unknown))
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
    Console().print(f"Estimated for {point.clients.nodes} nodes: {estimated}", soft_wrap=True)
    return estimated


def _description(lines: Mapping[str, Line]) -> list[str]:
    """What is about to run: what all lines share, and a row a line."""
    points = [line.point for line in lines.values()]
    first: Point = points[0]
    dataset, task = first.data.load(), first.task()
    model = first.network.model
    if model == "mlp":
        model = "-".join(map(str, (dataset.train_inputs[0].size, *first.network.hidden, dataset.num_classes)))
    flats = [flat(point) for point in points]

    def each(option: str) -> str:
        return " or ".join(dict.fromkeys(text_of(values[option]) for values in flats))

    norms = [values["clip_norm"] for values in flats if values["clip_norm"] is not None]
    clipping = f"at {each('clip_norm')} ({per_example.route(task, norms[0])})" if norms else "off"
    seeds = " ".join(map(str, dict.fromkeys(seed for line in lines.values() for seed in line.seeds)))
    told = [
        f"{dataset.name}: {len(dataset.train_labels)} samples over {each('nodes')} nodes ({each('partition')}), graph "
        f"{each('graph')}, model {model} with {first.num_params()} parameters",
        f"{each('sampler')} sampling, clipping {clipping}, seeds {seeds}, node loop {task.node_loop}",
    ]
    for name, line in list(lines.items())[:MOST_TOLD]:
        learning, budget = line.point.learning, line.point.budget
        grid = f" on a grid of {budget.grid_bits} bits" if budget.noise == "grid_gaussian" else ""
        target = "" if budget.target_epsilon == INFINITY else f", budget ε = {budget.target_epsilon:g} ({budget.bound})"
        told.append(
            f"{name}: {learning.iterations} iterations, step size {learning.step_size:.4g}, noise std "
            f"{budget.noise_std:.4g}{grid}{target}"
        )
    if len(lines) > MOST_TOLD:
        told.append(f"... and {len(lines) - MOST_TOLD} more")
    return told + _table_lines(points)


MOST_TOLD = 12  # lines of a grid that are told one by one


def _table_lines(points: Sequence[Point]) -> list[str]:
    """The bytes of a gradient table, where there is one."""
    with_table = [point for point in points if point.learning.has_table]
    if not with_table:
        return []
    point = with_table[0]
    task, learning = point.task(), point.learning
    params = jax.eval_shape(lambda: replicate(task.init(jax.random.key(0)), point.clients.nodes))
    data = point.clients.data(point.data)(point.run.seed)
    taken = gradients.table_bytes(
        task, params, data, table=learning.table, entry_size=learning.entry_size or 1, storage=learning.storage
    )
    return [f"{learning.table} gradient table in {learning.storage}: {bytes_text(taken)}"]
