"""Pictures of a run, drawn from its lines alone (config.json gives the title)."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxfl.analysis.styles import COLORS, DASHES, GREY, MARKS, baseline_in, in_front, line_styles
from jaxfl.core import ArgumentError, check
from jaxfl.core.lines import METRICS, Lines, lines_of
from jaxfl.core.outputs import drop_link
from jaxfl.data.columns import short_name
from jaxfl.privacy.statements import caption, grounds, with_epsilon

if TYPE_CHECKING:  # the import takes half a second, which a run without pictures saves
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONTENT = "jaxfl"  # key of a PNG's content among its texts
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_MOST_IN_LEGEND = len(COLORS) * len(DASHES)  # lines that look different
_LETTERS_FROM = 1e4  # smaller costs are short enough without letters
_MOST_NAMED = 4  # cases in a note
_MOST_ON_AN_AXIS = 48  # letters in one line
_LOG_FROM_RATIO = 30.0  # a loss that spans less is easier to read on a linear axis


class Panel(NamedTuple):
    """One set of axes: a metric, what its axis says, and whether it is a share."""

    metric: str
    label: str
    is_accuracy: bool = False


_EVALUATIONS = ("total_gradient_evaluations", "total_forward_evaluations")
_PANELS = (
    Panel("train_loss", "training loss"),
    Panel("test_loss", "test loss, mean over nodes"),
    Panel("test_accuracy", "test accuracy, mean over nodes", is_accuracy=True),
    Panel("test_accuracy_worst_node", "test accuracy, worst node", is_accuracy=True),
)


class XAxis(NamedTuple):
    """Horizontal axis of the curves."""

    label: str
    totals: tuple[str, ...]  # entries of a line whose sum is x; empty: x is the round


X_AXES = {
    "rounds": XAxis("round", ()),
    "bits": XAxis("bits sent, all nodes", ("total_bits_sent",)),
    "seconds": XAxis("simulated seconds", ("total_simulated_seconds",)),
    "joules": XAxis("joules, all nodes", ("total_joules",)),
    "operations": XAxis("operations, all nodes", ("total_operations",)),
    "evaluations": XAxis("gradient and forward evaluations, all nodes", _EVALUATIONS),
}
"""Horizontal axes of the curves of a run. Bits sent do not include those that a server sends."""


class Curve(NamedTuple):
    """One case's metric over seeds, against rounds or a cost."""

    x: np.ndarray  # (r,), int64, rounds, ascending; or float64, a cost up to these rounds, mean over seeds
    mean: np.ndarray  # (r,), float64
    low: np.ndarray  # (r,), smallest over seeds
    high: np.ndarray  # (r,), largest over seeds
    num_seeds: int  # most seeds that any round has


def plot_run(run_dir: str | os.PathLike[str], x: str = "rounds", ranked: Sequence[str] = ()) -> list[Path]:
    """Draw loss and accuracy against rounds or a cost, one line for each case, into `<run_dir>/plots`.

    Lines are means over seeds, bands reach from the smallest to the largest seed. A run that is still going on or was
    interrupted is drawn up to its last evaluation.

    Args:
        run_dir: a run directory.
        x: the horizontal axis, a name in `X_AXES`.
        ranked: all cases from best to worst, as `draw_panels` takes them.

    Returns:
        Paths of the pictures: plots/training.png.

    Raises:
        ArgumentError: no lines, or lines without the metrics or the costs.
    """
    run_dir = Path(run_dir)
    lines = read_lines(run_dir)
    # A worst node that never differs from the mean (one node, or a server's model) would be drawn twice.
    panels = [
        panel
        for panel in _PANELS
        if len(lines.having(panel.metric))
        and not (panel.metric.endswith("_worst_node") and _alike(lines, panel.metric.removesuffix("_worst_node")))
    ]
    if not panels:
        remedy = "Train until its first evaluation."
        raise ArgumentError("run_dir", "must hold metrics to draw", f"{run_dir} has none", remedy)
    return [plot_panels(run_dir, lines, panels, "training.png", x, ranked)]


def _alike(lines: Lines, metric: str) -> bool:
    """Tell whether every line that has the worst node's metric or the mean has both, and they are equal."""
    mean, worst = lines.columns(metric, f"{metric}_worst_node")
    return len(lines.having(metric)) == len(lines.having(f"{metric}_worst_node")) == mean.size and (mean == worst).all()


