"""Options of experiments.comparison, and what each method makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from jaxfl.core import ArgumentError, Task, check
from jaxfl.frame import Clients, Costs, Data, Experiment, Network, Row, Run, where
from jaxfl.frame.options import ABSENT, added_later, affects_statements_only, traced
from jaxfl.privacy.clients import ClientRelease, account

from .. import ali_dpfl, dp_gradient_tracking, privsgp_vr
from ..privsgp_vr.options import CORRECTED
from ..privsgp_vr.options import METHODS as ON_A_GRAPH
from ..privsgp_vr.trust import Trust

RELATIONS = ("zero_out", "replace_one")
UPDATES, ADAPTIVE = "DP-FedAvg", "ALI-DPFL"
WITH_SERVER = (ADAPTIVE, "DPFL", "SCAFFOLD", UPDATES)
SILENT = ("pooled", "without_noise")
OF_BASELINES = "PrivSGP"  # the method whose baselines stand among the rows
MIXING = ("PrivSGP-VR", "PrivSGP", "DP2-SGD", *CORRECTED, "noisy-states", "without_noise")  # more than once in a round
UNMIXED = ("DP2-SGD", "A(DP)2SGD", "DP-GT", "noisy-states")  # whose round ends with a node's own noise
# Whom nodes may trust in a method, everyone in the others: `Observers.trust` says who observes then.
OBSERVERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("PrivSGP-VR", "DP2-SGD", *CORRECTED), ("everyone", "pairs")),
    "PrivSGP": ("everyone", "pairs", "curator"),
    "DPFL": ("everyone", "pairs", "sums", "curator"),
}


class Method(NamedTuple):
    """Origin of a method."""

    experiment: Experiment
    changes: Callable[[Configuration], dict[str, Any]]  # its options, but for data, nodes, network, seed, evaluations
    relations: tuple[str, ...] = RELATIONS  # under which a proven bound can hold its budget
    baseline: str = ""  # of the experiment: the method is this baseline of it


@dataclasses.dataclass(frozen=True)
class Learning:
    """The method, and what all methods share."""

    COUNTS: ClassVar = (
        where("method", (UPDATES,), "num_active", "update_clip_norm"),
        where("method", (ADAPTIVE,), "kappa", "estimates_share"),
        where("method", ("DP-GT", "noisy-states"), "state_mixing"),
        where("method", MIXING, "mixings"),
        where("method", [name for name in (*MIXING, *UNMIXED) if name not in CORRECTED], "final_mixings"),
        where("method", UNMIXED, "measured"),
        where("method", WITH_SERVER, "local_steps"),
        where("method", ("QG-DSGDm",), "momentum"),
    )
    method: Literal[
        "PrivSGP-VR", "PrivSGP", "DP2-SGD", "A(DP)2SGD", "QG-DSGDm", "ED", "DP-GT", "noisy-states", "ALI-DPFL", "DPFL",
        "SCAFFOLD", "DP-FedAvg", "alone", "pooled", "without_noise"
    ] = "PrivSGP"  # fmt: skip
    """On a graph: PrivSGP-VR, PrivSGP, DP2-SGD, A(DP)2SGD, QG-DSGDm (quasi-global momentum), ED (exact diffusion, as
    D2), DP-GT (gradient tracking) and noisy-states (noisy gossip). With a server: ALI-DPFL, DPFL, SCAFFOLD (control
    variates), and DP-FedAvg, which protects whole clients. Baselines of PrivSGP: alone (each node by itself), pooled
    (all data in one place, no noise) and without_noise."""
    rounds: int = 60
    """Rounds of every method. Methods with a server make local_steps iterations in each."""
    step_size: float = traced(1.0)
    """Step size of every method."""
    batch_size: int = 32
    """Expected samples of a node's batch. DP-GT and noisy-states, whose bounds do not gain from drawing, take as many
    as the smallest node has."""
    clip_norm: float = traced(1.0)
    """Bound on each sample's gradient in the L2 norm."""
    state_mixing: float = traced(1.0)
    """Mixing step alpha of DP-GT and noisy-states: a node moves its state by alpha times the weighted differences from
    what it hears. With 1 the new state is the weighted mean, which was best on digits; scheme S2 has 0.1."""
    mixings: int = added_later(1, {1: ABSENT})
    """Exchanges of a round, of methods that may have several: they cost bits and no epsilon."""
    final_mixings: int = added_later(0, {0: ABSENT})
    """Exchanges after the last round, of methods on a graph."""
    momentum: float = added_later(0.9, {0.9: ABSENT}, is_traced=True)
    """Momentum of QG-DSGDm, at least 0."""
    measured: Literal["after_mixing", "paper"] = "after_mixing"
    """Place at which DP2-SGD, A(DP)2SGD, DP-GT and noisy-states are measured. after_mixing: after one more exchange of
    what was released, which costs bits and no epsilon. A round of the others ends with a mixing, so that this is the
    same place for all. paper: where their papers end a round, with a node's own fresh noise that nobody averaged."""
    local_steps: int = 3
    """Iterations of a client in a round, of methods with a server; ALI-DPFL divides as many over its rounds. With
    --trust sums a client makes one, for a second would move by more than the noise."""
    kappa: float = traced(30.0)
    """Constant by which ALI-DPFL chooses its steps of a round; a larger one allows more."""
    estimates_share: float = traced(0.5)
    """Share of target_epsilon that ALI-DPFL's private estimates would spend without the steps, between 0 and 1; the
    steps get the noise that the rest leaves them."""
    num_active: int = 4
    """Clients of DP-FedAvg that are expected in a round."""
    update_clip_norm: float = traced(1.0)
    """Bound on the L2 norm of a client's update, of DP-FedAvg."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Who hears whom."""

    graph: Literal["exponential", "directed_ring", "ring", "complete", "star"] = "exponential"
    """Graph of the methods without a server. DP2-SGD, A(DP)2SGD, ED and noisy-states need an undirected one and take
    the ring in place of a directed one; a server needs none."""

    @property
    def undirected(self) -> str:
        """The graph where it is undirected, else the ring."""
        return self.graph if self.graph in ("ring", "complete", "star") else "ring"


