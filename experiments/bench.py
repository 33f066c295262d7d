"""Benchmarks: what the engine's formulations gain, each ratio inside one process.

    python -m experiments.bench conv|resnet|embracing|saga|tracking|mix|clip|round|peers|scale|all --json FILE
    python -m experiments.bench peers --against torch

Writes {"name": {"value", "unit", "spread", "against"}, ..., "environment": {...}} and prints the same as a table;
where a suite says what is wanted, "wanted" is the least value. A suite with a picture draws it beside FILE, as FILE's
name with .png. Machines drift: compare ratios, not seconds of different runs.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from experiments.compilation_cache import compilation_cache
from experiments.timing import Measurement, environment
from jaxfl.core import ArgumentError, check

# Suite -> module with `suite() -> dict[str, Measurement]`; imported when asked for, since each builds its own models.
# A module with `plot(measurements, path)` draws them too; one with `WANTED`, name -> number, says how much is wanted.
SUITES = {
    "conv": "experiments.bench_conv",
    "resnet": "experiments.bench_resnet",
    "embracing": "experiments.bench_embracing",
    "saga": "experiments.bench_saga",
    "tracking": "experiments.bench_tracking",
    "mix": "experiments.bench_mix",
    "clip": "experiments.bench_clip",
    "round": "experiments.bench_round",
    "peers": "experiments.bench_peers",
    "scale": "experiments.bench_scale",
}


def report(measurements: dict[str, Measurement], console: Console, wanted: dict[str, float] | None = None) -> None:
    """Print the measurements as a table; with a column of the least values that are wanted, where there are any."""
    wanted = {name: least for name, least in (wanted or {}).items() if name in measurements}
    table = Table(title="Benchmarks (median; lowest to highest of the repeats)")
    table.add_column("name", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("spread", justify="right")
    if wanted:
        table.add_column("wanted", justify="right")
    table.add_column("against")
    for name, one in measurements.items():
        spread = f"{one.spread[0]:.3g} to {one.spread[1]:.3g}"
        least = [f"{wanted[name]:.3g}" if name in wanted else ""] if wanted else []
        table.add_row(name, f"{one.value:.3g} {one.unit}", spread, *least, one.against)
    console.print(table)


def as_json(measurements: dict[str, Measurement], wanted: dict[str, float] | None = None) -> str:
    """The measurements, what is wanted of some, and where they were taken, as JSON text."""
    named = {name: {**one._asdict(), "spread": list(one.spread)} for name, one in measurements.items()}
    for name, least in (wanted or {}).items():
        if name in named:
            named[name]["wanted"] = least
    return json.dumps({**named, "environment": environment()}, indent=2) + "\n"


def run(suite: str, json_file: Path | None = None, against: str | None = None) -> dict[str, Measurement]:
    """Run one suite or all of them.

    Args:
        suite: a name of `SUITES`, or "all".
        json_file: where to write the numbers, and beside it the pictures of suites that draw one; nowhere by default.
        against: the library whose rows the suite peers runs beside ours, one of its `PEERS`; none by default.

    Raises:
        ArgumentError: there is no such suite or library, it is not installed, or the file cannot be written.
    """
    check.one_of((*SUITES, "all"), suite=suite)
    names = tuple(SUITES) if suite == "all" else (suite,)
    if against is not None:
        if "peers" not in names:
            found, remedy = f"got it with {suite}", "Ask for peers or all, or leave it out."
            raise ArgumentError("--against", "is an option of the suite peers", found, remedy)
        importlib.import_module(SUITES["peers"]).require_peer(against)
    if json_file is not None and (json_file.is_dir() or not json_file.resolve().parent.is_dir()):
        raise ArgumentError("--json", "must name a file in an existing folder", f"got {json_file}", "Make the folder.")
    console = Console()
    measurements: dict[str, Measurement] = {}
    wanted: dict[str, float] = {}
    pictures = []
    for name in names:
        with console.status(f"Suite {name} ..."), compilation_cache("off"):  # compile times are those of compiling
            module = importlib.import_module(SUITES[name])
            measurements.update(module.suite() if name != "peers" else module.suite(against=against))
            wanted.update(getattr(module, "WANTED", {}))
            pictures += [module.plot] if hasattr(module, "plot") else []
    if json_file is not None:
        json_file.write_text(as_json(measurements, wanted))
        for plot in pictures:
            plot(measurements, json_file.with_suffix(".png"))
    report(measurements, console, wanted)
    return measurements


def main(
    suite: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices([*SUITES, "all"]))
    ],
    json: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    against: Annotated[str | None, tyro.conf.arg(metavar="LIBRARY")] = None,
) -> None:
    """Measure what the engine's formulations gain.

    Args:
        suite: conv (per-node convolution), resnet (ResNet-20 and its stages), embracing (rounds with weak clients),
            saga (gradient tables), tracking (gradient tracking), mix (mixing), clip (clipped gradients), round (parts
            of an iteration), peers (the workloads that other libraries are measured on), scale (nodes and parameters)
            or all.
        json: file for the numbers; scale draws a picture beside it.
        against: "torch" to have peers run the same in PyTorch beside ours; it must be installed.
    """
    run(suite, json, against)


if __name__ == "__main__":
    try:
        tyro.cli(main, description="Measure what the engine's formulations gain.")
    except ArgumentError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