def plot_panels(
    run_dir: Path,
    lines: Lines,
    panels: Sequence[Panel],
    name: str,
    x: str = "rounds",
    ranked: Sequence[str] = (),
) -> Path:
    """`draw_panels` with the run's title and statements, into `<run_dir>/plots`."""
    title, notes = run_title(run_dir / "config.json"), privacy_notes(run_dir)
    figure = draw_panels(lines, panels, title=title, notes=notes, x=x, ranked=ranked)
    drawn = {"panels": [panel._asdict() for panel in panels], "x": x, "ranked": in_front(ranked)}
    return save_figure(figure, run_dir / "plots" / name, content=drawn)


def privacy_notes(run_dir: Path, cases: Collection[str] | None = None) -> list[str]:
    """Lines for a caption: the first epsilon of each case, with its bound, and who has none; empty before the end."""
    stated = {case: each for case, each in statements_of(run_dir, cases).items() if each}
    firsts = {case: [first] for case, each in stated.items() if (first := with_epsilon(each))}
    silent = [case for case in stated if case not in firsts]
    some = " | ".join(silent) if len(silent) <= _MOST_NAMED else f"{len(silent)} of {len(stated)} cases"
    return [*caption(firsts), *[f"no ε: {some}"] * bool(silent)] if firsts else caption(stated)


def statements_of(run_dir: Path, cases: Collection[str] | None = None) -> dict[str, list[Mapping[str, Any]]]:
    """Case -> its statements, by default of all cases; empty before the run has ended."""
    path = run_dir / "summary.json"
    rows = json.loads(path.read_bytes())["cases"] if path.exists() else {}
    return {name: row.get("privacy", []) for name, row in rows.items() if cases is None or name in cases}


