"""Command line of every experiment: options, presets, grids, one-sentence errors, exit codes.

Exit code 0 for a finished run, also where cases of a grid diverged and are recorded; 2 for a bad argument; 1 for a run
that stopped (a lone run diverged, memory or disk full), or where what was asked for could not be shown; 130 when
interrupted, 143 when terminated. A run that is asked to terminate finishes its chunk of rounds and saves; before the
first round it ends at once and leaves nothing behind. A run goes on when its standard output is full or read no longer:
it is told on standard error, and what the run leaves lies in its directory.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import gc
import importlib
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_type_hints

import jax
from rich.console import Console
from rich.table import Table

from jaxfl.core import ArgumentError
from jaxfl.core.vocabulary import chosen, hint, typed
from jaxfl.data.sources import NAMES
from jaxfl.frame.choose import Where, conditions
from jaxfl.frame.distributed import silent_but_first, tells
from jaxfl.frame.experiment import Experiment, Request, request
from jaxfl.frame.grid import Axis, axis, parse_axis, read_axis, sample_axis
from jaxfl.frame.help import print_help
from jaxfl.frame.launcher import JobsStopped
from jaxfl.frame.options import choices_of, flag, flat, named, options, unknown, value_of, varies_by_words
from jaxfl.frame.output import steady_output
from jaxfl.frame.partners import GOES_ON, GONE, leave
from jaxfl.frame.records import JOBS
from jaxfl.frame.run import leave_accelerators, run, use_all_cores
from jaxfl.frame.selecting import ends_of, search_of
from jaxfl.training import Diverged, FatalCount, Stopped, stop_at_sigterm
from jaxfl.training.clock import Clock, of_process
from jaxfl.training.compilation_cache import compilation_cache
from jaxfl.training.processes import is_multiprocess
from jaxfl.training.run_directory import RESUME
from jaxfl.training.signals import TERMINATED, Stop


@dataclasses.dataclass(frozen=True)
class EveryExperiment:
    """Presets and grids, which every experiment has; DIR, FILE, OPTION and VALUE are yours."""

    preset: str = ""
    """NAME of a figure, a table or a setting of the paper; --list-presets shows all."""
    grid: tuple[str, ...] = ()
    """OPTION=VALUE,VALUE,... [OPTION=...]: vary options, together value by value within one --grid, independently over
    several. Several words after a number's or a choice's own option do the same: --step-size 0.1 0.2."""
    grid_file: str = ""
    """A .csv or .jsonl FILE with a row a configuration."""
    sample: tuple[str, ...] = ()
    """OPTION=LOW:HIGH ...: draw values at random, OPTION=log:LOW:HIGH in the logarithm."""
    num_samples: int = 10
    """Number of configurations that --sample draws."""
    private_selection: Literal["off", "geometric", "logarithmic"] = "off"
    """Draw the number of configurations, too, with the mean --num-samples, and state the epsilon of the best one, for
    whoever releases it alone (docs/epsilon.md)."""
    seeds: tuple[int, ...] = ()
    """Short for --grid seed=SEED,SEED,..."""
    baselines: tuple[Literal["alone", "pooled", "curator", "without_noise"], ...] = ()
    """Rows beside the compared ones; no word means none. alone: each site by itself, with the same noise (in a plan
    without). pooled: all samples in one place, without noise. curator: all samples in one place, DP-SGD at the same
    epsilon. without_noise: the same without noise."""
    set: tuple[str, ...] = ()
    """OPTION=VALUE: another way to write --option VALUE."""
    compilation_cache: str = "default"
    """DIR where compiled programs are kept, by default in the user's cache folder, or off."""


_HELP = ("--help", "-h", "--help-all")
_GOES_ON = "the same command with --resume goes on from"
_KINDS = get_type_hints(EveryExperiment)  # of the options that every experiment has
_MOST_SHOWN = 400  # letters of what was found; a longer one is shown by its two ends


