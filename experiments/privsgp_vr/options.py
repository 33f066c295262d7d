"""Options of experiments.privsgp_vr: records that build graphs, gradients and algorithms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import a_dp2_sgd, dp2_sgd, exact_diffusion, push_sum, qg_dsgdm
from jaxfl.channel.links import links
from jaxfl.core import Algorithm, ArgumentError, Task, check
from jaxfl.core.tree import size
from jaxfl.data.columns import is_file
from jaxfl.frame import Choice, Clients, Costs, Data, Network, Publication, Run, choose, where
from jaxfl.frame.options import ABSENT, added_later, affects_statements_only, flat, traced
from jaxfl.frame.own_files import FITTED
from jaxfl.graphs.files import is_graph_file, read_graph
from jaxfl.privacy.gossip import C2_OF_THE_PAPER
from jaxfl.privacy.grid import check_bits

from .trust import SharedKeys, Trust

INFINITY = float("inf")
LARGEST_BATCH = 64  # by default; docs/decisions/experiments.md has the measurements

GRAPHS = Choice(
    "graph",
    {
        "exponential": graphs.exponential,
        "directed_ring": graphs.directed_ring,
        "ring": graphs.ring,
        "complete": graphs.complete,
        "star": lambda num_nodes: graphs.star(num_nodes),
        "isolated": graphs.isolated,
        "random": lambda num_nodes, *, edge_probability: graphs.random_digraph(num_nodes, edge_probability, 0),
    },
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Graph of the network: which node hears which."""

    COUNTS: ClassVar = (GRAPHS.counts,)
    graph: str = "exponential"
    """exponential, directed_ring, ring, complete, star, random (a random strongly connected digraph), isolated (each
    node by itself), or a file. A FILE.csv has a sender and a receiver, by the names of sites, in each row. A FILE.npy
    has a column-stochastic mixing matrix of shape (n, n), or (period, n, n) for a time-varying graph; entry (i, j) is
    the share of j's value that i receives. DP2-SGD and A(DP)2SGD need an undirected graph."""
    edge_probability: float = 0.2
    """Probability of each edge of the random graph."""
    success: float = added_later(1.0, {1.0: ABSENT})
    """Probability that a message between two nodes arrives; docs/links.md says who keeps what is lost."""
    recovery: float | None = added_later(None, {None: ABSENT})
    """Probability of arrival where a link's last message was lost: bursts last 1 / recovery. Default: success."""

    def build(self, num_nodes: int) -> graphs.Graph:
        """The graph over this many nodes."""
        if is_graph_file(self.graph):
            return read_graph(self.graph, num_nodes)
        if self.graph not in GRAPHS.functions:
            requirement = f"must be one of {', '.join(GRAPHS.functions)}, or a .npy or .csv file"
            raise ArgumentError("graph", requirement, f"got {self.graph!r}", "Choose one, or write a file.")
        return choose(GRAPHS, dataclasses.asdict(self))(num_nodes)


class Method(NamedTuple):
    """Accountant and algorithm of a method."""

    accountant: privacy.Accountant
    algorithm: Callable[..., Algorithm]
    needs_noise: bool = False  # even if its scale is 0


METHODS = {
    "PrivSGP-VR": Method(privacy.PRIVSGP_VR, push_sum),
    "PrivSGP": Method(privacy.PRIVSGP, push_sum),
    "DP2-SGD": Method(privacy.DP2_SGD, dp2_sgd, needs_noise=True),
    "A(DP)2SGD": Method(privacy.A_DP2_SGD, a_dp2_sgd),
    "QG-DSGDm": Method(privacy.D_PSGD, qg_dsgdm),  # their papers, too, state no privacy
    "ED": Method(privacy.D_PSGD, exact_diffusion),
}
_DELAYED = "A(DP)2SGD"
CORRECTED = ("QG-DSGDm", "ED")  # for unequal data; a round ends with its mixing, and there are no final ones


def _gaussian(noise_std) -> privacy.NoiseMechanism:
    return privacy.gaussian(noise_std)


