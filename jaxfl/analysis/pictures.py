"""Pictures as data: an experiment says what stands on which axes, and a report draws the same in any format."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfl.analysis.partition_plot import partition_figure
from jaxfl.analysis.plots import (
    CONTENT,
    Curve,
    Panel,
    draw_curve,
    draw_panels,
    draw_points,
    legend_below,
    new_figure,
    number_logarithms,
    privacy_notes,
    read_lines,
    run_title,
    save_figure,
    style_axes,
    ticks_at,
    wrapped_notes,
)
from jaxfl.analysis.styles import line_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _MOST_WIDE = 5.2, 3.8, 12.0  # inches of one plot; of a row of plots


@dataclasses.dataclass(frozen=True)
class Mark:
    """A line, a row of points or a level; marks of one name have one style, and one entry in the legend."""

    name: str
    x: Sequence[float]  # (r,); empty: a level over all of the axis, at the only entry of `mean`
    mean: Sequence[float]  # (r,)
    low: Sequence[float] = ()  # (r,), ends of a band or of bars; empty: none
    high: Sequence[float] = ()
    is_points: bool = False  # joined points with bars in place of a line with a band


@dataclasses.dataclass(frozen=True)
class Plot:
    """One set of axes."""

    label: str  # of the vertical axis
    x_label: str
    marks: Sequence[Mark]
    is_accuracy: bool = False
    log: str = ""  # the axes that are logarithmic: "", "x", "y", "xy"
    ticks: Sequence[float] = ()  # places on the horizontal axis; empty: as matplotlib chooses
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """Plots with one legend."""

    name: str  # of its file, without a format
    title: str
    plots: Sequence[Plot]
    notes: Sequence[str] = ()  # above the legend
    num_columns: int = 2
    shares_y: bool = True


def curve_mark(name: str, curve: Curve) -> Mark:
    """The line of a curve, with a band where it has several seeds."""
    x, mean, low, high = (list(map(float, part)) for part in (curve.x, curve.mean, curve.low, curve.high))
    return Mark(name, x, mean, low, high) if curve.num_seeds > 1 else Mark(name, x, mean)


def points_mark(name: str, x: Sequence[float], spreads: Sequence[dict[str, Any]]) -> Mark:
    """Points of a summary, {"mean": ..., "std": ...}, with a bar of one standard deviation to either side."""
    mean = [each["mean"] for each in spreads]
    std = [each["std"] or 0.0 for each in spreads]
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    return Mark(name, x, mean, low, high, is_points=True)


def draw_picture(picture: Picture) -> Figure:
    """The figure of a picture; matplotlib's global state is not touched."""
    across = min(picture.num_columns, len(picture.plots))
    down = -(-len(picture.plots) // across)
    width = min(_WIDTH * across, _MOST_WIDE)
    figure, handles = new_figure(width, _HEIGHT * down + 0.4, picture.title or None), {}
    styles = styles_in(picture.plots)
    for number, plot in enumerate(picture.plots):
        first = figure.axes[0] if number and picture.shares_y else None
        handles |= draw_plot(figure.add_subplot(down, across, number + 1, sharey=first), plot, styles)
    legend_below(figure, {name: handles[name] for name in styles}, wrapped_notes(picture.notes, width))
    return figure


def styles_in(plots: Sequence[Plot]) -> dict[str, dict[str, Any]]:
    """Style of each name in plots that share a legend."""
    names = dict.fromkeys(mark.name for plot in plots for mark in plot.marks)
    return line_styles(names, names)


def draw_plot(axes: Axes, plot: Plot, styles: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Draw one plot; returns name -> what a legend shows."""
    axes.set(title=plot.title, xscale="log" if "x" in plot.log else "linear")
    axes.set_yscale("log" if "y" in plot.log else "linear")
    handles = {mark.name: _draw(axes, mark, styles[mark.name]) for mark in plot.marks}
    style_axes(axes, Panel("", plot.label, plot.is_accuracy), plot.x_label)
    if plot.ticks:
        ticks_at(axes, plot.ticks)
    else:
        number_logarithms(axes)
    return handles


def _draw(axes: Axes, mark: Mark, style: dict[str, Any]) -> Any:
    """Draw a mark; returns what a legend shows."""
    x, mean = np.array(mark.x), np.array(mark.mean)
    low, high = (np.array(end) if mark.low else mean for end in (mark.low, mark.high))
    if not mark.x:
        return axes.axhline(mark.mean[0], linewidth=1.8, **style)
    if mark.is_points:
        return draw_points(axes, x, mean, np.maximum([mean - low, high - mean], 0), style)  # rounding may leave -1e-17
    return draw_curve(axes, Curve(x, mean, low, high, 1 + bool(mark.low)), style)


def save_picture(run_dir: Path, picture: Picture) -> Path:
    """Draw into `<run_dir>/plots`."""
    path = run_dir / "plots" / f"{picture.name}.png"
    return save_figure(draw_picture(picture), path, content=dataclasses.asdict(picture))


def figures_of(run_dir: Path) -> dict[str, Figure]:
    """Name -> figure, drawn anew, of each picture of a run whose PNG carries its content."""
    from PIL import Image, UnidentifiedImageError

    figures = {}
    for path in sorted(run_dir.glob("plots/*.png")):
        with contextlib.suppress(UnidentifiedImageError), Image.open(path) as image:
            content = json.loads(image.info.get(CONTENT, "{}"))
            if "panels" in content:
                panels = [Panel(**panel) for panel in content.pop("panels")]
                title, notes = run_title(run_dir / "config.json"), privacy_notes(run_dir)
                figures[path.stem] = draw_panels(read_lines(run_dir), panels, title=title, notes=notes, **content)
            elif "counts" in content:
                figures[path.stem] = partition_figure(**content)
            elif content:
                plots = [Plot(**{**one, "marks": [Mark(**mark) for mark in one["marks"]]}) for one in content["plots"]]
                figures[path.stem] = draw_picture(Picture(**{**content, "plots": plots}))
    return figures
