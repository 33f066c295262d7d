"""The training loop. A case with one seed is a lane; lanes share programs where they may; passes of lanes run in turn.

A run killed at any moment and resumed ends with the same lines, results.csv (but for its seconds) and the same
parameters as one that was never interrupted (on the same machine and versions).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax

from jaxfl.core import ArgumentError, Array
from jaxfl.core.check import at_least, non_negative
from jaxfl.core.info import FatalCount
from jaxfl.privacy.statements import SECRET, SIMULATED
from jaxfl.training.case import Case, check_cases, with_statements
from jaxfl.training.chunks import Diverged
from jaxfl.training.clock import Clock
from jaxfl.training.hooks import Hook
from jaxfl.training.json_files import jsonable, write_json
from jaxfl.training.lanes import Lane
from jaxfl.training.lockstep import Lockstep, SaveTimes
from jaxfl.training.passes import Records, lanes_of, prepare
from jaxfl.training.processes import any_process, is_first, is_multiprocess, on_first
from jaxfl.training.progress import ProgressReport
from jaxfl.training.run_directory import PRIVACY, RunDirectory, held
from jaxfl.training.signals import Stop, Stopped
from jaxfl.training.sites import SITES, site_rows
from jaxfl.training.summary import RESULTS, every_node, summarize_run, write_results, write_table


def train(
    cases: Mapping[str, Case],
    *,
    run: RunDirectory,
    checkpoint_every: int = 10,
    checkpoint_minutes: float | None = 10.0,
    keep_checkpoints: int = 2,
    keep_params: bool = True,
    quiet: bool = False,
    key: Array | None = None,
    stop: Stop | None = None,
    lanes_at_once: int | None = None,
    only: int | None = None,
    hook: Hook | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Train every case with every seed and leave a complete run directory behind.

    All programs are compiled before the first one runs. One that needs more memory than is free is therefore refused
    before any work is lost. Nothing is compiled twice.

    Args:
        cases: name -> what to train. Those that differ only in numbers and seeds share one compiled program and run
            in lockstep.
        run: from `open_run`; a resumed run continues from its newest checkpoints and skips what has ended.
        checkpoint_every: evaluations between checkpoints; the last state is always saved.
        checkpoint_minutes: minutes after which the end of any chunk (the rounds of one compiled call) brings a
            checkpoint, too; 0: every chunk, None: evaluations only. This never changes results.
        keep_checkpoints: how many of the newest stay.
        keep_params: whether the parameters at each lane's end are written to final/, for `load_params`. They take less
            disk space than one checkpoint. A lane that diverges leaves none.
        quiet: show no progress.
        key: typed key, (), that stays secret: it makes every seed's base key. Default: seed s has the base key
            `jax.random.key(s)`, which anyone who knows the seed can make; privacy statements are then marked as those
            of a simulation. Batches and noise also depend on `Case.identity`, initial parameters do not.
        stop: lets another thread, or a signal, ask to stop; see `stop_at_sigterm`. `train` installs no signal handler.
        lanes_at_once: lanes of one program that a device computes side by side. Default: 1 on a CPU, where a lane then
            gives the same bits as alone, and elsewhere as many as fit. A resumed run keeps its number.
        only: number of a pass of `divide_run`: only this pass is trained, in `run` from `read_run`. Processes that
            share no memory may train one each at the same time; a call without it then makes the tables and the
            summary.
        hook: called with each `Evaluation` that this process computes, see `jaxfl.training.hooks`. Several processes
            all take one, and the first calls it. If it returns True, that lane ends with the status "stopped_early":
            its last line and its state stay, it is not resumed, and `publish` refuses it. Other lanes go on. An
            exception of the hook ends the run, which can be resumed.
        clock: of the command that calls it, whose seconds go into the summary. Default: a new one.

    Returns:
        The content of summary.json; empty where `only` one pass is trained.

    Raises:
        ArgumentError: an argument cannot be used, or differs from the run that is resumed, or a case does not fit
            in memory; another process is at work in the directory; its files were altered; several processes train
            (docs/devices.md) and a case has no placement. A new run that is refused
            before its first round leaves nothing behind, and one that is resumed stays as it is.
        Diverged: in a run of a single case and seed, a measurement or metric is not finite. Lines written so far stay,
            and the summary says "diverged". With several lanes, or with `only`, that lane ends, its status says so, and
            the others go on.
        FatalCount: a count that must stay 0 did not; as `Diverged`, with the status "stopped".
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
        - a hook that never returns True changes no byte.
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
    clock = Clock("data") if clock is None else clock
    clock.enter("data")
    lanes = lanes_of(cases, key)
    sizes = {(lane.name, lane.seed): lane.sizes for lane in lanes}
    cases = {name: with_statements(case, [sizes[name, seed] for seed in case.seeds]) for name, case in cases.items()}
    ended: Records = {}
    conclude = partial(_conclude, run, lanes, cases, key, clock)
    alone, stop = len(lanes) == 1 and only is None, Stop() if stop is None else stop
    quiet = quiet or not is_first()
    with (
        held(run.path if only is None else run.passes[only].path),
        ProgressReport(sum(lane.case.last_round for lane in lanes), quiet=quiet) as progress,
    ):
        stop.undo_until_heeded(run.withdraw, run.resumed)
        try:
            passes = prepare(lanes, run, progress, lanes_at_once, only, clock)
        except ArgumentError:
            run.withdraw()
            raise
        if only is None:
            if all(one.compiled is None for one in passes):
                clock.repeat(run.seconds_of_command())
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
                final = run.path if keep_params else None
                lockstep = Lockstep(one, saves, stop, progress, hook, clock, raises=alone, final=final)
                try:
                    with stop.heeded():
                        ended |= lockstep.run()
                except (Diverged, FatalCount):
                    (record,) = lockstep.ends().values()
                    conclude(record["status"], {lanes[0].label: record})
                    raise
            progress.end()
            if any_process(stop.requested):
                raise Stopped(max(ended[lane.label]["until"] for lane in one.lanes))
        if only is not None:
            return {}
        spent = any(record["status"] == "budget_spent" for record in ended.values())
        return conclude("budget_spent" if spent else "finished", ended)


def _conclude(
    run: RunDirectory,
    lanes: Sequence[Lane],
    cases: Mapping[str, Case],
    key: Array | None,
    clock: Clock,
    status: str,
    records: Records,
) -> dict[str, Any]:
    """Write tables and summary from the passes; return the summary."""
    clock.enter("tables")
    lines = run.read_metrics()
    privacy = {name: cache(partial(_with_key, case.privacy, key)) for name, case in cases.items() if case.privacy}
    facts = {
        name: {"seeds": case.seeds, "settings": case.settings, "privacy": privacy.get(name), "released": case.released}
        for name, case in cases.items()
    }
    in_order = {lane.label: records[lane.label] for lane in lanes if lane.label in records}
    content = summarize_run(lines, in_order, facts, config=run.config, status=status)
    if rows := site_rows(lanes, in_order, {name: row["privacy"] for name, row in content["cases"].items()}):
        on_first(write_table)(run.path / SITES, rows)
    names = {lane.name: lane.node_names for lane in reversed(lanes)}  # of the first seed
    if node_epsilons := every_node(content["cases"], names):
        on_first(write_json)(run.path / PRIVACY, jsonable(node_epsilons, "privacy"))
    settings = {name: case.settings for name, case in cases.items()}
    on_first(write_results)(run.path / RESULTS, in_order, lines.ends(), settings, privacy)
    content["seconds"]["command"] = clock.seconds()
    run.write_summary(content)
    return jsonable(content, "summary")


def _refuse_alone(cases: Mapping[str, Case]) -> None:
    """Refuse several processes where each would train everything by itself."""
    for name, case in cases.items():
        if is_multiprocess() and case.placement is None:
            requirement, found = "must say what several processes share", f"{name} has none"
            remedy = f"Pass Placement({jax.device_count()}), or Placement({jax.device_count()}, 'lanes')."
            raise ArgumentError("placement", requirement, found, remedy)


def _with_key(
    privacy: Callable[..., Sequence[Mapping[str, Any]]], key: Array | None, num_rounds: int, **totals: int
) -> list[dict[str, Any]]:
    """The statements for a number of rounds and for totals, with their assumption about the key."""
    origin, given = SIMULATED if key is None else SECRET, privacy(num_rounds, **totals)
    return [{**stated, "assumptions": (*stated.get("assumptions", ()), origin)} for stated in given]
