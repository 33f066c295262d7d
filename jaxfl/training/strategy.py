"""Computation of a program's lanes: as many in a pass as fit in memory, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory
from jaxfl.training.lanes import Strategy
from jaxfl.training.preflight import CHECKPOINT_SHARE, require_memory
from jaxfl.training.processes import least, several, together
from jaxfl.training.program import Compiled, Program


def by_platform(
    program: Program, recorded: Mapping[str, Any] | None = None, lanes_at_once: int | None = None
) -> Strategy:
    """As many lanes in a pass as memory holds, one after the other on a CPU, else side by side.

    Args:
        program: nothing of it is compiled.
        recorded: what `describe` gave for the run that is resumed.
        lanes_at_once: lanes that a device computes side by side, in place of that rule.
    """
    if recorded is not None:
        return _strategy(program, recorded["lanes_a_pass"], recorded["at_once"])
    share = 1 + CHECKPOINT_SHARE if is_cpu() else 1.0
    total = len(program.points)
    each = num_bytes(program.structure) / (1 if is_cpu() else program.variant.num_node_shares)  # on a device
    fitting = int(_free_bytes() / max(1.0, share * each))
    passes = -(-total // min(total, max(1, fitting)))
    lanes = -(-total // passes)
    at_once = lanes_at_once or (1 if is_cpu() else lanes)
    return _strategy(program, lanes, min(at_once, lanes))


def _strategy(program: Program, lanes: int, at_once: int) -> Strategy:
    """`lanes` in a pass, in balanced groups of at most `at_once`."""
    shares = program.variant.num_node_shares
    if lanes == 1:
        return Strategy(num_slots=1, at_once=1, num_node_shares=shares)
    devices = program.max_devices if several() else min(program.max_devices, lanes)
    each = -(-lanes // devices)  # lanes of a device
    groups = -(-each // min(at_once, each))
    at_once = -(-each // groups)
    return Strategy(devices * groups * at_once, at_once, num_devices=devices, num_node_shares=shares)


def fitted(program: Program, compiled: Compiled) -> Compiled:
    """The program as compiled, or with fewer lanes at once, or fewer in a pass, where it would not fit.

    Raises:
        ArgumentError: a single lane needs more memory than is free.
    """
    while True:
        strategy, peak = compiled.strategy, compiled.peak
        free = _free_bytes()
        if peak.state + peak.working <= free or strategy.num_slots == 1:
            together(require_memory, program.label, peak, program.structure, program.variant.task)
            return compiled
        lanes, at_once = min(strategy.num_slots, len(program.points)), strategy.at_once
        if at_once > 1 and peak.state < free:
            at_once = min(at_once // 2, max(1, int(at_once * (free - peak.state) / peak.working)))
        else:
            lanes = -(-lanes // 2)
        compiled = program.compile(_strategy(program, lanes, at_once))


def _free_bytes() -> float:
    """Return the free bytes of the process that has the fewest."""
    return least(memory.available_bytes())


def describe(program: Program, strategy: Strategy) -> dict[str, Any]:
    """Describe a choice for config.json."""
    return {
        "lanes": [list(point.label) for point in program.points],
        "lanes_a_pass": min(strategy.num_slots, len(program.points)),
        "at_once": strategy.at_once,
        "strategy": strategy.text,
    }
