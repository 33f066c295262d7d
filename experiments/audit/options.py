"""Options of experiments.audit: what is claimed, and what is really run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from experiments.frame import Data, unsaved
from jaxfl import gradients, graphs, models, privacy
from jaxfl.algorithms import REGISTRY
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, check
from jaxfl.data import Dataset, federate
from jaxfl.data.partition import iid
from jaxfl.privacy.audit_mechanism import Mechanism

METHODS = {  # accountant, estimator of gradients, row of the registry, graph
    "PrivSGP": (privacy.PRIVSGP, "mini_batch", REGISTRY["push_sum"], graphs.directed_ring),
    "PrivSGP-VR": (privacy.PRIVSGP_VR, "saga", REGISTRY["push_sum"], graphs.directed_ring),
    "DP2-SGD": (privacy.DP2_SGD, "mini_batch", REGISTRY["dp2_sgd"], graphs.ring),
    "A(DP)2SGD": (privacy.A_DP2_SGD, "mini_batch", REGISTRY["a_dp2_sgd"], graphs.ring),
}


FORCED = "DP-GT"  # audited by forced transcripts, without real samples


@dataclasses.dataclass(frozen=True)
class Samples:
    """What is learned from, and the canaries among it."""

    dataset: str = "digits"
    """digits, mnist, fashion_mnist or cifar10."""
    data_dir: str | None = unsaved(None)
    """Folder with the data set's files as their authors publish them."""
    nodes: int = 5
    """Nodes n, an odd number: the messages of an even ring hide one combination of gradients."""
    samples: int = 200
    """Real samples of each node."""
    canaries: int = 5000
    """Canaries in all, as many at each node."""
    canary_strength: float = 4.0
    """Norm of a canary's gradient before clipping, in multiples of clip_norm; at least 1."""

    def idle(self, options: Mapping[str, Any]) -> set[str]:
        """Forced transcripts need no samples."""
        return {"dataset", "data_dir", "samples", "canaries"} if options["method"] == FORCED else set()

    def load(self) -> Dataset:
        """The data set; the same arrays in every call."""
        return Data(self.dataset, self.data_dir).load()