@dataclasses.dataclass(frozen=True)
class Budget:
    """The privacy that all methods have."""

    COUNTS: ClassVar = (
        {"neighboring_relation": lambda options: options["method"] not in (*SILENT, UPDATES)},
        dict.fromkeys(("target_epsilon", "dp_delta"), lambda options: options["method"] not in SILENT),
    )
    target_epsilon: float = affects_statements_only(3.0)
    """Proven epsilon of every method's run, which its noise is calibrated to."""
    dp_delta: float = affects_statements_only(1e-5)
    """Delta of it."""
    neighboring_relation: Literal["zero_out", "replace_one"] = affects_statements_only("replace_one")
    """Relation of neighboring data sets under which it holds. DP-GT and noisy-states know replace_one only."""


@dataclasses.dataclass(frozen=True)
class Observers(Trust):
    """Whom a node trusts, and so against whom its epsilon holds."""

    COUNTS: ClassVar = (
        where("trust", ("pairs",), "key_graph", "shared_ratio", "memory"),
        where("trust", ("pairs", "sums"), "colluding"),
        Trust.COUNTS[1],
    )
    trust: Literal["everyone", "pairs", "sums", "curator"] = "everyone"  # pyright: ignore
    """everyone: nobody; epsilon holds against all other nodes together, and a server. pairs: pairs of nodes share noise
    that cancels in the average; epsilon holds against whoever sees all messages and knows the secrets of colluding
    nodes. sums: a server sees nothing but sums, by secure aggregation, and knows as many secrets (DPFL). curator: one
    place has all samples and makes as many steps, in batches of all nodes together (PrivSGP, DPFL); epsilon holds
    against whoever sees its models. A grid leaves out what a method does not have."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.comparison."""

    COUNTS: ClassVar = (
        {"trust": lambda options: options["method"] not in ("alone", *SILENT)},
        {"memory": lambda options: options["method"] != "DPFL"},
        {"graph": lambda options: options["method"] not in WITH_SERVER},
        dict.fromkeys(("graph", "mixings", "final_mixings"), lambda options: options["trust"] != "curator"),
        {"local_steps": lambda options: options["trust"] != "sums"},
    )
    data: Data = Data(validation=0.2)
    clients: Clients = Clients(nodes=16)
    topology: Topology = Topology()
    network: Network = Network()
    learning: Learning = Learning()
    budget: Budget = Budget()
    trust: Observers = Observers()
    costs: Costs = Costs()
    run: Run = Run()

    @property
    def exists(self) -> bool:
        """Whether the method has a mechanism for whom its nodes trust."""
        return self.trust.trust in OBSERVERS.get(self.learning.method, ("everyone",))

    def task(self) -> Task:
        """The learning task."""
        return self.network.task(self.data)


