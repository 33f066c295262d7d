"""Lanes that go through their rounds in lockstep: one run is a sweep of one lane.

Chunks of rounds alternate with evaluations. After an evaluation the lines of all lanes are flushed to disk together,
then the checkpoint is written: whatever checkpoint a later process finds, the lines up to it are there. A lane that
diverges, or spends a budget, ends with its reason: its state and its record are saved then, and the others go on. What
is computed of it later is thrown away. A lane spends a budget at the end of a chunk, where all others stop with it.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxfl.core import ArgumentError, PyTree
from jaxfl.training.checkpoint import Checkpoints
from jaxfl.training.chunks import COSTS, Diverged, FatalCount, Infos, add_costs, info_fields, refuse_bad, summarize
from jaxfl.training.evaluate import Scores, flatten_scores
from jaxfl.training.lanes import Point
from jaxfl.training.program import Compiled, Program
from jaxfl.training.progress import ProgressReport
from jaxfl.training.records import ENDED, METRICS, RunDirectory, lane_of
from jaxfl.training.variant import costs_of


@dataclass
class _LaneRecord:
    """What the host keeps of one lane."""

    index: int
    point: Point
    totals: dict[str, float | int]
    stretch: list[Infos] = field(default_factory=list)  # infos since its last line
    last_line: int | None = None  # its round
    seconds: float = 0.0  # its share of the time that rounds took
    timed_rounds: int = 0
    ended: dict[str, Any] | None = None  # the record of `RunDirectory.mark_finished`

    def spent(self) -> str | None:
        """Which budget is reached, by the rounds since the last line, too; None without any."""
        budgets = self.point.variant.budgets
        totals = add_costs(self.totals, self.stretch) if budgets else {}
        return next(
            (f"{name} reached {totals[name]:g}" for name, most in budgets.items() if totals[name] >= most), None
        )

    def released(self) -> dict[str, dict[str, float | int]]:
        """What the record of its end holds for statements: "released", the totals of all rounds that ran."""
        names, totals = self.point.variant.released, add_costs(self.totals, self.stretch)
        return {"released": {name: totals[name] for name in names}} if names else {}


class Lockstep:
    """The lanes of one pass through a compiled program.

    Args:
        program, compiled: what runs.
        points: the lanes, at most as many as the program has slots.
        run: where lines and records go.
        directory: of the checkpoints that all lanes share.
        checkpoint_every: evaluations between checkpoints; the last state is always saved.
        keep_checkpoints: how many of the newest stay.
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
        compile_seconds: float,
        progress: ProgressReport,
        raises: bool,
    ):
        self._program, self._compiled, self._run, self._progress = program, compiled, run, progress
        self._checkpoint_every, self._compile_seconds, self._raises = checkpoint_every, compile_seconds, raises
        self._directory, self._keep = directory, keep_checkpoints
        self._batched = compiled.strategy.num_slots > 1
        self._lanes = [
            _LaneRecord(index, point, {name: 0 for name in COSTS if name in costs_of(point.variant, compiled.fields)})
            for index, point in enumerate(points)
        ]
        self._every = program.variant.evaluate_every
        self._last = max(point.variant.last_round for point in points)
        self._arguments = program.lanes(points, compiled.strategy)
        self._tables = program.tables(points, compiled.strategy)

    def run(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Go from the newest checkpoint, or the beginning, to the end.

        Returns:
            (variant, seed) -> its record: "round" of its last line, "until", the round at which it ended, "status",
            "reason" or None, "seconds" and, where statements depend on totals, "released", these up to "until".
        """
        self._checkpoints = Checkpoints(self._directory, self._keep)
        try:
            self._begin()
            while self._round < self._last and self._running():
                self._go_to(self._next_stop())
                self._stop()
            for lane in self._running():
                self._end(lane)
        finally:
            self._checkpoints.close()
        return {lane.point.label: lane.ended for lane in self._lanes if lane.ended is not None}

    def released(self) -> dict[str, dict[str, float | int]]:
        """The entry "released" of a single lane that ended by an error."""
        return self._lanes[0].released()

    def _running(self) -> list[_LaneRecord]:
        return [lane for lane in self._lanes if lane.ended is None]

    def _begin(self) -> None:
        had_checkpoints = bool(self._checkpoints.rounds())
        num_lanes = len(self._lanes) if self._batched else None
        restored = self._checkpoints.restore(self._program.saved_structure(num_lanes))
        labels = [lane.point.label for lane in self._lanes]
        for (name, seed), record in self._run.finished(labels).items():  # an end behind the checkpoint comes again
            if restored is None or record["until"] > restored[0]:
                self._forget(name, seed)
        self._progress.compiled()
        if restored is None:
            if had_checkpoints:
                whose = f"{labels[0][0]}, seed {labels[0][1]}" + (f" and {len(labels) - 1} more" if labels[1:] else "")
                warnings.warn(f"no readable checkpoint of {whose}: beginning again.", stacklevel=5)
            for name, seed in labels:
                self._forget(name, seed)
            self._run.keep_metrics_until(labels, None)
            self._round, self._state = 0, self._compiled.init(self._arguments, self._tables.data)
            self._evaluate(self._lanes)
            return
        self._round, self._state = restored[0], self._program.place(restored[1], self._compiled.strategy)
        lines = {lane_of(line): line for line in self._run.keep_metrics_until(labels, self._round)}
        ended = self._run.finished(labels, list(lines.values()))
        for lane in self._lanes:
            line, lane.ended = lines.get(lane.point.label), ended.get(lane.point.label)
            if lane.ended is None and (line is None or line["round"] != self._round):
                name, seed = lane.point.label
                raise ArgumentError(
                    "out",
                    f"{self._run.path / METRICS} must hold the line of every checkpoint",
                    f"round {self._round} of {name}, seed {seed} is missing",
                    "Restore the file, or start again with another out.",
                )
            if line is not None:
                lane.last_line, lane.totals = line["round"], {name: line[f"total_{name}"] for name in lane.totals}
            self._progress.skip(lane.point.variant.last_round if lane.ended else self._round)
        for lane in self._running():
            self._end_if_spent(lane)

    def _forget(self, name: str, seed: int) -> None:
        """Drop what an earlier process left of a lane's end."""
        self._run.forget_finished(name, seed)
        shutil.rmtree(self._run.lane_directory(name, seed) / ENDED, ignore_errors=True)

    def _next_stop(self) -> int:
        """The next round with a line: the grid begins at round 0, and a lane's last round is always evaluated."""
        ends = [lane.point.variant.last_round for lane in self._running()]
        return min(self._round - self._round % self._every + self._every, *(end for end in ends if end > self._round))

    def _go_to(self, target: int) -> None:
        """Run to a round, chunk by chunk, or until a lane has spent a budget or every lane has ended."""
        while self._round < target and self._running() and not any(lane.spent() for lane in self._running()):
            count = min(self._program.variant.rounds_per_call, target - self._round)
            began = time.perf_counter()
            rounds, running = self._compiled.rounds, self._running()
            self._state, buffers = rounds(self._arguments, self._state, self._tables.data, np.int32(count))
            buffers = info_fields(jax.device_get(jax.block_until_ready((self._state, buffers))[1]))
            seconds = time.perf_counter() - began
            first, self._round = self._round + 1, self._round + count
            for lane in running:
                # Sliced on the host: a slice on the device would compile once per length.
                own = {
                    name: (values[lane.index] if self._batched else values)[:count] for name, values in buffers.items()
                }
                if lane.point.variant.ledger is not None:
                    own |= lane.point.variant.ledger.of_round(own)._asdict()
                lane.seconds, lane.timed_rounds = lane.seconds + seconds / len(running), lane.timed_rounds + count
                lane.stretch.append(own)
                params = partial(
                    self._program.node_params, self._state, self._compiled.strategy, lane.index, lane.point
                )
                self._guard(lane, partial(refuse_bad, own, *lane.point.label, first, params))
            self._progress.advance(count * len(running))

    def _guard(self, lane: _LaneRecord, check: Any) -> None:
        """End the lane if the check fails."""
        try:
            check()
        except (Diverged, FatalCount) as error:
            if self._raises:
                raise
            self._end(lane, "diverged" if isinstance(error, Diverged) else "stopped", str(error))

    def _stop(self) -> None:
        """Lines, lanes that end here, and the checkpoint, in this order."""
        on_grid = self._round % self._every == 0 or self._round == self._last
        ends = {lane.index for lane in self._running() if self._round == lane.point.variant.last_round or lane.spent()}
        due = [lane for lane in self._running() if on_grid or lane.index in ends]
        self._evaluate(due)
        for lane in [lane for lane in due if lane.ended is None]:
            self._end_if_spent(lane)
        evaluations = -(-self._round // self._every)
        if on_grid and self._running() and (self._round == self._last or evaluations % self._checkpoint_every == 0):
            self._save(self._round)

    def _save(self, round_index: int) -> None:
        state = self._program.saved(self._state, self._compiled.strategy, len(self._lanes))
        self._checkpoints.save(round_index, state)

    def _end_if_spent(self, lane: _LaneRecord) -> None:
        """End a lane that has reached a budget, or what its privacy budget pays for, before the last round of all."""
        spent = lane.spent()
        if spent:
            self._end(lane, "budget_spent", spent)
        elif self._round == lane.point.variant.last_round < self._last:
            self._end(lane)

    def _end(self, lane: _LaneRecord, status: str = "finished", reason: str | None = None) -> None:
        """Save a lane that ends before the others, and record its end."""
        variant = lane.point.variant
        if status == "finished" and variant.last_round < variant.num_rounds:
            status, reason = "budget_spent", f"the privacy budget pays for {variant.last_round} rounds"
        natural = status == "finished" and self._round == self._last
        if status in ("diverged", "stopped") or (self._batched and not natural):
            self._forget(*lane.point.label)  # what a process left that died before it recorded the end
            own = Checkpoints(self._run.lane_directory(*lane.point.label) / ENDED, 1)
            own.save(self._round, self._program.lane_state(self._state, self._compiled.strategy, lane.index))
            own.close()
        elif self._round not in self._checkpoints.rounds():
            self._save(self._round)
        lane.ended = {
            "round": lane.last_line,
            "until": self._round,
            "status": status,
            "reason": reason,
            "seconds": {
                "compile": self._compile_seconds if lane.index == 0 else 0.0,
                "run": lane.seconds,
                "timed_rounds": lane.timed_rounds,
            },
            **lane.released(),
        }
        self._run.mark_finished(*lane.point.label, lane.ended)
        self._progress.skip(variant.last_round - self._round)

    def _evaluate(self, due: Iterable[_LaneRecord]) -> None:
        """Score the state and write the lines of these lanes; one whose scores are not finite ends without."""
        due = list(due)
        if not due:
            return
        measured = jax.device_get(self._compiled.evaluate(self._arguments, self._state, self._tables.arrays))
        lines = []
        for lane in due:
            own = jax.tree.map(lambda leaf, i=lane.index: leaf[i], measured) if self._batched else measured
            since = 0 if lane.last_line is None else lane.last_line
            self._guard(lane, partial(_refuse_bad_scores, own, *lane.point.label, since, self._round))
            if lane.ended is None:
                lines.append(self._line(lane, own))
        self._run.append_metrics(lines)
        shown = [name for name in ("test_accuracy", "test_loss") if lines and name in lines[-1]]
        self._progress.note(", ".join(f"{name.replace('_', ' ')} {lines[-1][name]:.4g}" for name in shown))

    def _line(self, lane: _LaneRecord, measured: Mapping[str, PyTree]) -> dict[str, Any]:
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


def _refuse_bad_scores(measured: Mapping[str, PyTree], variant: str, seed: int, since: int, round_index: int) -> None:
    """Raise Diverged if a number is not finite."""
    named = []
    for measure, values in measured.items():
        if isinstance(values, Scores):
            named += [(f"{measure}_{name}", value) for name, value in values.nodes.items()]
            named += [(f"{measure}_{name}_average_model", value) for name, value in values.average_model.items()]
        else:
            named += values.items()
    for name, values in named:
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise Diverged(
                variant,
                seed,
                name,
                rounds=(min(since + 1, round_index), round_index),
                first_round=round_index,
                node=int(bad[0]) if np.ndim(values) and len(bad) == 1 else None,
                value=float(np.ravel(values)[bad[0]]),
            )