def flags(experiment: Experiment) -> dict[str, list[str]]:
    """All options of an experiment, each with the words that it chooses from, for a shell's completion."""
    kinds = {name: option.kind for name, option in options(type(experiment.base)).items()} | _KINDS
    known = {"dataset": NAMES, "preset": experiment.presets, "baselines": experiment.baselines}
    known |= {name: choices_of(kind) for name, kind in kinds.items() if name not in known}
    for _, condition in conditions(experiment.base):
        if isinstance(condition, Where) and not known.get(condition.option):
            known[condition.option] = condition.known
    return {flag(name): [*known[name]] for name in kinds}


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """The command line of an experiment, by default the process's; returns the exit code.

    Guarantees:
        - a bad argument gives exit code 2 and one line, "error: OPTION: requirement; found. Remedy".
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    clock = of_process("imports") if argv is None else Clock("options")
    if argv is None:  # the process is ours: tracing allocates much and leaves few cycles
        gc.set_threshold(50_000, 20, 100)
    clock.enter("options")
    resumes = "resume" in options(type(experiment.base))
    stop = Stop()

    def outcome() -> str:
        return f"{_GOES_ON} the last checkpoint" if resumes and stop.begun else "nothing was kept"

    try:
        _catch_interrupts()
        if sys.stdout is None or not sys.stdout.isatty():
            os.environ.setdefault("COLUMNS", "120")  # rich takes 80, which breaks names
        with steady_output() as output, warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            if {"--list-presets", *_HELP} & {*arguments}:
                _show(experiment, arguments)
                output.flush()
                return int(output.is_lost)
            query, cache = parse(experiment, arguments)
            where: Any = getattr(query.config, "run", None)
            if getattr(where, "has_jobs", False):
                leave_accelerators()
            if getattr(where, "distributed", False):
                where.check()
                use_all_cores()
                where.join()
            else:
                use_all_cores(flat(query.config).get("devices") or 1)
            with (
                silent_but_first(),
                compilation_cache(cache),
                stop_at_sigterm(lambda: _say(f"terminated: {outcome()}", TERMINATED)) as stop,
            ):
                return (experiment.run or run)(query._replace(stop=stop, cache=cache, clock=clock, arguments=arguments))
    except ArgumentError as error:
        return _say(f"error: {_sentence(experiment, error, arguments)}", 2, error)
    except (Diverged, FatalCount) as error:
        return _say(f"stopped: {error}", 1, error)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            if not is_multiprocess():
                raise
            leave(_say(f"{GONE} ({str(error).splitlines()[0][:120]}){GOES_ON}", 1, error))
        return _say("stopped: the memory is exhausted. Take a smaller model, fewer nodes or a smaller batch.", 1, error)
    except OSError as error:
        return _say(f"stopped: {error}. Mend this, then {'go on with --resume' if resumes else 'try again'}.", 1, error)
    except Stopped as error:
        return _say(f"terminated: {_GOES_ON} round {error.round_index}", TERMINATED, error)
    except JobsStopped:
        return _say(f"terminated: {_GOES_ON} the last checkpoints", TERMINATED)
    except KeyboardInterrupt:
        exec("")  # Python would end by the signal, not with 130, if the interrupt came in the exec of another package
        stop.request_if_heeded()  # undoes what a run left that had not begun
        return _say(f"interrupted: {outcome()}", 130)


def parse(experiment: Experiment, arguments: Sequence[str]) -> tuple[Request, str]:
    """The cases that the arguments ask for, and where compiled programs are kept."""
    table = options(type(experiment.base))
    kinds = {name: option.kind for name, option in table.items()} | _KINDS
    changes: dict[str, Any] = {}
    axes: list[Axis] = []
    for word, words in _by_option(arguments):
        name = named(word, kinds)
        switch = name.removeprefix("no_")
        if name == "set":
            text = " ".join(words)
            key, equals, value = text.partition("=")
            name, words = named(key, table), value.split()
            if not equals or name not in table:
                remedy = f"{hint(name, table)}Keys: {', '.join(table)}."
                raise ArgumentError("--set", "must be KEY=VALUE with a known key", f"got {text!r}", remedy)
        elif word.startswith("--") and name not in kinds and kinds.get(switch) is bool and not words:
            name, words = switch, ["false"]
        elif not word.startswith("--") or name not in kinds:
            raise unknown(word.replace("_", "-") or "''", kinds)
        if name == "grid":
            axes.append(parse_axis(words, table))
            continue
        if len(words) > 1 and name in table and table[name].saved and varies_by_words(kinds[name]):
            axes.append(axis(table, **{name: [value_of(name, kinds[name], [one]) for one in words]}))
            continue
        if name in changes:
            raise ArgumentError(name, "must be given once", f"got {' '.join(words)!r} as well", "Remove one of them.")
        if name in _KINDS and not words and name != "baselines":  # none are a choice, where a command has some itself
            raise ArgumentError(name, "must have a value", "got none", "See --help.")
        changes[name] = value_of(name, kinds[name], words)
    frame = {name: changes.pop(name) for name in _KINDS if name in changes}
    if "seeds" in frame:
        if "seed" not in table:
            raise ArgumentError("--seeds", "must be left out", "nothing is random here", "Leave it out.")
        axes.append(axis(table, seed=frame["seeds"]))
    if "grid_file" in frame:
        axes.append(read_axis(frame["grid_file"], table))
    search, others, ranges, ends = None, [], (), {}
    if "sample" in frame:
        count = frame.get("num_samples", EveryExperiment.num_samples)
        seed = {"seed": frame["seeds"][0]} if frame.get("seeds") else {}
        search = search_of(frame.get("private_selection", "off"), count, {**flat(experiment.base), **changes, **seed})
        if search is not None and experiment.run is not None:
            raise ArgumentError("private_selection", "needs an experiment with rows", "got another", "Leave it out.")
        words_of_ranges = (text.partition("=") for text in frame["sample"])
        others, ranges = [*axes], tuple(named(name, table) + equals + ends for name, equals, ends in words_of_ranges)
        ends = {} if search is None else ends_of(ranges, table)
        axes.append(sample_axis(ranges, count, 0, table) if search is None else search.draw(ranges, table))
    for name in ("num_samples", "private_selection"):
        if name in frame and "sample" not in frame:
            raise ArgumentError(name, "belongs to --sample", "got it without", "Pass --sample OPTION=LOW:HIGH.")
    _refuse_repeats(axes)
    preset = frame.get("preset")
    if preset is not None and preset not in experiment.presets:
        names = ", ".join(experiment.presets) or "none"
        raise ArgumentError("--preset", "must name a preset", f"got {preset!r}", f"This experiment has: {names}.")
    is_search = search is not None
    whole = request(experiment, changes, axes, preset, frame.get("baselines", ()), numbered=is_search)
    if search is not None:
        at_ends = request(experiment, changes, [*others, ends], preset).rows
        whole = whole._replace(search=search._replace(ranges=ranges, ends=at_ends))
    return whole, frame.get("compilation_cache", EveryExperiment.compilation_cache)


def _refuse_repeats(axes: Sequence[Axis]) -> None:
    """Refuse an option on two axes, and the same configuration twice on one."""
    names: set[str] = set()
    for part in axes:
        for name in part:
            if name in names:
                raise ArgumentError(name, "must be varied once", "it is on two axes", "Remove one of them.")
            names.add(name)
        rows = list(zip(*part.values(), strict=True))
        if len(set(rows)) < len(rows):
            name = next(iter(part))
            found = f"got {' '.join(map(str, part[name]))}"
            raise ArgumentError(name, "must be distinct and at least one", found, "List each once.")


def _by_option(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each option as it is written, with its values."""
    groups: list[tuple[str, list[str]]] = []
    for argument in arguments:
        is_option = argument.startswith("-") and not re.fullmatch(r"-(\d.*|\.\d.*|inf)", argument)
        if is_option or not groups:
            name, equals, value = argument.partition("=")
            groups.append((name, [value] if equals else []))
        else:
            groups[-1][1].append(argument)
    return groups


