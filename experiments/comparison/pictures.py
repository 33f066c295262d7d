"""The best step size of every method: a table, and accuracy against epsilon, bits and seconds."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfl.analysis.plots import (
    Panel,
    draw_curve,
    legend_below,
    line_style,
    new_figure,
    read_lines,
    run_title,
    save_figure,
    seeds_curve,
    style_axes,
)
from jaxfl.frame import Finished
from jaxfl.privacy.statements import RELATIONS
from jaxfl.training.json_files import write_atomically

from .options import SILENT

TABLE = "comparison.csv"
_COSTS = ("bits_sent", "simulated_seconds", "joules")
_ACCURACY = Panel("test_accuracy", "test accuracy", is_accuracy=True)
_MARKS = "osD^vPX*"
_AGAINST = {"total_bits_sent": "bits sent by all nodes", "total_simulated_seconds": "simulated seconds"}


def finish(finished: Finished) -> list[Path]:
    """Write comparison.csv, and draw it."""
    rows, folder = best_rows(finished), finished.run.path
    if not rows:
        return []
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / TABLE, text.getvalue().encode())
    return [folder / TABLE, _draw(finished, rows)]


def best_rows(finished: Finished) -> list[dict[str, Any]]:
    """The best step of each method and budget, by mean test accuracy over seeds; one that never ended is left out.

    `at_an_end` says that the best step is the smallest or the largest of the grid, so that a better one may lie beyond.
    """
    found: dict[tuple[str, float | None], list[tuple[float, str]]] = {}
    cases = finished.summary["cases"]
    for name, row in finished.rows.items():
        method = row.config.learning.method
        mean = (cases[name].get("test_accuracy") or {}).get("mean")
        budget = None if method in SILENT else row.config.budget.target_epsilon
        found.setdefault((method, budget), []).append((-1.0 if mean is None else mean, name))
    rows = []
    for (method, budget), tried in found.items():
        accuracy, name = max(tried)
        if accuracy < 0:
            continue
        case, steps = cases[name], [finished.rows[other].config.learning.step_size for _, other in tried]
        step = finished.rows[name].config.learning.step_size
        rows.append(
            {
                "method": method,
                "target_epsilon": budget,
                "step_size": step,
                "at_an_end": len(steps) > 1 and step in (min(steps), max(steps)),
                "test_accuracy": accuracy,
                "test_accuracy_std": case["test_accuracy"]["std"],
                "test_accuracy_worst_node": (case.get("test_accuracy_worst_node") or {}).get("mean"),
                **{cost: (case["costs"].get(cost) or {}).get("mean") for cost in _COSTS},
                "case": name,
            }
        )
    return rows


def _draw(finished: Finished, rows: Sequence[dict[str, Any]]) -> Path:
    """Accuracy at the end against epsilon; at the middle budget its curves against bits and seconds."""
    folder = finished.run.path
    config = next(iter(finished.rows.values())).config
    title = f"{run_title(folder / 'config.json')}: {config.clients.nodes} nodes, {config.learning.rounds} rounds, "
    relation = RELATIONS[config.budget.neighboring_relation]
    figure = new_figure(12.0, 4.4, f"{title}each run at the same proven ε ({relation}, δ = {config.budget.dp_delta:g})")
    panels, lines, handles = figure.subplots(1, 3, sharey=True), read_lines(folder), {}
    budgets = sorted({row["target_epsilon"] for row in rows} - {None})
    middle = budgets[len(budgets) // 2] if budgets else None
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own, style = [row for row in rows if row["method"] == method], line_style(number)
        height = [row["test_accuracy"] for row in own]
        spread = [row["test_accuracy_std"] or 0.0 for row in own]
        if method in SILENT:
            handles[method] = panels[0].axhline(height[0], color="0.5", linestyle=style["linestyle"])
            continue
        x = [row["target_epsilon"] for row in own]
        style = {**style, "color": "0.5"} if method == "alone" else style
        mark = {"marker": _MARKS[number % len(_MARKS)], "markersize": 5}
        handles[method] = panels[0].errorbar(x, height, spread, capsize=2, **mark, **style)
        (best,) = [row for row in own if row["target_epsilon"] == middle] or [own[0]]
        of_case = [line for line in lines if line["case"] == best["case"] and line["round"]]
        for axes, cost in zip(panels[1:], _AGAINST, strict=True):
            if of_case and any(line.get(cost) for line in of_case):
                draw_curve(axes, seeds_curve(of_case, "test_accuracy", (cost,)), style)
    style_axes(panels[0], _ACCURACY, "proven epsilon")
    panels[0].set(title="at the end, best step of each", xscale="log")
    panels[0].set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    panels[0].minorticks_off()
    for axes, label in zip(panels[1:], _AGAINST.values(), strict=True):
        style_axes(axes, _ACCURACY, label)
        axes.set(title=f"during training, at ε = {middle:g}", xscale="log", ylabel=None)
    legend_below(figure, handles, [], 6)
    return save_figure(figure, folder / "plots" / "comparison.png")
