"""Figures and a table for a paper, from the files of runs."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfl.analysis.cases import (
    METRICS,
    Column,
    Shown,
    charts,
    grounds_of,
    is_baseline,
    own_table,
    read_json,
    results,
    shown_cases,
)
from jaxfl.analysis.final_plot import final_figures
from jaxfl.analysis.pictures import figures_of
from jaxfl.analysis.plots import legend_below, new_figure, run_title, save_figure
from jaxfl.core import ArgumentError, check
from jaxfl.core.outputs import drop_link
from jaxfl.data.columns import short_name

FORMATS = ("pdf", "svg", "png")
_WIDTH, _HEIGHT = 3.4, 2.3  # inches: a column of a page of two
_PRINTED: Any = {"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7}
_DPI = 300  # of png
_ESCAPES = {each: f"\\{each}" for each in "&%$#_{}"}
_ESCAPES |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_ESCAPES |= {"<": "$<$", ">": "$>$", "±": r"$\pm$", "–": "--", "×": r"$\times$", "µ": r"$\mu$", "·": r"$\cdot$"}
_GREEK = {"ε": "varepsilon", "δ": "delta", "τ": "tau", "κ": "kappa", "σ": "sigma", "γ": "gamma", "λ": "lambda"}
_ESCAPES |= {letter: f"$\\{name}$" for letter, name in _GREEK.items()} | {"≤": r"$\le$", "≥": r"$\ge$", "²": "$^2$"}
_MOST_METRICS, _MOST_IN_A_COLUMN = 2, 6  # columns of a table
_SPREAD = re.compile(r"(-?[\d.]+(?:e[+-]\d+)?)(?:\s±\s([\d.]+(?:e[+-]\d+)?))?( %)?")
_UNIT = re.compile(r" \([^()]*\)$")
_NOTHING = ("–", "-", "")


def write_figures(run_dirs: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str], form: str) -> list[Path]:
    r"""Write the pictures of runs in a format, and results.tex, a table of LaTeX without packages.

    The charts of a report are one column wide. The pictures of a run keep their width.

    Args:
        run_dirs: run directories, at least one; their cases stand in the same pictures.
        folder: for the files, which are replaced; a folder that is missing is made in one that is there.
        form: pdf or svg, whose letters are text, or png at 300 dots an inch.

    Returns:
        Paths of the files.

    Raises:
        ArgumentError: no such format; a directory without results to draw; no folder for the files.

    Guarantees:
        - text is escaped, and means and deviations are `$mean \pm deviation$`.
        - the same run gives the same bytes.
    """
    import matplotlib

    check.one_of(FORMATS, form=form)
    folder, folders = Path(folder), [Path(one) for one in run_dirs]
    shown = shown_cases(folders)
    pictures = charts(shown)
    if not pictures:
        remedy = "Name the directory of a run that was evaluated."
        raise ArgumentError("run_dirs", "must hold results to draw", f"{run_dirs[0]} has none", remedy)
    if not folder.parent.is_dir():
        raise ArgumentError("path", "must lie in a folder that exists", f"got {folder}", "Make the folder.")
    several = any(len(one.row.get("status", [])) > 1 for one in shown)
    notes = ["mean over seeds; band or bar: smallest to largest"] if several else []
    paths = []
    with matplotlib.rc_context(_PRINTED):
        for chart in pictures:
            figure = new_figure(_WIDTH, _HEIGHT)
            axes = figure.add_subplot()
            handles = chart.draw(axes)
            axes.set_ylabel(axes.get_ylabel().replace(", ", ",\n"))  # a column is low
            legend_below(figure, handles if len(shown) > 1 else {}, notes, num_columns=2)
            paths.append(save_figure(figure, folder / f"{chart.name}.{form}", dpi=_DPI))
    for run_dir in folders:
        cases = read_json(run_dir / "summary.json")["cases"]
        settings = {name: row.get("settings", {}) for name, row in cases.items()}
        compared = {name: own for name, own in settings.items() if not own.get("baseline")}
        prefix = f"{run_dir.name}_" if len(folders) > 1 else ""
        for name, figure in {**final_figures(run_dir, compared), **figures_of(run_dir)}.items():
            paths.append(save_figure(figure, folder / f"{prefix}{name}.{form}"))
    own, ran = own_table(folders[0]) if len(folders) == 1 else None, _ran(folders, shown)
    text = _of_results(shown, ran) if own is None else latex_table(own.heading, own.rows, [own.title, ran, *own.notes])
    drop_link(folder / "results.tex").write_text(text, encoding="utf-8")
    return [*paths, folder / "results.tex"]


def _ran(run_dirs: Sequence[Path], shown: Sequence[Shown]) -> str:
    """Data sets of runs, and the methods, numbers of nodes and seeds of the compared cases."""
    configs = {folder: read_json(folder / "config.json").get("config", {}) for folder in run_dirs}
    names = [own.get("dataset") or run_title(folder / "config.json") for folder, own in configs.items()]
    compared = [one.options for one in shown if not is_baseline(one)]
    values = {name: [options[name] for options in compared if name in options] for name in ("method", "nodes")}
    cases = [row for own in configs.values() for row in own.get("cases", {}).values()]
    values["seeds"] = [seed for row in cases for seed in row.get("seeds", ())]
    listed = {name: ", ".join(map(str, dict.fromkeys(each))) for name, each in values.items() if each}
    return "; ".join([", ".join(dict.fromkeys(map(short_name, names))), *map(" ".join, listed.items())])


def _of_results(shown: Sequence[Shown], ran: str) -> str:
    """The table of the cases: columns of what varies, each once; the caption has all else, and what numbers mean."""
    columns, kept, same, again = results(shown), list[Column](), list[str](), list[str]()
    guarantees = [grounds_of([one]) for one in shown]
    letters = dict(zip(filter(None, dict.fromkeys(guarantees)), string.ascii_lowercase, strict=False))
    if len(letters) > 1:
        columns.insert(_place_of("ε", columns) + 1, Column("kind", [letters.get(text, "–") for text in guarantees]))
    for one in columns:
        twin = next((other for other in kept if _cells(other) == _cells(one)), None)
        if {*one.texts} == {"finished"}:
            continue
        if len({*one.texts}) == 1 and len(shown) > 1:
            same.append(f"{one.heading} {one.texts[0]}")
        elif one.heading == "ε" and (asked := [own for own in kept if own.heading == "target epsilon"]):
            if [*map(_in_short, asked[0].texts)] == [*map(_in_short, _cells(one))]:
                kept.remove(asked[0])
            kept.append(one)
        elif twin is not None:
            again.append(f"{one.heading}: as {twin.heading}")
        elif (
            one.heading not in METRICS.values() or sum(own.heading in METRICS.values() for own in kept) < _MOST_METRICS
        ):
            kept.append(one)
    seeds = sorted({len(one.row.get("status", [])) for one in shown})
    over = " to ".join(dict.fromkeys((str(seeds[0]), str(seeds[-1]))))
    notes = [f"Mean ± standard deviation over {over} seeds" if seeds[-1] > 1 else "One seed"]
    kinds = [f"kind {letter} {text}" for text, letter in letters.items()] if len(letters) > 1 else [*letters]
    notes += [f"ε: {'; '.join(kinds)}; largest over nodes"] if letters else []
    notes += [f"The same in all rows: {', '.join(same)}"] if same else []
    heading = [f"{one.heading} ({one.unit})" if one.unit else one.heading for one in kept]
    return latex_table(heading, list(zip(*map(_cells, kept), strict=True)), [ran, *notes, *again])


def _place_of(heading: str, columns: Sequence[Column]) -> int:
    return [one.heading for one in columns].index(heading)


def _in_short(text: str) -> str:
    """A budget, or the epsilon that comes close to it."""
    return f"{float(text):.3g}" if _SPREAD.fullmatch(text) else text


def _cells(column: Column) -> list[str]:
    return [text.replace("_", " ") if column.heading == "baseline" else text for text in column.numbers or column.texts]


def latex_table(heading: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    r"""A table environment with rules by `\hline`, and a sentence of the caption for each note.

    Units in brackets stand below the headings. A table of many columns is small, and as wide as the page.

    Examples:
        >>> print(latex_table(["method", "accuracy"], [["A_1", "91.0 ± 1.4 %"]], ["three seeds"]))
        \begin{table}
        \caption{Three seeds.}
        \centering
        \begin{tabular}{lr}
        \hline
        method & accuracy \\
        \hline
        A\_1 & $91.0 \pm 1.4$\,\% \\
        \hline
        \end{tabular}
        \end{table}
        <BLANKLINE>
    """
    heads = [[_UNIT.sub("", name) for name in heading], ["".join(_UNIT.findall(name)).strip() for name in heading]]
    texts = [" & ".join(map(_cell, row)) + r" \\" for row in rows]
    above = [" & ".join(map(_words, row)) + r" \\" for row in heads if any(row)]
    are_numbers = [all(row[at] in _NOTHING or _SPREAD.fullmatch(row[at]) for row in rows) for at in range(len(heading))]
    columns = "".join("lr"[each] for each in are_numbers)
    caption = " ".join(f"{text[0].upper() if text[0].isascii() else text[0]}{text[1:]}." for text in notes)
    is_wide = len(heading) > _MOST_IN_A_COLUMN
    name, small = ("table*", [r"\small", r"\setlength{\tabcolsep}{4pt}"]) if is_wide else ("table", [])
    lines = [rf"\begin{{{name}}}", rf"\caption{{{_words(caption)}}}", r"\centering", *small]
    lines += [f"\\begin{{tabular}}{{{columns}}}", r"\hline", *above, r"\hline", *texts, r"\hline"]
    return "\n".join([*lines, r"\end{tabular}", rf"\end{{{name}}}", ""])


def _words(text: str) -> str:
    """Text with the letters escaped that LaTeX takes for commands, or does not know."""
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def _cell(text: str) -> str:
    """A cell as LaTeX: a number in mathematics, with its deviation; other text escaped."""
    number = _SPREAD.fullmatch(text)
    if number is None:
        return "--" if text == "-" else _words(text)
    mean, deviation, percent = number.groups()
    spread = "" if deviation is None else rf" \pm {deviation}"
    return f"${mean}{spread}$" + (r"\,\%" if percent else "")
