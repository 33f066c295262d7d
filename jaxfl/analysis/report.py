"""One HTML page about one run or several: curves, tables, statements of privacy, differences of the runs.

The page needs no network and no other file. It is made from the files of run directories.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxfl.analysis.html_parts import bullets, escaped, section, table_of
from jaxfl.analysis.plots import (
    X_AXES,
    Panel,
    draw_curve,
    finish_axes,
    line_style,
    new_figure,
    read_lines,
    run_title,
    seeds_curve,
    style_axes,
)
from jaxfl.core import ArgumentError
from jaxfl.core.lines import Lines
from jaxfl.core.outputs import drop_link, read_csv
from jaxfl.privacy.statements import rounded_up, simulation, statement_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (
    Panel("test_accuracy", "test accuracy, mean over nodes", is_accuracy=True),
    Panel("test_accuracy_worst_node", "test accuracy, worst node", is_accuracy=True),
    Panel("test_loss", "test loss, mean over nodes"),
    Panel("train_loss", "training loss"),
)
_COLUMNS = {  # of the table: entry of summary.json -> heading
    "test_accuracy": "test accuracy",
    "test_accuracy_worst_node": "worst node",
    "test_accuracy_average_model": "average model",
    "test_loss": "test loss",
    "train_loss": "training loss",
}
_COSTS = {"bits_sent": "bits sent", "simulated_seconds": "simulated seconds", "joules": "joules"}
_BEFORE_METRICS = 9  # columns of sites.csv
_MOST_COLORED = 14  # cases; further ones are grey
_MOST_NAMED = 3  # cases, before a statement that they share
_FEWEST_SORTED = 5  # cases, as in the closing table of a run
_DRAWN_ELSEWHERE = "training.png"  # the page draws these curves itself, for all runs together


class Shown(NamedTuple):
    """A case of a run, as the page shows it."""

    label: str  # unique on the page
    row: Mapping[str, Any]  # of summary.json
    options: Mapping[str, Any]  # its whole configuration
    lines: Lines  # its measurements
    sites: Sequence[Mapping[str, str]]  # its rows of sites.csv


def write_report(run_dirs: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Write one HTML page about runs that have ended.

    Args:
        run_dirs: run directories, at least one; their cases stand beside each other.
        path: the page to write; a file that is there is replaced.

    Returns:
        The path.

    Raises:
        ArgumentError: a directory without summary.json and lines of measurements, or no folder for the page.
    """
    path, folders = Path(path), [Path(folder) for folder in run_dirs]
    if not folders:
        raise ArgumentError("run_dirs", "must name a run", "got none", "Pass a run directory.")
    shown = [one for folder in folders for one in _cases(folder, len(folders) > 1)]
    if not path.parent.is_dir():
        raise ArgumentError("path", "must lie in a folder that exists", f"got {path}", "Make the folder.")
    if len(shown) >= _FEWEST_SORTED:
        _, ranked = _ranking(shown)
        places = {label: place for place, label in enumerate(ranked)}
        shown.sort(key=lambda one: (_is_baseline(one), places.get(one.label, len(places))))
    title = ", ".join(dict.fromkeys(run_title(folder / "config.json") for folder in folders))
    parts = [
        section("Results", _results(shown)),
        section("Privacy", _statements(shown)),
        section("Sites", _sites(shown)),
        section("Curves", _legend(shown) + _curves(shown)),
        section("Pictures of the runs", _pictures(folders)),
        section("Differences of configuration", _differences(shown)),
        section("Where it ran", _environments(folders)),
    ]
    opened = "addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(d => d.open = true))"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escaped(title)}</title>'
    body = f'<h1>{escaped(title)}</h1><p class="note">{escaped(", ".join(map(str, folders)))}</p>{"".join(parts)}'
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    head += f"<style>{style}</style><script>{opened}</script>"  # what is folded on a screen is printed, too
    page = f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"
    drop_link(path).write_text(page, encoding="utf-8")
    return path


