"""Find this package's suites, run them, print and write their numbers.

A suite is a module with `suite() -> dict[str, Measurement]`, whose names are "SUITE/NAME". A suite may also have

- `WANTED`, name -> the wanted value, which is the least one unless the suite says otherwise;
- `plot(measurements, path)`, which draws a picture;
- `missing() -> str | None`, why it cannot run here; `all` then leaves it out;
- `ALL_CORES = True` if it runs like an experiment, with a device for each core of a CPU. JAX keeps its first devices:
  run together with a suite that does not say so, it has one device, too.

The file holds {"SUITE/NAME": {"value", "unit", "spread", "against"}, ..., "environment": {...}}, and "wanted" if any.
The picture lies beside that file, under its name with .png; where several suites draw, the suite's name is added.
Machines drift: compare ratios, not seconds of different runs.
"""

import ast
import importlib
from json import dumps
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Column, Table

from jaxfl.core import ArgumentError, check
from jaxfl.frame.run import use_all_cores
from jaxfl.training.compilation_cache import compilation_cache
from jaxfl.training.environment import describe_environment


def _suites() -> dict[str, ast.Module]:
    """Name -> each module with a suite; read, not imported, since each builds its models."""
    trees = {path.stem: ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.glob("*.py"))}
    return {
        name: tree
        for name, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "suite" for node in tree.body)
    }


_TREES = _suites()
SUITES = {name: (ast.get_docstring(tree) or "").partition("\n")[0] for name, tree in _TREES.items()}
ON_ALL_CORES = {
    name
    for name, tree in _TREES.items()
    if any(isinstance(node, ast.Assign) and ast.unparse(node) == "ALL_CORES = True" for node in tree.body)
}
Suite = tyro.extras.literal_type_from_choices([*SUITES, "all"])


def run(
    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(constructor=Suite)],
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    against: Annotated[str | None, tyro.conf.arg(metavar="LIBRARY")] = None,
) -> None:
    """Run suites, write and print their numbers.

    Args:
        suite: what to measure, or all.
        json: file for the numbers; a suite with a picture draws it beside the file.
        against: torch, fluke or decent_bench, which must be installed: the suite peers runs the same in it, too.

    Raises:
        ArgumentError: no such suite or library, a library that is not installed, or a file that cannot be written.
    """
    check.one_of((*SUITES, "all"), suite=suite)
    names = tuple(SUITES) if suite == "all" else (suite,)
    if against is not None and "peers" not in names:
        found, remedy = f"got it with {suite}", "Ask for peers or all, or leave it out."
        raise ArgumentError("--against", "is an option of the suite peers", found, remedy)
    if json is not None and (json.is_dir() or not json.resolve().parent.is_dir()):
        raise ArgumentError("--json", "must name a file in an existing folder", f"got {json}", "Make the folder.")
    if ON_ALL_CORES.issuperset(names):
        use_all_cores()  # before the import of a suite, which may begin JAX
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    reasons = {name: module.missing() for name, module in modules.items() if hasattr(module, "missing")}
    if reason := reasons.get(suite):
        raise ArgumentError("suite", "must be able to run here", reason, f"Read experiments/bench/{suite}.py.")
    modules = {name: module for name, module in modules.items() if not reasons.get(name)}
    if against is not None:
        modules["peers"].require_peer(against)
    console, measurements, targets = Console(), {}, {}
    for name, module in modules.items():
        with console.status(f"Suite {name} ..."), compilation_cache("off"):  # compile times are those of compiling
            measurements |= module.suite(against=against) if name == "peers" else module.suite()
        targets |= getattr(module, "WANTED", {})
    if json is not None:
        results = {name: one._asdict() for name, one in measurements.items()}
        for name in results.keys() & targets:
            results[name]["wanted"] = targets[name]
        json.write_text(dumps({**results, "environment": describe_environment()}, indent=2) + "\n")
        plots = {name: module.plot for name, module in modules.items() if hasattr(module, "plot")}
        for name, plot in plots.items():
            plot(measurements, json.with_name(f"{json.stem}{'' if len(plots) == 1 else f'-{name}'}.png"))
    title = "Median; lowest to highest of the repeats"
    table = Table(Column("name", no_wrap=True), "value", "spread", "wanted", "against", title=title)
    for name, (value, unit, (low, high), text) in measurements.items():
        bound = f"{targets[name]:.3g}" if name in targets else ""
        table.add_row(name, f"{value:.3g} {unit}", f"{low:.3g} to {high:.3g}", bound, text)
    console.print(table)
