"""Options of experiments.similarity: the averaged part, and the compared layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxfl.algorithms import first_half, output_side, partial_averaging
from jaxfl.analysis.svcca import svcca_of_pairs
from jaxfl.channel import Work, node_work
from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, PyTree, Task, check, over_nodes
from jaxfl.core.tasks import scale_images
from jaxfl.frame import Choice, Costs, Run, affects_statements_only, choose, flat
from jaxfl.models.layer_outputs import layer_outputs
from jaxfl.training import Measure

from ..embracing_fl.defaults import OF_MODEL
from ..embracing_fl.networks import RESNETS, Form, Network, Problem, narrow, problem_of
from ..embracing_fl.options import Data, Partition, Steps

STATISTICS: dict[str, Callable[[Array], Array]] = {"maximum": jnp.max, "mean": jnp.mean}


def metric_name(statistic: str, layer: str) -> str:
    """Name in metrics.jsonl of a statistic over pairs of clients."""
    return f"svcca_{statistic}_{layer}"


def _sides(network: Network, problem: Problem, first: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The input side, and the output side, which begins with a block."""
    blocks = network.task(problem).blocks
    check.one_of(blocks, first_shared=first)
    if first == blocks[0]:
        remedy = f"Choose among {', '.join(blocks[1:])}."
        raise ArgumentError("first_shared", "must leave the input side a block", f"got {first!r}", remedy)
    outputs = output_side(blocks, first)
    return blocks[: -len(outputs)], outputs


SCHEME = Choice(
    "scheme",
    {
        "nothing": lambda network, problem: (),
        "output_side": lambda network, problem, *, first_shared: _sides(network, problem, first_shared)[1],
        "input_side": lambda network, problem, *, first_shared: _sides(network, problem, first_shared)[0],
        "channels": lambda network, problem, *, channel_share: network.task(problem, Form(channel_share)),
        "everything": lambda network, problem: "all",
    },
)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Part of the model that is averaged over all clients in every round."""

    COUNTS: ClassVar = (SCHEME.counts,)
    scheme: Literal["nothing", "output_side", "input_side", "channels", "everything"] = "nothing"
    """Averaged part: nothing (figure 1), output_side (the blocks from first_shared on), input_side (the blocks before
    it), channels (the first channels of every layer, figure 3), or everything."""
    first_shared: str = "dense_3"
    """First block of the output side; by default the first of the second half of all blocks, which has one more if
    their number is odd."""
    channel_share: float = 0.5
    """Share of every layer's channels that the channels scheme averages."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Layers and samples of the comparison."""

    layers: tuple[str, ...] = affects_statements_only(("dense_1", "dense_2", "dense_3", "dense_4"))
    """Layers whose outputs are compared. mlp: dense_1, relu_1, ...; resnets: stem, block_1_1 (stage, position), ...,
    dense. By default all with parameters, of resnets the stem and the last block of each stage."""
    num_directions: int = affects_statements_only(4)
    """Singular directions of a layer's outputs that are compared."""
    similarity_batches: int = affects_statements_only(2)
    """Batches of test samples over which similarities are averaged: a decomposition of all samples would be large."""
    similarity_batch_size: int = affects_statements_only(64)
    """Test samples in each batch."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.similarity."""

    data: Data = Data()
    clients: Partition = Partition(nodes=8)
    network: Network = Network(model="mlp", hidden=(64, 48, 32))
    sharing: Sharing = Sharing()
    steps: Steps = Steps(rounds=20, step_size=0.1)
    comparison: Comparison = Comparison()
    costs: Costs = Costs()
    run: Run = Run()

    def problem(self) -> Problem:
        """Problem for which the model is built."""
        return problem_of(self.data.load(), self.network.model)

    @property
    def counts(self) -> tuple[int]:
        """All clients take part."""
        return (self.clients.nodes,)

    def federated(self, seeds: tuple[int, ...]) -> Callable[[int], FederatedData]:
        """Seed -> the training data of all clients."""
        return self.clients.data(self.data, self.clients.nodes, seeds)

    def task(self) -> Task:
        """The learning task."""
        return self.network.task(self.problem())

    def work(self) -> Work:
        """Work of one sample."""
        return node_work(self.network.counts(self.problem()))

    def algorithm(self) -> Algorithm:
        """Local SGD at all clients, and the average of the scheme's part; traced options may be arrays."""
        problem = self.problem()
        part = choose(SCHEME, flat(self))(self.network, problem)
        groups = self.network.axis_groups(problem) if self.sharing.scheme == "channels" else None
        clients = self.steps.clients("uniform")
        return partial_averaging(self.task(), clients=clients, synchronized=part, axis_groups=groups)

    def layers(self) -> tuple[str, ...]:
        """The layers that are compared, input side first."""
        names = tuple(name for name, _ in self.network.build(self.problem()).layers)
        layers = self.comparison.layers
        for name in layers:
            check.one_of(names, layers=name)
        if not layers or len(set(layers)) < len(layers):
            raise ArgumentError("layers", "must be distinct and at least one", f"got {list(layers)}", "List each once.")
        return tuple(sorted(layers, key=names.index))

    def measures(self) -> dict[str, Measure]:
        """SVCCA of all pairs of clients; the same object in every call."""
        return {"svcca": _svcca(self.data, self.network, self.comparison, self.layers())}


