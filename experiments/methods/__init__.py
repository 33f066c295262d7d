"""Methods that people know, with a server and over a graph, on unequal data: which one learns, for how many bits?

    python -m experiments.methods                                             # digits, two minutes on two cores
    python -m experiments.methods --method FedAvg SCAFFOLD ED --seeds 0 1 2 --step-size 0.1 0.3
    python -m experiments.methods --method FedAvg --aggregate mean krum --attack sign_flip --attackers 3

No method is private here (experiments.comparison compares those that are). Each has its best step size of a grid,
chosen by test accuracy. methods.csv compares them after equal rounds, after equal bits, and by the bits to an accuracy.
"""

from jaxfl.frame import Experiment, Overlay

from .options import COMPARED, Configuration, prepare
from .pictures import finish

EXPERIMENT = Experiment(
    name="methods",
    description="Methods with a server and over a graph on unequal data: accuracy by rounds and by bits.",
    base=Configuration(),
    prepare=prepare,
    grid=({"method": COMPARED}, {"step_size": (0.1, 0.3, 1.0)}),
    datasets={"digits": Overlay(), "other": Overlay({"batch_size": 32, "rounds": 200})},
    derived={
        "num_active": lambda options, names: options["nodes"],
        "evaluate_every": lambda options, names: max(1, options["rounds"] // 20),
    },
    labels={"method": "{}", "step_size": "step {}"},
    finish=finish,
    columns=("test_accuracy", "test_accuracy_worst_node", "train_loss"),
    aliases={
        "num_nodes": "nodes",
        "num_rounds": "rounds",
        "iterations": "rounds",
        "num_mixings": "mixings",
        "share": "kept_share",
    },
)
