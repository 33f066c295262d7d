"""Gradients of every node: mini-batch means, clipped or not, SAGA tables, and differences of losses."""

from jaxfl.gradients.estimator import GradientEstimator, mini_batch
from jaxfl.gradients.saga import SagaDraws, SagaState, saga, table_bytes
from jaxfl.gradients.samplers import Batch, Sampler, fixed, poisson, poisson_capacity, uniform
from jaxfl.gradients.zero_order import zero_order

__all__ = [
    "Batch",
    "GradientEstimator",
    "SagaDraws",
    "SagaState",
    "Sampler",
    "fixed",
    "mini_batch",
    "poisson",
    "poisson_capacity",
    "saga",
    "table_bytes",
    "uniform",
    "zero_order",
]
