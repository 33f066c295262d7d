"""Costs of a run: operations, seconds and joules of rounds, from the counts in each round's `jaxfl.Info`.

Every algorithm counts, node by node, `bits_sent`, `bits_received`, `gradient_evaluations` and `forward_evaluations`. A
`Ledger` holds the cost of one of each. The costs of a round, over all nodes:

    operations          sum_i (gradients_i * G + forwards_i * F)
    simulated seconds   max_i (computing_i + airtime of the bits that i sent) + max_i airtime of those that i received
    joules              sum_i (gradients_i * E_G + forwards_i * E_F + transmit power * airtime of the bits that i sent
                               + downlink power * airtime of the bits that i received)

- Operations are counted by `jaxfl.channel.count`. A gradient is a forward and a backward pass. A backward pass takes
  twice the operations of the forward pass through the differentiated layers, for derivatives of inputs and of
  parameters. So G = 3 F where the whole model is differentiated. Clipping and noise are not charged.
- Seconds belong to a synchronous round: all nodes begin together, and the slowest ends it. Messages go up to a base
  station and down from it, at each link's rate; a message takes at least one slot. With an infinite downlink rate the
  way down takes no time, as for messages sent directly to a neighbor. Events of an asynchronous round take place at
  the same time.
- Joules follow DZOFL's energy model for passes over a batch, shared out over its samples, plus sending. Energy of the
  way down, which DZOFL's section III-C counts, is charged if a downlink power is given.

Reference: DZOFL (`jaxfl.dzofl`), section III (16 million operations in 4 ms at 4 GHz) and equations (5) to (10).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.channel.cost import Counts, total
from jaxfl.core import ArgumentError, Info, check

COUNTED = ("bits_sent", "bits_received", "gradient_evaluations", "forward_evaluations")  # each (n,), of an info


class Costs(NamedTuple):
    """Costs of one sample, () or (n,), of a round at each node, (n,) or (rounds, n), or at all, () or (rounds,)."""

    operations: Any
    simulated_seconds: Any
    joules: Any


class Ledger(NamedTuple):
    """Costs of gradients, forward evaluations and bits, made by `ledger`. Numbers, () or (n,), may be traced."""

    gradient: Costs  # of one sample
    forward: Costs  # of one sample
    uplink_bits_per_second: Any
    downlink_bits_per_second: Any
    slot_seconds: Any  # the least airtime of a message
    transmit_watts: Any  # while a node sends
    downlink_watts: Any  # while a node is sent to

    def of_round(self, counts: Any) -> Costs:
        """The costs of rounds.

        Args:
            counts: an info of one round, or of several along a leading axis; or a mapping from the names in `COUNTED`
                to arrays (n,) or (rounds, n).

        Returns:
            Costs, () or (rounds,): float64 for NumPy arrays, float32 for JAX arrays, also traced ones.

        Raises:
            ArgumentError: a missing count, or a ledger for another number of nodes.

        Guarantees:
            - several rounds at once give what each gives alone.
            - NumPy and JAX arrays give the same to rounding.
        """
        own, receiving = self.of_nodes(counts)
        seconds = own.simulated_seconds.max(axis=-1) + receiving.max(axis=-1)
        return Costs(own.operations.sum(axis=-1), simulated_seconds=seconds, joules=own.joules.sum(axis=-1))

    def of_nodes(self, counts: Any) -> tuple[Costs, Any]:
        """The costs of each node, whose seconds end with its message, and the seconds that it then receives, each (n,)
        or (rounds, n); arguments, dtypes and errors as for `of_round`."""
        values = counts.named() if isinstance(counts, Info) else counts
        check_counts(values)
        on_device = any(isinstance(values[name], jax.Array) for name in COUNTED)
        lib: Any = jnp if on_device else np
        dtype = jnp.float32 if on_device else np.float64
        up_bits, down_bits, gradients, forwards = (lib.asarray(values[name]).astype(dtype) for name in COUNTED)
        numbers = jax.tree.map(lambda number: lib.asarray(number, dtype), self)
        wrong = [number.shape for number in jax.tree.leaves(numbers) if number.shape not in ((), up_bits.shape[-1:])]
        if wrong:
            requirement = f"must be for the {up_bits.shape[-1]} nodes that the info counts"
            raise ArgumentError("ledger", requirement, f"got one for {wrong[0][0]}", "Pass the work of each node.")
        book = jax.tree.map(lambda number: lib.broadcast_to(number, up_bits.shape) if number.ndim else number, numbers)

        def airtime(bits, bits_per_second):
            takes_time = (bits > 0) & (bits_per_second < math.inf)
            return lib.where(takes_time, lib.maximum(bits / bits_per_second, book.slot_seconds), 0.0)

        operations, seconds, joules = (gradients * a + forwards * b for a, b in zip(*book[:2], strict=True))
        up, down = airtime(up_bits, book.uplink_bits_per_second), airtime(down_bits, book.downlink_bits_per_second)
        joules = joules + book.transmit_watts * up + book.downlink_watts * down
        return Costs(operations, simulated_seconds=seconds + up, joules=joules), down


class EnergyModel(NamedTuple):
    """A device; all numbers are positive. Defaults: DZOFL, section V, whose p is the number of MAC units here."""

    bits: int = 16  # M, precision of the forward pass
    max_bits: int = 32  # M_max, precision of the backward pass
    mac_joules: float = 3.7e-12  # A, one operation at max_bits
    exponent: float = 1.25  # mu
    dram_factor: float = 150.0  # A_d, one access to DRAM in units of one operation
    mac_units: int = 64  # p
    sram_bits: float = 64e6  # S: 8 MB. With 8e6 bits the backward pass would use DRAM and cost 19 times more


def forward_energy(counts: Counts, model: EnergyModel) -> float:
    """DZOFL's equations (5) to (9): joules of a forward pass at `bits`, for computing, weights, activations and DRAM.

    Args:
        counts: of the charged layers. DZOFL's N_c, O_c, d and x_in are operations, activations, parameters and inputs.
        model: the device.

    Raises:
        ArgumentError: a number out of range.

    Examples:
        >>> ten = Counts(macs=10_560_000, other_operations=0, activations=250_420, parameters=45_362, inputs=784)
        >>> [round(1e6 * energy(ten, EnergyModel()), 5) for energy in (forward_energy, backward_energy)]  # DZOFL's
        [23.46685, 89.93295]
    """
    spilled_bits, high = _spilled_bits(model.bits, counts, model), model.mac_joules
    low = high * (model.bits / model.max_bits) ** model.exponent  # E_MAC(M) = A (M / M_max)^mu
    buffers = low * counts.operations * math.sqrt(model.bits / (model.mac_units * model.max_bits))
    computing = low * counts.operations + 3 * counts.activations * high
    weights, activations = (2 * low * number + buffers for number in (counts.parameters, counts.activations))
    return computing + weights + activations + model.dram_factor * (high * counts.inputs + 2 * low * spilled_bits)


def backward_energy(counts: Counts, model: EnergyModel) -> float:
    """DZOFL's equation (10): joules of a backward pass, at `max_bits`; arguments as for `forward_energy`."""
    spilled_bits = _spilled_bits(model.max_bits, counts, model)
    operations = 2 * counts.operations * (1 + math.sqrt(1 / model.mac_units)) + 2 * counts.activations
    return model.mac_joules * (operations + counts.parameters + 2 * model.dram_factor * spilled_bits)


