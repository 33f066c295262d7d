"""The training loop: several variants and seeds, one after another, in one run directory.

For each variant and seed: initialise or restore, then alternate chunks of rounds with evaluations. After an evaluation
its line is flushed to disk, then the checkpoint is written; a run killed at any moment and resumed therefore ends with
the same metrics.jsonl and the same parameters as one that was never interrupted (on the same machine and versions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxfl.core import Algorithm, ArgumentError, FederatedData, PyTree, Task
from jaxfl.core.check import at_least, one_of, positive
from jaxfl.training.calibration import check_calibration
from jaxfl.training.checkpoint import Checkpoints
from jaxfl.training.chunks import COSTS, Diverged, FatalCount, check_start, default_chunk_rounds, init_fn
from jaxfl.training.evaluate import EvaluationSet, evaluation_set
from jaxfl.training.json_files import jsonable
from jaxfl.training.part import Schedule, Variant, run_part
from jaxfl.training.preflight import peak_text
from jaxfl.training.progress import ProgressReport
from jaxfl.training.records import RunDirectory, slug
from jaxfl.training.summary import summarize_run

Value = TypeVar("Value")
DataOfSeed = Callable[[int], FederatedData]


def train(
    variants: Mapping[str, Algorithm],
    task: Task,
    data: FederatedData | DataOfSeed | Mapping[str, DataOfSeed],
    test_inputs: Any,
    test_labels: Any,
    *,
    run: RunDirectory,
    seeds: Sequence[int],
    num_rounds: int | Mapping[str, int],
    evaluate_every: int | Mapping[str, int],
    checkpoint_every: int = 10,
    keep_checkpoints: int = 2,
    chunk_rounds: int | None = None,
    test_batch_size: int = 256,
    train_samples: int | None = None,
    calibration_samples: int | Mapping[str, int | None] | None = None,
    budgets: Mapping[str, float] | None = None,
    privacy: Mapping[str, Callable[[int], Sequence[Mapping[str, Any]]]] | None = None,
    privacy_rounds: Mapping[str, int] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train every variant with every seed and leave a complete run directory behind.

    All variants are compiled before the first is trained, so that one whose programs need more memory than is free is
    refused while nothing is lost; the executables are kept, so this compiles nothing twice. A later seed with data of
    another shape is compiled, and refused if need be, before its own work.

    Args:
        variants: name -> algorithm.
        task: what is evaluated.
        data: training data, a function of the seed (a partition per seed), or variant -> such a function. Uploaded once
            per variant and seed.
        test_inputs: (N, *sample).
        test_labels: (N, ...).
        run: from `open_run`; a resumed run continues from its newest checkpoints and skips what is finished.
        seeds: distinct; seed s gives the base key `jax.random.key(s)`.
        num_rounds: rounds of each variant and seed, or variant -> rounds.
        evaluate_every: rounds between evaluations, or variant -> rounds; round 0 and the last round are always
            evaluated.
        checkpoint_every: evaluations between checkpoints; the last state is always saved.
        keep_checkpoints: how many of the newest stay, for each variant and seed.
        chunk_rounds: most rounds in one compiled call. Default: all between two evaluations, at most 100.
        test_batch_size: test samples evaluated at once.
        train_samples: training samples of each node on which an evaluation measures the average model, its metrics and
            the squared norm of the objective's gradient (`stationarity`); None for no such measurement.
        calibration_samples: training samples, drawn from all nodes' once per seed, on which batch statistics are
            measured before an evaluation, in batches of `test_batch_size`: for static batch normalization, which
            tracks none, but also in place of those of training. None evaluates with the task's model state. Or
            variant -> such a number or None.
        budgets: cost ("bits_sent" or "gradient_evaluations", summed over rounds and nodes) -> most that may be spent;
            a variant and seed ends at the first evaluation at which one is reached.
        privacy: variant -> function from the rounds that really ran to the statements of the summary.
        privacy_rounds: variant -> most rounds that its privacy budget allows. A variant with more `num_rounds` ends
            there; a resumed one goes on counting from its checkpoint, whose rounds it does not repeat.
        quiet: show no progress.

    Returns:
        The content of summary.json.

    Raises:
        ArgumentError: an argument cannot be used, or differs from the run that is resumed, or a variant does not fit
            in memory. A new run that is refused before its first round leaves nothing behind.
        Diverged: a measurement or metric is not finite. Lines written so far stay, the summary says "diverged".
        FatalCount: the rounds were not those that the algorithm assumes. The summary says "stopped".

    Guarantees:
        - resumed equals uninterrupted, bit for bit.
        - rounds are compiled once per variant and shape of the data.
        - finished variants and seeds are skipped on resume.
        - no variant runs more rounds than privacy_rounds.
        - a variant that does not fit is refused before any variant is trained.
    """
    at_least(1, checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints, test_batch_size=test_batch_size)
    if train_samples is not None:
        at_least(1, train_samples=train_samples)
    calibrations = _of_each(variants, "calibration_samples", calibration_samples)
    for most in calibrations.values():
        check_calibration(task, most)
    budgets, privacy, privacy_rounds = dict(budgets or {}), dict(privacy or {}), dict(privacy_rounds or {})
    _check_names(variants, seeds, budgets, privacy=privacy, privacy_rounds=privacy_rounds)
    wanted = _of_each(variants, "num_rounds", num_rounds)
    evaluated = _of_each(variants, "evaluate_every", evaluate_every)
    schedules = {}
    for name in variants:
        allowed = privacy_rounds.get(name, wanted[name])
        at_least(1, num_rounds=wanted[name], evaluate_every=evaluated[name], privacy_rounds=allowed)
        rounds = min(wanted[name], allowed)
        chunk = default_chunk_rounds(min(evaluated[name], rounds)) if chunk_rounds is None else chunk_rounds
        at_least(1, chunk_rounds=chunk)
        schedules[name] = Schedule(rounds, evaluated[name], checkpoint_every, chunk)
    data_of = _of_each(variants, "data", data)
    latest: tuple[Any, FederatedData] | None = None

    def data_on_device(name: str, seed: int) -> FederatedData:
        """The training data, uploaded once for all variants that follow each other with the same."""
        nonlocal latest
        source = data_of[name]
        label = (id(source), seed if callable(source) else None)
        if latest is None or latest[0] != label:
            latest = None  # frees the device's memory first
            latest = label, jax.device_put(source(seed) if callable(source) else source)
        return latest[1]

    def prepare(progress: ProgressReport) -> tuple[dict[str, Variant], EvaluationSet]:
        """Say what is wrong with any variant before one of them runs, and compile those with something left to run."""
        for name, algorithm in variants.items():
            check_start(algorithm, jax.random.key(seeds[0]), data_on_device(name, seeds[0]))
        run.record_training(
            {
                "variants": list(variants),
                "seeds": list(seeds),
                "num_rounds": num_rounds if isinstance(num_rounds, int) else dict(num_rounds),
                "evaluate_every": evaluate_every if isinstance(evaluate_every, int) else dict(evaluate_every),
                "chunk_rounds": [schedule.chunk_rounds for schedule in schedules.values()],
                "test_batch_size": test_batch_size,
                "train_samples": train_samples,
                "calibration_samples": (
                    dict(calibration_samples) if isinstance(calibration_samples, Mapping) else calibration_samples
                ),
                "node_loop": task.node_loop,
                "budgets": budgets,
                "privacy_rounds": privacy_rounds,
            }
        )
        test = evaluation_set(test_inputs, test_labels, test_batch_size)
        made, peaks = {}, {}
        for name, algorithm in variants.items():
            chunk = schedules[name].chunk_rounds
            made[name] = Variant(name, algorithm, task, test, chunk, train_samples, calibrations[name])
            waiting = [seed for seed in seeds if run.finished(name, seed) is None]
            if waiting:
                progress.begin(name, waiting[0], schedules[name].num_rounds)
                key = jax.random.key(waiting[0])
                peaks[name] = made[name].compiled(key, data_on_device(name, waiting[0])).peak
        if peaks:
            progress.announce(peak_text(peaks))
        return made, test

    finished: dict[tuple[str, int], dict[str, Any] | None] = {}

    def summary(status: str, released: Mapping[str, int] | None = None) -> dict[str, Any]:
        content = summarize_run(
            run.read_metrics(),
            finished,
            experiment=run.config["experiment"],
            preset=run.config["preset"],
            status=status,
            variants=list(variants),
            seeds=seeds,
            privacy=privacy,
            released=released or {},
            environment=run.config["environment"],
        )
        run.write_summary(content)
        return jsonable(content, "summary")

    total_rounds = len(seeds) * sum(schedule.num_rounds for schedule in schedules.values())
    with ProgressReport(total_rounds, quiet=quiet) as progress:
        try:
            made, test = prepare(progress)
        except ArgumentError:
            run.withdraw()
            raise
        for name, variant in made.items():
            schedule = schedules[name]
            for seed in seeds:
                progress.begin(name, seed, schedule.num_rounds)
                record = run.finished(name, seed)
                if record is None:
                    own_data = data_on_device(name, seed)
                    checkpoints = Checkpoints(run.checkpoint_directory(name, seed), keep_checkpoints)
                    try:
                        record = run_part(variant, seed, own_data, test, run, checkpoints, schedule, budgets, progress)
                    except (Diverged, FatalCount) as stopped:
                        status = "diverged" if isinstance(stopped, Diverged) else "stopped"
                        summary(status, {name: stopped.rounds[1]})  # more rounds than have a line
                        raise
                    finally:
                        checkpoints.close()
                    if record["round"] < wanted[name] and record["round"] == privacy_rounds.get(name):
                        record = {**record, "budget_spent": True}
                    run.mark_finished(name, seed, record)
                    progress.end()
                else:
                    progress.skip(schedule.num_rounds)
                finished[name, seed] = record
    spent = any(record and record["budget_spent"] for record in finished.values())
    return summary("budget_spent" if spent else "finished")


