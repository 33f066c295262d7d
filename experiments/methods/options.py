"""Options of experiments.methods, and the algorithm that each method is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import optax

from jaxfl import algorithms, channel, gradients, graphs
from jaxfl.core import Algorithm, ArgumentError, Task, check
from jaxfl.frame import Clients, Costs, Data, Network, Prepared, Row, Run, cases_of, where
from jaxfl.frame.choose import Choice, choose
from jaxfl.frame.options import affects_statements_only, traced

GRAPHS = {name: getattr(graphs, name) for name in ("exponential", "directed_ring", "ring", "complete", "star")}


class At(NamedTuple):
    """Task and arguments that a method gets beside its own numbers."""

    task: Task
    common: Mapping[str, Any]  # arguments of all methods of its kind
    uneven_steps: np.ndarray  # (n,), 1, 2, ..., local_steps, 1, ...
    local_steps: int

    def __call__(self, constructor: Callable[..., Algorithm], **own: Any) -> Algorithm:
        """The method with its own numbers."""
        return constructor(self.task, **self.common, **own)


def _adaptive(constructor: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    return lambda at, *, adaptive_step_size: at(constructor, server_step_size=adaptive_step_size)


def _avgm(at: At, *, server_step_size: Any, momentum: Any) -> Algorithm:
    return at(algorithms.fed_avgm, server_step_size=server_step_size, server_momentum=momentum)


SERVER: Mapping[str, Callable[..., Algorithm]] = {
    "FedAvg": lambda at: at(algorithms.fed_avg),
    "FedProx": lambda at, *, proximal: at(algorithms.fed_prox, proximal=proximal),
    "SCAFFOLD": lambda at, *, server_step_size: at(algorithms.scaffold, server_step_size=server_step_size),
    "FedNova": lambda at: at(algorithms.fed_nova, num_steps=at.uneven_steps),
    "FedDyn": lambda at, *, proximal: at(algorithms.fed_dyn, proximal=proximal),
    "FedAvgM": _avgm,
    "FedAdam": _adaptive(algorithms.fed_adam),
    "FedYogi": _adaptive(algorithms.fed_yogi),
    "FedAdagrad": _adaptive(algorithms.fed_adagrad),
    "q-FedAvg": lambda at, *, fairness: at(algorithms.q_fed_avg, fairness=fairness),
}
GRAPH: Mapping[str, Callable[..., Algorithm]] = {
    "D-PSGD": lambda at: at(algorithms.d_psgd, num_final_mixings=1),  # its round ends with each node's own step
    "SGP": lambda at: at(algorithms.push_sum),
    "D-SGDm": lambda at, *, momentum: at(algorithms.d_sgdm, momentum=momentum),
    "QG-DSGDm": lambda at, *, momentum: at(algorithms.qg_dsgdm, momentum=momentum),
    "ED": lambda at: at(algorithms.exact_diffusion),
    "NIDS": lambda at: at(algorithms.nids),
    "EXTRA": lambda at: at(algorithms.extra),
    "DIGing": lambda at: at(algorithms.diging),
    "NEXT": lambda at: at(algorithms.atc_tracking),
    "Aug-DGM": lambda at: at(algorithms.atc_tracking, variant="aug_dgm"),
    "K-GT": lambda at, *, communication_step: at(
        algorithms.k_gt, num_local_steps=at.local_steps, communication_step=communication_step
    ),
    "ProxSkip": lambda at, *, exchange_probability: at(algorithms.prox_skip, exchange_probability=exchange_probability),
    "CHOCO-SGD": lambda at, *, kept_share, consensus_step: at(
        algorithms.choco_sgd, compressor=channel.top_k(kept_share), consensus_step=consensus_step
    ),
}
METHODS = {**SERVER, **GRAPH}
CHOICE = Choice("method", METHODS)
COMPARED = tuple(name for name in METHODS if name != "q-FedAvg")  # whose aim is another: equal losses
UNDIRECTED = ("ED", "NIDS", "EXTRA", "ProxSkip", "CHOCO-SGD")  # which need one symmetric matrix
AVERAGED = ("FedAvg", "FedProx", "FedNova", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad")  # by any rule
AGGREGATES: Mapping[str, Callable[[int], Any]] = {  # by the number of attackers
    "median": lambda f: algorithms.coordinate_median(),
    "trimmed_mean": algorithms.trimmed_mean,
    "krum": algorithms.krum,
    "geometric_median": lambda f: algorithms.geometric_median(),
    "centered_clipping": lambda f: algorithms.centered_clipping(1.0),
}
ATTACKS: Mapping[str, Callable[..., Any]] = {
    "sign_flip": lambda numbers, active: algorithms.sign_flip(numbers, scale=3.0),
    "random": lambda numbers, active: algorithms.random_updates(numbers, std=1.0),
    "alie": lambda numbers, active: algorithms.alie(numbers, num_active=active),
}


@dataclasses.dataclass(frozen=True)
class Learning:
    """The method and its numbers."""

    COUNTS: ClassVar = (
        where("method", SERVER, "num_active"),
        where("method", (*SERVER, "K-GT"), "local_steps"),
        where("method", GRAPH, "graph"),
        where("method", [name for name in GRAPH if name != "CHOCO-SGD"], "mixings"),
        CHOICE.counts,
        where("method", AVERAGED, "aggregate", "attack"),
        {"attackers": lambda options: options["attack"] != "none" or options["aggregate"] in ("trimmed_mean", "krum")},
    )
    method: Literal[
        "FedAvg", "FedProx", "SCAFFOLD", "FedNova", "FedDyn", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad",
        "D-PSGD", "SGP", "D-SGDm", "QG-DSGDm", "ED", "NIDS", "EXTRA", "DIGing", "NEXT", "Aug-DGM",
        "K-GT", "ProxSkip", "CHOCO-SGD", "q-FedAvg"
    ] = "FedAvg"  # fmt: skip
    """Up to FedAdagrad, and q-FedAvg, with a server, else over a graph: docs/methods.md has each method's lines and
    source. Clients of FedNova make 1, 2, ..., local_steps, 1, ... steps."""
    rounds: int = 100
    """Rounds of every method. Over a graph a round is one gradient step, with a server and in K-GT local_steps."""
    step_size: float = traced(0.1)
    """Step size of nodes and clients."""
    batch_size: int = 16
    """Samples of a batch: drawn with repetition over a graph; a client of a server with fewer takes all that it has."""
    local_steps: int = 5
    """Steps of a client, and of a node in K-GT, in a round."""
    communication_step: float = traced(1.0)
    """Share of its local steps that a node of K-GT sends and makes (eta)."""
    num_active: int = 16
    """Clients of a round; all by default."""
    proximal: float = traced(0.01)
    """Weight of FedProx's proximal term (mu) and of FedDyn's (alpha)."""
    server_step_size: float = traced(1.0)
    """Step size of the server in SCAFFOLD and FedAvgM."""
    adaptive_step_size: float = traced(0.03)
    """Step size of the server in FedAdam, FedYogi and FedAdagrad."""
    momentum: float = traced(0.9)
    """Momentum of FedAvgM's server, and of the nodes in D-SGDm and QG-DSGDm."""
    fairness: float = traced(1.0)
    """How much more clients with larger losses weigh in q-FedAvg (q); 0 is FedAvg whose clients weigh alike."""
    graph: Literal["exponential", "directed_ring", "ring", "complete", "star"] = "ring"
    """Graph of the methods without a server. ED, NIDS, EXTRA, ProxSkip and CHOCO-SGD need an undirected one."""
    exchange_probability: float = traced(0.3)
    """Share of the rounds in which ProxSkip sends, in (0, 1]."""
    kept_share: float = 0.1
    """Share of a message's numbers that CHOCO-SGD sends, the largest ones."""
    consensus_step: float = traced(0.3)
    """Step of CHOCO-SGD's mixing; it diverges where this is too large for kept_share."""
    mixings: int = 1
    """Exchanges in place of each one of a method over a graph."""
    aggregate: Literal["mean", "median", "trimmed_mean", "krum", "geometric_median", "centered_clipping"] = "mean"
    """How the server joins the clients' updates. All but mean weigh clients alike. centered_clipping clips at 1."""
    attack: Literal["none", "sign_flip", "random", "alie"] = "none"
    """What attackers send: -3 times their update, normal noise, or the honest mean less some standard deviations."""
    attackers: int = 3
    """Clients that attack, the first ones; robust aggregates are made for as many."""
    target_accuracy: float = affects_statements_only(0.9)
    """Test accuracy to which methods.csv counts bits."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.methods."""

    data: Data = Data()
    clients: Clients = Clients(nodes=16, partition="dirichlet", alpha=0.1)
    network: Network = Network()
    learning: Learning = Learning()
    costs: Costs = Costs()
    run: Run = Run()

    def task(self) -> Task:
        """The learning task."""
        return self.network.task(self.data)

    def algorithm(self) -> Algorithm:
        """The method."""
        learning, nodes = self.learning, self.clients.nodes
        if learning.method in GRAPH:
            gradient = gradients.mini_batch(sampler=gradients.uniform(learning.batch_size))
            common = {"graph": GRAPHS[learning.graph](nodes), "gradient": gradient, "step_size": learning.step_size}
            common |= {} if learning.method == "CHOCO-SGD" else {"num_mixings": learning.mixings}
        else:
            clients = algorithms.local_steps(
                learning.local_steps,
                batch_size=learning.batch_size,
                optimizer=optax.sgd(learning.step_size),
                weighting="data" if learning.method in AVERAGED and learning.aggregate == "mean" else "uniform",
            )
            common = {"clients": clients, "num_active": learning.num_active, "uplink": self.uplink()}
        at = At(self.task(), common, 1 + np.arange(nodes) % learning.local_steps, learning.local_steps)
        return choose(CHOICE, vars(learning))(at)

    def uplink(self) -> Any:
        """What happens to updates on their way; None where nothing does."""
        learning = self.learning
        if learning.method not in AVERAGED or (learning.aggregate, learning.attack) == ("mean", "none"):
            return None
        make, attack = AGGREGATES.get(learning.aggregate), ATTACKS.get(learning.attack)
        return algorithms.uplink(
            aggregate=make and make(learning.attackers),
            attack=attack and attack(range(learning.attackers), learning.num_active),
        )


