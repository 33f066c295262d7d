"""Timing: compile apart from the steady state, warm up, wait for results, repeat rivals in turns; and reports."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes

from jaxfl.analysis.plots import Panel, style_axes
from jaxfl.analysis.styles import line_style
from jaxfl.core import PyTree
from jaxfl.core.platform import is_cpu

Number = dict[str, Any]
"""A number of `bench card`: name, value and unit; low and high, the extremes of the repeats; other facts."""


class Measurement(NamedTuple):
    """One line of a benchmark's report, under a name in the JSON file."""

    value: float  # in `unit`
    unit: str
    spread: tuple[float, float]  # lowest and highest over the repeats, in `unit`
    against: str  # what the value is relative to, with the shapes


class Runner(NamedTuple):
    """A compiled function that is ready to be called again and again."""

    call: Callable[[], float]  # runs once to the end; returns its wall-clock seconds
    compile_seconds: float  # tracing and compiling, apart from the first run
    temp_bytes: int  # temporary memory of the compiled program

    def __call__(self) -> float:
        return self.call()


def runner(fn: Callable[..., PyTree], state: PyTree, *args: PyTree) -> Runner:
    """Compile `fn(state, *args) -> state`, with a copy of `state` donated, and run it once to warm up.

    Each call goes on from the result of the one before; `args` stay.
    """
    carry = jax.tree.map(jnp.copy, state)
    start = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=0).lower(carry, *args).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()  # of one device, and a CPU's devices share one memory
    devices = max((len(sharding.device_set) for sharding in jax.tree.leaves(compiled.input_shardings)), default=1)
    copies = devices if is_cpu() else 1

    def call():
        nonlocal carry
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(carry, *args))
        return time.perf_counter() - start

    call()
    return Runner(call, compile_seconds, 0 if memory is None else copies * memory.temp_size_in_bytes)


def in_turns(
    rows: Mapping[str, Callable[[], float]], repeats: int | Mapping[str, int], rounds: int | Mapping[str, int] = 1
) -> dict[str, np.ndarray]:
    """Seconds of a round of each row. Rows take turns, so that a drift of the machine's speed meets all of them.

    One run of a row returns its seconds and makes `rounds`; rows with fewer repeats are spread evenly over the turns.
    """
    often = dict.fromkeys(rows, repeats) if isinstance(repeats, int) else repeats
    counts = dict.fromkeys(rows, rounds) if isinstance(rounds, int) else rounds
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    most = max(often.values())
    for turn in range(most):
        for name, call in rows.items():
            if (turn + 1) * often[name] // most > turn * often[name] // most:
                seconds[name].append(call())
    return {name: np.array(calls) / counts[name] for name, calls in seconds.items()}


class Report:
    """Collects a suite's `measurements`: `prefix` begins every name, "SUITE/", and `shapes` ends every text."""

    def __init__(self, prefix: str, shapes: str):
        self.prefix, self.shapes = prefix, shapes
        self.measurements: dict[str, Measurement] = {}

    def on(self, shapes: str) -> Report:
        """The same collection, for texts with another end."""
        other = Report(self.prefix, shapes)
        other.measurements = self.measurements
        return other

    def add(self, name: str, value: float, spread: tuple[float, float], unit: str, text: str = "") -> None:
        against = f"{text}; {self.shapes}" if text else self.shapes
        self.measurements[self.prefix + name] = Measurement(value, unit, spread, against)

    def median(self, name: str, values: np.ndarray | float, unit: str, text: str = "") -> None:
        """Add the median of the repeats, or a number without spread."""
        self.add(name, float(np.median(values)), (float(np.min(values)), float(np.max(values))), unit, text)

    def ratio(self, name: str, top: np.ndarray, bottom: np.ndarray, text: str = "", unit: str = "x") -> None:
        """Ratio of the medians of `top` and `bottom`; its spread is the range when each is replaced by its extremes."""
        extremes = float(min(top) / max(bottom)), float(max(top) / min(bottom))
        self.add(name, float(np.median(top) / np.median(bottom)), extremes, unit, text)

    def times(self, seconds: Mapping[str, np.ndarray], per: str = "round") -> None:
        """NAME of each row, in milliseconds."""
        for name, calls in seconds.items():
            self.median(name, 1e3 * calls, f"ms/{per}")

    def memory(self, rows: Mapping[str, Runner], group: str = "") -> None:
        """GROUPtemp_NAME of each row, in megabytes."""
        for name, row in rows.items():
            self.median(f"{group}temp_{name}", row.temp_bytes / 1e6, "MB", "temporary memory")

    def compile_times(self, rows: Mapping[str, Runner], group: str = "") -> None:
        """compile_GROUPNAME of each row, in seconds."""
        for name, row in rows.items():
            self.median(f"compile_{group}{name}", row.compile_seconds, "s", "tracing and compiling")

    def compare(
        self,
        rows: Mapping[str, Runner],
        repeats: int | Mapping[str, int],
        rounds: int | Mapping[str, int],
        ratios: Mapping[str, tuple[str, str, str]],
        group: str = "",
        per: str = "round",
    ) -> dict[str, np.ndarray]:
        """Run rows in turns; add ratios (name -> top row, bottom row, text), and each row's time, memory, compile time.

        Returns:
            Seconds of a round, by row.
        """
        seconds = in_turns(rows, repeats, rounds)
        for name, (top, bottom, text) in ratios.items():
            self.ratio(name, seconds[top], seconds[bottom], text)
        self.times({f"{group}{name}": times for name, times in seconds.items()}, per)
        self.memory(rows, group)
        self.compile_times(rows, group)
        return seconds


def points(measurements: Mapping[str, Measurement], pattern: str) -> list[tuple[Any, ...]]:
    """(numbers in the name ..., value) of the measurements whose whole name fits the pattern, ascending."""
    fitting = [(re.fullmatch(pattern, name), one.value) for name, one in measurements.items()]
    return sorted((*map(int, match.groups()), value) for match, value in fitting if match)


def curve(axes: Axes, places: Sequence[tuple[Any, ...]], number: int, **style: Any) -> None:
    """Draw (x, y) pairs as the line with this number."""
    axes.plot(*zip(*places, strict=True), linewidth=1.8, **line_style(number), **style)


def finish(axes: Axes, label: str, x_label: str, *, is_size: bool = True) -> None:
    """Labels, logarithmic axes, of x where it is a size, and a legend where lines have names."""
    style_axes(axes, Panel("", label), x_label)
    axes.set_yscale("log")
    if is_size:
        axes.set_xscale("log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def gemm_call(size: int) -> Callable[[], float]:
    """The machine's yardstick: one run is a square float32 matrix product, and gives the seconds of an operation."""
    factor = jax.random.normal(jax.random.key(0), (size, size), jnp.float32) / size
    product = runner(lambda state, other: state @ other, factor, factor)
    return lambda: product() / (2 * size**3)