def _grid_gaussian(noise_std, *, grid_bits: int) -> privacy.NoiseMechanism:
    return privacy.grid_gaussian(noise_std, grid_bits)


NOISE = Choice("noise", {"gaussian": _gaussian, "grid_gaussian": _grid_gaussian})


def _has_table(method: str) -> bool:
    """True where the method keeps gradients."""
    return METHODS[method].accountant.estimator == "saga"


@dataclasses.dataclass(frozen=True)
class Learning:
    """The algorithm."""

    COUNTS: ClassVar = (
        where("method", ("PrivSGP-VR",), "storage", "refresh_every"),
        where("method", (_DELAYED,), "max_delay"),
        where("method", ("QG-DSGDm",), "momentum"),
        where("method", tuple(name for name in METHODS if name != _DELAYED), "mixings", "success"),
        where("method", tuple(name for name in METHODS if name not in CORRECTED), "final_mixings"),
        {"recovery": lambda options: options["method"] != _DELAYED and options["success"] < 1},
        where("table", ("per_batch",), "entry_size"),
        {"table": lambda options: options["table"] == "per_batch" or _has_table(options["method"])},
    )
    method: Literal["PrivSGP-VR", "PrivSGP", "DP2-SGD", "A(DP)2SGD", "QG-DSGDm", "ED"] = "PrivSGP-VR"
    """Learning method; docs/privsgp_vr.md. QG-DSGDm (quasi-global momentum) and ED (exact diffusion) take out what
    unequal data do; docs/methods.md. ED needs an undirected graph."""
    iterations: int | Literal["auto"] = 400
    """Iterations K. auto takes the K that equation (12) of the paper calls optimal for target_epsilon, from constants
    of the problem that a short probing run estimates (on training data, without noise: no epsilon covers it). With a
    network's real constants that K is often far too small to train."""
    step_size: float | Literal["theory", "auto"] = traced(0.2)
    """Step size gamma. theory: sqrt(n / K). auto: smaller for more noise. Default: auto with
    --target-epsilon, but for A(DP)2SGD. Else 0.2 for digits, tuned at their budget of 8, and elsewhere 0.5 times the
    batch size to the power 0.6, tuned without noise."""
    batch_size: int = 40
    """Expected number of samples (of table entries with a per_batch table) that a node takes in an iteration. Default:
    646 / nodes, which is 0.45 of a node's samples of digits. On a file of your own it is 0.45 of the smallest site's
    samples, up to 64 or 646 / nodes (docs/own_data.md)."""
    sampler: Literal["poisson", "fixed", "uniform"] = "poisson"
    """Draw of a batch: poisson (each sample by itself), fixed (without replacement) or uniform (with replacement)."""
    clip_norm: float | None = traced(2.0)
    """Bound on each sample's gradient in the L2 norm; None leaves gradients as they are."""
    table: Literal["dense", "factored", "per_batch"] = "factored"
    """Form in which PrivSGP-VR keeps gradients: dense (of each sample), factored (the same in factors, smaller) or
    per_batch (of each entry of entry_size samples). With per_batch all methods draw entries."""
    entry_size: int | None = None
    """Samples of one entry of a per_batch table, which needs it."""
    storage: Literal["float32", "bfloat16"] = "float32"
    """Number format of PrivSGP-VR's gradient table."""
    refresh_every: int | Literal["auto", "never"] = added_later("auto", {"auto": 1000})
    """Rounds between exact recomputations of the table's mean. never: the mean's rounding error is kept and added back
    instead. auto: 1000 on a CPU, and never on accelerators, which would wait for their host in every round."""
    mixings: int = added_later(1, {1: ABSENT})
    """Exchanges of a round. Each costs its bits and no epsilon; as many as log2 of the nodes are the exact mean on the
    exponential graph of 2^m nodes. In a round of A(DP)2SGD each node wakes by itself, so that there is one only."""
    momentum: float = added_later(0.9, {0.9: ABSENT}, is_traced=True)
    """Momentum of QG-DSGDm, at least 0; 0 is D-PSGD that mixes after the step."""
    final_mixings: int = added_later(0, {0: ABSENT})
    """Exchanges after the last round, which cost bits and no epsilon. All evaluations show parameters as they would be
    after these. 1 measures DP2-SGD and A(DP)2SGD, whose rounds end with a node's own noise, after a mixing."""
    max_delay: int = 16
    """Largest delay of A(DP)2SGD: a gradient is taken at parameters up to this many events old."""

    stationarity_samples: int = affects_statements_only(0)
    """Training samples of each node on which an evaluation measures the left side of the paper's equation (10), the
    mean over nodes of |grad f(z_i)|^2. 0: not at all; it costs as many passes as there are nodes."""

    @property
    def has_table(self) -> bool:
        """True where the method keeps gradients."""
        return _has_table(self.method)

    @property
    def samples_per_batch(self) -> int:
        """Expected samples of a batch: an entry of a per_batch table holds several."""
        return self.batch_size * (self.entry_size or 1)

    def gradient(self, num_nodes: int) -> gradients.GradientEstimator:
        """A table where the method has one, else a mini-batch of as many samples."""
        sampler = self.sample(self.batch_size if self.has_table else self.samples_per_batch, num_nodes)
        if not self.has_table:
            return gradients.mini_batch(sampler=sampler, clip_norm=self.clip_norm)
        return gradients.saga(
            sampler=sampler,
            table=self.table,
            entry_size=self.entry_size,
            storage=self.storage,
            clip_norm=self.clip_norm,
            refresh_every=self.refresh_every,
        )

    def sample(self, batch_size: int, num_nodes: int) -> gradients.Sampler:
        """The sampler, a Poisson one with room for this run's number of draws."""
        if self.sampler == "poisson":
            assert not isinstance(self.iterations, str)
            return gradients.poisson(batch_size, num_draws=num_nodes * self.iterations)
        return getattr(gradients, self.sampler)(batch_size)