@functools.lru_cache(maxsize=64)
def _svcca(data: Data, network: Network, comparison: Comparison, layers: tuple[str, ...]) -> Measure:
    """SVCCA of pairs of clients, averaged over batches: the maximum over pairs (the paper's measure), and the mean."""
    shape, inputs = (comparison.similarity_batches, comparison.similarity_batch_size), data.load().test_inputs
    if shape[0] * shape[1] > len(inputs):
        found = f"got {shape[0]} of {shape[1]}, and there are {len(inputs)}"
        requirement = "times similarity_batch_size must be at most the test samples"
        raise ArgumentError("similarity_batches", requirement, found, "Pass fewer or smaller ones.")
    samples = jnp.asarray(inputs[: shape[0] * shape[1]].reshape(*shape, *inputs.shape[1:]))
    problem = problem_of(data.load(), network.model)
    model, node_loop = network.build(problem), network.task(problem).node_loop

    def compute(nodes: PyTree, batches: Array) -> dict[str, Array]:
        def of_batch(batch: Array) -> dict[str, Array]:
            images = scale_images(batch)
            outputs = over_nodes(lambda client: layer_outputs(model, client, images, layers), node_loop)(nodes)
            return {layer: svcca_of_pairs(values, comparison.num_directions) for layer, values in outputs.items()}

        pairs = {layer: values.mean(axis=0) for layer, values in jax.lax.map(of_batch, batches).items()}
        return {
            metric_name(name, layer): statistic(pairs[layer])
            for layer in layers
            for name, statistic in STATISTICS.items()
        }

    return Measure(compute=compute, prepare=lambda key, data: samples)


def check_config(config: Configuration) -> None:
    """Refuse values out of range before any work."""
    comparison, share = config.comparison, config.sharing.channel_share
    check.at_least(2, nodes=config.clients.nodes)
    config.steps.check()
    check.at_least(1, evaluate_every=config.run.evaluate_every)
    check.at_least(1, num_directions=comparison.num_directions, similarity_batches=comparison.similarity_batches)
    config.network.check()
    if comparison.num_directions >= comparison.similarity_batch_size - 1:
        requirement = f"must be below similarity_batch_size - 1, which is {comparison.similarity_batch_size - 1}"
        remedy = "Pass fewer: any two subspaces of that many directions are equal."
        raise ArgumentError("num_directions", requirement, f"got {comparison.num_directions}", remedy)
    if not 0 < share < 1:
        raise ArgumentError("channel_share", "must lie in (0, 1)", f"got {share}", "Pass a share, 0.5 for instance.")
    if config.sharing.scheme == "channels" and 0 in narrow(config.network.widths(), share):
        found = f"got {share} of {min(config.network.widths())}"
        raise ArgumentError("channel_share", "must leave every layer a channel", found, "Pass more.")


def blocks_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The model's blocks, input side first."""
    if options["model"] in RESNETS:
        stages = enumerate(options["resnet_blocks"], start=1)
        return ("stem", *(f"block_{stage}_{1 + number}" for stage, count in stages for number in range(count)), "dense")
    if options["model"] == "bilstm":
        return "embedding", "lstm", "dense"
    convolutions = len(options["channels"]) if options["model"] == "femnist_cnn" else 0
    numbers = [("conv", convolutions), ("dense", len(options["hidden"]) + 1)]
    return tuple(f"{kind}_{1 + number}" for kind, count in numbers for number in range(count))


def _second_half(blocks: tuple[str, ...]) -> str:
    """First block of the second half; a single block is its own second half."""
    return blocks[min(len(first_half(blocks)), len(blocks) - 1)]


def _layers(options: Mapping[str, Any], names: Collection[str]) -> tuple[str, ...]:
    if options["model"] not in RESNETS:
        return blocks_of(options)
    return ("stem", *(f"block_{stage}_{count}" for stage, count in enumerate(options["resnet_blocks"], start=1)))


DERIVED = {
    **{name: OF_MODEL[name] for name in ("resnet_blocks", "hidden")},
    "first_shared": lambda options, names: _second_half(blocks_of(options)),
    "layers": _layers,
    "evaluate_every": lambda options, names: max(1, options["rounds"] // 10),
}
