"""DP gradient tracking over two directed graphs, and the methods it is compared with, each with the epsilon it has.

    python -m experiments.dp_gradient_tracking                                   # digits, under a minute on two cores
    python -m experiments.dp_gradient_tracking --dataset mnist --data-dir DIR    # five agents, a small CNN
    python -m experiments.dp_gradient_tracking --preset fig4 --data-dir DIR      # a figure of the paper
    python -m experiments.dp_gradient_tracking --grid noise_gain=0.003,0.03,0.3  # one program a scheme

Before a run it names every condition of the paper's theorems that a case breaks, with the number that breaks it;
--strict refuses such a run. conditions.json holds the same. Pictures show |grad F|^2 and consensus distance against
iterations, and the cumulative budgets.

Chen, Wang, Zhang, "Differentially Private Gradient-Tracking-Based Distributed Stochastic Optimization over Directed
Graphs".
"""

from jaxfl.frame import Experiment, Overlay

from .options import BASELINES, DERIVED, Configuration
from .pictures import finish
from .prepare import prepare
from .presets import PRESETS

EXPERIMENT = Experiment(
    name="dp_gradient_tracking",
    description="DP gradient tracking over two directed graphs, and the methods that it is compared with.",
    base=Configuration(),
    prepare=prepare,
    grid=({"scheme": ("S1", "S2")},),
    datasets={
        "digits": Overlay({"iterations": 400, "batch_size": 32, "noise_gain": 0.003}, ({"seed": (0, 1, 2)},)),
        "other": Overlay({"iterations": 2000, "noise_gain": 0.01, "model": "cnn"}),
    },
    presets=PRESETS,
    derived=DERIVED,
    labels={
        **{"method": "{}", "scheme": "{}", "noise_exponent": "p = {}", "noise_base": "p = {}"},
        **{"noise_gain": "noise x {}", "gradient_at": "gradient at {}", "graph": "{}"},
    },
    aliases={
        **dict.fromkeys(("state_weights", "tracker_weights", "pair"), "graph"),
        **dict.fromkeys(("num_rounds", "num_iterations"), "iterations"),
        **{"num_nodes": "nodes", "most_samples": "train_samples"},
        **{"threshold": "ternary_threshold", "step": "quantization_step"},
    },
    finish=finish,
    baselines=BASELINES,
)
