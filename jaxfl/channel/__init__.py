"""Costs of a round: what a model counts, and the energy of computing with it."""

from jaxfl.channel.cost import Architecture, Counts, bilstm, capacity, count, dzofl_cnn, femnist_cnn, resnet20
from jaxfl.channel.energy import EnergyModel, ForwardEnergy, Workload, backward_energy, forward_energy, mac_energy

__all__ = [
    "Architecture",
    "Counts",
    "EnergyModel",
    "ForwardEnergy",
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
]