def check_config(config: Configuration) -> None:
    """Refuse what constructors do not, or name by another word."""
    learning, nodes = config.learning, config.clients.nodes
    check.at_least(1, rounds=learning.rounds, local_steps=learning.local_steps, attackers=learning.attackers)
    check.open_unit(target_accuracy=learning.target_accuracy)
    if learning.method in SERVER and not 1 <= learning.num_active <= nodes:
        requirement, found = f"must be from 1 to all {nodes} clients", f"got {learning.num_active}"
        raise ArgumentError("num_active", requirement, found, "Pass fewer clients of a round, or more --nodes.")
    count, robust = learning.attackers, learning.aggregate in ("krum", "trimmed_mean")
    most = (learning.num_active - {"krum": 3, "trimmed_mean": 1}.get(learning.aggregate, 0)) // 2
    if learning.method in AVERAGED and (robust or learning.attack != "none") and count > most:
        requirement = f"must be at most {most} for {learning.aggregate} of {learning.num_active} clients"
        raise ArgumentError("attackers", requirement, f"got {count}", "Pass fewer, or more --num-active.")
    if learning.method in UNDIRECTED and learning.graph in ("exponential", "directed_ring"):
        requirement, found = f"must be undirected for {learning.method}", f"got {learning.graph}"
        raise ArgumentError("graph", requirement, found, "Pass ring, complete or star.")


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows; rows that cannot run are refused before any work."""
    for row in rows.values():
        check_config(row.config)
        row.config.algorithm()  # with its constructor's own checks
        for seed in row.seeds:
            row.config.clients.data(row.config.data)(seed)  # refuses partitions that cannot be made

    def of_row(name: str, row: Row) -> dict[str, Any]:
        config: Configuration = row.config
        work = config.network.work(config.data)
        ledger = config.costs.ledger(work, config.learning.batch_size)
        return {"data": config.clients.data(config.data), "num_rounds": config.learning.rounds, "ledger": ledger}

    first: Configuration = next(iter(rows.values())).config
    methods = ", ".join(dict.fromkeys(row.config.learning.method for row in rows.values()))
    clients = first.clients
    said = (
        f"{len(rows)} cases over {clients.nodes} nodes ({clients.partition}), {first.learning.rounds} rounds: {methods}"
    )
    return Prepared(cases_of(rows, Configuration.algorithm, of_row), [said])
