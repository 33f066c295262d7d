"""What is sent, and costs of a round: quantisers, what a model counts, seconds and joules of computing with it."""

from jaxfl.channel.cost import Architecture, Counts, bilstm, capacity, count, dzofl_cnn, femnist_cnn, resnet20
from jaxfl.channel.device_profile import (
    ONEPLUS_9_PRO,
    ClientWork,
    DeviceProfile,
    RoundSeconds,
    partial_work,
    reduced_work,
    round_seconds,
    training_bytes,
)
from jaxfl.channel.energy import EnergyModel, ForwardEnergy, Workload, backward_energy, forward_energy, mac_energy
from jaxfl.channel.quantize import Quantizer, ternary_quantizer, uniform_quantizer

__all__ = [
    "ONEPLUS_9_PRO",
    "Architecture",
    "ClientWork",
    "Counts",
    "DeviceProfile",
    "EnergyModel",
    "ForwardEnergy",
    "Quantizer",
    "RoundSeconds",
    "Workload",
    "backward_energy",
    "bilstm",
    "capacity",
    "count",
    "dzofl_cnn",
    "femnist_cnn",
    "forward_energy",
    "mac_energy",
    "partial_work",
    "reduced_work",
    "resnet20",
    "round_seconds",
    "ternary_quantizer",
    "training_bytes",
    "uniform_quantizer",
]
