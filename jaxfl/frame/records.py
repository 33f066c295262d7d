"""Records that all experiments share; each builds what it describes. A thing built once serves all configurations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from jaxfl import channel, models
from jaxfl.core import ArgumentError, FederatedData, Task, check
from jaxfl.core.tables import is_whole
from jaxfl.data import Dataset, federate, hold_out, load, load_file, only_classes, shrunk, subset
from jaxfl.data.columns import OPTIONS, has_columns, is_file
from jaxfl.data.pool import SCHEMES, redeal
from jaxfl.data.subset import without_validation
from jaxfl.frame.choose import Choice, choose, where
from jaxfl.frame.distributed import PLACE, Distributed
from jaxfl.frame.launch import Launch
from jaxfl.frame.networks import NETWORKS, image_shape, with_node_loop
from jaxfl.frame.options import ABSENT, added_later, affects_statements_only, unsaved
from jaxfl.training import Measure, Placement, class_scores, evaluation_set, own_scores
from jaxfl.training.case import EvaluationSet
from jaxfl.training.hooks import check_tracker
from jaxfl.training.measures import test_scores
from jaxfl.training.processes import is_multiprocess
from jaxfl.training.publish import check_folder

JOBS = (  # options of jobs and machines, a group of its own in --help
    *(field.name for record in (Launch, Distributed) for field in dataclasses.fields(record)),
    *("devices", "shard", "lanes_at_once"),
)
LARGEST_DBM = 300  # 1e27 W, which float32 holds
_keep_few, _keep = functools.lru_cache(maxsize=8), functools.lru_cache(maxsize=64)  # keyed by values of frozen records


@dataclasses.dataclass(frozen=True)
class Data:
    """Data set to learn from."""

    COUNTS: ClassVar = (  # options that are not given do not count: older runs keep their random numbers
        dict.fromkeys(OPTIONS, lambda options: has_columns(options["dataset"])),
        {name: lambda options, name=name: options[name] not in (None, ()) for name in ("classes", *OPTIONS[2:])},
        {"test_split": lambda options: is_file(options["dataset"])},
        {"data_dir": lambda options: not is_file(options["dataset"])},
    )
    dataset: str = "digits"
    """digits, mnist, fashion_mnist, cifar10, or your own: FILE.csv, .tsv, .parquet, .npz, hf:NAME: docs/own_data.md."""
    label_column: str = "label"
    """Column of your own table that holds the labels. Columns without a role must hold numbers."""
    site_column: str | None = None
    """Column of your own table that names each sample's site, a hospital say: a node, unless --partition is given."""
    id_column: str | None = None
    """Column of your own table that identifies samples or persons, and by a hash decides which samples test."""
    input_columns: tuple[str, ...] = ()
    """Columns of your own table that are inputs; by default all that have no other role."""
    drop_columns: tuple[str, ...] = ()
    """Columns of your own table that are left out: row numbers, for instance."""
    test_split: float = 0.2
    """Share of the samples of your own file that test, by their places in each site or by --id-column."""
    data_dir: str | None = unsaved(None)
    """Folder with the data set's files as their authors publish them."""
    classes: tuple[str | int, ...] | None = None
    """Use only samples with these labels, at least two, which become 0, 1, ... in this order; docs/own_data.md."""
    num_train: int | None = None
    """Use only this many training samples, drawn at random; all by default."""
    num_test: int | None = None
    """Use only this many test samples, drawn at random; all by default."""
    shrink: int = 1
    """Average images over blocks of this many pixels a side."""
    validation: float = added_later(0.0, {0.0: ABSENT})
    """Share of the training samples, in [0, 1), that no node trains on: the accuracy on them chooses among cases, and
    the test samples choose nothing. By their places in each site, or by --id-column."""

    def __post_init__(self) -> None:
        as_numbers = self.classes and tuple(int(c) if is_whole(str(c)) else c for c in self.classes)
        object.__setattr__(self, "classes", as_numbers)

    @_keep_few
    def load(self) -> Dataset:
        """The data set, cut and shrunk, without what validates; the same arrays in every call."""
        return without_validation(self._whole(), self.validation)[0] if self.validation else self._whole()

    @_keep_few
    def _whole(self) -> Dataset:
        columns = self.label_column, self.site_column, self.id_column, self.input_columns, self.drop_columns
        table: dict[str, Any] = dict(zip((*OPTIONS, "test_split"), (*columns, self.test_split), strict=True))
        whole = load_file(self.dataset, **table) if is_file(self.dataset) else load(self.dataset, self.data_dir)
        return shrunk(subset(only_classes(whole, self.classes), self.num_train, self.num_test), self.shrink)

    @_keep_few
    def pool(self) -> FederatedData:
        """All training samples on the device, at one node; the same arrays in every call."""
        dataset = self.load()
        return federate(dataset.train_inputs, dataset.train_labels, [np.arange(len(dataset.train_labels))])

    @_keep_few
    def test_set(self) -> EvaluationSet:
        """The test samples on the device; the same arrays in every call."""
        return evaluation_set(self.load().test_inputs, self.load().test_labels)

    @_keep_few
    def class_scores(self, task: Task) -> Measure:
        """The measure with scores of classes on the test samples; the same object in every call."""
        return class_scores(task, self.test_set())

    @_keep_few
    def validation_scores(self, task: Task) -> Measure:
        """The measure on the samples that validate; the same object in every call."""
        dataset, (_, held) = self._whole(), without_validation(self._whole(), self.validation)
        return test_scores(task, evaluation_set(dataset.train_inputs[held], dataset.train_labels[held]))


