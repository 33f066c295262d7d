"""From options to graphs, tasks, data and algorithms."""

from __future__ import annotations

import jax
import numpy as np

from experiments.command_line import read_graph
from experiments.privsgp.config import Resolved, Variant
from experiments.problem import image_shape, multilayer_perceptron, partitioned, residual_network, with_node_loop
from jaxfl import gradients, graphs, models, privacy
from jaxfl.algorithms import a_dp2_sgd, dp2_sgd, push_sum
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, check
from jaxfl.core.tree import num_bytes
from jaxfl.data import Dataset
from jaxfl.gradients.memory import require_fits
from jaxfl.training.chunks import check_start

GRAPHS = ("exponential", "directed_ring", "ring", "complete", "star", "random")


def make_graph(config: Resolved, nodes: int) -> graphs.Graph:
    """The communication graph over that many nodes."""
    if config.edge_probability is not None:  # of a random graph it never is None
        if config.graph != "random":
            remedy = "Leave it out, or pass --graph random."
            raise ArgumentError("edge_probability", "belongs to --graph random", f"got --graph {config.graph}", remedy)
        return graphs.random_digraph(nodes, config.edge_probability, 0)
    if config.graph.endswith(".npy"):
        return read_graph(config.graph, nodes)
    if config.graph not in GRAPHS:
        remedy = "Choose one of these, or name a .npy file with a mixing matrix."
        raise ArgumentError("graph", f"must be one of {', '.join(GRAPHS)}", f"got {config.graph!r}", remedy)
    return getattr(graphs, config.graph)(nodes)


def make_task(config: Resolved, dataset: Dataset) -> Task:
    """The model for the data set, run over nodes as asked for."""
    return with_node_loop(_network(config, dataset), config.node_loop)


def _network(config: Resolved, dataset: Dataset) -> Task:
    if config.model == "mlp":
        return multilayer_perceptron(dataset, config.hidden, config.activation)
    if config.model == "cnn":
        return models.classification(models.cnn(image_shape(dataset), num_classes=dataset.num_classes))
    return residual_network(dataset, config.resnet_widths)


def make_data(config: Resolved, dataset: Dataset, seed: int, nodes: int) -> FederatedData:
    """The nodes' training data; every seed has its own partition."""
    return partitioned(
        dataset, config.partition, nodes, seed, alpha=config.alpha, shards_per_node=config.shards_per_node
    )


def make_algorithm(config: Resolved, variant: Variant, task: Task) -> Algorithm:
    """The algorithm of one variant whose noise, iterations and step size are known."""
    graph = make_graph(config, variant.nodes)
    gradient = make_gradient(config, variant)
    noise = None if not variant.noise_std else privacy.gaussian(variant.noise_std)  # zeros cost as much as noise
    if variant.method in ("PrivSGP-VR", "PrivSGP"):
        return push_sum(task, graph=graph, gradient=gradient, noise=noise, step_size=variant.step_size)
    if variant.method == "DP2-SGD":
        silent = privacy.gaussian(0.0) if noise is None else noise
        return dp2_sgd(task, graph=graph, gradient=gradient, noise=silent, step_size=variant.step_size)
    return a_dp2_sgd(
        task,
        graph=graph,
        gradient=gradient,
        noise=noise,
        step_size=variant.step_size,
        max_delay=config.max_delay,
    )


def make_gradient(config: Resolved, variant: Variant) -> gradients.GradientEstimator:
    """A table for PrivSGP-VR, a mini-batch of as many samples for the others."""
    reduced = gradients.saga(  # made for PrivSGP alone, too: a bad option is refused even where it is not used
        sampler=make_sampler(config, variant, variant.batch_size),
        table=config.table,
        entry_size=config.entry_size,
        storage=config.storage,
        clip_norm=config.clip_norm,
        refresh_every=config.refresh_every,
    )
    if variant.method == "PrivSGP-VR":
        return reduced
    sampler = make_sampler(config, variant, samples_per_batch(config, variant))
    return gradients.mini_batch(sampler=sampler, clip_norm=config.clip_norm)


def samples_per_batch(config: Resolved, variant: Variant) -> int:
    """Expected samples of a batch: an entry of a per_batch table holds several."""
    return variant.batch_size * (config.entry_size or 1)


def make_sampler(config: Resolved, variant: Variant, batch_size: int) -> gradients.Sampler:
    """The sampler, a Poisson one with room for this run's number of draws."""
    check.one_of(("poisson", "fixed", "uniform"), sampler=config.sampler)
    if config.sampler == "poisson":
        return gradients.poisson(batch_size, num_draws=variant.nodes * variant.iterations)
    return getattr(gradients, config.sampler)(batch_size)


def refuse_impossible(config: Resolved, dataset: Dataset, task: Task, variants: dict[str, Variant]) -> None:
    """Say what is wrong with any variant and any seed before noise is calibrated; computes and writes nothing."""
    # Noise, iterations and step size may not be known yet; what they are decides nothing of what is checked here.
    algorithms = {
        name: make_algorithm(
            config,
            variant._replace(
                noise_std=variant.noise_std or 0.0,
                iterations=max(1, variant.iterations),
                step_size=1.0 if np.isnan(variant.step_size) else variant.step_size,
            ),
            task,
        )
        for name, variant in variants.items()
    }
    for nodes in dict.fromkeys(variant.nodes for variant in variants.values()):
        checked = []
        for seed in config.seeds:
            data = make_data(config, dataset, seed, nodes)
            sizes = np.asarray(data.sizes).tolist()
            if sizes in checked:  # what an algorithm needs of the data is in their sizes
                continue
            checked.append(sizes)
            for name, algorithm in algorithms.items():
                if variants[name].nodes == nodes:
                    state = check_start(algorithm, jax.random.key(seed), data)
                    require_fits("hidden" if config.model == "mlp" else "model", num_bytes(state), {})
