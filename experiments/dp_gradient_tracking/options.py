"""Options of experiments.dp_gradient_tracking: records that build weights, schedules and algorithms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxfl import channel, graphs
from jaxfl.algorithms import gradient_tracking, output_perturbation, perturbed_gossip
from jaxfl.core import Algorithm, ArgumentError, Task, check
from jaxfl.core.check import is_traced
from jaxfl.frame import (
    Clients,
    Costs,
    Data,
    Network,
    Publication,
    Row,
    Run,
    affects_statements_only,
    override,
    traced,
    unsaved,
    where,
)
from jaxfl.frame.options import ABSENT, added_later
from jaxfl.gradients.memory import require_fits
from jaxfl.graphs.files import is_edges, read_graph, tracking_pair
from jaxfl.graphs.topologies import TrackingPair
from jaxfl.privacy.tracking import SCHEMES, TrackingSchedule, paper_schedule

_NUMBERS_A_SCALE = 6  # that are there at a time, as bases, powers, and scales of states and trackers
INFINITY = float("inf")
_DIGITS = 1437  # training samples of the data set digits
STEPS = {name: name for name in ("state_mixing", "tracker_mixing", "step_size")} | {"batch_size": "num_samples"}


def _undirected(name: str, nodes: int) -> graphs.Graph:
    """The graph of the methods that exchange states only; a star that is doubly stochastic, as the others are."""
    return graphs.star(nodes, weights="metropolis") if name == "star" else getattr(graphs, name)(nodes)


METHODS = ("DP-GT", "noisy-states", "noisy-quantized-states", "ternary-states", "quantized-states", "noisy-outputs")
QUANTIZED = ("ternary-states", "quantized-states")  # without noise
_NOISY = tuple(method for method in METHODS if method not in QUANTIZED)
_ROUNDED = ("noisy-quantized-states", "quantized-states")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Graphs of the network: which agent hears which."""

    graph: (
        Literal["five_agents", "five_agents_self_loops", "directed_ring", "exponential", "ring", "complete", "star"]
        | str
    ) = "five_agents"
    """The two directed graphs of DP-GT, for states (weights R) and trackers (weights C), by default five_agents for
    five agents and exponential for others. Two graphs: five_agents,
    five_agents_self_loops, or a FILE.npy with R and C, shape (2, n, n), where entry (i, j) weighs j's message at i. One
    graph for both: directed_ring, exponential (its rounds averaged), ring, complete, star, or a FILE.csv with a sender
    and a receiver, by the names of sites, in each row."""
    edge_weight: float = added_later(1.0, {1.0: ABSENT})
    """Factor on all weights of DP-GT's two graphs. A message enters multiplied by its edge's weight, its noise, too."""
    baseline_graph: Literal["ring", "complete", "star", "isolated"] = "ring"
    """Graph of the other methods; isolated: each agent by itself."""

    def pair(self, nodes: int) -> TrackingPair:
        """Return the weights R and C of DP-GT, times edge_weight."""
        pair = tracking_pair(self.graph, nodes)
        return TrackingPair(
            state_weights=self.edge_weight * pair.state_weights, tracker_weights=self.edge_weight * pair.tracker_weights
        )


