"""Options of experiments.ali_dpfl: records that build clients, estimates and algorithms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import optax

import jaxfl
from jaxfl import gradients
from jaxfl.algorithms.clients.bound_constants import BoundConstants
from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.core import Algorithm, ArgumentError, Task, check
from jaxfl.frame import Choice, Clients, Costs, Data, Network, Run, affects_statements_only, choose, flat, traced, where
from jaxfl.frame.options import ABSENT, added_later
from jaxfl.privacy.mechanisms import NoiseMechanism
from jaxfl.privacy.shared import check_colluding, check_ratio, key_graph

ALI, FIXED, CORRECTED, UPDATES, ALONE = "ALI-DPFL", "DPFL", "SCAFFOLD", "DP-FedAvg", "alone"
PRIVATE_STEPS = (ALI, FIXED, CORRECTED, ALONE)  # methods whose clients make DP-SGD


def _as_published(clip_norm: Any, *, constants_batch: int | None = None) -> BoundConstants:
    del clip_norm  # nothing is clipped
    return jaxfl.published_constants(constants_batch)


def _private(
    clip_norm: Any, *, constants_batch: int | None = None, constants_noise: Any, constants_loss_bound: Any
) -> BoundConstants:
    bounds = {"clip_norm": clip_norm, "loss_bound": constants_loss_bound}
    return jaxfl.private_constants(constants_batch, noise_multiplier=constants_noise, **bounds)


CONSTANTS = Choice("constants", {"as_published": _as_published, "private": _private})


@dataclasses.dataclass(frozen=True)
class Learning:
    """The algorithm."""

    COUNTS: ClassVar = (
        where("method", (ALI,), "kappa", "constants", *CONSTANTS.counts),
        where("method", (FIXED, CORRECTED, "FedAvg", UPDATES, ALONE), "local_steps"),
        where("method", (UPDATES,), "num_active", "update_clip_norm", "update_noise_multiplier"),
        where("rounds", ("auto",), "round_ratio"),
        CONSTANTS.counts,
    )
    method: Literal["ALI-DPFL", "DPFL", "SCAFFOLD", "FedAvg", "DP-FedAvg", "alone"] = ALI
    """ALI-DPFL (tau chosen anew in each round), DPFL (the same with tau fixed), SCAFFOLD (DPFL with control variates,
    made of the noisy steps), FedAvg (DPFL without clipping and noise), DP-FedAvg (privacy of whole clients) or alone
    (DPFL without a server: each client by itself)."""
    step_size: float = traced(0.5)
    """Step size of the clients' SGD."""
    batch_size: int = 75
    """Expected number B of samples in the batch of a local iteration, which Poisson sampling draws."""
    local_steps: int = traced(5)
    """Local iterations tau in a round, for methods that fix tau. The last round is shortened to the iterations left."""
    max_steps: int = 100
    """Largest number of local iterations in a round."""
    rounds: int | Literal["auto"] = "auto"
    """Number R_s of communication rounds. auto: round_ratio times R_c, rounded up, with R_c the number of local
    iterations that the budget pays for."""
    round_ratio: float = affects_statements_only(0.2)
    """Ratio R_s / R_c of --rounds auto. R_c is the number of local iterations that the budget pays for if no estimate
    is charged."""
    kappa: float = traced(1.0)
    """Constant phi lambda^2 of the paper's convergence bound, by which ALI-DPFL chooses tau. The paper gives no value.
    A larger one allows a larger tau."""
    constants: Literal["as_published", "private"] = "private"
    """Estimation of the other constants of that bound by clients. private: with noise, which the budget pays for.
    as_published: from their data without noise, so that the run has no epsilon."""
    constants_batch: int | None = None
    """Number of a client's samples that an estimate takes, drawn anew in each round; all by default."""
    constants_noise: float = traced(20.0)
    """Noise multiplier of a private estimate: the noise's standard deviation over the L2 sensitivity."""
    constants_loss_bound: float = traced(0.5)
    """Bound that private estimates put on the change of a sample's loss."""
    num_active: int = 5
    """Expected number of clients in a round of DP-FedAvg; each client is drawn independently."""
    update_clip_norm: float = traced(0.5)
    """Clip norm of DP-FedAvg: the bound on the L2 norm of a client's update."""
    update_noise_multiplier: float | Literal["calibrated"] = traced("calibrated")
    """Standard deviation of the noise on DP-FedAvg's sum of updates, over update_clip_norm; calibrated: the smallest
    noise that meets target_epsilon for whole clients over all rounds."""


