"""What every experiment's command line does: presets, --set, --resume, one-sentence errors, exit codes.

Exit code 0 only for a finished run, 2 for a bad argument, 1 for a run that stopped (diverged, memory or disk full),
130 when interrupted.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.compilation_cache import compilation_cache
from experiments.options import Preset, flag, options, parse, take
from jaxfl import graphs
from jaxfl.core import ArgumentError
from jaxfl.training import Diverged, FatalCount

__all__ = ["Preset", "new_run_directory", "parse", "read_graph", "run_command_line"]

CACHE = "--compilation-cache"
_CACHE_HELP = (
    f"Compiled programs are kept in the user's cache folder; {CACHE} DIR keeps them there, {CACHE} off nowhere."
)


def run_command_line(
    run: Callable[[Any, str | None], object],
    config_type: type,
    presets: Mapping[str, Preset],
    *,
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> int:
    """Parse the arguments, run the experiment, and turn what can go wrong into one sentence and an exit code.

    Args:
        run: (config, preset name or None) -> anything; raises ArgumentError for arguments that cannot be used.
        config_type: a frozen dataclass whose fields are the options.
        presets: name -> preset.
        prog: shown in the usage.
        description: one paragraph for --help.
        argv: arguments; default those of the process.
        aliases: name of an argument in the library -> the option that it comes from, where they differ.

    Returns:
        The exit code.

    Guarantees:
        - a bad argument gives exit code 2 and one line, "error: OPTION: requirement; found. Remedy".
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            if "--list-presets" in arguments:
                _print_presets(presets, prog)
            else:
                cache, arguments = take(arguments, CACHE, "default")
                parsed = parse(arguments, config_type, presets, prog=prog, description=f"{description} {_CACHE_HELP}")
                with compilation_cache(cache):
                    run(*parsed)
    except ArgumentError as error:
        name = (aliases or {}).get(error.argument, error.argument)
        shown = flag(name) if name in options(config_type) else name
        return _say(f"error: {shown}: {error.requirement}; {error.found}. {error.remedy}", 2)
    except (Diverged, FatalCount) as error:
        return _say(f"stopped: {error}", 1)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _say("stopped: the memory is exhausted. Take a smaller model, fewer nodes or a smaller batch.", 1)
    except OSError as error:
        return _say(f"stopped: {error}. Mend this, then go on with --resume.", 1)
    except KeyboardInterrupt:
        return _say("interrupted: the same command with --resume goes on from the last checkpoint", 130)
    except SystemExit as done:  # --help
        return done.code if isinstance(done.code, int) else 0
    return 0


def new_run_directory(out: str | None, experiment: str, name: str, *, resume: bool) -> Path:
    """Where a run goes: `out`, else runs/<experiment>/<name>, with -2, -3, ... for further runs of that name.

    With `resume` and no `out` it is the newest of them.
    """
    if out is not None:
        if not out.strip():
            raise ArgumentError("out", "must name a directory", f"got {out!r}", "Name one, or leave it out.")
        return Path(out).expanduser()
    base = Path("runs") / experiment
    taken = [base / name] if (base / name).exists() else []
    while (base / f"{name}-{len(taken) + 1}").exists() and taken:
        taken.append(base / f"{name}-{len(taken) + 1}")
    if resume:
        if not taken:
            raise ArgumentError(
                "resume", "needs a run to go on with", f"there is no {base / name}", "Name the run by --out."
            )
        return taken[-1]
    return base / (name if not taken else f"{name}-{len(taken) + 1}")


def read_graph(path: str, num_nodes: int) -> graphs.Graph:
    """The graph whose mixing matrix, or periodic sequence of them, is in a .npy file.

    Args:
        path: the file, an array (n, n) or (period, n, n); entry (i, j) is the share of j's value that i receives.
        num_nodes: n, the number of nodes that the run has.

    Raises:
        ArgumentError: the file cannot be read, is for another number of nodes, or holds no mixing matrix.
    """
    requirement = "must be a .npy file with a mixing matrix"
    remedy = "Write it by numpy.save, shape (n, n), or (period, n, n) for a time-varying graph."
    file = Path(path).expanduser()
    try:
        matrices = np.load(file, allow_pickle=False)
    except OSError as error:
        found = f"{file}: {(error.strerror or str(error)).lower()}"
        raise ArgumentError("graph", requirement, found, remedy) from None
    except (ValueError, EOFError):  # another format, cut off, or objects that only pickle reads
        raise ArgumentError("graph", requirement, f"{file} does not hold an array of numbers", remedy) from None
    if not isinstance(matrices, np.ndarray):
        matrices.close()
        raise ArgumentError("graph", requirement, f"{file} is an archive of several arrays", remedy)
    if matrices.ndim not in (2, 3) or matrices.shape[-1] != matrices.shape[-2]:
        raise ArgumentError("graph", requirement, f"{file} has shape {matrices.shape}", remedy)
    if matrices.shape[-1] != num_nodes:
        found = f"{file} is for {matrices.shape[-1]}"
        fitting = f"Pass --nodes {matrices.shape[-1]}, or another file."
        raise ArgumentError("graph", f"must be for the run's {num_nodes} nodes", found, fitting)
    try:
        return graphs.from_matrix(matrices, name=str(file))
    except ArgumentError as error:
        raise ArgumentError("graph", error.requirement, f"in {file} {error.found}", error.remedy) from None


def _say(message: str, code: int) -> int:
    """Print one line for people, and hand back the exit code."""
    print(" ".join(message.split()), file=sys.stderr)
    return code


def _print_presets(presets: Mapping[str, Preset], prog: str) -> None:
    table = Table(title=f"Presets of {prog}")
    for heading in ("name", "what", "cost"):
        table.add_column(heading)
    for name, preset in presets.items():
        table.add_row(name, preset.description, preset.cost)
    Console().print(table)
