"""Lanes of a pass go through their rounds in lockstep. A lane is a case with one seed; one run is a sweep of one lane.

Chunks of rounds alternate with evaluations. After an evaluation the lines of all lanes are flushed to disk together,
then the checkpoint is begun: for every checkpoint that a later process finds, the lines up to it are there. A lane that
diverges, or spends a budget, ends with its reason, and the others go on. Later results of this lane are discarded.
Budgets are checked at evaluations and, between two of them, every `Case.rounds_per_call` rounds: a call of the compiled
program ends there for all lanes.

The next chunk is dispatched before the infos of the last one are read, unless the host needs the state between the two,
or decides there: for a checkpoint, at the end of a lane, or where there are budgets or a hook. A divergence is
therefore noticed a chunk later; the record of its end says in which chunk it was.

The clock may ask for a checkpoint at the end of any chunk. Such a checkpoint also holds the infos since the last lines,
so that the next lines are the same as in an uninterrupted run.

A call makes rounds for about half a minute. Their number is chosen once, by the time of a first round, and is kept in
checkpoints and in the record of a lane's end. On a CPU it changes no byte; elsewhere calls of other lengths may differ
in the last bits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.core import PyTree
from jaxfl.core.info import FatalCount
from jaxfl.core.lines import Label
from jaxfl.core.platform import is_cpu
from jaxfl.training.case import Scores, costs_of
from jaxfl.training.checkpoint import Checkpoints, Restored
from jaxfl.training.chunks import COSTS, Diverged, add_costs, info_fields, refuse_bad, rounds_at_once, summarize_lanes
from jaxfl.training.clock import Clock
from jaxfl.training.environment import describe_environment
from jaxfl.training.final_params import write_params
from jaxfl.training.hooks import Hook, evaluation_of
from jaxfl.training.lane_record import LaneRecord, add_chunk
from jaxfl.training.measures import flatten_scores, node_scores, refuse_bad_scores
from jaxfl.training.pass_directory import CHECKPOINTS, ENDED
from jaxfl.training.passes import Pass
from jaxfl.training.processes import any_process, is_multiprocess, least, on_first
from jaxfl.training.progress import ProgressReport
from jaxfl.training.signals import Stop, Stopped
from jaxfl.training.summary import WHOLE


class SaveTimes(NamedTuple):
    """Times at which states are saved; they never change results."""

    evaluations: int  # between checkpoints; the last state is always saved
    minutes: float | None  # after which the end of any chunk brings a checkpoint, too; None: evaluations only
    keep: int  # how many of the newest stay


class _Chunk(NamedTuple):
    """Rounds that were dispatched, and the evaluation after them."""

    end: int  # the last round
    num_rounds: int
    buffers: Any
    scores: Any  # None where no line is due
    began: float


class Lockstep:
    """The lanes of one pass on their way through the compiled program; they are at most as many as it has slots.

    With `raises` (for a run of a single lane) a lane's error is raised and does not just end the lane. `final` is the
    run in whose folder parameters are kept, or None.
    """

    def __init__(
        self,
        one: Pass,
        saves: SaveTimes,
        stop: Stop,
        progress: ProgressReport,
        hook: Hook | None,
        clock: Clock,
        *,
        raises: bool,
        final: Path | None,
    ):
        assert one.compiled is not None
        clock.enter("first_states")
        self._hook, self._final, self._clock = hook, final, clock
        self._pass, self._saves, self._stop, self._progress, self._raises = one, saves, stop, progress, raises
        self._directory = one.directory
        program, compiled, lanes = one.program, one.compiled, one.lanes
        self._program, self._compiled = program, compiled
        self._strategy = compiled.strategy
        self._batched = self._strategy.num_slots > 1
        self._records = [
            LaneRecord(index, lane, {name: 0 for name in COSTS if name in costs_of(lane.case, compiled.fields)})
            for index, lane in enumerate(lanes)
        ]
        self._every = program.case.evaluate_every
        self._ends = [lane.case.last_round for lane in lanes]
        self._last = max(self._ends)
        self._arguments = program.lane_values(lanes, self._strategy)
        self._tables = program.tables(lanes, self._strategy)
        self._most = program.case.rounds_per_call
        # The time of a first round decides how many make a call, unless the case says it.
        self._at_once = None if program.case.chunk_rounds is None else self._most
        # Devices of a CPU share its threads: collectives of two programs would wait for each other.
        in_turn = is_multiprocess() or (is_cpu() and len(compiled.rounds.input_shardings[0][3].device_set) > 1)
        self._reads_at_once = in_turn or hook is not None or any(lane.case.budgets for lane in lanes)
        self._saved = self._read = time.perf_counter()

    def run(self) -> dict[Label, dict[str, Any]]:
        """Go from the newest checkpoint, or the beginning, to the end. Raise Stopped on request, with the state saved.

        Returns:
            (case, seed) -> its record: "round" of its last line, "until", the round at which it ended, "status",
            "reason" or None, "seconds" and, where statements depend on totals, "released", these up to "until".
        """
        if not self._pass.is_begun:  # a pass that is resumed keeps its record
            slots, at_once, *_ = self._strategy
            choice = {"slots": slots, "at_once": at_once, "strategy": self._strategy.text}
            self._directory.begin({**choice, "environment": describe_environment()})
        checkpoints = Checkpoints(self._directory.path / CHECKPOINTS, self._saves.keep, self._directory.owner)
        with contextlib.closing(checkpoints) as self._checkpoints:
            self._go()
            self._clock.enter("saving")
            self._checkpoints.wait()
        self._directory.finish(self.ends())
        return self.ends()

    def ends(self) -> dict[Label, dict[str, Any]]:
        """The records of the lanes that have ended, as `run` gives them."""
        return {record.lane.label: record.ended for record in self._records if record.ended is not None}

    def _go(self) -> None:
        self._begin()
        unread: _Chunk | None = None
        while self._running() and self._round < self._last:
            chunk = self._dispatch()
            if unread is not None:
                self._take(unread)
            unread = chunk
            if self._waits():
                self._take(chunk)
                unread = None
                self._keep_state()
        if self._running():
            self._save()
        self._end_all([(record, "finished", None) for record in self._running()])

    def _running(self) -> list[LaneRecord]:
        return [record for record in self._records if record.ended is None]

    def _begin(self) -> None:
        had_checkpoints = bool(self._checkpoints.rounds())
        structure = self._program.slots_structure(self._strategy.num_slots)
        restored = self._checkpoints.restore(structure, self._program.shardings(self._strategy))
        self._progress.compiled()
        if restored is not None:
            self._go_on(restored)
        for record in self._running():  # a hook may now end the lane in another round than in a process that died
            on_first(shutil.rmtree)(self._directory.path / ENDED / str(record.index), ignore_errors=True)
        if restored is not None:
            return
        if had_checkpoints:
            name, seed = self._records[0].lane.label
            whose = f"{name}, seed {seed}" + (f" and {len(self._records) - 1} more" if self._records[1:] else "")
            warnings.warn(f"no readable checkpoint of {whose}: beginning again.", stacklevel=5)
        self._directory.keep_lines()
        self._round, self._state = 0, jax.block_until_ready(self._compiled.init(self._arguments, self._tables.data))
        self._write_lines(self._records, self._evaluated())

    def _go_on(self, restored: Restored) -> None:
        """Take up a checkpoint, and the lines up to it."""
        content = restored.record
        self._directory.check_lines(content["metrics"])
        self._directory.keep_lines(content["metrics"])
        self._round, self._state, self._at_once = restored.round_index, restored.state, content["rounds_a_call"]
        for record, saved in zip(self._records, content["lanes"], strict=True):
            record.restore(saved, restored.beside)
            self._progress.skip(record.lane.case.last_round if record.ended else self._round)

    def _on_grid(self, round_index: int) -> bool:
        """True if all lanes have a line there."""
        return round_index % self._every == 0 or round_index == self._last

    def _saves_with_lines(self, round_index: int) -> bool:
        """True if the evaluations bring a checkpoint."""
        return self._on_grid(round_index) and -(-round_index // self._every) % self._saves.evaluations == 0

    def _length(self) -> int:
        """Rounds of the next call: none goes beyond a line, or a round where budgets are looked at."""
        # Lanes that have ended count, too: a resumed run must have the same chunks as an uninterrupted one.
        target = min(self._round - self._round % self._every + self._every, *(e for e in self._ends if e > self._round))
        since = self._round % self._every % self._most
        return min(self._at_once or 1, target - self._round, self._most - since)

    def _dispatch(self) -> _Chunk:
        """Send off the next rounds of every lane, and the evaluation after them, without waiting."""
        self._clock.enter("rounds")
        began, count = time.perf_counter(), self._length()
        self._state, buffers = self._compiled.rounds(self._arguments, self._state, self._tables.data, np.int32(count))
        self._round += count
        due = self._on_grid(self._round) or self._round in self._ends
        return _Chunk(self._round, count, buffers, self._evaluated() if due else None, began)

    def _evaluated(self) -> Any:
        return self._compiled.evaluate(self._arguments, self._state, self._tables.arrays)

    def _waits(self) -> bool:
        """True if the host needs the state of the last dispatch, or must decide there how to go on."""
        return (
            self._reads_at_once
            or self._at_once is None
            or self._round in self._ends
            or self._saves_with_lines(self._round)
            or self._stop.requested
            or self._is_save_due()
        )

    def _take(self, chunk: _Chunk) -> None:
        """Read a chunk's infos, write the lines after it, and end the lanes that end there."""
        self._clock.enter("rounds")
        running = self._running()
        buffers, fatal = info_fields(jax.device_get(chunk.buffers)), chunk.buffers.fatal()
        seconds = time.perf_counter() - max(chunk.began, self._read)
        self._read = time.perf_counter()
        if self._at_once is None:
            self._at_once = int(least(rounds_at_once(seconds / chunk.num_rounds, self._most)))
        count, first = chunk.num_rounds, chunk.end - chunk.num_rounds + 1
        # Sliced on the host: a slice on the device would compile once per length.
        infos = {name: (values if self._batched else values[None])[:, :count] for name, values in buffers.items()}
        for record in running:
            record.seconds, record.timed_rounds = record.seconds + seconds / len(running), record.timed_rounds + count
        for record in add_chunk(running, infos, fatal):
            params = partial(self._params, [record]) if chunk.end == self._round else None
            check = partial(
                refuse_bad, record.stretch[-1], *record.lane.label, first, params, record.lane.node_names, fatal
            )
            self._guard(record, chunk.end, check)
        looked_at = chunk.scores is not None or chunk.end % self._every % self._most == 0
        spent = [record for record in self._running() if looked_at and record.spent()]
        due = [
            record
            for record in self._running()
            if self._on_grid(chunk.end) or chunk.end == record.lane.case.last_round or record in spent
        ]
        if due:
            self._write_lines(due, self._evaluated() if chunk.scores is None else chunk.scores, chunk.end)
        running_on = self._running()
        ending = [(record, "budget_spent", record.spent()) for record in running_on if record in spent]
        ends = [one for one in running_on if one not in spent and chunk.end == one.lane.case.last_round < self._last]
        self._end_all([*ending, *((record, "finished", None) for record in ends)])
        self._progress.advance(count * len(running))  # after the note of what was measured

    def _guard(self, record: LaneRecord, round_index: int, check: Callable[[], object]) -> None:
        """End the lane if the check fails."""
        try:
            check()
        except (Diverged, FatalCount) as error:
            self._end(record, "diverged" if isinstance(error, Diverged) else "stopped", str(error), until=round_index)
            if self._raises:
                raise

    def _is_save_due(self) -> bool:
        minutes = self._saves.minutes
        return time.perf_counter() - self._saved >= (math.inf if minutes is None else 60.0 * minutes)

    def _keep_state(self) -> None:
        """Save the state if it is time, and raise Stopped if that was requested."""
        if not self._running() or self._round == self._last:
            return
        stops, due = any_process(self._stop.requested), any_process(self._is_save_due())
        if stops or due or self._saves_with_lines(self._round):
            self._save()
        if stops:
            raise Stopped(self._round)

    def _save(self) -> None:
        if self._round in self._checkpoints.rounds():
            return
        self._clock.enter("saving")
        saved = [record.saved() for record in self._records]
        content = {
            "lanes": [own for own, _ in saved],
            "metrics": list(self._directory.mark()),
            "rounds_a_call": self._at_once,
        }
        stretches = {name: values for _, own in saved for name, values in own.items()}
        self._checkpoints.save(self._round, self._state, content, stretches)
        self._saved = time.perf_counter()

    def _params(self, records: Sequence[LaneRecord]) -> list[PyTree]:
        """Parameters of these lanes now."""
        places = [record.index for record in records], [record.lane for record in records]
        return self._program.node_params(self._state, self._strategy, *places)

    def _end_all(self, ending: Sequence[tuple[LaneRecord, str, str | None]]) -> None:
        """Keep the parameters of lanes that end well, and together; then record their ends."""
        self._clock.enter("saving")
        if ending and self._final is not None:
            records = [record for record, *_ in ending]
            lanes = [record.lane for record in records]
            write_params(self._final, self._round, list(zip(lanes, self._params(records), strict=True)))
        for one in ending:
            self._end(*one)

    def _end(self, record: LaneRecord, status: str, reason: str | None = None, until: int = 0) -> None:
        """Record the end of a lane. Keep its state if it ends well and other lanes go on."""
        case, until = record.lane.case, until or self._round
        if status == "finished" and case.last_round < case.num_rounds:
            status, reason = "budget_spent", f"the privacy budget pays for {case.last_round} rounds"
        if status in WHOLE and self._round not in self._checkpoints.rounds():
            own = Checkpoints(self._directory.path / ENDED / str(record.index), 1, self._directory.owner)
            if self._round not in own.rounds():  # saved by a process that died afterwards
                own.save(self._round, self._program.lane_state(self._state, self._strategy, record.index))
            own.close()
        record.ended = {
            "round": record.last_line,
            "until": until,
            "status": status,
            "reason": reason,
            "seconds": {
                "compile": self._pass.seconds if record.index == 0 else 0.0,
                "run": record.seconds,
                "timed_rounds": record.timed_rounds,
                "rounds_a_call": self._at_once or 1,
            },
            **record.released(),
            **({"nodes": record.nodes} if status in WHOLE and record.nodes else {}),
        }
        self._progress.skip(case.last_round - until)

    def _write_lines(self, due: Sequence[LaneRecord], scores: Any, round_index: int = 0) -> None:
        """Write the lines of these lanes; a lane whose scores are not finite ends without a line."""
        self._clock.enter("evaluations")
        measured = jax.tree.map(lambda leaf: leaf if self._batched else np.asarray(leaf)[None], jax.device_get(scores))
        finite = [np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in jax.tree.leaves(measured)]
        for record in itertools.compress(due, ~np.all(finite, axis=0)[[record.index for record in due]]):
            own = jax.tree.map(lambda leaf, i=record.index: leaf[i], measured)
            since, names = record.last_line or 0, record.lane.node_names
            check = partial(refuse_bad_scores, own, *record.lane.label, since, round_index, names)
            self._guard(record, round_index, check)
        written = [record for record in due if record.ended is None]
        lines = self._lines(written, measured, round_index)
        self._directory.append(lines)
        shown = [name for name in ("test_accuracy", "test_loss") if lines and name in lines[-1]]
        means = {name: np.mean([line[name] for line in lines]) for name in shown}
        note = ", ".join(f"{name.replace('_', ' ')} {mean:.4g}" for name, mean in means.items())
        self._progress.note("mean " * (len(lines) > 1 and bool(note)) + note)
        if self._hook is None:
            return
        ends = on_first(lambda hook: [bool(hook(evaluation_of(line))) for line in lines])(self._hook)
        asked = f"the hook asked for it after round {round_index}"
        early = [one for one in itertools.compress(written, ends) if round_index < one.lane.case.last_round]
        self._end_all([(record, "stopped_early", asked) for record in early])

    def _lines(self, records: Sequence[LaneRecord], measured: Mapping[str, PyTree], round_index: int) -> list[dict]:
        """A line of metrics.jsonl for each lane, with which its next stretch begins."""
        columns: dict[str, list[float]] = {}
        nodes: dict[str, list[Any]] = {}
        for name in self._program.measures:
            values = measured[name]
            if isinstance(values, Scores):
                columns |= flatten_scores(values, name)
                nodes |= node_scores(values, name) if name == "test" else {}
            else:
                columns |= {k: v.tolist() for k, v in values.items() if v.ndim == 1}
                nodes |= {k.removesuffix("_nodes"): v.tolist() for k, v in values.items() if v.ndim > 1}
        lines = []
        summaries = summarize_lanes([record.stretch for record in records]) if records else []
        for record, summary in zip(records, summaries, strict=True):
            record.totals = add_costs(record.totals, record.stretch)
            infos = {name: summary.get(name) for name in self._compiled.fields}  # null in round 0
            record.stretch, record.last_line = [], round_index
            record.nodes = {name: values[record.index] for name, values in nodes.items()} or record.nodes
            line = {"case": record.lane.name, "seed": record.lane.seed, "round": round_index}
            if "loss" in infos:
                line["train_loss"] = infos.pop("loss")
            line |= {name: float(values[record.index]) for name, values in columns.items()} | infos
            lines.append(line | {f"total_{name}": total for name, total in record.totals.items()})
        return lines
