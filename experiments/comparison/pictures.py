"""The best step size of every method: a table, and accuracy against epsilon, bits and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfl.analysis.pictures import Mark, Picture, Plot, curve_mark, points_mark, save_picture
from jaxfl.analysis.plots import epsilon_label, read_lines, run_title, seeds_curve
from jaxfl.core.lines import Lines
from jaxfl.frame import Finished, Row
from jaxfl.training.summary import write_table

from .options import METHODS, OF_BASELINES, SILENT, UPDATES

TABLE = "comparison.csv"
_VALIDATION = "validation_accuracy"
_METRICS = ("test_accuracy", "test_accuracy_worst_node", "test_accuracy_average_model")
_OWN = ("method", "target_epsilon", "step_size", "baseline")
_COSTS = ("bits_sent", "simulated_seconds", "joules")
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
    return [folder / TABLE, *([save_picture(folder, _picture(finished, rows))] if is_one else [])]


def best_rows(finished: Finished) -> list[dict[str, Any]]:
    """The best step of each method and budget, by mean accuracy over seeds, among those that all seeds ended.

    The accuracy is of the samples that validate, without any of the test samples. Other options that vary are columns,
    too, and `observer` is against whom the budget holds. `at_an_end` says that the best step is the smallest or the
    largest of the grid, so that a better one may lie beyond.
    """
    found: dict[Any, list[tuple[float, str]]] = {}
    for name, row in finished.rows.items():
        case = finished.summary["cases"][name]
        of_seeds = (case.get(_VALIDATION) or case.get("test_accuracy") or {}).get("per_seed", [None])
        mean = -1.0 if None in of_seeds else sum(of_seeds) / len(of_seeds)
        found.setdefault(tuple(_place(row).items()), []).append((mean, name))
    names = dict.fromkeys(name for row in finished.rows.values() for name in _place(row))
    validates = any(_VALIDATION in case for case in finished.summary["cases"].values())
    metrics, rows = (*([_VALIDATION] if validates else []), *_METRICS), []
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
                "observer": next((one["observer"] for one in case.get("privacy", ()) if one.get("asked")), None),
                "step_size": _step(finished, name),
                "at_an_end": len(steps) > 1 and _step(finished, name) in (min(steps), max(steps)),
                **{metric: _mean(case, metric) for metric in metrics},
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


def _picture(finished: Finished, rows: Sequence[dict[str, Any]]) -> Picture:
    """Accuracy at the end against epsilon; at the middle budget its curves against bits and seconds."""
    folder, summary = finished.run.path, finished.summary["cases"]
    config = next(iter(finished.rows.values())).config
    title = f"{run_title(folder / 'config.json')}: {config.clients.nodes} nodes, {config.learning.rounds} rounds"
    by_case, ends, curves = read_lines(folder).after(0).by_case(), list[Mark](), {cost: [] for cost in _AGAINST}
    budgets = sorted({row["target_epsilon"] for row in rows} - {None})
    middle = budgets[len(budgets) // 2]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        spreads = [summary[row["case"]]["test_accuracy"] for row in own]
        name = f"{OF_BASELINES}, {method}" if METHODS[method].baseline else method
        if method in SILENT:
            ends.append(Mark(name, (), [spreads[0]["mean"]]))
        else:
            ends.append(points_mark(name, [row["target_epsilon"] for row in own], spreads))
        (best,) = [row for row in own if row["target_epsilon"] == middle] or [own[0]]
        of_case = by_case.get(best["case"], Lines())
        for cost in _AGAINST:
            if any(column.any() for column in of_case.columns(cost)):
                curves[cost].append(curve_mark(name, seeds_curve(of_case, "test_accuracy", (cost,))))
    label = epsilon_label(summary[row["case"]]["privacy"] for row in rows if row["target_epsilon"] is not None)
    log = "x" if len(budgets) > 1 else ""  # a single place is drawn wrongly on a logarithmic axis
    first = Plot("test accuracy", label, ends, is_accuracy=True, log=log, ticks=budgets, title="best step of each")
    title_of_curves = f"during training, at ε = {middle:g}"
    others = [
        Plot("", text, curves[cost], is_accuracy=True, log="x", title=title_of_curves)
        for cost, text in _AGAINST.items()
    ]
    observers = ", or ".join(dict.fromkeys(row["observer"] for row in rows if row["observer"]))
    notes = [
        f"each run at the same ε, δ = {config.budget.dp_delta:g}; bars: standard deviation over seeds",
        f"ε holds against {observers}",
    ]
    return Picture("comparison", title, [first, *others], notes, num_columns=3)