PARTITION, WRITERS = (
    Choice("partition", {name: SCHEMES[name] for name in ("iid", "dirichlet", known, "quantity", "classes", "sites")})
    for known in ("shards", "writers")
)


@dataclasses.dataclass(frozen=True)
class Clients:
    """Nodes, and the partition of the data over them."""

    CUT: ClassVar = PARTITION
    COUNTS: ClassVar = (PARTITION.counts, {"own_test": lambda options: options["own_test"] != 0})
    nodes: int = 16
    """Number n of nodes (clients, where there is a server)."""
    partition: Literal["iid", "dirichlet", "shards", "quantity", "classes", "sites"] = "iid"
    """iid (at random), dirichlet (shares of labels differ), shards (pieces of the samples sorted by label), quantity
    (sizes differ, shares of labels do not), classes (classes_per_node at each), or sites (a node for each site)."""
    alpha: float | None = None
    """Concentration of the dirichlet and quantity partitions, which need it: the smaller, the more nodes differ."""
    classes_per_node: int | None = None
    """Classes of each node in the classes partition, which needs it."""
    shards_per_node: int | None = None
    """Shards of each node in the shards partition, which needs it."""
    own_test: float = 0.0
    """Share of each node's samples, in [0, 1), that it does not train on: its model is tested on them, too."""

    def data(self, data: Data) -> Callable[[int], FederatedData]:
        """Seed -> the nodes' training data; the same function in every call. Every seed has its own partition."""
        check.at_least(1, nodes=self.nodes)
        return cut(data, self)

    @_keep
    def own_scores(self, data: Data, task: Task) -> Measure:
        """The measure on what nodes hold out; the same object in every call."""
        return own_scores(task, cut(data, self, held=True))


