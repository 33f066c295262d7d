"""Options of experiments.audit: the claim, and the real run."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

from jaxfl import models
from jaxfl.core import ArgumentError, FederatedData, Task, check
from jaxfl.data import federate
from jaxfl.data.partition import iid
from jaxfl.frame import Data, unsaved, where
from jaxfl.privacy.audit_mechanism import Mechanism
from jaxfl.privacy.mechanisms import NoiseMechanism, gaussian
from jaxfl.privacy.shared import check_ratio, key_graph
from jaxfl.privacy.shared_noise import shared_gaussian

SINGLE = ("ALI-DPFL",)
"""Methods whose run has one node, which holds all samples and canaries."""
WHOLE_CLIENTS = ("DP-FedAvg",)
"""Methods whose canaries are clients, not samples."""


@dataclasses.dataclass(frozen=True)
class Samples(Data):
    """Training samples, and the canaries among them."""

    nodes: int = 5
    """Number n of nodes, odd: the messages of an even ring hide one combination of the gradients. For DP-FedAvg: any
    number of clients with real samples."""
    samples: int = 200
    """Real samples of each node."""
    canaries: int = 5000
    """Number of canaries in all, equally many at each node. A canary is a made-up sample whose presence the audit
    tries to see. For DP-FedAvg it is a whole client."""
    canary_strength: float = 4.0
    """Norm of a canary's gradient (for DP-FedAvg, of its update) before clipping, in multiples of clip_norm; at least
    1."""


@dataclasses.dataclass(frozen=True)
class Learning:
    """The algorithm."""

    method: Literal["PrivSGP", "PrivSGP-VR", "DP2-SGD", "A(DP)2SGD", "ALI-DPFL", "DP-FedAvg"] = "PrivSGP"
    """Method to audit. For A(DP)2SGD the audit sees only the sum over nodes: all the noise, and little of the signal.
    ALI-DPFL runs with one client. For DP-FedAvg whole clients are audited."""
    hidden: tuple[int, ...] = ()
    """Units of the hidden layers of the multilayer perceptron; none for a linear model."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which layers compute. bfloat16 rounds their parameters and inputs, which is faster on hardware
    that multiplies bfloat16. Parameters, gradients and losses stay float32."""
    iterations: int = 16
    """Number K of iterations; for ALI-DPFL, of local iterations in all."""
    sampling_rate: float = 0.9
    """Probability, below 1, that a sample is in a batch; for DP-FedAvg, that a client takes part in a round."""
    step_size: float = 0.1
    """Step size gamma."""
    clip_norm: float = 1.0
    """Bound on each sample's gradient in the L2 norm; for DP-FedAvg, on each client's update."""
    shared_ratio: float = 0.0
    """Noise that pairs of nodes share, as a multiple of their own (docs/trust.md); the observer is from outside. 0:
    noise is a node's own."""
    key_graph: Literal["ring", "exponential", "complete"] = "ring"
    """Pairs of nodes that share noise."""

    def noise(self, num_nodes: int, noise_std: float) -> NoiseMechanism:
        """Noise of a node's own, or of the same effect, shared by pairs."""
        if not self.shared_ratio:
            return gaussian(noise_std)
        keys = key_graph(self.key_graph, num_nodes)
        return shared_gaussian(noise_std, key_graph=keys, ratio=self.shared_ratio, colluding=0)


@dataclasses.dataclass(frozen=True)
class Claim:
    """The privacy claim, and the mistakes that the run makes on purpose."""

    target_epsilon: float = 1.0
    """The claim: the noise is calibrated to it."""
    dp_delta: float = 1e-5
    """Delta of the claim."""
    significance: float = 0.05
    """Largest probability that any lower bound exceeds the true epsilon; all audits of a run share it equally."""
    noise_error: float = 1.0
    """Run with the claimed noise divided by this: a mistake for the audit to find."""
    no_clipping: bool = False
    """Run without the clipping that is claimed: another such mistake."""
    rounds_error: float = 1.0
    """Run the claimed iterations times this factor, at least 1: another such mistake."""
    sampling_error: float = 1.0
    """Claim a sampling rate this many times smaller than that of the run, at the same noise multiplier; at least 1:
    another such mistake."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Random seed and run directory."""

    seed: int = 0
    """Seed of everything that is random; --seeds audits several."""
    out: str | None = unsaved(None)
    """The run directory itself; default runs/audit/NAME."""