def _mixings(learning: Learning) -> dict[str, int]:
    after = learning.measured == "after_mixing" and learning.method in UNMIXED
    within = {"mixings": learning.mixings} if learning.method in MIXING else {}
    return within if learning.method in CORRECTED else {**within, "final_mixings": learning.final_mixings + after}


def _gossip(config: Configuration) -> dict[str, Any]:
    learning, budget, topology = config.learning, config.budget, config.topology
    directed = learning.method not in ("DP2-SGD", "A(DP)2SGD", "ED")
    momentum = {"momentum": learning.momentum} if learning.method == "QG-DSGDm" else {}
    return {
        **momentum,
        **vars(budget),
        **(config.trust.counting() if config.trust.trust == "pairs" else {}),
        "noise_std": "calibrated",
        "method": learning.method if learning.method in ON_A_GRAPH else "PrivSGP",
        "graph": topology.graph if directed else topology.undirected,
        "iterations": learning.rounds,
        **_mixings(learning),
        **{name: getattr(learning, name) for name in ("step_size", "batch_size", "clip_norm")},
    }


def _tracking(config: Configuration) -> dict[str, Any]:
    learning, budget, topology = config.learning, config.budget, config.topology
    is_tracking = learning.method == "DP-GT"
    return {
        "method": learning.method,
        "scheme": "S2",
        "distribution": "gaussian",
        "target_epsilon": budget.target_epsilon,
        "dp_delta": budget.dp_delta,
        **({"graph": topology.graph} if is_tracking else {"baseline_graph": topology.undirected}),
        "iterations": learning.rounds,
        "state_mixing": learning.state_mixing,
        **_mixings(learning),
        **{name: getattr(learning, name) for name in ("step_size", "clip_norm")},
    }


def _estimates(config: Configuration) -> dict[str, Any]:
    """Private constants of ALI-DPFL. Their noise is what all of them alone would need for their share of epsilon."""
    learning, budget = config.learning, config.budget
    estimate = ClientRelease("poisson", 1, 1, learning.clip_norm, 1.0)  # it takes all samples of a client
    target, relation = budget.target_epsilon * learning.estimates_share, budget.neighboring_relation
    noise = account(estimate, dp_delta=budget.dp_delta).calibrate(learning.rounds, target, "proven", relation)
    return {"constants": "private", "constants_noise": noise, "kappa": learning.kappa}


