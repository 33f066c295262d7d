"""From lines of experiments.dp_gradient_tracking to variants: checks, conditions, statements, and what is told."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.core import ArgumentError
from jaxfl.core.tree import num_bytes, size
from jaxfl.frame import Line, Prepared, few, variants_of
from jaxfl.gradients.memory import require_fits
from jaxfl.graphs.tracking_conditions import Condition
from jaxfl.training import stationarity
from jaxfl.training.chunks import check_start

from .budgets import broken_conditions, privacy_of
from .options import Point, check_point, tracking_pair

PROBING = {"num_probes": 10, "step_size": 0.05, "max_samples_per_node": 128}  # for the estimate of L


def prepare(lines: Mapping[str, Line]) -> Prepared:
    """The variants of all lines; what cannot run is refused, with --strict a broken condition, too."""
    for line in lines.values():
        line.point.agents.data(line.point.data)(line.seeds[0])  # refuses more agents than there are samples
        check_point(line.point)
    sizes = {name: _sizes(name, line) for name, line in lines.items()}
    ready = {name: line._replace(point=line.point.settled()) for name, line in lines.items()}
    measure = functools.cache(stationarity)  # the same object for lines that share a program

    def of_line(name: str, line: Line) -> dict[str, Any]:
        point: Point = lines[name].point
        data_of = point.agents.data(point.data)
        start = check_start(line.point.algorithm(), jax.random.key(line.seeds[0]), data_of(line.seeds[0]))
        require_fits("hidden" if point.network.model == "mlp" else "model", num_bytes(start), {})
        return {
            "data": data_of,
            "num_rounds": point.num_rounds,
            "measures": {"stationarity": measure(point.task(), point.theory.train_samples)},
            "privacy": privacy_of(point, sizes[name]),
            "covered": point.learning.method == "DP-GT" and point.learning.gradient_at == "broadcast",
        }

    variants = variants_of(ready, Point.algorithm, of_line)
    broken, told = _conditions(lines)
    told += [*_description(lines, sizes), *few([f"{name}: {_row(line.point)}" for name, line in lines.items()])]
    graphs = {(line.point.weights.graph, line.point.agents.nodes) for line in lines.values()}
    files = sorted(file for file in graphs if file[0].endswith(".npy"))  # other weights may come by the same name
    checksums = [zlib.crc32(np.stack(tracking_pair(*file)).tobytes()) for file in files]
    return Prepared(variants, told, {"graph_crc32": checksums} if files else {}, broken)


def _sizes(name: str, line: Line) -> list[int]:
    """Samples of every agent, the least over seeds; refused if some has fewer than a gradient takes."""
    data_of, batch = line.point.agents.data(line.point.data), line.point.learning.batch_size
    sizes = np.min([np.asarray(data_of(seed).sizes) for seed in line.seeds], axis=0).tolist()
    fewest = min(sizes)
    if batch > fewest:
        found = f"{name} draws {batch} and agent {sizes.index(fewest)} has {fewest}"
        remedy = f"Pass --batch-size {fewest} or less, or give agents more data."
        raise ArgumentError("batch_size", "must be at most the samples of every agent and seed", found, remedy)
    return sizes


def _conditions(lines: Mapping[str, Line]) -> tuple[dict[str, list[Condition]], list[str]]:
    """Conditions of the theorems that each line of gradient tracking breaks, and the same in sentences."""
    broken: dict[str, list[Condition]] = {}
    estimates: dict[tuple, float] = {}
    by_text: dict[str, list[str]] = {}
    for name, (point, *_) in lines.items():
        if point.learning.method != "DP-GT":
            continue
        smoothness = point.theory.smoothness
        if smoothness == "estimated":
            problem = (point.data, point.agents, point.network)
            if problem not in estimates:
                estimates[problem] = _estimated_smoothness(point)
            smoothness = estimates[problem]
        broken[name] = broken_conditions(point, smoothness)
        if point.theory.strict and broken[name]:
            found = f"{name}: " + "; ".join(map(str, broken[name]))
            remedy = "Change steps, noise or graph, or leave --strict out."
            raise ArgumentError("strict", "every condition of the theorems must hold", found, remedy)
        for condition in broken[name]:
            by_text.setdefault(str(condition), []).append(name)
    told = [f"L = {value:.3g}, estimated by a probing run (a lower bound)" for value in estimates.values()]
    of_all = len(broken) if len(broken) > 1 else None
    texts = {text: "all lines" if len(names) == of_all else ", ".join(names) for text, names in by_text.items()}
    return broken, told + few([f"warning: {text} ({names})" for text, names in texts.items()])


def _estimated_smoothness(point: Point) -> float:
    try:
        seed, data_of = point.run.seed, point.agents.data(point.data)
        return estimate_constants(jax.random.key(seed), point.task(), data_of(seed), **PROBING).smoothness
    except ArgumentError as error:  # names an argument that is no option here
        found = f"the probing run failed: {error.requirement}; {error.found}"
        raise ArgumentError("smoothness", "must be given where it cannot be estimated", found, "Pass L.") from None


def _description(lines: Mapping[str, Line], sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """Describe the run that is about to start, by the first line's options."""
    point: Point = next(iter(lines.values())).point
    learning, noise = point.learning, point.noise
    seeds = sorted({seed for line in lines.values() for seed in line.seeds})
    parameters = size(jax.eval_shape(point.task().init, jax.random.key(0)))
    norm = "L1" if noise.distribution == "laplace" else "L2"
    return [
        f"{point.data.dataset}: {sum(next(iter(sizes.values())))} samples over {point.agents.nodes} agents "
        f"({point.agents.partition}), model {point.network.model} with {parameters} parameters",
        f"K = {learning.iterations}, gradients {'assumed' if learning.assume_bounded else 'clipped'} at {norm} norm "
        f"{learning.clip_norm:g}, {noise.distribution} noise, seeds {' '.join(map(str, seeds))}",
    ]


def _row(point: Point) -> str:
    """The numbers of a line that its method uses."""
    learning, scales, tracks = point.learning, point.schedule().state_noise_scale, point.learning.method == "DP-GT"
    parts = [f"graph {point.weights.graph if tracks else point.weights.baseline_graph}"]
    parts += [f"alpha {learning.state_mixing:.3g}"] if learning.method != "noisy-outputs" else []
    parts += [f"beta {learning.tracker_mixing:.3g}"] if tracks else []
    noise = f"noise scales {scales.min():.3g} to {scales.max():.3g}" if point.is_noisy else "no noise"
    return ", ".join([*parts, f"gamma {learning.step_size:.3g}", f"m {learning.batch_size}", noise])
