"""The way from rows to a run directory: train, tell, draw."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxfl.analysis.final_plot import plot_final
from jaxfl.analysis.plots import X_AXES, plot_run
from jaxfl.channel import Costs
from jaxfl.core import ArgumentError, check
from jaxfl.core.platform import tracing_for
from jaxfl.data.columns import short_name
from jaxfl.data.describe import reading_lines, scale_warnings
from jaxfl.frame.experiment import Experiment, Finished, Prepared, Request, Row
from jaxfl.frame.launcher import run_in_jobs
from jaxfl.frame.options import flag, flat, options, text_of
from jaxfl.frame.own_files import dataset_of
from jaxfl.frame.records import Publication, Run
from jaxfl.frame.selecting import ON_TEST, checked_search, winner_of
from jaxfl.privacy.statements import statement_text
from jaxfl.training import Case, RunDirectory, Stop, open_run, publish, read_run, secret_key, summary_table, train
from jaxfl.training.clock import Clock
from jaxfl.training.compilation_cache import compilation_cache
from jaxfl.training.crash import last_words
from jaxfl.training.hooks import Hook, all_of, profile, tracker
from jaxfl.training.processes import on_all, on_first
from jaxfl.training.run_directory import SUMMARY
from jaxfl.training.sites import SITES, site_table
from jaxfl.training.summary import FEWEST_RANKED, deciding, format_spread, ranking, read_results, trouble

_MOST_DEVICES = 8  # of a CPU: each holds a copy of what is not shared out


def use_all_cores(at_least: int = 1) -> None:
    """Give a CPU a JAX device a core, so that convolutions and lanes of a sweep run on all of them.

    JAX_NUM_CPU_DEVICES goes before it, and a process that has computed already stays as it is.

    Args:
        at_least: devices that are asked for, though there be fewer cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # the backend runs already
            jax.config.update("jax_num_cpu_devices", max(at_least, min(cores, _MOST_DEVICES)))


def leave_accelerators() -> None:
    """Compute on the CPU in a process that has not computed yet: one that waits for jobs, or a job without a GPU."""
    jax.config.update("jax_platforms", "cpu")


def run(request: Request) -> int:
    """Train all rows; returns the exit code."""
    experiment, console = request.experiment, Console(markup=False)
    clock, where = request.clock or Clock("data"), request.config.run
    clock.enter("data")
    where.check()
    check.at_least(1, checkpoint_every=where.checkpoint_every)
    if where.lanes_at_once is not None:
        check.at_least(1, lanes_at_once=where.lanes_at_once)
    if where.checkpoint_minutes is not None:
        check.non_negative(checkpoint_minutes=where.checkpoint_minutes)
    if where.rank_by is not None and not any(fnmatch.fnmatch(where.rank_by, one) for one in _columns(experiment)):
        remedy = f"Choose among {', '.join(_columns(experiment))}."
        raise ArgumentError("rank_by", "must be a column of the closing table", f"got {where.rank_by}", remedy)
    decides = [*_columns(experiment)] if where.rank_by is None else [where.rank_by]
    if request.search is not None and not any(name.startswith(ON_TEST) for name in decides):
        requirement = "must be measured on test samples in a private selection"
        found = f"got {where.rank_by or 'an experiment without such a column'}"
        raise ArgumentError("rank_by", requirement, found, "Choose test_accuracy, for instance.")
    secrecy = getattr(request.config, "publication", Publication())
    secrecy.check()
    with tracing_for("gpu") if where.gpus else contextlib.nullcontext():  # as the jobs will, which have some
        prepared, cases, facts = on_all(prepare)(request)
    name = request.preset or short_name(flat(request.config).get("dataset", "default"))
    directory = Path(on_first(new_run_directory)(where.out, experiment.name, name, resume=where.resume))
    records = open_run(directory, facts, experiment=experiment.name, preset=request.preset, resume=where.resume)
    if request.stop is not None:
        request.stop.undo_until_heeded(records.withdraw, records.resumed)
    dataset = dataset_of(request.config)
    of_file = [] if dataset is None else [*reading_lines(dataset), *(f"warning: {t}" for t in scale_warnings(dataset))]
    for text in [*of_file, *prepared.description]:
        console.print(text, soft_wrap=True, highlight=False)
    key, command_line = secret_key(records) if secrecy.seed_from_os else None, _command_line(request, records)
    if where.has_jobs:
        work = partial(run_pass, request._replace(stop=None, clock=None), records.path.absolute())
        clock.enter("jobs")
        run_in_jobs(work, records, cases, where, key=key, stop=request.stop, quiet=where.quiet)
    with last_words(directory), _hook(where, records) as hook:
        summary = train(
            cases,
            run=records,
            checkpoint_every=where.checkpoint_every,
            checkpoint_minutes=where.checkpoint_minutes,
            keep_params=where.keep_params,
            quiet=where.quiet,
            key=key,
            stop=request.stop,
            lanes_at_once=where.lanes_at_once,
            hook=hook,
            clock=clock,
        )
    return _tell(request, prepared, cases, records, summary, clock, command_line)


