"""ALI-DPFL and DPFL: private federated learning with adaptive and with fixed numbers of local iterations.

    python -m experiments.ali_dpfl                                               # digits, under a minute on two cores
    python -m experiments.ali_dpfl --preset table4 --data-dir DIR                # a table of the paper, Fashion-MNIST
    python -m experiments.ali_dpfl --preset table4 --dataset cifar10 --data-dir DIR
    python -m experiments.ali_dpfl --method ALI-DPFL --grid kappa=0.1,1,10 --seeds 0 1

Ling, Fu, Wang, Liu, Chen, "ALI-DPFL: Differentially Private Federated Learning with Adaptive Local Iterations",
arXiv:2308.10457.
"""

from jaxfl.frame import Experiment, Overlay

from .options import Configuration
from .pictures import finish
from .prepare import BASELINES, prepare
from .presets import ESTIMATES, IMAGES, PRESETS

EXPERIMENT = Experiment(
    name="ali_dpfl",
    description="ALI-DPFL against fixed numbers of local iterations, with each run's epsilon.",
    base=Configuration(),
    prepare=prepare,
    grid=({"method": ("ALI-DPFL", "DPFL")}, {"constants": ("private", "as_published")}),
    datasets={
        "digits": Overlay(
            {"batch_size": 20, "clip_norm": 1.0, "target_epsilon": 8.0, "kappa": 30.0},
            ({"local_steps": (1, 2, 5, 10)}, {"seed": (0, 1, 2)}),
        ),
        "other": Overlay({**IMAGES, **ESTIMATES}, ({"local_steps": (1, 2, 5, 10)},)),
    },
    presets=PRESETS,
    derived={"evaluate_every": lambda options, names: 0},  # until the rounds are known
    rivals=((("noise_multiplier",), ("client_noise",)),),
    labels={
        "method": "{}",
        "local_steps": "τ = {}",
        "target_epsilon": "ε = {}",
        "round_ratio": "R_s/R_c = {}",
        "constants": "{}",
        "kappa": "κ = {}",
    },
    finish=finish,
    baselines=BASELINES,
    columns=("test_accuracy", "train_loss", "num_steps"),
    aliases={"num_nodes": "nodes", "num_rounds": "rounds"},
)