def _cases(folder: Path, several_runs: bool) -> list[Shown]:
    """The cases of a run."""
    summary = _read(folder / "summary.json")
    if "cases" not in summary:
        remedy = "Name the directory of a run that has ended."
        raise ArgumentError("run_dirs", "must hold summary.json", f"{folder} has none", remedy)
    cases, winner = summary["cases"], summary.get("selected")
    if winner:  # of a private selection: its statements count all runs
        cases[winner["case"]]["privacy"] = winner["privacy"] + cases[winner["case"]]["privacy"]
    config = dict(_read(folder / "config.json").get("config", {}))
    changes, _ = config.pop("cases", {}), config.pop("settled", None)
    table = folder / "sites.csv"
    sites = read_csv(table) if table.exists() else []
    lines = read_lines(folder).by_case()
    return [
        Shown(
            label=f"{folder.name}: {name}" if several_runs else name,
            row=row,
            options={**config, **{k: v for k, v in changes.get(name, {}).items() if k != "seeds"}},
            lines=lines.get(name, Lines()),
            sites=[site for site in sites if site["case"] == name],
        )
        for name, row in cases.items()
    ]


def _read(path: Path) -> dict[str, Any]:
    """A JSON file, empty where it is missing."""
    return json.loads(path.read_bytes()) if path.exists() else {}


def _spread(name: str, value: Mapping[str, Any] | None) -> str:
    """Mean and standard deviation over seeds; accuracies in per cent."""
    if value is None or value["mean"] is None:
        return "–"
    unit, form = (100, "{:.1f}") if "accuracy" in name else (1, "{:.3g}")
    deviation = "" if value["std"] is None else f" ± {form.format(unit * value['std'])}"
    return form.format(unit * value["mean"]) + deviation + (" %" if unit == 100 else "")


def _is_baseline(one: Shown) -> bool:
    return bool(one.row.get("settings", {}).get("baseline"))


def _ranking(shown: Sequence[Shown]) -> tuple[str, list[str]]:
    """Mean accuracy where there is one, else test loss, and the cases by it from best to worst; no baselines."""
    for metric, sign in (("test_accuracy", -1), ("test_loss", 1)):
        rows = {one.label: one.row for one in shown if not _is_baseline(one)}
        means = {label: row[metric]["mean"] for label, row in rows.items() if metric in row}
        known = {label: sign * mean for label, mean in means.items() if mean is not None}
        if len(known) > 1:
            return metric, sorted(known, key=known.__getitem__)
    return "", []


def _results(shown: Sequence[Shown]) -> str:
    """A row for each case: metrics, epsilon, costs, status."""
    from matplotlib.ticker import EngFormatter

    metrics = [name for name in _COLUMNS if any(one.row.get(name) for one in shown)]
    costs = [name for name in _COSTS if any(_cost(one, name) for one in shown)]
    short = EngFormatter(places=2, sep=" ")
    heading = ["case", "ε", *(_COLUMNS[name] for name in metrics), *(_COSTS[name] for name in costs), "status"]
    rows = [
        [
            one.label,
            _epsilon_text(one),
            *(_spread(name, one.row.get(name)) for name in metrics),
            *("–" if (cost := _cost(one, name)) is None else short(cost) for name in costs),
            ", ".join(dict.fromkeys(one.row.get("status", []))),
        ]
        for one in shown
    ]
    marked = "".join(f'<p class="mark">{escaped(text)}</p>' for text in simulation({"": _all_statements(shown)}))
    seeds = max(len(one.row.get("status", [])) for one in shown)
    note = f'<p class="note">Mean{f" ± standard deviation over {seeds} seeds" if seeds > 1 else ", one seed"}. '
    metric, ranked = _ranking(shown)
    if ranked and len(shown) >= _FEWEST_SORTED:
        note += f"From best to worst by {_COLUMNS[metric]}{', then baselines' * any(map(_is_baseline, shown))}. "
    note += "ε: of the worst node, by the first statement below that has one. Costs: sums over nodes and rounds.</p>"
    return marked + note + table_of(heading, rows, ranked[0] if ranked else None)


def _all_statements(shown: Sequence[Shown]) -> list[Mapping[str, Any]]:
    return [stated for one in shown for stated in one.row.get("privacy", [])]


def _cost(one: Shown, name: str) -> float | None:
    """A cost of the whole run, mean over the seeds that did not diverge, as in the table on the screen."""
    return one.row.get("costs", {}).get(name, {}).get("mean")


def _stated(one: Shown) -> Mapping[str, Any] | None:
    """The first statement of a case that has an epsilon."""
    return next((stated for stated in one.row.get("privacy", []) if stated["dp_epsilon"] is not None), None)


def _epsilon_text(one: Shown) -> str:
    stated = _stated(one)
    return "none" if stated is None else f"{rounded_up(stated['dp_epsilon'], 4)} {stated['bound']}"


def _style_of(number: int) -> dict[str, Any]:
    return line_style(number) if number < _MOST_COLORED else {"color": "0.75", "linestyle": "solid"}


