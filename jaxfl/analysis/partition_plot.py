"""A picture of a partition: which node holds how many samples of which label."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfl.analysis.plots import new_figure, save_figure
from jaxfl.core.check import ArgumentError
from jaxfl.core.types import FederatedData
from jaxfl.data.files import on_one_line
from jaxfl.data.partition import label_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Up to this many nodes a cell is wide enough to print its count.
_MAX_PRINTED_NODES = 20
_MAX_PRINTED_CLASSES = 26
# Up to this many nodes a gap between bars or cells is a part of a pixel. A bar takes 10 kB and a millisecond.
_MOST_BARS = 400


def plot_partition(
    parts: Sequence[Any] | FederatedData, labels: Any, num_classes: int, path: str | os.PathLike[str]
) -> Path:
    """Draws the node-by-label table of a partition and saves it in the format of the file's suffix.

    The lower panel has a column for each node and a row for each label. Color shows the count, on a square-root scale,
    so that small counts remain visible; 0 is white. The upper panel shows the size of each node. Up to 20 nodes, the
    counts and the nodes' names, if any, are printed, too. Over 400 nodes, one outline stands for the bars.

    Args:
        parts: a partition, or data made from one.
        labels: (N,), integers in [0, num_classes): the labels of the pool.
        num_classes: number of rows.
        path: the file to write; missing folders are made.

    Raises:
        ArgumentError: the file cannot be written, or a label is out of range.
    """
    counts, names = label_counts(parts, labels, num_classes), getattr(parts, "names", None)
    content = {"counts": counts.tolist(), "names": None if names is None else list(map(str, names))}
    file = Path(path).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        place = file.parent.resolve() / file.name  # a link to the folder stays
        save_figure(partition_figure(**content), place, content=content if file.suffix == ".png" else None)
    except OSError as error:
        found = f"writing {file} failed: {error.strerror}"
        raise ArgumentError("path", "must be a file that can be written", found, "Choose another folder.") from None
    return file


def partition_figure(counts: Sequence[Sequence[int]], names: Sequence[str] | None = None) -> Figure:
    """The figure of `plot_partition` by samples of each label at each node, (n, classes), and the nodes' names."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    table = np.asarray(counts)
    num_nodes, num_classes = table.shape
    width = float(np.clip(2.5 + 0.45 * num_nodes, 5.0, 14.0))
    height = float(np.clip(2.2 + 0.3 * num_classes, 3.5, 12.0))
    figure = new_figure(width, height)
    sizes_axes, table_axes = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, max(2.0, 0.3 * num_classes)])

    nodes = np.arange(num_nodes)
    if num_nodes <= _MOST_BARS:
        sizes_axes.bar(nodes, table.sum(axis=1), width=0.85, color="#4a5568")
    else:
        sizes_axes.stairs(table.sum(axis=1), np.arange(num_nodes + 1) - 0.5, fill=True, color="#4a5568")
    sizes_axes.set_ylabel("samples")
    sizes_axes.spines[["top", "right"]].set_visible(False)
    sizes_axes.tick_params(axis="x", length=0)
    sizes_axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    smallest, largest = table.sum(axis=1).min(), table.sum(axis=1).max()
    spread = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    sizes_axes.set_title(f"{table.sum():,} samples over {num_nodes} nodes, {spread} a node", fontsize=10, loc="left")

    top = max(int(table.max()), 1)
    image = table_axes.pcolormesh(
        np.arange(num_nodes + 1) - 0.5,
        np.arange(num_classes + 1) - 0.5,
        np.ma.masked_equal(table.T, 0),
        norm=PowerNorm(0.5, vmin=0, vmax=top),
        cmap="viridis_r",
        edgecolors="white" if num_nodes <= _MOST_BARS else "none",
        linewidth=0.8 if num_nodes <= 40 else 0.2,
    )
    table_axes.set_xlabel("node")
    table_axes.set_ylabel("label")
    table_axes.set_xlim(-0.5, num_nodes - 0.5)
    if names is None or num_nodes > _MAX_PRINTED_NODES:
        table_axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    else:
        texts = [on_one_line(name if len(name) <= 12 else f"{name[:11]}…") for name in names]
        table_axes.set_xticks(nodes, texts, rotation=45 if max(map(len, texts)) > 3 else 0, parse_math=False)
    table_axes.yaxis.set_major_locator(MaxNLocator(min(num_classes, 20), integer=True))
    if num_nodes <= _MAX_PRINTED_NODES and num_classes <= _MAX_PRINTED_CLASSES:
        for node, label in np.argwhere(table > 0):
            count = table[node, label]
            color = "white" if (count / top) ** 0.5 > 0.5 else "black"
            table_axes.text(node, label, f"{count}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=table_axes, label="samples", pad=0.01, ticks=MaxNLocator(6, integer=True))
    return figure
