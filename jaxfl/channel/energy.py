"""DZOFL's energy of a forward and a backward pass, in joules.

The paper's constants are the defaults of `EnergyModel`. A `Workload` holds whatever is to be charged: what the paper
charges, or all of a batch.

References:
    E. Mhanna, M. Assaad, "Communication and Energy Efficient Federated Learning using Zero-Order Optimization
    Technique": equations (5) to (10), section V.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxfl.core import check


class Workload(NamedTuple):
    """What one pass processes; numbers of one sample or of a batch, as the caller decides."""

    num_macs: float  # N_c; the paper's 10.56e6 is one sample's macs and other operations
    num_activations: float  # O_c
    num_parameters: float  # d
    input_size: float  # x_in


DZOFL_PUBLISHED = Workload(num_macs=10.56e6, num_activations=250_420, num_parameters=45_362, input_size=784)
"""What DZOFL charges for a batch of 10: its activations, but the operations and the input of one sample."""

DZOFL_CONSISTENT = Workload(num_macs=105.6e6, num_activations=250_420, num_parameters=45_362, input_size=7840)
"""All of that batch."""


class EnergyModel(NamedTuple):
    """A device, each number positive. The defaults are DZOFL's, section V; its p is the number of MAC units here."""

    bits: int = 16  # M, precision of the forward pass
    max_bits: int = 32  # M_max, precision of the backward pass
    mac_joules: float = 3.7e-12  # A, one operation at max_bits
    exponent: float = 1.25  # mu
    dram_factor: float = 150.0  # A_d, one access to DRAM in units of one operation
    mac_units: int = 64  # p
    sram_bits: float = 64e6  # S: 8 MB. As 8e6 *bits* it would spill, and the backward pass would cost 19 times more


class ForwardEnergy(NamedTuple):
    """Joules of a forward pass by cause; `sum` gives E_FP."""

    computing: float
    weights: float
    activations: float
    dram: float


def mac_energy(bits: float, model: EnergyModel) -> float:
    """E_MAC(M) = A (M / M_max)^mu, joules of one multiply-accumulate at a precision.

    Args:
        bits: M, positive.
        model: the device.

    Returns:
        Joules.

    Raises:
        ArgumentError: bits, or a number of the device, that are not positive.
    """
    check.positive(bits=bits)
    check.positive(**model._asdict())
    return model.mac_joules * (bits / model.max_bits) ** model.exponent


def forward_energy(workload: Workload, model: EnergyModel) -> ForwardEnergy:
    """Equations (5) to (9): a forward pass.

    Args:
        workload: what the pass processes.
        model: the device.

    Returns:
        Joules by cause.

    Raises:
        ArgumentError: a negative workload, or a number of the device that is not positive.

    Example:
        >>> [round(1e6 * sum(forward_energy(work, EnergyModel())), 5) for work in (DZOFL_PUBLISHED, DZOFL_CONSISTENT)]
        [23.46685, 201.36909]
    """
    check.non_negative(**workload._asdict())
    low, high = mac_energy(model.bits, model), mac_energy(model.max_bits, model)
    buffers = low * workload.num_macs * math.sqrt(model.bits / (model.mac_units * model.max_bits))
    return ForwardEnergy(
        computing=low * workload.num_macs + 3 * workload.num_activations * high,
        weights=2 * low * workload.num_parameters + buffers,
        activations=2 * low * workload.num_activations + buffers,
        dram=model.dram_factor * (high * workload.input_size + 2 * low * _spilled_bits(model.bits, workload, model)),
    )


def backward_energy(workload: Workload, model: EnergyModel) -> float:
    """Equation (10): a backward pass, all of it at `max_bits`.

    Args:
        workload: what the pass processes.
        model: the device.

    Returns:
        Joules.

    Raises:
        ArgumentError: a negative workload, or a number of the device that is not positive.

    Example:
        >>> [round(1e6 * backward_energy(work, EnergyModel()), 5) for work in (DZOFL_PUBLISHED, DZOFL_CONSISTENT)]
        [89.93295, 881.14...]
    """
    check.non_negative(**workload._asdict())
    price = mac_energy(model.max_bits, model)
    operations = 2 * workload.num_macs * (1 + math.sqrt(1 / model.mac_units)) + 2 * workload.num_activations
    spilled_bits = _spilled_bits(model.max_bits, workload, model)
    return price * (operations + workload.num_parameters + 2 * model.dram_factor * spilled_bits)


def _spilled_bits(bits: float, workload: Workload, model: EnergyModel) -> float:
    """Of parameters and activations, what does not fit into the device's SRAM."""
    return max(bits * (workload.num_parameters + workload.num_activations) - model.sram_bits, 0)