def _clients(config: Configuration) -> dict[str, Any]:
    learning, budget = config.learning, config.budget
    local_steps = 1 if config.trust.trust == "sums" else learning.local_steps
    changes = {
        **{name: getattr(learning, name) for name in ("method", "rounds", "step_size", "batch_size")},
        "target_epsilon": budget.target_epsilon,
        "dp_delta": budget.dp_delta,
        "max_iterations": learning.rounds * local_steps,
    }
    if learning.method == UPDATES:
        active = {"num_active": learning.num_active, "update_clip_norm": learning.update_clip_norm}
        return {**changes, **active, "local_steps": local_steps}
    own = _estimates(config) if learning.method == ADAPTIVE else {"local_steps": local_steps}
    held = {"noise_multiplier": "calibrated", "neighboring_relation": budget.neighboring_relation}
    return {**changes, **own, **held, **_clients_trust(config), "clip_norm": learning.clip_norm}


def _clients_trust(config: Configuration) -> dict[str, Any]:
    """Options of noise that clients share, or that counts by its sum; without an own choice those of ali_dpfl."""
    trust = config.trust
    if trust.trust not in ("pairs", "sums"):
        return {}
    options = {"trust": trust.trust, "colluding": trust.colluding}
    if trust.trust == "sums":
        return options
    if trust.key_graph != "auto":
        options["key_graph"] = trust.key_graph
    return options if isinstance(trust.shared_ratio, str) else {**options, "shared_ratio": trust.shared_ratio}


_GOSSIP = {name: Method(privsgp_vr.EXPERIMENT, _gossip) for name in ON_A_GRAPH}
_TRACKING = {
    name: Method(dp_gradient_tracking.EXPERIMENT, _tracking, ("replace_one",)) for name in ("DP-GT", "noisy-states")
}
_CLIENTS = {name: Method(ali_dpfl.EXPERIMENT, _clients) for name in WITH_SERVER}
_BASELINES = {
    label: Method(privsgp_vr.EXPERIMENT, _gossip, baseline=label) for label in ("alone", "pooled", "without_noise")
}
METHODS: Mapping[str, Method] = {**_GOSSIP, **_TRACKING, **_CLIENTS, **_BASELINES}
COMPARED = tuple(name for name in METHODS if name != UPDATES and not METHODS[name].baseline)
# Rows beside the compared ones, for --baselines.
_CHANGES = {**{name: {"method": name, "trust": "everyone"} for name in _BASELINES}, "curator": {"trust": "curator"}}
BASELINES: Mapping[str, Callable[[Row], dict[str, Any] | None]] = {
    label: lambda row, changes=changes: changes if row.config.learning.method == OF_BASELINES else None
    for label, changes in _CHANGES.items()
}


def check_config(config: Configuration) -> None:
    """Refuse what the methods' own experiments do not."""
    method, relation = METHODS[config.learning.method], config.budget.neighboring_relation
    if not config.exists:
        allowed = " or ".join(OBSERVERS.get(config.learning.method, ("everyone",)))
        requirement, found = f"must be {allowed} for {config.learning.method}", f"got {config.trust.trust}"
        raise ArgumentError("trust", requirement, found, f"Pass {allowed}, or another method.")
    if config.learning.method == "DPFL" and (config.trust.key_graph == "mixing" or config.trust.shared_ratio == "even"):
        name = "key_graph" if config.trust.key_graph == "mixing" else "shared_ratio"
        requirement, found = "must not follow from a communication graph for DPFL", f"got {getattr(config.trust, name)}"
        raise ArgumentError(name, requirement, found, "Leave it out, or choose another one.")
    check.at_least(1, rounds=config.learning.rounds, local_steps=config.learning.local_steps)
    check.positive(step_size=config.learning.step_size, clip_norm=config.learning.clip_norm)
    check.open_unit(estimates_share=config.learning.estimates_share)
    if relation not in method.relations and config.learning.method not in SILENT:
        found, remedy = f"got {relation}", f"Pass {method.relations[0]}, or other methods."
        requirement = f"must be {' or '.join(method.relations)} for {config.learning.method}"
        raise ArgumentError("neighboring_relation", requirement, found, remedy)
