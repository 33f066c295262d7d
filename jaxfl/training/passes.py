"""Passes of a run. A pass is lanes (cases with one seed each) that share a program and run together."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.channel import Costs, Ledger
from jaxfl.core import ArgumentError, Array
from jaxfl.core.check import at_least
from jaxfl.core.keys import digest, keyed
from jaxfl.core.lines import Label
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory
from jaxfl.training.case import Case, check_cases
from jaxfl.training.clock import Clock
from jaxfl.training.environment import describe_environment, warn_of_changes
from jaxfl.training.lanes import Lane, Strategy, Uploads
from jaxfl.training.pass_directory import PassDirectory
from jaxfl.training.peak_memory import CHECKPOINT_SHARE, peak_text, require_memory
from jaxfl.training.processes import is_multiprocess, least, on_all, on_first
from jaxfl.training.program import Compiled, Program
from jaxfl.training.progress import ProgressReport
from jaxfl.training.run_directory import RunDirectory

Records = dict[Label, dict[str, Any]]


class Pass(NamedTuple):
    """A pass that is to run, or has ended."""

    directory: PassDirectory
    program: Program
    lanes: tuple[Lane, ...]
    ended: Records
    strategy: Strategy | None = None  # None: all lanes have ended
    is_begun: bool = False  # its strategy stays
    compiled: Compiled | None = None
    seconds: float = 0.0  # of compiling


def divide_run(cases: Mapping[str, Case], at_once: int, *, run: RunDirectory, key: Array | None = None) -> int:
    """Divide the lanes of a run into passes of which about `at_once` can be trained at any time, by `train(only=)`.

    Args:
        cases: as `train` takes them.
        at_once: passes that can run at the same time: jobs, or devices; at least 1.
        run: from `open_run`. A run that is divided already stays as it is.
        key: as `train` takes it.

    Returns:
        The number of passes, none of them empty. No pass has lanes of two programs. With fewer programs than `at_once`,
        a program's lanes are divided evenly over several passes. A program whose lanes end in different rounds, or have
        budgets, stays in one pass: the end of a lane cuts the chunks of all lanes in its pass.

    Raises:
        ArgumentError: cases that cannot be trained, or that differ from those of a run that is resumed.

    Guarantees:
        - every lane is in one pass.
        - a program whose lanes may end in different rounds stays in one pass.
    """
    at_least(1, at_once=at_once)
    check_cases(cases)
    lanes = lanes_of(cases, key)
    programs = programs_of(lanes)
    run.record_training(*recorded_settings(lanes))
    if not run.passes:
        shares, divided = -(-at_once // len(programs)), []
        for program in programs:
            labels = [lane.label for lane in program.lanes]
            count = min(shares, len(labels)) if _end_together(program) else 1
            divided += [[labels[index] for index in part] for part in np.array_split(np.arange(len(labels)), count)]
        run.record_passes(divided)
    return len(run.passes)


def _end_together(program: Program) -> bool:
    """True if no lane can end before another but by diverging."""
    cases: Sequence[Case] = [lane.case for lane in program.lanes]
    return len({case.last_round for case in cases}) == 1 and not any(v.budgets for v in cases)


def prepare(
    lanes: Sequence[Lane],
    run: RunDirectory,
    progress: ProgressReport,
    lanes_at_once: int | None,
    only: int | None,
    clock: Clock,
) -> list[Pass]:
    """Raise the errors of all programs before one of them runs, and compile those with rounds left to run."""
    programs = programs_of(lanes)
    run.record_training(*recorded_settings(lanes))
    passes = _recorded(run, programs, lanes_at_once, only)
    choices = [(one.program, one.strategy, one.is_begun) for one in passes if one.strategy is not None]
    if not run.passes:
        choices = [(program, by_platform(program, lanes_at_once), False) for program in programs]
    began, compiled, peaks = time.perf_counter(), {}, {}
    clock.enter("tracing")  # and compiling, beside it
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for program, strategy, _ in choices:
            if (program, strategy) not in compiled:
                progress.begin(program.label, 0)
                compiled[program, strategy] = program.begin_compiling(strategy, pool)
        clock.enter("compiling")  # what is left of it
        compiled = {choice: finish() for choice, finish in compiled.items()}
    for program, strategy, is_begun in dict.fromkeys(choices):
        fit = compiled[program, strategy]
        if is_begun:  # other slots would not fit its checkpoints; another grouping may change last bits
            on_all(require_memory)(program.label, fit.peak, program.structure, program.case.task)
        else:
            fit = compiled[program, strategy] = fitted(program, fit, divided=bool(run.passes))
        peaks[program.label] = fit.peak
    if peaks:
        progress.announce(peak_text(peaks))
    if not run.passes:
        of_program = {program: compiled[program, strategy] for program, strategy, _ in choices}
        run.record_passes([labels for program in programs for labels in _divided(program, of_program[program])])
        passes = _recorded(run, programs, None, None)
        passes = [one._replace(compiled=of_program[one.program]) for one in passes]
    else:
        passes = [one._replace(compiled=compiled.get((one.program, one.strategy))) for one in passes]
    seconds = (time.perf_counter() - began) / max(1, len(compiled))
    firsts = {id(one.compiled): one.directory for one in reversed(passes)}
    for program in dict.fromkeys(one.program for one in passes if one.compiled):
        _announce(program, [one for one in passes if one.program is program], progress)
    return [one._replace(seconds=seconds) if firsts[id(one.compiled)] is one.directory else one for one in passes]


def _divided(program: Program, compiled: Compiled) -> list[list[Label]]:
    """The lanes of each pass of a program."""
    labels, num_slots = [lane.label for lane in program.lanes], compiled.strategy.num_slots
    return [labels[first : first + num_slots] for first in range(0, len(labels), num_slots)]


def _recorded(
    run: RunDirectory, programs: Sequence[Program], lanes_at_once: int | None, only: int | None
) -> list[Pass]:
    """The passes of a run that has been divided, each with how it ended, or how it is computed."""
    directories, of_label = run.passes, {lane.label: program for program in programs for lane in program.lanes}
    whole = sorted(label for one in directories for label in one.lanes) == sorted(of_label)
    if directories and not (whole and all(len({of_label[label] for label in one.lanes}) == 1 for one in directories)):
        found, remedy = "its training.passes does not", "Restore the file, or start again with another out."
        raise ArgumentError("out", f"{run.path}/config.json must hold each lane once", found, remedy)
    passes = []
    for directory in directories if only is None else [directories[only]]:
        program, ended, begun = of_label[directory.lanes[0]], directory.end(), directory.begun()
        own = {*directory.lanes}
        lanes = tuple(lane for lane in program.lanes if lane.label in own)
        strategy = None
        if ended is None and begun is not None:
            strategy = as_recorded(program, begun)
            on_first(warn_of_changes)(begun["environment"], describe_environment(), directory.path)
        elif ended is None:
            same = [one for one in directories if of_label[one.lanes[0]] is program]
            most = max(len(one.lanes) for one in (same if only is None else [directory]))
            strategy = by_platform(program, lanes_at_once, most)
        passes.append(Pass(directory, program, lanes, ended or {}, strategy, begun is not None))
    return passes


def _announce(program: Program, passes: Sequence[Pass], progress: ProgressReport) -> None:
    """Say how a program's lanes are computed."""
    if len(program.lanes) > 1:
        text = next(one.compiled.strategy.text for one in passes if one.compiled)
        text = f"{len(program.lanes)} runs of {program.label} share one program, computed {text}"
        progress.announce(text + (f", in {len(passes)} passes" if len(passes) > 1 else ""))


