"""Cases of runs that have ended, as a page or a paper shows them: rows of a table, and charts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxfl.analysis.final_plot import ladder, series
from jaxfl.analysis.pictures import Mark, Plot, draw_plot, styles_in
from jaxfl.analysis.plots import (
    X_AXES,
    Panel,
    draw_curves,
    epsilon_label,
    read_lines,
)
from jaxfl.analysis.styles import GREY, in_front, line_styles
from jaxfl.core import ArgumentError
from jaxfl.core.lines import Lines
from jaxfl.core.outputs import read_csv, varying
from jaxfl.privacy.statements import grounds, rounded_up, with_epsilon

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    Panel("test_accuracy", "test accuracy, mean over nodes", is_accuracy=True),
    Panel("test_accuracy_worst_node", "test accuracy, worst node", is_accuracy=True),
    Panel("test_loss", "test loss, mean over nodes"),
    Panel("train_loss", "training loss"),
)
METRICS = {  # entry of summary.json -> heading
    "test_accuracy": "test accuracy",
    "test_accuracy_worst_node": "worst node",
    "test_accuracy_average_model": "average model",
    "test_auc": "AUC",
    "test_loss": "test loss",
    "train_loss": "training loss",
}
_COSTS = {  # heading and unit
    "bits_sent": ("bits sent", "bit"),
    "simulated_seconds": ("simulated time", "s"),
    "joules": ("energy", "J"),
}
_FEWEST_STEPS = 3  # of a ladder
_MOST_TICKS = 6  # that fit side by side
_MOST_DECIMALS = 4  # of costs
_MOST_SPAN = 100.0  # largest over smallest mean of a column with equal decimals
FEWEST_SORTED = 5  # cases, as in the closing table of a run


class OwnTable(NamedTuple):
    """The closing table of an experiment that has its own: on the screen, in summary.json, and in front of a page."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]  # what rows, columns and signs mean
    baselines: Mapping[str, str]  # baseline, "" for none -> its name in the table


class Shown(NamedTuple):
    """A case of a run, as the page shows it."""

    label: str  # unique on the page
    settings: Mapping[str, Any]  # what varies: its run, where there are several, and its options
    row: Mapping[str, Any]  # of summary.json
    options: Mapping[str, Any]  # its whole configuration
    lines: Lines  # its measurements
    sites: Sequence[Mapping[str, str]]  # its rows of sites.csv


class Column(NamedTuple):
    """A column of the table of results, a text for each case."""

    heading: str
    texts: Sequence[str]  # each number with its own digits and unit
    numbers: Sequence[str] = ()  # the same with equal decimals; empty for words
    unit: str = ""  # of `numbers`


class Chart(NamedTuple):
    """A picture of all cases."""

    name: str  # of a file, without its format
    title: str
    draw: Callable[[Axes], dict[str, Any]]  # returns label -> what a legend shows
    has_own_lines: bool = False  # that are no cases


def shown_cases(folders: Sequence[Path]) -> list[Shown]:
    """The cases of all runs: five or more from best to worst, baselines last.

    Raises:
        ArgumentError: no folder; a folder without summary.json and lines of measurements.
    """
    if not folders:
        raise ArgumentError("run_dirs", "must name a run", "got none", "Pass a run directory.")
    shown = [one for folder in folders for one in _of_run(folder, len(folders) > 1)]
    if len(shown) >= FEWEST_SORTED:
        metric, _ = ranking(shown)
        shown.sort(key=lambda one: (is_baseline(one), _rank(one, metric)))
    return shown


def _of_run(folder: Path, several_runs: bool) -> list[Shown]:
    """The cases of a run."""
    summary = read_json(folder / "summary.json")
    if "cases" not in summary:
        remedy = "Name the directory of a run that has ended."
        raise ArgumentError("run_dirs", "must hold summary.json", f"{folder} has none", remedy)
    cases, winner = summary["cases"], summary.get("selected")
    if winner:  # of a private selection: its statements count all runs
        cases[winner["case"]]["privacy"] = winner["privacy"] + cases[winner["case"]]["privacy"]
    config = dict(read_json(folder / "config.json").get("config", {}))
    changes, _ = config.pop("cases", {}), config.pop("settled", None)
    of_sites = folder / "sites.csv"
    sites = read_csv(of_sites) if of_sites.exists() else []
    lines, table = read_lines(folder).by_case(), own_table(folder)
    words = {} if table is None else table.baselines

    def settings(row: Mapping[str, Any]) -> dict[str, Any]:
        own = {**({"run": folder.name} if several_runs else {}), **row.get("settings", {})}
        if words:
            own["how"] = words[own.pop("baseline", "")]
        return own

    def label(name: str) -> str:
        first, _, last = name.rpartition(", ")  # the name of a baseline stands last
        name = ", ".join(filter(None, (first, words.get(last, last))))
        return f"{folder.name}: {name}" if several_runs else name

    return [
        Shown(
            label=label(name),
            settings=settings(row),
            row=row,
            options={**config, **{k: v for k, v in changes.get(name, {}).items() if k != "seeds"}},
            lines=lines.get(name, Lines()),
            sites=[site for site in sites if site["case"] == name],
        )
        for name, row in cases.items()
    ]


