"""DP gradient tracking over two directed graphs, and the methods it is compared with, each with the epsilon it has.

    python -m experiments.dp_gradient_tracking                                   # digits at epsilon 8, a minute
    python -m experiments.dp_gradient_tracking --dataset mnist --data-dir DIR    # five agents, a small CNN
    python -m experiments.dp_gradient_tracking --preset fig4 --data-dir DIR      # a figure of the paper
    python -m experiments.dp_gradient_tracking --noise-gain 0.003                # Laplace noise: convergence only
    python -m experiments.dp_gradient_tracking --grid target_epsilon=2,8,32      # one program a scheme

Before a run it names every condition of the paper's theorems that a case breaks, with the number that breaks it;
--strict refuses such a run. conditions.json holds the same. Pictures show |grad F|^2 and consensus distance against
iterations, and the cumulative budgets.

Chen, Wang, Zhang, "Differentially Private Gradient-Tracking-Based Distributed Stochastic Optimization over Directed
Graphs".
"""

from jaxfl.frame import Experiment, Overlay

from .options import BASELINES, DERIVED, RIVALS, Configuration
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
        "digits": Overlay({"iterations": 200}, ({"seed": (0, 1, 2)},)),
        "other": Overlay({"iterations": 2000, "noise_gain": 0.01, "model": "cnn"}),
    },
    presets=PRESETS,
    derived=DERIVED,
    rivals=RIVALS,
    labels={
        **{"method": "{}", "scheme": "{}", "noise_exponent": "p = {}", "noise_base": "p = {}"},
        **{"noise_gain": "noise x {}", "target_epsilon": "ε = {}", "gradient_at": "gradient at {}", "graph": "{}"},
    },
    aliases={
        **dict.fromkeys(("state_weights", "tracker_weights", "pair"), "graph"),
        **dict.fromkeys(("num_rounds", "num_iterations"), "iterations"),
        **{"num_nodes": "nodes", "most_samples": "train_samples"},
        **{"num_mixings": "mixings", "num_final_mixings": "final_mixings"},
        **{"threshold": "ternary_threshold", "step": "quantization_step"},
    },
    finish=finish,
    baselines=BASELINES,
)
