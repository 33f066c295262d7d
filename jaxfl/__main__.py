"""The command `jaxfl`, also `python -m jaxfl`: the experiments, `epsilon`, `data`, `report`. Alone it lists.

jaxfl privsgp_vr --help
jaxfl epsilon --sites 50 --samples 1200 --batch 64 --rounds 300 --noise-multiplier 1.1
jaxfl data patients.csv --label-column ill --site-column hospital
jaxfl report runs/privsgp_vr/NAME
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

_COMMANDS = {
    "epsilon": "The epsilon of a planned run, or the least noise for a budget, without a run.",
    "data": "What is read from a file of your own: columns, types, classes, sites, what tests.",
    "report": "One HTML page of runs that have ended: curves, tables, privacy, sites, differences.",
}
_SWITCHES = "--version", "--help", "--completion"


def main(argv: Sequence[str] | None = None) -> int:
    """Run an experiment or a command by its name; returns the exit code.

    Guarantees:
        - an experiment is that of the library, whatever packages the current folder has.
        - `jaxfl epsilon` and `jaxfl report` do not import JAX.
        - `--completion` prints a script for bash, which zsh takes after `bashcompinit`: commands, options, choices.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in _COMMANDS:
        command = importlib.import_module("jaxfl.data.describe" if name == "data" else "jaxfl.command")
        if argv is None and hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that goes away (`| head`) ends it without a word
        return command.main(rest if name == "data" else [name, *rest])
    package = _experiments()
    listing = importlib.import_module(f"{package.__name__}.__main__")
    known = {**_COMMANDS, **listing.commands(), **_COMMANDS}  # first in the list, and ours where both have a report
    if name in ("--help", "-h"):
        listing.show(known, "jaxfl <name> [--help]")
        return 0
    if name == "--version":
        print(f"jaxfl {importlib.import_module('jaxfl').__version__}")
        return 0
    if name == "--completion":
        print(_completion(package, known))
        return 0
    if name not in known:
        near = importlib.import_module("jaxfl.core.vocabulary").hint(name, [*known, *_SWITCHES])
        if not near:
            found = importlib.import_module("jaxfl.frame.command_line").with_method(package.__name__, [name])
            commands = ", ".join(f"{command} --method {shlex.quote(method)}" for command, method in found)
            near = f"It is a method: {commands}. " if found else ""
        print(f"error: name: must be one of {', '.join(known)}; got {name!r}. {near}See jaxfl --help.", file=sys.stderr)
        return 2
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, package.leave)  # until the command line catches interrupts
    sys.argv = [f"jaxfl {name}", *rest]
    runpy.run_module(f"{package.__name__}.{name}", run_name="__main__", alter_sys=True)
    return 0


def _completion(package: ModuleType, known: Iterable[str]) -> str:
    """A script of bash that completes commands, options and choices; `complete -o default` adds the names of files."""
    frame, command = importlib.import_module("jaxfl.frame.command_line"), importlib.import_module("jaxfl.command")
    words = {"": dict.fromkeys([*_SWITCHES, *known], ())} | command.flags()
    words["data"] = importlib.import_module("jaxfl.data.describe").flags()
    for name in set(known) - set(_COMMANDS):
        experiment = getattr(importlib.import_module(f"{package.__name__}.{name}"), "EXPERIMENT", None)
        words |= {} if experiment is None else {name: frame.flags(experiment)}
    plan = importlib.import_module(f"{package.__name__}.plan.request").PLAN  # whose package is no experiment
    words["plan"] = {"--epsilon": [], **frame.flags(plan)}
    places = {f"{name} ": of_name for name, of_name in words.items()}  # and where the words of an option stand:
    places |= {f"{name} {option}": ones for name, each in words.items() for option, ones in each.items() if ones}
    # Without the parentheses of names, which a shell would take for its own: commands go by letters and digits.
    texts = {place: re.sub(r"[()]", "", " ".join(each)) for place, each in places.items()}
    cases = "\n".join(f'    "{place}") words="{text}" ;;' for place, text in texts.items())
    return f"""_jaxfl() {{
  local words= command= option= place="$COMP_CWORD" current="${{COMP_WORDS[COMP_CWORD]}}"
  [ "$place" -gt 1 ] && command="${{COMP_WORDS[1]}}"
  while [ "$place" -gt 2 ] && [ "${{current#-}}" = "$current" ] && [ -z "$option" ]; do
    place=$((place - 1))
    case "${{COMP_WORDS[place]}}" in -*) option="${{COMP_WORDS[place]}}" ;; esac
  done
  case "$command $option" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _jaxfl jaxfl"""


def _experiments() -> ModuleType:
    """Package of the experiments: in the wheel below this one, in a checkout beside it."""
    if importlib.util.find_spec("jaxfl.experiments") is not None:
        return importlib.import_module("jaxfl.experiments")
    sys.path.insert(0, str(Path(__file__).parents[1]))  # before a package experiments of the current folder
    return importlib.import_module("experiments")


if __name__ == "__main__":
    sys.exit(main())