@dataclasses.dataclass(frozen=True)
class Budget:
    """Noise, and the privacy that it gives."""

    COUNTS: ClassVar = (
        NOISE.counts,
        where("clip_norm", (None,), "gradient_bound"),
        dict.fromkeys(
            ("noise", "grid_bits", "trust"), lambda options: bool(options["noise_std"] or options["node_noise"])
        ),
        dict.fromkeys(
            ("bound", "neighboring_relation"),
            lambda options: bool(options["node_epsilons"]) or options["target_epsilon"] != INFINITY,
        ),
    )
    noise_std: float | Literal["calibrated"] = traced("calibrated")
    """Standard deviation of the noise on the mean gradient; calibrated: the smallest that meets target_epsilon, at each
    node by itself where numbers of samples differ by more than one."""
    noise: Literal["gaussian", "grid_gaussian"] = "gaussian"
    """gaussian: noise in float32, whose rounding can tell neighboring states apart (docs/finite_precision.md).
    grid_gaussian: gradient and noise are rounded to a grid, and the budget pays for it."""
    grid_bits: int = 12
    """The step of the grid is noise_std 2^-grid_bits; 8 to 16."""
    target_epsilon: float = affects_statements_only(8.0)
    """Privacy budget of every node, inf for none. With a number for noise_std the run stops when it is spent."""
    node_epsilons: tuple[float, ...] | str = affects_statements_only(())
    """Personalized privacy, in place of target_epsilon: a budget for each node, or a FILE.csv with a site's name and
    its budget in each row (docs/own_data.md). Budgets are public, and the noise of the smallest reaches every node."""
    # Shared noise needs the nodes' scales to find what it leaves to an observer.
    node_noise: tuple[float, ...] = traced((), constant_where=lambda options: options["trust"] == "pairs")
    """Standard deviation of each node's noise, in place of noise_std. By default the least that meets each node's
    budget, with node_epsilons or where numbers of samples differ by more than one."""
    dp_delta: float = affects_statements_only(1e-5)
    """Delta of every epsilon."""
    bound: Literal["proven", "published"] = affects_statements_only("proven")
    """Which bound holds the budget: proven, or published, which is each paper's own formula, reconstructed for DP2-SGD
    and A(DP)2SGD."""
    neighboring_relation: Literal["zero_out", "add_or_remove_one", "replace_one", "as_published"] = (
        affects_statements_only("zero_out")
    )
    """Neighboring relation: which two data sets must not be told apart, for all methods alike. zero_out: a sample's
    gradient counts as 0. replace_one: another sample stands in its place. add_or_remove_one: refused, since a node's
    number of samples is public here. as_published: that of each method's own formula, the default with --bound
    published."""
    c2: float = affects_statements_only(C2_OF_THE_PAPER)
    """Constant of equations (11) and (12), which the paper does not give."""
    gradient_bound: float | None = affects_statements_only(None)
    """Without clipping: bound G on each sample's gradient, which the paper assumes; for the published epsilon only."""

    @property
    def grid(self) -> int | None:
        """Bits of the grid of the noise; None without one."""
        return self.grid_bits if self.noise == "grid_gaussian" else None

    @property
    def limits(self) -> tuple[float, ...]:
        """The budget of all nodes, or of each; empty without one. A file has been read."""
        assert not isinstance(self.node_epsilons, str)
        return self.node_epsilons or (() if self.target_epsilon == INFINITY else (self.target_epsilon,))


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.privsgp_vr."""

    data: Data = Data()
    clients: Clients = Clients()
    topology: Topology = Topology()
    network: Network = Network()
    learning: Learning = Learning()
    budget: Budget = Budget()
    trust: Trust = Trust()
    publication: Publication = Publication()
    costs: Costs = Costs()
    run: Run = Run()

    def task(self) -> Task:
        """The learning task."""
        return self.network.task(self.data)

    def num_params(self) -> int:
        """d of one node."""
        return _num_params(self.network, self.data)

    def shared_keys(self) -> SharedKeys | None:
        """Pairs of nodes that share noise, and its ratio; None where each node has its own."""
        if self.trust.trust == "everyone":
            return None
        on_grid = self.budget.grid is not None
        return _shared_keys(self.trust, self.topology, self.clients.nodes, self.learning.mixings, on_grid)

    def mechanism(self) -> Callable[..., privacy.NoiseMechanism]:
        """Standard deviation of the noise, in shared noise the effective one -> its mechanism."""
        keys = self.shared_keys()
        return choose(NOISE, flat(self)) if keys is None else self.trust.noise(keys, self.budget.grid)

    def algorithm(self) -> Algorithm:
        """The algorithm, once noise, iterations and step size are numbers."""
        learning, method = self.learning, METHODS[self.learning.method]
        noise = self.budget.node_noise if len(self.budget.node_noise) else self.budget.noise_std
        noise = np.asarray(noise) if isinstance(noise, tuple) else noise  # under trace an array already
        assert not isinstance(noise, str)
        silent = isinstance(noise, int | float) and not noise  # zeros cost as much as noise
        graph = self.topology.build(self.clients.nodes)
        lossy = links(self.topology.success, recovery=self.topology.recovery)
        own: dict[str, Any] = {"num_mixings": learning.mixings, "links": lossy}
        own = {"max_delay": learning.max_delay} if learning.method == _DELAYED else own
        own |= {} if learning.method in CORRECTED else {"num_final_mixings": learning.final_mixings}
        own |= {"momentum": learning.momentum} if learning.method == "QG-DSGDm" else {}
        return method.algorithm(
            self.task(),
            graph=graph,
            gradient=learning.gradient(self.clients.nodes),
            noise=None if silent and not method.needs_noise else self.mechanism()(noise),
            step_size=learning.step_size,
            **own,
        )


@functools.cache
def _shared_keys(trust: Trust, topology: Topology, nodes: int, mixings: int, on_grid: bool) -> SharedKeys:
    return trust.choice(topology.build(nodes), mixings, on_grid=on_grid)


@functools.cache
def _num_params(network: Network, data: Data) -> int:
    return size(jax.eval_shape(network.task(data).init, jax.random.key(0)))


def check_config(config: Configuration) -> None:
    """Refuse what building the algorithm does not, before any work."""
    budget, automatic = config.budget, config.learning.iterations == "auto"
    if not automatic:
        check.at_least(1, iterations=config.learning.iterations)
    elif config.publication.publish is not None:
        requirement = "must be a number where parameters are published"
        found = "got auto, which is chosen by the data without noise"
        raise ArgumentError("iterations", requirement, found, "Pass the number of rounds.")
    if not automatic or config.run.evaluate_every:  # 0 until K is known
        check.at_least(1, evaluate_every=config.run.evaluate_every)
    check.at_least(0, stationarity_samples=config.learning.stationarity_samples)
    check.open_unit(dp_delta=budget.dp_delta)
    check.positive(c2=budget.c2, gradient_bound=budget.gradient_bound)
    if budget.grid is not None:
        check_bits(grid_bits=budget.grid)
    if budget.bound == "proven" and budget.neighboring_relation == "as_published":
        remedy = "Pass zero_out or replace_one."
        raise ArgumentError("neighboring_relation", "must name one for the proven bound", "got as_published", remedy)
    method, success = config.learning.method, config.topology.success
    config.trust.check(config.clients.nodes, method, success, on_grid=budget.grid is not None)
    for name in ("node_epsilons", "node_noise"):
        if getattr(budget, name):
            check.per_node(config.clients.nodes, **{name: getattr(budget, name)})
    check.non_negative(node_noise=np.array(budget.node_noise))
    if budget.limits:
        check.positive(node_epsilons=np.array(budget.node_epsilons))
        check.positive(target_epsilon=1.0 if budget.node_epsilons else budget.target_epsilon)
    elif automatic:
        remedy = "Pass --target-epsilon, or a number of iterations."
        raise ArgumentError("iterations", "auto needs a privacy budget", "got no target_epsilon", remedy)
    elif budget.noise_std == "calibrated":
        raise ArgumentError("noise_std", "must be a number without a budget", "got no target_epsilon", "Pass 0.")


def _batch_size(options: Mapping[str, Any], names: Collection[str]) -> int:
    """The share of a node's samples that is best on digits; of a file the most, which `fitted` lowers to that share."""
    usual = max(1, 646 // max(1, options["nodes"]))
    follows = is_file(options["dataset"]) and options["partition"] in FITTED and options["table"] != "per_batch"
    return max(LARGEST_BATCH, usual) if follows else usual  # an entry of a per_batch table holds several samples


def quiet_step_size(batch_size: int) -> float:
    """The step size where there is no noise, tuned on MNIST."""
    return round(0.5 * batch_size**0.6, 3)


RIVALS = ((("target_epsilon",), ("node_epsilons",)), (("noise_std",), ("node_noise",)))
NOISE_OR_BUDGET = ("noise_std", "target_epsilon", "node_noise", "node_epsilons")
DERIVED = {
    "neighboring_relation": lambda options, names: "as_published" if options["bound"] == "published" else "zero_out",
    "target_epsilon": lambda options, names: (
        8.0 if options["dataset"] == "digits" and not {*NOISE_OR_BUDGET} & {*names} else INFINITY
    ),
    "noise_std": lambda options, names: (
        "calibrated"
        if (options["target_epsilon"] != INFINITY or options["node_epsilons"]) and not options["node_noise"]
        else 0.0
    ),
    "batch_size": _batch_size,
    "step_size": lambda options, names: (
        "auto"
        if options["noise_std"] == "calibrated"
        and options["method"] != _DELAYED
        and (options["dataset"] != "digits" or {"target_epsilon", "node_epsilons"} & {*names})
        else 0.2
        if options["dataset"] == "digits"
        else quiet_step_size(options["batch_size"])
    ),
    "evaluate_every": lambda options, names: (  # 0 until K is known
        0 if options["iterations"] == "auto" else max(1, options["iterations"] // 40)
    ),
}