def lanes_of(cases: Mapping[str, Case], key: Array | None = None) -> list[Lane]:
    """Every case with each of its seeds, in the order of results.csv."""
    digests: dict[tuple[int, int], tuple[str, tuple[str, ...] | None, tuple[int, ...]]] = {}
    hashed: dict[tuple[int, ...], Any] = {}  # of arrays that seeds share
    for case in cases.values():
        for seed in case.seeds:
            if (id(case.data), seed) not in digests:
                data = case.data(seed)
                digests[id(case.data), seed] = digest(data, hashed), data.names, tuple(np.asarray(data.sizes).tolist())
    largest = {what: max(sizes) for what, (_, _, sizes) in digests.items()}
    widths = {name: max(largest[id(case.data), seed] for seed in case.seeds) for name, case in cases.items()}
    return [
        Lane(name, case, seed, *digests[id(case.data), seed], key, widths[name])
        for name, case in cases.items()
        for seed in case.seeds
    ]


def programs_of(lanes: Sequence[Lane]) -> list[Program]:
    """The programs that lanes of one run make, checked on the host; nothing is compiled.

    Lanes whose cases differ in numbers only, and whose data have the same shapes, share one.
    """
    uploads = Uploads()
    groups: dict[Any, list[Lane]] = {}
    for lane in lanes:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(uploads.of(lane)))
        groups.setdefault((_identity(lane.case), shapes), []).append(lane)
    programs = [Program(group, uploads) for group in groups.values()]
    for program in programs:
        program.check()
    return programs