@dataclasses.dataclass(frozen=True)
class Learning:
    """The algorithm."""

    method: Literal[
        "DP-GT", "noisy-states", "noisy-quantized-states", "ternary-states", "quantized-states", "noisy-outputs"
    ] = "DP-GT"
    """DP-GT is gradient tracking. The others are distributed SGD on an undirected graph with the noise and the steps of
    the scheme: noisy-states [46], noisy-quantized-states [47], ternary-states [41] and quantized-states [42] (without
    noise: quantization is the only source of privacy), noisy-outputs [38]. Brackets name references of the paper."""
    scheme: Literal["S1", "S2"] = "S1"
    """S1: step sizes fall as powers of K, and noise grows as a power of the iteration k. S2: step sizes are constant,
    and noise falls as p^K."""
    iterations: int = 400
    """Number K of iterations, from which a scheme takes its step sizes and its batch size."""
    state_mixing: float = traced(0.1)
    """Mixing step alpha_K of states; the scheme's by default."""
    tracker_mixing: float = traced(0.01)
    """Mixing step beta_K of trackers; the scheme's by default."""
    step_size: float = traced(0.1)
    """Step size gamma_K; the scheme's by default."""
    batch_size: int = 32
    """Number m_K of samples in each gradient; the scheme's by default. For digits it is 32, or all of an agent's where
    all agents have equally many: with Gaussian noise no bound profits from sampling, and one sample moves a mean over
    more samples less."""
    gradient_at: Literal["broadcast", "state"] = "broadcast"
    """State at which gradients are taken. broadcast: the noisy state that was sent, with a proven epsilon. state: the
    agent's own, as published, without one."""
    clip_norm: float = traced(10.0)
    """Bound on each sample's gradient, in the L1 norm with Laplace noise (default 10 for digits, else 20), in the L2
    norm with Gaussian noise (default 1). The paper's C is twice as much."""
    assume_bounded: bool = False
    """Do not clip: clip_norm is only assumed to bound the gradients. Nothing is proven then."""
    ternary_threshold: float = traced(1.0)
    """Threshold of ternary-states: what is sent is -1, 0 or 1 times this."""
    quantization_step: float = traced(0.1)
    """Distance of the values that noisy-quantized-states and quantized-states send."""

    mixings: int = added_later(1, {1: ABSENT})
    """Exchanges of a round, of methods that send states only: noisy states are mixed as often, which costs bits and no
    epsilon. The bound of DP-GT is for one."""
    final_mixings: int = added_later(0, {0: ABSENT})
    """Exchanges of noisy states after the last round, which cost bits and no epsilon. All evaluations show parameters
    as they would be after these. By default a state is measured with a node's own fresh noise, as published."""

    def quantizer(self) -> channel.Quantizer | None:
        """Quantizer of messages, where the method has one."""
        if self.method == "ternary-states":
            return channel.ternary_quantizer(self.ternary_threshold)
        return channel.uniform_quantizer(self.quantization_step) if self.method in _ROUNDED else None


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise added to all that is broadcast."""

    noise_exponent: float = traced(SCHEMES["S1"].noise)
    """Exponent of S1: agent i of n gets noise scales (k + 1)^p with p this number plus 0.05 i / n."""
    noise_base: float = traced(SCHEMES["S2"].noise)
    """Base of S2: agent i of n gets noise scales p^K with p this number plus 0.00005 i / n."""
    noise_gain: float | Literal["calibrated"] = traced(0.003)
    """Factor on all noise scales; 1 is the paper's noise, with which nothing is learned if edges weigh 1. calibrated:
    the least that meets target_epsilon with the steps, the mixing, the graph and the schedule of each run. A run
    without a budget shows convergence only: if it learns, its epsilon is too large to protect anything."""
    agent_gains: tuple[float, ...] = added_later((), {(): ABSENT})
    """Factor of each agent on its noise, besides noise_gain. By default 1, and with a budget the least of each agent
    where numbers of samples differ by more than one."""
    distribution: Literal["laplace", "gaussian"] = "laplace"
    """laplace, the paper's, or gaussian, the default where digits have a budget. Gaussian noise has the scales as
    standard deviations, clipping in L2 norm, and a delta."""
    dp_delta: float = affects_statements_only(1e-5)
    """Delta of the bound that counts a sample's participations, and of Gaussian noise."""
    target_epsilon: float = affects_statements_only(INFINITY)
    """Privacy budget of every agent (one sample replaced), in place of noise_gain; inf for none. By default 8 for
    digits, where Gaussian noise reaches 58 % accuracy (92 % without noise) with S1 and 70 % (81 %) with S2, and Laplace
    noise that of chance."""
    bound: Literal["proven", "published"] = affects_statements_only("proven")
    """Which bound holds the budget: proven (of DP-GT at dp_delta, of the others at delta 0 with Laplace noise), or
    published, the paper's own, which is reconstructed for the other methods."""