def own_table(folder: Path) -> OwnTable | None:
    """The table that the run's experiment printed in place of the frame's."""
    table = read_json(folder / "summary.json").get("table")
    return None if table is None else OwnTable(**table)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, empty where it is missing."""
    return json.loads(path.read_bytes()) if path.exists() else {}


def in_percent(name: str) -> bool:
    """True for a metric that is shown in per cent."""
    return "accuracy" in name or "_auc" in name


def worst_site(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name of the site with the least mean accuracy over seeds; empty where no name or no site is worse.

    Args:
        rows: of one case, of sites.csv.

    Examples:
        >>> rows = [{"site": name, "test_accuracy": value} for name, value in (("a", 0.9), ("b", 0.8))]
        >>> worst_site(rows), worst_site([{**row, "site": site} for site, row in enumerate(rows)])
        ('b', '')
    """
    of_site: dict[str, list[float]] = {}
    for row in rows:
        values, own = of_site.setdefault(str(row["site"]), []), row.get("test_accuracy")
        values += [] if own in (None, "") else [float(own)]  # a seed that diverged has none
    means = {site: float(np.mean(values)) for site, values in of_site.items() if values}
    have_names = [*of_site] != [*map(str, range(len(of_site)))]
    differ = len({*means.values()}) > 1  # not where sites share a model
    return min(means, key=means.__getitem__) if have_names and differ else ""


def _spread(name: str, value: Mapping[str, Any] | None) -> str:
    """Mean and standard deviation over seeds; accuracies in per cent."""
    if value is None or value["mean"] is None:
        return "–"
    unit, form = (100, "{:.1f}") if in_percent(name) else (1, "{:.3g}")
    deviation = "" if value["std"] is None else f" ± {form.format(unit * value['std'])}"
    return form.format(unit * value["mean"]) + deviation + (" %" if unit == 100 else "")


def is_baseline(one: Shown) -> bool:
    return bool(one.row.get("settings", {}).get("baseline"))


def ranking(shown: Sequence[Shown]) -> tuple[str, list[str]]:
    """Mean accuracy where there is one, else test loss, and the cases by it from best to worst; no baselines."""
    for metric in ("test_accuracy", "test_loss"):
        ranks = {one.label: _rank(one, metric) for one in shown if not is_baseline(one)}
        known = [label for label, rank in ranks.items() if rank < math.inf]
        if len(known) > 1:
            return metric, sorted(known, key=ranks.__getitem__)
    return "", []


def _rank(one: Shown, metric: str) -> float:
    """A metric's mean, smaller for a better case; infinite without one."""
    mean = (one.row.get(metric) or {}).get("mean")
    return math.inf if mean is None else -mean if metric == "test_accuracy" else mean


def all_statements(shown: Sequence[Shown]) -> list[Mapping[str, Any]]:
    return [stated for one in shown for stated in one.row.get("privacy", [])]


def _cost(one: Shown, name: str) -> float | None:
    """A cost of the whole run, mean over the seeds that did not diverge, as in the table on the screen."""
    return one.row.get("costs", {}).get(name, {}).get("mean")


def _stated(one: Shown) -> Mapping[str, Any] | None:
    """The first statement of a case that has an epsilon."""
    return with_epsilon(one.row.get("privacy", []))


def grounds_of(shown: Sequence[Shown]) -> str:
    """The bounds, observers and relations of the cases' epsilons; empty without one."""
    return grounds(one.row.get("privacy", []) for one in shown)