def with_held_out(config: Any, measures: Mapping[str, Measure]) -> dict[str, Measure]:
    """The measures with those on samples that no node trains on: each node's own, and those that validate.

    On a file of one's own the test samples give scores of classes, too.
    """
    result, validation = {**measures}, getattr(config.data, "validation", 0)
    for record in vars(config).values():
        if getattr(record, "own_test", 0):
            result.setdefault("own", record.own_scores(config.data, config.task()))
    if validation and "test" in result:
        requirement, remedy = "must be 0 where models are calibrated before they are tested", "Leave it out."
        raise ArgumentError("validation", requirement, f"got {validation:g}", remedy)
    if is_file(config.data.dataset) and config.task().logits is not None:
        result.setdefault("test", config.data.class_scores(config.task()))
    return result | ({"validation": config.data.validation_scores(config.task())} if validation else {})


@_keep
def cut(data: Data, clients: Clients, *, held: bool = False) -> Callable[[int], FederatedData]:
    """Return the function of `Clients.data`, or with `held` that of the samples that the nodes hold out."""
    dataset, deal, share = data.load(), choose(clients.CUT, vars(clients)), getattr(clients, "own_test", 0.0)

    @functools.lru_cache(maxsize=8192)  # tables of indices; the pool is there once
    def of_seed(seed: int) -> FederatedData:
        parts = deal(dataset, clients.nodes, seed)
        if share:
            try:
                parts = hold_out(parts, share, dataset.train_ids)[held]
            except ArgumentError as error:
                even = "--partition iid" if clients.alpha is None else f"--alpha above {clients.alpha:g}"
                remedy = f"Pass {even}, or fewer nodes."
                raise ArgumentError("own_test", error.requirement, error.found, remedy) from None
        return redeal(data.pool(), parts)

    return of_seed


