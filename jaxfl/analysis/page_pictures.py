"""Pictures of a result page, from the files beside it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.analysis.page_tables import (
    ACCURACY,
    OPTIONS,
    Directive,
    Row,
    best_of,
    check_conditions,
    heading,
    is_kept,
    is_number,
    numbers,
    read_lines,
    read_rows,
    short,
    worded,
)
from jaxfl.analysis.plots import (
    Panel,
    draw_curve,
    draw_points,
    legend_below,
    new_figure,
    number_logarithms,
    save_figure,
    seeds_curve,
    style_axes,
    ticks_at,
)
from jaxfl.analysis.styles import line_styles
from jaxfl.core import ArgumentError
from jaxfl.core.lines import Lines

_AXES = {"target_epsilon": "epsilon", "iterations": "iterations K", "step_size": "step size", "round": "round"}
_AXES |= {"local_steps": "local iterations τ of a round"}
_NAMES = OPTIONS | {"local_steps": "τ", "kappa": "κ"}


def draw(directive: Directive, folder: Path, image: str) -> Path:
    """Draw the picture of a directive into the file that the next line of the page shows; returns its path.

    Raises:
        ArgumentError: a missing file, a next line that shows no picture, a column that no row has.
    """
    named = re.search(r"\]\((\w+\.png)\)", image)
    if named is None:
        raise ArgumentError("directive", "must stand above its picture", f"got the line {image!r}", "Mend the page.")
    parts = _parts(directive, folder)
    panels = [Panel(column, _label(directive, column), column.startswith(ACCURACY)) for column in directive.y]
    panels *= len(parts)
    across = min(3, len(panels)) if len(parts) > 1 else len(panels)
    down = -(-len(panels) // across)
    width = max(6.4, (5.0 if down == 1 else 3.6) * across)
    title = textwrap.fill(" ".join(directive.title).replace(" = ", "\xa0=\xa0"), int(10 * width)) or None
    figure = new_figure(width, 4.2 if down == 1 else 2.5 * down, title)
    fill = _curves if directive.curves else _ends
    handles = {}
    for number, panel in enumerate(panels):
        alike = 0 if panel.is_accuracy and panels[0].is_accuracy else number % len(directive.y)
        first = figure.axes[alike] if number > alike else None  # one height for accuracies, and for each column
        one = figure.add_subplot(down, across, number + 1, sharey=first)
        part = parts[number // len(directive.y)]
        if "x" in directive.log:
            one.set_xscale("log")
        if "y" in directive.log:
            one.set_yscale("log")
        handles |= fill(part, folder, one, panel)
        style = {"color": "0.45", "linewidth": 1.0, "linestyle": (0, (1, 2)), "zorder": 0}
        for height in directive.level:
            one.axhline(float(height), **style)
        for place in directive.marks:
            one.axvline(float(place), **style)
        if len(parts) > 1:
            one.set_title(textwrap.fill(part.where[-1].partition(":")[2], 40), fontsize=10)
    if directive.bottom:
        bottom = float(directive.bottom[0])
        figure.axes[0].set_ylim(bottom, 1 + 0.05 * (1 - bottom))
    if directive.steps:
        for one in figure.axes:
            one.set_ylim(bottom=0)
            one.locator_params("y", nbins=10, integer=True)
    if not handles:
        found = f"got x={directive.x}, y={directive.y}"
        raise ArgumentError("directive", "must name columns that its file has", found, "Mend the page.")
    if len(parts) > 1 and directive.panels == directive.curves:
        handles = {}  # each panel's title names its line
    legend_below(figure, handles, [_note(directive, folder)], 3)
    return save_figure(figure, folder / named[1])


def _parts(directive: Directive, folder: Path) -> list[Directive]:
    """The directive, or one for each value of the entry that has panels."""
    if (directive.panels or directive.steps) and (not directive.curves or len(directive.panels) > 1):
        found = f"got panels={directive.panels}, steps={directive.steps}, curves={directive.curves}"
        raise ArgumentError("directive", "must have curves for steps, or for panels of one entry", found, "Mend it.")
    if not ({*directive.log} <= {"x", "y"} and {*directive.steps} <= {"y"} - {*directive.log}):
        found = f"got log={directive.log}, steps={directive.steps}"
        raise ArgumentError("directive", "must have x or y for log, or y for steps", found, "Mend the page.")
    if directive.curves and directive.lines and not directive.best:
        found = f"got lines={directive.lines}"
        raise ArgumentError("directive", "must have best for lines of curves", found, "Leave them out.")
    if not directive.panels:
        return [directive]
    (entry,) = directive.panels
    values = dict.fromkeys(str(line[entry]) for line in _lines(directive, folder) if entry in line)
    return [directive._replace(where=(*directive.where, f"{entry}:{value}")) for value in values]


def _label(directive: Directive, column: str) -> str:
    """The name of an axis: in words of the page, an epsilon with its bound and relation where the rows tell them."""
    if column in directive.words:
        return directive.words[column]
    if column == ACCURACY:
        return "test accuracy, mean over nodes"
    words = heading([], column).removesuffix(", %")
    return f"test accuracy, {words.removeprefix('test accuracy ')}" if column.startswith(ACCURACY) else words


def _note(directive: Directive, folder: Path) -> str:
    """The meaning of lines and bars."""
    if directive.curves:
        if len({line.get("seed") for line in _lines(directive, folder)}) == 1:
            return "one seed"
        return "line: mean over seeds" + ("" if directive.bands else ", band: smallest to largest seed")
    if not any("seed" in row for row in read_rows(directive, folder)):
        return "lines: by formula"
    validated = any("validation_accuracy" in row for row in read_rows(directive, folder))
    by = "by samples that validate" if validated else "by what the axis shows"
    best = f"; best {directive.best[0].replace('_', ' ')} of each point, {by}" if directive.best else ""
    return f"points: mean over seeds, bars: standard deviation{best}"


def _ends(directive: Directive, folder: Path, axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw the last values of runs against an option."""
    rows, x = read_rows(directive, folder), directive.x[0] if directive.x else ""
    keys = dict.fromkeys(tuple(row.get(key, "") for key in directive.lines) for row in rows)
    handles: dict[str, Any] = {}
    places: set[float] = set()
    styles = line_styles(_name(directive, key) for key in keys)
    for key in keys:
        own = [row for row in rows if tuple(row.get(name, "") for name in directive.lines) == key]
        points = _points(directive, own, x, panel.metric)
        if points:
            at, mean, spread = np.array(points).T
            places |= {float(place) for place in at}
            name = _name(directive, key)
            if any("seed" in row for row in own):
                handles[name] = draw_points(axes, at, mean, spread, styles[name])
            else:
                (handles[name],) = axes.plot(at, mean, **styles[name])
        elif x and (heights := numbers(best_of(own, directive.best, panel.metric)[0], panel.metric)):
            name = _name(directive, key)  # what has no place on the axis, a run without noise for one, is a level
            handles[name] = axes.axhline(float(np.mean(heights)), **styles[name])
    style_axes(axes, panel, directive.words.get(x) or _budget(rows, x) or _AXES.get(x, x.replace("_", " ")))
    if panel.metric.endswith("_lead"):
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
    if len(places) <= 10:
        ticks_at(axes, sorted(places))
    return handles