def _spilled_bits(bits: float, counts: Counts, model: EnergyModel) -> float:
    """Check the arguments of a pass, and count the bits of parameters and activations that exceed the device's SRAM."""
    check.non_negative(**counts._asdict())
    check.positive(**model._asdict())
    return max(bits * (counts.parameters + counts.activations) - model.sram_bits, 0)


class Work(NamedTuple):
    """Operation counts of one sample at a node, made by `node_work`."""

    gradient: Counts  # operations of a gradient's forward pass
    backward: Counts  # the part of it that is differentiated
    forward: Counts  # operations of a forward evaluation


def node_work(layers: Mapping[str, Counts], trained_from: str | None = None) -> Work:
    """The work of a node that trains a whole model or only its output side.

    Args:
        layers: of the whole model, from `jaxfl.channel.count`.
        trained_from: name of the first layer that is trained; None trains the whole model. With a name, a gradient
            begins there, on features, and a forward evaluation computes a sample's features, as in `jaxfl.embracing`.

    Raises:
        ArgumentError: an unknown layer.

    Examples:
        >>> from jaxfl.channel import count
        >>> from jaxfl.models import mlp
        >>> [counts.macs for counts in node_work(count(mlp((64, 32, 10)), (8, 8)), "dense_2")]
        [320, 320, 2048]
    """
    whole, part = total(layers), total(layers, trained_from=trained_from)
    front = Counts(*(a - b for a, b in zip(whole, part, strict=True)))._replace(inputs=whole.inputs)
    return Work(gradient=part, backward=part, forward=whole if trained_from is None else front)