@dataclasses.dataclass(frozen=True)
class Network:
    """The model of every node."""

    COUNTS: ClassVar = (NETWORKS.counts,)
    model: Literal["mlp", "cnn", "resnet18", "dzofl_cnn"] = "mlp"
    """Multilayer perceptron, small convolutional network, ResNet-18 with group norm, or DZOFL's network: 20 and 40
    kernels of 7x7, which need images of 14x14 at least."""
    hidden: tuple[int, ...] = (32,)
    """Units of each hidden layer of mlp; without hidden layers it is a multinomial regression."""
    activation: Literal["relu", "tanh"] = "relu"
    """Activation of the hidden layers of mlp and cnn."""
    channels: tuple[int, ...] = (32, 64)
    """Channels of the convolutions of cnn."""
    window: int = 5
    """Height and width of the kernels of cnn."""
    dense_units: int | None = 512
    """Units of the hidden dense layer of cnn; None leaves this layer out."""
    resnet_widths: tuple[int, ...] = (64, 128, 256, 512)
    """Channels of the stages of resnet18, each at most 32 or a multiple of it."""
    node_loop: str = "auto"
    """Loop of a round over nodes: vmap (all at once), map (one after the other), chunk:k (k at once: less memory), or
    auto: map for convolutions on a CPU, else vmap. devices:vmap, devices:map, devices:chunk:k use several devices."""
    compute_dtype: Literal["float32", "bfloat16", "bfloat16_kernel_gradients"] = added_later(
        "float32", {"float32": ABSENT}
    )
    """Number format in which layers compute. bfloat16 rounds their parameters and inputs, which is faster on hardware
    that multiplies bfloat16. Parameters, gradients, losses and statistics of normalizations stay float32.
    bfloat16_kernel_gradients rounds the factors of convolutions' gradients to kernels only, and no clipped sum."""

    @_keep
    def task(self, data: Data) -> Task:
        """The task of classifying the data set; the same object in every call."""
        model = choose(NETWORKS, vars(self))(data.load())
        return with_node_loop(models.classification(model, compute_dtype=self.compute_dtype), self.node_loop)

    @_keep
    def work(self, data: Data) -> channel.Work:
        """Work of one sample."""
        return channel.node_work(self.counts(data))

    def counts(self, data: Data, counted: Sequence[str] | None = None) -> dict[str, Any]:
        """Counts of each layer for one sample, as `jaxfl.channel.count` makes them."""
        dataset = data.load()
        shape = image_shape(dataset) if dataset.train_inputs.ndim > 2 else dataset.train_inputs.shape[1:]
        return channel.count(choose(NETWORKS, vars(self))(dataset), shape, counted=counted)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Assumed devices and links, from which simulated seconds and joules are computed; the defaults are DZOFL's
    (docs/costs.md). No model depends on them."""

    operations_per_second: float = affects_statements_only(4e9)
    """Operations per second of each node; 4e9 is one per cycle at 4 GHz."""
    uplink_bits_per_second: float = affects_statements_only(10e6)
    """Bits per second that each node sends."""
    downlink_bits_per_second: float = affects_statements_only(10e6)
    """Bits per second that each node receives; with inf receiving takes no time."""
    slot_seconds: float = affects_statements_only(0.125e-3)
    """Shortest time on the air of a message, in seconds: one slot of 5G."""
    transmit_dbm: float = affects_statements_only(23.0)
    """Power while a node sends, in dBm."""
    downlink_watts: float = affects_statements_only(0.0)
    """Power, in watts, spent while data are sent to a node; with 0 that energy is not counted."""
    forward_bits: int = affects_statements_only(16)
    """Bits of a number in a forward pass, as the energy model counts it; computations do not depend on it."""
    backward_bits: int = affects_statements_only(32)
    """Bits of a number in a backward pass, and of a stored activation, as the energy model counts them."""
    mac_joules: float = affects_statements_only(3.7e-12)
    """Energy, in joules, of one operation at backward_bits."""
    energy_exponent: float = affects_statements_only(1.25)
    """Exponent e: an operation at forward_bits takes mac_joules times (forward_bits / backward_bits)^e."""
    dram_factor: float = affects_statements_only(150.0)
    """Energy of one access to DRAM, as a multiple of an operation's."""
    mac_units: int = affects_statements_only(64)
    """Multiply-accumulate units of a device, which compute side by side."""
    sram_bits: float = affects_statements_only(64e6)
    """On-chip memory of a device, in bits; parameters and activations that do not fit go to DRAM."""

    def energy_model(self) -> channel.EnergyModel:
        """Energy model of operations."""
        check.positive(forward_bits=self.forward_bits, backward_bits=self.backward_bits, mac_joules=self.mac_joules)
        check.positive(energy_exponent=self.energy_exponent, dram_factor=self.dram_factor)
        check.positive(mac_units=self.mac_units, sram_bits=self.sram_bits)
        return channel.EnergyModel(
            bits=self.forward_bits,
            max_bits=self.backward_bits,
            mac_joules=self.mac_joules,
            exponent=self.energy_exponent,
            dram_factor=self.dram_factor,
            mac_units=self.mac_units,
            sram_bits=self.sram_bits,
        )

    def ledger(self, work: channel.Work | Sequence[channel.Work], batch_size: int) -> channel.Ledger:
        """Ledger of a sample's work at every node, or at each."""
        if not -LARGEST_DBM <= self.transmit_dbm <= LARGEST_DBM:
            requirement = f"must lie between {-LARGEST_DBM} and {LARGEST_DBM} dBm"
            raise ArgumentError("transmit_dbm", requirement, f"got {self.transmit_dbm}", "Pass 23, for instance.")
        return channel.ledger(
            work,
            batch_size=batch_size,
            energy=self.energy_model(),
            operations_per_second=self.operations_per_second,
            uplink_bits_per_second=self.uplink_bits_per_second,
            downlink_bits_per_second=self.downlink_bits_per_second,
            slot_seconds=self.slot_seconds,
            transmit_dbm=self.transmit_dbm,
            downlink_watts=self.downlink_watts,
        )


