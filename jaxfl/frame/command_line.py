"""Command line of every experiment: options, presets, grids, one-sentence errors, exit codes.

Exit code 0 for a finished run, also where points of a grid diverged and are recorded; 2 for a bad argument; 1 for a run
that stopped (a lone run diverged, memory or disk full), or where what was asked for could not be shown; 130 when
interrupted, 143 when terminated. A run that is asked to terminate finishes its chunk of rounds and saves; before the
first round it ends at once and leaves nothing behind. A run goes on when its standard output is full or read no longer:
it is told on standard error, and what the run leaves lies in its directory.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxfl.core import ArgumentError
from jaxfl.frame.distributed import silent_but_first, tells
from jaxfl.frame.experiment import Experiment, Preset, Request, request
from jaxfl.frame.grid import Axis, axis, parse_axis, read_axis, sample_axis
from jaxfl.frame.help import print_help
from jaxfl.frame.launcher import JobsStopped
from jaxfl.frame.options import flag, flat, options, refuse_unusable, unknown, value_of
from jaxfl.frame.output import steady_output
from jaxfl.frame.run import leave_accelerators, run, use_all_cores
from jaxfl.training import Diverged, FatalCount, Stopped, stop_at_sigterm
from jaxfl.training.compilation_cache import compilation_cache
from jaxfl.training.processes import several
from jaxfl.training.signals import TERMINATED

_FRAME = {
    "--preset": "NAME  a figure, a table or a setting of the paper; --list-presets shows all",
    "--grid": "OPTION=VALUE,VALUE,... [OPTION=...]  vary options: together value by value within one --grid, "
    "independently over several",
    "--grid-file": "FILE  a .csv or .jsonl file with a row a point",
    "--sample": "OPTION=LOW:HIGH ...  draw values at random, log:LOW:HIGH in the logarithm",
    "--num-samples": "N  how many points --sample draws (10)",
    "--seeds": "SEED SEED ...  short for --grid seed=SEED,SEED,...",
    "--set": "OPTION=VALUE  another way to write --option VALUE",
    "--compilation-cache": "DIR|off  where compiled programs are kept, by default in the user's cache folder",
}
_GOES_ON = "the same command with --resume goes on from"
_SINGLE = ("--preset", "--grid-file", "--num-samples", "--compilation-cache")
_MOST_SHOWN = 400  # letters of what was found; a longer one is shown by its two ends


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """The command line of an experiment, by default the process's; returns the exit code.

    Guarantees:
        - a bad argument gives exit code 2 and one line, "error: OPTION: requirement; found. Remedy".
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    resumes = "resume" in options(type(experiment.base))
    kept = f"{_GOES_ON} the last checkpoint" if resumes else "nothing was kept"
    try:
        _catch_interrupts()
        with steady_output() as output, warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            if "--list-presets" in arguments or set(arguments) & {"--help", "-h"}:
                _show(experiment, arguments)
                output.flush()
                return int(output.is_lost)
            asked, cache = parse(experiment, arguments)
            where: Any = getattr(asked.point, "run", None)
            if getattr(where, "has_jobs", False):
                leave_accelerators()
            if getattr(where, "distributed", False):
                where.check()
                use_all_cores()
                where.join()
            else:
                use_all_cores(flat(asked.point).get("devices") or 1)
            with (
                silent_but_first(),
                compilation_cache(cache),
                stop_at_sigterm(partial(_say, f"terminated: {kept}", TERMINATED)) as stop,
            ):
                return (experiment.run or run)(asked._replace(stop=stop, cache=cache))
    except ArgumentError as error:
        return _say(f"error: {_sentence(experiment, error)}", 2, error)
    except (Diverged, FatalCount) as error:
        return _say(f"stopped: {error}", 1, error)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            if not several():
                raise
            gone = f"another process is gone ({str(error).splitlines()[0][:120]})"
            return _say(f"stopped: {gone}; the same commands with --resume go on from the last checkpoint", 1, error)
        return _say("stopped: the memory is exhausted. Take a smaller model, fewer nodes or a smaller batch.", 1, error)
    except OSError as error:
        return _say(f"stopped: {error}. Mend this, then {'go on with --resume' if resumes else 'try again'}.", 1, error)
    except Stopped as error:
        return _say(f"terminated: {_GOES_ON} round {error.round_index}", TERMINATED, error)
    except JobsStopped:
        return _say(f"terminated: {_GOES_ON} the last checkpoints", TERMINATED)
    except KeyboardInterrupt:
        return _say(f"interrupted: {kept}", 130)


