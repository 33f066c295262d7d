"""PrivSGP-VR, PrivSGP, DP2-SGD and A(DP)2SGD: private decentralised learning, each run with the epsilon that it has.

    python -m experiments.privsgp_vr                                              # digits, under a minute on two cores
    python -m experiments.privsgp_vr --dataset mnist --data-dir DIR               # 50 nodes, 784-32-10, batch 1 and 32
    python -m experiments.privsgp_vr --preset fig9 --data-dir DIR                 # a figure of the paper
    python -m experiments.privsgp_vr --grid step_size=0.05,0.1,0.2 --seeds 0 1    # a sweep in one compiled program
    python -m experiments.privsgp_vr --noise-std 0.3 --seeds 0 1 2                # a given noise, without a budget

Zhu, Huang, Wang, Xu, "PrivSGP-VR: Differentially Private Variance-Reduced Stochastic Gradient Push with Tight Utility
Bounds", IJCAI 2024, arXiv:2405.02638.
"""

from jaxfl.frame import Experiment, Overlay

from .baselines import BASELINES
from .options import DERIVED, RIVALS, Configuration
from .prepare import finish, prepare
from .presets import PRESETS

EXPERIMENT = Experiment(
    name="privsgp_vr",
    description="PrivSGP-VR against PrivSGP, DP2-SGD and A(DP)2SGD: private learning with its epsilon.",
    base=Configuration(),
    prepare=prepare,
    grid=({"method": ("PrivSGP-VR", "PrivSGP")},),
    datasets={
        "digits": Overlay({"nodes": 16, "iterations": 400}, ({"seed": (0, 1, 2)},)),
        "other": Overlay({"nodes": 50, "iterations": 2000}, ({"batch_size": (1, 32)},)),
    },
    presets=PRESETS,
    derived=DERIVED,
    rivals=RIVALS,
    labels={
        "method": "{}",
        "batch_size": "batch {}",
        "nodes": "{} nodes",
        "iterations": "K = {}",
        "noise_std": "noise {}",
        "target_epsilon": "ε = {}",
        "bound": "{}",
        "mixings": "M = {}",
    },
    finish=finish,
    baselines=BASELINES,
    aliases={
        **{"mixing_matrices": "graph", "num_nodes": "nodes", "num_rounds": "iterations"},
        **{"num_mixings": "mixings", "num_final_mixings": "final_mixings"},
    },
)