@dataclasses.dataclass(frozen=True)
class Learning:
    """The algorithm."""

    method: Literal["PrivSGP", "PrivSGP-VR", "DP2-SGD", "A(DP)2SGD", "DP-GT"] = "PrivSGP"
    """What is audited. Of A(DP)2SGD only the sum over nodes is seen: its noise, and little of its signal. DP-GT,
    private gradient tracking, is audited by forced transcripts."""
    hidden: tuple[int, ...] = ()
    """Units of the hidden layers of the multilayer perceptron; none for a linear model."""
    iterations: int = 16
    """Iterations K."""
    sampling_rate: float = 0.9
    """Probability of a sample to be in a batch, below 1."""
    step_size: float = 0.1
    """Step size gamma."""
    clip_norm: float = 1.0
    """Bound on each sample's gradient in the L2 norm, or in the L1 norm with Laplace noise."""
    distribution: Literal["laplace", "gaussian"] = "laplace"
    """Of DP-GT's noise."""

    def idle(self, options: Mapping[str, Any]) -> set[str]:
        """What only one of the two kinds of audit knows."""
        return {"hidden", "sampling_rate", "step_size"} if options["method"] == FORCED else {"distribution"}


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is claimed, and the mistakes that the run makes."""

    target_epsilon: float = 1.0
    """The claim: the noise is calibrated to it."""
    dp_delta: float = 1e-5
    """Delta of the claim."""
    significance: float = 0.05
    """Probability, at most, that any lower bound exceeds the true epsilon: each audit gets an equal share."""
    noise_error: float = 1.0
    """Run with the claimed noise divided by this: a mistake for the audit to find."""
    no_clipping: bool = False
    """Run without the clipping that is claimed: another such mistake."""
    rounds_error: float = 1.0
    """Run the claimed iterations times this factor, at least 1: another."""
    sampling_error: float = 1.0
    """Claim the sampling rate divided by this, and the noise of a batch that many times smaller, at the same noise
    multiplier; at least 1: another. Of DP-GT: claim means over the samples times this factor."""

    def idle(self, options: Mapping[str, Any]) -> set[str]:
        """Laplace noise is claimed at delta 0."""
        return {"dp_delta"} if options["method"] == FORCED and options["distribution"] == "laplace" else set()


@dataclasses.dataclass(frozen=True)
class Run:
    """What is random, and where it goes."""

    seed: int = 0
    """Of everything that is random; --seeds audits several."""
    out: str | None = unsaved(None)
    """The run directory itself; default runs/audit/NAME."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One audit."""

    data: Samples = Samples()
    learning: Learning = Learning()
    claim: Claim = Claim()
    run: Run = Run()

    @property
    def entries(self) -> int:
        """J, samples and canaries of each node."""
        return self.data.samples + self.data.canaries // self.data.nodes

    @property
    def batch_size(self) -> int:
        """b of the run, the nearest to the sampling rate that leaves a chance to be left out."""
        return min(max(1, round(self.learning.sampling_rate * self.entries)), self.entries - 1)

    @property
    def claimed_batch_size(self) -> int:
        """b that the accountant is told."""
        return max(1, round(self.batch_size / self.claim.sampling_error))

    @property
    def rounds(self) -> int:
        """Iterations that are run."""
        return round(self.learning.iterations * self.claim.rounds_error)

    def problem(self) -> tuple[Task, FederatedData]:
        """The task, and the nodes' real samples, dealt at random, as many at each."""
        dataset, nodes = self.data.load(), self.data.nodes
        parts = iid(len(dataset.train_labels), nodes, self.run.seed, sizes=[self.data.samples] * nodes)
        widths = (int(dataset.train_inputs[0].size), *self.learning.hidden, dataset.num_classes)
        data = federate(dataset.train_inputs, dataset.train_labels, parts)
        return models.classification(models.mlp(widths)), data

    def claimed(self) -> tuple[float, privacy.Statement]:
        """(noise standard deviation, statement) of what is claimed for every node.

        The claim is for zero_out, or add_or_remove_one with J and b fixed, which is the same: a missing sample is one
        whose gradient is 0.
        """
        accountant, estimator, *_ = METHODS[self.learning.method]
        rounds, nodes = self.learning.iterations, self.data.nodes
        release = privacy.Release(
            estimator=estimator,
            sampler="poisson",
            batch_size=self.claimed_batch_size,
            num_entries=self.entries,
            clip_norm=self.learning.clip_norm,
            noise_std=0.0,
        )
        target, dp_delta = self.claim.target_epsilon, self.claim.dp_delta
        noise_std = privacy.calibrate_noise_std(
            accountant, "proven", release, rounds, target_epsilon=target, dp_delta=dp_delta, num_nodes=nodes
        )
        releases = [release._replace(noise_std=noise_std)] * nodes
        stated = privacy.statements(accountant, releases, rounds, dp_delta=dp_delta)
        (claim,) = (s for s in stated if s.bound == "proven" and s.neighboring_relation != "replace_one")
        return noise_std, claim

    def mechanism(self, noise_std: float) -> Mechanism:
        """What the accountant was told of a canary's coordinate: a constant gradient counts G / J a round, on average.

        Of an algorithm whose messages tell the network's sum alone, that carries the noise of n releases a round.
        """
        rounds = self.learning.iterations
        releases = self.data.nodes if METHODS[self.learning.method][2].releases_total else 1
        return Mechanism(
            noise_std=noise_std * math.sqrt(releases),
            signal=rounds * self.learning.clip_norm / self.entries,
            num_releases=rounds,
        )

    def used_noise_std(self, noise_std: float) -> float:
        """The noise of the run, where `noise_std` is claimed: a noise multiplier of a larger batch is less noise."""
        return noise_std * self.claimed_batch_size / self.batch_size / self.claim.noise_error

    def algorithm(self, task: Task, noise_std: float) -> tuple[Algorithm, Callable[..., Any]]:
        """What is really run, with the mistakes, and (state before, after) -> what its messages tell."""
        _, estimator, row, topology = METHODS[self.learning.method]
        graph, step_size = topology(self.data.nodes), self.learning.step_size
        assert row.released is not None, "an audit needs to know what messages tell"
        sampler = gradients.poisson(self.batch_size, num_draws=self.data.nodes * self.rounds)
        clip_norm = None if self.claim.no_clipping else self.learning.clip_norm
        table = {"table": "factored"} if estimator == "saga" else {}
        gradient = getattr(gradients, estimator)(sampler=sampler, clip_norm=clip_norm, **table)
        noise = privacy.gaussian(self.used_noise_std(noise_std))
        learner = row.constructor(task, graph=graph, step_size=step_size, gradient=gradient, noise=noise)
        return learner, functools.partial(row.released, graph, step_size)


def check_point(point: Point) -> None:
    """Say what is wrong with an option before any work."""
    data, learning, claim = point.data, point.learning, point.claim
    check.at_least(1, iterations=learning.iterations)
    check.positive(clip_norm=learning.clip_norm)
    check.positive(target_epsilon=claim.target_epsilon, noise_error=claim.noise_error)
    for name in ("rounds_error", "sampling_error"):
        if not 1 <= getattr(claim, name) < math.inf:
            raise ArgumentError(name, "must be at least 1", f"got {getattr(claim, name)}", "Pass 2, say.")
    if data.nodes < 3 or data.nodes % 2 == 0:
        raise ArgumentError("nodes", "must be odd and at least 3", f"got {data.nodes}", "Pass e.g. 5.")
    check.open_unit(dp_delta=claim.dp_delta, significance=claim.significance)
    if not data.canary_strength >= 1:
        remedy = "Pass 1 or more: a weaker canary does not reach what is claimed."
        raise ArgumentError("canary_strength", "must be at least 1", f"got {data.canary_strength}", remedy)
    if learning.method != FORCED:
        _check_canaries(data, learning)


def _check_canaries(data: Samples, learning: Learning) -> None:
    """What forced transcripts do not need."""
    check.at_least(1, samples=data.samples, canaries=data.canaries)
    check.positive(step_size=learning.step_size)
    if data.canaries % data.nodes:
        requirement = f"must be a multiple of the {data.nodes} nodes, so that all have the same claim"
        raise ArgumentError("canaries", requirement, f"got {data.canaries}", "Pass e.g. 1000 for each node.")
    available, needed = len(data.load().train_labels), data.nodes * data.samples
    if needed > available:
        found = f"{data.nodes} nodes with {data.samples} need {needed:,} of {available:,}"
        raise ArgumentError("samples", "must be there in the data set", found, "Pass fewer.")
    check.open_unit(sampling_rate=learning.sampling_rate)
    for units in learning.hidden:
        check.at_least(1, hidden=units)