def results(shown: Sequence[Shown]) -> list[Column]:
    """The options that vary, else the case's name; epsilon, metrics, costs, status."""
    from matplotlib.ticker import EngFormatter

    options, names = varying({one.label: one.settings for one in shown})
    columns = [Column(name, [names[one.label][place] for one in shown]) for place, name in enumerate(options)]
    stated = [_stated(one) for one in shown]
    epsilons = ["–" if one is None else rounded_up(one["dp_epsilon"], 4) for one in stated]
    texts = ["none" if one is None else f"{text} {one['bound']}" for one, text in zip(stated, epsilons, strict=True)]
    bounds = {one["bound"] for one in stated if one is not None}
    columns.append(Column("ε", texts, _padded(epsilons) if len(bounds) == 1 else ()))
    for name in METRICS:
        values = [one.row.get(name) for one in shown]
        if any(values):
            unit = "%" if in_percent(name) else ""
            texts = [_spread(name, each) for each in values]
            columns.append(Column(METRICS[name], texts, _aligned(values, unit), unit))
    if any(worst := [worst_site(one.sites) for one in shown]):
        columns.append(Column("worst site", [name or "–" for name in worst]))
    for name, (heading, unit) in _COSTS.items():
        costs = [_cost(one, name) for one in shown]
        if any(costs):
            short = EngFormatter(unit, places=2, sep=" ")
            texts = ["–" if cost is None else short(cost) for cost in costs]
            numbers, letter = _in_one_unit(costs)
            columns.append(Column(heading, texts, numbers, letter + unit))
    statuses = [", ".join(dict.fromkeys(one.row.get("status", []))) for one in shown]
    return [*columns, Column("status", statuses)]


def _padded(texts: Sequence[str]) -> list[str]:
    """Numbers with as many decimals as the one that has most."""
    decimals = max(len(text.partition(".")[2]) for text in texts)
    return [text if text == "–" else f"{float(text):.{decimals}f}" for text in texts]


def _aligned(values: Sequence[Mapping[str, Any] | None], unit: str) -> list[str]:
    """Means and deviations with equal decimals: two digits of the largest deviation, else three of the largest mean.

    No texts where means span so much that small ones would vanish.

    Examples:
        >>> spreads = [{"mean": 0.9123, "std": 0.0412}, {"mean": 0.5, "std": 0.0004}, None]
        >>> _aligned(spreads, "%")
        ['91.2 ± 4.1', '50.0 ± 0.0', '–']
    """
    scale = 100 if unit == "%" else 1
    known = [value for value in values if value is not None and value["mean"] is not None]
    sizes = [abs(value["mean"]) for value in known if value["mean"]]
    if not sizes or max(sizes) > _MOST_SPAN * min(sizes):
        return []
    deviations = [value["std"] for value in known if value["std"]]
    decimals = (1 if deviations else 2) - math.floor(math.log10(scale * max(deviations or sizes)))

    def text(number: float) -> str:
        return f"{scale * number:.{max(0, decimals)}f}"

    def cell(value: Mapping[str, Any] | None) -> str:
        if value is None or value["mean"] is None:
            return "–"
        return " ± ".join(text(value[part]) for part in ("mean", "std") if value[part] is not None)

    return [cell(value) for value in values]


