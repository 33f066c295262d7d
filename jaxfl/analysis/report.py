"""One HTML page about one run or several: curves, tables, statements of privacy, differences of the runs.

The page needs no network and no other file. It is made from the files of run directories.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfl.analysis.cases import (
    FEWEST_SORTED,
    METRICS,
    Chart,
    Shown,
    all_statements,
    charts,
    in_percent,
    is_baseline,
    own_table,
    ranking,
    read_json,
    results,
    shown_cases,
    styles_of,
)
from jaxfl.analysis.html_parts import bullets, escaped, section, table_of
from jaxfl.analysis.plots import legend_below, new_figure, run_title
from jaxfl.core import ArgumentError
from jaxfl.core.outputs import drop_link
from jaxfl.privacy.statements import (
    SECRET,
    UNPAID_CHOICE,
    leaves_out,
    neighbors,
    noise_text,
    rounded_up,
    simulation,
    statement_text,
)
from jaxfl.privacy.statements import caption as statements_in_short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMED = 3  # cases, before a statement that they share
_DRAWN_ELSEWHERE = "training.png"  # the page draws these curves itself, for all runs together


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
    shown = shown_cases(folders)
    if not path.parent.is_dir():
        raise ArgumentError("path", "must lie in a folder that exists", f"got {path}", "Make the folder.")
    title = ", ".join(dict.fromkeys(run_title(folder / "config.json") for folder in folders))
    parts = [
        _own(folders),
        section("Results", _results(shown)),
        section("Privacy", _statements(shown)),
        section("What ε does not cover", _left_out(shown)),
        section("Sites", _sites(shown)),
        section("Curves", _legend(shown) + _curves(shown)),
        section("Pictures of the runs", _pictures(folders)),
        section("Differences of configuration", _differences(shown)),
        section("How to run it again", _again(shown, folders)),
    ]
    opened = "addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(d => d.open = true))"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escaped(title)}</title>'
    body = f'<h1>{escaped(title)}</h1><p class="note">{escaped(", ".join(map(str, folders)))}</p>{"".join(parts)}'
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    head += f"<style>{style}</style><script>{opened}</script>"  # what is folded on a screen is printed, too
    page = f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"
    drop_link(path).write_text(page, encoding="utf-8")
    return path


def _results(shown: Sequence[Shown]) -> str:
    """The table of results, under the claims in short and what it means."""
    columns = results(shown)
    simulated = simulation({"": all_statements(shown)})
    marked = "".join(f'<p class="mark">{escaped(text)}</p>' for text in simulated)
    claims = statements_in_short({one.label: one.row.get("privacy", []) for one in shown})
    claims = [text for text in claims if text not in simulated] + neighbors(all_statements(shown))
    marked += bullets(claims)
    seeds = max(len(one.row.get("status", [])) for one in shown)
    note = f'<p class="note">Mean{f" ± standard deviation over {seeds} seeds" if seeds > 1 else ", one seed"}. '
    metric, ranked = ranking(shown)
    if ranked and len(shown) >= FEWEST_SORTED:
        note += f"From best to worst by {METRICS[metric]}{', then baselines' * any(map(is_baseline, shown))}. "
    note += "ε: of the worst node, by the first statement below that has one. Costs: sums over nodes and rounds.</p>"
    best = [one.label for one in shown].index(ranked[0]) if ranked else None
    rows = list(zip(*(column.texts for column in columns), strict=True))
    return marked + note + table_of([column.heading for column in columns], rows, best)


def _own(folders: Sequence[Path]) -> str:
    """The tables that experiments printed in place of the frame's."""
    parts = []
    for table in filter(None, map(own_table, folders)):
        notes = "<br>".join(map(escaped, table.notes))
        parts.append(section(table.title, f'{table_of(table.heading, table.rows)}<p class="note">{notes}</p>'))
    return "".join(parts)


