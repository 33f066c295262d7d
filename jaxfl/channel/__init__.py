"""What is sent and over which links, and costs of a round: counts of a model, seconds, joules, ledgers."""

from jaxfl.channel.cost import BILSTM_COUNTED, DZOFL_COUNTED, Counts, capacity, count, total, training_bytes
from jaxfl.channel.device_profile import ONEPLUS_9_PRO, DeviceProfile, RoundSeconds, partial_work, round_seconds
from jaxfl.channel.energy import EnergyModel, backward_energy, forward_energy
from jaxfl.channel.ledger import Ledger, RoundCosts, Work, ledger, output_side_work, whole_model
from jaxfl.channel.links import LinkDraws, Links
from jaxfl.channel.quantize import Quantizer, dithered_quantizer, float_quantizer, ternary_quantizer, uniform_quantizer
from jaxfl.channel.wireless import Radio, airtime_seconds, disc_positions, success_probability, transmit_joules

__all__ = ["BILSTM_COUNTED", "DZOFL_COUNTED", "Counts", "capacity", "count", "total", "training_bytes"]
__all__ += ["ONEPLUS_9_PRO", "DeviceProfile", "RoundSeconds", "partial_work", "round_seconds"]
__all__ += ["EnergyModel", "backward_energy", "forward_energy"]
__all__ += ["Ledger", "RoundCosts", "Work", "ledger", "output_side_work", "whole_model"]
__all__ += ["LinkDraws", "Links"]
__all__ += ["Quantizer", "dithered_quantizer", "float_quantizer", "ternary_quantizer", "uniform_quantizer"]
__all__ += ["Radio", "airtime_seconds", "disc_positions", "success_probability", "transmit_joules"]
