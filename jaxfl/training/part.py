"""One variant with one seed: from its newest checkpoint, or the beginning, to its end.

Chunks of rounds alternate with evaluations. After an evaluation its line is flushed to disk, then the checkpoint is
written: whatever checkpoint a later process finds, the lines up to it are there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.core import Algorithm, Array, FederatedData, PyTree, Task
from jaxfl.core.node_loop import replicated
from jaxfl.training.calibration import CalibrationSet, calibration_set
from jaxfl.training.checkpoint import Checkpoints
from jaxfl.training.chunks import (
    COSTS,
    Diverged,
    Infos,
    add_costs,
    check_start,
    chunk_fn,
    fetch,
    init_fn,
    refuse_bad,
    summarize,
)
from jaxfl.training.evaluate import EvaluationSet, Scores, evaluate_fn, flatten_scores
from jaxfl.training.preflight import PeakMemory, predicted_peak, require_memory
from jaxfl.training.progress import ProgressReport
from jaxfl.training.records import RunDirectory
from jaxfl.training.stationarity import TrainingSamples, training_samples, training_scores_fn


class Schedule(NamedTuple):
    """When things happen, in rounds."""

    num_rounds: int
    evaluate_every: int
    checkpoint_every: int  # in evaluations
    chunk_rounds: int  # most rounds in one compiled call


class _Compiled(NamedTuple):
    """Executables of one variant for one shape of the data."""

    init: Callable[[Array, FederatedData], PyTree]
    rounds: Callable[..., tuple[PyTree, dict[str, Array]]]
    evaluate: Callable[[PyTree, EvaluationSet, CalibrationSet | None], Scores]
    on_training_samples: Callable[[PyTree, TrainingSamples, CalibrationSet | None], dict[str, Array]] | None
    peak: PeakMemory  # predicted


class Variant:
    """One variant's functions, compiled once per shape of the data and used for every seed.

    Attributes:
        unrecorded_seconds: spent on compiling, and in no record yet.
    """

    def __init__(
        self,
        name: str,
        algorithm: Algorithm,
        task: Task,
        test: EvaluationSet,
        chunk_rounds: int,
        train_samples: int | None = None,
        calibration_samples: int | None = None,
    ):
        self.name, self.algorithm, self._task, self._test = name, algorithm, task, test
        self.train_samples, self._calibration_samples = train_samples, calibration_samples
        self.unrecorded_seconds = 0.0
        self._init = init_fn(algorithm)
        self._sharding = replicated(task.node_loop)
        self._rounds = chunk_fn(algorithm, chunk_rounds, self._sharding)
        self._evaluate = evaluate_fn(task, algorithm.node_params)
        self._on_training_samples = training_scores_fn(task, algorithm.node_params)
        self._compiled: dict[Any, _Compiled] = {}

    def structure(self, key: Array, data: FederatedData) -> PyTree:
        """Shapes and dtypes of the state."""
        return jax.eval_shape(self._init, key, data)

    def place(self, state: PyTree) -> PyTree:
        """A new or restored state where the compiled rounds want it: on every device that takes part."""
        return state if self._sharding is None else jax.device_put(state, self._sharding)

    def calibration(self, key: Array, data: FederatedData) -> CalibrationSet | None:
        """The samples of which batch statistics are taken before an evaluation; None where those of training stay."""
        if self._calibration_samples is None:
            return None
        return calibration_set(key, data, self._calibration_samples, self._test.counts.shape[1])

    def compiled(self, key: Array, data: FederatedData) -> _Compiled:
        """The executables for these data.

        Raises:
            ArgumentError: they need more memory than is free.
        """
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in data)
        if shapes not in self._compiled:
            began = time.perf_counter()
            programs = self._compile(key, data)
            self.unrecorded_seconds += time.perf_counter() - began
            require_memory(self.name, programs.peak, self._task)
            self._compiled[shapes] = programs
        return self._compiled[shapes]

    def _compile(self, key: Array, data: FederatedData) -> _Compiled:
        state = self.structure(key, data)
        if self._sharding is not None:  # else XLA may choose another one for what `place` puts on every device
            state = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding), state
            )
        init = self._init.lower(key, data).compile()
        rounds = self._rounds.lower(key, state, data, np.int32(0)).compile()
        calibration = jax.eval_shape(self.calibration, key, data)
        evaluate = self._evaluate.lower(state, self._test, calibration).compile()
        on_samples = samples = None
        if self.train_samples is not None:
            samples = jax.eval_shape(partial(training_samples, most=self.train_samples), data)
            on_samples = self._on_training_samples.lower(state, samples, calibration).compile()
        later = [program for program in (rounds, evaluate, on_samples) if program is not None]
        # A CPU's devices share one memory.
        copies = jax.device_count() if self._sharding is not None and jax.default_backend() == "cpu" else 1
        peak = predicted_peak((data, self._test, samples, calibration), state, init, later, num_copies=copies)
        return _Compiled(init, rounds, evaluate, on_samples, peak)


def run_part(
    variant: Variant,
    seed: int,
    data: FederatedData,
    test: EvaluationSet,
    run: RunDirectory,
    checkpoints: Checkpoints,
    schedule: Schedule,
    budgets: Mapping[str, float],
    progress: ProgressReport,
) -> dict[str, Any]:
    """Run what is left of one variant and seed.

    Args:
        variant: its functions.
        seed: gives the base key.
        data: its training data, on the device.
        test: the test set.
        run: where lines go.
        checkpoints: its own.
        schedule: when things happen.
        budgets: cost -> most that may be spent.
        progress: told of every chunk.

    Returns:
        The record for `RunDirectory.mark_finished`: "round", "budget_spent", "seconds".
    """
    key = jax.random.key(seed)
    check_start(variant.algorithm, key, data)
    compiled = variant.compiled(key, data)  # before anything else takes memory
    compile_seconds, variant.unrecorded_seconds = variant.unrecorded_seconds, 0.0
    had_checkpoints = bool(checkpoints.rounds())
    found = checkpoints.restore(variant.structure(key, data))
    samples = None if variant.train_samples is None else training_samples(data, variant.train_samples)
    calibration = variant.calibration(key, data)
    progress.compiled()
    run_seconds, timed_rounds = 0.0, 0

    def evaluate(state: PyTree, stretch: list[Infos], since: int, round_index: int) -> None:
        """Score the state and write its line."""
        scores = jax.device_get(compiled.evaluate(state, test, calibration))
        on_samples: dict[str, np.ndarray] = {}
        if compiled.on_training_samples is not None and samples is not None:
            on_samples = jax.device_get(compiled.on_training_samples(state, samples, calibration))
        _refuse_bad_scores(scores, on_samples, variant.name, seed, since, round_index)
        found = summarize(stretch)
        measured = {name: found.get(name) for name in fields}  # null in round 0, before anything was measured
        line = {
            "variant": variant.name,
            "seed": seed,
            "round": round_index,
            **({"train_loss": measured.pop("loss")} if "loss" in measured else {}),
            **flatten_scores(scores),
            **{name: float(value) for name, value in on_samples.items()},
            **measured,
            **{f"total_{name}": total for name, total in totals.items()},
        }
        run.append_metrics(line)
        shown = [name for name in ("test_accuracy", "test_loss") if name in line]
        progress.note(", ".join(f"{name.replace('_', ' ')} {line[name]:.4g}" for name in shown))

    # Names of the info's fields, for the line of round 0; what a chunk writes has the same.
    shapes = jax.eval_shape(variant.algorithm.round, key, variant.structure(key, data), data)[1]
    fields = [name for name, value in shapes._asdict().items() if value is not None]
    totals: dict[str, float | int] = {name: 0 for name in COSTS if name in fields}
    if found is None:
        if had_checkpoints:
            warnings.warn(f"no readable checkpoint of {variant.name}, seed {seed}: beginning it again.", stacklevel=3)
        run.forget_finished(variant.name, seed)
        run.keep_metrics_until(variant.name, seed, None)
        round_index, state = 0, variant.place(compiled.init(key, data))
        evaluate(state, [], 0, 0)
    else:
        round_index, state = found[0], variant.place(found[1])
        last_line = run.keep_metrics_until(variant.name, seed, round_index)[-1]
        totals = {name: last_line[f"total_{name}"] for name in totals}
    progress.skip(round_index)

    spent = any(totals.get(name, 0) >= most for name, most in budgets.items())
    while round_index < schedule.num_rounds and not spent:
        since: int = round_index
        stretch: list[Infos] = []
        # The grid of evaluations starts at round 0, wherever this process began.
        target = min(since - since % schedule.evaluate_every + schedule.evaluate_every, schedule.num_rounds)
        while round_index < target:
            count = min(schedule.chunk_rounds, target - round_index)
            began = time.perf_counter()
            state, buffers = compiled.rounds(key, state, data, np.int32(count))
            jax.block_until_ready((state, buffers))
            run_seconds += time.perf_counter() - began
            infos = fetch(buffers, count)
            refuse_bad(infos, variant.name, seed, round_index + 1, partial(variant.algorithm.node_params, state))
            stretch.append(infos)
            round_index += count
            timed_rounds += count
            progress.advance(count)
        totals = add_costs(totals, stretch)
        evaluate(state, stretch, since, round_index)
        spent = any(totals.get(name, 0) >= most for name, most in budgets.items())
        evaluations = -(-round_index // schedule.evaluate_every)
        if round_index == schedule.num_rounds or spent or evaluations % schedule.checkpoint_every == 0:
            checkpoints.save(round_index, state)
    progress.skip(schedule.num_rounds - round_index)
    return {
        "round": round_index,
        "budget_spent": spent,
        "seconds": {"compile": compile_seconds, "run": run_seconds, "timed_rounds": timed_rounds},
    }


def _refuse_bad_scores(
    scores: Scores, on_samples: Mapping[str, np.ndarray], variant: str, seed: int, since: int, round_index: int
) -> None:
    """Raise Diverged if a metric is not finite."""
    named = [
        *((f"test_{name}", values) for name, values in scores.nodes.items()),
        *((f"test_{name}_average_model", value) for name, value in scores.average_model.items()),
        *on_samples.items(),
    ]
    for name, values in named:
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise Diverged(
                variant,
                seed,
                name,
                rounds=(min(since + 1, round_index), round_index),
                first_round=round_index,
                node=int(bad[0]) if np.ndim(values) else None,
                value=float(np.ravel(values)[bad[0]]),
            )
