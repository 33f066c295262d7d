"""Seconds of a round on a device: forward and backward pass, storing of activations, communication.

B is the batch and tau the local steps; p and a are the parameters and activations (per sample) of the trained part, of
4 bytes a number:

    forward        (frozen FLOPs * stored samples + trained FLOPs * tau B) / forward rate
    backward       tau (2 * trained FLOPs * B / backward rate + 4 (2 p + 2 a B) / backward bytes per second)
    I/O            per stored cut: fixed seconds + 4 * 2 * numbers * stored samples / I/O bytes per second
    communication  32 * whole parameters / downlink + 32 * trained parameters / uplink + latency * transfers
    memory         4 (2 p + 2 a B) bytes, as in EmbracingFL's capacity, must fit

EmbracingFL: every client runs the whole model forward, and only the trained part backward. In the multi-step forward
pass a client receives the frozen side in parts, and writes and reads the activations behind each ("cut"). The whole
model is received once in all, in one transfer more than there are cuts.

`ONEPLUS_9_PRO` is fitted to the strong row of Table 8 and to its I/O column. Other rows have the table's order but not
its size (experiments/results/embracing_fl/README.md): EmbracingFL's backward passes 0.89 and 0.77 of the paper's, width
reduction's 0.56 and 0.40, since narrow layers run less efficiently than counts say.

Reference: EmbracingFL (`jaxfl.embracing`), Algorithm 1, section 4.4, Table 8 (ResNet-20, batch 32, OnePlus 9 Pro, MNN).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxfl.algorithms import training_bytes
from jaxfl.channel import Counts, total
from jaxfl.core import ArgumentError, check

_BYTES = 4  # of a float32


class DeviceProfile(NamedTuple):
    """A device and its link, each number positive. Defaults: `ONEPLUS_9_PRO`; a test solves for the first five."""

    forward_flops_per_second: float = 1.2621366e9  # 2.0954 s
    # At the forward pass's rate the backward pass's operations take 4 of 419.6438 s. The rest is attributed to the
    # numbers in memory: only this puts the two methods' backward passes into the order of Table 8.
    backward_flops_per_second: float = 1.2621366e9
    backward_bytes_per_second: float = 139_027.0  # of parameters, activations and their gradients
    io_bytes_per_second: float = 52_428_800.0  # of activations written and read: 0.6784 s for one cut, 1.3168 s for two
    io_seconds: float = 0.5984  # of each cut, whatever its size
    downlink_bits_per_second: float = 100e6  # assumed, like the next number: the paper gives none
    uplink_bits_per_second: float = 20e6
    latency_seconds: float = 0.015  # of one transfer; section 4.4: 10 to 20 ms on edge devices
    memory_bytes: float = 8e9  # the phone is sold with 8 or 12 GB


ONEPLUS_9_PRO = DeviceProfile()


class ClientWork(NamedTuple):
    """Work of one class of clients; counts are per sample."""

    whole: Counts  # the model that runs forward
    trained: Counts  # the part that runs backward
    cuts: tuple[int, ...] = ()  # numbers stored behind each part of the multi-step forward pass


class RoundSeconds(NamedTuple):
    """Seconds of a round by cause; `sum` gives the whole."""

    forward: float
    backward: float
    io: float
    communication: float


def partial_work(layers: Mapping[str, Counts], cuts: tuple[str, ...] = ()) -> ClientWork:
    """The work of a client that trains a model, or its output side as in EmbracingFL; `round_seconds` has an example.

    Args:
        layers: counts of the whole model, from `jaxfl.channel.count`; for width reduction those of the narrow one.
        cuts: names of layers with parameters, input side first, before each of which the multi-step forward pass stores
            activations; the client trains from the last one on. Empty where it trains every layer, as in FedAvg.

    Raises:
        ArgumentError: cuts out of order, or without a layer with parameters behind the first.
    """
    names = [name for name, counts in layers.items() if counts.parameters][1:]
    if [name for name in names if name in cuts] != [*cuts]:
        requirement = f"must be some of {', '.join(names)}, in this order"
        raise ArgumentError("cuts", requirement, f"got {', '.join(cuts)}", "Name layers from the input side on.")
    part = total(layers, trained_from=cuts[-1] if cuts else None)
    return ClientWork(total(layers), part, tuple(layers[cut].inputs for cut in cuts))


def round_seconds(
    work: ClientWork,
    profile: DeviceProfile,
    *,
    batch_size: int,
    num_local_steps: int,
) -> RoundSeconds:
    """Seconds that one client needs for a round, by cause.

    The frozen part runs on the samples of the local steps; Algorithm 1 runs it on all of the client's samples.

    Args:
        work: from `partial_work`.
        profile: the device.
        batch_size: B, samples of a local step.
        num_local_steps: tau.

    Raises:
        ArgumentError: a count below 1, a number of the device that is not positive, or a model beyond its memory.

    Guarantees:
        - EmbracingFL's forward pass takes equally long in all classes, width reduction's less for narrower models.
        - EmbracingFL's backward pass and I/O are those of the trained part and of the cuts.
        - Table 8: EmbracingFL is slower forward and faster backward than width reduction at equal capacity.
        - a model that does not fit is refused.

    Examples:
        >>> from jaxfl.channel import count
        >>> from jaxfl.models import resnet20
        >>> weak = partial_work(count(resnet20(), (32, 32, 3)), ("block_2_1", "block_3_1"))
        >>> weak.trained.parameters, weak.cuts
        (206346, (16384, 8192))
        >>> seconds = round_seconds(weak, ONEPLUS_9_PRO, batch_size=32, num_local_steps=1)
        >>> [round(number, 2) for number in seconds[:3]]  # Table 8: 2.1, 85.45 and 1.32
        [2.1, 66.02, 1.32]
    """
    check.at_least(1, batch_size=batch_size, num_local_steps=num_local_steps)
    check.positive(**profile._asdict())
    step_samples = batch_size * num_local_steps
    num_bytes = training_bytes(work.trained, batch_size)
    if num_bytes > profile.memory_bytes:
        requirement = f"must hold the {check.bytes_text(num_bytes)} that training with batches of {batch_size} needs"
        remedy = "Train fewer layers or smaller batches on this device."
        raise ArgumentError("memory_bytes", requirement, f"got {check.bytes_text(profile.memory_bytes)}", remedy)
    whole_flops, trained_flops = (2 * part.macs + part.other_operations for part in (work.whole, work.trained))
    cut_bytes = 2 * _BYTES * sum(work.cuts)
    return RoundSeconds(
        forward=whole_flops * step_samples / profile.forward_flops_per_second,
        backward=2 * trained_flops * step_samples / profile.backward_flops_per_second
        + num_local_steps * num_bytes / profile.backward_bytes_per_second,
        io=len(work.cuts) * profile.io_seconds + cut_bytes * step_samples / profile.io_bytes_per_second,
        communication=8 * _BYTES * work.whole.parameters / profile.downlink_bits_per_second
        + 8 * _BYTES * work.trained.parameters / profile.uplink_bits_per_second
        + (len(work.cuts) + 2) * profile.latency_seconds,
    )