def ledger(
    work: Work | Sequence[Work],
    *,
    batch_size: int,
    energy: EnergyModel | None = None,
    operations_per_second: float = 4e9,
    uplink_bits_per_second: float = 10e6,
    downlink_bits_per_second: float = 10e6,
    slot_seconds: float = 0.125e-3,
    transmit_dbm: float = 23.0,
    downlink_watts: float = 0.0,
) -> Ledger:
    """Compute the costs of a gradient, a forward evaluation and a bit. docs/costs.md has the sources of the defaults.

    Args:
        work: of a sample at every node, or at each of the n nodes.
        batch_size: samples that go through the model at once. Reading the parameters is charged once for all of them; a
            batch with fewer samples is charged its share.
        energy: of passes; default DZOFL's device.
        operations_per_second: of a node; 4e9 is one operation per cycle at 4 GHz.
        uplink_bits_per_second, downlink_bits_per_second: of a node's link. An infinite rate takes no time.
        slot_seconds: the least airtime of a message. Default: a slot of 5G.
        transmit_dbm: power while sending, in dBm. Default 0.2 W, the maximum of a 5G handset of power class 3.
        downlink_watts: power at the base station, and at the node, while the node is sent to. Default: not charged.

    Raises:
        ArgumentError: no node, or a number out of range.

    Guarantees:
        - a gradient takes three times the operations of a forward evaluation, where the whole model is trained.

    Examples:
        >>> from jaxfl.channel import count
        >>> from jaxfl.models import mlp
        >>> book = ledger(node_work(count(mlp((64, 10)), (8, 8))), batch_size=16)
        >>> book.forward.operations, book.gradient.operations  # 64 * 10 products and 10 biases, three times
        (650.0, 1950.0)
        >>> costs = book.of_round({
        ...     "bits_sent": np.array([20_800.0, 0.0]), "bits_received": np.array([20_800.0, 0.0]),
        ...     "gradient_evaluations": np.array([16, 0]), "forward_evaluations": np.array([0, 0])})
        >>> float(costs.operations), round(1e3 * float(costs.simulated_seconds), 4)  # 2.08 ms up, 2.08 down, 7.8 us
        (31200.0, 4.1678)
    """
    check.at_least(1, batch_size=batch_size)
    check.positive(operations_per_second=operations_per_second)
    rates = {"uplink_bits_per_second": uplink_bits_per_second, "downlink_bits_per_second": downlink_bits_per_second}
    check.positive(**{name: 1.0 if rate == math.inf else rate for name, rate in rates.items()})
    check.non_negative(slot_seconds=slot_seconds, downlink_watts=downlink_watts)
    check.scalar(transmit_dbm=transmit_dbm)
    if not work:
        raise ArgumentError("work", "must be that of at least one node", "got none", "Pass one, or one for each node.")
    numbers = operations_per_second, batch_size, energy or EnergyModel()
    if isinstance(work, Work):
        gradient, forward = _of_sample(work, *numbers)
    else:
        of_kind = {kind: _of_sample(kind, *numbers) for kind in dict.fromkeys(work)}
        gradient, forward = jax.tree.map(lambda *each: np.array(each), *(of_kind[kind] for kind in work))
    watts = 1e-3 * 10 ** (transmit_dbm / 10)
    return Ledger(
        gradient, forward, **rates, slot_seconds=slot_seconds, transmit_watts=watts, downlink_watts=downlink_watts
    )


def check_counts(names: Any) -> None:
    """Refuse an info whose field names lack a count that costs are made of."""
    missing = [name for name in COUNTED if name not in names]
    if missing:
        found = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} none of {', '.join(names)}"
        remedy = "Count it in the algorithm's info, or leave the ledger out."
        raise ArgumentError("ledger", "needs all counts that costs are made of", found, remedy)


def _of_sample(work: Work, rate: float, batch_size: int, energy: EnergyModel) -> list[Costs]:
    """Compute the costs of a sample's gradient and of its forward evaluation, at `rate` operations per second."""
    batch = [Counts(*(batch_size * n for n in counts))._replace(parameters=counts.parameters) for counts in work]
    operations = work.gradient.operations + 2 * work.backward.operations, work.forward.operations
    joules = forward_energy(batch[0], energy) + backward_energy(batch[1], energy), forward_energy(batch[2], energy)
    return [Costs(float(n), n / rate, of_batch / batch_size) for n, of_batch in zip(operations, joules, strict=True)]
