"""Computation of a program's lanes: as many in a pass as fit in memory, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfl.core import ArgumentError
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory
from jaxfl.training.lanes import Strategy
from jaxfl.training.preflight import CHECKPOINT_SHARE, require_memory
from jaxfl.training.processes import least, on_all, several
from jaxfl.training.program import Compiled, Program


def by_platform(program: Program, lanes_at_once: int | None = None, lanes_a_pass: int | None = None) -> Strategy:
    """As many lanes in a pass as memory holds, one after the other on a CPU, else side by side.

    Args:
        program: nothing of it is compiled.
        lanes_at_once: lanes that a device computes side by side, in place of that rule.
        lanes_a_pass: where the lanes were divided before.
    """
    share = 1 + CHECKPOINT_SHARE if is_cpu() else 1.0
    total = len(program.lanes)
    each = num_bytes(program.structure) / (1 if is_cpu() else program.case.num_node_shares)  # on a device
    fitting = int(_free_bytes() / max(1.0, share * each))
    lanes = lanes_a_pass or -(-total // -(-total // min(total, max(1, fitting))))
    at_once = lanes_at_once or (1 if is_cpu() else lanes)
    return _strategy(program, lanes, min(at_once, lanes))


def as_recorded(program: Program, begun: Mapping[str, Any]) -> Strategy:
    """The strategy with the slots of a pass that has begun; another number of devices may share them.

    Raises:
        ArgumentError: processes have together a number of devices that does not divide the slots.
    """
    slots, shares = begun["slots"], program.case.num_node_shares
    devices = max(number for number in range(1, program.max_devices + 1) if slots % number == 0) if slots > 1 else 1
    if several() and devices < program.max_devices and shares == 1:
        found, remedy = f"the run has {slots} slots for {program.max_devices} devices", "Resume with as many devices."
        raise ArgumentError("devices", "must divide the slots of a run that is resumed", found, remedy)
    each = slots // devices
    at_once = max(number for number in range(1, min(begun["at_once"], each) + 1) if each % number == 0)
    return Strategy(slots, at_once, num_devices=devices, num_node_shares=shares)


def _strategy(program: Program, lanes: int, at_once: int) -> Strategy:
    """`lanes` in a pass, in balanced groups of at most `at_once`."""
    shares = program.case.num_node_shares
    if lanes == 1:
        return Strategy(num_slots=1, at_once=1, num_node_shares=shares)
    devices = program.max_devices if several() else min(program.max_devices, lanes)
    each = -(-lanes // devices)  # lanes of a device
    groups = -(-each // min(at_once, each))
    at_once = -(-each // groups)
    return Strategy(devices * groups * at_once, at_once, num_devices=devices, num_node_shares=shares)


def fitted(program: Program, compiled: Compiled, *, divided: bool = False) -> Compiled:
    """The program as compiled, or with fewer lanes at once, or fewer in a pass, where it would not fit.

    Args:
        program: the lanes.
        compiled: as the first choice says.
        divided: whether the lanes of a pass are given.

    Raises:
        ArgumentError: a single lane, or the lanes of a pass that are given, need more memory than is free.
    """
    while True:
        strategy, peak = compiled.strategy, compiled.peak
        free, lanes, at_once = _free_bytes(), min(strategy.num_slots, len(program.lanes)), strategy.at_once
        fits = peak.state + peak.working <= free
        if not fits and at_once > 1 and peak.state < free:
            at_once = min(at_once // 2, max(1, int(at_once * (free - peak.state) / peak.working)))
        elif not fits and lanes > 1 and not divided:
            lanes = -(-lanes // 2)
        else:
            on_all(require_memory)(program.label, peak, program.structure, program.case.task)
            return compiled
        compiled = program.compile(_strategy(program, lanes, at_once))


def _free_bytes() -> float:
    """Return the free bytes of the process that has the fewest."""
    return least(memory.available_bytes())
