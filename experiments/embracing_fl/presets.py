"""The paper's tables and figures as presets of experiments.embracing_fl, and the same reduced for a CPU.

Reduced: 32 clients in place of 128, 10,000 training and 2,000 test images of CIFAR-10 shrunk to 16x16, Dirichlet 0.1,
ResNet-8 (one block a stage, widths 16, 32, 64), 100 rounds of 5 steps with batches of 16, step size 0.1 with a tenth of
it after rounds 80 and 90. Cuts lie where ResNet-20's do, before stages 2 and 3: a moderate client trains all but stem
and stage 1, a weak one stage 3 and the dense layer. Widths are the paper's, 0.45 and 0.2 (3, 6, 12 channels).
"""

from __future__ import annotations

from typing import Any

from jaxfl.frame import Preset
from jaxfl.frame.grid import Axis

from . import paper

_SEEDS = {"seed": (0, 1, 2)}
_BOTH, _NORMS = {"method": ("width_reduction", "embracing")}, {"batch_norm": ("static", "global")}
_TARGETS = {"case": tuple(paper.TARGETS), "target_accuracy": tuple(paper.TARGETS.values())}


def _added(strong: int, *weak: int) -> tuple[Axis, ...]:
    """Some strong clients with more and more weak ones, both methods."""
    return {"strong": (strong,) * len(weak), "weak": weak}, _BOTH, _SEEDS


def _cases(description: str, cost: str, method: str = "embracing", **changes: Any) -> Preset:
    """One method in the ten cases; in case 1 nobody is narrow, and width reduction is FedAvg."""
    cases = tuple(case for case in paper.CASES if case > 1 or method == "embracing")
    return Preset(description, cost, {**changes, "method": method}, ({"case": cases}, _SEEDS))


_CIFAR10: dict[str, Any] = {"dataset": "cifar10", "evaluate_every": 20}
_ALL_ACTIVE: dict[str, Any] = {**_CIFAR10, "participation_rate": 1.0}
_SMALL: dict[str, Any] = {
    **{"dataset": "cifar10", "num_train": 10_000, "num_test": 2000, "shrink": 2, "model": "resnet8", "nodes": 32},
    **{"local_steps": 5, "batch_size": 16, "step_size": 0.1, "rounds": 100, "evaluate_every": 10},
}
# Seconds a round: of the named cases measured on a few rounds of the preset itself on two CPU cores (x86-64, AVX-512),
# FEMNIST made up in LEAF's format. A client of ResNet-20 took 1.1 (strong), 0.76 (moderate) and 0.41 (weak) seconds
# a round, in width reduction 1.1, 0.63 and 0.26, of the CNN 0.43, 0.20 and 0.10, of the LSTM 5.0, 4.4 and 3.2: other
# cases lie between. Hours are predicted for all rounds and three seeds.
_BY_CASE = "39 (case 1) to 16 (case 7) seconds a round on two CPU cores; predicted: 33 to 13 hours a case"
_BY_NARROW_CASE = "25 (case 2) to 13 (case 7) seconds a round on two CPU cores; predicted: 21 to 11 hours a case"
_CNN_CASES = "14 (case 1) to 5.3 (case 7) seconds a round on two CPU cores; predicted: 2.3 to 0.9 hours a case"
_LSTM_CASES = "163 (case 1) to 110 (case 7) seconds a round on two CPU cores; predicted: 54 to 37 hours a case"
_TO_TARGET = "13 to 39 seconds a round on two CPU cores, as table3 and table6; predicted: 300 hours for all 14 cases"
_ADDED_COST = (
    "with 128 clients 68 (embracing) and 51 (width_reduction) seconds a round on two CPU cores; "
    "predicted with 16: 17; 290 hours for all ten cases"
)
_BOTH_NORMS = (
    "68 (global) and 91 (static) seconds a round of embracing, 48 and 51 of width_reduction on two CPU cores; "
    "predicted: 215 hours for the four cases"
)

PRESETS = {
    "table2": Preset(
        "CIFAR-10, ResNet-20: 16 strong clients and 0 to 112 weak ones, all active, both methods",
        _ADDED_COST,
        _ALL_ACTIVE,
        _added(16, *paper.ADDED_WEAK),
    ),
    "table3": _cases("CIFAR-10, ResNet-20, 1,000 rounds: EmbracingFL in ten cases", _BY_CASE, **_CIFAR10),
    "table4": _cases(
        "FEMNIST, CNN, 200 rounds: EmbracingFL in ten cases", _CNN_CASES, dataset="femnist", evaluate_every=10
    ),
    "table5": _cases(
        "IMDB, bidirectional LSTM, 400 rounds: EmbracingFL in ten cases", _LSTM_CASES, dataset="imdb", evaluate_every=20
    ),
    "table6": _cases("as table3: width reduction in cases 2 to 10", _BY_NARROW_CASE, "width_reduction", **_CIFAR10),
    "table7": Preset(
        "rounds until the paper's target accuracies, cases 1 to 7, both methods",
        _TO_TARGET,
        {**_CIFAR10, "evaluate_every": 5},
        (_TARGETS, _BOTH, _SEEDS),
    ),
    "table8": Preset("seconds of a batch for the profile of a phone; trains nothing", "a second", {"show": "timing"}),
    "table9": Preset(
        "16 strong and 112 weak clients, all active: static and global batch normalization, both methods",
        _BOTH_NORMS,
        {**_ALL_ACTIVE, "case": 7},
        (_BOTH, _NORMS, _SEEDS),
    ),
    "sizes": Preset("Tables 1 and 10: parameters and activations; trains nothing", "2 seconds", {"show": "sizes"}),
    "fig4": Preset(
        "the accuracy curves of table2, evaluated more often",
        _ADDED_COST,
        {**_ALL_ACTIVE, "evaluate_every": 10},
        _added(16, *paper.ADDED_WEAK),
    ),
    "table2_small": Preset(
        "table2 reduced: 4 strong and 0 to 28 weak of 32 clients, all active",
        "23 minutes on one core, 0.32 seconds a round over its ten cases",
        {**_SMALL, "participation_rate": 1.0},
        _added(4, 0, 4, 8, 16, 28),
    ),
    "table3_small": _cases(
        "table3 reduced: 32 clients, ResNet-8, a fifth of CIFAR-10 at 16x16; --case 7 for one case",
        "1.5 to 4 minutes a case on one core, 0.14 (case 7) to 0.54 (case 2) seconds a round",
        **_SMALL,
    ),
    "table6_small": _cases(
        "table6 reduced in the same way",
        "1.8 to 4 minutes a case on one core, 0.20 (case 2) to 0.34 (case 5) seconds a round",
        "width_reduction",
        **_SMALL,
    ),
    "table9_small": Preset(
        "table9 reduced: case 7 with a quarter of the clients active",
        "7.4 minutes on one core, 0.21 seconds a round over its four cases",
        {**_SMALL, "case": 7},
        (_BOTH, _NORMS, _SEEDS),
    ),
}