@on_all
def _command_line(request: Request, records: RunDirectory) -> str | None:
    """The command that an ended run keeps, or else this one, for another folder; None where nobody typed it."""
    earlier = records.read_summary().get("command_line") if (records.path / SUMMARY).exists() else None
    if earlier is not None or request.arguments is None:
        return earlier
    words = [word for word in request.arguments if word != "--resume" and not word.startswith("--out=")]
    kept = [word for at, word in enumerate(words) if word != "--out" and words[max(at - 1, 0)] != "--out"]
    return f"{request.experiment.command} {shlex.join(kept)}"


@on_first
def _tell(
    request: Request,
    prepared: Prepared,
    cases: Mapping[str, Case],
    records: RunDirectory,
    summary: dict[str, Any],
    clock: Clock,
    command_line: str | None,
) -> int:
    """Print and draw a run's results, and publish the covered ones; returns the exit code."""
    experiment, console, directory = request.experiment, Console(markup=False), records.path
    where, secrecy = request.config.run, getattr(request.config, "publication", Publication())
    trouble = _lone_trouble(summary) if where.has_jobs else None
    if trouble is not None:
        status, reason = trouble
        records.write_summary({**summary, "status": status})
        print(f"stopped: {reason}", file=sys.stderr)
        return 1
    finished = Finished(records, summary, request.rows, prepared.context)
    preset = experiment.presets.get(request.preset or "")
    draw = preset.pictures if preset is not None and preset.pictures is not None else experiment.finish
    with clock.phase("pictures"):
        pictures = [] if draw is None else list(draw(finished))
    metrics = dict.fromkeys(name for row in summary["cases"].values() for name in row)
    columns = [name for pattern in _columns(experiment) for name in fnmatch.filter(metrics, pattern)]
    decide = [*([] if where.rank_by is None else [where.rank_by]), *columns]
    if request.search is not None:
        summary["selected"] = winner_of(request.search, summary, request.rows, cases, decide)
        records.write_summary(summary)  # before anything is drawn
    ranked = ranking(summary, decide)
    tell = experiment.tell if request.search is None else None
    if tell is None:
        _print_tables(request, summary, directory, columns, decide)
    else:
        with clock.phase("pictures"):
            pictures += tell(request, finished)
    for name, entry in summary["cases"].items():
        if "budget_spent" in entry.get("status", ()):
            rounds = max(entry["rounds_per_seed"])
            is_proven = flat(request.rows[name].config).get("bound", "proven") == "proven"
            statements = [each for each in entry["privacy"] if (each["bound"] == "proven") == is_proven]
            what = "iterations that a budget pays for were"
            if not statements:
                what = "budget was"
            elif statements[0]["dp_epsilon"] is not None:
                what = "privacy budget was"
            note = f"{name}: the {what} spent after {rounds} rounds, and the run stopped there"
            reasons = [statement_text(statements[0])] if statements else dict.fromkeys(filter(None, entry["reason"]))
            console.print(f"{note}: {', '.join(reasons)}")
    settings = {name: row.settings for name, row in request.rows.items() if not row.baseline}
    clock.enter("pictures")
    if tell is None:
        pictures = [*plot_run(directory, where.x, ranked), *plot_final(directory, settings), *pictures]
    paths = ", ".join(map(str, pictures))
    if command_line is not None:
        summary["command_line"] = command_line
    summary["seconds"]["command"] = clock.seconds()
    records.write_summary(summary)
    if secrecy.publish is not None:
        publish(records, cases, secrecy.publish)
        stays = "config.json, metrics, pictures and checkpoints stay behind"
        console.print(f"Published: {secrecy.publish} ({stays})", soft_wrap=True)
    console.print(f"Run: {directory}   Table: {directory / 'results.csv'}   Pictures: {paths}", soft_wrap=True)
    return 0