class Numbers(NamedTuple):
    """Numbers of a learner that a mistake changes."""

    batch_size: int
    rounds: int  # iterations
    clip_norm: float | None


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One audit."""

    COUNTS: ClassVar = (
        {"nodes": lambda options: options["method"] not in SINGLE},
        where("method", ("PrivSGP", "PrivSGP-VR", "DP2-SGD"), "shared_ratio"),
        {"key_graph": lambda options: bool(options["shared_ratio"])},
    )
    data: Samples = Samples()
    learning: Learning = Learning()
    claim: Claim = Claim()
    run: Run = Run()

    @property
    def num_nodes(self) -> int:
        """Nodes with real samples."""
        return 1 if self.learning.method in SINGLE else self.data.nodes

    @property
    def entries(self) -> int:
        """J, samples and canaries of each node; or all clients, where canaries are clients."""
        if self.learning.method in WHOLE_CLIENTS:
            return self.data.nodes + self.data.canaries
        return self.data.samples + self.data.canaries // self.num_nodes

    @property
    def batch_size(self) -> int:
        """b of the run (clients that are expected), the nearest to the rate that leaves a chance to be left out."""
        return min(max(1, round(self.learning.sampling_rate * self.entries)), self.entries - 1)

    @property
    def claimed_batch_size(self) -> int:
        """b that the accountant is told."""
        return max(1, round(self.batch_size / self.claim.sampling_error))

    @property
    def rounds(self) -> int:
        """Iterations that are run."""
        return round(self.learning.iterations * self.claim.rounds_error)

    @property
    def claimed(self) -> Numbers:
        """Numbers that the claim is made for."""
        return Numbers(self.claimed_batch_size, self.learning.iterations, self.learning.clip_norm)

    @property
    def used(self) -> Numbers:
        """Numbers of the run."""
        clip_norm = None if self.claim.no_clipping else self.learning.clip_norm
        return Numbers(self.batch_size, self.rounds, clip_norm)

    @property
    def description(self) -> str:
        """Describe the run in words."""
        data, learning, nodes = self.data, self.learning, self.num_nodes
        if self.learning.method in WHOLE_CLIENTS:
            who = f"{nodes} clients of {data.samples} samples and {data.canaries} canary clients"
            return f"{data.dataset}: {who}, {learning.iterations} rounds, each with {self.batch_size} of them expected"
        where = "one client" if self.learning.method in SINGLE else f"each of {nodes} nodes"
        who = f"{data.samples} samples and {data.canaries // nodes} canaries at {where}"
        return f"{data.dataset}: {who}, {learning.iterations} iterations, Poisson batches of {self.batch_size}"

    def problem(self) -> tuple[Task, FederatedData]:
        """The task, and the nodes' real samples, dealt at random, as many at each."""
        dataset, nodes = self.data.load(), self.num_nodes
        parts = iid(len(dataset.train_labels), nodes, self.run.seed, sizes=[self.data.samples] * nodes)
        widths = (int(dataset.train_inputs[0].size), *self.learning.hidden, dataset.num_classes)
        data = federate(dataset.train_inputs, dataset.train_labels, parts)
        return models.classification(models.mlp(widths), compute_dtype=self.learning.compute_dtype), data

    def mechanism(self, noise_std: float, *, stored: bool = False, releases_total: bool = False) -> Mechanism:
        """Mechanism claimed for a canary's coordinate: a constant gradient counts G / J a round, on average.

        A batch shows G / b of it. For a whole client it is the clip norm of updates over the number of clients. A sum
        over nodes carries the noise of all of them, and as many batches as nodes woke.
        """
        rounds, clip_norm = self.learning.iterations, self.learning.clip_norm
        return Mechanism(
            noise_std=noise_std * math.sqrt(self.data.nodes if releases_total else 1),
            signal=rounds * clip_norm / self.entries,
            num_releases=rounds,
            visit=None if releases_total else clip_norm / self.claimed_batch_size,
            rate=None if releases_total else self.claimed_batch_size / self.entries,
            stored=stored,
        )

    def used_noise_std(self, noise_std: float) -> float:
        """The noise of the run, where `noise_std` is claimed: a noise multiplier of a larger batch is less noise."""
        return noise_std * self.claimed_batch_size / self.batch_size / self.claim.noise_error


def check_config(config: Configuration) -> None:
    """Say what is wrong with an option before any work."""
    data, learning, claim = config.data, config.learning, config.claim
    check.at_least(1, iterations=learning.iterations)
    check.positive(clip_norm=learning.clip_norm)
    check_ratio(shared_ratio=learning.shared_ratio)
    check.positive(target_epsilon=claim.target_epsilon, noise_error=claim.noise_error)
    for name in ("rounds_error", "sampling_error"):
        if not 1 <= getattr(claim, name) < math.inf:
            raise ArgumentError(name, "must be at least 1", f"got {getattr(claim, name)}", "Pass 2, say.")
    if learning.method not in (*SINGLE, *WHOLE_CLIENTS):
        _check_ring(data)
    check.open_unit(dp_delta=claim.dp_delta, significance=claim.significance)
    if not data.canary_strength >= 1:
        remedy = "Pass 1 or more: a weaker canary does not reach what is claimed."
        raise ArgumentError("canary_strength", "must be at least 1", f"got {data.canary_strength}", remedy)
    check.in_float32(clip_norm=learning.clip_norm, step_size=learning.step_size)
    check.in_float32(canary_strength=data.canary_strength * learning.clip_norm)
    _check_canaries(config)


def _check_ring(data: Samples) -> None:
    """Check that the number of nodes on the ring is odd and at least 3."""
    if data.nodes < 3 or data.nodes % 2 == 0:
        raise ArgumentError("nodes", "must be odd and at least 3", f"got {data.nodes}", "Pass e.g. 5.")


def _check_canaries(config: Configuration) -> None:
    """Check the options of the data and the canaries."""
    data, learning, nodes = config.data, config.learning, config.num_nodes
    check.at_least(1, nodes=nodes, samples=data.samples, canaries=data.canaries)
    check.positive(step_size=learning.step_size)
    if data.canaries % nodes and learning.method not in WHOLE_CLIENTS:
        requirement = f"must be a multiple of the {nodes} nodes, so that all have the same claim"
        raise ArgumentError("canaries", requirement, f"got {data.canaries}", "Pass e.g. 1000 for each node.")
    available, demand = len(data.load().train_labels), nodes * data.samples
    if demand > available:
        found = f"{nodes} node{'s' * (nodes > 1)} with {data.samples} need {demand:,} of {available:,}"
        raise ArgumentError("samples", "must fit in the data set", found, "Pass fewer.")
    check.open_unit(sampling_rate=learning.sampling_rate)
    for units in learning.hidden:
        check.at_least(1, hidden=units)