def restore_state(
    run: RunDirectory, variant: str, algorithm: Algorithm, seed: int, data: FederatedData
) -> tuple[int, PyTree]:
    """The newest saved state of one variant and seed.

    Args:
        run: from `open_run` or `read_run`.
        variant: its name.
        algorithm: as it was trained.
        seed: its seed.
        data: its training data (for the shapes).

    Returns:
        (round, state).

    Raises:
        ArgumentError: there is no readable checkpoint, or it holds a state of another form.
    """
    directory = run.checkpoint_directory(variant, seed)
    found = None
    if directory.exists():
        checkpoints = Checkpoints(directory)
        try:
            found = checkpoints.restore(jax.eval_shape(init_fn(algorithm), jax.random.key(seed), data))
        finally:
            checkpoints.close()
    if found is None:
        remedy = "Name a variant and seed of this run."
        raise ArgumentError("variant", "must have a readable checkpoint", f"{directory} has none", remedy)
    return found


def _of_each(variants: Mapping[str, Any], argument: str, value: Value | Mapping[str, Value]) -> dict[str, Value]:
    """Variant -> its value, from one for all or one for each."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(variants, value)
    if set(value) != set(variants):
        found = f"got {', '.join(value)} for {', '.join(variants)}"
        raise ArgumentError(argument, "must be one for all variants, or name each of them", found, "Name each once.")
    return dict(value)


def _check_names(
    variants: Mapping[str, Algorithm],
    seeds: Sequence[int],
    budgets: Mapping[str, float],
    **by_variant: Mapping[str, Any],
) -> None:
    """Refuse names and seeds that cannot label a run."""
    if not variants:
        raise ArgumentError("variants", "must hold at least one algorithm", "got none", "Pass {name: algorithm}.")
    slugs: dict[str, str] = {}
    for name in variants:
        if not slug(name) or slug(name) in slugs:
            found = f"got {name!r}" + (f" beside {slugs[slug(name)]!r}" if slug(name) else "")
            remedy = "Choose names that differ in letters or digits."
            raise ArgumentError("variants", "must have names that give distinct directory names", found, remedy)
        slugs[slug(name)] = name
    if not seeds or len(set(seeds)) != len(seeds):
        raise ArgumentError("seeds", "must be distinct and at least one", f"got {list(seeds)}", "Pass e.g. 0 1 2.")
    for seed in seeds:
        at_least(0, seeds=seed)
        if seed >= 2**32:  # a larger seed would lose its upper bits
            raise ArgumentError("seeds", "must lie in [0, 2^32)", f"got {seed}", "Pass e.g. 0 1 2.")
    for name, most in budgets.items():
        one_of(COSTS, budgets=name)
        positive(**{f"budgets.{name}": most})
    for argument, values in by_variant.items():
        for name in values:
            one_of(tuple(variants), **{argument: name})
