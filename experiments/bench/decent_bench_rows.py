"""The rounds of `peers` by decent-bench's own loops (decent-bench 0.3, Python 3.13): its DGD and GT-SAGA.

Its agents are objects, and an agent's messages and gradients are NumPy arrays: a round is Python for each agent and
edge. It counts calls and messages, and keeps the last state of a run only here.
"""

import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
from decent_array import interoperability as iop  # pyright: ignore[reportMissingImports]
from decent_bench.agents import Agent  # pyright: ignore[reportMissingImports]
from decent_bench.algorithms import p2p  # pyright: ignore[reportMissingImports]
from decent_bench.costs import LogisticRegressionCost  # pyright: ignore[reportMissingImports]
from decent_bench.networks import P2PNetwork  # pyright: ignore[reportMissingImports]

from experiments.bench.setting import Setting
from jaxfl.core import FederatedData

METHODS = {"gossip": p2p.DGD, "gt_saga": p2p.GT_SAGA}


def calls(setting: Setting, data: FederatedData) -> dict[str, tuple[Callable[[], float], int]]:
    """The row as `torch_rows.calls` gives them; none where decent-bench has no such method."""
    if setting.method not in METHODS:
        return {}
    batch = setting.batch_size if setting.batch_size < setting.samples else "all"
    agents, method = ring(agents_of(data, batch)), METHODS[setting.method](step_size=setting.step_size)

    def call():
        start = time.perf_counter()
        method.run(agents, setting.slow_rounds)
        return time.perf_counter() - start

    call()
    return {"loop": (call, setting.slow_rounds)}


def agents_of(data: FederatedData, batch_size: Any = "all") -> list[Agent]:
    """An agent a node, with the logistic regression of its samples."""
    iop.set_backend("numpy")
    inputs, labels = np.asarray(data.inputs, np.float64), np.asarray(data.labels, np.float64)

    def agent(rows):
        samples = [(iop.from_numpy(inputs[row]), iop.from_numpy(labels[row : row + 1])) for row in rows]
        return Agent(LogisticRegressionCost(samples, batch_size), state_snapshot_period=10**9)

    sizes = np.asarray(data.sizes)
    return [agent(rows[:size]) for rows, size in zip(np.asarray(data.indices), sizes, strict=True)]


def ring(agents: list[Agent]) -> P2PNetwork:
    """A ring of agents, with Metropolis weights."""
    return P2PNetwork(nx.cycle_graph(len(agents)), agents)


def state(agent: Agent) -> np.ndarray:
    """An agent's x, (d,)."""
    return iop.to_numpy(agent.x)
