"""Models made of layers whose gradients have a factored form, fast with parameters of their own at every node."""

from jaxfl.models.classification import Model, classification, sequential
from jaxfl.models.cnn import cnn
from jaxfl.models.mlp import mlp

__all__ = ["Model", "classification", "cnn", "mlp", "sequential"]
