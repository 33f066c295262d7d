"""What is sent, and costs of a round: quantisers, what a model counts, and the energy of computing with it."""

from jaxfl.channel.cost import Architecture, Counts, bilstm, capacity, count, dzofl_cnn, femnist_cnn, resnet20
from jaxfl.channel.energy import EnergyModel, ForwardEnergy, Workload, backward_energy, forward_energy, mac_energy
from jaxfl.channel.quantize import Quantizer, ternary_quantizer, uniform_quantizer

__all__ = [
    "Architecture",
    "Counts",
    "EnergyModel",
    "ForwardEnergy",
    "Quantizer",
    "Workload",
    "backward_energy",
    "bilstm",
    "capacity",
    "count",
    "dzofl_cnn",
    "femnist_cnn",
    "forward_energy",
    "mac_energy",
    "resnet20",
    "ternary_quantizer",
    "uniform_quantizer",
]
