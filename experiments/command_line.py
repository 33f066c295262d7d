"""What every experiment's command line does: presets, --set, --resume, one-sentence errors, exit codes.

Exit code 0 only for a finished run, 2 for a bad argument, 1 for a run that diverged, 130 when interrupted.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from jaxfl.core import ArgumentError
from jaxfl.training import Diverged, FatalCount

Config = TypeVar("Config")


class Preset(NamedTuple):
    """A named set of option values that reproduces a figure, a table or a setting of the paper."""

    description: str
    cost: str  # measured time and the machine it was measured on
    options: dict[str, Any]


def run_command_line(
    run: Callable[[Any, str | None], object],
    config_type: type,
    presets: Mapping[str, Preset],
    *,
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse the arguments, run the experiment, and turn what can go wrong into one sentence and an exit code.

    Args:
        run: (config, preset name or None) -> anything; raises ArgumentError for arguments that cannot be used.
        config_type: a frozen dataclass whose fields are the options.
        presets: name -> preset.
        prog: shown in the usage.
        description: one paragraph for --help.
        argv: arguments; default those of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        if "--list-presets" in arguments:
            _print_presets(presets, prog)
            return 0
        config, preset = parse(arguments, config_type, presets, prog=prog, description=description)
        run(config, preset)
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Diverged, FatalCount) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def parse(
    arguments: Sequence[str],
    config_type: type[Config],
    presets: Mapping[str, Preset],
    *,
    prog: str = "experiment",
    description: str = "",
) -> tuple[Config, str | None]:
    """The configuration that the arguments ask for, and the preset's name.

    `--preset NAME` sets the defaults, `--set key=value` is another way to write `--key value`, and options given
    explicitly win over the preset.

    Raises:
        ArgumentError: an unknown preset, key or option.
    """
    plain, settings, preset = [], [], None
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == "--preset":
            preset = value if equals else next(rest, "")
        elif name == "--set":
            settings.append(value if equals else next(rest, ""))
        else:
            plain.append(argument)
    fields = {field.name for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in fields:
            known = ", ".join(sorted(fields))
            raise ArgumentError("--set", "must be KEY=VALUE with a known key", f"got {setting!r}", f"Keys: {known}.")
        plain += [f"--{key.replace('_', '-')}", *value.split()]
    if preset is not None and preset not in presets:
        known = ", ".join(presets) or "none"
        raise ArgumentError("--preset", "must name a preset", f"got {preset!r}", f"This experiment has: {known}.")
    default = config_type(**presets[preset].options) if preset is not None else config_type()
    parsed, unknown = tyro.cli(
        config_type,
        args=plain,
        default=default,
        prog=prog,
        description=description + " --preset NAME, --list-presets and --set KEY=VALUE work too.",
        config=(tyro.conf.FlagCreatePairsOff,),
        return_unknown_args=True,
    )
    if unknown:
        remedy = "See --help for all options."
        raise ArgumentError(unknown[0], "must be an option of this experiment", "it is none", remedy)
    return parsed, preset


def new_run_directory(out: str | None, experiment: str, name: str, *, resume: bool) -> Path:
    """Where a run goes: `out`, else runs/<experiment>/<name>, with -2, -3, ... for further runs of that name.

    With `resume` and no `out` it is the newest of them.
    """
    if out is not None:
        return Path(out)
    base = Path("runs") / experiment
    taken = [base / name] if (base / name).exists() else []
    while (base / f"{name}-{len(taken) + 1}").exists() and taken:
        taken.append(base / f"{name}-{len(taken) + 1}")
    if resume:
        if not taken:
            raise ArgumentError("--resume", "needs a run to go on with", f"{base / name} has none", "Name it by --out.")
        return taken[-1]
    return base / (name if not taken else f"{name}-{len(taken) + 1}")


def _print_presets(presets: Mapping[str, Preset], prog: str) -> None:
    table = Table(title=f"Presets of {prog}")
    for heading in ("name", "what", "cost"):
        table.add_column(heading)
    for name, preset in presets.items():
        table.add_row(name, preset.description, preset.cost)
    Console().print(table)
