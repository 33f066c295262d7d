"""The paper's tables and figures as presets of experiments.embracing_fl, and the same reduced for a CPU.

Reduced: 32 clients in place of 128, 10,000 training and 2,000 test images of CIFAR-10 shrunk to 16x16, Dirichlet 0.1,
ResNet-8 (one block a stage, widths 16, 32, 64), 100 rounds of 5 steps with batches of 16, step size 0.1 with a tenth of
it after rounds 80 and 90. Cuts lie where ResNet-20's do, before stages 2 and 3: a moderate client trains all but stem
and stage 1, a weak one stage 3 and the dense layer. Widths are the paper's, 0.45 and 0.2 (3, 6, 12 channels).
"""

from __future__ import annotations

from typing import Any

from experiments.command_line import Preset
from experiments.partial import paper

_SEEDS = (0, 1, 2)
_ALL_CASES = tuple(paper.CASES)
_NARROW_CASES = _ALL_CASES[1:]  # in case 1 nobody is narrow: it is table3's
_BOTH = ("width_reduction", "embracing")
_CIFAR10: dict[str, Any] = {"dataset": "cifar10", "nodes": 128, "seeds": _SEEDS, "evaluate_every": 20}
_ADDED: dict[str, Any] = {
    "method": _BOTH,
    "strong": (16,),
    "weak": tuple(paper.ADDED_WEAK),
    "participation_rate": 1.0,
}
_SMALL: dict[str, Any] = {
    "dataset": "cifar10",
    "num_train": 10_000,
    "num_test": 2000,
    "shrink": 2,
    "model": "resnet8",
    "nodes": 32,
    "local_steps": 5,
    "batch_size": 16,
    "step_size": 0.1,
    "rounds": 100,
    "seeds": _SEEDS,
    "evaluate_every": 10,
}
# Seconds a round: of the named cases measured on a few rounds of the preset itself on two CPU cores (x86-64, AVX-512),
# FEMNIST made up in LEAF's format. A client of ResNet-20 took 1.1 (strong), 0.76 (moderate) and 0.41 (weak) seconds
# a round, in width reduction 1.1, 0.63 and 0.26, of the CNN 0.43, 0.20 and 0.10, of the LSTM 5.0, 4.4 and 3.2: other
# cases lie between. Hours are predicted for all rounds and three seeds.
_BY_CASE = "39 (case 1) to 16 (case 7) seconds a round on two CPU cores; predicted: 33 to 13 hours a case"
_BY_NARROW_CASE = "25 (case 2) to 13 (case 7) seconds a round on two CPU cores; predicted: 21 to 11 hours a case"
_CNN_CASES = "14 (case 1) to 5.3 (case 7) seconds a round on two CPU cores; predicted: 2.3 to 0.9 hours a case"
_LSTM_CASES = "163 (case 1) to 110 (case 7) seconds a round on two CPU cores; predicted: 54 to 37 hours a case"
_TO_TARGET = "13 to 39 seconds a round on two CPU cores, as table3 and table6; predicted: 300 hours for all 14 variants"
_ALL_ACTIVE = (
    "with 128 clients 68 (embracing) and 51 (width_reduction) seconds a round on two CPU cores; "
    "predicted with 16: 17; 290 hours for all ten variants"
)
_BOTH_NORMS = (
    "68 (global) and 91 (static) seconds a round of embracing, 48 and 51 of width_reduction on two CPU cores; "
    "predicted: 215 hours for the four variants"
)

PRESETS: dict[str, Preset] = {
    "table2": Preset(
        "CIFAR-10, ResNet-20: 16 strong clients and 0 to 112 weak ones, all active, both methods",
        _ALL_ACTIVE,
        {**_CIFAR10, **_ADDED},
    ),
    "table3": Preset(
        "CIFAR-10, ResNet-20, 1,000 rounds: EmbracingFL in ten cases",
        _BY_CASE,
        {**_CIFAR10, "method": ("embracing",), "cases": _ALL_CASES},
    ),
    "table4": Preset(
        "FEMNIST, CNN, 200 rounds: EmbracingFL in ten cases",
        _CNN_CASES,
        {"dataset": "femnist", "method": ("embracing",), "cases": _ALL_CASES, "seeds": _SEEDS, "evaluate_every": 10},
    ),
    "table5": Preset(
        "IMDB, bidirectional LSTM, 400 rounds: EmbracingFL in ten cases",
        _LSTM_CASES,
        {"dataset": "imdb", "method": ("embracing",), "cases": _ALL_CASES, "seeds": _SEEDS, "evaluate_every": 20},
    ),
    "table6": Preset(
        "as table3: width reduction in cases 2 to 10",
        _BY_NARROW_CASE,
        {**_CIFAR10, "method": ("width_reduction",), "cases": _NARROW_CASES},
    ),
    "table7": Preset(
        "rounds until the paper's target accuracies, cases 1 to 7, both methods",
        _TO_TARGET,
        {
            **_CIFAR10,
            "method": _BOTH,
            "cases": tuple(paper.ROUNDS_TO_TARGET),
            "target_accuracy": tuple(target / 100 for target, _, _ in paper.ROUNDS_TO_TARGET.values()),
            "evaluate_every": 5,
        },
    ),
    "table8": Preset("seconds of a batch for the profile of a phone; trains nothing", "a second", {"show": "timing"}),
    "table9": Preset(
        "16 strong and 112 weak clients, all active: static and global batch normalization, both methods",
        _BOTH_NORMS,
        {**_CIFAR10, "method": _BOTH, "cases": (7,), "participation_rate": 1.0, "batch_norm": ("static", "global")},
    ),
    "sizes": Preset("Tables 1 and 10: parameters and activations; trains nothing", "2 seconds", {"show": "sizes"}),
    "fig4": Preset(
        "the accuracy curves of table2, evaluated more often",
        _ALL_ACTIVE,
        {**_CIFAR10, **_ADDED, "evaluate_every": 10},
    ),
    "table2_small": Preset(
        "table2 reduced: 4 strong and 0 to 28 weak of 32 clients, all active",
        "23 minutes on one core, 0.32 seconds a round over its ten variants",
        {**_SMALL, "method": _BOTH, "strong": (4,), "weak": (0, 4, 8, 16, 28), "participation_rate": 1.0},
    ),
    "table3_small": Preset(
        "table3 reduced: 32 clients, ResNet-8, a fifth of CIFAR-10 at 16x16; --cases 7 for one case",
        "1.5 to 4 minutes a case on one core, 0.14 (case 7) to 0.54 (case 2) seconds a round",
        {**_SMALL, "method": ("embracing",), "cases": _ALL_CASES},
    ),
    "table6_small": Preset(
        "table6 reduced, likewise",
        "1.8 to 4 minutes a case on one core, 0.20 (case 2) to 0.34 (case 5) seconds a round",
        {**_SMALL, "method": ("width_reduction",), "cases": _NARROW_CASES},
    ),
    "table9_small": Preset(
        "table9 reduced: case 7 with a quarter of the clients active",
        "7.4 minutes on one core, 0.21 seconds a round over its four variants",
        {**_SMALL, "method": _BOTH, "cases": (7,), "batch_norm": ("static", "global")},
    ),
}
