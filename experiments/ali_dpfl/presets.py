"""The paper's tables and figures as presets of experiments.ali_dpfl.

Choices that the paper leaves open are the same in all of them. Clients: two shards of samples sorted by label. The
network: two convolutions with tanh on images of 14x14 (or 16x16), so that a table takes minutes on two cores. |D_i|:
5,000 in the budget, as in the paper's counts of iterations for both data sets; statements take the clients' own.
kappa: 1. The constants are estimated without noise, as in the paper, from 64 samples of a client.

`--model mlp --hidden 32 --shrink 1 --step-size 10` is more accurate on Fashion-MNIST at several times the speed
(experiments/results/ali_dpfl).
"""

from __future__ import annotations

from typing import Any

from jaxfl.frame import Preset
from jaxfl.frame.grid import Axis

IMAGES: dict[str, Any] = {
    "model": "cnn",
    "shrink": 2,
    "channels": (16, 32),
    "window": 3,
    "dense_units": 64,
    "activation": "tanh",
}
ESTIMATES: dict[str, Any] = {"constants_batch": 64, "constants_noise": 2.0}
_PAPER: dict[str, Any] = {"dataset": "fashion_mnist", **IMAGES, "bound": "published", "accounted_samples": 5000}
_ALI = {**_PAPER, "constants_batch": 64}
_TABLE = {**_ALI, "constants": "as_published"}
_METHODS: Axis = {"method": ("ALI-DPFL", "DPFL")}
_FEW, _MANY = {"local_steps": (1, 2, 3, 4, 5)}, {"local_steps": (1, 3, 5, 7, 9)}
_COST = "about {} minutes on two busy cores, estimated from a column of table4, which took 5; one seed"


def _ratio(round_ratio: float, *epsilons: float) -> Axis:
    return {"round_ratio": (round_ratio,) * len(epsilons), "target_epsilon": epsilons}


_TABLE_2 = {key: (*_ratio(1.0, 1.75, 1.85, 2.0)[key], *_ratio(2.0, 1.55, 1.65, 1.75)[key]) for key in _ratio(1.0)}
_HALF, _FIFTH = _ratio(0.5, 2.0, 2.25, 2.5), _ratio(0.2, 2.75, 3.25, 3.75)

PRESETS: dict[str, Preset] = {
    "table2": Preset(
        "R_s = R_c and R_s = 2 R_c: ALI-DPFL against fixed tau; also with --dataset cifar10",
        *(_COST.format(14), _TABLE, (_TABLE_2, _METHODS, _FEW)),
    ),
    "table3": Preset("as table2 with R_s = R_c / 2", _COST.format(10), _TABLE, (_HALF, _METHODS, _FEW)),
    "table4": Preset("as table2 with R_s = R_c / 5, tau to 9", _COST.format(17), _TABLE, (_FIFTH, _METHODS, _MANY)),
    "fig1": Preset(
        "accuracy against a fixed tau at R_s = R_c / 5, for each budget",
        *(_COST.format(15), {**_PAPER, "method": "DPFL", "round_ratio": 0.2}),
        ({"target_epsilon": (2.75, 3.25, 3.75)}, {"local_steps": (1, 2, 3, 5, 7, 9, 12)}),
    ),
    "fig6": Preset(
        "the chosen tau of each round at R_s = R_c / 2 and R_c / 5",
        *(_COST.format(9), {**_TABLE, "method": "ALI-DPFL", "evaluate_every": 1, "num_test": 1000}),
        ({key: (*_HALF[key], *_FIFTH[key]) for key in _HALF},),
    ),
    "kappa": Preset(
        "how tau depends on kappa at R_s = R_c / 5, epsilon 2.75, with estimates as published and private",
        *(_COST.format(16), {**_ALI, **ESTIMATES, "method": "ALI-DPFL", "round_ratio": 0.2, "target_epsilon": 2.75}),
        ({"kappa": (1.0, 1e2, 1e4, 1e6)}, {"constants": ("as_published", "private")}),
    ),
}