def parse(experiment: Experiment, arguments: Sequence[str]) -> tuple[Request, str]:
    """The lines that the arguments ask for, and where compiled programs are kept."""
    known = options(type(experiment.base))
    changes: dict[str, Any] = {}
    axes: list[Axis] = []
    of_frame: dict[str, list[str]] = {}
    for group in _by_option(arguments):
        name, equals, value = group[0].partition("=")
        name, words = name.replace("_", "-"), ([value] if equals else []) + list(group[1:])
        if name == "--set":
            text = " ".join(words)
            key, equals, value = text.partition("=")
            name, words = flag(key.strip()), value.split()
            if not equals or key.strip().replace("-", "_") not in known:
                remedy = f"Keys: {', '.join(known)}."
                raise ArgumentError("--set", "must be KEY=VALUE with a known key", f"got {text!r}", remedy)
        if name == "--grid":
            axes.append(parse_axis(words, known))
        elif name in _FRAME:
            _refuse_second(name, of_frame, words)
            if not words or (name in _SINGLE and len(words) != 1):
                raise ArgumentError(
                    name, "must have a value", f"got {' '.join(words)!r}", f"Write {name} {_FRAME[name]}."
                )
            refuse_unusable(name, words)
            of_frame[name] = words
        else:
            switch = name.removeprefix("--no-").replace("-", "_")
            if name.startswith("--no-") and not words and switch in known and known[switch].kind is bool:
                name, words = flag(switch), ["false"]
            key = _key(name, known)
            _refuse_second(key, changes, words)
            changes[key] = value_of(key, known[key].kind, words, flat(experiment.base)[key])
    if "--seeds" in of_frame:
        if "seed" not in known:
            raise ArgumentError("--seeds", "must be left out", "nothing is random here", "Leave it out.")
        axes.append(axis(known, seed=[value_of("seed", int, [word]) for word in of_frame["--seeds"]]))
    if "--grid-file" in of_frame:
        axes.append(read_axis(of_frame["--grid-file"][0], known))
    if "--sample" in of_frame:
        count = value_of("num_samples", int, of_frame.get("--num-samples", ["10"]))
        axes.append(sample_axis(of_frame["--sample"], count, 0, known))
    elif "--num-samples" in of_frame:
        raise ArgumentError("--num-samples", "belongs to --sample", "got it without", "Pass --sample OPTION=LOW:HIGH.")
    _refuse_repeats(axes)
    preset = of_frame.get("--preset", [None])[0]
    if preset is not None and preset not in experiment.presets:
        names = ", ".join(experiment.presets) or "none"
        raise ArgumentError("--preset", "must name a preset", f"got {preset!r}", f"This experiment has: {names}.")
    return request(experiment, changes, axes, preset), of_frame.get("--compilation-cache", ["default"])[0]


def _refuse_second(name: str, given: Mapping[str, Any], words: Sequence[str]) -> None:
    if name in given:
        raise ArgumentError(name, "must be given once", f"got {' '.join(words)!r} as well", "Remove one of them.")


def _refuse_repeats(axes: Sequence[Axis]) -> None:
    """Refuse an option on two axes, and the same point twice on one."""
    names: set[str] = set()
    for part in axes:
        for name in part:
            if name in names:
                raise ArgumentError(name, "must be varied once", "it is on two axes", "Remove one of them.")
            names.add(name)
        rows = list(zip(*part.values(), strict=True))
        if len(set(rows)) < len(rows):
            name = next(iter(part))
            listed = f"got {' '.join(map(str, part[name]))}"
            raise ArgumentError(name, "must be distinct and at least one", listed, "List each once.")


def _key(name: str, known: Mapping[str, Any]) -> str:
    """The option that a flag names."""
    key = name.lstrip("-").replace("-", "_")
    if not name.startswith("--") or key not in known:
        near = difflib.get_close_matches(key, [*known, *(one.lstrip("-") for one in _FRAME)], n=1)
        raise unknown(name or "''", (f"Did you mean {flag(near[0])}? " if near else "") + "See --help for all options.")
    return key


def _by_option(arguments: Sequence[str]) -> list[list[str]]:
    """The arguments in groups, an option and its values."""
    groups: list[list[str]] = []
    for argument in arguments:
        is_option = argument.startswith("-") and not re.fullmatch(r"-(\d.*|\.\d.*|inf)", argument)
        if is_option or not groups:
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return groups


def _print_presets(presets: Mapping[str, Preset], name: str) -> None:
    table = Table("name", "what", "cost", title=f"Presets of python -m experiments.{name}")
    for preset, row in presets.items():
        table.add_row(preset, row.description, row.cost)
    Console(markup=False).print(table)


def _show(experiment: Experiment, arguments: Sequence[str]) -> None:
    """Print the presets, or the help with the values that the other arguments lay."""
    if "--list-presets" in arguments:
        _print_presets(experiment.presets, experiment.name)
    else:
        asked, _ = parse(experiment, [word for word in arguments if word not in ("--help", "-h")])
        print_help(asked, _FRAME)


def _sentence(experiment: Experiment, error: ArgumentError) -> str:
    """The error with the option in place of the library's argument; an entry of an option is the option."""
    name = error.argument.partition("[")[0] or error.argument
    name = experiment.aliases.get(name, name)
    is_option = name in options(type(experiment.base)) or flag(name) in _FRAME
    found = error.found
    if len(found) > _MOST_SHOWN:
        found = f"{found[: _MOST_SHOWN // 2]} ... {found[-_MOST_SHOWN // 2 :]}"
    return f"{flag(name) if is_option else error.argument}: {error.requirement}; {found}. {error.remedy}"


def _catch_interrupts() -> None:
    """Make an interrupt an exception again where a package has put it off until there is someone to catch it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread() and hasattr(handler, "until_caught"):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _say(message: str, code: int, error: Exception | None = None) -> int:
    """Print one line for people, and hand back the exit code. Of an error of several processes one of them tells."""
    with contextlib.suppress(OSError):  # nobody listens
        if error is not None and not tells(error):
            return code
        print(" ".join(message.encode(errors="backslashreplace").decode().split()), file=sys.stderr)
    return code
