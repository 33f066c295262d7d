"""Every private method of the engine at the same proven epsilon: which one is best on my data?

    python -m experiments.comparison                                               # digits, two minutes on two cores
    python -m experiments.comparison --target-epsilon 1 3 8 --neighboring-relation replace_one --seeds 0 1 2
    python -m experiments.comparison --dataset patients.csv --label-column ill --site-column hospital
    python -m experiments.comparison --trust everyone pairs sums curator --mixings 1 4    # observers; rounds that mix
    python -m experiments.comparison --method DP-FedAvg --target-epsilon 8         # privacy of whole clients

Data, nodes, graph, rounds, batch and delta are the same for all. Each method's noise is the least that meets the
budget by its proven bound under one neighboring relation, against the observer that comparison.csv names beside it.
Each has its best step size of one grid by its accuracy on samples that validate, a fifth of the training samples. No
epsilon covers that choice: comparison.csv says where the best step lies at an end of the grid. The test samples choose
nothing. All methods are measured after a mixing.
"""

from jaxfl.frame import Experiment, Overlay

from .options import BASELINES, COMPARED, Configuration
from .pictures import finish
from .prepare import prepare

EXPERIMENT = Experiment(
    name="comparison",
    description="Every private method of the engine at the same proven epsilon, each at its best step size.",
    base=Configuration(),
    prepare=prepare,
    grid=({"method": COMPARED}, {"step_size": (0.03, 0.1, 0.3, 1.0, 3.0)}),
    datasets={"digits": Overlay(), "other": Overlay({"nodes": 50, "rounds": 100, "batch_size": 64})},
    derived={"evaluate_every": lambda options, names: max(1, options["rounds"] // 10)},
    labels={"method": "{}", "target_epsilon": "ε = {}", "step_size": "step {}"},
    finish=finish,
    baselines=BASELINES,
    columns=("test_accuracy", "test_accuracy_worst_node", "train_loss"),
    aliases={
        **{"num_nodes": "nodes", "num_rounds": "rounds", "iterations": "rounds", "mixing_matrices": "graph"},
        **{"num_mixings": "mixings", "num_final_mixings": "final_mixings"},
        "table": "model",  # PrivSGP-VR's needs one of jaxfl.models in factored form
    },
)