def _legend(shown: Sequence[Shown]) -> str:
    """Names of the lines, for all panels."""
    items = []
    for number, one in enumerate(shown[:_MOST_COLORED]):
        style = line_style(number)
        dashes = "" if style["linestyle"] == "solid" else " ".join(str(3 * part) for part in style["linestyle"][1])
        stroke = f'stroke="{style["color"]}" stroke-width="3" stroke-dasharray="{dashes}"'
        chip = f'<svg viewBox="0 0 34 10"><line x1="0" y1="5" x2="34" y2="5" {stroke}/></svg>'
        items.append(f"<li>{chip}{escaped(one.label)}</li>")
    if len(shown) > _MOST_COLORED:
        too = ", baselines among them" * any(map(_is_baseline, shown[_MOST_COLORED:]))
        items.append(f"<li>grey: {len(shown) - _MOST_COLORED} further cases{too}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _curves(shown: Sequence[Shown]) -> str:
    """Metrics against rounds, the first one against costs, too, and final values against epsilon."""
    panels = [panel for panel in _PANELS if any(len(one.lines.having(panel.metric)) for one in shown)]
    figures = [_panel(shown, panel, "rounds") for panel in panels]
    for cost in ("bits", "seconds", "joules"):
        if panels and any(line.get(X_AXES[cost].totals[0]) for one in shown for line in one.lines):
            figures.append(_panel(shown, panels[0], cost))
    epsilons = [stated["dp_epsilon"] for one in shown if (stated := _stated(one)) is not None]
    if panels and epsilons and max(epsilons) > 1.01 * min(epsilons):
        figures.append(_against_epsilon(shown, panels[0]))
    note = '<p class="note">Line: mean over seeds; band or bar: smallest to largest seed.</p>'
    return f'<div class="panels">{"".join(figures)}</div>{note}' if figures else ""


def _panel(shown: Sequence[Shown], panel: Panel, x: str) -> str:
    """One metric of every case against rounds or a cost."""
    axis = X_AXES[x]

    def draw(axes: Axes) -> None:
        for number, one in reversed(list(enumerate(shown))):  # the first case lies on top
            curve = seeds_curve(one.lines, panel.metric, axis.totals)
            if curve.x.size and number < _MOST_COLORED:
                draw_curve(axes, curve, _style_of(number))
            elif curve.x.size:
                axes.plot(curve.x, curve.mean, linewidth=0.7, **_style_of(number))
        finish_axes(axes, panel, axis)

    return _svg(draw, f"{panel.label} against {axis.label}")


def _against_epsilon(shown: Sequence[Shown], panel: Panel) -> str:
    """Draw the final metric of each case that has an epsilon."""

    def draw(axes: Axes) -> None:
        for number, one in enumerate(shown):
            stated, ends = _stated(one), one.row.get(panel.metric)
            values = [value for value in (ends or {}).get("per_seed", []) if value is not None]
            if stated is not None and values:
                mean = float(np.mean(values))
                spread = [[mean - min(values)], [max(values) - mean]]
                color = _style_of(number)["color"]
                axes.errorbar([stated["dp_epsilon"]], [mean], yerr=spread, marker="o", capsize=3, color=color)
        style_axes(axes, panel, "ε at the end, as in the table")
        if axes.dataLim.x0 > 0 and axes.dataLim.x1 / axes.dataLim.x0 > 8:
            axes.set_xscale("log")

    return _svg(draw, f"{panel.label} against epsilon")


def _svg(draw: Callable[[Axes], None], title: str) -> str:
    """A picture within the page; its letters are text."""
    import matplotlib

    figure: Figure = new_figure(4.6, 3.3)
    axes = figure.add_subplot()
    draw(axes)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = buffer.getvalue()
    return f'<figure role="img" aria-label="{escaped(title)}">{drawn[drawn.index("<svg") :]}</figure>'


def _pictures(folders: Sequence[Path]) -> str:
    """The pictures in the run directories, except the curves."""
    pictures = [
        path for folder in folders for path in sorted(folder.glob("plots/*.png")) if path.name != _DRAWN_ELSEWHERE
    ]
    return "".join(
        f'<figure><div class="scroll"><img alt="{escaped(path.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"></div>'
        f"<figcaption>{escaped(path.parent.parent.name)}: {escaped(path.stem.replace('_', ' '))}</figcaption></figure>"
        for path in pictures
    )


def _statements(shown: Sequence[Shown]) -> str:
    """Every statement, and its assumptions where it has an epsilon; what several cases share stands once."""
    claims = [one.get("assumptions", []) for one in _all_statements(shown) if one["dp_epsilon"] is not None]
    common = [text for text in claims[0] if all(text in one for one in claims)] if claims else []
    groups: dict[tuple[str, ...], list[Shown]] = {}  # lines of statements -> the cases that state them
    for one in shown:
        groups.setdefault(tuple(map(statement_text, one.row.get("privacy", []))), []).append(one)
    parts = []
    for texts, alike in groups.items():
        items = []
        for number, line in enumerate(texts):
            same = [one.row["privacy"][number] for one in alike]
            rests = [[t for t in s["assumptions"] if s["dp_epsilon"] is not None and t not in common] for s in same]
            shared = [text for text in rests[0] if all(text in rest for rest in rests)]
            own = [(one, [t for t in rest if t not in shared]) for one, rest in zip(alike, rests, strict=True)]
            apart = [f"{one.label}: {'; '.join(rest)}" for one, rest in own if rest]
            items.append(f"<li>{escaped(line)}{bullets([*shared, *apart])}</li>")
        if items:
            names = "; ".join(one.label for one in alike)  # which may hold commas
            whose, names = (names, "") if len(alike) <= _MOST_NAMED else (f"{len(alike)} cases", f"{names}: ")
            parts.append(f"<details><summary><b>{escaped(whose)}</b>: {escaped(texts[0])}</summary>")
            parts.append(f"{escaped(names)}<ul>{''.join(items)}</ul></details>")
    if common:
        parts.append(f"<details><summary>Assumptions of all statements</summary>{bullets(common)}</details>")
    return "".join(parts)


def _sites(shown: Sequence[Shown]) -> str:
    """A table of sites.csv for each case: the largest epsilon over seeds, means of all other numbers."""
    parts = []
    for one in shown:
        groups: dict[str, list[Mapping[str, str]]] = {}
        for row in one.sites:
            groups.setdefault(row["site"], []).append(row)
        names = [*one.sites[0]][_BEFORE_METRICS:] if one.sites else []
        metrics = [name for name in names if any(row[name] for row in one.sites)]
        rows = []
        for site, own in groups.items():
            epsilons = [float(row["dp_epsilon"]) for row in own if row["dp_epsilon"]]
            epsilon = rounded_up(max(epsilons), 4) if epsilons else "none"
            means = {name: _mean([row[name] for row in own]) for name in ("samples", "noise_std", *metrics)}
            rows.append(
                [site, f"{means['samples']:.0f}", epsilon, *(_number(name, means[name]) for name in [*means][1:])]
            )
        if rows:
            heading = [
                "site",
                "samples",
                "ε",
                "noise",
                *(_COLUMNS.get(name, name.replace("_", " ")) for name in metrics),
            ]
            opened = " open" if len(shown) == 1 and len(rows) <= 20 else ""
            parts.append(f"<details{opened}><summary>{escaped(one.label)}</summary>{table_of(heading, rows)}</details>")
    return "".join(parts)


def _mean(texts: Sequence[str]) -> float:
    """Mean of the numbers that are not empty; NaN without any."""
    values = [float(text) for text in texts if text]
    return float(np.mean(values)) if values else math.nan


def _number(name: str, value: float) -> str:
    """One cell; accuracies in per cent."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:.1f} %" if "accuracy" in name else f"{value:.4g}"


def _differences(shown: Sequence[Shown]) -> str:
    """Options in which the cases differ, with a row for each case; and all others."""
    names = dict.fromkeys(name for one in shown for name in one.options)
    values = {name: [json.dumps(one.options.get(name), ensure_ascii=False) for one in shown] for name in names}
    differing = [name for name, texts in values.items() if len(set(texts)) > 1]
    rows = [[one.label, *(values[name][number].strip('"') for name in differing)] for number, one in enumerate(shown)]
    same = [[name, texts[0].strip('"')] for name, texts in values.items() if name not in differing]
    table = table_of(["case", *differing], rows) if differing else ""
    shared = table_of(["option", "value"], same)
    return f"{table}<details><summary>{len(same)} options that all share</summary>{shared}</details>"


def _environments(folders: Sequence[Path]) -> str:
    """Versions and machine, with a column for each run."""
    environments = [_read(folder / "config.json").get("environment", {}) for folder in folders]
    names = dict.fromkeys(name for environment in environments for name in environment)
    rows = [[name, *(environment.get(name, "–") for environment in environments)] for name in names]
    return table_of(["", *(folder.name for folder in folders)], rows) if names else ""
