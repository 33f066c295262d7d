"""The training loop: variants and seeds become lanes, lanes that may share a program share it, programs run in turn.

A run killed at any moment and resumed ends with the same metrics.jsonl, results.csv (but for its seconds) and the same
parameters as one that was never interrupted (on the same machine and versions).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import jax

from jaxfl.core import ArgumentError, Array
from jaxfl.core.check import at_least, non_negative
from jaxfl.core.info import FatalCount
from jaxfl.privacy.statements import SECRET, SIMULATED
from jaxfl.training.chunks import Diverged
from jaxfl.training.grouping import points_of, programs_of, recorded_settings
from jaxfl.training.json_files import jsonable
from jaxfl.training.lanes import Point
from jaxfl.training.preflight import peak_text, require_memory
from jaxfl.training.processes import is_first, of_first, several, together
from jaxfl.training.program import Compiled, Program
from jaxfl.training.progress import ProgressReport
from jaxfl.training.records import RunDirectory
from jaxfl.training.results import RESULTS, write_results
from jaxfl.training.save_times import SaveTimes
from jaxfl.training.signals import Stop, Stopped
from jaxfl.training.strategy import by_platform, describe, fitted
from jaxfl.training.summary import every_node, summarize_run
from jaxfl.training.sweep import Lockstep
from jaxfl.training.variant import Variant, check_variants

Records = dict[tuple[str, int], dict[str, Any]]


def train(
    variants: Mapping[str, Variant],
    *,
    run: RunDirectory,
    checkpoint_every: int = 10,
    checkpoint_minutes: float | None = 10.0,
    keep_checkpoints: int = 2,
    quiet: bool = False,
    key: Array | None = None,
    stop: Stop | None = None,
    lanes_at_once: int | None = None,
) -> dict[str, Any]:
    """Train every variant with every seed and leave a complete run directory behind.

    All programs are compiled before the first is run, so that one that needs more memory than is free is refused while
    nothing is lost; nothing is compiled twice.

    Args:
        variants: name -> what to train. Those that differ in numbers and seeds alone share one compiled program and run
            in lockstep.
        run: from `open_run`; a resumed run continues from its newest checkpoints and skips what has ended.
        checkpoint_every: evaluations between checkpoints; the last state is always saved.
        checkpoint_minutes: minutes after which the end of any chunk brings a checkpoint, too; 0 takes every chunk, None
            leaves it to the evaluations. They decide when states are saved, never what is computed.
        keep_checkpoints: how many of the newest stay.
        quiet: show no progress.
        key: typed key, (), that stays secret: every seed's base key is made of it. Default: seed s has the base key
            `jax.random.key(s)`, which whoever reads the seed can make; statements of privacy are then marked as those
            of a simulation. Batches and noise also depend on `Variant.identity`, initial parameters do not.
        stop: through which another thread, or a signal, may ask to stop: see `stop_at_sigterm`. No handler is installed
            here.
        lanes_at_once: lanes of one program that a device computes side by side. Default: 1 on a CPU, where a lane's
            numbers are then the same bits as alone, and elsewhere as many as fit. A resumed run keeps what it had.

    Returns:
        The content of summary.json.

    Raises:
        ArgumentError: an argument cannot be used, or differs from the run that is resumed, or a variant does not fit
            in memory; another process is at work in the directory; its files were altered; several processes train
            (docs/devices.md) and a variant has no placement. A new run that is refused
            before its first round leaves nothing behind, and one that is resumed stays as it is.
        Diverged: of a single variant and seed a measurement or metric is not finite. Lines written so far stay, the
            summary says "diverged". Of several, that one ends, its status says so, and the others go on.
        FatalCount: the rounds were not those that the algorithm assumes; "stopped" in place of "diverged".
        Stopped: `stop` asked for it; the chunk was finished and the state saved.
        OSError: a file cannot be read or written, or another program changed metrics.jsonl while the run went on.

    Guarantees:
        - resumed equals uninterrupted, bit for bit.
        - rounds are compiled once per program.
        - what has ended is skipped on resume.
        - a checkpoint between two evaluations changes no line.
        - no variant runs more rounds than max_rounds.
        - a variant that does not fit is refused before any variant is trained.
        - a lane that diverges leaves the others' bytes as they are.
        - counts after the last line of a lane that diverges are counted.
        - variants have independent batches and noise, and common initial parameters.
    """
    at_least(1, checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints)
    if lanes_at_once is not None:
        at_least(1, lanes_at_once=lanes_at_once)
    if checkpoint_minutes is not None:
        non_negative(checkpoint_minutes=checkpoint_minutes)
    check_variants(variants)
    _refuse_alone(variants)
    points = points_of(variants, key)
    facts = {
        name: {
            "seeds": variant.seeds,
            "settings": variant.settings,
            "privacy": variant.privacy and cache(partial(_with_key, variant.privacy, key)),
            "released": variant.released,
        }
        for name, variant in variants.items()
    }
    ended: Records = {}

    def conclude(status: str, records: Records) -> dict[str, Any]:
        lines = run.read_metrics()
        in_order = {point.label: records[point.label] for point in points if point.label in records}
        content = summarize_run(lines, in_order, facts, config=run.config, status=status)
        names = {point.name: point.node_names for point in reversed(points)}  # of the first seed
        run.write_privacy(every_node(content["variants"], names))
        run.write_summary(content)
        settings = {name: variant.settings for name, variant in variants.items()}
        privacy = {name: fact["privacy"] for name, fact in facts.items() if fact["privacy"]}
        of_first(lambda: write_results(run.path / RESULTS, in_order, lines, settings, privacy))
        return jsonable(content, "summary")

    alone, stop = len(points) == 1 and not run.is_part, Stop() if stop is None else stop
    total, quiet = sum(point.variant.last_round for point in points), quiet or not is_first()
    with run.held(), ProgressReport(total, quiet=quiet) as progress:
        stop.undo_until_heeded(run.withdraw)
        try:
            jobs = _prepare(points, run, progress, lanes_at_once)
        except ArgumentError:
            run.withdraw()
            raise
        run.drop_summary()
        done = run.finished(point.label for point in points)
        times = SaveTimes(checkpoint_minutes, stop)
        for index, job in enumerate(jobs):
            if job.compiled:
                _announce(index, job, run, progress)
            for number, first in enumerate(range(0, len(job.program.points), job.lanes_a_pass)):
                lanes = job.program.points[first : first + job.lanes_a_pass]
                if all(point.label in done for point in lanes):
                    ended |= {point.label: done[point.label] for point in lanes}
                    progress.skip(sum(point.variant.last_round for point in lanes))
                    continue
                assert job.compiled is not None
                label = f"{lanes[0].name}, seed {lanes[0].seed}" if len(lanes) == 1 else f"{len(lanes)} runs"
                progress.begin(label, sum(point.variant.last_round for point in lanes))
                together = job.compiled.strategy.num_slots > 1
                lockstep = Lockstep(
                    job.program,
                    job.compiled,
                    lanes,
                    run=run,
                    directory=run.pass_directory(index, number) if together else run.lane_directory(*lanes[0].label),
                    checkpoint_every=checkpoint_every,
                    keep_checkpoints=keep_checkpoints,
                    times=times,
                    compile_seconds=0.0 if number else job.seconds,
                    progress=progress,
                    raises=alone,
                )
                try:
                    with stop.heeded():
                        ended |= lockstep.run()
                except (Diverged, FatalCount) as error:
                    status = "diverged" if isinstance(error, Diverged) else "stopped"
                    end = {"until": (error.rounds or (0, 0))[1], "status": status, "reason": str(error)}
                    conclude(status, {points[0].label: {**_UNRECORDED, **end, **lockstep.released()}})
                    raise
                progress.end()
                if times.stops():
                    raise Stopped(max(ended[point.label]["until"] for point in lanes))
    spent = any(record["status"] == "budget_spent" for record in ended.values())
    return conclude("budget_spent" if spent else "finished", ended)


def _refuse_alone(variants: Mapping[str, Variant]) -> None:
    """Refuse several processes where each would train everything by itself."""
    for name, variant in variants.items():
        if several() and variant.placement is None:
            requirement, found = "must say what several processes share", f"{name} has none"
            remedy = f"Pass Placement({jax.device_count()}), or Placement({jax.device_count()}, 'points')."
            raise ArgumentError("placement", requirement, found, remedy)


def _with_key(
    privacy: Callable[..., Sequence[Mapping[str, Any]]], key: Array | None, num_rounds: int, **totals: int
) -> list[dict[str, Any]]:
    """The statements of a number of rounds and of totals, with what they rest on as to the key."""
    origin, given = SIMULATED if key is None else SECRET, privacy(num_rounds, **totals)
    return [{**stated, "assumptions": (*stated.get("assumptions", ()), origin)} for stated in given]


class _Job(NamedTuple):
    """A program on its way."""

    program: Program
    compiled: Compiled | None  # None where all lanes have ended
    lanes_a_pass: int  # that run together
    seconds: float  # that compiling took


_UNRECORDED = {"round": None, "seconds": {"compile": 0.0, "run": 0.0, "timed_rounds": 0, "rounds_a_call": 0}}


def _prepare(
    points: Sequence[Point], run: RunDirectory, progress: ProgressReport, lanes_at_once: int | None
) -> list[_Job]:
    """Say what is wrong with any program before one of them runs, and compile those with something left to run."""
    programs = programs_of(points)
    run.record_training(recorded_settings(points))
    recorded, done = run.recorded_programs(), run.finished(point.label for point in points)
    run.refuse_gaps([part for index, program in enumerate(programs) for part in _parts(program, recorded[index:])])
    began = time.perf_counter()
    waiting = [any(point.label not in done for point in program.points) for program in programs]
    finish = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for index, program in enumerate(programs):
            if waiting[index]:
                progress.begin(program.label, 0)
                before = recorded[index] if index < len(recorded) else None
                finish.append(program.begin_compiling(by_platform(program, before, lanes_at_once), pool))
        compiled = iter([compiled() for compiled in finish])
    jobs, peaks = [], {}
    for index, program in enumerate(programs):
        fit = next(compiled) if waiting[index] else None
        if fit is not None:
            if index < len(recorded):  # another division of the lanes would not find their checkpoints
                together(require_memory, program.label, fit.peak, program.structure, program.variant.task)
            else:
                fit = fitted(program, fit)
            peaks[program.label] = fit.peak
        lanes = len(program.points) if fit is None else min(fit.strategy.num_slots, len(program.points))
        # As recorded, though another number of devices may pad them otherwise.
        jobs.append(_Job(program, fit, recorded[index]["lanes_a_pass"] if index < len(recorded) else lanes, 0.0))
    if peaks:
        progress.announce(peak_text(peaks))
    share = of_first(lambda: (time.perf_counter() - began) / max(1, sum(waiting)))
    return [job._replace(seconds=share) if job.compiled else job for job in jobs]


def _parts(program: Program, recorded: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, int]]]:
    """The lanes of each pass of a program, as recorded; all together where it has not run yet."""
    labels = [point.label for point in program.points]
    lanes = recorded[0]["lanes_a_pass"] if recorded else len(labels)
    return [labels[first : first + lanes] for first in range(0, len(labels), lanes)]


def _announce(index: int, job: _Job, run: RunDirectory, progress: ProgressReport) -> None:
    """Record how a program's lanes are computed, and say it."""
    assert job.compiled is not None
    program, strategy = job.program, job.compiled.strategy
    if index >= len(run.recorded_programs()):
        run.record_program(index, describe(program, strategy))
    if len(program.points) > 1:
        passes = -(-len(program.points) // job.lanes_a_pass)
        text = f"{len(program.points)} runs of {program.label} share one program, computed {strategy.text}"
        progress.announce(text + (f", in {passes} passes" if passes > 1 else ""))