def _spends(options: Mapping[str, Any]) -> bool:
    """True where iterations follow from the budget."""
    return options["max_iterations"] == "auto"


def _holds(options: Mapping[str, Any]) -> bool:
    """True where iterations follow from the budget, or the noise on them."""
    return _spends(options) or (options["noise_multiplier"] == "calibrated" and options["method"] in PRIVATE_STEPS)


def _is_charged(options: Mapping[str, Any]) -> bool:
    """True where a budget pays for something beside the iterations."""
    name = {ALI: "constants", UPDATES: "update_noise_multiplier"}.get(options["method"])
    return name is not None and options[name] in ("private", "calibrated")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Noise, and the privacy that it gives to each client's samples."""

    COUNTS: ClassVar = (
        where("method", PRIVATE_STEPS, "clip_norm"),
        where("max_iterations", ("auto",), "accounted_samples"),
        where("bound", ("proven",), "neighboring_relation"),
        {
            **dict.fromkeys(("bound", "neighboring_relation"), lambda options: _holds(options)),
            **dict.fromkeys(
                ("noise_multiplier", "client_noise"),
                lambda options: _spends(options) or options["method"] in PRIVATE_STEPS,
            ),
            "dp_delta": lambda options: _spends(options) or options["method"] != "FedAvg",
            "target_epsilon": lambda options: _holds(options) or _is_charged(options),
        },
    )
    clip_norm: float = traced(0.1)
    """Bound C on each sample's gradient in the L2 norm."""
    noise_multiplier: float | Literal["calibrated"] = traced(1.1)
    """Standard deviation of the noise on a batch's sum of gradients, over C; calibrated: the least with which
    target_epsilon pays for max_iterations, at each client by itself where numbers of samples differ by more than one.
    FedAvg and DP-FedAvg add no such noise, but run as many rounds and iterations as a budget pays for with it."""
    client_noise: tuple[float, ...] = added_later((), {(): ABSENT})
    """Noise multiplier of each client, in place of noise_multiplier. By default the least that meets the budget, where
    it is calibrated and numbers of samples differ by more than one."""
    max_iterations: int | Literal["auto"] = traced("auto")
    """Local iterations T of a client in the whole run; auto: as many as target_epsilon pays for at every client."""
    target_epsilon: float = affects_statements_only(2.0)
    """Privacy budget of every client's samples. With a given number of iterations and private constants, a run is
    refused if the budget pays for its iterations alone, but not for its estimates, too."""
    dp_delta: float = affects_statements_only(1e-5)
    """Delta of every epsilon."""
    bound: Literal["proven", "published"] = affects_statements_only("proven")
    """Which bound holds the budget: proven (privacy loss distributions, which allow more iterations) or published (the
    paper's)."""
    neighboring_relation: Literal["zero_out", "replace_one"] = affects_statements_only("zero_out")
    """Relation of neighboring data sets under which a proven bound holds the budget."""
    accounted_samples: int | None = affects_statements_only(None)
    """Samples |D_i| that a client is assumed to have when the budget's iterations are counted; by default its own. The
    paper takes 5,000 for all data sets. Statements of privacy always take the clients' own."""