def recorded_settings(lanes: Sequence[Lane]) -> tuple[dict[str, Any], dict[str, str]]:
    """Collect the settings of the training loop for config.json, which a resumed run must have; words for digests."""
    tests = {id(lane.case.test): lane.case.test for lane in lanes}
    of_tests = {number: digest(test) for number, test in tests.items()}
    settings: dict[str, Any] = {}
    words: dict[str, str] = {}
    for name, case, seed, data_digest, _, _, secret, _ in lanes:
        if name not in settings:
            settings[name] = {**_settings(case), "data": {"test": keyed(of_tests[id(case.test)], secret)}}
            words[f"cases.{name}.data.test"] = f"the test data of case {name}"
        settings[name]["data"][str(seed)] = keyed(data_digest, secret)
        words[f"cases.{name}.data.{seed}"] = f"the training data of case {name}, seed {seed},"
    return {"cases": settings}, words


def _identity(case: Case) -> Any:
    """Return the objects and settings that cases of one program have in common."""
    objects = (case.algorithm, case.data, case.task, case.test)
    rounds = (case.num_rounds, case.evaluate_every, case.chunk_rounds, case.placement)
    shapes = tuple(sorted((name, np.shape(value)) for name, value in case.numbers.items()))
    return tuple(map(id, objects)), rounds, tuple(case.measures.items()), shapes


def _settings(case: Case) -> dict[str, Any]:
    """Collect the settings of a case for config.json, which a resumed run must have, too."""
    return {
        "seeds": case.seeds,
        "num_rounds": case.num_rounds,
        "max_rounds": case.max_rounds,
        "evaluate_every": case.evaluate_every,
        "chunk_rounds": case.rounds_per_call,
        "numbers": dict(case.numbers),
        "budgets": dict(case.budgets),
        **({"released": case.released} if case.released else {}),
        **({"ledger": _ledger_facts(case.ledger)} if case.ledger is not None else {}),
        "measures": list(case.measures),
        "test": list(case.test.counts.shape),
        "node_loop": case.task.node_loop,
    }


def _ledger_facts(ledger: Ledger | Costs) -> dict[str, Any]:
    """Numbers of a ledger; for numbers of each node a checksum, because there may be many."""

    def fact(value):
        if isinstance(value, Costs):
            return _ledger_facts(value)
        return float(value) if np.ndim(value) == 0 else zlib.crc32(np.asarray(value, np.float64).tobytes())

    return {name: fact(value) for name, value in ledger._asdict().items()}


def by_platform(program: Program, lanes_at_once: int | None = None, lanes_a_pass: int | None = None) -> Strategy:
    """Put as many lanes in a pass as memory holds, or `lanes_a_pass`; on a CPU one after the other, else side by side.

    `lanes_at_once`, the lanes that a device computes side by side, overrides the last rule.
    """
    share = 1 + CHECKPOINT_SHARE if is_cpu() else 1.0
    total = len(program.lanes)
    each = num_bytes(program.structure) / (1 if is_cpu() else program.case.num_node_shares)  # on a device
    fitting = int(_free_bytes() / max(1.0, share * each))
    lanes = lanes_a_pass or -(-total // -(-total // min(total, max(1, fitting))))
    at_once = lanes_at_once or (1 if is_cpu() else lanes)
    return _strategy(program, lanes, min(at_once, lanes))


def as_recorded(program: Program, begun: Mapping[str, Any]) -> Strategy:
    """The strategy with the slots (places for lanes) of a pass that has begun; other numbers of devices may share them.

    Raises:
        ArgumentError: the devices of all processes do not divide the slots.
    """
    slots, shares = begun["slots"], program.case.num_node_shares
    devices = max(number for number in range(1, program.max_devices + 1) if slots % number == 0) if slots > 1 else 1
    if is_multiprocess() and devices < program.max_devices and shares == 1:
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
    devices = program.max_devices if is_multiprocess() else min(program.max_devices, lanes)
    each = -(-lanes // devices)  # lanes of a device
    groups = -(-each // min(at_once, each))
    at_once = -(-each // groups)
    return Strategy(devices * groups * at_once, at_once, num_devices=devices, num_node_shares=shares)


def fitted(program: Program, compiled: Compiled, *, divided: bool = False) -> Compiled:
    """The program as compiled, or compiled with fewer lanes at once or in a pass, if it would not fit in memory.

    ArgumentError where a single lane, or the lanes of a pass that was divided before, need more memory than is free.
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
    """Return the smallest number of free bytes of any process."""
    return least(memory.available_bytes())
