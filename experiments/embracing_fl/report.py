"""What experiments.embracing_fl prints in place of training: tables of costs, and several runs beside the paper's."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from experiments.embracing_fl.costs import sizes_table, timing_table
from experiments.embracing_fl.pictures import plot_added, plot_curves, plot_gaps
from experiments.embracing_fl.results import read_results
from experiments.embracing_fl.tables import markdown
from experiments.frame import Request
from experiments.frame.run import run
from jaxfl.core import check


def run_or_report(asked: Request) -> int:
    """Train, or what --show and --collect ask for; returns the exit code."""
    report, steps = asked.point.report, asked.point.steps
    if report.collect:
        _collect(report.collect, asked.point.run.out)
    elif report.show == "sizes":
        Console().print(sizes_table())
    elif report.show == "timing":
        check.at_least(1, batch_size=steps.batch_size)
        Console().print(timing_table(steps.batch_size))
    else:
        return run(asked)
    return 0


def _collect(directories: tuple[str, ...], out: str | None) -> None:
    """Tables and pictures of several runs."""
    results = read_results(directories)
    text = markdown(results)
    print(text)
    if out is None:
        return
    directory = Path(out).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tables.md").write_text(text)
    drawn = [
        plot_curves(results, directory / "curves.png"),
        plot_gaps(results, directory / "gaps.png"),
        plot_added(results, directory / "added.png"),
    ]
    files = [directory / "tables.md", *(path for path in drawn if path is not None)]
    Console().print(f"Written: {', '.join(map(str, files))}", soft_wrap=True)
