"""Lanes that go through their rounds in lockstep: one run is a sweep of one lane.

Chunks of rounds alternate with evaluations. After an evaluation the lines of all lanes are flushed to disk together,
then the checkpoint is written: whatever checkpoint a later process finds, the lines up to it are there. A lane that
diverges, or spends a budget, ends with its reason: its state and its record are saved then, and the others go on. What
is computed of it later is thrown away. Whether a lane has spent a budget is looked at at evaluations and, between two
of them, every `Variant.rounds_per_call` rounds, where all others stop with it.

The clock may ask for a checkpoint at the end of any chunk. It then holds the infos since the last lines, too, so that
the next lines are those of a run that went through.

A call makes rounds for about half a minute: how many is chosen once, by the time of a first round; a checkpoint and
the record of a lane's end keep it. On a CPU it does not show in any byte; elsewhere the compiler may give calls of
other lengths other last bits.

The next chunk is sent off before the last one is read, unless the state between the two is needed: for a checkpoint,
or by a lane that ends there.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxfl.core import ArgumentError, PyTree
from jaxfl.core.info import FatalCount
from jaxfl.training.ahead import Ahead, DeviceQueue
from jaxfl.training.checkpoint import Checkpoints, Restored
from jaxfl.training.chunks import COSTS, Diverged, add_costs, refuse_bad, rounds_at_once, summarize
from jaxfl.training.evaluate import Scores, flatten_scores
from jaxfl.training.file_list import Owner
from jaxfl.training.finite import refuse_bad_scores, stays_finite
from jaxfl.training.lane_record import LaneRecord, packed, rounds_since_line, unpack
from jaxfl.training.lanes import Point
from jaxfl.training.processes import of_first
from jaxfl.training.program import Compiled, Program
from jaxfl.training.progress import ProgressReport
from jaxfl.training.records import ENDED, METRICS, RunDirectory, lane_of
from jaxfl.training.save_times import SaveTimes
from jaxfl.training.signals import Stopped
from jaxfl.training.variant import costs_of

_AT_ONCE = "rounds at once"  # in a checkpoint


class Lockstep:
    """The lanes of one pass through a compiled program.

    Args:
        program, compiled: what runs.
        points: the lanes, at most as many as the program has slots.
        run: where lines and records go.
        directory: of the checkpoints that all lanes share.
        checkpoint_every: evaluations between checkpoints; the last state is always saved.
        keep_checkpoints: how many of the newest stay.
        times: when one is due besides, and whether to stop.
        compile_seconds: for the record of the first lane.
        progress: told of every chunk.
        raises: whether a lane's error is raised, in place of ending the lane: for a run of a single one.
    """

    def __init__(
        self,
        program: Program,
        compiled: Compiled,
        points: Sequence[Point],
        *,
        run: RunDirectory,
        directory: Any,
        checkpoint_every: int,
        keep_checkpoints: int,
        times: SaveTimes,
        compile_seconds: float,
        progress: ProgressReport,
        raises: bool,
    ):
        self._program, self._compiled, self._run, self._progress = program, compiled, run, progress
        self._checkpoint_every, self._compile_seconds, self._raises = checkpoint_every, compile_seconds, raises
        self._directory, self._keep, self._times = directory, keep_checkpoints, times
        self._batched = compiled.strategy.num_slots > 1
        self._lanes = [
            LaneRecord(index, point, {name: 0 for name in COSTS if name in costs_of(point.variant, compiled.fields)})
            for index, point in enumerate(points)
        ]
        self._every = program.variant.evaluate_every
        self._last = max(point.variant.last_round for point in points)
        self._arguments = program.lanes(points, compiled.strategy)
        self._tables = program.tables(points, compiled.strategy)
        self._device = DeviceQueue(compiled, self._arguments, self._tables)
        variants = [point.variant for point in points]
        self._most = program.variant.rounds_per_call
        # A first round tells how many make a call, unless that was asked for.
        self._at_once = None if program.variant.chunk_rounds is None else self._most
        # What the host alone can tell at the end of a chunk: a budget that is spent, costs that are not finite.
        self._host_decides = any(variant.budgets or not stays_finite(variant.ledger) for variant in variants)

    def run(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Go from the newest checkpoint, or the beginning, to the end.

        Returns:
            (variant, seed) -> its record: "round" of its last line, "until", the round at which it ended, "status",
            "reason" or None, "seconds" and, where statements depend on totals, "released", these up to "until".

        Raises:
            Stopped: that was asked for; the state is saved.
        """
        self._checkpoints = Checkpoints(self._directory, self._keep, self._owner(self._lanes))
        try:
            with self._device:
                self._go()
        finally:
            self._checkpoints.close()
        return {lane.point.label: lane.ended for lane in self._lanes if lane.ended is not None}

    def _go(self) -> None:
        self._begin()
        while self._round < self._last and self._running():
            rounds = self._go_to(self._next_stop(self._round))
            self._write_lines(self._on_grid(self._round))
            self._progress.advance(rounds)  # behind the note of what was measured
            if self._running() and self._round < self._last:
                self._keep_state(self._ends_with_checkpoint(self._round))
        if self._running() and self._round not in self._checkpoints.rounds():
            self._save()
        for lane in self._running():
            self._end(lane)

    def released(self) -> dict[str, dict[str, float | int]]:
        """The entry "released" of a single lane that ended by an error."""
        return self._lanes[0].released()

    def _running(self) -> list[LaneRecord]:
        return [lane for lane in self._lanes if lane.ended is None]

    def _owner(self, lanes: Sequence[LaneRecord]) -> Owner:
        return Owner(self._run.fingerprint, tuple(lane.point.label for lane in lanes))

    def _begin(self) -> None:
        had_checkpoints = bool(self._checkpoints.rounds())
        num_lanes = len(self._lanes) if self._batched else None
        restored = self._checkpoints.restore(self._program.saved_structure(num_lanes))
        labels = [lane.point.label for lane in self._lanes]
        self._progress.compiled()
        if restored is not None:
            self._go_on(restored)
            return
        if had_checkpoints:
            whose = f"{labels[0][0]}, seed {labels[0][1]}" + (f" and {len(labels) - 1} more" if labels[1:] else "")
            warnings.warn(f"no readable checkpoint of {whose}: beginning again.", stacklevel=5)
        if any(lane_of(line) in labels for line in self._run.read_metrics()):
            self._run.keep_copy_of_metrics()
        for name, seed in labels:
            self._forget(name, seed)
        self._run.keep_metrics_until(labels, None)
        self._round = 0
        self._begin_with(self._compiled.init(self._arguments, self._tables.data))
        self._evaluate(self._lanes)

    def _go_on(self, restored: Restored) -> None:
        """Take up a checkpoint, and the lines up to it."""
        self._round, labels = restored.round_index, [lane.point.label for lane in self._lanes]
        own = self._run.keep_metrics_until(labels, self._round, restored.mark)
        ended = self._run.finished(labels, own)
        lines = {lane_of(line): line for line in own}
        unpack(self._lanes, restored.beside)
        self._at_once = int(restored.beside[_AT_ONCE])
        for lane in self._lanes:
            name, seed = lane.point.label
            line, lane.ended = lines.get((name, seed)), ended.get((name, seed))
            if lane.ended is None or lane.ended["until"] > self._round:  # an end behind the checkpoint comes again
                lane.ended = None
                self._forget(name, seed)
            since = rounds_since_line(lane)
            if lane.ended is None and (line is None or line["round"] + since != self._round):
                raise ArgumentError(
                    "out",
                    f"{self._run.path / METRICS} must hold the line of every checkpoint",
                    f"round {self._round - since} of {name}, seed {seed} is missing",
                    "Restore the file, or start again with another out.",
                )
            if line is not None:
                lane.last_line, lane.totals = line["round"], {name: line[f"total_{name}"] for name in lane.totals}
            self._progress.skip(lane.point.variant.last_round if lane.ended else self._round)
        self._begin_with(self._program.place(restored.state, self._compiled.strategy))
        for lane in self._running() if self._may_be_spent(self._round) else ():
            self._end_if_spent(lane)

    def _begin_with(self, state: PyTree) -> None:
        self._device.begin(state, (self._last - self._round) // (self._at_once or self._most))

    def _forget(self, name: str, seed: int) -> None:
        """Drop what an earlier process left of a lane's end."""
        self._run.forget_finished(name, seed)
        of_first(lambda: shutil.rmtree(self._run.lane_directory(name, seed) / ENDED, ignore_errors=True))

    def _on_grid(self, round_index: int) -> bool:
        """Whether all lanes have a line there."""
        return round_index % self._every == 0 or round_index == self._last

    def _ends_with_checkpoint(self, round_index: int) -> bool:
        """Whether the evaluations bring one."""
        return self._on_grid(round_index) and -(-round_index // self._every) % self._checkpoint_every == 0

    def _next_stop(self, round_index: int) -> int:
        """The next round with a line: the grid begins at round 0, and a lane's last round is always evaluated."""
        # Of lanes that have ended, too: the chunks of a run that is resumed must be those of one that went through.
        ends = [lane.point.variant.last_round for lane in self._lanes]
        return min(round_index - round_index % self._every + self._every, *(end for end in ends if end > round_index))

    def _go_to(self, target: int) -> int:
        """Run to a round, chunk by chunk, or until a lane has spent a budget or every lane has ended.

        Returns:
            Rounds of all lanes together that progress has not shown yet: those of the last chunk.
        """
        rounds, ends = 0, self._round >= target
        while not ends:
            rounds = self._run_chunk(self._length(self._round, target))
            spent = self._may_be_spent(self._round) and any(lane.spent() for lane in self._running())
            ends = self._round >= target or not self._running() or spent
            if not ends:
                self._progress.advance(rounds)
                self._keep_state()
        return rounds

    def _may_be_spent(self, round_index: int) -> bool:
        """Whether budgets are looked at there: by the rounds of the run alone, never by what a call takes."""
        is_last = any(round_index == lane.point.variant.last_round for lane in self._lanes)
        return self._on_grid(round_index) or is_last or round_index % self._every % self._most == 0

    def _length(self, round_index: int, target: int) -> int:
        """Rounds of the next call: none goes beyond a round where budgets are looked at."""
        since = round_index % self._every % self._most
        return min(self._at_once or 1, target - round_index, self._most - since)

    def _run_chunk(self, count: int) -> int:
        """Run `count` rounds of every lane; returns the sum over the lanes that run."""
        running = self._running()
        buffers, seconds = self._device.run(count, self._ahead(self._round + count))
        if self._at_once is None:
            self._at_once = of_first(lambda: rounds_at_once(seconds / count, self._most))
        first, self._round = self._round + 1, self._round + count
        for lane in running:
            # Sliced on the host: a slice on the device would compile once per length.
            own = {name: (values[lane.index] if self._batched else values)[:count] for name, values in buffers.items()}
            own = lane.add(own)
            lane.seconds, lane.timed_rounds = lane.seconds + seconds / len(running), lane.timed_rounds + count
            params, names = partial(self._node_params, lane), lane.point.node_names
            self._guard(lane, partial(refuse_bad, own, *lane.point.label, first, params, names))
        return count * len(running)

    def _ahead(self, round_index: int) -> Ahead | None:
        """Plan the work behind the chunk that ends with this round; None where its end is to be looked at first.

        The state there is needed for a checkpoint, or by a lane that ends.
        """
        running = self._running()
        ends = self._last == round_index or any(lane.point.variant.last_round == round_index for lane in running)
        if ends or self._host_decides or self._ends_with_checkpoint(round_index):
            return None
        runs = np.zeros(self._compiled.strategy.num_slots, bool)
        runs[[lane.index for lane in running]] = True
        rounds = self._length(round_index, self._next_stop(round_index))
        ahead = Ahead(rounds, self._on_grid(round_index), runs if self._batched else runs[0])
        # Looked at in this order: with several processes nobody asks a clock here.
        if not self._device.may_go_ahead(ahead) or self._times.stop.requested or self._times.due():
            return None
        return ahead

    def _node_params(self, lane: LaneRecord) -> PyTree:
        return self._program.node_params(self._device.state, self._compiled.strategy, lane.index, lane.point)

    def _guard(self, lane: LaneRecord, check: Any) -> None:
        """End the lane if the check fails."""
        try:
            check()
        except (Diverged, FatalCount) as error:
            if self._device.is_ahead:
                raise RuntimeError(f"the device took all numbers for good, and went on: {error}") from error
            if self._raises:
                raise
            self._end(lane, "diverged" if isinstance(error, Diverged) else "stopped", str(error))

    def _write_lines(self, on_grid: bool) -> None:
        """Lines, and then lanes that end here."""
        ends = {lane.index for lane in self._running() if self._round == lane.point.variant.last_round or lane.spent()}
        due = [lane for lane in self._running() if on_grid or lane.index in ends]
        self._evaluate(due)
        for lane in [lane for lane in due if lane.ended is None]:
            self._end_if_spent(lane)

    def _keep_state(self, due: bool = False) -> None:
        """Save the state where that is due, and leave where that is asked for."""
        if self._device.is_ahead:  # that was looked at before; what the clock says since then holds a chunk later
            return
        stops = self._times.stops()
        if due or stops or self._times.due():
            self._save()
        if stops:
            raise Stopped(self._round)

    def _save(self) -> None:
        state = self._program.saved(self._device.state, self._compiled.strategy, len(self._lanes))
        beside = packed(self._running(), self._compiled.fields) | {_AT_ONCE: np.array(self._at_once, np.int32)}
        self._checkpoints.save(self._round, state, beside, list(self._run.mark()))
        self._times.saved()

    def _end_if_spent(self, lane: LaneRecord) -> None:
        """End a lane that has reached a budget, or what its privacy budget pays for, before the last round of all."""
        spent = lane.spent()
        if spent:
            self._end(lane, "budget_spent", spent)
        elif self._round == lane.point.variant.last_round < self._last:
            self._end(lane)

    def _end(self, lane: LaneRecord, status: str = "finished", reason: str | None = None) -> None:
        """Save a lane that ends before the others, and record its end."""
        variant = lane.point.variant
        if status == "finished" and variant.last_round < variant.num_rounds:
            status, reason = "budget_spent", f"the privacy budget pays for {variant.last_round} rounds"
        natural = status == "finished" and self._round == self._last
        if status in ("diverged", "stopped") or (self._batched and not natural):
            self._forget(*lane.point.label)  # what a process left that died before it recorded the end
            own = Checkpoints(self._run.lane_directory(*lane.point.label) / ENDED, 1, self._owner([lane]))
            state = self._program.lane_state(self._device.state, self._compiled.strategy, lane.index)
            own.save(self._round, state, mark=list(self._run.mark()))
            own.close()
        elif self._round not in self._checkpoints.rounds():
            self._save()
        lane.ended = {
            "round": lane.last_line,
            "until": self._round,
            "status": status,
            "reason": reason,
            "seconds": {
                "compile": self._compile_seconds if lane.index == 0 else 0.0,
                "run": lane.seconds,
                "timed_rounds": lane.timed_rounds,
                "rounds_a_call": self._at_once or 1,
            },
            **lane.released(),
        }
        self._run.mark_finished(*lane.point.label, lane.ended)
        self._progress.skip(variant.last_round - self._round)

    def _evaluate(self, due: Iterable[LaneRecord]) -> None:
        """Score the state and write the lines of these lanes; one whose scores are not finite ends without."""
        due = list(due)
        if not due:
            return
        measured = self._device.scores()
        lines = []
        for lane in due:
            own = jax.tree.map(lambda leaf, i=lane.index: leaf[i], measured) if self._batched else measured
            since = 0 if lane.last_line is None else lane.last_line
            names = lane.point.node_names
            self._guard(lane, partial(refuse_bad_scores, own, *lane.point.label, since, self._round, names))
            if lane.ended is None:
                lines.append(self._line(lane, own))
        self._run.append_metrics(lines)
        shown = [name for name in ("test_accuracy", "test_loss") if lines and name in lines[-1]]
        self._progress.note(", ".join(f"{name.replace('_', ' ')} {lines[-1][name]:.4g}" for name in shown))

    def _line(self, lane: LaneRecord, measured: Mapping[str, PyTree]) -> dict[str, Any]:
        """A line of metrics.jsonl, with which the lane's next stretch begins."""
        lane.totals = add_costs(lane.totals, lane.stretch)
        summary = summarize(lane.stretch)
        infos = {name: summary.get(name) for name in self._compiled.fields}  # null in round 0
        lane.stretch, lane.last_line = [], self._round
        line = {"variant": lane.point.name, "seed": lane.point.seed, "round": self._round}
        if "loss" in infos:
            line["train_loss"] = infos.pop("loss")
        for name in self._program.measures:
            values = measured[name]
            flat = flatten_scores(values, name) if isinstance(values, Scores) else values
            line |= {name: float(value) for name, value in flat.items()}
        return line | infos | {f"total_{name}": total for name, total in lane.totals.items()}
