"""JAX engine for decentralised and federated learning under limits of privacy, resources and communication."""

from jaxfl import algorithms, core, data, gradients, graphs, models, privacy
from jaxfl.algorithms import d_psgd, push_sum
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, from_flax, from_functions
from jaxfl.data import federate
from jaxfl.gradients import mini_batch, saga
from jaxfl.privacy import gaussian, laplace

__all__ = [
    "Algorithm",
    "ArgumentError",
    "FederatedData",
    "Task",
    "algorithms",
    "core",
    "d_psgd",
    "data",
    "federate",
    "from_flax",
    "from_functions",
    "gaussian",
    "gradients",
    "graphs",
    "laplace",
    "mini_batch",
    "models",
    "privacy",
    "push_sum",
    "saga",
]
