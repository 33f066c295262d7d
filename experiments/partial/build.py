"""From options to data, tasks and algorithms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
import optax

from experiments.partial.config import NARROW, Resolved
from experiments.partial.networks import Problem, axis_groups, make_network, make_task
from experiments.partial.plan import Variant
from experiments.problem import with_node_loop
from jaxfl.algorithms import embracing, fed_avg, first_half, output_side
from jaxfl.algorithms.width_reduction import width_reduction
from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, Task, check
from jaxfl.data import Dataset, federate, partition_dataset


def make_parts(config: Resolved, dataset: Dataset) -> dict[int, list[np.ndarray]]:
    """Seed -> the samples of each client; every seed has its own partition."""
    try:
        return {
            seed: partition_dataset(
                dataset,
                config.partition,
                config.nodes,
                seed,
                alpha=config.alpha,
                writers_per_node=config.writers_per_node,
            )
            for seed in config.seeds
        }
    except ArgumentError as error:
        if error.argument != "dataset":  # whose writers are not known
            raise
        raise ArgumentError("partition", error.requirement, error.found, "Choose dirichlet or iid.") from None


def data_sources(
    dataset: Dataset, parts: Mapping[int, Sequence[np.ndarray]], variants: Mapping[str, Variant]
) -> dict[str, Callable[[int], FederatedData]]:
    """Variant -> function of the seed to the training data of its clients: the first of all, as many as take part.

    Index tables are as long as the largest client of any seed needs, so that all seeds run the same programs.
    """
    inputs, labels = jnp.asarray(dataset.train_inputs), jnp.asarray(dataset.train_labels)

    def of_seed(count: int, seed: int) -> FederatedData:
        longest = max(len(part) for found in parts.values() for part in found[:count])
        data = federate(inputs, labels, parts[seed][:count])
        return data._replace(indices=jnp.pad(data.indices, ((0, 0), (0, longest - data.max_size))))

    of_count = {count: functools.partial(of_seed, count) for count in {sum(v.counts) for v in variants.values()}}
    return {name: of_count[sum(variant.counts)] for name, variant in variants.items()}


def evaluated_task(config: Resolved, problem: Problem) -> Task:
    """The full model as every variant is evaluated with it."""
    network = make_network(config, problem, divisor=_divisor(config, 1.0))
    return with_node_loop(make_task(config, network), config.node_loop)


def _divisor(config: Resolved, width: float) -> float | None:
    """Of a model's activations; with HeteroFL's scaler in a run all its models have one, for the same state."""
    return width if "width_reduction" in config.method and not config.without_scaler else None


def trained_blocks(config: Resolved, method: str, blocks: tuple[str, ...]) -> list[tuple[str, ...] | int]:
    """What the strong, moderate and weak clients of a method train, by name or number."""
    for name in ("cut_moderate", "cut_weak"):
        check.one_of(blocks, **{name: getattr(config, name)})
    sides = [output_side(blocks, cut) for cut in (config.cut_moderate, config.cut_weak)]
    if method == "first_half":
        halves = [first_half(blocks, blocks[len(side) - 1], classifier=config.classifier) for side in sides]
        return [blocks, *halves]
    if method == "random_blocks":
        return [blocks, *(len(side) for side in sides)]
    return [blocks, *sides]


def step_size_of(config: Resolved) -> float | Callable[[Array], Array]:
    """The number, or a schedule of the round index that falls to a tenth after the rounds that are asked for."""
    if not config.decay_rounds:
        return config.step_size
    falling = optax.piecewise_constant_schedule(config.step_size, dict.fromkeys(config.decay_rounds, 0.1))
    # Its count goes into fractions, for which strict promotion asks that it be one.
    return lambda round_index: jnp.asarray(falling(round_index.astype(jnp.float32)))


def make_algorithm(config: Resolved, variant: Variant, problem: Problem) -> Algorithm:
    """The algorithm of one variant."""
    local = {
        "num_local_steps": config.local_steps,
        "batch_size": config.batch_size,
        "step_size": step_size_of(config),
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "weighting": config.weighting,
    }

    def task_of(width: float, scaler: float = 1.0, frozen_words: int = 0) -> Task:
        network = make_network(
            config,
            problem,
            width=width,
            batch_norm=variant.batch_norm,
            divisor=_divisor(config, scaler),
            frozen_words=frozen_words,
        )
        return with_node_loop(make_task(config, network), config.node_loop)

    full = task_of(1.0)
    if variant.method == "fed_avg":
        num_active = variant.num_active if isinstance(variant.num_active, int) else sum(variant.num_active)
        return fed_avg(full, num_active=num_active, **local)
    clients = {
        "client_class": np.repeat(np.arange(len(variant.counts)), variant.counts),
        "num_active": variant.num_active,
    }
    if variant.method in NARROW:
        widths = (config.width_moderate, config.width_weak)
        ordered = variant.method == "ordered_dropout"
        tasks = [full, *(task_of(width, 1.0 if ordered else width) for width in widths)]
        return width_reduction(
            tasks, ordered_dropout=ordered, axis_groups=axis_groups(config, problem), **clients, **local
        )
    class_tasks = None
    if variant.method == "embracing" and config.frozen_words:
        class_tasks = [full, full, task_of(1.0, frozen_words=config.frozen_words)]
    default = "batch" if variant.batch_norm == "static" else "running"
    return embracing(
        full,
        trained_blocks=trained_blocks(config, variant.method, full.blocks),
        frozen_batch_norm=config.frozen_batch_norm or default,
        class_tasks=class_tasks,
        **clients,
        **local,
    )