@dataclasses.dataclass(frozen=True)
class Run(Launch, Distributed):
    """Seed, evaluations, checkpoints and output of the run."""

    COUNTS: ClassVar = (
        *Launch.COUNTS,
        where("distributed", (True,), *PLACE),
        {"shard": lambda options: options["devices"] is not None or options["distributed"]},
    )
    seed: int = 0
    """Seed of model, partition, batches and noise; --seeds runs several. Batches and noise also depend on all options
    that decide what is computed, so that no two configurations share them."""
    evaluate_every: int = affects_statements_only(10)
    """Rounds between evaluations."""
    checkpoint_every: int = unsaved(10)
    """Evaluations between checkpoints."""
    checkpoint_minutes: float | None = unsaved(10.0)
    """Minutes after which the next end of a chunk of rounds brings a checkpoint, too; None: never. No result depends on
    it."""
    keep_params: bool = unsaved(True)
    """Write the final parameters to final/ of the run directory, one file for each configuration and seed."""
    x: Literal["rounds", "bits", "seconds", "joules", "operations", "evaluations"] = unsaved("rounds")
    """Horizontal axis of curves: rounds, or a total of all nodes up to each round: bits sent, simulated seconds,
    joules, operations, or evaluations (gradients and forward passes)."""
    rank_by: str | None = unsaved(None)
    """Metric by which cases are ranked: a column of the closing table, its first by default."""
    out: str | None = unsaved(None)
    """Directory for this run's files, not its parent; default runs/EXPERIMENT/NAME."""
    resume: bool = unsaved(False)
    """Go on with an interrupted run."""
    quiet: bool = unsaved(False)
    """Show no progress."""
    devices: int | None = unsaved(None)
    """Devices that share the run: GPUs, or parts of a CPU. By default one accelerator computes, and the cores of a CPU
    share lanes (configurations with a seed each), or convolutions. Results agree to rounding."""
    shard: Literal["nodes", "lanes"] = unsaved("nodes")
    """Work that --devices share: the nodes of every network, whose number must be a multiple of theirs, or the lanes
    of a sweep: configurations with a seed each."""
    lanes_at_once: int | None = unsaved(None)
    """Lanes of a compiled program that a device computes side by side. By default 1 on a CPU, and elsewhere as many as
    memory holds. Results agree to rounding."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = unsaved(())
    """Pass evaluations on as they are made, to TensorBoard (files in the run directory), to Weights & Biases, or to
    both: pip install '.[track]', and docs/tracking.md."""
    profile: bool = unsaved(False)
    """Write a JAX trace of the rounds between the first two evaluations to profile/ of the run directory."""

    def placement(self) -> Placement | None:
        """The requested devices; the devices of all processes where several train."""
        num_devices = self.devices if self.devices is not None or not is_multiprocess() else jax.device_count()
        return None if num_devices is None else Placement(num_devices, self.shard)

    def check(self) -> None:
        """Refuse jobs together with processes, numbers that neither can have, and a tracker that is not installed."""
        if self.distributed and self.has_jobs:
            found, remedy = f"got {self.launcher} beside it", "Leave --launcher out."
            raise ArgumentError("distributed", "excludes jobs", found, remedy)
        for name in self.track:
            check_tracker(name)
        self.check_place()
        super().check()


@dataclasses.dataclass(frozen=True)
class Publication:
    """Secret key and published folder of a private run; who knows a public seed can subtract the noise."""

    seed_from_os: bool = affects_statements_only(False)
    """Draw model, batches and noise from a secret key that the operating system provides. The key lies in private/key
    of the run directory, for --resume, and in no published file."""
    publish: str | None = unsaved(None)
    """Folder that receives only what the proven statements of privacy cover: parameters and statements. All else, such
    as config.json with its digests of the data, stays behind. Needs --seed-from-os."""

    def check(self) -> None:
        """Refuse to publish a simulation, or into a folder with files."""
        if self.publish is None:
            return
        if not self.seed_from_os:
            found, remedy = "got a run whose seed is public", "Pass --seed-from-os, too."
            raise ArgumentError("publish", "needs a secret key", found, remedy)
        check_folder(self.publish)
