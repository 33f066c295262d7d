"""Joules of a forward and a backward pass: equations (5) to (10) and section V of DZOFL (`jaxfl.dzofl`).

The paper's N_c are the `operations` of `Counts`, its O_c, d and x_in their activations, parameters and inputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxfl.channel.cost import Counts
from jaxfl.core import check


class EnergyModel(NamedTuple):
    """A device, each number positive. The defaults are DZOFL's, section V; its p is the number of MAC units here."""

    bits: int = 16  # M, precision of the forward pass
    max_bits: int = 32  # M_max, precision of the backward pass
    mac_joules: float = 3.7e-12  # A, one operation at max_bits
    exponent: float = 1.25  # mu
    dram_factor: float = 150.0  # A_d, one access to DRAM in units of one operation
    mac_units: int = 64  # p
    sram_bits: float = 64e6  # S: 8 MB. As 8e6 *bits* it would spill, and the backward pass would cost 19 times more


def forward_energy(counts: Counts, model: EnergyModel) -> float:
    """Equations (5) to (9): joules of a forward pass at `bits`, for computing, weights, activations and DRAM together.

    Args:
        counts: of whatever is to be charged: what the paper charges, or all of a batch.
        model: the device.

    Raises:
        ArgumentError: a negative count, or a number of the device that is not positive.

    Example:
        >>> ten = Counts(macs=10_560_000, other_operations=0, activations=250_420, parameters=45_362, inputs=784)
        >>> [round(1e6 * energy(ten, EnergyModel()), 5) for energy in (forward_energy, backward_energy)]  # DZOFL's
        [23.46685, 89.93295]
    """
    spilled_bits = _spilled_bits(model.bits, counts, model)
    high = model.mac_joules
    low = high * (model.bits / model.max_bits) ** model.exponent  # E_MAC(M) = A (M / M_max)^mu
    buffers = low * counts.operations * math.sqrt(model.bits / (model.mac_units * model.max_bits))
    computing = low * counts.operations + 3 * counts.activations * high
    weights = 2 * low * counts.parameters + buffers
    activations = 2 * low * counts.activations + buffers
    dram = model.dram_factor * (high * counts.inputs + 2 * low * spilled_bits)
    return computing + weights + activations + dram


def backward_energy(counts: Counts, model: EnergyModel) -> float:
    """Equation (10): joules of a backward pass, at `max_bits`; arguments and errors are those of `forward_energy`."""
    spilled_bits = _spilled_bits(model.max_bits, counts, model)
    operations = 2 * counts.operations * (1 + math.sqrt(1 / model.mac_units)) + 2 * counts.activations
    return model.mac_joules * (operations + counts.parameters + 2 * model.dram_factor * spilled_bits)


def _spilled_bits(bits: float, counts: Counts, model: EnergyModel) -> float:
    """Checks the arguments of a pass; of parameters and activations, what does not fit into the device's SRAM."""
    check.non_negative(**counts._asdict())
    check.positive(**model._asdict())
    return max(bits * (counts.parameters + counts.activations) - model.sram_bits, 0)