def _print_presets(experiment: Experiment) -> None:
    if not experiment.presets:
        print(f"{experiment.command} has no presets.")
        return
    table = Table("name", "what", "cost", title=f"Presets of {experiment.command}")
    for preset, row in experiment.presets.items():
        table.add_row(preset, row.description, row.cost)
    Console(markup=False).print(table)


def _show(experiment: Experiment, arguments: Sequence[str]) -> None:
    """Print the presets, or the help with the values that the other arguments give."""
    if "--list-presets" in arguments:
        _print_presets(experiment)
    else:
        query, cache = parse(experiment, [word for word in arguments if word not in _HELP])
        rows = query.rows.values()
        beside: Any = tuple(dict.fromkeys(row.baseline for row in rows if row.baseline))
        is_varied = any("seed" in part for part in query.grid)
        seeds = next(iter(rows)).seeds if is_varied else ()
        of_all = EveryExperiment(query.preset or "", seeds=seeds, baselines=beside, compilation_cache=cache)
        print_help(query, of_all, (*JOBS, "compilation_cache"), all_options="--help-all" in arguments)


def _sentence(experiment: Experiment, error: ArgumentError, arguments: Sequence[str]) -> str:
    """The error with the option, as it was typed, in place of the library's argument or an entry of an option."""
    name = error.argument.partition("[")[0] or error.argument
    name = experiment.aliases.get(name, name)
    is_option = name in options(type(experiment.base)) or name in _KINDS
    found, remedy = error.found, error.remedy.replace(RESUME, "--resume")
    if name == "method" and name in options(type(experiment.base)):
        remedy = _elsewhere(experiment, found) + remedy
    labels = [label for label in _methods(experiment) if name == "baselines" and f"got {label}," in found]
    if labels:
        own = " --own-test 0.2" if "own_test" in options(type(experiment.base)) else ""
        remedy = f"Pass --method {labels[0]}{own}, or leave it out."
    if len(found) > _MOST_SHOWN:
        found = f"{found[: _MOST_SHOWN // 2]} ... {found[-_MOST_SHOWN // 2 :]}"
    return f"{typed(flag(name), arguments) if is_option else error.argument}: {error.requirement}; {found}. {remedy}"


