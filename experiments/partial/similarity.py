"""How alike clients' representations stay, layer by layer, when nothing or a part of their models is averaged.

    python -m experiments.partial.similarity                                         # digits, under a minute
    python -m experiments.partial.similarity --preset fig1_small --data-dir DIR      # CIFAR-10 on a CPU, minutes
    python -m experiments.partial.similarity --preset fig3 --data-dir DIR            # the paper's size

Every client trains a network on its part of the data (Dirichlet over labels). After a round of local steps,
nothing, or a part of all models, is averaged over the clients (`jaxfl.algorithms.partial_averaging`). Between rounds,
chosen layers of all pairs of clients are compared by SVCCA (`jaxfl.analysis.svcca`) on test samples, which no client
trains on. It leaves metrics.jsonl, summary.json and pictures in the run directory.

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training", figure 1 (left) and figure 3; appendix 6.3.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.command_line import new_run_directory, run_command_line
from experiments.partial.similarity_config import NOT_SAVED, PRESETS, Config, Resolved, resolve
from experiments.partial.similarity_pictures import STATISTICS, metric_name, plot_similarity
from experiments.problem import image_shape, partitioned, shrunk, subset, with_node_loop
from jaxfl.algorithms.blocks import first_half, output_side
from jaxfl.algorithms.partial_averaging import partial_averaging
from jaxfl.analysis import plot_run
from jaxfl.analysis.svcca import svcca_of_pairs
from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, PyTree, Task, check, over_nodes
from jaxfl.core.tasks import scale_images
from jaxfl.core.tree import size
from jaxfl.data import Dataset, load
from jaxfl.models import Model, classification, mlp, resnet20
from jaxfl.models.layer_outputs import layer_outputs
from jaxfl.training import Diverged, RunDirectory, evaluate_fn, evaluation_set, open_run, summary_table
from jaxfl.training.chunks import (
    COSTS,
    add_costs,
    chunk_fn,
    default_chunk_rounds,
    fetch,
    init_fn,
    refuse_bad,
    summarize,
)
from jaxfl.training.evaluate import flatten_scores
from jaxfl.training.progress import ProgressReport
from jaxfl.training.summary import summarize_run


class Problem(NamedTuple):
    """What all schemes share."""

    network: Callable[..., Model]  # of a share of the channels, by default all
    model: Model
    task: Task
    layers: tuple[str, ...]  # that are compared, input side first


class Measures(NamedTuple):
    """What is measured between rounds; compiled once for all schemes."""

    scores: Callable[[PyTree], Any]  # every client's model -> scores on the test set
    similarity: Callable[[PyTree], dict[str, np.ndarray]]  # every client's model -> layer -> (pairs,), float32


def run(options: Config, preset: str | None) -> dict[str, Any]:
    """Run the experiment; returns the content of summary.json."""
    config = resolve(options)
    dataset = shrunk(subset(load(config.dataset, config.data_dir), config.num_train, config.num_test), config.shrink)
    problem = make_problem(config, dataset)
    measures = make_measures(config, problem, dataset)
    algorithms = {scheme: make_algorithm(config, scheme, problem) for scheme in config.schemes}
    make_data(config, dataset, config.seeds[0])  # refused before anything is written
    console = Console()
    directory = new_run_directory(config.out, "similarity", preset or config.dataset, resume=config.resume)
    saved: dict[str, Any] = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_SAVED}
    saved |= {"node_loop": problem.task.node_loop, "layers": problem.layers}
    records = open_run(directory, saved, experiment="similarity", preset=preset, resume=config.resume)
    console.print(_description(config, problem, dataset), soft_wrap=True)
    finished: dict[tuple[str, int], dict[str, Any] | None] = {}

    def summary(status: str) -> dict[str, Any]:
        content = summarize_run(
            records.read_metrics(),
            finished,
            experiment="similarity",
            preset=preset,
            status=status,
            variants=config.schemes,
            seeds=config.seeds,
            privacy={},
            environment=records.config["environment"],
        )
        records.write_summary(content)
        return content

    with ProgressReport(config.rounds * len(algorithms) * len(config.seeds), quiet=config.quiet) as progress:
        for seed in config.seeds:
            data = jax.device_put(make_data(config, dataset, seed))
            # The same for all schemes; for a residual network, compiling it takes as long as compiling a round.
            first = init_fn(algorithms[config.schemes[0]])(jax.random.key(seed), data)
            for scheme, algorithm in algorithms.items():
                progress.begin(scheme, seed, config.rounds)
                record = records.finished(scheme, seed)
                if record is None:
                    records.keep_metrics_until(scheme, seed, None)  # what an interrupted run left of it
                    try:
                        record = _train(config, scheme, algorithm, seed, data, first, measures, records, progress)
                    except Diverged:
                        summary("diverged")
                        raise
                    records.mark_finished(scheme, seed, record)
                    progress.end()
                else:
                    progress.skip(config.rounds)
                finished[scheme, seed] = record
    content = summary("finished")
    maxima = [metric_name("maximum", layer) for layer in problem.layers]
    console.print(summary_table(content, ("test_accuracy", *maxima)))
    pictures = [*plot_similarity(directory, config.schemes, problem.layers, config.local_steps), *plot_run(directory)]
    console.print(f"Run: {directory}   Pictures: {', '.join(map(str, pictures))}", soft_wrap=True)
    return content


def make_problem(config: Resolved, dataset: Dataset) -> Problem:
    """The network, and which of its layers are compared."""

    def network(width: float = 1.0) -> Model:
        if config.model == "mlp":
            hidden = (math.floor(round(width * units, 9)) for units in config.hidden)
            return mlp((dataset.train_inputs[0].size, *hidden, dataset.num_classes))
        shape, widths, blocks = image_shape(dataset), config.resnet_widths, config.resnet_blocks
        return resnet20(shape, dataset.num_classes, widths=widths, blocks=blocks, width=width)

    model = network()
    layers = config.layers
    if layers is None and config.model == "mlp":
        layers = tuple(f"dense_{number}" for number in range(1, len(config.hidden) + 2))
    elif layers is None:
        layers = ("stem", *(f"block_{stage}_{count}" for stage, count in enumerate(config.resnet_blocks, start=1)))
    known = tuple(name for name, _ in model.layers)
    for name in layers:
        check.one_of(known, layers=name)
    task = with_node_loop(classification(model), config.node_loop)
    return Problem(network, model, task, tuple(sorted(layers, key=known.index)))


def synchronized_part(config: Resolved, scheme: str, problem: Problem) -> tuple[str, ...] | str | Task:
    """What a scheme averages, as `partial_averaging` takes it."""
    if scheme == "channels":
        return classification(problem.network(config.channel_share))
    blocks = problem.task.blocks
    first = blocks[len(first_half(blocks))] if config.first_shared is None else config.first_shared
    outputs = output_side(blocks, first)
    inputs = tuple(name for name in blocks if name not in outputs)
    if not inputs:
        remedy = f"Choose among {', '.join(blocks[1:])}."
        raise ArgumentError("first_shared", "must leave the input side a block", f"got {first!r}", remedy)
    return {"nothing": (), "output_side": outputs, "input_side": inputs, "everything": "all"}[scheme]


def make_algorithm(config: Resolved, scheme: str, problem: Problem) -> Algorithm:
    """Local SGD at all clients, and the average of what the scheme says."""
    return partial_averaging(
        problem.task,
        synchronized=synchronized_part(config, scheme, problem),
        num_local_steps=config.local_steps,
        batch_size=config.batch_size,
        step_size=config.step_size,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def make_data(config: Resolved, dataset: Dataset, seed: int) -> FederatedData:
    """The clients' training data."""
    return partitioned(dataset, "dirichlet", config.clients, seed, alpha=config.alpha, shards_per_node=None)