def _budget(rows: Sequence[Row], x: str) -> str:
    """The bound and relation of target_epsilon: those whose epsilons meet it. Empty for another option."""
    for bound in ("proven", "published") if x == "target_epsilon" else ():
        column = f"{bound}_dp_epsilon"
        shares = [float(row[column]) / float(row[x]) for row in rows if row.get(column) and row.get(x)]
        if shares and 0.9 < min(shares) and max(shares) < 1.001:
            return heading(rows, column)
    return ""


def _best_cases(directive: Directive, folder: Path, metric: str) -> dict[tuple[str, str], str]:
    """Case and seed -> the line's name, for the case of each line with the best value of an option."""
    rows, titles = read_rows(directive, folder), {}
    for key in dict.fromkeys(tuple(row.get(key, "") for key in directive.lines) for row in rows):
        own = [row for row in rows if tuple(row.get(name, "") for name in directive.lines) == key]
        kept, note = best_of(own, directive.best, metric)
        titles |= dict.fromkeys(((row["case"], row["seed"]) for row in kept), _name(directive, key) + note)
    return titles


def _name(directive: Directive, key: Sequence[str]) -> str:
    """The values of a line's options; a number with the option's name."""
    texts = [(option, short(text, directive.words)) for option, text in zip(directive.lines, key, strict=True) if text]
    name = ", ".join(f"{_NAMES.get(option, option)} {text}" if is_number(text) else text for option, text in texts)
    return worded(name, directive.words)


def _points(directive: Directive, rows: Sequence[Row], x: str, metric: str) -> list[tuple[float, float, float]]:
    """Place, mean and standard deviation over seeds of each point of a line, from left to right."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get(x, ""), []).append(row)
    points = []
    for group in groups.values():
        kept, _ = best_of(group, directive.best, metric)
        heights, at = numbers(kept, metric), numbers(kept, x)
        if heights and at:
            spread = float(np.std(heights, ddof=1)) if len(heights) > 1 else 0.0
            points.append((float(np.mean(at)), float(np.mean(heights)), spread))
    return sorted(points)


def _lines(directive: Directive, folder: Path) -> list[Mapping[str, Any]]:
    """The lines of the directive's curves that it keeps."""
    lines: list[Mapping[str, Any]] = []
    for name in directive.names:
        own = read_lines(name, folder)
        if directive.best:
            (entry,), (metric, *_) = directive.curves, directive.y
            titles = _best_cases(directive._replace(names=(name,)), folder, metric)
            keys = [(line["case"], str(line["seed"])) for line in own]
            lines += [{**line, entry: titles[key]} for line, key in zip(own, keys, strict=True) if key in titles]
        else:
            check_conditions(directive, own)
            lines += [line for line in own if is_kept(directive, line)]
    return lines


def _curves(directive: Directive, folder: Path, axes: Any, panel: Panel) -> dict[str, Any]:
    """Curves over rounds, one for each value of an entry of the lines."""
    (entry,) = directive.curves
    lines = _lines(directive._replace(y=(panel.metric,)), folder)
    totals = () if directive.x in ((), ("round",)) else directive.x
    if "x" in directive.log:  # which has no place for the start
        lines = [line for line in lines if (line.get((totals or ("round",))[0]) or 0) > 0]
    of_name: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if entry in line:
            of_name.setdefault(worded(str(line[entry]), directive.words), []).append(line)
    handles, styles = {}, line_styles(of_name)
    for name, own in of_name.items():
        curve = seeds_curve(Lines(own), panel.metric, totals)
        curve = curve._replace(num_seeds=1) if directive.bands else curve
        if curve.x.size:
            style = styles[name] | ({"drawstyle": "steps-mid"} if directive.steps else {})
            handles[name] = draw_curve(axes, curve, style)
    x = (totals or ("round",))[0]
    style_axes(axes, panel, directive.words.get(x, x.removeprefix("total_").replace("_", " ")))
    number_logarithms(axes)
    return handles
