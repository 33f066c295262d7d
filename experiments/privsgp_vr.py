"""PrivSGP-VR against PrivSGP: private decentralised learning over time-varying directed graphs.

    python -m experiments.privsgp_vr                                              # digits, under a minute on two cores
    python -m experiments.privsgp_vr --dataset mnist --data-dir DIR               # 50 nodes, 784-32-10, batch 1 and 32

Trains every combination of method, batch size and noise with every seed, prints one table, and leaves metrics.jsonl,
summary.json and a picture in the run directory.

Zhu, Huang, Wang, Xu, "PrivSGP-VR: Differentially Private Variance-Reduced Stochastic Gradient Push with Tight Utility
Bounds", IJCAI 2024, arXiv:2405.02638.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console

from experiments.command_line import Preset, new_run_directory, read_graph, run_command_line
from jaxfl import gradients, graphs, models, privacy
from jaxfl.algorithms import push_sum, theory_step_size
from jaxfl.analysis.partition_plot import plot_partition
from jaxfl.analysis.plots import plot_run
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, check
from jaxfl.core.check import bytes_text
from jaxfl.core.tree import num_bytes, replicate, size
from jaxfl.data import Dataset, federate, load, partition_dataset
from jaxfl.gradients import per_example
from jaxfl.gradients.memory import require_fits
from jaxfl.training import open_run, summary_table, train
from jaxfl.training.chunks import check_start
from jaxfl.training.records import slug

Method = Literal["PrivSGP-VR", "PrivSGP"]
NOT_SAVED = ("data_dir", "out", "quiet", "resume")  # options that do not decide the results
GRAPHS = ("exponential", "directed_ring", "ring", "complete", "star", "random")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options; None stands for the default of the data set."""

    dataset: str = "digits"
    """digits, mnist, fashion_mnist or cifar10."""
    data_dir: str | None = None
    """Folder with the data set's files as their authors publish them."""
    methods: tuple[Method, ...] = ("PrivSGP-VR", "PrivSGP")
    """What is compared."""
    nodes: int | None = None
    """Nodes n (digits: 16, others: 50)."""
    graph: str = "exponential"
    """exponential, directed_ring, ring, complete, star, random (a random strongly connected digraph), or a .npy file
    with a column-stochastic mixing matrix of shape (n, n), or (period, n, n) for a time-varying graph; entry (i, j) is
    the share of j's value that i receives."""
    edge_probability: float | None = None
    """Of the random graph, and of no other (random: 0.2)."""
    partition: str = "iid"
    """iid, dirichlet or shards."""
    alpha: float | None = None
    """Concentration of the dirichlet partition, which needs it."""
    shards_per_node: int | None = None
    """Shards a node of the shards partition, which needs it."""
    hidden: tuple[int, ...] = (32,)
    """Units of the hidden layers."""
    activation: Literal["relu", "tanh"] = "relu"
    """Activation of the hidden layers."""
    iterations: int | None = None
    """Iterations K (digits: 800, others: 2000)."""
    step_size: tuple[float, ...] | Literal["theory"] | None = None
    """Step size gamma, one for each batch size or one for all; theory = sqrt(n / K) (digits: 0.3, others: 0.5 times
    the batch size to the power 0.6, tuned without noise)."""
    batch_size: tuple[int, ...] | None = None
    """Expected samples a node and iteration; several are compared (digits: 1, others: 1 and 32)."""
    sampler: str = "poisson"
    """poisson, fixed (without replacement) or uniform (with replacement)."""
    clip_norm: float | None = 2.0
    """Bound on each sample's gradient in the L2 norm; None leaves gradients as they are."""
    noise_std: tuple[float, ...] | None = None
    """Standard deviation of the noise on the mean gradient; several are compared."""
    table: str = "factored"
    """How PrivSGP-VR keeps its gradients: dense, factored or per_batch."""
    entry_size: int | None = None
    """Samples of one entry of a per_batch table."""
    storage: str = "float32"
    """float32 or bfloat16 gradient table."""
    refresh_every: int = 1000
    """Rounds between exact recomputations of the table's mean."""
    seeds: tuple[int, ...] | None = None
    """One run each (digits: 0 1 2, others: 0)."""
    evaluate_every: int | None = None
    """Iterations between evaluations; default a fortieth of all."""
    checkpoint_every: int = 10
    """Evaluations between checkpoints."""
    out: str | None = None
    """The run directory itself; default runs/privsgp_vr/NAME."""
    resume: bool = False
    """Go on with an interrupted run."""
    quiet: bool = False
    """No progress."""


