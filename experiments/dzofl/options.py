"""Options of experiments.dzofl: records that build algorithms, links and what a round costs."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfl
from jaxfl import channel
from jaxfl.algorithms.dzofl import decaying_schedules
from jaxfl.core import Algorithm, ArgumentError, Array, Task, check
from jaxfl.frame import Choice, Clients, Costs, Data, Network, Row, Run, choose, flat, traced, where
from jaxfl.frame.options import ABSENT, added_later

LARGEST_M = 1e18  # whose square float32 holds
DZOFL, FED_AVG, ALONE = "DZOFL", "FedAvg", "alone"
_ZERO_ORDER = ("step_size", "step_exponent", "smoothing", "smoothing_exponent", "num_directions", "direction")
_RADIO = ("radius_m", "placement_seed", "bandwidth_hz", "noise_dbm_per_hz", "path_loss_db", "path_loss_exponent")
QUANTIZER = Choice(
    "quantizer",
    {
        "none": lambda: None,
        "float16": lambda: channel.float_quantizer(5, 10),
        "float8": lambda: channel.float_quantizer(4, 3),
        "dithered": lambda *, quantizer_bits, quantizer_limit: channel.dithered_quantizer(
            quantizer_bits, quantizer_limit
        ),
    },
)


@dataclasses.dataclass(frozen=True)
class Learning:
    """The algorithm."""

    COUNTS: ClassVar = (
        where("method", (DZOFL,), *_ZERO_ORDER),
        where("method", (FED_AVG, ALONE), "sgd_step_size"),
        where("method", (DZOFL, FED_AVG), "num_active"),
    )
    method: Literal["DZOFL", "FedAvg", "alone"] = DZOFL
    """DZOFL (a device sends differences of losses), FedAvg (distributed SGD: one local step, a device sends the change
    of its model) or alone (FedAvg without a server: each device by itself)."""
    rounds: int = 1500
    """Rounds K."""
    batch_size: int = 10
    """Number of samples that a device takes in a round."""
    num_active: int | None = added_later(None, {None: ABSENT})
    """Number of devices that compute and send in a round, drawn anew in each; all by default, as in the paper."""
    step_size: float = traced(5.0)
    """alpha_0 of DZOFL's step sizes alpha_0 (1 + k)^-u1."""
    step_exponent: float = 0.26
    """Exponent u1; refused where the paper's conditions on u1 and u2 do not hold."""
    smoothing: float = traced(1.0)
    """gamma_0 of gamma_0 (1 + k)^-u2, the L2 distance by which a probe moves the model to both sides."""
    smoothing_exponent: float = 0.26
    """Exponent u2."""
    num_directions: int = 1
    """Number of random directions in a round. Each takes two forward passes and sends one number."""
    direction: Literal["rademacher", "gaussian"] = "rademacher"
    """Distribution of a direction's entries: rademacher (two values, as in the paper) or gaussian."""
    sgd_step_size: float = traced(0.1)
    """Step size of FedAvg."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """Links from devices to the server, and the rounding of what is sent. Messages of the server are not lost."""

    COUNTS: ClassVar = (
        QUANTIZER.counts,
        where("method", (FED_AVG,), "lost"),
        where("method", (DZOFL, FED_AVG), "quantizer", "links"),
        where("links", ("given",), "success"),
        where("links", ("given", "wireless"), "lost", "recovery"),
        where("method", (DZOFL, FED_AVG), "recovery"),
        {"recovery": lambda options: options["method"] == DZOFL or options["lost"] == "drop"},
        where("links", ("wireless",), *_RADIO),
    )
    quantizer: Literal["none", "float16", "float8", "dithered"] = "float16"
    """Quantizer of each number that is sent: none (32 bits), a small float, or a grid; all round at random, without
    bias. With FedAvg the way down has 32 bits in any case."""
    quantizer_bits: int = 8
    """Bits of a number with --quantizer dithered."""
    quantizer_limit: float = traced(1.0)
    """Largest number that --quantizer dithered sends; larger ones are cut off there, and counted."""
    links: Literal["perfect", "given", "wireless"] = "wireless"
    """perfect: nothing is lost. given: a message arrives with probability success. wireless: it arrives with a
    probability that follows from the device's distance, rate and power (uplink_bits_per_second, transmit_dbm)."""
    success: float = traced(0.8)
    """Probability that a message arrives, with --links given."""
    recovery: float | None = added_later(None, {None: ABSENT})
    """Probability that a device's message arrives where its last one was lost; the probability of the links is then
    that after one that arrived. Bursts of losses are 1 / recovery rounds long. Default: that of the links."""
    lost: Literal["resend", "drop"] = "resend"
    """Treatment of a lost message by FedAvg: send it again until it arrives, at the cost of airtime, or do without.
    DZOFL does without."""
    radius_m: float = traced(500.0)
    """Radius, in meters, of the disc over which devices are spread uniformly; the server is in its middle."""
    placement_seed: int = 0
    """Seed of the devices' places, the same in all runs."""
    bandwidth_hz: float = traced(2e6)
    """Bandwidth of each device, in Hz."""
    noise_dbm_per_hz: float = traced(-173.0)
    """Density of thermal noise, in dBm per Hz."""
    path_loss_db: float = traced(128.1)
    """Path loss at 1 km, in dB. The paper gives no law of path loss; the default is 3GPP's for a large cell."""
    path_loss_exponent: float = traced(3.76)
    """Exponent of the distance with which a signal weakens."""


