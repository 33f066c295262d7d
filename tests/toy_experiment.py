"""An experiment with options of every kind that trains nothing: what the frame promises is tested on it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxfl.frame import Choice, Experiment, Overlay, Preset, Run, affects_statements_only, traced
from jaxfl.frame.command_line import parse

SHAPES = Choice(
    "shape",
    {
        "circle": lambda *, radius: 3 * radius**2,
        "square": lambda *, side: side**2,
        "star": lambda *, side, corners=5: corners * side,
    },
)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The drawing."""

    COUNTS: ClassVar = (SHAPES.counts,)
    dataset: str = "digits"
    """Source of
    the data."""
    shape: Literal["circle", "square", "star"] = "circle"
    """Which."""
    radius: float = 1.0
    """Radius of a circle."""
    side: float | None = None
    """Side of a square, which needs it, and of a star."""
    corners: int | None = None
    """Corners of a star."""


@dataclasses.dataclass(frozen=True)
class Learning:
    """The learning."""

    COUNTS: ClassVar = ({"strict": lambda options: options["budget"] != float("inf")},)
    rounds: int = 10
    """Number of rounds."""
    step_size: float | Literal["theory"] = traced(0.5)
    """Step size."""
    clip_norm: float | None = traced(None)
    """Clip norm."""
    budget: float = affects_statements_only(float("inf"))
    """Budget."""
    strict: bool = affects_statements_only(True)
    """True if the budget counts."""
    widths: tuple[int, ...] = (8,)
    """Widths of layers."""
    title: str = "toy"
    """Title of the picture."""
    fast: bool = False
    """Or slow."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One drawing."""

    drawing: Drawing = Drawing()
    learning: Learning = Learning()
    run: Run = Run()


EXPERIMENT = Experiment(
    name="toy",
    description="A toy.",
    base=Configuration(),
    run=lambda query: 0,
    grid=({"shape": ("circle", "square")},),
    datasets={
        "digits": Overlay({"side": 2.0}),
        "other": Overlay({"side": 3.0, "rounds": 20}, ({"fast": (False, True)},)),
    },
    presets={
        "figure_1": Preset("the first figure", "3 s on two cores", {"rounds": 7, "widths": (1, 2)}),
        "figure_2": Preset("on other data", "4 s", {"dataset": "mnist"}, ({"step_size": (0.1, 0.2)},)),
        "figure_3": Preset("by its radius", "5 s", {"shape": "circle", "radius": 4.0}),
    },
    derived={"evaluate_every": lambda options, message: max(1, options["rounds"] // 5)},
    rivals=((("radius",), ("side", "corners")),),
    labels={"shape": "{}", "step_size": "step {}"},
    aliases={"count": "rounds"},
)


def ask(arguments):
    """The request of a command line."""
    return parse(EXPERIMENT, arguments.split() if isinstance(arguments, str) else arguments)[0]