@dataclasses.dataclass(frozen=True)
class Theory:
    """The theorems' conditions, and what they bound."""

    smoothness: float | Literal["estimated"] = affects_statements_only("estimated")
    """Smoothness constant L; estimated: by a short probing run on training data, which no epsilon covers."""
    gradient_dominance: float = affects_statements_only(0.0)
    """mu of the Polyak-Lojasiewicz inequality, for the conditions of S2; 0 where it is not assumed."""
    strict: bool = unsaved(False)
    """Refuse a run that breaks a condition of the theorems; otherwise broken conditions are printed before the run."""
    train_samples: int = 1000
    """Training samples of each agent on which an evaluation measures the average model."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.dp_gradient_tracking."""

    COUNTS: ClassVar = (
        where("method", ("DP-GT",), "graph", "edge_weight", "tracker_mixing"),
        where("method", ("DP-GT",), "smoothness", "gradient_dominance", "strict"),
        where("method", _NOISY, "noise_exponent", "noise_base", "noise_gain", "agent_gains", "target_epsilon", "bound"),
        where("method", METHODS[:-1], "gradient_at", "state_mixing", "final_mixings"),  # all but noisy-outputs
        where("method", METHODS[1:-1], "mixings"),
        where("gradient_at", ("broadcast",), "final_mixings"),
        where("method", METHODS[1:], "baseline_graph"),
        where("method", _ROUNDED, "quantization_step"),
        where("method", ("ternary-states",), "ternary_threshold"),
        where("scheme", ("S1",), "noise_exponent"),
        where("scheme", ("S2",), "noise_base", "gradient_dominance"),
        # Delta stands in no pure epsilon.
        {"dp_delta": lambda options: options["distribution"] == "gaussian" or options["method"] == "DP-GT"},
        {"bound": lambda options: options["target_epsilon"] != INFINITY},
    )
    data: Data = Data()
    agents: Clients = Clients(nodes=5)
    weights: Weights = Weights()
    network: Network = Network(hidden=(), channels=(4, 8), window=3, dense_units=None)
    learning: Learning = Learning()
    noise: Noise = Noise()
    theory: Theory = Theory()
    publication: Publication = Publication()
    costs: Costs = Costs()
    run: Run = Run()

    def task(self) -> Task:
        """The learning task."""
        return self.network.task(self.data)

    @property
    def is_noisy(self) -> bool:
        """True where broadcasts carry noise."""
        return self.learning.method not in QUANTIZED

    @property
    def has_budget(self) -> bool:
        """True where the noise follows from a budget."""
        return self.is_noisy and self.noise.target_epsilon != INFINITY

    @property
    def num_rounds(self) -> int:
        """K where the last noisy state is returned, else K + 1: what is returned after all K + 1 broadcasts."""
        returns_broadcast = self.learning.gradient_at == "broadcast" and self.learning.method != "noisy-outputs"
        return self.learning.iterations + (not returns_broadcast)

    def agent_noise(self) -> np.ndarray:
        """(n,): p of every agent, the exponent of S1 or the base of S2."""
        level = self.noise.noise_exponent if self.learning.scheme == "S1" else self.noise.noise_base
        return level + SCHEMES[self.learning.scheme].spread * self._share()

    def _share(self) -> np.ndarray:
        return np.arange(1, self.agents.nodes + 1) / self.agents.nodes

    def settled(self) -> Configuration:
        """This with the last agent's p^K of Scheme (S2) in its noise_gain: float32 would lose digits of it."""
        if not self.is_noisy:
            return override(self, {"noise_gain": 0.0})
        if self.learning.scheme == "S1":
            return self
        assert not isinstance(self.noise.noise_gain, str)
        with np.errstate(over="ignore"):
            level = np.float64(self.noise.noise_base + SCHEMES["S2"].spread) ** self.learning.iterations
        return override(self, {"noise_gain": float(self.noise.noise_gain * level)})

    def schedule(self) -> TrackingSchedule:
        """All numbers of a run of K iterations; noise scales (n, K + 1), float64."""
        return self.settled()._schedule()

    def _schedule(self) -> TrackingSchedule:
        """The same of a settled configuration, whose numbers may be traced."""
        noise, scheme, rounds = self.noise, self.learning.scheme, self.learning.iterations
        assert not isinstance(noise.noise_gain, str)
        numbers = (noise.noise_exponent, noise.noise_base, noise.noise_gain)
        lib = jnp if any(map(is_traced, numbers)) else np
        dtype = jnp.float32 if lib is jnp else np.float64
        share, spread = lib.asarray(self._share(), dtype)[:, None], SCHEMES[scheme].spread
        if scheme == "S1":
            unit = lib.arange(1, rounds + 2, dtype=dtype)[None, :] ** (noise.noise_exponent + spread * share)
        else:  # relative to the last agent's
            below = (share - 1) * (spread / (noise.noise_base + spread))
            unit = lib.exp(rounds * lib.log1p(below)) * lib.ones((1, rounds + 1), dtype)
        own = lib.asarray(noise.agent_gains or 1.0, dtype).reshape(-1, 1)
        scales: Any = noise.noise_gain * own * unit
        numbers = {name: getattr(self.learning, option) for option, name in STEPS.items()}
        return TrackingSchedule(**numbers, state_noise_scale=scales, tracker_noise_scale=scales)

    def algorithm(self) -> Algorithm:
        """The algorithm of a settled configuration."""
        learning, weights, task, nodes = self.learning, self.weights, self.task(), self.agents.nodes
        shared: dict[str, Any] = {
            "schedule": self._schedule(),
            "clip_norm": None if learning.assume_bounded else learning.clip_norm,
            "distribution": self.noise.distribution,
        }
        mixings: dict[str, Any] = {"num_final_mixings": learning.final_mixings}
        if learning.method == "DP-GT":
            pair = weights.pair(nodes)
            names = read_graph(weights.graph, nodes).names if is_edges(weights.graph) else None
            shared |= {"names": names, "gradient_at": learning.gradient_at, **mixings}
            return gradient_tracking(task, **pair._asdict(), **shared)
        graph = _undirected(weights.baseline_graph, nodes)
        if learning.method == "noisy-outputs":
            return output_perturbation(task, graph=graph, **shared)
        quantizer, shared = learning.quantizer(), {**shared, **mixings, "num_mixings": learning.mixings}
        return perturbed_gossip(task, graph=graph, **shared, gradient_at=learning.gradient_at, quantizer=quantizer)