@dataclasses.dataclass(frozen=True)
class RadioCosts(Costs):
    """Devices and links from which seconds and joules are computed. On wireless links the rate and the power up also
    decide what arrives."""

    uplink_bits_per_second: float = traced(10e6)
    """Bits per second (R) that each device sends."""
    transmit_dbm: float = traced(23.0)
    """Power while a device sends, in dBm."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run of experiments.dzofl."""

    data: Data = Data()
    clients: Clients = Clients(nodes=10)
    network: Network = Network()
    learning: Learning = Learning()
    channel: Channel = Channel()
    costs: RadioCosts = RadioCosts()
    run: Run = Run()

    def task(self) -> Task:
        """The learning task."""
        return self.network.task(self.data)

    def success(self) -> Array:
        """Probability that a message arrives when it is sent once, (n,), float32, of each device."""
        links, costs, num_nodes = self.channel, self.costs, self.clients.nodes
        if links.links != "wireless":
            return jnp.broadcast_to(jnp.float32(links.success if links.links == "given" else 1.0), num_nodes)
        radio = channel.Radio(
            bits_per_second=costs.uplink_bits_per_second,
            power_dbm=costs.transmit_dbm,
            bandwidth_hz=links.bandwidth_hz,
            noise_dbm_per_hz=links.noise_dbm_per_hz,
            path_loss_db=links.path_loss_db,
            path_loss_exponent=links.path_loss_exponent,
        )
        places = channel.disc_positions(jax.random.key(links.placement_seed), num_nodes, links.radius_m)
        return channel.success_probability(jnp.linalg.norm(places, axis=1), radio)

    def losses(self) -> channel.Links:
        """Links to the server that lose messages, and round none."""
        return jaxfl.links(self.success(), recovery=self.channel.recovery)

    @property
    def num_active(self) -> int:
        """Number of devices that compute in a round."""
        given = None if self.learning.method == ALONE else self.learning.num_active
        return self.clients.nodes if given is None else given

    @property
    def resends(self) -> bool:
        """True where lost messages are sent again."""
        return self.learning.method == FED_AVG and self.channel.lost == "resend"

    def algorithm(self) -> Algorithm:
        """The algorithm; traced options may be arrays."""
        learning, quantizer = self.learning, choose(QUANTIZER, flat(self))()
        uplink = jaxfl.links(quantizer=quantizer) if self.resends else self.losses()._replace(quantizer=quantizer)
        if learning.method != DZOFL:
            optimizer = optax.sgd(learning.sgd_step_size)
            clients = jaxfl.local_steps(1, batch_size=learning.batch_size, optimizer=optimizer)
            if learning.method == ALONE:
                return jaxfl.partial_averaging(self.task(), clients=clients, synchronized=())
            return jaxfl.fed_avg(
                self.task(), clients=clients, num_active=self.num_active, uplink=jaxfl.uplink(links=uplink)
            )
        step_size, smoothing = decaying_schedules(
            learning.step_size,
            learning.smoothing,
            step_exponent=learning.step_exponent,
            smoothing_exponent=learning.smoothing_exponent,
        )
        return jaxfl.dzofl(
            self.task(),
            batch_size=learning.batch_size,
            step_size=step_size,
            smoothing=smoothing,
            num_active=self.num_active,
            uplink=uplink,
            downlink=quantizer,
            num_directions=learning.num_directions,
            direction=learning.direction,
        )

    def ledger(self) -> channel.Ledger:
        """Ledger of a round's costs. A message that is sent again until it arrives is on the air 1 / p times as long on
        average."""
        book = self.costs.ledger(self.network.work(self.data), self.learning.batch_size)
        if not self.resends:
            return book
        return book._replace(uplink_bits_per_second=self.costs.uplink_bits_per_second * np.asarray(self.success()))


def check_config(config: Configuration) -> None:
    """Refuse what building the algorithm does not, before any work."""
    learning, links = config.learning, config.channel
    check.at_least(1, rounds=learning.rounds, batch_size=learning.batch_size, evaluate_every=config.run.evaluate_every)
    check.positive(sgd_step_size=learning.sgd_step_size, radius_m=links.radius_m)
    check.probability(success=links.success)
    check.at_least(0, placement_seed=links.placement_seed)
    if links.radius_m > LARGEST_M:
        raise ArgumentError("radius_m", f"must be at most {LARGEST_M:g}", f"got {links.radius_m}", "Pass 500.")
    if config.resends and not np.all(np.asarray(config.success()) > 0):
        name = "success" if links.links == "given" else "uplink_bits_per_second"
        found, remedy = "got a device whose messages never arrive", "Pass another, or --lost drop."
        raise ArgumentError(name, "must let each message arrive in the end", found, remedy)


def _pooled(row: Row) -> dict[str, Any] | None:
    """One device with all samples that sends nothing, in batches of as many as all devices take together."""
    batch_size = row.config.clients.nodes * row.config.learning.batch_size
    changes = {"method": ALONE, "nodes": 1, "partition": "iid", "batch_size": batch_size}
    return changes if row.config.learning.method == FED_AVG else None


BASELINES = {
    "alone": lambda row: {"method": ALONE} if row.config.learning.method == FED_AVG else None,
    "pooled": _pooled,
}
