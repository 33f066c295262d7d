"""Methods that people know, with a server and over a graph, on unequal data: which one learns, for how many bits?

    python -m experiments.methods                               # digits: 24 programs, twelve minutes on two busy cores
    python -m experiments.methods --method FedAvg SCAFFOLD ED --seeds 0 1 2 --step-size 0.1 0.3
    python -m experiments.methods --method FedAvg --aggregate mean krum --attack sign_flip --attackers 3
    python -m experiments.methods --method FedAvg APFL FedPer alone --own-test 0.2        # models of clients
    python -m experiments.methods --method FedAvg --feedback error_feedback ef21 --kept-share 0.1
    python -m experiments.methods --method FedAvg --num-active 4 --selection uniform by_size by_loss
    python -m experiments.methods --method D-PSGD SGP --sleep random --awake-rate 0.5 0.8

No method is private here (experiments.comparison compares those that are). Each has its best step size of a grid,
chosen by test accuracy, or with --own-test by the mean accuracy of nodes on test samples of their own. methods.csv
compares them after equal rounds, after equal bits, and by the bits to an accuracy.
"""

from jaxfl.frame import Experiment, Overlay

from .choices import COMPARED
from .options import Configuration, prepare
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
        "num_candidates": lambda options, names: options["nodes"],
        "evaluate_every": lambda options, names: max(1, options["rounds"] // 20),
    },
    labels={"method": "{}", "step_size": "step {}"},
    finish=finish,
    columns=("test_accuracy", "test_accuracy_worst_node", "own_accuracy", "own_accuracy_worst_node", "train_loss"),
    aliases={
        "num_nodes": "nodes",
        "num_rounds": "rounds",
        "iterations": "rounds",
        "num_mixings": "mixings",
        "share": "kept_share",
        "rate": "awake_rate",
        "period": "sleep_period",
    },
)