def check_config(config: Configuration) -> None:
    """Refuse what building the algorithm does not."""
    if config.noise.noise_gain == "calibrated":
        if config.noise.target_epsilon == INFINITY:
            remedy = "Pass --target-epsilon, or a number."
            raise ArgumentError("noise_gain", "must be a number without a budget", "got no target_epsilon", remedy)
        check.positive(target_epsilon=config.noise.target_epsilon)
        config = override(config, {"noise_gain": 1.0})  # relative, until the data are known
    learning, noise, theory = config.learning, config.noise, config.theory
    check.at_least(2 if learning.method == "DP-GT" else 1, nodes=config.agents.nodes)
    check.at_least(1, iterations=learning.iterations, evaluate_every=config.run.evaluate_every)
    check.at_least(1, batch_size=learning.batch_size)
    check.positive(**{name: getattr(learning, name) for name in STEPS if name != "batch_size"})
    check.positive(noise_base=noise.noise_base, clip_norm=learning.clip_norm, edge_weight=config.weights.edge_weight)
    check.non_negative(noise_gain=noise.noise_gain, gradient_dominance=theory.gradient_dominance)
    check.per_node(config.agents.nodes, agent_gains=noise.agent_gains or None)
    check.positive(agent_gains=np.array(noise.agent_gains))
    check.open_unit(dp_delta=noise.dp_delta)
    check.positive(smoothness=None if theory.smoothness == "estimated" else theory.smoothness)
    _require_scales(config.agents.nodes, learning.iterations)
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(config.schedule().state_noise_scale).all()
    if not finite:
        name = "noise_exponent" if learning.scheme == "S1" else "noise_base"
        found = f"got {getattr(noise, name):g} for {learning.iterations} iterations"
        raise ArgumentError(name, "must give finite noise scales", found, "Pass a smaller number.")
    if noise.distribution == "gaussian" and learning.method in QUANTIZED:
        remedy = "Leave these methods out, or take Laplace noise."
        raise ArgumentError("distribution", "must be laplace: theirs is an L1 argument", "got gaussian", remedy)