def _in_one_unit(costs: Sequence[float | None]) -> tuple[list[str], str]:
    """Costs in the unit of the largest, with three digits of the smallest, and the unit's letter.

    The unit is one between where they span much, and each cost has three digits.

    Examples:
        >>> _in_one_unit([54_570_000.0, 1_200_000.0, None])
        (['54.57', '1.20', '–'], 'M')
        >>> _in_one_unit([1.52, 0.51733, 0.00031665])
        (['1520', '517', '0.317'], 'm')
    """
    known = [cost for cost in costs if cost]
    spans_much = max(known) > _MOST_SPAN * min(known)
    size = math.sqrt(max(known) * min(known)) if spans_much else max(known)
    power = min(max(3 * math.floor(math.log10(size) / 3), -9), 12)
    decimals = min(max(2 - math.floor(math.log10(min(known) / 10.0**power)), 0), _MOST_DECIMALS)

    def text(cost: float) -> str:
        return f"{float(f'{cost:.3g}'):.10g}" if spans_much else f"{cost:.{decimals}f}"

    texts = ["–" if cost is None else text(cost / 10.0**power) for cost in costs]
    return texts, ("n", "µ", "m", "", "k", "M", "G", "T")[power // 3 + 3]


def styles_of(shown: Sequence[Shown]) -> dict[str, dict[str, Any]]:
    """Label -> style of its line, as in other pictures of the run; those behind `in_front` have none."""
    return _styles([one.label for one in shown])


def _styles(ranked: Sequence[str]) -> dict[str, dict[str, Any]]:
    return line_styles(in_front(ranked), ranked)


def charts(shown: Sequence[Shown]) -> list[Chart]:
    """Metrics against rounds and costs, if they were evaluated in between, and at the end against epsilon and step."""
    panels = [panel for panel in PANELS if any(len(one.lines.having(panel.metric)) for one in shown)]
    drawn = [(panel, "rounds") for panel in panels]
    for cost in ("bits", "seconds", "joules"):
        if panels and any(line.get(X_AXES[cost].totals[0]) for one in shown for line in one.lines):
            drawn.append((panels[0], cost))
    pictures: list[Chart] = []
    epsilons = [stated["dp_epsilon"] for one in shown if (stated := _stated(one)) is not None]
    if panels and epsilons and max(epsilons) > 1.01 * min(epsilons):
        pictures.append(_against_epsilon(shown, panels[0]))
    steps = {one.label: one.settings for one in shown if isinstance(one.settings.get("step_size"), int | float)}
    if panels and steps and max(map(len, series(steps, "step_size").values())) >= _FEWEST_STEPS:
        pictures.append(_against_step(shown, panels[0], steps))
    have_curves = any(len({line["round"] for line in one.lines}) > 2 for one in shown)
    return [_against(shown, panel, x) for panel, x in drawn if have_curves or not pictures] + pictures


def _against(shown: Sequence[Shown], panel: Panel, x: str) -> Chart:
    """One metric of every case against rounds or a cost."""
    axis, of_case = X_AXES[x], {one.label: one.lines for one in shown}

    def draw(axes: Axes) -> dict[str, Any]:
        return draw_curves(axes, of_case, panel, axis, styles_of(shown))[0]

    return Chart(f"{panel.metric}_{x}", f"{panel.label} against {axis.label}", draw)


def _finals(one: Shown, metric: str) -> list[float]:
    """A metric at the end, of the seeds that have one."""
    return [value for value in (one.row.get(metric) or {}).get("per_seed", []) if value is not None]


def _against_step(shown: Sequence[Shown], panel: Panel, steps: Mapping[str, Mapping[str, Any]]) -> Chart:
    """The final metric on a ladder of step sizes, a line for each of the cases that differ in nothing else."""
    values = {one.label: _finals(one, panel.metric) for one in shown}
    plot = ladder(steps, "step_size", panel, "step size", values.__getitem__)
    title = f"{panel.label} against step size"
    return Chart(f"{panel.metric}_step_size", title, lambda axes: draw_plot(axes, plot, styles_in([plot])), True)


def _against_epsilon(shown: Sequence[Shown], panel: Panel) -> Chart:
    """The final metric against epsilon, a line for each of the cases that differ in their budget only."""
    points, rows = dict[str, tuple[float, ...]](), dict[str, Mapping[str, Any]]()
    for one in shown:
        stated, values = _stated(one), _finals(one, panel.metric)
        if stated is not None and values:
            points[one.label] = (stated["dp_epsilon"], float(np.mean(values)), min(values), max(values))
            rows[one.label] = one.settings
    budgets = {name: row for name, row in rows.items() if isinstance(row.get("target_epsilon"), int | float)}
    lines = series(budgets, "target_epsilon") | {name: [name] for name in rows if name not in budgets}
    marks = [
        Mark(name, *np.array(sorted(points[one] for one in cases)).T.tolist(), is_points=True)
        for name, cases in lines.items()
    ]
    places = {float(f"{epsilon:.3g}") for epsilon, *_ in points.values()}
    label = epsilon_label(one.row.get("privacy", []) for one in shown)
    log = "x" if places and min(places) > 0 and max(places) / min(places) > 8 else ""
    ticks = sorted(places) if len(places) <= _MOST_TICKS else ()
    plot, styles = Plot(panel.label, label, marks, panel.is_accuracy, log=log, ticks=ticks), _styles([*lines])

    def draw(axes: Axes) -> dict[str, Any]:
        handles = draw_plot(axes, plot, {name: {"color": GREY} for name in lines} | styles)
        return {name: handles[name] for name in styles}

    return Chart(f"{panel.metric}_epsilon", f"{panel.label} against epsilon", draw, has_own_lines=True)
