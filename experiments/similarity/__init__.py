"""Similarity of clients' representations, layer by layer, when nothing or a part of their models is averaged.

    python -m experiments.similarity                                         # digits, under a minute
    python -m experiments.similarity --preset fig1_small --data-dir DIR      # CIFAR-10 on a CPU, minutes
    python -m experiments.similarity --preset fig3 --data-dir DIR            # the paper's size

Every client trains a network on its part of the data (Dirichlet over labels). After a round of local steps,
nothing, or a part of all models, is averaged over the clients (`jaxfl.algorithms.partial_averaging`). Between rounds,
chosen layers of all pairs of clients are compared by SVCCA (`jaxfl.analysis.svcca`) on test samples, which no client
trains on. It leaves lines of measurements, summary.json and pictures in the run directory.

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training", figure 1 (left) and figure 3; appendix 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxfl.core.tree import size
from jaxfl.frame import Experiment, Overlay, Prepared, Preset, Row

from ..embracing_fl.prepare import cases_of_clients
from .options import DERIVED, Configuration, check_config
from .pictures import finish

# Conv 1, 3, 7, 15, 19: a block ends behind its second convolution.
_LAYERS = ("stem", "block_1_1", "block_1_3", "block_3_1", "block_3_3")
_PAPER: dict[str, Any] = {
    **{"dataset": "cifar10", "nodes": 128, "rounds": 100, "step_size": 0.4, "evaluate_every": 5},
    **{"layers": _LAYERS, "similarity_batches": 4},
}
_SMALL: dict[str, Any] = {
    **{"dataset": "cifar10", "num_train": 8000, "num_test": 1000, "shrink": 2, "nodes": 12, "model": "resnet8"},
    **{"resnet_widths": (8, 16, 32), "similarity_batch_size": 128},
}
_ALONE, _FIGURE_3 = {"scheme": "nothing"}, ({"scheme": ("output_side", "channels", "input_side")},)
_GPU = "for an accelerator, not measured; tried at reduced size"
PRESETS = {
    "fig1": Preset("CIFAR-10, ResNet-20, 128 independent clients", _GPU, {**_PAPER, **_ALONE}),
    "fig3": Preset("the same with half of the model averaged, by three schemes", _GPU, _PAPER, _FIGURE_3),
    "fig1_small": Preset(
        "8,000 images of 16x16, ResNet-8 of half the channels, 12 independent clients, 1,000 iterations",
        "5 minutes of one core's time, beside other work",
        {**_SMALL, **_ALONE, "rounds": 100, "evaluate_every": 10},
    ),
    "fig3_small": Preset(
        "the same with half of the model averaged, by three schemes, 500 iterations",
        "8 minutes of one core's time, beside other work",
        {**_SMALL, "rounds": 50, "evaluate_every": 5},
        _FIGURE_3,
    ),
}


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows; rows that cannot run are refused."""
    for row in rows.values():
        check_config(row.config)
    config = next(iter(rows.values())).config
    how = config.clients.partition + (f" {config.clients.alpha:g}" if config.clients.partition == "dirichlet" else "")
    line = (
        f"{config.data.dataset}: {len(config.data.load().train_labels)} samples over {config.clients.nodes} clients "
        f"({how}), {config.network.model} of "
        f"{size(jax.eval_shape(config.task().init, jax.random.key(0)))} parameters; "
        f"compared: {' '.join(config.layers())}"
    )
    return Prepared(cases_of_clients(rows, Configuration.algorithm), [line])


EXPERIMENT = Experiment(
    name="similarity",
    description="How alike the layers of clients' models stay (SVCCA) when nothing or a part of them is averaged.",
    base=Configuration(),
    prepare=prepare,
    grid=({"scheme": ("nothing", "output_side", "channels", "input_side")},),
    datasets={
        "digits": Overlay(),
        "imdb": Overlay({"model": "bilstm"}),
        "femnist": Overlay({"model": "femnist_cnn", "partition": "writers"}),
        "other": Overlay({"model": "resnet20"}),
    },
    presets=PRESETS,
    derived=DERIVED,
    labels={"scheme": "{}"},
    aliases={"num_nodes": "nodes", "max_steps": "local_steps", "width": "channel_share"},
    finish=finish,
    baselines={"alone": lambda row: {"scheme": "nothing"}},
    columns=("test_accuracy", "svcca_maximum_*"),
)
