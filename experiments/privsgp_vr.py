"""PrivSGP-VR, PrivSGP, DP2-SGD and A(DP)2SGD: private decentralised learning, each run with the epsilon that it has.

    python -m experiments.privsgp_vr                                              # digits, under a minute on two cores
    python -m experiments.privsgp_vr --dataset mnist --data-dir DIR               # 50 nodes, 784-32-10, batch 1 and 32
    python -m experiments.privsgp_vr --preset fig9 --data-dir DIR                 # a figure of the paper

Trains every combination of method, batch size, nodes, iterations and noise (or privacy budget) with every seed, prints
one table, and leaves metrics.jsonl, summary.json and pictures in the run directory.

Zhu, Huang, Wang, Xu, "PrivSGP-VR: Differentially Private Variance-Reduced Stochastic Gradient Push with Tight Utility
Bounds", IJCAI 2024, arXiv:2405.02638.
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
from experiments.privsgp.build import (
    make_algorithm,
    make_data,
    make_graph,
    make_task,
    refuse_impossible,
)
from experiments.privsgp.config import Config, Resolved, Variant, plan, resolve
from experiments.privsgp.presets import PRESETS
from experiments.privsgp.spending import privacy_of, rounds_allowed, settle
from experiments.problem import subset
from jaxfl import gradients
from jaxfl.analysis.final_plot import plot_final
from jaxfl.analysis.partition_plot import plot_partition
from jaxfl.analysis.plots import plot_run
from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.core import ArgumentError, FederatedData, Task
from jaxfl.core.check import bytes_text
from jaxfl.core.tree import replicate, size
from jaxfl.data import Dataset, load
from jaxfl.gradients import per_example
from jaxfl.privacy.published import ProblemConstants
from jaxfl.training import open_run, summary_table, train

NOT_SAVED = ("data_dir", "out", "quiet", "resume")  # options that do not decide the results
NUM_PROBES, PROBE_STEP_SIZE = 20, 0.1  # of the probing run of `--iterations auto`


def settled_variants(
    config: Resolved, dataset: Dataset, task: Task, sizes: Mapping[int, Sequence[int]]
) -> tuple[dict[str, Variant], dict[str, int]]:
    """Name -> settings of every variant with its noise and iterations, and name -> rounds that its budget pays for.

    `sizes` maps numbers of nodes to the samples of every node, over all seeds.
    """

    @functools.cache
    def constants(nodes: int) -> ProblemConstants:
        data = make_data(config, dataset, config.seeds[0], nodes)
        key = jax.random.key(config.seeds[0])
        try:
            found = estimate_constants(
                key, task, data, num_probes=NUM_PROBES, step_size=PROBE_STEP_SIZE, max_samples_per_node=256
            )
        except ArgumentError as error:  # names an argument that is no option here
            found = f"the probing run failed: {error.requirement}; {error.found}"
            raise ArgumentError("iterations", "auto needs a probing run", found, "Pass a number.") from None
        bound = config.gradient_bound if config.clip_norm is None else config.clip_norm
        found = found if bound is None else found._replace(gradient_bound=bound)
        Console().print(f"Estimated for {nodes} nodes: {found}", soft_wrap=True)
        return found

    variants = settle(config, plan(config), sizes, constants)
    return variants, rounds_allowed(config, variants, sizes)


def run(options: Config, preset: str | None) -> dict[str, Any]:
    """Run the experiment; returns the content of summary.json."""
    config = resolve(options)
    dataset = subset(load(config.dataset, config.data_dir), config.num_train, config.num_test)
    task = make_task(config, dataset)
    refuse_impossible(config, dataset, task, plan(config))
    data_of = {
        nodes: functools.partial(make_data, config, dataset, nodes=nodes) for nodes in dict.fromkeys(config.nodes)
    }
    sizes = {
        nodes: np.concatenate([np.asarray(make(seed).sizes) for seed in config.seeds]).tolist()
        for nodes, make in data_of.items()
    }
    variants, allowed = settled_variants(config, dataset, task, sizes)
    algorithms = {name: make_algorithm(config, variant, task) for name, variant in variants.items()}
    directory = new_run_directory(config.out, "privsgp_vr", preset or config.dataset, resume=config.resume)
    saved: dict[str, Any] = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_SAVED}
    saved["node_loop"] = task.node_loop  # what auto stands for here: another one gives other last bits
    saved["variants"] = {name: variant._asdict() for name, variant in variants.items()}
    # So that a resumed run notices another matrix under the same name; the file fixes the number of nodes.
    if config.graph.endswith(".npy"):
        saved["graph_crc32"] = zlib.crc32(make_graph(config, config.nodes[0]).mixing_matrices.tobytes())
    run_directory = open_run(directory, saved, experiment="privsgp_vr", preset=preset, resume=config.resume)

    console = Console()
    first = data_of[config.nodes[0]](config.seeds[0])
    for line in _description(config, dataset, task, first, variants):
        console.print(line, soft_wrap=True)
    summary = train(
        algorithms,
        task,
        {name: data_of[variant.nodes] for name, variant in variants.items()},
        dataset.test_inputs,
        dataset.test_labels,
        run=run_directory,
        seeds=config.seeds,
        num_rounds={name: variant.iterations for name, variant in variants.items()},
        evaluate_every={
            name: config.evaluate_every or max(1, variant.iterations // 40) for name, variant in variants.items()
        },
        checkpoint_every=config.checkpoint_every,
        privacy={name: privacy_of(config, variant, sizes[variant.nodes]) for name, variant in variants.items()},
        privacy_rounds=allowed,
        quiet=config.quiet,
    )
    console.print(summary_table(summary))
    if summary["status"] == "budget_spent":
        for name, rounds in allowed.items():
            if rounds < variants[name].iterations:
                console.print(f"{name}: the privacy budget was spent after {rounds} rounds, and the run stopped there.")
    settings = {name: variant._asdict() for name, variant in variants.items()}
    if config.noise_std is None:  # what is calibrated is no setting of its own
        settings = {name: {**row, "noise_std": None} for name, row in settings.items()}
    pictures = [
        *plot_run(directory),
        *plot_final(directory, settings),
        plot_partition(first, dataset.train_labels, dataset.num_classes, directory / "plots" / "partition.png"),
    ]
    console.print(f"Run: {directory}   Pictures: {', '.join(str(picture) for picture in pictures)}", soft_wrap=True)
    return summary


def _description(
    config: Resolved, dataset: Dataset, task: Task, first: FederatedData, variants: dict[str, Variant]
) -> list[str]:
    """What is about to run, in a few lines."""
    one_node = jax.eval_shape(task.init, jax.random.key(0))
    network = "-".join(map(str, (int(dataset.train_inputs[0].size), *config.hidden, dataset.num_classes)))
    model = network if config.model == "mlp" else config.model
    clipping = "off"
    if config.clip_norm is not None:
        clipping = f"at {config.clip_norm:g} ({per_example.route(task, config.clip_norm)})"
    lines = [
        f"{dataset.name}: {len(dataset.train_labels)} samples over {' or '.join(map(str, config.nodes))} nodes "
        f"({config.partition}), graph {config.graph}, model {model} with {size(one_node)} parameters",
        f"{config.sampler} sampling, clipping {clipping}, seeds {' '.join(map(str, config.seeds))}, "
        f"node loop {task.node_loop}",
    ]
    for name, variant in variants.items():
        target = "" if variant.target_epsilon is None else f", budget ε = {variant.target_epsilon:g} ({variant.bound})"
        lines.append(
            f"{name}: {variant.iterations} iterations, step size {variant.step_size:.4g}, "
            f"noise std {variant.noise_std:.4g}{target}"
        )
    if "PrivSGP-VR" in config.methods:
        taken = gradients.table_bytes(
            task,
            jax.eval_shape(lambda: replicate(task.init(jax.random.key(0)), config.nodes[0])),
            first,
            table=config.table,
            entry_size=config.entry_size or 1,
            storage=config.storage,
        )
        lines.append(f"{config.table} gradient table in {config.storage}: {bytes_text(taken)}")
    return lines


ALIASES = {
    "mixing_matrices": "graph",
    "num_nodes": "nodes",
    "scheme": "partition",
    "num_rounds": "iterations",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_command_line(
        run,
        Config,
        PRESETS,
        prog="python -m experiments.privsgp_vr",
        description=(__doc__ or "").split("\n")[0],
        argv=argv,
        aliases=ALIASES,
    )


if __name__ == "__main__":
    sys.exit(main())
