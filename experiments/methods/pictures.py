"""The best step size of every method: a table by rounds and by bits, and accuracy against both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxfl.analysis.pictures import Picture, Plot, curve_mark, save_picture
from jaxfl.analysis.plots import Curve, read_lines, run_title, seeds_curve
from jaxfl.frame import Finished, Row
from jaxfl.frame.options import text_of
from jaxfl.training.summary import format_spread, write_table

from .choices import KINDS, SERVER

TABLE = "methods.csv"
_OWN, _TO = ("method", "step_size"), "bits_to_"


def judged_by(finished: Finished) -> str:
    """The metric that chooses steps and stands in the table: on the nodes' own test samples, where they have some."""
    has_own = all(row.config.clients.own_test for row in finished.rows.values())
    return "own_accuracy" if has_own else "test_accuracy"


def finish(finished: Finished) -> list[Path]:
    """Print and write the table of methods, and draw it where nothing varies but method and step."""
    folder, places = finished.run.path, best_cases(finished)
    if not places:
        return []
    by_case, metric = read_lines(folder).after(0).by_case(), judged_by(finished)
    curves: dict[str, Curve] = {}
    for name in places:
        curves[name] = seeds_curve(by_case[name], metric, _on_the_wire(finished.rows[name]))
    equal_bits = min((float(curve.x[-1]) for curve in curves.values() if curve.x[-1] > 0), default=0.0)
    rows = [_row(finished, name, curves[name], equal_bits) for name in places]
    write_table(folder / TABLE, rows)
    Console(markup=False).print(_table(finished, rows))
    is_one = len({row["method"] for row in rows}) == len(rows)
    return [folder / TABLE, *([save_picture(folder, _picture(finished, rows, curves, by_case))] if is_one else [])]


def best_cases(finished: Finished) -> list[str]:
    """Name the case of the best step, by mean final accuracy, of each method and other options that vary."""
    best, metric = dict[Any, tuple[float, str]](), judged_by(finished)
    for name, row in finished.rows.items():
        of_seeds = (finished.summary["cases"][name].get(metric) or {}).get("per_seed", [None])
        if None in of_seeds:
            continue
        mean = sum(of_seeds) / len(of_seeds)
        place = tuple(value for option, value in row.settings.items() if option != "step_size")
        best[place] = max(best.get(place, (-1.0, "")), (mean, name))
    return [name for _, name in best.values()]


def _varied(finished: Finished) -> list[str]:
    """Options beside method and step that vary over the rows; some belong to a part of the methods."""
    return [*dict.fromkeys(name for row in finished.rows.values() for name in row.settings if name not in _OWN)]


def _on_the_wire(row: Row) -> tuple[str, ...]:
    """Totals whose sum is the bits that were sent: a server sends, too, what clients receive."""
    has_server = row.config.learning.method in SERVER
    return ("total_bits_sent", "total_bits_received") if has_server else ("total_bits_sent",)


def _row(finished: Finished, name: str, curve: Curve, equal_bits: float) -> dict[str, Any]:
    """Row of methods.csv: after equal rounds, after equal bits, and the bits to an accuracy; None where not reached."""
    row, case, metric = finished.rows[name], finished.summary["cases"][name], judged_by(finished)
    learning = row.config.learning
    steps = [
        other.config.learning.step_size
        for other in finished.rows.values()
        if {**other.settings, "step_size": 0} == {**row.settings, "step_size": 0}
    ]
    affordable = np.flatnonzero(curve.x <= equal_bits)
    reached = np.flatnonzero(curve.mean >= learning.target_accuracy)
    return {
        "method": learning.method,
        **{option: row.settings.get(option) for option in _varied(finished)},
        "step_size": learning.step_size,
        "at_an_end": len(steps) > 1 and learning.step_size in (min(steps), max(steps)),
        metric: case[metric]["mean"],
        f"{metric}_std": case[metric]["std"],
        f"{metric}_worst_node": case[f"{metric}_worst_node"]["mean"],
        "bits": float(curve.x[-1]),
        f"{metric}_at_equal_bits": float(curve.mean[affordable[-1]]) if affordable.size else None,
        "equal_bits": equal_bits,
        f"{_TO}{learning.target_accuracy:g}": float(curve.x[reached[0]]) if reached.size else None,
        "case": name,
    }


def _table(finished: Finished, rows: list[dict[str, Any]]) -> Table:
    """A row a method."""
    metric = judged_by(finished)
    (reached,) = [name for name in rows[0] if name.startswith(_TO)]
    seeds = len(finished.summary["seeds"])
    note = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    note += f"; equal bits: {millions(rows[0]['equal_bits'])} Mbit\nMbit, all: what nodes and a server send\n"
    note += "*: the first or the last step that was tried; a better one may lie beyond"
    table = Table(title="Best step of each method", caption=note, caption_justify="left")
    varied = _varied(finished)
    for name in ("method", *varied, "step"):
        table.add_column(name.replace("_", " "), overflow="fold")
    for name in ("nodes (%)", "worst", "equal bits", "Mbit, all", f"to {100 * float(reached.removeprefix(_TO)):g} %"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: -row[metric]):
        case = finished.summary["cases"][row["case"]]
        cells = [format_spread(name, case[name]) for name in (metric, f"{metric}_worst_node")]
        equal = row[f"{metric}_at_equal_bits"]
        bits = ["-" if equal is None else f"{100 * equal:.1f}", millions(row["bits"]), millions(row[reached])]
        own = ["-" if row[name] is None else text_of(row[name]) for name in varied]
        table.add_row(row["method"], *own, f"{row['step_size']:g}" + "*" * row["at_an_end"], *cells, *bits)
    return table


def millions(bits: float | None) -> str:
    """Bits in Mbit, three digits; "-" for none.

    Examples:
        >>> millions(49_356_800), millions(None)
        ('49.4', '-')
    """
    return "-" if bits is None else f"{1e-6 * bits:.3g}"


def _picture(finished: Finished, rows: list[dict[str, Any]], curves: Mapping[str, Curve], by_case: Any) -> Picture:
    """Accuracy against rounds and against bits, a row of plots for each kind of method."""
    clients, metric = next(iter(finished.rows.values())).config.clients, judged_by(finished)
    title, plots = run_title(finished.run.path / "config.json"), []
    for kind, methods in KINDS.items():
        own = [row for row in rows if row["method"] in methods]
        of_rounds = [curve_mark(row["method"], seeds_curve(by_case[row["case"]], metric)) for row in own]
        of_bits = [curve_mark(row["method"], curves[row["case"]]) for row in own]
        label = metric.replace("_", " ")
        plots += [Plot(label, "round", of_rounds, is_accuracy=True, title=kind)] * bool(own)
        plots += [Plot("", "bits sent by all", of_bits, is_accuracy=True, log="x", title=kind)] * bool(own)
    return Picture("methods", f"{title}: {clients.nodes} nodes ({clients.partition}), best step of each", plots)
