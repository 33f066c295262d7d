"""EmbracingFL: weak clients train the output side of a model. Against width reduction and FedAvg without them.

    python -m experiments.embracing_fl                                              # digits, under a minute
    python -m experiments.embracing_fl --preset table3_small --cases 7 --data-dir DIR   # a case of Table 3, reduced
    python -m experiments.embracing_fl --preset table3 --data-dir DIR               # a table of the paper
    python -m experiments.embracing_fl --preset sizes                               # Tables 1 and 10
    python -m experiments.embracing_fl --collect runs/embracing_fl/* --out DIR      # tables and pictures of many runs

Trains every combination of method, case and batch normalization with every seed. Before it starts it prints the clients
of each class, their capacity and the seconds that a round takes on a phone. It leaves metrics.jsonl, summary.json
(capacity, bits sent and received, rounds to a target beside the usual), and pictures in the run directory.

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training".
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.command_line import new_run_directory, run_command_line
from experiments.partial.build import (
    data_sources,
    evaluated_task,
    make_algorithm,
    make_parts,
)
from experiments.partial.config import RESNETS, Config, Resolved, resolve
from experiments.partial.costs import class_costs, cost_lines, described, sizes_table, timing_table
from experiments.partial.networks import check_widths, problem_of
from experiments.partial.pictures import plot_added, plot_curves, plot_gaps
from experiments.partial.plan import Variant, plan
from experiments.partial.presets import PRESETS
from experiments.partial.results import read_results, rounds_to_target
from experiments.partial.tables import markdown
from experiments.problem import shrunk, subset
from jaxfl.analysis.plots import plot_run
from jaxfl.core import Task
from jaxfl.core.tree import size
from jaxfl.data import load
from jaxfl.training import RunDirectory, open_run, summary_table, train
from jaxfl.training.chunks import check_start
from jaxfl.training.summary import spread

NOT_SAVED = ("data_dir", "out", "quiet", "resume", "show", "collect")  # options that do not decide the results
TEST_BATCH = 256


def run(options: Config, preset: str | None) -> dict[str, Any]:
    """Run the experiment; returns the content of summary.json, nothing where no run was asked for."""
    console = Console()
    if options.collect:
        _collect(options, console)
        return {}
    config = resolve(options, None if preset is None else Config(**PRESETS[preset].options))
    if config.show != "training":
        console.print(sizes_table() if config.show == "sizes" else timing_table(config.batch_size))
        return {}
    variants = plan(config)
    check_widths(config)
    dataset = shrunk(subset(load(config.dataset, config.data_dir), config.num_train, config.num_test), config.shrink)
    problem = problem_of(dataset, config.model)
    parts = make_parts(config, dataset)
    data_of = data_sources(dataset, parts, variants)
    task = evaluated_task(config, problem)
    algorithms = {}
    for name, variant in variants.items():
        algorithm = make_algorithm(config, variant, problem)
        data = data_of[name](config.seeds[0])
        check_start(algorithm, jax.random.key(config.seeds[0]), data)
        algorithms[name] = algorithm
    costs_of = {method: class_costs(config, method, problem) for method in config.method}
    static = {name for name, variant in variants.items() if variant.batch_norm == "static" and config.model in RESNETS}

    directory = new_run_directory(config.out, "embracing_fl", preset or config.dataset, resume=config.resume)
    saved: dict[str, Any] = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_SAVED}
    saved["node_loop"] = task.node_loop  # what auto stands for here: another one gives other last bits
    saved["variants"] = {name: variant._asdict() for name, variant in variants.items()}
    run_directory = open_run(directory, saved, experiment="embracing_fl", preset=preset, resume=config.resume)
    for line in _description(config, task, parts[config.seeds[0]]):
        console.print(line, soft_wrap=True)
    for name, variant in variants.items():
        for line in cost_lines(name, variant, costs_of[variant.method]):
            console.print(line, soft_wrap=True, highlight=False)
    summary = train(
        algorithms,
        task,
        data_of,
        dataset.test_inputs,
        dataset.test_labels,
        run=run_directory,
        seeds=config.seeds,
        num_rounds=config.rounds,
        evaluate_every=config.evaluate_every,
        checkpoint_every=config.checkpoint_every,
        test_batch_size=TEST_BATCH,
        calibration_samples={name: config.calibration_samples if name in static else None for name in variants},
        quiet=config.quiet,
    )
    for name, variant in variants.items():
        summary["variants"][name].update(described(costs_of[variant.method], variant))
    _add_targets(summary, variants, run_directory)
    run_directory.write_summary(summary)
    console.print(summary_table(summary, ("test_accuracy", "test_loss", "train_loss", "rounds_to_target")))
    pictures = [*plot_run(directory), plot_curves(read_results([str(directory)]), directory / "plots" / "cases.png")]
    console.print(f"Run: {directory}   Pictures: {', '.join(str(picture) for picture in pictures)}", soft_wrap=True)
    return summary


def _add_targets(summary: dict[str, Any], variants: Mapping[str, Variant], run_directory: RunDirectory) -> None:
    """In which round each variant and seed reached its target, at the evaluations that were made."""
    lines = run_directory.read_metrics()
    for name, variant in variants.items():
        if variant.target_accuracy is not None:
            own = [line for line in lines if line["variant"] == name]
            reached = rounds_to_target(own, summary["seeds"], variant.target_accuracy)
            row = summary["variants"][name]
            row["target_accuracy"], row["rounds_to_target"] = variant.target_accuracy, spread(reached)


def _collect(options: Config, console: Console) -> None:
    """Tables and pictures of several runs."""
    results = read_results(options.collect)
    text = markdown(results)
    print(text)
    if options.out is None:
        return
    directory = Path(options.out).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tables.md").write_text(text)
    found = [
        plot_curves(results, directory / "curves.png"),
        plot_gaps(results, directory / "gaps.png"),
        plot_added(results, directory / "added.png"),
    ]
    files = [directory / "tables.md", *(path for path in found if path is not None)]
    console.print(f"Written: {', '.join(map(str, files))}", soft_wrap=True)


def _description(config: Resolved, task: Task, parts: Sequence[np.ndarray]) -> list[str]:
    """What is about to run, in a few lines."""
    parameters = size(jax.eval_shape(task.init, jax.random.key(0)))
    sizes = [len(part) for part in parts]
    how = f"{config.partition}" + (f" {config.alpha:g}" if config.alpha is not None else "")
    decay = f", a tenth after {' and '.join(map(str, config.decay_rounds))}" if config.decay_rounds else ""
    return [
        f"{config.dataset}: {sum(sizes)} samples over {config.nodes} clients ({how}: {min(sizes)} to {max(sizes)} in "
        f"seed {config.seeds[0]}), model {config.model} with {parameters} parameters",
        f"{config.rounds} rounds of {config.local_steps} steps with batches of {config.batch_size}, step size "
        f"{config.step_size:g}{decay}, momentum {config.momentum:g}, weight decay {config.weight_decay:g}, seeds "
        f"{' '.join(map(str, config.seeds))}",
    ]


ALIASES = {
    "num_nodes": "nodes",
    "num_rounds": "rounds",
    "num_local_steps": "local_steps",
    "scheme": "partition",
    "client_class": "nodes",
    "widths": "resnet_widths",
    "blocks": "resnet_blocks",
    "methods": "method",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_command_line(
        run,
        Config,
        PRESETS,
        prog="python -m experiments.embracing_fl",
        description=(__doc__ or "").split("\n")[0],
        argv=argv,
        aliases=ALIASES,
    )


if __name__ == "__main__":
    sys.exit(main())
