"""DP gradient tracking over two directed graphs, and the methods it is compared with, each with the epsilon it has.

    python -m experiments.dp_gradient_tracking                                        # digits, under a minute
    python -m experiments.dp_gradient_tracking --dataset mnist --data-dir DIR         # five agents, a small CNN
    python -m experiments.dp_gradient_tracking --preset fig4 --data-dir DIR           # a figure of the paper

Trains every combination of method, scheme, noise and graph with every seed. Before it starts it names every condition
of the paper's theorems that the configuration breaks, with the number that breaks it; --strict refuses such a
configuration. It leaves conditions.json (the same), metrics.jsonl, summary.json and pictures in the run directory:
accuracy, consensus distance and |grad F|^2 against iterations, and the cumulative budgets.

Chen, Wang, Zhang, "Differentially Private Gradient-Tracking-Based Distributed Stochastic Optimization over Directed
Graphs".
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.command_line import new_run_directory, run_command_line
from experiments.problem import shrunk, subset
from experiments.tracking.budgets import broken_conditions, privacy_of
from experiments.tracking.build import (
    make_algorithm,
    make_data,
    make_pair,
    make_schedule,
    make_task,
    num_rounds,
    refuse_small_agents,
)
from experiments.tracking.config import QUANTIZED, Config, Resolved, Variant, plan, resolve
from experiments.tracking.pictures import plot_budgets, plot_convergence
from experiments.tracking.presets import PRESETS
from jaxfl.analysis.plots import plot_run
from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.core import ArgumentError, FederatedData, Task
from jaxfl.core.tree import size
from jaxfl.data import load
from jaxfl.graphs.tracking_conditions import Condition
from jaxfl.training import open_run, summary_table, train
from jaxfl.training.chunks import check_start
from jaxfl.training.json_files import write_json

NOT_SAVED = ("data_dir", "out", "quiet", "resume", "strict")  # options that do not decide the results
NUM_PROBES, PROBE_STEP_SIZE = 10, 0.05  # of the probing run that estimates L


def run(options: Config, preset: str | None) -> dict[str, Any]:
    """Run the experiment; returns the content of summary.json."""
    config = resolve(options, None if preset is None else Config(**PRESETS[preset].options))
    dataset = subset(load(config.dataset, config.data_dir), config.num_train, config.num_test)
    dataset = shrunk(dataset, config.shrink)
    task = make_task(config, dataset)
    data_of = functools.lru_cache(maxsize=1)(functools.partial(make_data, config, dataset))
    variants = plan(config)
    algorithms = {name: make_algorithm(config, variant, task) for name, variant in variants.items()}
    sizes = np.min([np.asarray(data_of(seed).sizes) for seed in config.seeds], axis=0).tolist()
    refuse_small_agents(config, variants, sizes)
    first = data_of(config.seeds[0])
    for algorithm in algorithms.values():
        check_start(algorithm, jax.random.key(config.seeds[0]), first)

    console = Console()
    broken = _report_conditions(config, variants, task, first, console)
    directory = new_run_directory(config.out, "dp_gradient_tracking", preset or config.dataset, resume=config.resume)
    saved: dict[str, Any] = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_SAVED}
    saved["node_loop"] = task.node_loop  # what auto stands for here: another one gives other last bits
    saved["variants"] = {name: variant._asdict() for name, variant in variants.items()}
    files = [graph for graph in config.graph if graph.endswith(".npy")]  # another matrix may come by the same name
    saved["graph_crc32"] = [zlib.crc32(np.stack(make_pair(config, graph)).tobytes()) for graph in files]
    run_directory = open_run(directory, saved, experiment="dp_gradient_tracking", preset=preset, resume=config.resume)
    # Not in config.json: an estimated L has other last digits on another machine, which may resume the run.
    write_json(directory / "conditions.json", {name: list(map(str, found)) for name, found in broken.items()})
    for line in _description(config, task, sizes, variants):
        console.print(line, soft_wrap=True)
    summary = train(
        algorithms,
        task,
        data_of,
        dataset.test_inputs,
        dataset.test_labels,
        run=run_directory,
        seeds=config.seeds,
        num_rounds={name: num_rounds(config, variant) for name, variant in variants.items()},
        evaluate_every=config.evaluate_every,
        checkpoint_every=config.checkpoint_every,
        train_samples=config.train_samples,
        privacy={name: privacy_of(config, variant, sizes) for name, variant in variants.items()},
        quiet=config.quiet,
    )
    console.print(summary_table(summary))
    pictures = [*plot_run(directory), plot_convergence(directory), *plot_budgets(directory, config, variants)]
    console.print(f"Run: {directory}   Pictures: {', '.join(str(picture) for picture in pictures)}", soft_wrap=True)
    return summary


def _report_conditions(
    config: Resolved, variants: Mapping[str, Variant], task: Task, data: FederatedData, console: Console
) -> dict[str, list[Condition]]:
    """Print what each variant of gradient tracking breaks of the theorems' conditions; refuse it where that is asked.

    Raises:
        ArgumentError: a broken condition and --strict.
    """
    tracking = {name: variant for name, variant in variants.items() if variant.method == "DP-GT"}
    if not tracking:
        return {}
    smoothness = config.smoothness
    if smoothness is None:
        smoothness = _estimated_smoothness(config, task, data)
        console.print(f"L = {smoothness:.3g}, estimated by a probing run (a lower bound)", soft_wrap=True)
    broken = {name: broken_conditions(config, variant, smoothness) for name, variant in tracking.items()}
    if config.strict and any(broken.values()):
        name = next(name for name, conditions in broken.items() if conditions)
        found = f"{name}: " + "; ".join(map(str, broken[name]))
        remedy = "Change steps, noise or graph, or leave --strict out."
        raise ArgumentError("strict", "every condition of the theorems must hold", found, remedy)
    by_text: dict[str, list[str]] = {}
    for name, conditions in broken.items():
        for condition in conditions:
            by_text.setdefault(str(condition), []).append(name)
    for text, names in by_text.items():
        shown = "all variants" if len(names) == len(tracking) > 1 else ", ".join(names)
        console.print(f"warning: {text} ({shown})", soft_wrap=True, highlight=False)
    return broken


def _estimated_smoothness(config: Resolved, task: Task, data: FederatedData) -> float:
    key = jax.random.key(config.seeds[0])
    try:
        found = estimate_constants(
            key, task, data, num_probes=NUM_PROBES, step_size=PROBE_STEP_SIZE, max_samples_per_node=128
        )
    except ArgumentError as error:  # names an argument that is no option here
        seen = f"the probing run failed: {error.requirement}; {error.found}"
        raise ArgumentError("smoothness", "must be given where it cannot be estimated", seen, "Pass L.") from None
    return found.smoothness


def _description(config: Resolved, task: Task, sizes: Sequence[int], variants: Mapping[str, Variant]) -> list[str]:
    """What is about to run, in a few lines."""
    parameters = size(jax.eval_shape(task.init, jax.random.key(0)))
    norm = "L1" if config.distribution == "laplace" else "L2"
    bounded = "assumed" if config.assume_bounded else "clipped"
    lines = [
        f"{config.dataset}: {sum(sizes)} samples over {config.nodes} agents ({config.partition}), model {config.model} "
        f"with {parameters} parameters",
        f"K = {config.iterations}, gradients {bounded} at {norm} norm {config.clip_norm:g}, "
        f"{config.distribution} noise, seeds {' '.join(map(str, config.seeds))}",
    ]
    for name, variant in variants.items():
        schedule = make_schedule(config, variant, config.iterations)
        noise = schedule.state_noise_scale
        parts = [
            f"graph {variant.graph}",
            "" if variant.method == "noisy-outputs" else f"alpha {schedule.state_mixing:.3g}",
            f"beta {schedule.tracker_mixing:.3g}" if variant.method == "DP-GT" else "",
            f"gamma {schedule.step_size:.3g}",
            f"m {schedule.num_samples}",
            "no noise" if variant.method in QUANTIZED else f"noise scales {noise.min():.3g} to {noise.max():.3g}",
        ]
        lines.append(f"{name}: {', '.join(part for part in parts if part)}")
    return lines


ALIASES = {
    "state_weights": "graph",
    "tracker_weights": "graph",
    "pair": "graph",
    "num_nodes": "nodes",
    "num_rounds": "iterations",
    "num_local_samples": "num_samples",
    "batch_size": "num_samples",
    "threshold": "ternary_threshold",
    "step": "quantization_step",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_command_line(
        run,
        Config,
        PRESETS,
        prog="python -m experiments.dp_gradient_tracking",
        description=(__doc__ or "").split("\n")[0],
        argv=argv,
        aliases=ALIASES,
    )


if __name__ == "__main__":
    sys.exit(main())
