"""The best step size of every method: a table, and accuracy against epsilon, bits and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfl.analysis.plots import (
    Panel,
    draw_curve,
    draw_points,
    epsilon_label,
    legend_below,
    new_figure,
    read_lines,
    run_title,
    save_figure,
    seeds_curve,
    style_axes,
    ticks_at,
)
from jaxfl.analysis.styles import line_styles
from jaxfl.core.lines import Lines
from jaxfl.frame import Finished, Row
from jaxfl.privacy.statements import RELATIONS
from jaxfl.training.summary import write_table

from .options import SILENT, UPDATES

TABLE = "comparison.csv"
_METRICS = ("test_accuracy", "test_accuracy_worst_node", "test_accuracy_average_model")
_OWN = ("method", "target_epsilon", "step_size", "baseline")
_COSTS = ("bits_sent", "simulated_seconds", "joules")
_ACCURACY = Panel("test_accuracy", "test accuracy", is_accuracy=True)
_AGAINST = {"total_bits_sent": "bits sent by all nodes", "total_simulated_seconds": "simulated seconds"}


def finish(finished: Finished) -> list[Path]:
    """Write comparison.csv, and draw it where only method, budget and step vary, under one relation."""
    rows, folder = best_rows(finished), finished.run.path
    if not rows:
        return []
    write_table(folder / TABLE, rows)
    keys = [(row["method"], row["target_epsilon"]) for row in rows]
    relations = {row["neighboring_relation"] for row in rows} - {None}
    is_one = len({*keys}) == len(keys) and len(relations) == 1
    return [folder / TABLE, *([_draw(finished, rows)] if is_one else [])]


def best_rows(finished: Finished) -> list[dict[str, Any]]:
    """The best step of each method and budget, by mean test accuracy over seeds, among those that all seeds ended.

    Other options that vary are columns, too. `at_an_end` says that the best step is the smallest or the largest of the
    grid, so that a better one may lie beyond.
    """
    found: dict[Any, list[tuple[float, str]]] = {}
    for name, row in finished.rows.items():
        of_seeds = (finished.summary["cases"][name].get("test_accuracy") or {}).get("per_seed", [None])
        mean = -1.0 if None in of_seeds else sum(of_seeds) / len(of_seeds)
        found.setdefault(tuple(_place(row).items()), []).append((mean, name))
    names = dict.fromkeys(name for row in finished.rows.values() for name in _place(row))
    rows = []
    for place, tried in found.items():
        accuracy, name = max(tried)
        if accuracy < 0:
            continue
        case, steps = finished.summary["cases"][name], [_step(finished, other) for _, other in tried]
        rows.append(
            {
                **dict.fromkeys(names),
                **dict(place),
                "neighboring_relation": _relation(finished.rows[name]),
                "step_size": _step(finished, name),
                "at_an_end": len(steps) > 1 and _step(finished, name) in (min(steps), max(steps)),
                **{metric: _mean(case, metric) for metric in _METRICS},
                "test_accuracy_std": case["test_accuracy"]["std"],
                **{cost: _mean(case["costs"], cost) for cost in _COSTS},
                "case": name,
            }
        )
    return rows


def _place(row: Row) -> dict[str, Any]:
    """Method, budget, and other options that vary: a best step is looked for at each of these places."""
    learning, budget = row.config.learning, row.config.budget
    others = {name: value for name, value in row.settings.items() if name not in _OWN}
    epsilon = None if learning.method in SILENT else budget.target_epsilon
    return {"method": learning.method, "target_epsilon": epsilon, **others}


def _relation(row: Row) -> str | None:
    """The neighboring relation of its budget."""
    method = row.config.learning.method
    if method in SILENT:
        return None
    return "zero_out_client" if method == UPDATES else row.config.budget.neighboring_relation


def _step(finished: Finished, name: str) -> float:
    return finished.rows[name].config.learning.step_size


def _mean(row: Mapping[str, Any], name: str) -> float | None:
    return (row.get(name) or {}).get("mean")


def _draw(finished: Finished, rows: Sequence[dict[str, Any]]) -> Path:
    """Accuracy at the end against epsilon; at the middle budget its curves against bits and seconds."""
    folder = finished.run.path
    config = next(iter(finished.rows.values())).config
    title = f"{run_title(folder / 'config.json')}: {config.clients.nodes} nodes, {config.learning.rounds} rounds, "
    relation = RELATIONS[config.budget.neighboring_relation]
    figure = new_figure(12.0, 4.4, f"{title}each run at the same proven ε ({relation}, δ = {config.budget.dp_delta:g})")
    panels, by_case, handles = figure.subplots(1, 3, sharey=True), read_lines(folder).after(0).by_case(), {}
    budgets = sorted({row["target_epsilon"] for row in rows} - {None})
    middle = budgets[len(budgets) // 2]
    for method, style in line_styles(dict.fromkeys(row["method"] for row in rows)).items():
        own = [row for row in rows if row["method"] == method]
        height = [row["test_accuracy"] for row in own]
        spread = [row["test_accuracy_std"] or 0.0 for row in own]
        if method in SILENT:
            handles[method] = panels[0].axhline(height[0], **style)
            continue
        x = [row["target_epsilon"] for row in own]
        handles[method] = draw_points(panels[0], x, height, spread, style)
        (best,) = [row for row in own if row["target_epsilon"] == middle] or [own[0]]
        of_case = by_case.get(best["case"], Lines())
        for axes, cost in zip(panels[1:], _AGAINST, strict=True):
            if any(column.any() for column in of_case.columns(cost)):
                draw_curve(axes, seeds_curve(of_case, "test_accuracy", (cost,)), style)
    cases = finished.summary["cases"]
    label = epsilon_label(cases[row["case"]]["privacy"] for row in rows if row["target_epsilon"] is not None)
    style_axes(panels[0], _ACCURACY, label)
    panels[0].set(title="at the end, best step of each", xscale="log")
    ticks_at(panels[0], budgets)
    for axes, label in zip(panels[1:], _AGAINST.values(), strict=True):
        style_axes(axes, _ACCURACY, label)
        axes.set(title=f"during training, at ε = {middle:g}", xscale="log", ylabel=None)
    legend_below(figure, handles, [], 6)
    return save_figure(figure, folder / "plots" / "comparison.png")
