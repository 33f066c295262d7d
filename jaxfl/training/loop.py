"""The training loop: cases and seeds become lanes, lanes that may share a program share it, passes run in turn.

A run killed at any moment and resumed ends with the same lines, results.csv (but for its seconds) and the same
parameters as one that was never interrupted (on the same machine and versions).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.core import ArgumentError, Array
from jaxfl.core.check import at_least, non_negative
from jaxfl.core.info import FatalCount
from jaxfl.privacy.statements import SECRET, SIMULATED
from jaxfl.training.case import Case, check_cases
from jaxfl.training.chunks import Diverged
from jaxfl.training.environment import describe_environment, warn_of_changes
from jaxfl.training.grouping import lanes_of, programs_of, recorded_settings
from jaxfl.training.json_files import jsonable
from jaxfl.training.lanes import Lane, Strategy
from jaxfl.training.lock import held
from jaxfl.training.lockstep import Lockstep, SaveTimes
from jaxfl.training.pass_directory import Label, PassDirectory
from jaxfl.training.preflight import peak_text, require_memory
from jaxfl.training.processes import any_process, is_first, on_all, on_first, several
from jaxfl.training.program import Compiled, Program
from jaxfl.training.progress import ProgressReport
from jaxfl.training.results import RESULTS, write_results
from jaxfl.training.run_directory import RunDirectory
from jaxfl.training.signals import Stop, Stopped
from jaxfl.training.strategy import as_recorded, by_platform, fitted
from jaxfl.training.summary import every_node, summarize_run

Records = dict[Label, dict[str, Any]]


def train(
    cases: Mapping[str, Case],
    *,
    run: RunDirectory,
    checkpoint_every: int = 10,
    checkpoint_minutes: float | None = 10.0,
    keep_checkpoints: int = 2,
    quiet: bool = False,
    key: Array | None = None,
    stop: Stop | None = None,
    lanes_at_once: int | None = None,
    only: int | None = None,
) -> dict[str, Any]:
    """Train every case with every seed and leave a complete run directory behind.

    All programs are compiled before the first is run, so that one that needs more memory than is free is refused while
    nothing is lost; nothing is compiled twice.

    Args:
        cases: name -> what to train. Those that differ in numbers and seeds alone share one compiled program and run
            in lockstep.
        run: from `open_run`; a resumed run continues from its newest checkpoints and skips what has ended.
        checkpoint_every: evaluations between checkpoints; the last state is always saved.
        checkpoint_minutes: minutes after which the end of any chunk brings a checkpoint, too; 0 takes every chunk, None
            leaves it to the evaluations. They decide when states are saved, never what is computed.
        keep_checkpoints: how many of the newest stay.
        quiet: show no progress.
        key: typed key, (), that stays secret: every seed's base key is made of it. Default: seed s has the base key
            `jax.random.key(s)`, which whoever reads the seed can make; statements of privacy are then marked as those
            of a simulation. Batches and noise also depend on `Case.identity`, initial parameters do not.
        stop: through which another thread, or a signal, may ask to stop: see `stop_at_sigterm`. No handler is installed
            here.
        lanes_at_once: lanes of one program that a device computes side by side. Default: 1 on a CPU, where a lane's
            numbers are then the same bits as alone, and elsewhere as many as fit. A resumed run keeps what it had.
        only: number of a pass of `divide_run`: nothing but this is trained, in `run` from `read_run`. Processes that
            share no memory may train one each at the same time; a call without it then makes the tables and the
            summary.

    Returns:
        The content of summary.json; empty where `only` one pass is trained.

    Raises:
        ArgumentError: an argument cannot be used, or differs from the run that is resumed, or a case does not fit
            in memory; another process is at work in the directory; its files were altered; several processes train
            (docs/devices.md) and a case has no placement. A new run that is refused
            before its first round leaves nothing behind, and one that is resumed stays as it is.
        Diverged: of a single case and seed a measurement or metric is not finite. Lines written so far stay, the
            summary says "diverged". Of several, and in a pass by itself, that one ends, its status says so, and the
            others go on.
        FatalCount: the rounds were not those that the algorithm assumes; "stopped" in place of "diverged".
        Stopped: `stop` asked for it; the chunk was finished and the state saved.
        OSError: a file cannot be read or written, or another program changed a metrics.jsonl while the run went on.

    Guarantees:
        - resumed equals uninterrupted, bit for bit.
        - rounds are compiled once per program.
        - what has ended is skipped on resume.
        - a checkpoint between two evaluations changes no line.
        - no case runs more rounds than max_rounds.
        - a case that does not fit is refused before any case is trained.
        - a lane that diverges leaves the others' bytes as they are.
        - counts after the last line of a lane that diverges are counted.
        - cases have independent batches and noise, and common initial parameters.
    """
    at_least(1, checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints)
    if lanes_at_once is not None:
        at_least(1, lanes_at_once=lanes_at_once)
    if checkpoint_minutes is not None:
        non_negative(checkpoint_minutes=checkpoint_minutes)
    if only is not None and only not in range(len(run.passes)):
        found, remedy = f"got {only}, and the run has {len(run.passes)}", "Divide the run by divide_run first."
        raise ArgumentError("only", "must be the number of a pass of the run", found, remedy)
    check_cases(cases)
    _refuse_alone(cases)
    lanes = lanes_of(cases, key)
    ended: Records = {}
    conclude = partial(_conclude, run, lanes, cases, key)
    alone, stop = len(lanes) == 1 and only is None, Stop() if stop is None else stop
    quiet = quiet or not is_first()
    with (
        held(run.path if only is None else run.passes[only].path),
        ProgressReport(sum(lane.case.last_round for lane in lanes), quiet=quiet) as progress,
    ):
        stop.undo_until_heeded(run.withdraw)
        try:
            passes = _prepare(lanes, run, progress, lanes_at_once, only)
        except ArgumentError:
            run.withdraw()
            raise
        if only is None:
            run.drop_summary()
        saves = SaveTimes(checkpoint_every, checkpoint_minutes, keep_checkpoints)
        for one in passes:
            num_rounds = sum(lane.case.last_round for lane in one.lanes)
            if one.compiled is None:
                ended |= one.ended
                progress.skip(num_rounds)
                continue
            name, seed = one.lanes[0].label
            progress.begin(f"{name}, seed {seed}" if len(one.lanes) == 1 else f"{len(one.lanes)} runs", num_rounds)
            with held(one.directory.path) if only is None else contextlib.nullcontext():
                _note_begin(one)
                lockstep = Lockstep(
                    one.program,
                    one.compiled,
                    one.lanes,
                    directory=one.directory,
                    saves=saves,
                    stop=stop,
                    compile_seconds=one.seconds,
                    progress=progress,
                    raises=alone,
                )
                try:
                    with stop.heeded():
                        ended |= lockstep.run()
                except (Diverged, FatalCount) as error:
                    status = "diverged" if isinstance(error, Diverged) else "stopped"
                    end = {"until": (error.rounds or (0, 0))[1], "status": status, "reason": str(error)}
                    conclude(status, {lanes[0].label: {**_UNRECORDED, **end, **lockstep.released()}})
                    raise
            progress.end()
            if any_process(stop.requested):
                raise Stopped(max(ended[lane.label]["until"] for lane in one.lanes))
        if only is not None:
            return {}
        spent = any(record["status"] == "budget_spent" for record in ended.values())
        return conclude("budget_spent" if spent else "finished", ended)


def divide_run(cases: Mapping[str, Case], at_once: int, *, run: RunDirectory, key: Array | None = None) -> int:
    """Divide the lanes of a run into passes of which about `at_once` can be trained at any time, by `train(only=)`.

    Args:
        cases: as `train` takes them.
        at_once: passes that can run at the same time: jobs, or devices; at least 1.
        run: from `open_run`. One that is divided already stays as it is.
        key: as `train` takes it.

    Returns:
        The number of passes, none of them empty. No pass has lanes of two programs. A program is shared out evenly
        where there are fewer programs than `at_once`. One whose lanes end in different rounds, or have budgets, stays
        whole: an end divides the chunks of all lanes.

    Raises:
        ArgumentError: cases that cannot be trained, or that differ from those of a run that is resumed.

    Guarantees:
        - every lane is in one pass.
        - a program whose lanes may end apart stays whole.
    """
    at_least(1, at_once=at_once)
    check_cases(cases)
    lanes = lanes_of(cases, key)
    programs = programs_of(lanes)
    run.record_training(recorded_settings(lanes))
    if not run.passes:
        shares, divided = -(-at_once // len(programs)), []
        for program in programs:
            labels = [lane.label for lane in program.lanes]
            count = min(shares, len(labels)) if _end_together(program) else 1
            divided += [[labels[index] for index in part] for part in np.array_split(np.arange(len(labels)), count)]
        run.record_passes(divided)
    return len(run.passes)


def _end_together(program: Program) -> bool:
    """Whether no lane can end before another but by diverging."""
    cases: Sequence[Case] = [lane.case for lane in program.lanes]
    return len({case.last_round for case in cases}) == 1 and not any(v.budgets for v in cases)


def _conclude(
    run: RunDirectory,
    lanes: Sequence[Lane],
    cases: Mapping[str, Case],
    key: Array | None,
    status: str,
    records: Records,
) -> dict[str, Any]:
    """Write tables and summary of what the passes hold; returns the summary."""
    lines = run.read_metrics()
    facts = {
        name: {
            "seeds": case.seeds,
            "settings": case.settings,
            "privacy": case.privacy and cache(partial(_with_key, case.privacy, key)),
            "released": case.released,
        }
        for name, case in cases.items()
    }
    in_order = {lane.label: records[lane.label] for lane in lanes if lane.label in records}
    content = summarize_run(lines, in_order, facts, config=run.config, status=status)
    names = {lane.name: lane.node_names for lane in reversed(lanes)}  # of the first seed
    run.write_privacy(every_node(content["cases"], names))
    run.write_summary(content)
    settings = {name: case.settings for name, case in cases.items()}
    privacy = {name: fact["privacy"] for name, fact in facts.items() if fact["privacy"]}
    on_first(write_results)(run.path / RESULTS, in_order, lines, settings, privacy)
    return jsonable(content, "summary")


def _refuse_alone(cases: Mapping[str, Case]) -> None:
    """Refuse several processes where each would train everything by itself."""
    for name, case in cases.items():
        if several() and case.placement is None:
            requirement, found = "must say what several processes share", f"{name} has none"
            remedy = f"Pass Placement({jax.device_count()}), or Placement({jax.device_count()}, 'lanes')."
            raise ArgumentError("placement", requirement, found, remedy)


def _with_key(
    privacy: Callable[..., Sequence[Mapping[str, Any]]], key: Array | None, num_rounds: int, **totals: int
) -> list[dict[str, Any]]:
    """The statements of a number of rounds and of totals, with what they rest on as to the key."""
    origin, given = SIMULATED if key is None else SECRET, privacy(num_rounds, **totals)
    return [{**stated, "assumptions": (*stated.get("assumptions", ()), origin)} for stated in given]


class _Pass(NamedTuple):
    """A pass that is to run, or has ended."""

    directory: PassDirectory
    program: Program
    lanes: tuple[Lane, ...]
    ended: Records
    strategy: Strategy | None = None  # None where all lanes have ended
    is_begun: bool = False  # its strategy stays
    compiled: Compiled | None = None
    seconds: float = 0.0  # that compiling took


_UNRECORDED = {"round": None, "seconds": {"compile": 0.0, "run": 0.0, "timed_rounds": 0, "rounds_a_call": 0}}


def _prepare(
    lanes: Sequence[Lane], run: RunDirectory, progress: ProgressReport, lanes_at_once: int | None, only: int | None
) -> list[_Pass]:
    """Say what is wrong with any program before one of them runs, and compile those with something left to run."""
    programs = programs_of(lanes)
    run.record_training(recorded_settings(lanes))
    passes = _recorded(run, programs, lanes_at_once, only)
    choices = [(one.program, one.strategy, one.is_begun) for one in passes if one.strategy is not None]
    if not run.passes:
        choices = [(program, by_platform(program, lanes_at_once), False) for program in programs]
    began, compiled, peaks = time.perf_counter(), {}, {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for program, strategy, _ in choices:
            if (program, strategy) not in compiled:
                progress.begin(program.label, 0)
                compiled[program, strategy] = program.begin_compiling(strategy, pool)
        compiled = {choice: finish() for choice, finish in compiled.items()}
    for program, strategy, is_begun in dict.fromkeys(choices):
        fit = compiled[program, strategy]
        if is_begun:  # other slots would not fit its checkpoints, and lanes side by side may have other last bits
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
) -> list[_Pass]:
    """The passes of a run that has been divided, each with how it ended, or how it is computed."""
    directories, of_label = run.passes, {lane.label: program for program in programs for lane in program.lanes}
    whole = sorted(label for one in directories for label in one.lanes) == sorted(of_label)
    if directories and not (whole and all(len({of_label[label] for label in one.lanes}) == 1 for one in directories)):
        found, remedy = "its training.passes do not", "Restore the file, or start again with another out."
        raise ArgumentError("out", f"{run.path}/config.json must hold each lane once", found, remedy)
    passes = []
    for directory in directories if only is None else [directories[only]]:
        program, ended, begun = of_label[directory.lanes[0]], directory.end(), directory.begun()
        lanes = tuple(lane for lane in program.lanes if lane.label in directory.lanes)
        strategy = None
        if ended is None and begun is not None:
            strategy = as_recorded(program, begun)
            _warn(begun, directory)
        elif ended is None:
            same = [one for one in directories if of_label[one.lanes[0]] is program]
            most = max(len(one.lanes) for one in (same if only is None else [directory]))
            strategy = by_platform(program, lanes_at_once, most)
        passes.append(_Pass(directory, program, lanes, ended or {}, strategy, begun is not None))
    return passes


@on_first
def _warn(begun: Mapping[str, Any], directory: PassDirectory) -> None:
    warn_of_changes(begun["environment"], describe_environment(), directory.path)


def _note_begin(one: _Pass) -> None:
    """Record how the lanes of a pass are computed; of one that is resumed nothing changes."""
    assert one.compiled is not None
    if not one.is_begun:
        strategy = one.compiled.strategy
        choice = {"slots": strategy.num_slots, "at_once": strategy.at_once, "strategy": strategy.text}
        one.directory.begin({**choice, "environment": describe_environment()})


def _announce(program: Program, passes: Sequence[_Pass], progress: ProgressReport) -> None:
    """Say how a program's lanes are computed."""
    if len(program.lanes) > 1:
        text = next(one.compiled.strategy.text for one in passes if one.compiled)
        text = f"{len(program.lanes)} runs of {program.label} share one program, computed {text}"
        progress.announce(text + (f", in {len(passes)} passes" if len(passes) > 1 else ""))
