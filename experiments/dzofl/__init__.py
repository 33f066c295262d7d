"""DZOFL: zero-order federated learning, where a device sends one number a round, against FedAvg over the same links.

    python -m experiments.dzofl                                       # digits, under a minute on two cores
    python -m experiments.dzofl --preset fig1 --data-dir DIR          # Fashion-MNIST, shirts against sneakers
    python -m experiments.dzofl --links given --grid success=0.2,0.5,1 --method DZOFL --x seconds

Mhanna, Assaad, "Communication and Energy Efficient Federated Learning using Zero-Order Optimization Technique", 2024.
"""

from jaxfl.frame import Experiment, Overlay

from .options import BASELINES, DZOFL, FED_AVG, Configuration
from .pictures import finish
from .prepare import prepare
from .presets import PRESETS, SHIRTS, rounds

EXPERIMENT = Experiment(
    name="dzofl",
    description="DZOFL against FedAvg: accuracy, bits, seconds and joules over the same links.",
    base=Configuration(),
    prepare=prepare,
    grid=({"method": (DZOFL, FED_AVG)},),
    datasets={"digits": Overlay({"classes": (3, 8)}), "fashion_mnist": SHIRTS},
    presets=PRESETS,
    derived={
        "rounds": rounds,
        "evaluate_every": lambda options, names: max(1, options["rounds"] // 20),
    },
    labels={"method": "{}"},
    finish=finish,
    baselines=BASELINES,
    columns=("test_accuracy", "train_loss", "lost_messages"),
    aliases={
        "num_nodes": "nodes",
        "bits_per_second": "uplink_bits_per_second",
        "bits": "quantizer_bits",
        "limit": "quantizer_limit",
        "step_exponent, smoothing_exponent": "step_exponent",
    },
)
