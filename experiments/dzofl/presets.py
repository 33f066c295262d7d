"""Figures 1 and 2 and the example of section III as presets of experiments.dzofl."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from jaxfl.frame import Overlay, Preset

from .costs import write_section3
from .options import DZOFL, FED_AVG
from .pictures import finish

SHIRTS = Overlay({"classes": (6, 7), "model": "dzofl_cnn", "nodes": 50, "step_size": 2.0, "sgd_step_size": 0.03})
_METHODS = ({"method": (DZOFL, FED_AVG)},)
_COST = "about 8 minutes on two cores that six processes shared; one seed"


def rounds(options: Mapping[str, Any], names: Collection[str]) -> int:
    """Rounds after which accuracy no longer rises, on digits and on Fashion-MNIST's shirts."""
    del names
    of_method = (60, 16) if options["dataset"] == "fashion_mnist" else (2000, 200)
    return of_method[options["method"] != DZOFL]


PRESETS: dict[str, Preset] = {
    "fig1": Preset(
        "accuracy against joules: 50 devices, shirts against sneakers",
        *(_COST, {"dataset": "fashion_mnist"}, _METHODS, functools.partial(finish, costs=("joules",))),
    ),
    "fig2": Preset(
        "accuracy against simulated seconds, else as fig1",
        *(_COST, {"dataset": "fashion_mnist"}, _METHODS, functools.partial(finish, costs=("seconds",))),
    ),
    "section3": Preset(
        "bits and seconds of section III: the paper's example, the same corrected, and the counts of two rounds",
        "about a minute on two busy cores",
        {"dataset": "fashion_mnist", "links": "perfect", "num_test": 200, "rounds": 2},
        *(_METHODS, write_section3),
    ),
}