def _columns(experiment: Experiment) -> tuple[str, ...]:
    """Metrics of the closing table. Samples that validate decide before others, where there are some."""
    return tuple(dict.fromkeys(("validation_accuracy", *experiment.columns, "test_auc")))


def prepare(request: Request) -> tuple[Prepared, dict[str, Case], dict[str, Any]]:
    """Prepare the rows: returns them as prepared, the cases to train, and what config.json keeps."""
    assert request.experiment.prepare is not None
    prepared = request.experiment.prepare(request.rows)
    cases = with_ledgers(prepared.cases, request.rows, request.config.run.x)
    placement = request.config.run.placement()
    cases = {name: case._replace(placement=placement) for name, case in cases.items()}
    task = next(iter(cases.values())).task  # whose loop stands for auto: another one gives other last bits
    facts = {**saved_options(request), "node_loop": task.node_loop, **prepared.saved}
    dataset = dataset_of(request.config)
    if dataset is not None and dataset.reading is not None:
        facts["read"] = {**dataset.reading._asdict(), "classes": dataset.class_names}
    if request.search is not None:
        at_ends = request.experiment.prepare(request.search.ends).cases
        words = checked_search(request.search, request.rows, cases, at_ends)
        prepared = prepared._replace(description=[*prepared.description, *words])
        facts |= request.search.facts()
    return prepared, cases, facts


def run_pass(request: Request, path: Path, number: int, stop: Stop) -> None:
    """Train a pass of a run, from where it stands: the work of a job.

    All rows are prepared, for their common options decide the compiled program.

    Args:
        request: of the whole run.
        path: of the run.
        number: of the pass.
        stop: as `train` takes it.

    Raises:
        ArgumentError: as `train`, or a job with other devices.
    """
    where = request.config.run
    use_all_cores(where.devices or 1)
    if not where.gpus:
        leave_accelerators()
    elif jax.default_backend() != "gpu" or jax.local_device_count() < where.gpus:
        found = f"the job has {jax.local_device_count()} of {jax.default_backend()}"
        raise ArgumentError("gpus", "must be there for every job", found, "Ask for fewer, or mend the installation.")
    with compilation_cache(request.cache):
        _, cases, _ = prepare(request)
        records = read_run(path)
        has_secret = getattr(request.config, "publication", Publication()).seed_from_os
        with last_words(path), _hook(where, records, traces=number == 0) as hook:
            train(
                cases,
                run=records,
                checkpoint_every=where.checkpoint_every,
                checkpoint_minutes=where.checkpoint_minutes,
                keep_params=where.keep_params,
                quiet=True,
                key=secret_key(records) if has_secret else None,
                stop=stop,
                lanes_at_once=where.lanes_at_once,
                only=number,
                hook=hook,
            )


@contextlib.contextmanager
def _hook(where: Run, records: RunDirectory, *, traces: bool = True) -> Iterator[Hook | None]:
    """The hook that --track and --profile ask for. Of several jobs the one with the first pass writes a trace."""
    with contextlib.ExitStack() as stack:
        hooks = [stack.enter_context(tracker(name, records)) for name in where.track]
        if where.profile and traces:
            hooks.append(stack.enter_context(profile(records.path / "profile")))
        yield all_of(hooks) if hooks else None


def _lone_trouble(summary: Mapping[str, Any]) -> tuple[str, str] | None:
    """Status and reason of a run of a single lane that did not finish: what `train` in this process would raise."""
    ends = [(status, row) for row in summary["cases"].values() for status in row["status"]]
    if len(ends) > 1 or ends[0][0] not in ("diverged", "stopped"):
        return None
    return ends[0][0], ends[0][1]["reason"][0]


def _compared(request: Request, names: Sequence[str]) -> list[str]:
    """Keep the cases that are no baselines, in their order."""
    return [name for name in names if name in request.rows and not request.rows[name].baseline]


def _print_tables(
    request: Request, summary: Mapping[str, Any], directory: Path, columns: Sequence[str], decide: Sequence[str]
) -> None:
    """Print the closing table, the sites of the best case, and its command."""
    console = Console(markup=False)
    console.print(summary_table(summary, columns, request.config.run.rank_by))
    compared = _compared(request, ranking(summary, decide))
    if compared and request.search is None and (directory / SITES).exists():
        table = site_table(read_results(directory / SITES), compared[0])
        if table is not None:
            console.print(table)
    if (len(compared) >= FEWEST_RANKED or request.search is not None) and columns:
        console.print(_winner(request, summary, decide), soft_wrap=True)


