"""What is sent and over which links, and costs of a round: what a model counts, seconds and joules of computing."""

from jaxfl.channel.cost import BILSTM_COUNTED, DZOFL_COUNTED, Counts, capacity, count, total
from jaxfl.channel.device_profile import (
    ONEPLUS_9_PRO,
    ClientWork,
    DeviceProfile,
    RoundSeconds,
    partial_work,
    round_seconds,
    training_bytes,
)
from jaxfl.channel.energy import EnergyModel, ForwardEnergy, Workload, backward_energy, forward_energy, mac_energy
from jaxfl.channel.links import LinkDraws, Links
from jaxfl.channel.quantize import (
    Quantizer,
    dithered_quantizer,
    float_quantizer,
    ternary_quantizer,
    uniform_quantizer,
)

__all__ = [
    "BILSTM_COUNTED",
    "DZOFL_COUNTED",
    "ONEPLUS_9_PRO",
    "ClientWork",
    "Counts",
    "DeviceProfile",
    "EnergyModel",
    "ForwardEnergy",
    "LinkDraws",
    "Links",
    "Quantizer",
    "RoundSeconds",
    "Workload",
    "backward_energy",
    "capacity",
    "count",
    "dithered_quantizer",
    "float_quantizer",
    "forward_energy",
    "mac_energy",
    "partial_work",
    "round_seconds",
    "ternary_quantizer",
    "total",
    "training_bytes",
    "uniform_quantizer",
]
