"""Options of experiments.methods."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import optax

from jaxfl import algorithms, channel, gradients
from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.core import Algorithm, ArgumentError, Task, check
from jaxfl.frame import Clients, Costs, Data, Network, Prepared, Row, Run, cases_of, where
from jaxfl.frame.choose import choose
from jaxfl.frame.options import affects_statements_only, traced
from jaxfl.frame.records import cut
from jaxfl.training import Measure

from .choices import (
    AGGREGATES,
    ATTACKS,
    AVERAGED,
    CHOICE,
    COMPRESSORS,
    DRAWN,
    FEEDBACK,
    GRAPH,
    GRAPHS,
    PERSONAL,
    SELECTION,
    SERVER,
    SLEEP,
    SLEEPERS,
    SPARED,
    UNDIRECTED,
    At,
    compresses,
)


@dataclasses.dataclass(frozen=True)
class Learning:
    """The method and its numbers."""

    COUNTS: ClassVar = (
        where("method", DRAWN, "num_active", "selection"),
        where("method", (*SERVER, "K-GT"), "local_steps"),
        where("method", GRAPH, "graph"),
        where("method", [name for name in GRAPH if name != "CHOCO-SGD"], "mixings"),
        CHOICE.counts,
        where("method", AVERAGED, "aggregate", "attack", "feedback"),
        where("method", SLEEPERS, "sleep"),
        FEEDBACK.counts,
        SELECTION.counts,
        SLEEP.counts,
        dict.fromkeys(("compressor", "kept_share"), compresses),
        {"attackers": lambda options: options["attack"] != "none" or options["aggregate"] in SPARED},
    )
    method: Literal[
        "FedAvg", "FedProx", "SCAFFOLD", "FedNova", "FedDyn", "q-FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad",
        "Ditto", "APFL", "Per-FedAvg", "FedPer", "FedRep", "alone",
        "D-PSGD", "SGP", "D-SGDm", "QG-DSGDm", "CHOCO-SGD",
        "ED", "NIDS", "EXTRA", "ProxSkip", "DIGing", "NEXT", "Aug-DGM", "GT-SAGA", "K-GT"
    ] = "FedAvg"  # fmt: skip
    """Up to alone with a server, else over a graph: docs/methods.md has each method's lines and source. From Ditto to
    alone each client has a model of its own, and needs --own-test. FedNova's clients make 1, 2, ..., local_steps, 1,
    ... steps; the last of FedRep's is the body's."""
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
    """Weight of FedProx's proximal term (mu), of FedDyn's (alpha) and of Ditto's (lambda)."""
    server_step_size: float = traced(1.0)
    """Step size of the server in SCAFFOLD and FedAvgM."""
    adaptive_step_size: float = traced(0.03)
    """Step size of the server in FedAdam, FedYogi and FedAdagrad."""
    momentum: float = traced(0.9)
    """Momentum of FedAvgM's server, and of the nodes in D-SGDm and QG-DSGDm."""
    fairness: float = traced(1.0)
    """How much more clients with larger losses weigh in q-FedAvg (q); 0 is FedAvg whose clients weigh alike."""
    own_share: float = traced(0.5)
    """Share of a client's own model in APFL's mixture at the start, which adapts."""
    inner_step_size: float = traced(0.05)
    """Step size (alpha) of the step after which Per-FedAvg's model is to be good; its test makes this step, too."""
    graph: Literal["exponential", "directed_ring", "ring", "complete", "star", "base"] = "ring"
    """Graph of the methods without a server; base is the base-2 graph, another matching in each round. ED, NIDS, EXTRA,
    ProxSkip and CHOCO-SGD need an undirected one that stays."""
    exchange_probability: float = traced(0.3)
    """Share of the rounds in which ProxSkip sends, in (0, 1]."""
    compressor: Literal["top_k", "rand_k"] = "top_k"
    """Numbers of a message that CHOCO-SGD, error_feedback and ef21 send: the largest ones, or some at random."""
    kept_share: float = 0.1
    """Share of a message's numbers that the compressor keeps."""
    consensus_step: float = traced(0.3)
    """Step of CHOCO-SGD's mixing; it diverges where this is too large for kept_share."""
    mixings: int = 1
    """Exchanges in place of each one of a method over a graph."""
    aggregate: Literal[
        "mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centered_clipping"
    ] = "mean"  # fmt: skip
    """How the server joins the clients' updates. All but mean weigh clients alike. multi_krum keeps num_active -
    2 attackers - 3 of them, and centered_clipping clips at 1."""
    attack: Literal["none", "sign_flip", "random", "alie"] = "none"
    """What attackers send: -3 times their update, normal noise, or the honest mean less some standard deviations."""
    attackers: int = 3
    """Clients that attack, the first ones; robust aggregates are made for as many."""
    feedback: Literal["none", "error_feedback", "ef21", "client_momentum"] = "none"
    """What clients send in place of their updates: docs/methods.md. The first two compress, without aggregate and
    attack; clients weigh alike in ef21."""
    client_momentum: float = traced(0.9)
    """Momentum (beta) of what clients send, in [0, 1)."""
    selection: Literal["uniform", "by_size", "by_loss"] = "uniform"
    """How the num_active clients of a round are drawn; by_loss takes those of the candidates with the largest loss."""
    num_candidates: int = 16
    """Candidates of by_loss; all clients by default."""
    sleep: Literal["none", "random", "markov", "cyclic"] = "none"
    """Nodes that sleep in some rounds: independently, by a chain of their own, or in turn."""
    awake_rate: float = traced(0.7)
    """Probability that a node is awake; with markov, in a round after one in which it was."""
    wake_rate: float = traced(0.5)
    """Probability that a node is awake after a round in which it slept."""
    sleep_period: int = 3
    """Rounds after which cyclic sleep repeats."""
    num_awake: int = 2
    """Rounds of a period in which a node is awake, more than half of it."""
    target_accuracy: float = affects_statements_only(0.9)
    """Accuracy to which methods.csv counts bits."""

    def compress(self) -> channel.Compressor:
        """How messages are compressed."""
        return COMPRESSORS[self.compressor](self.kept_share)

    def clients(self, optimizer: optax.GradientTransformation | None = None) -> LocalSteps:
        """The steps of a client, with plain SGD by default."""
        weighs_alike = self.aggregate != "mean" or self.feedback == "ef21" or self.selection == "by_size"
        by_data = self.method in (*AVERAGED, "Ditto", "APFL", "Per-FedAvg") and not weighs_alike
        return algorithms.local_steps(
            self.local_steps,
            batch_size=self.batch_size,
            optimizer=optax.sgd(self.step_size) if optimizer is None else optimizer,
            weighting="data" if by_data else "uniform",
        )

    def uplink(self) -> Uplink | None:
        """What happens to updates on their way; None where nothing does."""
        make, attack = AGGREGATES.get(self.aggregate), ATTACKS.get(self.attack)
        ways = {
            "aggregate": make and make(self.attackers, self.num_active),
            "attack": attack and attack(range(self.attackers), self.num_active),
            "feedback": choose(FEEDBACK, vars(self))(self),
        }
        ways = ways if self.method in AVERAGED else {}
        ways |= {"selection": choose(SELECTION, vars(self))()}
        return algorithms.uplink(**ways) if any(way is not None for way in ways.values()) else None


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
            common |= {"activation": choose(SLEEP, vars(learning))()} if learning.method in SLEEPERS else {}
        else:
            common = {"clients": learning.clients(), "num_active": learning.num_active, "uplink": learning.uplink()}
        return choose(CHOICE, vars(learning))(At(self.task(), common, learning, nodes))

    def measures(self) -> Mapping[str, Measure]:
        """The measure of Per-FedAvg's models on the clients' own test samples; others have the frame's."""
        if self.learning.method != "Per-FedAvg":
            return {}
        return {"own": _after_own_step(self.data, self.clients, self.network, self.learning.inner_step_size)}