def _elsewhere(experiment: Experiment, found: str) -> str:
    """The sentence that names the experiments of the same package whose method was asked for; empty without one."""
    ours = re.match(r"(jaxfl\.)?experiments(?=\.)", (experiment.prepare or experiment.run).__module__)
    words = re.findall(r"[^\s']+", found.removeprefix("got "))
    if ours is None or any(chosen(word, _methods(experiment)) for word in words):
        return ""
    commands = [command for command, _ in with_method(ours[0], words)]
    return f"{' and '.join(commands)} {'has' if len(commands) == 1 else 'have'} it. " if commands else ""


def with_method(package: str, words: Sequence[str]) -> list[tuple[str, str]]:
    """(Command, method) of the experiments of a package where a word names a method."""
    experiments = importlib.import_module(package).EXPERIMENTS.values()
    found = ((one.command, chosen(word, _methods(one))) for one in experiments for word in words)
    return [(command, method) for command, method in found if method is not None]


def _methods(experiment: Experiment) -> list[str]:
    """The methods that an experiment chooses from."""
    method = options(type(experiment.base)).get("method")
    return [] if method is None else choices_of(method.kind)


def _catch_interrupts() -> None:
    """Make an interrupt an exception again where a package has put it off until there is someone to catch it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread() and hasattr(handler, "until_caught"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook)


def _interrupt_again(others: Callable[[Any], object], lost: Any) -> None:
    """Repeat an interrupt that came where Python drops exceptions: JAX has a callback in every garbage collection."""
    if lost.exc_type is not KeyboardInterrupt:
        others(lost)
        return
    again = threading.Timer(0.05, _thread.interrupt_main)
    again.daemon = True
    again.start()


def _say(message: str, code: int, error: Exception | None = None) -> int:
    """Print one line for people, and hand back the exit code. Of an error of several processes one of them tells."""
    with contextlib.suppress(OSError):  # nobody listens
        if error is not None and not tells(error):
            return code
        print(" ".join(message.encode(errors="backslashreplace").decode().split()), file=sys.stderr)
    return code