def make_measures(config: Resolved, problem: Problem, dataset: Dataset) -> Measures:
    """Scores on all test samples, and SVCCA of all pairs of clients on batches of the first of them.

    Raises:
        ArgumentError: there are not so many test samples.
    """
    shape = config.similarity_batches, config.similarity_batch_size
    inputs = dataset.test_inputs
    if shape[0] * shape[1] > len(inputs):
        found = f"got {shape[0]} of {shape[1]}, and there are {len(inputs)}"
        requirement = "times similarity_batch_size must be at most the test samples"
        raise ArgumentError("similarity_batches", requirement, found, "Pass fewer or smaller ones.")
    compared = jnp.asarray(inputs[: shape[0] * shape[1]].reshape(*shape, *inputs.shape[1:]))
    test = evaluation_set(inputs, dataset.test_labels)
    scores = evaluate_fn(problem.task, lambda nodes: nodes)
    compiled = similarity_fn(problem, config.num_directions)

    def similarity(nodes):
        found = jax.device_get(compiled(nodes, compared))
        return {layer: found[layer] for layer in problem.layers}  # compiled functions sort them by name

    return Measures(scores=lambda nodes: jax.device_get(scores(nodes, test)), similarity=similarity)


def similarity_fn(problem: Problem, num_directions: int) -> Callable[[PyTree, Array], dict[str, Array]]:
    """The jitted (every client's model, inputs (m, b, *sample)) -> layer -> SVCCA of all pairs, mean over m batches."""

    def one_batch(nodes, inputs):
        def outputs_of(one):
            return layer_outputs(problem.model, one, scale_images(inputs), problem.layers)

        outputs = over_nodes(outputs_of, problem.task.node_loop)(nodes)
        return {layer: svcca_of_pairs(values, num_directions) for layer, values in outputs.items()}

    def similarity(nodes, inputs):
        of_batches = jax.lax.map(lambda batch: one_batch(nodes, batch), inputs)
        return {layer: values.mean(axis=0) for layer, values in of_batches.items()}

    return jax.jit(similarity)


