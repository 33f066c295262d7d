"""The paper's figures as presets of experiments.dp_gradient_tracking.

Choices that the paper leaves open are the same in all but fig2_full_noise, fig4_broadcast and fig8. C: per-sample
gradients are clipped at L1 norm 20, so that C is 40. Weights of the edges: 0.01. With weights of 1 nothing is learned
at the paper's noise (fig2_full_noise shows it). Images are shrunk to 14x14 and the network is small, so that a figure
takes minutes on two cores. Gradients are taken at the agents' own states, as published; fig4_broadcast takes them at
the broadcast states, where an epsilon is proven.
"""

from __future__ import annotations

from typing import Any

from jaxfl.frame import Preset
from jaxfl.graphs.files import NAMED_PAIRS

from .options import METHODS

_MNIST: dict[str, Any] = {
    "dataset": "mnist",
    "num_test": 2000,  # with all 10,000 the evaluations of five models would take as long as the training
    "shrink": 2,
    "noise_gain": 1.0,
    "edge_weight": 0.01,
    "gradient_at": "state",
    "evaluate_every": 100,
    "train_samples": 200,
}
_S1, _S2 = {**_MNIST, "scheme": "S1"}, {**_MNIST, "scheme": "S2"}
_TWO_CORES, _ONE_CORE = "{} minutes on two busy cores", "{} minutes on one core of two busy ones"
_LITTLE_NOISE = {"noise_gain": 0.005, "edge_weight": 1.0}
_SEEDS, _SCHEMES = {"seed": (0, 1, 2)}, {"scheme": ("S1", "S2")}
_S1_NOISE, _S2_NOISE = {"noise_exponent": (-0.11, 0.09, 0.19)}, {"noise_base": (0.99939, 0.99959, 0.99979)}
_LOOPS, _ALL = {"graph": NAMED_PAIRS}, {"method": METHODS}
_WITH_LOOPS = "the five agents without and with self-loops"

_ROWS: dict[str, tuple[str, str, dict[str, Any], tuple]] = {
    "fig2": ("MNIST, S1: three levels of noise", _TWO_CORES.format(9), _S1, (_S1_NOISE, _SEEDS)),
    "fig2_full_noise": (
        "as fig2 with edge weights of 1; one seed",
        *(_ONE_CORE.format(3), {**_S1, "edge_weight": 1.0}, (_S1_NOISE,)),
    ),
    "fig3": ("MNIST, S2: three levels of noise", _ONE_CORE.format(6), _S2, (_S2_NOISE, _SEEDS)),
    "fig4": ("MNIST: S1 against S2", _ONE_CORE.format(4), _MNIST, (_SCHEMES, _SEEDS)),
    "fig4_broadcast": (
        "as fig4, gradients at the broadcast states",
        *(_ONE_CORE.format(4), {**_MNIST, "gradient_at": "broadcast"}, (_SCHEMES, _SEEDS)),
    ),
    "fig5": (f"MNIST, S1: {_WITH_LOOPS}", _ONE_CORE.format(4), _S1, (_LOOPS, _SEEDS)),
    "fig6": (f"MNIST, S2: {_WITH_LOOPS}", _ONE_CORE.format(4), _S2, (_LOOPS, _SEEDS)),
    "fig7": (
        "MNIST: DP-GT against the methods it is compared with, steps and noise of S2",
        *(_ONE_CORE.format(11), _S2, (_ALL, _SEEDS)),
    ),
    "fig8": (
        "budgets of all methods under S1 and S2, on a multinomial regression for MNIST; noise / 200, weights of 1",
        *(_TWO_CORES.format(3), {**_MNIST, **_LITTLE_NOISE, "model": "mlp"}, (_ALL, _SCHEMES, _SEEDS)),
    ),
}
PRESETS = {name: Preset(*row) for name, row in _ROWS.items()}
