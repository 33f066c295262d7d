"""The algorithms, one file each, and their registry."""

from jaxfl.algorithms.gossip import d_psgd
from jaxfl.algorithms.push_sum import debiased_params, push_sum, theory_step_size
from jaxfl.algorithms.registry import REGISTRY, Row

__all__ = ["REGISTRY", "Row", "d_psgd", "debiased_params", "push_sum", "theory_step_size"]