@dataclasses.dataclass(frozen=True)
class Trust:
    """Whom a client trusts."""

    COUNTS: ClassVar = (
        where("method", (FIXED, UPDATES), "trust"),
        where("trust", ("pairs",), "key_graph", "shared_ratio"),
        where("trust", ("pairs", "sums"), "colluding"),
        {"num_active": lambda options: options["trust"] == "everyone"},
    )
    trust: Literal["everyone", "pairs", "sums"] = added_later("everyone", {"everyone": ABSENT})
    """everyone: each client has noise of its own, and epsilon holds against the server and all other clients together.
    pairs: pairs of clients share noise in each local step, with DP-FedAvg on each update, which cancels in the server's
    sum. Epsilon then holds against a server that sees every update and knows the secrets of as many clients as
    colluding says. sums: the same against a server that sees nothing but sums, by secure aggregation; DPFL makes one
    local iteration in a round then. In DP-FedAvg the server adds the noise with everyone, and else all clients take
    part."""
    key_graph: Literal["ring", "exponential", "complete"] = "complete"
    """Pairs that share noise: ring, exponential (at distances 1, 2, 4, ...) or complete. Each pair of a client costs as
    much noise as its own."""
    shared_ratio: float = 1.0
    """Standard deviation of shared over own noise."""
    colluding: int = 1
    """Clients that share their secrets with the observer; 0: the server by itself."""

    def noise(self, num_clients: int, noise_std: Any) -> NoiseMechanism:
        """The noise of one local step, or of one update, where pairs share it or the server sees sums."""
        if self.trust == "sums":
            return jaxfl.summed_gaussian(noise_std, num_clients=num_clients, colluding=self.colluding)
        keys = key_graph(self.key_graph, num_clients)
        return jaxfl.shared_gaussian(noise_std, key_graph=keys, ratio=self.shared_ratio, colluding=self.colluding)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.ali_dpfl."""

    data: Data = Data()
    clients: Clients = Clients(nodes=10, partition="shards", shards_per_node=2)
    network: Network = Network()
    learning: Learning = Learning()
    budget: Budget = Budget()
    trust: Trust = Trust()
    costs: Costs = Costs()
    run: Run = Run()

    def task(self) -> Task:
        """The learning task."""
        return self.network.task(self.data)

    @property
    def shares_noise(self) -> bool:
        """Whether noise counts by pairs or sums of clients: other methods may stand beside these in a grid."""
        return self.learning.method in (FIXED, UPDATES) and self.trust.trust != "everyone"

    @property
    def counts_one_step(self) -> bool:
        """Whether a round must have one local iteration only."""
        return self.learning.method == FIXED and self.trust.trust == "sums"

    def local_steps(self) -> LocalSteps:
        """Local steps of a client in a round, once rounds and iterations are numbers."""
        learning, budget = self.learning, self.budget
        assert not isinstance(learning.rounds, str)
        noise_multiplier: Any = budget.noise_multiplier
        silent = learning.method not in PRIVATE_STEPS
        if budget.client_noise:
            noise_multiplier = np.asarray(budget.client_noise)
        assert not isinstance(noise_multiplier, str)
        if silent or (
            isinstance(noise_multiplier, int | float) and not noise_multiplier
        ):  # zeros cost as much as noise
            noise = None
        else:
            noise_std = noise_multiplier * budget.clip_norm / learning.batch_size
            in_pairs = functools.partial(self.trust.noise, self.clients.nodes)
            noise = (in_pairs if self.shares_noise else jaxfl.gaussian)(noise_std)
        num_draws = self.clients.nodes * learning.rounds * learning.max_steps
        return jaxfl.local_steps(
            1 if self.counts_one_step else learning.max_steps,
            batch_size=learning.batch_size,
            optimizer=optax.sgd(learning.step_size),
            sampler=functools.partial(gradients.poisson, num_draws=num_draws),
            clip_norm=None if silent else budget.clip_norm,
            noise=noise,
            num_steps=None if learning.method == ALI else self.steps_at,
            weighting="uniform" if learning.method in (UPDATES, CORRECTED) or self.shares_noise else "data",
        )

    def steps_at(self, round_index: Any) -> Any:
        """tau of a round where it is fixed, less in the last one: (), int32."""
        steps, most = (
            jnp.asarray(value, jnp.int32) for value in (self.learning.local_steps, self.budget.max_iterations)
        )
        return jnp.clip(most - steps * round_index, 0, steps)

    def uplink(self) -> Uplink | None:
        """Private release of whole clients' updates; None for all methods but DP-FedAvg."""
        learning = self.learning
        if learning.method != UPDATES:
            return None
        assert not isinstance(learning.rounds, str)
        norm, noise = learning.update_clip_norm, learning.update_noise_multiplier
        assert not isinstance(noise, str)
        in_pairs = functools.partial(self.trust.noise, self.clients.nodes)
        noise, rounds = (in_pairs if self.shares_noise else jaxfl.gaussian)(noise * norm), learning.rounds
        return jaxfl.uplink(updates=jaxfl.private_updates(clip_norm=norm, noise=noise, num_rounds=rounds))

    def algorithm(self) -> Algorithm:
        """The algorithm, once rounds, iterations and noise are numbers."""
        learning, most = self.learning, self.budget.max_iterations
        if learning.method == ALONE:
            return jaxfl.partial_averaging(self.task(), clients=self.local_steps(), synchronized=())
        if learning.method == CORRECTED:
            return jaxfl.scaffold(self.task(), clients=self.local_steps(), num_active=self.clients.nodes)
        if learning.method != ALI:
            some = learning.method == UPDATES and not self.shares_noise
            num_active = learning.num_active if some else self.clients.nodes
            return jaxfl.fed_avg(self.task(), clients=self.local_steps(), num_active=num_active, uplink=self.uplink())
        assert not isinstance(most, str)
        assert not isinstance(learning.rounds, str)
        return jaxfl.ali_dpfl(
            self.task(),
            clients=self.local_steps(),
            constants=choose(CONSTANTS, flat(self))(self.budget.clip_norm),
            step_size=learning.step_size,
            max_rounds=learning.rounds,
            max_iterations=most,
            kappa=learning.kappa,
        )


