"""Models made of layers, fast with parameters of their own at every node; most have gradients in factored form."""

from jaxfl.models.classification import Model, classification, sequential
from jaxfl.models.cnn import cnn
from jaxfl.models.mlp import mlp
from jaxfl.models.resnet import resnet18

__all__ = ["Model", "classification", "cnn", "mlp", "resnet18", "sequential"]
