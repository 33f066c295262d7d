"""From options to weights, schedules, tasks, data and algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.problem import image_shape, multilayer_perceptron, partitioned, residual_network, with_node_loop
from experiments.tracking.config import NAMED_PAIRS, Resolved, Variant
from jaxfl import channel, graphs, models
from jaxfl.algorithms import gradient_tracking, output_perturbation, perturbed_gossip
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task
from jaxfl.data import Dataset
from jaxfl.graphs import TrackingPair
from jaxfl.privacy.tracking import TrackingSchedule, exponential_schedule, polynomial_schedule

GRAPHS = ("directed_ring", "exponential", "ring", "complete", "star")
_SPREAD = {"S1": 0.05, "S2": 5e-5}  # of the agents' noise exponents or bases; a fifth an agent in the paper's runs


def make_pair(config: Resolved, graph: str) -> TrackingPair:
    """The weights R and C of gradient tracking."""
    if graph in NAMED_PAIRS:
        return getattr(graphs, graph)()
    if graph.endswith(".npy"):
        return _read_pair(graph, config.nodes)
    if graph not in GRAPHS:
        known = ", ".join((*NAMED_PAIRS, *GRAPHS))
        remedy = "Choose one of these, or name a .npy file with R and C."
        raise ArgumentError("graph", f"must be one of {known}", f"got {graph!r}", remedy)
    weights = getattr(graphs, graph)(config.nodes).mixing_matrices.mean(axis=0)  # of a period, where there is one
    return TrackingPair(state_weights=weights, tracker_weights=weights)


def _read_pair(path: str, num_nodes: int) -> TrackingPair:
    requirement = f"must be a .npy file with R and C, shape (2, {num_nodes}, {num_nodes})"
    remedy = "Write it by numpy.save(FILE, numpy.stack([R, C]))."
    try:
        weights = np.load(Path(path).expanduser(), allow_pickle=False)
    except OSError as error:
        found = f"{path}: {(error.strerror or str(error)).lower()}"
        raise ArgumentError("graph", requirement, found, remedy) from None
    except (ValueError, EOFError):  # another format, cut off, or objects that only pickle reads
        raise ArgumentError("graph", requirement, f"{path} does not hold an array of numbers", remedy) from None
    if not isinstance(weights, np.ndarray):
        weights.close()
        raise ArgumentError("graph", requirement, f"{path} is an archive of several arrays", remedy)
    if weights.dtype.kind not in "biuf":
        raise ArgumentError("graph", requirement, f"{path} has entries of type {weights.dtype}", remedy)
    if weights.shape != (2, num_nodes, num_nodes):
        raise ArgumentError("graph", requirement, f"{path} has shape {weights.shape}", remedy)
    return TrackingPair(state_weights=weights[0], tracker_weights=weights[1])


def agent_noise(config: Resolved, variant: Variant) -> np.ndarray:
    """(n,): p of every agent, the exponent of S1 or the base of S2."""
    return variant.noise + _SPREAD[variant.scheme] * np.arange(1, config.nodes + 1) / config.nodes


def make_schedule(config: Resolved, variant: Variant, num_iterations: int) -> TrackingSchedule:
    """All numbers of a run of so many iterations K under the variant's scheme, with what the options put in place."""
    noise = agent_noise(config, variant)
    if variant.scheme == "S1":
        schedule = polynomial_schedule(
            num_iterations, state_noise_exponent=noise, tracker_noise_exponent=noise, horizon_offset=0
        )
    else:
        schedule = exponential_schedule(num_iterations, state_noise_base=noise, tracker_noise_base=noise)
    schedule = schedule._replace(
        state_noise_scale=variant.noise_gain * schedule.state_noise_scale,
        tracker_noise_scale=variant.noise_gain * schedule.tracker_noise_scale,
    )
    given = {name: getattr(config, name) for name in ("state_mixing", "tracker_mixing", "step_size", "num_samples")}
    return schedule._replace(**{name: value for name, value in given.items() if value is not None})