def _train(
    config: Resolved,
    scheme: str,
    algorithm: Algorithm,
    seed: int,
    data: FederatedData,
    first: PyTree,
    measures: Measures,
    records: RunDirectory,
    progress: ProgressReport,
) -> dict[str, Any]:
    """All rounds of one scheme and seed; returns the record for `RunDirectory.mark_finished`."""
    key, began, run_seconds = jax.random.key(seed), time.perf_counter(), 0.0
    state = jax.tree.map(jnp.copy, first)  # what a chunk is given it overwrites
    chunk_rounds = default_chunk_rounds(min(config.evaluate_every, config.rounds))
    rounds = chunk_fn(algorithm, chunk_rounds).lower(key, state, data, np.int32(0)).compile()
    totals: dict[str, float | int] = dict.fromkeys(COSTS, 0)

    def measure(stretch: list[dict[str, np.ndarray]], round_index: int) -> None:
        """Write one line."""
        nodes = algorithm.node_params(state)
        measured = summarize(stretch)
        line = {
            "variant": scheme,
            "seed": seed,
            "round": round_index,
            "train_loss": measured.pop("loss", None),
            **flatten_scores(measures.scores(nodes)),
            "consensus_distance": measured.get("consensus_distance"),
        }
        for layer, pairs in measures.similarity(nodes).items():
            line |= {metric_name(name, layer): float(STATISTICS[name](pairs)) for name in STATISTICS}
        for name, value in line.items():
            if isinstance(value, float) and not np.isfinite(value):
                reached = {"rounds": (round_index, round_index), "first_round": round_index}
                raise Diverged(scheme, seed, name, **reached, node=None, value=value)
        records.append_metrics(line | {f"total_{name}": total for name, total in totals.items()})
        progress.note(f"test accuracy {line['test_accuracy']:.4g}")

    measure([], 0)
    compile_seconds = time.perf_counter() - began
    progress.compiled()
    for since in range(0, config.rounds, config.evaluate_every):
        stretch: list[dict[str, np.ndarray]] = []
        target = min(since + config.evaluate_every, config.rounds)
        for start in range(since, target, chunk_rounds):
            count, began = min(chunk_rounds, target - start), time.perf_counter()
            state, buffers = rounds(key, state, data, np.int32(count))
            stretch.append(fetch(buffers, count))
            run_seconds += time.perf_counter() - began
            refuse_bad(stretch[-1], scheme, seed, start + 1)
            progress.advance(count)
        totals = add_costs(totals, stretch)
        measure(stretch, target)
    seconds = {"compile": compile_seconds, "run": run_seconds, "timed_rounds": config.rounds}
    return {"round": config.rounds, "budget_spent": False, "seconds": seconds}


def _description(config: Resolved, problem: Problem, dataset: Dataset) -> str:
    """What is about to run."""
    parameters = size(jax.eval_shape(problem.task.init, jax.random.key(0)))
    return (
        f"{config.dataset}: {len(dataset.train_labels)} samples over {config.clients} clients (Dirichlet "
        f"{config.alpha:g}), {config.model} of {parameters} parameters; compared: {' '.join(problem.layers)}"
    )


ALIASES = {
    "first": "first_shared",
    "num_nodes": "clients",
    "num_local_steps": "local_steps",
    "width": "channel_share",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_command_line(
        run,
        Config,
        PRESETS,
        prog="python -m experiments.partial.similarity",
        description=(__doc__ or "").split("\n")[0],
        argv=argv,
        aliases=ALIASES,
    )


if __name__ == "__main__":
    sys.exit(main())
