"""The rounds of `peers` by fluke's own loop (fluke-fl 0.8.1): its `FedAVG`, clients and server, without evaluations.

fluke's clients train for epochs: one has as many samples as a round's steps take, in a new order each round. Its import
fails where torchvision is installed for another build of PyTorch; without torchvision it works.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from fluke import FlukeENV  # pyright: ignore[reportMissingImports]
from fluke.algorithms import PersonalizedFL  # pyright: ignore[reportMissingImports]
from fluke.algorithms.fedavg import FedAVG  # pyright: ignore[reportMissingImports]
from fluke.data import FastDataLoader  # pyright: ignore[reportMissingImports]

from experiments.bench.setting import KEY, Setting
from experiments.bench.torch_rows import as_torch, network
from jaxfl.core import FederatedData, Purpose, PyTree, purpose_key


def calls(setting: Setting, data: FederatedData) -> dict[str, tuple[Callable[[], float], int]]:
    """The row as `torch_rows.calls` gives them; none where fluke's loop does not do the workload."""
    if setting.method != "fed_avg" or len(setting.network.sample_shape) > 1:
        return {}
    params = jax.jit(setting.network.model.init)(purpose_key(KEY, Purpose.INIT))
    one = federation(setting, params, data)

    def call():
        start = time.perf_counter()
        one.run(setting.rounds, setting.active() / setting.num_nodes)
        return time.perf_counter() - start

    call()
    return {"loop": (call, setting.rounds)}


def federation(setting: Setting, params: PyTree, data: FederatedData, method: Any = FedAVG, **options: Any) -> Any:
    """A method of fluke's from `params`, one node's, with options of its clients."""
    inputs, labels = torch.from_numpy(np.array(data.inputs)), torch.from_numpy(np.array(data.labels)).long()
    sizes = {"num_labels": setting.network.num_classes, "batch_size": setting.batch_size}
    used = setting.num_local_steps * setting.batch_size
    firsts = range(0, setting.num_nodes * setting.samples, setting.samples)
    own = [FastDataLoader(*(one[at : at + used] for one in (inputs, labels)), shuffle=True, **sizes) for at in firsts]
    client = {
        "optimizer": {"name": "SGD", "lr": setting.step_size},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
        **{"loss": "CrossEntropyLoss", "local_epochs": 1, "batch_size": setting.batch_size, **options},
    }
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
    splitter = SimpleNamespace(assign=lambda *_: ((own, [None] * setting.num_nodes), None))
    model = network(setting.network.model, as_torch(params))
    if issubclass(method, PersonalizedFL):
        client["model"] = model
    return method(setting.num_nodes, splitter, {"client": client, "server": {"weighted": False}, "model": model})