def num_rounds(config: Resolved, variant: Variant) -> int:
    """K where the last noisy state is returned, else K + 1: what is returned after all K + 1 broadcasts."""
    returns_broadcast = variant.gradient_at == "broadcast" and variant.method != "noisy-outputs"
    return config.iterations if returns_broadcast else config.iterations + 1


def make_task(config: Resolved, dataset: Dataset) -> Task:
    """The model for the data set, run over nodes as asked for."""
    return with_node_loop(_network(config, dataset), config.node_loop)


def _network(config: Resolved, dataset: Dataset) -> Task:
    if config.model == "mlp":
        return multilayer_perceptron(dataset, config.hidden, "relu")
    if config.model == "cnn":
        network = models.cnn(
            image_shape(dataset),
            channels=config.channels,
            window=config.window,
            hidden=None,
            num_classes=dataset.num_classes,
        )
        return models.classification(network)
    return residual_network(dataset, config.resnet_widths)


def make_data(config: Resolved, dataset: Dataset, seed: int) -> FederatedData:
    """The agents' training data; every seed has its own partition."""
    try:
        return partitioned(
            dataset, config.partition, config.nodes, seed, alpha=config.alpha, shards_per_node=config.shards_per_node
        )
    except ArgumentError as error:
        if error.argument != "scheme":  # which is another option here
            raise
        raise ArgumentError("partition", error.requirement, error.found, error.remedy) from None


def refuse_small_agents(config: Resolved, variants: Mapping[str, Variant], sizes: Sequence[int]) -> None:
    """Say before anything runs that an agent of some seed has too few samples; `sizes` (n,), least of all seeds."""
    fewest = min(sizes)
    for name, variant in variants.items():
        batch = make_schedule(config, variant, config.iterations).num_samples
        if batch > fewest:
            found = f"{name} draws {batch} and agent {sizes.index(fewest)} has {fewest}"
            remedy = f"Pass --num-samples {fewest} or less, or give agents more data."
            raise ArgumentError("num_samples", "must be at most the samples of every agent and seed", found, remedy)


def make_baseline_graph(config: Resolved) -> graphs.Graph:
    """The undirected graph of the other methods."""
    if config.baseline_graph not in GRAPHS:
        found = f"got {config.baseline_graph!r}"
        raise ArgumentError("baseline_graph", f"must be one of {', '.join(GRAPHS)}", found, "Choose one of these.")
    try:
        if config.baseline_graph == "star":
            return graphs.star(config.nodes, weights="metropolis")  # doubly stochastic, as the others are
        graph = getattr(graphs, config.baseline_graph)(config.nodes)
        graphs.require_undirected(graph)
    except ArgumentError as error:
        raise ArgumentError("baseline_graph", error.requirement, error.found, "Pass ring, for instance.") from None
    return graph


def make_algorithm(config: Resolved, variant: Variant, task: Task) -> Algorithm:
    """The algorithm of one variant."""
    schedule = make_schedule(config, variant, config.iterations)
    clip_norm = None if config.assume_bounded else config.clip_norm
    if variant.method == "DP-GT":
        return gradient_tracking(
            task,
            **make_pair(config, variant.graph)._asdict(),
            schedule=schedule,
            clip_norm=clip_norm,
            distribution=config.distribution,
            gradient_at=variant.gradient_at,
        )
    graph = make_baseline_graph(config)
    if variant.method == "noisy-outputs":
        return output_perturbation(
            task, graph=graph, schedule=schedule, clip_norm=clip_norm, distribution=config.distribution
        )
    return perturbed_gossip(
        task,
        graph=graph,
        schedule=schedule,
        clip_norm=clip_norm,
        distribution=config.distribution,
        quantizer=make_quantizer(config, variant),
        gradient_at=variant.gradient_at,
    )


def make_quantizer(config: Resolved, variant: Variant) -> channel.Quantizer | None:
    """What is applied to states before they are sent."""
    if variant.method == "ternary-states":
        return channel.ternary_quantizer(config.ternary_threshold)
    if variant.method in ("quantized-states", "noisy-quantized-states"):
        return channel.uniform_quantizer(config.quantization_step)
    return None
