"""JAX engine for decentralised and federated learning under limits of privacy, resources and communication."""

from jaxfl import algorithms, channel, core, data, gradients, graphs, models, privacy
from jaxfl.algorithms import (
    a_dp2_sgd,
    d_psgd,
    dp2_sgd,
    embracing,
    fed_avg,
    gradient_tracking,
    push_sum,
    width_reduction,
)
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, from_flax, from_functions
from jaxfl.data import federate
from jaxfl.gradients import mini_batch, saga
from jaxfl.privacy import gaussian, laplace

__all__ = [
    "Algorithm",
    "ArgumentError",
    "FederatedData",
    "Task",
    "a_dp2_sgd",
    "algorithms",
    "channel",
    "core",
    "d_psgd",
    "data",
    "dp2_sgd",
    "embracing",
    "fed_avg",
    "federate",
    "from_flax",
    "from_functions",
    "gaussian",
    "gradient_tracking",
    "gradients",
    "graphs",
    "laplace",
    "mini_batch",
    "models",
    "privacy",
    "push_sum",
    "saga",
    "width_reduction",
]