@dataclasses.dataclass(frozen=True)
class Resolved(Config):
    """The options after `resolve`, which gives each of these a value: the empty ones here are never used."""

    nodes: int = 0
    iterations: int = 0
    batch_size: tuple[int, ...] = ()
    step_size: tuple[float, ...] = ()
    noise_std: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    evaluate_every: int = 0


DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"nodes": 16, "iterations": 800, "batch_size": (1,), "noise_std": (0.1,), "seeds": (0, 1, 2)},
    "other": {"nodes": 50, "iterations": 2000, "batch_size": (1, 32), "noise_std": (0.0,), "seeds": (0,)},
}

PRESETS: dict[str, Preset] = {
    "paper_mnist": Preset(
        "MNIST as in the paper's appendix E: 50 nodes, 784-32-10, one uniform sample, no clipping, sigma^2 = 0.01",
        "4 minutes on two cores",
        {
            "dataset": "mnist",
            "batch_size": (1,),
            "sampler": "uniform",
            "clip_norm": None,
            "step_size": (0.1,),
            "noise_std": (0.1,),
            "iterations": 2000,
        },
    ),
}


def resolve(config: Config) -> Resolved:
    """The configuration with the data set's defaults filled in."""
    values = dataclasses.asdict(config)
    defaults = DEFAULTS.get(config.dataset, DEFAULTS["other"])
    for name, default in defaults.items():
        if values[name] is None:
            values[name] = default
    check.at_least(1, iterations=values["iterations"], nodes=values["nodes"])
    if values["evaluate_every"] is None:
        values["evaluate_every"] = max(1, values["iterations"] // 40)
    check.at_least(1, evaluate_every=values["evaluate_every"], checkpoint_every=values["checkpoint_every"])
    if values["graph"] == "random" and values["edge_probability"] is None:
        values["edge_probability"] = 0.2
    for name in ("methods", "batch_size", "noise_std", "seeds"):
        if not values[name] or len(set(values[name])) != len(values[name]):
            raise ArgumentError(
                name, "must be distinct and at least one", f"got {list(values[name])}", "List each once."
            )
    values["step_size"] = _step_sizes(values)
    for seed in values["seeds"]:
        if not 0 <= seed < 2**32:  # a larger seed would lose its upper bits
            raise ArgumentError("seeds", "must lie in [0, 2^32)", f"got {seed}", "Pass e.g. 0 1 2.")
    return Resolved(**values)


def _step_sizes(values: dict[str, Any]) -> tuple[float, ...]:
    """One step size for each batch size."""
    given, batches = values["step_size"], values["batch_size"]
    if given == "theory":
        return (theory_step_size(values["nodes"], values["iterations"]),) * len(batches)
    if given is None:
        check.at_least(1, batch_size=min(batches))
        return tuple(0.3 if values["dataset"] == "digits" else round(0.5 * batch**0.6, 3) for batch in batches)
    if len(given) not in (1, len(batches)):
        found = f"got {len(given)} for {len(batches)} batch sizes"
        raise ArgumentError("step_size", "must be one number, or one for each batch size", found, "Pass as many.")
    return tuple(given) * (len(batches) // len(given))


def make_graph(config: Resolved) -> graphs.Graph:
    """The communication graph."""
    if config.edge_probability is not None:  # of a random graph it never is None
        if config.graph != "random":
            remedy = "Leave it out, or pass --graph random."
            raise ArgumentError("edge_probability", "belongs to --graph random", f"got --graph {config.graph}", remedy)
        return graphs.random_digraph(config.nodes, config.edge_probability, 0)
    if config.graph.endswith(".npy"):
        return read_graph(config.graph, config.nodes)
    if config.graph not in GRAPHS:
        remedy = "Choose one of these, or name a .npy file with a mixing matrix."
        raise ArgumentError("graph", f"must be one of {', '.join(GRAPHS)}", f"got {config.graph!r}", remedy)
    return getattr(graphs, config.graph)(config.nodes)


def make_task(config: Resolved, dataset: Dataset) -> Task:
    """A multilayer perceptron for the data set."""
    for units in config.hidden:
        check.at_least(1, hidden=units)
    inputs = int(dataset.train_inputs[0].size)
    widths = (inputs, *config.hidden, dataset.num_classes)
    return models.classification(models.mlp(widths, activation=config.activation))


def make_data(config: Resolved, dataset: Dataset, seed: int) -> FederatedData:
    """The nodes' training data; every seed has its own partition."""
    parts = partition_dataset(
        dataset,
        scheme=config.partition,
        num_nodes=config.nodes,
        seed=seed,
        alpha=config.alpha,
        shards_per_node=config.shards_per_node,
    )
    return federate(dataset.train_inputs, dataset.train_labels, parts)


def make_variants(config: Resolved, task: Task) -> dict[str, Algorithm]:
    """Name -> algorithm for every combination of method, batch size and noise."""
    graph = make_graph(config)
    step_sizes = dict(zip(config.batch_size, config.step_size, strict=True))
    variants = {}
    for batch_size, noise_std, method in itertools.product(config.batch_size, config.noise_std, config.methods):
        name = method
        name += f", batch {batch_size}" if len(config.batch_size) > 1 else ""
        name += f", noise {noise_std:g}" if len(config.noise_std) > 1 else ""
        if slug(name) in map(slug, variants):
            found = f"got {' '.join(map(str, config.noise_std))}"
            raise ArgumentError("noise_std", "must differ in six digits", found, "Compare values further apart.")
        variants[name] = push_sum(
            task,
            graph=graph,
            gradient=make_gradient(config, method, batch_size),
            noise=None if noise_std == 0 else privacy.gaussian(noise_std),  # zeros cost as much as noise
            step_size=step_sizes[batch_size],
        )
    return variants


def make_gradient(config: Resolved, method: str, batch_size: int) -> gradients.GradientEstimator:
    """A mini-batch for PrivSGP, a table for PrivSGP-VR."""
    sampler = make_sampler(config, batch_size)
    reduced = gradients.saga(  # made for PrivSGP alone, too: a bad option is refused even where it is not used
        sampler=sampler,
        table=config.table,
        entry_size=config.entry_size,
        storage=config.storage,
        clip_norm=config.clip_norm,
        refresh_every=config.refresh_every,
    )
    return gradients.mini_batch(sampler=sampler, clip_norm=config.clip_norm) if method == "PrivSGP" else reduced


def make_sampler(config: Resolved, batch_size: int) -> gradients.Sampler:
    """The sampler, a Poisson one with room for this run's number of draws."""
    check.one_of(("poisson", "fixed", "uniform"), sampler=config.sampler)
    if config.sampler == "poisson":
        return gradients.poisson(batch_size, num_draws=config.nodes * config.iterations)
    return getattr(gradients, config.sampler)(batch_size)


def no_epsilon(config: Resolved, variants: dict[str, Algorithm]) -> dict[str, list[dict[str, Any]]]:
    """The statement that no epsilon is claimed, for every variant."""
    reason = "noise_std is an absolute standard deviation; this experiment does not compute the epsilon that it buys"
    statement = {
        "bound": None,
        "dp_epsilon": None,
        "dp_delta": None,
        "neighboring_relation": None,
        "accountant": None,
        "nodes": config.nodes,
        "assumptions": [],
        "reason": reason,
    }
    return {name: [statement] for name in variants}


def refuse_impossible(config: Resolved, dataset: Dataset, first: FederatedData, variants: dict[str, Algorithm]) -> None:
    """Say what is wrong with any variant and any seed before one of them runs; computes and writes nothing."""
    checked = []
    for seed in config.seeds:
        data = first if seed == config.seeds[0] else make_data(config, dataset, seed)
        sizes = np.asarray(data.sizes).tolist()
        if sizes in checked:  # what an algorithm needs of the data is in their sizes
            continue
        checked.append(sizes)
        for algorithm in variants.values():
            state = check_start(algorithm, jax.random.key(seed), data)
            require_fits("hidden", num_bytes(state), {})


def run(options: Config, preset: str | None) -> dict[str, Any]:
    """Run the experiment; returns the content of summary.json."""
    config = resolve(options)
    dataset = load(config.dataset, config.data_dir)
    task = make_task(config, dataset)
    first = make_data(config, dataset, config.seeds[0])
    variants = make_variants(config, task)
    refuse_impossible(config, dataset, first, variants)
    one_node = jax.eval_shape(task.init, jax.random.key(0))
    directory = new_run_directory(config.out, "privsgp_vr", preset or config.dataset, resume=config.resume)
    saved = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_SAVED}
    if config.graph.endswith(".npy"):  # so that a resumed run notices another matrix under the same name
        saved["graph_crc32"] = zlib.crc32(make_graph(config).mixing_matrices.tobytes())
    run_directory = open_run(directory, saved, experiment="privsgp_vr", preset=preset, resume=config.resume)
    console = Console()
    console.print(
        f"{dataset.name}: {len(dataset.train_labels)} samples over {config.nodes} nodes ({config.partition}), "
        f"graph {config.graph}, model {'-'.join(map(str, (int(dataset.train_inputs[0].size), *config.hidden)))}"
        f"-{dataset.num_classes} with {size(one_node)} parameters"
    )
    console.print(
        f"{config.sampler} sampling, step size {' '.join(map(str, config.step_size))}, clipping "
        + (
            "off"
            if config.clip_norm is None
            else f"at {config.clip_norm:g} ({per_example.route(task, config.clip_norm)})"
        )
        + f", {config.iterations} iterations, seeds {' '.join(map(str, config.seeds))}"
    )
    if "PrivSGP-VR" in config.methods:
        taken = gradients.table_bytes(
            task,
            jax.eval_shape(lambda: replicate(task.init(jax.random.key(0)), config.nodes)),
            first,
            table=config.table,
            entry_size=config.entry_size or 1,
            storage=config.storage,
        )
        console.print(f"{config.table} gradient table in {config.storage}: {bytes_text(taken)}")
    summary = train(
        variants,
        task,
        lambda seed: make_data(config, dataset, seed),
        dataset.test_inputs,
        dataset.test_labels,
        run=run_directory,
        seeds=config.seeds,
        num_rounds=config.iterations,
        evaluate_every=config.evaluate_every,
        checkpoint_every=config.checkpoint_every,
        privacy=no_epsilon(config, variants),
        quiet=config.quiet,
    )
    console.print(summary_table(summary))
    console.print("No epsilon is claimed: noise_std is absolute and this experiment runs no accountant.")
    partition_picture = directory / "plots" / "partition.png"
    pictures = [
        *plot_run(directory),
        plot_partition(first, dataset.train_labels, dataset.num_classes, partition_picture),
    ]
    console.print(f"Run: {directory}   Pictures: {', '.join(str(picture) for picture in pictures)}", soft_wrap=True)
    return summary


ALIASES = {"mixing_matrices": "graph", "num_nodes": "nodes", "scheme": "partition"}


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
