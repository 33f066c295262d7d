"""Figures 1 and 2 and the example of section III as presets of experiments.dzofl."""

from __future__ import annotations

import functools
from typing import Any

from experiments.dzofl.costs import write_section3
from experiments.dzofl.options import DZOFL, FED_AVG
from experiments.dzofl.pictures import finish
from experiments.frame import Preset

SHIRTS: dict[str, Any] = {"classes": (6, 7), "model": "dzofl_cnn", "nodes": 50}
_PAPER: dict[str, Any] = {"dataset": "fashion_mnist", **SHIRTS}
_METHODS: Any = ({"method": (DZOFL, FED_AVG), "rounds": (2000, 100), "evaluate_every": (50, 5)},)
_COST = "TODO"

PRESETS: dict[str, Preset] = {
    "fig1": Preset(
        "accuracy against joules: 50 devices, shirts against sneakers",
        *(_COST, _PAPER, _METHODS, functools.partial(finish, costs=("joules",))),
    ),
    "fig2": Preset(
        "accuracy against simulated seconds, else as fig1",
        *(_COST, _PAPER, _METHODS, functools.partial(finish, costs=("seconds",))),
    ),
    "section3": Preset(
        "bits and seconds of section III: the paper's example, its arithmetic put right, what a small run counts",
        "TODO",
        {**_PAPER, "links": "perfect", "num_test": 200, "evaluate_every": 2, "rounds": 2},
        ({"method": (DZOFL, FED_AVG)},),
        write_section3,
    ),
}
