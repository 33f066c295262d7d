"""Models made of layers, fast with own parameters at every node; most give gradients as factors (`layers`)."""

from jaxfl.models.classification import Model, binary_classification, classification, sequential
from jaxfl.models.networks import cnn, dzofl_cnn, lenet, mlp
from jaxfl.models.resnet import resnet18, resnet20
from jaxfl.models.text import bilstm_classifier

__all__ = [
    "Model",
    "bilstm_classifier",
    "binary_classification",
    "classification",
    "cnn",
    "dzofl_cnn",
    "lenet",
    "mlp",
    "resnet18",
    "resnet20",
    "sequential",
]
