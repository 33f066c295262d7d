"""The best step of each budget and baseline: a table, a picture, and the command lines that make these rows again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from jaxfl.analysis.cases import OwnTable, worst_site
from jaxfl.analysis.pictures import Mark, Picture, Plot, points_mark, save_picture
from jaxfl.analysis.plots import epsilon_label, run_title
from jaxfl.frame import Finished, Request
from jaxfl.frame.options import text_of
from jaxfl.frame.run import words_of
from jaxfl.privacy.statements import RELATIONS, against, neighbors, rounded_up, with_epsilon
from jaxfl.training import read_results
from jaxfl.training.fitting_table import FittingTable
from jaxfl.training.sites import SITES, site_table
from jaxfl.training.summary import deciding, format_spread, trouble

from .. import privsgp_vr

OWN: dict[str, Any] = {"method": "PrivSGP", "iterations": 400}
"""Options whose values differ from those of experiments.privsgp_vr."""

_HOW = {name: name.replace("_", " ") or "together" for name in ("", "curator", "alone", "without_noise", "pooled")}
_SCORES = ("accuracy", "balanced_accuracy", "auc")
COLUMNS = tuple(f"test_{name}{end}" for name in _SCORES for end in ("", "_worst_node"))
_HEIGHTS = {
    "test_accuracy": "test accuracy, mean over sites",
    "test_accuracy_worst_node": "test accuracy, worst site",
}
_UNPAID = (
    "Steps were chosen by {}, and no ε pays for that choice. --private-selection geometric, with one --epsilon, makes"
    " it with an ε."
)


class Best(NamedTuple):
    """The best case of a budget, or of a baseline at it."""

    name: str
    baseline: str  # empty: no baseline
    budget: float | None  # the largest of a site; None without noise
    chosen: dict[str, Any]  # the options that it was chosen by
    at_an_end: bool  # a better step may lie beyond those that were tried
    result: Mapping[str, Any]  # its entry of the summary

    @property
    def stated(self) -> Mapping[str, Any]:
        """Its first statement with an epsilon; empty without."""
        return with_epsilon(self.result["privacy"]) or {}


def tell(request: Request, finished: Finished) -> list[Path]:
    """Print the table, the worst sites at the middle budget, and the commands; returns the picture."""
    rank_by = request.config.run.rank_by
    metric = deciding(finished.summary, COLUMNS if rank_by is None else (rank_by, *COLUMNS))
    console, rows = Console(markup=False), best_of(finished, metric)
    sites = finished.run.path / SITES
    of_sites = read_results(sites) if sites.exists() else []
    table = closing(finished, rows, of_sites)
    finished.summary["table"] = table._asdict()  # which a report shows first
    console.print(_printed(table))
    together = [row for row in rows if not row.baseline]
    if not together:
        return []
    middle = together[len(together) // 2]
    shown = site_table(of_sites, middle.name)
    if shown is not None:
        console.print(shown)
    console.print(f"{_UNPAID.format(metric.replace('_', ' '))}\nThese commands make the rows again:", soft_wrap=True)
    commands = finished.summary["row_commands"] = list[str]()  # which a report shows, too
    for row in together:
        end = request.rows[row.name].config.run.evaluate_every  # a training loss is a mean since the last evaluation
        whole = request._replace(changes={**OWN, **({"evaluate_every": end} if end else {}), **request.changes})
        commands.append(f"jaxfl {privsgp_vr.EXPERIMENT.name} {shlex.join(words_of(whole, row.name))}")
        console.print(f"  {commands[-1]}", soft_wrap=True)
    return [save_picture(finished.run.path, _picture(finished, rows))]


def best_of(finished: Finished, metric: str) -> list[Best]:
    """The case with the largest mean of a metric over seeds, of each budget and baseline; none where all diverged."""
    groups: dict[Any, list[str]] = {}
    for name, row in finished.rows.items():
        limits = row.config.budget
        groups.setdefault((row.baseline, limits.target_epsilon, limits.node_epsilons), []).append(name)
    rows = []
    for (baseline, budget, _), names in groups.items():
        results = {name: finished.summary["cases"][name] for name in names}
        ended = {name: result[metric]["mean"] for name, result in results.items() if not trouble(result)}
        if not ended:
            continue
        name = max(ended, key=lambda name: ended[name])
        steps = {each: finished.rows[each].config.learning.step_size for each in names}
        tried = sorted({step for step in steps.values() if not isinstance(step, str)})
        others = {**finished.rows[name].settings, "step_size": steps[name]}
        chosen = {key: value for key, value in others.items() if key not in ("target_epsilon", "baseline")}
        at_an_end = len(tried) > 1 and steps[name] in (tried[0], tried[-1])
        best = Best(name, baseline, budget, chosen, at_an_end, results[name])
        if not math.isfinite(budget):  # no noise, or a budget of each site
            best = best._replace(budget=best.stated.get("dp_epsilon"))
        rows.append(best)
    order = [*_HOW]
    return sorted(rows, key=lambda row: (math.inf if row.budget is None else row.budget, order.index(row.baseline)))


def best_guess(dp_epsilon: float, dp_delta: float) -> float:
    """The largest chance of a right guess whether one sample took part, where either is equally likely.

    Of errors of both kinds a mechanism with (epsilon, delta) leaves at least 2 (1 - delta) / (1 + e^epsilon) in all.

    Examples:
        >>> [round(best_guess(dp_epsilon, 1e-5), 3) for dp_epsilon in (0, 1, 3)]
        [0.5, 0.731, 0.953]

    References:
        Kairouz, Oh, Viswanath: "The Composition Theorem for Differential Privacy", ICML 2015, arXiv:1311.0776,
        theorem 2.1.
    """
    return 1 - (1 - dp_delta) / (1 + math.exp(dp_epsilon))


def closing(finished: Finished, rows: Sequence[Best], of_sites: Sequence[Mapping[str, Any]]) -> OwnTable:
    """A row a budget and baseline, mean ± standard deviation over seeds; `of_sites` is sites.csv."""
    metrics = [name for name in _SCORES if any(f"test_{name}" in row.result for row in rows)]
    seeds = len(finished.summary["seeds"])
    notes = [f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"]
    notes[0] += "; worst: of the worst site; all sites have one test set"
    notes.append("curator: all samples in one place, DP-SGD at the same ε; pooled: the same without noise")
    notes.append("alone: each site by itself, without noise; without noise: all sites together")
    worst = dict[str, list[str]]()
    for row in rows:
        if site := worst_site([one for one in of_sites if one["case"] == row.name]):
            at = "" if row.budget is None else f" at ε = {rounded_up(row.budget, 3)}"
            worst.setdefault(site, []).append(f"{_HOW[row.baseline]}{at}")
    if worst:
        named = (f"{site} ({', '.join(places)})" for site, places in worst.items())
        notes.append(f"worst site on average: {'; '.join(named)}")
    if any(row.at_an_end for row in rows):
        notes.append("*: the first or the last step that was tried; a better one may lie beyond")
    grounds = dict[str, dict[str, None]]()  # of an epsilon -> the rows that it is of
    for row in rows:
        if one := row.stated:
            relation = RELATIONS.get(one["neighboring_relation"], one["neighboring_relation"])
            ground = f"{one['bound']}{against(one)} ({relation}, δ = {one['dp_delta']:g})"
            grounds.setdefault(ground, {})[_HOW[row.baseline]] = None
    notes += [f"ε of {', '.join(how)}: {ground}, largest over sites" for ground, how in grounds.items()]
    if grounds:
        notes.append("guess: how often an observer is right at most about one sample, at even odds (%)")
    notes += neighbors(row.stated for row in rows if row.stated)
    heading = ["ε", "how", "chosen"]
    for name in metrics:
        label = "AUC" if name == "auc" else name.removesuffix("_accuracy")
        heading += [f"{label} (%)", "worst" if name == metrics[0] else f"worst {label}"]
    heading.append("guess")
    cells_of_rows = list[list[str]]()
    for row in rows:
        chosen = ", ".join(f"{_short(name)}{text_of(value)}" for name, value in row.chosen.items())
        own = row.stated
        guess = rounded_up(100 * best_guess(own["dp_epsilon"], own["dp_delta"]), 4) if own else "-"
        names = [f"test_{name}{end}" for name in metrics for end in ("", "_worst_node")]
        cells = [format_spread(name, row.result.get(name)) for name in names]
        epsilon = "none" if row.budget is None else rounded_up(row.budget, 3)
        cells_of_rows.append([epsilon, _HOW[row.baseline], chosen + "*" * row.at_an_end, *cells, guess])
    return OwnTable("What accuracy sites would have", heading, cells_of_rows, notes, _HOW)


def _printed(table: OwnTable) -> FittingTable:
    """The table for a terminal."""
    printed = FittingTable(file="results.csv", title=table.title, caption="\n".join(table.notes))
    for name in table.heading[:3]:
        printed.add_column(name, overflow="fold")
    for name in table.heading[3:-1]:
        printed.add_numbers(name)
    printed.add_column(table.heading[-1], justify="right")
    for row in table.rows:
        printed.add_row(*row)
    return printed


def _short(name: str) -> str:
    return "step " if name == "step_size" else "" if name == "method" else f"{name.replace('_', ' ')} "


def _picture(finished: Finished, rows: Sequence[Best]) -> Picture:
    """Mean and worst site's accuracy against epsilon; what has no noise is a level."""
    budgets = sorted({float(f"{row.budget:.3g}") for row in rows if row.budget is not None})
    x_label = epsilon_label(row.result["privacy"] for row in rows if not row.baseline)
    plots = []
    for metric, label in _HEIGHTS.items():
        marks = list[Mark]()
        for baseline, how in _HOW.items():
            own = [row for row in rows if row.baseline == baseline]
            spreads = [row.result[metric] for row in own]
            x = [row.budget for row in own if row.budget is not None]
            if own:
                marks.append(points_mark(how, x, spreads) if x else Mark(how, (), [spreads[0]["mean"]]))
        plots.append(Plot(label, x_label, marks, is_accuracy=True, log="x", ticks=budgets))
    notes = ["best step of each; mean and standard deviation over seeds"]
    return Picture("plan", run_title(finished.run.path / "config.json"), plots, notes)
