"""JAX engine for decentralised and federated learning under limits of privacy, resources and communication."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxfl import algorithms, channel, core, data, gradients, graphs, models, privacy
from jaxfl.algorithms import *  # noqa: F403  # a new algorithm is listed in one place
from jaxfl.channel.links import links
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, from_flax, from_functions, run_key
from jaxfl.core.counts import check_info
from jaxfl.data import federate
from jaxfl.gradients import mini_batch, saga
from jaxfl.privacy import gaussian, grid_gaussian, laplace

if TYPE_CHECKING:
    from jaxfl import analysis, training

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "ArgumentError",
    "FederatedData",
    "Task",
    "algorithms",
    "analysis",
    "channel",
    "check_info",
    "core",
    "data",
    "federate",
    "from_flax",
    "from_functions",
    "gaussian",
    "gradients",
    "graphs",
    "grid_gaussian",
    "laplace",
    "links",
    "mini_batch",
    "models",
    "privacy",
    "run_key",
    "saga",
    "training",
]
__all__ += algorithms.__all__


def __getattr__(name: str) -> Any:
    """`analysis` and `training` on first use: they load matplotlib and orbax, which a round function does not need."""
    if name in ("analysis", "training"):
        return importlib.import_module(f"jaxfl.{name}")
    raise AttributeError(f"module 'jaxfl' has no attribute {name!r}")