def draw_panels(
    lines: Lines,
    panels: Sequence[Panel],
    title: str,
    notes: Sequence[str] = (),
    x: str = "rounds",
    ranked: Sequence[str] = (),
) -> Figure:
    """A figure with one set of axes for each panel and one legend.

    Args:
        lines: of the run.
        panels: what to draw, in reading order; two columns.
        title: of the figure.
        notes: lines below the legend, wrapped to the figure's width.
        x: a name in `X_AXES`. At a round, a cost is its mean over seeds.
        ranked: cases from best to worst. Where there are more than 12, the first five that are no baselines and the
            first of each baseline are drawn over the others, which are light grey and have no bands.

    Returns:
        The figure; matplotlib's global state is not touched.

    Raises:
        ArgumentError: no line holds the cost.
    """
    check.one_of(tuple(X_AXES), x=x)
    axis = X_AXES[x]
    if not len(lines.having(*axis.totals)):
        remedy = "Draw against rounds, or train with a ledger."
        raise ArgumentError("x", "must be what the run counts", f"no line has {' and '.join(axis.totals)}", remedy)
    of_case = lines.by_case()
    front = line_styles(in_front([case for case in ranked if case in of_case]) or of_case, of_case)
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, num_seeds = new_figure(5.2 * num_columns, 3.5 * num_rows + 0.6, title), 1
    handles = {}
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(num_rows, num_columns, index + 1)
        own, most = draw_curves(axes, of_case, panel, axis, front)
        handles |= own
        num_seeds = max(num_seeds, most)
    band = f"; line: mean over {num_seeds} seeds, band: smallest to largest seed" if num_seeds > 1 else "; one seed"
    band += f"; {x}: mean over seeds at each evaluation" if num_seeds > 1 and axis.totals else ""
    if len(handles) > _MOST_IN_LEGEND:
        handles, band = {}, f"s: {len(of_case)}, named in results.csv" + band
    elif len(front) < len(of_case):
        handles = {case: handles[case] for case in front if case in handles}
        beside = " and of each baseline" * any(map(baseline_in, front))
        best = f"{sum(not baseline_in(case) for case in front)} of {len(of_case)}{beside}"
        band = f"s: the best {best} in the closing table, the others in light grey" + band
    legend_below(figure, handles, [*wrapped_notes(notes, 5.2 * num_columns), "case" + band])
    return figure


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """An empty picture, in inches; matplotlib's global state is not touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title is not None:
        figure.suptitle(title)
    return figure


def legend_below(
    figure: Figure, handles: Mapping[str, Any], notes: Sequence[str] = (), num_columns: int = 3, **style: Any
) -> None:
    """One legend for all axes, below them, under lines of notes; `style` as for `Figure.legend`.

    The legend has as many columns, up to `num_columns`, as fit side by side. The figure grows by the legend's height.
    """
    style |= {"loc": "outside lower center", "title": "\n".join(notes), "title_fontsize": 8, "frameon": False}
    style.setdefault("handlelength", 4.0)  # in which every dash of `line_styles` is seen
    columns = max(1, min(num_columns, len(handles)))
    legend = figure.legend(handles.values(), handles.keys(), ncols=columns, **style)
    while columns > 1 and legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        columns -= 1
        legend = figure.legend(handles.values(), handles.keys(), ncols=columns, **style)
    figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)


def save_figure(figure: Figure, path: Path, dpi: int = 120, content: Mapping[str, Any] | None = None) -> Path:
    """Write the picture; a folder that is missing is made, and a link in the place of either is replaced.

    The suffix is the format. The same figure gives the same bytes. A PNG carries its `content`, from which
    `pictures.figures_of` draws it anew.
    """
    import matplotlib

    drop_link(path.parent).mkdir(exist_ok=True)
    metadata = _NO_DATE.get(path.suffix) if content is None else {CONTENT: json.dumps(content)}
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": path.name}):  # text is text
        figure.savefig(drop_link(path), dpi=dpi, metadata=metadata)
    return path


def wrapped_notes(notes: Sequence[str], width: float) -> list[str]:
    """The notes in lines that fit a figure of this width in inches at 8 points."""
    return [line for note in notes for line in textwrap.wrap(note, int(width * 14.5))]


def seeds_curve(lines: Lines, metric: str, totals: Sequence[str] = ()) -> Curve:
    """Mean, smallest and largest value over seeds at each round where the metric was measured.

    Args:
        lines: of one case.
        metric: its name; lines without it, or with null, are passed over.
        totals: entries of a line whose sum is x; lines without them are passed over. Default: x is the round.

    Returns:
        The curve, empty where nothing was measured.

    Examples:
        >>> lines = Lines({"case": "A", "seed": s, "round": r, "loss": s + 10.0 * r} for s in (0, 4) for r in (0, 1))
        >>> curve = seeds_curve(lines, "loss")
        >>> curve.mean.tolist(), curve.low.tolist(), curve.high.tolist()
        ([2.0, 12.0], [0.0, 10.0], [4.0, 14.0])
    """
    of_line, heights, *costs = lines.columns("round", metric, *totals)
    order = np.argsort(of_line, kind="stable")
    rounds, first, counts = np.unique(of_line[order], return_index=True, return_counts=True)
    mean, low, high, x = np.empty((4, rounds.size))
    for count in np.unique(counts):  # rounds with as many seeds
        alike = counts == count
        rows = order[first[alike][:, None] + np.arange(count)]
        values = heights[rows].astype(np.float64)
        mean[alike], low[alike], high[alike] = values.mean(axis=1), values.min(axis=1), values.max(axis=1)
        x[alike] = np.sum([cost[rows] for cost in costs], axis=0).mean(axis=1) if costs else rounds[alike]
    return Curve(x if costs else rounds.astype(np.int64), mean, low, high, int(counts.max(initial=0)))


def draw_curves(
    axes: Axes, of_name: Mapping[str, Lines], panel: Panel, axis: XAxis, styles: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], int]:
    """Draw a metric of each name, with axes; a name without a style is grey. Returns handles, and the most seeds."""
    handles, most = {}, 1
    for name in [*(name for name in of_name if name not in styles), *styles]:
        curve = seeds_curve(of_name[name], panel.metric, axis.totals)
        most = max(most, curve.num_seeds)
        if curve.x.size and name in styles:
            handles[name] = draw_curve(axes, curve, styles[name])
        elif curve.x.size:
            axes.plot(curve.x, curve.mean, color=GREY, linewidth=0.7)
    finish_axes(axes, panel, axis)
    return {name: handles[name] for name in styles if name in handles}, most


def draw_curve(axes: Axes, curve: Curve, style: Mapping[str, Any], x_unit: int = 1) -> Any:
    """Draw the mean over seeds against x times `x_unit`, and a band for several seeds; returns the line."""
    x, marker = x_unit * curve.x, MARKS[style["color"]] if curve.x.size == 1 else None
    if curve.num_seeds > 1:
        axes.fill_between(x, curve.low, curve.high, color=style["color"], alpha=0.18, linewidth=0)
    (line,) = axes.plot(x, curve.mean, linewidth=1.8 * _scale(), marker=marker, **style)
    return line


def draw_points(axes: Axes, x: Any, mean: Any, spread: Any, style: Mapping[str, Any]) -> Any:
    """Draw joined means with bars (`spread` as for `Axes.errorbar`); returns what a legend shows."""
    style = {**style, "marker": MARKS[style["color"]]}
    return axes.errorbar(x, mean, yerr=spread, markersize=5 * _scale(), capsize=2, linewidth=1.5 * _scale(), **style)


def _scale() -> float:
    """Size of letters over the usual one; lines and points go with it."""
    import matplotlib

    return matplotlib.rcParams["font.size"] / 10


def epsilon_label(privacy: Iterable[Iterable[Mapping[str, Any]]]) -> str:
    """The label of an axis of epsilons, with what the first epsilon of each case rests on."""
    texts = grounds(privacy)
    label = f"ε ({texts})" if texts else "privacy budget ε"
    parts = [label] if len(label) <= _MOST_ON_AN_AXIS else label.replace(", ", ",\n").splitlines()
    return "\n".join(textwrap.fill(part, _MOST_ON_AN_AXIS) for part in parts)


def ticks_at(axes: Axes, places: Sequence[float]) -> None:
    """Number these places of the horizontal axis and no others."""
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


def number_logarithms(axes: Axes) -> None:
    """Ticks at 1, 2 and 5 on a logarithmic horizontal axis that spans less than two decades."""
    import matplotlib.ticker

    low, high = axes.get_xlim()
    if axes.get_xscale() == "log" and high < 100 * low:
        with_letters = matplotlib.ticker.EngFormatter(sep="")
        plain = matplotlib.ticker.FormatStrFormatter("%g")
        axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(with_letters if high >= _LETTERS_FROM else plain)
        axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def finish_axes(axes: Axes, panel: Panel, axis: XAxis) -> None:
    """Labels, grid and scale of curves."""
    style_axes(axes, panel, axis.label)
    finish_x(axes, axis)
    heights = np.concatenate([[], *(np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines)])
    if heights.size and not panel.is_accuracy and heights.min() > 0 and heights.max() / heights.min() > _LOG_FROM_RATIO:
        axes.set_yscale("log")


def finish_x(axes: Axes, axis: XAxis) -> None:
    """Ticks at whole rounds, or at costs; large costs have letters k, M, G, ... for powers of a thousand."""
    import matplotlib.ticker

    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=6, integer=not axis.totals))
    if axis.totals and axes.dataLim.x1 >= _LETTERS_FROM:
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))


def style_axes(axes: Axes, panel: Panel, x_label: str) -> None:
    """Labels, grid and frame; shares in per cent."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(panel.label)
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.is_accuracy:
        axes.yaxis.set_major_formatter(percents())


def percents() -> Any:
    """Shares in per cent, with as many digits as tell neighboring ticks apart."""
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1.0, decimals=None)


def run_title(config_path: Path) -> str:
    """Experiment and preset, with the data set where the configuration names one."""
    if not config_path.exists():
        return config_path.parent.name
    config = json.loads(config_path.read_bytes())
    dataset = config.get("config", {}).get("dataset")
    named = short_name(dataset) if isinstance(dataset, str) else None
    parts = [config.get("experiment"), config.get("preset"), named]
    return ", ".join(part for part in parts if part) or config_path.parent.name


def read_lines(run_dir: Path) -> Lines:
    """`lines_of` a run, pass by pass."""
    paths = sorted(run_dir.glob(f"passes/*/{METRICS}"), key=lambda path: int(path.parent.name))
    if not paths:
        remedy = "Name a run directory."
        raise ArgumentError("run_dir", f"must hold passes/<k>/{METRICS}", f"{run_dir} has none", remedy)
    return lines_of(paths)