def _legend(shown: Sequence[Shown]) -> str:
    """Names of the lines, for all panels."""
    items = []
    styles = styles_of(shown)
    for label, style in styles.items():
        dashes = "" if style["linestyle"] == "solid" else " ".join(str(3 * part) for part in style["linestyle"][1])
        stroke = f'stroke="{style["color"]}" stroke-width="3" stroke-dasharray="{dashes}"'
        chip = f'<svg viewBox="0 0 34 10"><line x1="0" y1="5" x2="34" y2="5" {stroke}/></svg>'
        items.append(f"<li>{chip}{escaped(label)}</li>")
    if len(shown) > len(styles):
        items.append(f"<li>light grey: {len(shown) - len(styles)} further cases</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _curves(shown: Sequence[Shown]) -> str:
    """All charts of the cases."""
    figures = [_svg(chart) for chart in charts(shown)]
    note = '<p class="note">Line: mean over seeds; band or bar: smallest to largest seed.</p>'
    return f'<div class="panels">{"".join(figures)}</div>{note}' if figures else ""


def _svg(chart: Chart) -> str:
    """A picture within the page; its letters are text."""
    import matplotlib

    figure: Figure = new_figure(4.6, 3.3)
    handles, buffer = chart.draw(figure.add_subplot()), io.StringIO()
    if chart.has_own_lines:  # which the page's legend does not name
        legend_below(figure, handles, num_columns=2)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = buffer.getvalue()
    return f'<figure role="img" aria-label="{escaped(chart.title)}">{drawn[drawn.index("<svg") :]}</figure>'


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
    claims = [_rests(one) for one in all_statements(shown) if one["dp_epsilon"] is not None]
    common = [text for text in claims[0] if all(text in one for one in claims)] if claims else []
    groups: dict[tuple[str, ...], list[Shown]] = {}  # lines of statements -> the cases that state them
    for one in shown:
        groups.setdefault(tuple(map(statement_text, one.row.get("privacy", []))), []).append(one)
    parts = []
    for texts, alike in groups.items():
        items = []
        for number, line in enumerate(texts):
            same = [one.row["privacy"][number] for one in alike]
            rests = [[t for t in _rests(s) if s["dp_epsilon"] is not None and t not in common] for s in same]
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


def _rests(stated: Mapping[str, Any]) -> list[str]:
    """The assumptions that a statement rests on."""
    return [text for text in stated.get("assumptions", []) if not leaves_out(text)]


def _left_out(shown: Sequence[Shown]) -> str:
    """Everything that some statement with an epsilon leaves out, by its own words, and persons with several rows."""
    claims = [stated for stated in all_statements(shown) if stated["dp_epsilon"] is not None]
    texts = dict.fromkeys(text for one in claims for text in one.get("assumptions", []) if leaves_out(text))
    if any(one["neighboring_relation"] in ("zero_out", "replace_one") for one in claims):
        texts["a person with several samples: ε is that of one sample"] = None
    if UNPAID_CHOICE in texts and len(shown) > 1:
        texts[f"a choice among the {len(shown)} cases of this page looks at their test results"] = None
    return bullets([*texts])


def _sites(shown: Sequence[Shown]) -> str:
    """A table of sites.csv for each case: the largest epsilon over seeds, means of all other numbers."""
    parts = []
    for one in shown:
        groups: dict[str, list[Mapping[str, str]]] = {}
        for row in one.sites:
            groups.setdefault(row["site"], []).append(row)
        names = [*one.sites[0]] if one.sites else []
        names = names[names.index("noise_std") + 1 :] if names else []
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
            heading = ["site", "samples", "ε", "noise"]
            heading += [METRICS.get(name, name.replace("_", " ")) for name in metrics]
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
    if name == "noise_std":
        return noise_text(value)
    return f"{100 * value:.1f} %" if in_percent(name) else f"{value:.4g}"


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


def _again(shown: Sequence[Shown], folders: Sequence[Path]) -> str:
    """Commands, what comes out equal, and versions and machine, with a column for each run."""
    summaries = [read_json(folder / "summary.json") for folder in folders]
    commands = [summary.get("command_line") for summary in summaries]
    texts = [
        f"{folder.name}: {text or 'a call of jaxfl.training.train'}"
        for folder, text in zip(folders, commands, strict=True)
    ]
    texts += [f"a row of its first table: {text}" for summary in summaries for text in summary.get("row_commands", [])]
    if any(SECRET in text for stated in all_statements(shown) for text in stated.get("assumptions", [])):
        equal = "The key is secret: a second run has batches and noise of its own, and its epsilon adds to this one."
    else:
        equal = "On the same machine with the same versions and data all numbers come out equal, bit for bit."
        equal += " Elsewhere epsilon is the same, and results differ by rounding, which training may enlarge."
    environments = [read_json(folder / "config.json").get("environment", {}) for folder in folders]
    names = dict.fromkeys(name for environment in environments for name in environment)
    rows = [[name, *(environment.get(name, "–") for environment in environments)] for name in names]
    table = table_of(["", *(folder.name for folder in folders)], rows) if names else ""
    return f"{bullets(texts)}<p>{equal}</p>{table}"