@functools.lru_cache(maxsize=64)
def _after_own_step(data: Data, clients: Clients, network: Network, inner_step_size: float) -> Measure:
    """The frame's measure on the clients' own test samples, after each client's step on its training samples."""
    task = network.task(data)
    own, trains, holds_out = clients.own_scores(data, task), clients.data(data), cut(data, clients, held=True)

    def compute(node_params, arrays):
        train, tests = arrays
        adapted = algorithms.after_own_step(task, train, node_params, inner_step_size=inner_step_size)
        return own.compute(adapted, tests)

    return Measure(
        compute,
        prepare=lambda key, both: (both[0], own.prepare(key, both[1])),
        data=lambda seed: (trains(seed), holds_out(seed)),
    )


def check_config(config: Configuration) -> None:
    """Refuse what constructors do not, or name by another word."""
    learning, nodes = config.learning, config.clients.nodes
    check.at_least(1, rounds=learning.rounds, local_steps=learning.local_steps, attackers=learning.attackers)
    check.open_unit(target_accuracy=learning.target_accuracy)
    check.probability(own_share=learning.own_share, client_momentum=learning.client_momentum)
    check.below(1, client_momentum=learning.client_momentum)
    if learning.method in PERSONAL and not config.clients.own_test:
        requirement = f"must be above 0 for {learning.method}, whose clients have models for their own data"
        raise ArgumentError("own_test", requirement, "got 0", "Pass --own-test 0.2.")
    if learning.method in ("FedPer", "FedRep") and len(config.task().blocks) < 2:
        requirement, found = f"must have a layer for {learning.method}, whose head only is personal", "got none"
        raise ArgumentError("hidden", requirement, found, "Pass --hidden 32.")
    if learning.method in DRAWN and learning.selection != "uniform" and learning.num_active >= nodes:
        requirement = f"must be below all {nodes} clients where they are chosen {learning.selection}"
        raise ArgumentError("num_active", requirement, f"got {learning.num_active}", "Pass fewer clients of a round.")
    if learning.method in DRAWN and not 1 <= learning.num_active <= nodes:
        requirement, found = f"must be from 1 to all {nodes} clients", f"got {learning.num_active}"
        raise ArgumentError("num_active", requirement, found, "Pass fewer clients of a round, or more --nodes.")
    count, robust = learning.attackers, learning.aggregate in SPARED
    most = (learning.num_active - SPARED.get(learning.aggregate, 0)) // 2
    if learning.method in AVERAGED and (robust or learning.attack != "none") and count > most:
        requirement = f"must be at most {most} for {learning.aggregate} of {learning.num_active} clients"
        raise ArgumentError("attackers", requirement, f"got {count}", "Pass fewer, or more --num-active.")
    if learning.method in UNDIRECTED and learning.graph in ("exponential", "directed_ring", "base"):
        requirement, found = f"must be undirected, and stay, for {learning.method}", f"got {learning.graph}"
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
        data, rounds = config.clients.data(config.data), config.learning.rounds
        return {"data": data, "num_rounds": rounds, "ledger": ledger, "measures": config.measures()}

    first: Configuration = next(iter(rows.values())).config
    methods = ", ".join(dict.fromkeys(row.config.learning.method for row in rows.values()))
    clients = first.clients
    said = (
        f"{len(rows)} cases over {clients.nodes} nodes ({clients.partition}), {first.learning.rounds} rounds: {methods}"
    )
    return Prepared(cases_of(rows, Configuration.algorithm, of_row), [said])