def _require_scales(nodes: int, iterations: int) -> None:
    """Refuse more noise scales than memory holds."""
    num_bytes = _NUMBERS_A_SCALE * np.dtype(float).itemsize * nodes * (iterations + 1)
    require_fits("iterations", num_bytes, {}, what="the noise of all iterations", remedy="Take fewer iterations.")


@functools.lru_cache(maxsize=64)
def scheme_steps(scheme: str, iterations: int) -> TrackingSchedule:
    """Steps and samples of a scheme; its noise is that of one agent."""
    _require_scales(1, iterations)
    return paper_schedule(scheme, iterations, 1)


def _is_private(options: Mapping[str, Any], names: Collection[str]) -> bool:
    """True where the defaults hold a budget: digits, at which something is learned within one."""
    has_proof = options["gradient_at"] == "broadcast" and options["bound"] == "proven" and not options["assume_bounded"]
    return options["dataset"] == "digits" and has_proof and options["method"] in _NOISY and "noise_gain" not in names


def _batch_size(options: Mapping[str, Any], names: Collection[str]) -> int:
    """m_K of the scheme; for digits 32, or all samples that an agent trains on where all have as many."""
    if options["dataset"] != "digits":
        return scheme_steps(options["scheme"], options["iterations"]).num_samples
    if options["partition"] != "iid":
        return 32
    held, each = options["own_test"], min(options["num_train"] or _DIGITS, _DIGITS) // max(1, options["nodes"])
    return max(1, int(each * (1 - held)) if 0 < held < 1 else each)


def _step_size(options: Mapping[str, Any], names: Collection[str]) -> float:
    """gamma of the scheme; within the budget of digits at most 0.3, since with 0.5 S1 gets worse from round 100."""
    own = scheme_steps(options["scheme"], options["iterations"]).step_size
    return min(own, 0.3) if options["dataset"] == "digits" and options["target_epsilon"] != INFINITY else own


RIVALS = ((("target_epsilon",), ("noise_gain",)),)
DERIVED = {
    "distribution": lambda options, names: "gaussian" if _is_private(options, names) else "laplace",
    "target_epsilon": lambda options, names: (
        8.0 if options["distribution"] == "gaussian" and _is_private(options, names) else INFINITY
    ),
    "noise_gain": lambda options, names: (
        "calibrated" if options["target_epsilon"] != INFINITY else options["noise_gain"]
    ),
    **{
        option: lambda options, names, name=name: getattr(scheme_steps(options["scheme"], options["iterations"]), name)
        for option, name in STEPS.items()
    },
    "step_size": _step_size,
    "graph": lambda options, names: "five_agents" if options["nodes"] == 5 else "exponential",
    "batch_size": _batch_size,
    "clip_norm": lambda options, names: (
        1.0 if options["distribution"] == "gaussian" else 10.0 if options["dataset"] == "digits" else 20.0
    ),
    "evaluate_every": lambda options, names: max(1, options["iterations"] // 20),
}
_SILENT = {"noise_gain": 0.0, "agent_gains": (), "target_epsilon": INFINITY}
# Without neighbors a tracker is the agent's own gradient: DP-GT is then distributed SGD on its own broadcast states.
_ALONE = {"method": "noisy-states", "baseline_graph": "isolated", "mixings": 1, "final_mixings": 0}


def _pooled(row: Row) -> dict[str, Any]:
    """One agent with all samples, and gradients of as many as all agents take together."""
    batch_size = row.config.agents.nodes * row.config.learning.batch_size
    return {**_SILENT, **_ALONE, "nodes": 1, "partition": "iid", "batch_size": batch_size}


def _curator(row: Row) -> dict[str, Any] | None:
    """DP-SGD on all samples in one place, at the budget of a row: noisy states that move to themselves."""
    budget = {"noise_gain": "calibrated", "target_epsilon": row.config.noise.target_epsilon, "state_mixing": 1.0}
    return {**_pooled(row), **budget} if row.config.has_budget else None


BASELINES = {
    "alone": lambda row: _ALONE if row.config.is_noisy else None,
    "pooled": _pooled,
    "curator": _curator,
    "without_noise": lambda row: _SILENT if row.config.is_noisy else None,
}