def words_of(request: Request, name: str) -> list[str]:
    """The options of one row, in which only seeds vary, as words of a command line."""
    known, row = options(type(request.config)), request.rows[name]
    own = {name: value for name, value in request.changes.items() if known[name].saved or name == "data_dir"}
    words = [] if request.preset is None else ["--preset", request.preset]
    for option, value in (own | row.settings).items():
        words += [flag(option), *([value] if isinstance(value, str) else text_of(value).split())]
    if any("seed" in part for part in request.grid):  # also by default; --seed is an option of its own
        words += ["--seeds", *map(str, row.seeds)]
    return words


def _winner(request: Request, summary: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """The best of the compared cases, as a command; of a private selection its options and what choosing it costs."""
    if request.search is not None:
        winner = summary["selected"]
        if winner is None:
            return "No run of the search ended with a result, so that none is selected."
        value = format_spread(winner["metric"], summary["cases"][winner["case"]].get(winner["metric"]))
        drawn = " ".join(f"{flag(name)} {drawn!r}" for name, drawn in winner["settings"].items())
        text = f"Selected by {winner['metric'].replace('_', ' ')}: {drawn} ({value}). The choice is paid for, where"
        stated = [f"  {statement_text(one)}" for one in winner["privacy"]]
        return "\n".join([f"{text} the other runs and their number stay secret:", *stated])
    compared, metric = _compared(request, ranking(summary, metrics)), deciding(summary, metrics)
    best = compared[0]
    command = f"{request.experiment.command} {shlex.join(words_of(request, best))}"
    entry = summary["cases"][best]
    value = ", ".join(filter(None, [format_spread(metric, entry.get(metric)), trouble(entry)]))
    text = f"Best of {len(compared)} by {metric.replace('_', ' ')}: {best} ({value}); reproduce with"
    looks_at = "validation" if metric.startswith("validation") else "test"
    return f"{text}\n  {command}\nNo ε covers the choice among cases, which looks at their {looks_at} results."


def with_ledgers(cases: Mapping[str, Case], rows: Mapping[str, Row], x: str) -> dict[str, Case]:
    """The cases, with a ledger where their row's configuration says what nodes cost and what a sample takes them.

    A configuration has `costs`, and `work()`, or a network and data that tell the work. A batch goes through the model
    at once. A case that brings a ledger keeps it.

    Raises:
        ArgumentError: an option of costs out of range, or curves against a cost that the run does not count.
    """
    with_costs = {}
    for name, case in cases.items():
        config, values = rows[name].config, flat(rows[name].config)
        if case.ledger is not None:
            pass
        elif hasattr(config, "costs"):
            work = config.work() if hasattr(config, "work") else config.network.work(config.data)
            batch_size = values["batch_size"] * (values.get("entry_size") or 1)
            case = case._replace(ledger=config.costs.ledger(work, batch_size))
        elif {total.removeprefix("total_") for total in X_AXES[x].totals} & {*Costs._fields}:
            remedy = "Draw against rounds, bits or evaluations."
            raise ArgumentError("x", "must be what the run counts", f"got {x} without a model of layers", remedy)
        with_costs[name] = case
    return with_costs


def saved_options(request: Request) -> dict[str, Any]:
    """Options that decide the results: the first row's, and of each row its differences and its seeds."""
    kinds = options(type(request.config))
    first = {name: value for name, value in flat(request.config).items() if kinds[name].saved}
    cases = {}
    for name, row in request.rows.items():
        values = {key: value for key, value in flat(row.config).items() if kinds[key].saved and value != first[key]}
        cases[name] = {**values, "seeds": row.seeds}
    return {**first, "cases": cases}


def new_run_directory(out: str | None, experiment: str, name: str, *, resume: bool) -> Path:
    """Directory of a run: `out`, else runs/<experiment>/<name>, with -2, -3, ... for further runs of that name.

    With `resume` and no `out` it is the newest of them.
    """
    if out is not None:
        if not out.strip():
            raise ArgumentError("out", "must name a directory", f"got {out!r}", "Name one, or leave it out.")
        return Path(out).expanduser()
    base = Path("runs") / experiment
    runs = [base / name] if (base / name).exists() else []
    while (base / f"{name}-{len(runs) + 1}").exists() and runs:
        runs.append(base / f"{name}-{len(runs) + 1}")
    if resume:
        if not runs:
            raise ArgumentError(
                "resume", "needs a run to go on with", f"there is no {base / name}", "Name the run by --out."
            )
        return runs[-1]
    return base / (name if not runs else f"{name}-{len(runs) + 1}")
