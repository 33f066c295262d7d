"""`python -m experiments` lists what can be run: every package beside this file that has a command."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def commands() -> dict[str, str]:
    """Name -> what it does: the description of an experiment, else the first line of the package's docstring.

    Packages are read, not imported: an import of all takes seconds.
    """
    folders = sorted(path.parent for path in Path(__file__).parent.glob("*/__main__.py"))
    fronts = {folder.name: ast.parse((folder / "__init__.py").read_text(encoding="utf-8")) for folder in folders}
    return {
        name: _description(front) or str(ast.get_docstring(front)).splitlines()[0] for name, front in fronts.items()
    }


def _description(front: ast.Module) -> str | None:
    """The description of the EXPERIMENT in a package's parsed __init__.py."""
    assigned = [node for node in front.body if isinstance(node, ast.Assign)]
    calls = [node.value for node in assigned if ast.unparse(node.targets[0]) == "EXPERIMENT"]
    words = [word for call in calls if isinstance(call, ast.Call) for word in call.keywords]
    return next((ast.literal_eval(word.value) for word in words if word.arg == "description"), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the experiments and how to run them; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments not in (["--help"], ["-h"]):
        name = arguments[0]
        remedy = f"Write python -m {__package__}.{name}." if name in commands() else "Leave it out to see the list."
        print(f"error: arguments: python -m {__package__} takes none; got {name!r}. {remedy}", file=sys.stderr)
        return 2
    show(commands(), f"python -m {__package__}.<name> [--help]")
    return 0


def show(known: Mapping[str, str], usage: str) -> None:
    """Print names with their descriptions, under a line of usage."""
    table = Table(title=usage)
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    for name, what in known.items():
        table.add_row(name, what)
    Console(markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
