"""What DZOFL's sections III and V say about bits, seconds and joules, computed again.

The method sends one number of 16 bits a round in place of d, and needs more rounds for it. The paper's example compares
10,000 rounds of it with 100 rounds of gradients of 400,000 numbers. Three of its numbers do not follow from the others:

- 40,000 times fewer bits holds for 1,000 rounds; for the stated 10,000 it is 4,000 times.
- A round takes two forward passes, of f(x + gamma Phi) and of f(x - gamma Phi). Section III charges one. With two, the
  example's 41.25 s are 81.25 s, longer than the 64 s with gradients.
- The energies of section V charge the activations of a batch of 10, but the operations and the input of one sample.

References:
    E. Mhanna, M. Assaad, "Communication and Energy Efficient Federated Learning using Zero-Order Optimization
    Technique": section III-A (bits), III-B (seconds), equations (5) to (10) and section V (joules).
"""

from __future__ import annotations

from typing import NamedTuple

from jaxfl.channel.energy import DZOFL_CONSISTENT, DZOFL_PUBLISHED, EnergyModel, backward_energy, forward_energy
from jaxfl.channel.wireless import Radio, airtime_seconds
from jaxfl.core import check


class Claim(NamedTuple):
    """One number of the paper, and what it should be."""

    quantity: str
    unit: str
    paper: float  # as the paper has it, or as its charges give it
    consistent: float
    reason: str  # why they differ; empty where they agree


def bits_and_seconds(
    *,
    num_parameters: int = 400_000,
    num_rounds: int = 10_000,
    gradient_rounds: int = 100,
    bits: int = 16,
    pass_seconds: float = 4e-3,
    radio: Radio | None = None,
) -> tuple[Claim, ...]:
    """Section III: uploads of one device, with its defaults; without downlink, losses and computing of gradients.

    Args:
        num_parameters: d.
        num_rounds: T, of the zero-order method.
        gradient_rounds: T', of the method that sends gradients.
        bits: M, of a number.
        pass_seconds: of one forward pass; the paper's 16 million operations at 4 GHz.
        radio: rate and slot; the paper's where it is None.

    Returns:
        Bits with gradients and with numbers, their ratio, and seconds; `paper` always holds the numbers of its example.

    Raises:
        ArgumentError: a count below 1, or seconds that are not positive.

    Example:
        >>> for claim in bits_and_seconds():
        ...     print(f"{claim.quantity}: {claim.paper:g} | {claim.consistent:g}")
        bits, gradients: 6.4e+08 | 6.4e+08
        bits, one number a round: 16000 | 160000
        times fewer bits: 40000 | 4000
        upload, gradients: 64 | 64
        upload, one number a round: 1.25 | 1.25
        upload and computing, one number a round: 41.25 | 81.25
    """
    check.at_least(1, num_parameters=num_parameters, num_rounds=num_rounds, gradient_rounds=gradient_rounds, bits=bits)
    check.positive(pass_seconds=pass_seconds)
    radio = Radio() if radio is None else radio
    sent = [gradient_rounds * num_parameters * bits, num_rounds * bits]
    gradients = gradient_rounds * float(airtime_seconds(num_parameters * bits, 1.0, radio))
    numbers = num_rounds * float(airtime_seconds(bits, 1.0, radio))
    seconds = numbers + 2 * num_rounds * pass_seconds
    of_1000, two_passes = "the paper's number is that of 1,000 rounds", "a round has two forward passes"
    return (
        Claim("bits, gradients", "bit", 64e7, sent[0], ""),
        Claim("bits, one number a round", "bit", 16e3, sent[1], of_1000),
        Claim("times fewer bits", "", 40_000, sent[0] / sent[1], of_1000),
        Claim("upload, gradients", "s", 64, gradients, ""),
        Claim("upload, one number a round", "s", 1.25, numbers, ""),
        Claim("upload and computing, one number a round", "s", 41.25, seconds, two_passes),
    )


def joules(model: EnergyModel | None = None) -> tuple[Claim, ...]:
    """Section V: a forward and a backward pass of its network on a batch of 10, and what they mean for rounds.

    Args:
        model: the device; the paper's where it is None.

    Returns:
        Energies as the paper charges them and with all of the batch charged; and how many rounds of forward passes take
        the energy of one round of gradients, which is a forward and a backward pass, without that of sending.

    Raises:
        ArgumentError: a number of the device that is not positive.

    Example:
        >>> for claim in joules():
        ...     print(f"{claim.quantity}: {claim.paper:.4g} | {claim.consistent:.4g}")
        forward pass: 2.347e-05 | 0.0002014
        backward pass: 8.993e-05 | 0.0008811
        rounds for one with gradients: 4.832 | 2.688
    """
    model = EnergyModel() if model is None else model
    forward, backward = (
        [energy(workload, model) for workload in (DZOFL_PUBLISHED, DZOFL_CONSISTENT)]
        for energy in (lambda *given: sum(forward_energy(*given)), backward_energy)
    )
    batch = "the paper charges operations and input of one sample"
    rounds = [(ahead + back) / ahead for ahead, back in zip(forward, backward, strict=True)]
    passes = "and one forward pass of two; with its energies and two passes it is half of its number"
    return (
        Claim("forward pass", "J", forward[0], forward[1], batch),
        Claim("backward pass", "J", backward[0], backward[1], batch),
        Claim("rounds for one with gradients", "", rounds[0], rounds[1] / 2, f"{batch}, {passes}"),
    )
