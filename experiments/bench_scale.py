"""Time and memory of an iteration against the number of nodes and against the number of parameters.

    python -m experiments.bench scale --json bench.json      # also draws bench.png

PrivSGP over the exponential graph, one hidden layer, batch 32 of fixed size, clipped, Gaussian noise. Nodes from 4 to
4,096 with a network of 2,410 parameters; parameters up to 614,410 at 16 nodes. Iterations run in a loop with the state
donated. Memory is what the compiled loop holds: state, data and temporaries, by the compiler's own account.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import NamedTuple

import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.bench_round import KEY, learner, without_info
from experiments.bench_round import Setting as RoundSetting
from experiments.bench_saga import Setting as DataSetting
from experiments.bench_saga import random_data
from experiments.timing import Measurement, in_turns, runner
from jaxfl import gradients
from jaxfl.analysis.plots import Panel, line_style, style_axes
from jaxfl.core.tree import num_bytes, size

GIBIBYTES = 24  # memory of a large desktop machine, for which the largest number of nodes is stated
LABELS = {"n": "nodes n", "d": "parameters of a node d"}


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    num_features: int = 64
    num_classes: int = 10
    samples: int = 64  # of each node
    batch_size: int = 32
    nodes: tuple[int, ...] = (4, 16, 64, 256, 1024, 4096)
    hidden_of_nodes: int = 32
    hidden: tuple[int, ...] = (32, 128, 512, 2048, 8192)
    nodes_of_hidden: int = 16
    numbers: int = 5_000_000  # nodes times parameters times rounds of one call, which has at least two rounds
    repeats: int = 5


class Row(NamedTuple):
    """One size."""

    num_nodes: int
    num_params: int
    milliseconds: list[float]  # of a round, one for each repeat
    num_bytes: int  # state, data and temporaries


def iteration(setting: Setting, num_nodes: int, hidden: int) -> Row:
    """Time and memory of one size."""
    widths = (setting.num_features, hidden, setting.num_classes)
    shapes = RoundSetting(num_nodes=num_nodes, widths=widths, batch_size=setting.batch_size)
    data = random_data(DataSetting(widths=widths), num_nodes, setting.samples)
    algorithm = learner(shapes, gradients.fixed(setting.batch_size))
    state = jax.jit(lambda data: algorithm.init(KEY, data))(data)
    num_params = size(state.params) // num_nodes
    rounds = max(2, setting.numbers // (num_nodes * num_params))
    one = runner(without_info(algorithm, rounds), state, data)
    seconds = in_turns({"row": one.call}, {"row": setting.repeats})["row"]
    held = num_bytes(state) + num_bytes(data) + one.temp_bytes
    return Row(num_nodes, num_params, [1e3 * call / rounds for call in seconds], held)


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores."""
    setting = Setting() if setting is None else setting
    by_nodes = [iteration(setting, num_nodes, setting.hidden_of_nodes) for num_nodes in setting.nodes]
    by_params = [iteration(setting, setting.nodes_of_hidden, hidden) for hidden in setting.hidden]
    return {
        **_measurements(by_nodes, "n", [row.num_nodes for row in by_nodes], f"d = {by_nodes[0].num_params}"),
        **_measurements(by_params, "d", [row.num_params for row in by_params], f"n = {setting.nodes_of_hidden}"),
        **_largest(by_nodes[-2], by_nodes[-1]),
    }


def _measurements(rows: list[Row], axis: str, sizes: list[int], fixed: str) -> dict[str, Measurement]:
    """scale/time_n4, scale/memory_n4, ..."""
    report = {}
    for row, value in zip(rows, sizes, strict=True):
        against = f"{axis} = {value}, {fixed}"
        times, held = row.milliseconds, row.num_bytes / 1e6
        report[f"scale/time_{axis}{value}"] = Measurement(
            statistics.median(times), "ms/round", (min(times), max(times)), against
        )
        report[f"scale/memory_{axis}{value}"] = Measurement(
            held, "MB", (held, held), f"state, data and temporaries; {against}"
        )
    return report


def _largest(fewer: Row, more: Row) -> dict[str, Measurement]:
    """Bytes that one more node takes, and how many nodes then fit."""
    each = (more.num_bytes - fewer.num_bytes) / (more.num_nodes - fewer.num_nodes)
    most = float(GIBIBYTES * 2**30 // each)
    growth = f"from n = {fewer.num_nodes} to {more.num_nodes}, d = {more.num_params}"
    return {
        "scale/bytes_per_node": Measurement(each, "bytes", (each, each), growth),
        "scale/largest_n": Measurement(
            most, "nodes", (most, most), f"in {GIBIBYTES} GiB by the bytes a node, {growth}"
        ),
    }


def plot(measurements: dict[str, Measurement], path: Path) -> None:
    """Draw time and memory against n and d, on logarithmic axes.

    Args:
        measurements: what `suite` gave; others are passed over.
        path: of the picture.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (kind, label) in enumerate({"time": "ms a round", "memory": "MB"}.items()):
        for column, axis in enumerate(LABELS):
            axes = figure.add_subplot(2, 2, 2 * row + column + 1)
            sizes, values = series(measurements, kind, axis)
            axes.plot(sizes, values, marker="o", linewidth=1.8, **line_style(0))
            style_axes(axes, Panel("", label), LABELS[axis])
            axes.set_xscale("log")
            axes.set_yscale("log")
    figure.suptitle("PrivSGP, one hidden layer, batch 32: time and memory of an iteration")
    figure.savefig(path, dpi=120)


def series(measurements: dict[str, Measurement], kind: str, axis: str) -> tuple[list[int], list[float]]:
    """Sizes and values of one curve: kind "time" or "memory", axis "n" or "d"."""
    found = {
        int(match[1]): one.value
        for name, one in measurements.items()
        if (match := re.fullmatch(rf"scale/{kind}_{axis}(\d+)", name))
    }
    return sorted(found), [found[key] for key in sorted(found)]