def check_config(config: Configuration) -> None:
    """Refuse what building the algorithm does not, before any work."""
    learning, budget = config.learning, config.budget
    check.at_least(1, max_steps=learning.max_steps, local_steps=learning.local_steps, batch_size=learning.batch_size)
    check.at_least(1, num_active=learning.num_active)
    counts = {"rounds": learning.rounds, "max_iterations": budget.max_iterations}
    counts |= {"constants_batch": learning.constants_batch, "accounted_samples": budget.accounted_samples}
    check.at_least(1, **{name: count for name, count in counts.items() if isinstance(count, int)})
    if config.run.evaluate_every:  # 0 until the rounds are known
        check.at_least(1, evaluate_every=config.run.evaluate_every)
    check.positive(round_ratio=learning.round_ratio, target_epsilon=budget.target_epsilon)
    check.positive(constants_noise=learning.constants_noise, constants_loss_bound=learning.constants_loss_bound)
    check.positive(clip_norm=budget.clip_norm, update_clip_norm=learning.update_clip_norm)
    if budget.noise_multiplier != "calibrated":
        check.non_negative(noise_multiplier=budget.noise_multiplier, client_noise=np.array(budget.client_noise))
    elif budget.max_iterations == "auto":
        found, remedy = "got auto, which follows from the noise", "Pass a number, or a number for noise_multiplier."
        raise ArgumentError("max_iterations", "must be a number where noise is calibrated", found, remedy)
    check.open_unit(dp_delta=budget.dp_delta)
    if learning.method != ALI and learning.local_steps > learning.max_steps:
        found, remedy = f"got {learning.local_steps}", "Pass fewer, or raise max_steps."
        raise ArgumentError("local_steps", f"must be at most max_steps, {learning.max_steps}", found, remedy)
    if learning.update_noise_multiplier != "calibrated":
        check.positive(update_noise_multiplier=learning.update_noise_multiplier)
    if config.counts_one_step and learning.local_steps > 1:
        requirement = (
            "must be 1 with sums: a second gradient is taken at a hidden model, which moves by more than the noise"
        )
        raise ArgumentError("local_steps", requirement, f"got {learning.local_steps}", "Pass 1, or --trust pairs.")
    if config.shares_noise:
        check_ratio(shared_ratio=config.trust.shared_ratio)
        check_colluding(config.clients.nodes, config.trust.colluding)
        if budget.client_noise and learning.method == FIXED:
            found, remedy = "got pairs", "Pass one noise_multiplier."
            raise ArgumentError("trust", "must be everyone with noise of each client's own", found, remedy)
    name = "client_noise" if budget.client_noise else "noise_multiplier"
    check.per_node(config.clients.nodes, client_noise=budget.client_noise or None)
    if budget.max_iterations == "auto" and not all(budget.client_noise or (budget.noise_multiplier,)):
        found, remedy = "got 0, with which no iteration has an epsilon", "Pass more, or a number for max_iterations."
        raise ArgumentError(name, "must be positive where it spends a budget", found, remedy)
