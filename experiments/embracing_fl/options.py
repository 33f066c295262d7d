"""Options of experiments.embracing_fl: who takes part, and what they train."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms import client_sgd, embracing, fed_avg, local_steps, partial_averaging, width_reduction
from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.channel import Counts, Work, node_work, total
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, check
from jaxfl.frame import Costs, Run, affects_statements_only, choose, flat, traced, unsaved, where
from jaxfl.frame import Data as Images
from jaxfl.frame.options import ABSENT, added_later
from jaxfl.frame.records import WRITERS, cut
from jaxfl.training import Measure
from jaxfl.training.measures import calibrated_scores

from .methods import METHOD, NARROW, TOGETHER, WITH_WEAKER, Share, counts_of, decayed, shared_out, with_classes
from .networks import RESNETS, Form, Network, Problem, problem_of


@dataclasses.dataclass(frozen=True)
class Data(Images):
    """Data set to learn from."""

    dataset: str = "digits"
    """digits, mnist, fashion_mnist, cifar10, femnist, imdb, or data of your own: FILE.csv (or .tsv,
    .csv.gz), FILE.parquet, FILE.npz, or hf:NAME of the Hugging Face hub."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """Partition of the data over clients."""

    CUT: ClassVar = WRITERS
    COUNTS: ClassVar = (WRITERS.counts,)
    nodes: int = 128
    """Clients over which the data are partitioned. Those beyond the strong, moderate and weak ones take no part."""
    partition: Literal["dirichlet", "iid", "writers", "quantity", "classes", "sites"] = "dirichlet"
    """dirichlet (shares of labels differ), iid (at random), writers (each client has the samples of whole writers),
    quantity (sizes differ, shares of labels do not), classes (classes_per_node at each client), or sites (a client for
    each site)."""
    alpha: float = 0.1
    """Concentration of the dirichlet and quantity partitions: the smaller, the more clients differ."""
    classes_per_node: int = 2
    """Classes of each client in the classes partition."""
    writers_per_node: int = 2
    """Writers of each client in the writers partition."""

    def data(
        self, data: Images, count: int, seeds: tuple[int, ...], *, masked: bool = False
    ) -> Callable[[int], FederatedData]:
        """Seed -> the training data of the first clients, `masked` as `with_classes` makes them; the same function in
        every call."""
        return _participants(data, self, count, seeds, masked)


@functools.lru_cache(maxsize=64)
def _participants(data: Images, partition: Partition, count: int, seeds: tuple[int, ...], masked: bool):
    """The function of `Partition.data`. Index tables are as long for all seeds, so that these run the same program."""
    whole = cut(data, partition)
    try:
        longest = max(int(whole(seed).sizes[:count].max()) for seed in seeds)
    except ArgumentError as error:
        if error.argument != "dataset":  # whose writers are not known
            raise
        raise ArgumentError("partition", error.requirement, error.found, "Choose dirichlet or iid.") from None

    def of_seed(seed: int) -> FederatedData:
        everybody = whole(seed)
        indices = everybody.indices[:count, :longest]
        padded = jnp.pad(indices, ((0, 0), (0, longest - indices.shape[1])))
        participants = everybody._replace(indices=padded, sizes=everybody.sizes[:count])
        return with_classes(participants, data.load().num_classes) if masked else participants

    return of_seed


@dataclasses.dataclass(frozen=True)
class Participation:
    """Clients that take part."""

    case: int | None = affects_statements_only(9)
    """Case 1 to 10 of the paper's Table 3: shares of strong, moderate and weak clients. None where these are counted by
    the next three options."""
    strong: int = 0
    """Number of strong clients, which train the whole model; instead of --case."""
    moderate: int = 0
    """Number of moderate clients, which train a part of the model; instead of --case."""
    weak: int = 0
    """Number of weak clients, which train a smaller part; instead of --case."""
    participation_rate: float | None = affects_statements_only(0.25)
    """Share of the clients that take part in a round; None where num_active gives their number."""
    num_active: int = 0
    """Number of clients that take part in a round, in place of the rate."""
    sampling: Literal["uniform", "stratified"] = "uniform"
    """uniform: active clients are drawn among all, and one trains after the other. stratified: they are drawn within
    each class (strong, moderate, weak), in proportion to its size."""
    weighting: Literal["uniform", "data"] = "uniform"
    """Weights of the mean over clients: uniform (all alike) or data (by their numbers of samples)."""


@dataclasses.dataclass(frozen=True)
class Learning:
    """Method, and the parts of the model that clients train."""

    COUNTS: ClassVar = (
        METHOD.counts,
        where("method", WITH_WEAKER, "case", "moderate", "weak", "sampling"),
        where("method", TOGETHER, "participation_rate", "num_active", "weighting", "sampling"),
        where("batch_norm", ("static",), "calibration_samples"),
        where("model", RESNETS, "calibration_samples", "batch_norm"),
        where("model", (*RESNETS, "bilstm"), "frozen_batch_norm"),
        where("model", ("bilstm",), "frozen_words"),
        # Clients that train only the classifier read no word with gradient.
        {"frozen_words": lambda options: options["cut_weak"] != "dense" or options["model"] != "bilstm"},
        dict.fromkeys(("cut_moderate", "width_moderate"), lambda options: options["moderate"] != 0),
        dict.fromkeys(("cut_weak", "width_weak", "frozen_words"), lambda options: options["weak"] != 0),
    )
    method: Literal[
        "embracing", "width_reduction", "ordered_dropout", "first_half", "random_blocks", "fed_avg", "alone"
    ] = "embracing"
    """embracing: weaker clients train blocks of the output side. width_reduction (HeteroFL), ordered_dropout (FjORD):
    they train the first channels of every layer. first_half, random_blocks: as many blocks as embracing trains, from
    the input side or drawn anew each round. fed_avg: the strong clients alone, the others take no part. alone: each
    client trains the whole model by itself."""
    cut_moderate: str = "dense_2"
    """First block that a moderate client trains."""
    cut_weak: str = "dense_3"
    """First block that a weak client trains."""
    frozen_words: int = 0
    """Number of first words, in each direction of bilstm, that a weak client of embracing reads without gradient."""
    frozen_batch_norm: Literal["running", "batch"] = "running"
    """Statistics of batch normalization in the blocks that a client of embracing does not train: running, or those of
    the batch, which --batch-norm static needs."""
    width_moderate: float = 0.45
    """Share of every layer's channels that a moderate client of width_reduction and ordered_dropout has."""
    width_weak: float = 0.2
    """Share of every layer's channels that a weak client of these methods has."""
    without_scaler: bool = False
    """Leave out HeteroFL's scaler, with which clients of width_reduction divide hidden activations by their width."""
    masked_loss: bool = added_later(False, {False: ABSENT})
    """HeteroFL's masked loss: in training the logits of classes that a client lacks are 0."""
    classifier: bool = False
    """In first_half train the last block, too, as InclusiveFL does."""
    batch_norm: Literal["global", "static"] = "global"
    """Batch normalization of resnets. global: running statistics, averaged like parameters. static: statistics are not
    tracked, but measured on training samples before an evaluation. By default static for narrow clients, and global
    for others."""
    calibration_samples: int = 500
    """Training samples on which static statistics are measured."""
    target_accuracy: float | None = affects_statements_only(None)
    """Test accuracy in (0, 1]: summary.json says in which round it is reached."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Local SGD."""

    rounds: int = 200
    """Communication rounds."""
    local_steps: int = 10
    """SGD steps of an active client in a round."""
    batch_size: int = 32
    """Samples in a step."""
    step_size: float = traced(0.04)
    """Step size of the clients."""
    decay_rounds: tuple[int, ...] = ()
    """After each of these rounds the step size falls to a tenth."""
    momentum: float = traced(0.9)
    """Momentum of the clients; starts at zero in each round."""
    weight_decay: float = traced(1e-4)
    """Weight decay of the clients."""

    def check(self) -> None:
        """Refuse rounds and momentum out of range; the rest is refused where clients are built."""
        check.at_least(1, rounds=self.rounds)
        if not 0 <= self.momentum < 1:
            remedy = "Pass 0.9, for instance: from 1 on nothing is forgotten."
            raise ArgumentError("momentum", "must lie in [0, 1)", f"got {self.momentum}", remedy)

    def clients(self, weighting: str) -> LocalSteps:
        """Local steps of a client in a round; traced options may be arrays."""
        step_size = decayed(self.step_size, self.decay_rounds)
        optimizer = client_sgd(step_size, momentum=self.momentum, weight_decay=self.weight_decay)
        return local_steps(self.local_steps, batch_size=self.batch_size, optimizer=optimizer, weighting=weighting)


