"""The paper's figures as presets of experiments.dp_gradient_tracking.

What the paper leaves open is settled the same way in all of them. C: per-sample gradients are clipped at L1 norm 20, so
that C is 40. Noise: a two-hundredth of the paper's, at which these networks learn nothing (fig2_full_noise shows it).
Images are shrunk to 14x14 and the network is small, so that a figure takes minutes on two cores. Gradients are taken at
the broadcast state, for which an epsilon is proven; where methods are compared as published, at the agents' own states.
"""

from __future__ import annotations

from typing import Any

from experiments.command_line import Preset

_MNIST: dict[str, Any] = {
    "dataset": "mnist",
    "num_test": 2000,  # with all 10,000 the evaluations of five models would take as long as the training
    "shrink": 2,
    "noise_gain": (0.005,),
    "seeds": (0, 1, 2),
    "evaluate_every": 100,
    "train_samples": 200,
}
_FULL_SIZE: dict[str, Any] = {"model": "resnet18", "seeds": (0, 1, 2), "evaluate_every": 100, "train_samples": 500}
_GPU = "for an accelerator, not measured; tried at reduced size"
_S1_NOISE, _S2_NOISE = (-0.11, 0.09, 0.19), (0.99939, 0.99959, 0.99979)
_LOOPS = ("five_agents", "five_agents_self_loops")
_ALL = ("DP-GT", "noisy-states", "noisy-quantized-states", "ternary-states", "quantized-states", "noisy-outputs")

PRESETS: dict[str, Preset] = {
    "fig2": Preset(
        "MNIST, S1: three levels of noise",
        "9 minutes on two busy cores",
        {**_MNIST, "scheme": ("S1",), "noise_exponent": _S1_NOISE},
    ),
    "fig2_full_noise": Preset(
        "as fig2 with all of the paper's noise, gradients at the agents' own states; one seed",
        "3 minutes on one core of two busy ones",
        {
            **_MNIST,
            "scheme": ("S1",),
            "noise_exponent": _S1_NOISE,
            "noise_gain": (1.0,),
            "gradient_at": ("state",),
            "seeds": (0,),
        },
    ),
    "fig3": Preset(
        "MNIST, S2: three levels of noise",
        "6 minutes on one core of two busy ones",
        {**_MNIST, "scheme": ("S2",), "noise_base": _S2_NOISE},
    ),
    "fig4": Preset(
        "MNIST: S1 against S2", "4 minutes on one core of two busy ones", {**_MNIST, "scheme": ("S1", "S2")}
    ),
    "fig5": Preset(
        "MNIST, S1: the five agents without and with self-loops",
        "4 minutes on one core of two busy ones",
        {**_MNIST, "scheme": ("S1",), "graph": _LOOPS},
    ),
    "fig6": Preset(
        "MNIST, S2: the five agents without and with self-loops",
        "4 minutes on one core of two busy ones",
        {**_MNIST, "scheme": ("S2",), "graph": _LOOPS},
    ),
    "fig7": Preset(
        "MNIST: DP-GT against the methods it is compared with, steps and noise of S2, all gradients at own states",
        "11 minutes on one core of two busy ones",
        {
            **_MNIST,
            "methods": _ALL,
            "scheme": ("S2",),
            "gradient_at": ("state",),
        },
    ),
    "fig7_broadcast": Preset(
        "as fig7 for the methods with a proven epsilon, gradients at the broadcast states",
        "6 minutes on one core of two busy ones",
        {**_MNIST, "methods": ("DP-GT", "noisy-states", "noisy-outputs"), "scheme": ("S2",)},
    ),
    "fig8": Preset(
        "budgets of all methods under S1 and S2, on a multinomial regression for MNIST; gradients at own states",
        "3 minutes on two busy cores",
        {**_MNIST, "model": "mlp", "methods": _ALL, "gradient_at": ("state",)},
    ),
    **{
        f"{name}_resnet18": Preset(
            f"{label}, ResNet-18 with group norm: S1 against S2 with three levels of noise each",
            _GPU,
            {**_FULL_SIZE, "dataset": name, "noise_exponent": _S1_NOISE, "noise_base": _S2_NOISE},
        )
        for name, label in (("mnist", "MNIST"), ("cifar10", "CIFAR-10"))
    },
}
