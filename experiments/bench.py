"""Benchmarks: what the engine's formulations gain, each ratio inside one process.

    python -m experiments.bench conv|saga|tracking|mix|clip|round|scale|all --json FILE

Writes {"name": {"value", "unit", "spread", "against"}, ..., "environment": {...}} and prints the same as a table;
a suite with a picture draws it beside FILE, as FILE's name with .png. Machines drift: compare ratios, not seconds of
different runs.
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
# A module with `plot(measurements, path)` draws them too.
SUITES = {
    "conv": "experiments.bench_conv",
    "saga": "experiments.bench_saga",
    "tracking": "experiments.bench_tracking",
    "mix": "experiments.bench_mix",
    "clip": "experiments.bench_clip",
    "round": "experiments.bench_round",
    "scale": "experiments.bench_scale",
}


def report(measurements: dict[str, Measurement], console: Console) -> None:
    """Print the measurements as a table."""
    table = Table(title="Benchmarks (median; lowest to highest of the repeats)")
    table.add_column("name", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("spread", justify="right")
    table.add_column("against")
    for name, one in measurements.items():
        spread = f"{one.spread[0]:.3g} to {one.spread[1]:.3g}"
        table.add_row(name, f"{one.value:.3g} {one.unit}", spread, one.against)
    console.print(table)


def as_json(measurements: dict[str, Measurement]) -> str:
    """The measurements and where they were taken, as JSON text."""
    named = {name: {**one._asdict(), "spread": list(one.spread)} for name, one in measurements.items()}
    return json.dumps({**named, "environment": environment()}, indent=2) + "\n"


def run(suite: str, json_file: Path | None = None) -> dict[str, Measurement]:
    """Run one suite or all of them.

    Args:
        suite: a name of `SUITES`, or "all".
        json_file: where to write the numbers, and beside it the pictures of suites that draw one; nowhere by default.

    Raises:
        ArgumentError: there is no such suite, or the file cannot be written.
    """
    check.one_of((*SUITES, "all"), suite=suite)
    if json_file is not None and (json_file.is_dir() or not json_file.resolve().parent.is_dir()):
        raise ArgumentError("--json", "must name a file in an existing folder", f"got {json_file}", "Make the folder.")
    console = Console()
    measurements: dict[str, Measurement] = {}
    pictures = []
    for name in SUITES if suite == "all" else (suite,):
        with console.status(f"Suite {name} ..."), compilation_cache("off"):  # compile times are those of compiling
            module = importlib.import_module(SUITES[name])
            measurements.update(module.suite())
            pictures += [module.plot] if hasattr(module, "plot") else []
    if json_file is not None:
        json_file.write_text(as_json(measurements))
        for plot in pictures:
            plot(measurements, json_file.with_suffix(".png"))
    report(measurements, console)
    return measurements


def main(
    suite: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices([*SUITES, "all"]))
    ],
    json: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
) -> None:
    """Measure what the engine's formulations gain.

    Args:
        suite: conv (per-node convolution), saga (gradient tables), tracking (gradient tracking), mix (mixing), clip
            (clipped gradients), round (parts of an iteration), scale (nodes and parameters) or all.
        json: file for the numbers; scale draws a picture beside it.
    """
    run(suite, json)


if __name__ == "__main__":
    try:
        tyro.cli(main, description="Measure what the engine's formulations gain.")
    except ArgumentError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