@dataclasses.dataclass(frozen=True)
class Report:
    """Output in place of training."""

    show: Literal["training", "sizes", "timing"] = unsaved("training")
    """sizes: print Tables 1 and 10 as counted here, timing: Table 8 for the device profile. Neither trains."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.embracing_fl."""

    data: Data = Data()
    clients: Partition = Partition()
    participation: Participation = Participation()
    network: Network = Network()
    learning: Learning = Learning()
    steps: Steps = Steps()
    report: Report = Report()
    costs: Costs = Costs()
    run: Run = Run()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Strong, moderate and weak clients that take part."""
        clients = self.participation
        return counts_of(self.learning.method, clients.strong, clients.moderate, clients.weak)

    @property
    def num_active(self) -> int | tuple[int, ...]:
        """Active clients in a round: of all, or if stratified of each class."""
        number = self.participation.num_active
        return number if self.participation.sampling == "uniform" else shared_out(number, self.counts)

    @property
    def is_static(self) -> bool:
        """True where the model has batch normalization that tracks no statistics."""
        return self.network.model in RESNETS and self.learning.batch_norm == "static"

    def problem(self) -> Problem:
        """Problem for which the model is built."""
        return problem_of(self.data.load(), self.network.model)

    def task(self, width: float = 1.0, frozen_words: int = 0) -> Task:
        """Task that a class of clients trains; with HeteroFL's scaler in the full model, too, for the same model
        state."""
        learning = self.learning
        scaler = learning.method == "width_reduction" and not learning.without_scaler
        form = Form(width, learning.batch_norm, width if scaler else None, frozen_words, learning.masked_loss)
        return self.network.task(self.problem(), form)

    def federated(self, seeds: tuple[int, ...]) -> Callable[[int], FederatedData]:
        """Seed -> the training data of the clients that take part."""
        return self.clients.data(self.data, sum(self.counts), seeds, masked=self.learning.masked_loss)

    def algorithm(self) -> Algorithm:
        """The algorithm; traced options may be arrays."""
        method, problem = self.learning.method, self.problem()
        clients = self.steps.clients(self.participation.weighting)
        if method == "alone":
            return partial_averaging(self.task(), clients=clients, synchronized=())
        if method == "fed_avg":
            return fed_avg(self.task(), clients=clients, num_active=self.participation.num_active)
        shares = self.shares(problem)
        tasks = [self.task(share.width, share.frozen_words) for share in shares]  # the same object for the same share
        classes = {"client_class": np.repeat(np.arange(3), self.counts), "num_active": self.num_active}
        if method in NARROW:
            narrow = {"axis_groups": self.network.axis_groups(problem), "ordered_dropout": method == "ordered_dropout"}
            return width_reduction(tasks, clients=clients, **classes, **narrow)
        return embracing(
            tasks[0],
            clients=clients,
            trained_blocks=[share.blocks for share in shares],
            frozen_batch_norm=self.learning.frozen_batch_norm,
            class_tasks=tasks if len({*map(id, tasks)}) > 1 else None,
            **classes,
        )

    def work(self) -> list[Work]:
        """Work of each client for a sample: a gradient runs from its first block on, as `jaxfl.embracing` counts it.

        Words that are read without gradient run forward only. A client of ordered_dropout takes the mean over the
        widths that it draws.
        """
        problem, network = self.problem(), self.network
        blocks, of_class = network.task(problem).blocks, []
        for share in self.shares(problem):
            form, first = Form(share.width), blocks[0] if isinstance(share.blocks, int) else share.blocks[0]
            shorter = problem.sample_shape[0] - share.frozen_words, *problem.sample_shape[1:]
            read = network.counts(problem._replace(sample_shape=shorter), form)
            layers = network.counts(problem, form)
            both_ways = node_work(layers, None if first == blocks[0] else first)
            of_class.append(both_ways._replace(backward=total(read, trained_from=first)))
        if self.learning.method == "ordered_dropout":
            of_class = [_mean(of_class[number:]) for number in range(len(of_class))]
        return [of_class[number] for number, count in enumerate(self.counts) for _ in range(count)]

    def shares(self, problem: Problem) -> list[Share]:
        """Shares of the model that strong, moderate and weak clients train."""
        return choose(METHOD, flat(self))(self.network.task(problem).blocks)

    def measures(self) -> dict[str, Measure]:
        """The evaluation, where statistics are measured before it."""
        samples = self.learning.calibration_samples
        return {"test": _calibrated(self.task(), self.data, samples)} if self.is_static else {}


@functools.lru_cache(maxsize=64)
def _calibrated(task: Task, data: Images, num_samples: int) -> Measure:
    return calibrated_scores(task, data.test_set(), num_samples)


def _mean(works: Sequence[Work]) -> Work:
    """Mean of each count, rounded."""
    pairs = (zip(*same, strict=True) for same in zip(*works, strict=True))
    return Work(*(Counts(*(round(sum(numbers) / len(works)) for numbers in pair)) for pair in pairs))
