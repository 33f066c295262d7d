"""How the lanes of a program are computed: what fits in memory, and of that what a short measurement says is faster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory
from jaxfl.training.lanes import Point, Strategy
from jaxfl.training.preflight import CHECKPOINT_SHARE, require_memory
from jaxfl.training.processes import least, of_first, several, together
from jaxfl.training.program import Compiled, Program

_GROUP = 8  # lanes, the alternative on a CPU to one after the other
_WORTH = 3.0  # times the seconds of compiling must be left to run before another strategy is tried,
_LEAST_SECONDS = 60.0  # and so much: what compiling took may have come from a cache
_GAIN = 0.8  # of the first's seconds, at most, for the other to be taken: strategies differ in the last bits


def likely_best(program: Program, recorded: Mapping[str, Any] | None = None) -> Strategy:
    """The first candidate: as many lanes in a pass as memory holds, one after the other on a CPU, else side by side.

    Args:
        program: nothing of it is compiled.
        recorded: what `describe` gave for the run that is resumed.
    """
    if recorded is not None:
        return _strategy(program, recorded["lanes_a_pass"], recorded["at_once"])
    share = 1 + CHECKPOINT_SHARE if is_cpu() else 1.0
    total = len(program.points)
    each = num_bytes(program.structure) / (1 if is_cpu() else program.variant.num_node_shares)  # on a device
    fitting = int(_free_bytes() / max(1.0, share * each))
    passes = -(-total // min(total, max(1, fitting)))
    lanes = -(-total // passes)
    return _strategy(program, lanes, 1 if is_cpu() else lanes)


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


def choose(
    program: Program, compiled: Compiled, compile_seconds: float, points: Sequence[Point]
) -> tuple[Compiled, dict[str, float]]:
    """The faster of two strategies, the second compiled and timed only where much is left to run.

    Args:
        program: whose lanes all have their work before them.
        compiled: the first candidate.
        compile_seconds: that it took.
        points: of the first pass.

    Returns:
        (what to run, strategy -> measured seconds a round of a pass). The states that were measured are thrown away.
    """
    strategy = compiled.strategy
    if strategy.num_slots == 1:
        return compiled, {}
    measured = {strategy.text: _seconds_a_round(program, compiled, points)}
    passes = -(-len(program.points) // strategy.num_slots)
    left_to_run = measured[strategy.text] * passes * max(point.variant.last_round for point in program.points)
    lanes = min(strategy.num_slots, len(program.points))
    other = _strategy(program, lanes, _GROUP if strategy.at_once == 1 else 1)
    if left_to_run < max(_LEAST_SECONDS, _WORTH * compile_seconds) or other == strategy:
        return compiled, measured
    alternative = program.compile(other)
    if alternative.peak.state + alternative.peak.working <= _free_bytes():
        measured[other.text] = _seconds_a_round(program, alternative, points)
        if measured[other.text] < _GAIN * measured[strategy.text]:
            return alternative, measured
    return compiled, measured


def _free_bytes() -> float:
    """Of the process that has the fewest."""
    return least(memory.available_bytes())


def _seconds_a_round(program: Program, compiled: Compiled, points: Sequence[Point]) -> float:
    """Of all lanes together, on a first state of their own; as process 0 measures them."""
    lanes, tables = program.lanes(points, compiled.strategy), program.tables(points, compiled.strategy)
    state, best = compiled.init(lanes, tables.data), float("inf")
    count = min(2, program.variant.rounds_per_call)
    for _ in range(2):  # the first call warms up
        began = time.perf_counter()
        state = jax.block_until_ready(compiled.rounds(lanes, state, tables.data, np.int32(count)))[0]
        best = min(best, (time.perf_counter() - began) / count)
    return of_first(lambda: best)


def describe(program: Program, strategy: Strategy, measured: Mapping[str, float]) -> dict[str, Any]:
    """What config.json keeps of a choice."""
    return {
        "lanes": [list(point.label) for point in program.points],
        "lanes_a_pass": min(strategy.num_slots, len(program.points)),
        "at_once": strategy.at_once,
        "strategy": strategy.text,
        "seconds_a_round": dict(measured),
    }
