"""Links that messages travel over, quantisers, and costs of a round: operations, seconds, joules, ledgers."""

from jaxfl.channel.cost import BILSTM_COUNTED, DZOFL_COUNTED, Counts, count, total
from jaxfl.channel.ledger import Costs, EnergyModel, Ledger, Work, backward_energy, forward_energy, ledger, node_work
from jaxfl.channel.links import LinkDraws, Links
from jaxfl.channel.quantize import Quantizer, dithered_quantizer, float_quantizer, ternary_quantizer, uniform_quantizer
from jaxfl.channel.wireless import Radio, disc_positions, success_probability

__all__ = ["BILSTM_COUNTED", "DZOFL_COUNTED", "Counts", "LinkDraws", "Links", "count", "total"]
__all__ += ["Costs", "EnergyModel", "Ledger", "Work", "backward_energy", "forward_energy", "ledger", "node_work"]
__all__ += ["Quantizer", "dithered_quantizer", "float_quantizer", "ternary_quantizer", "uniform_quantizer"]
__all__ += ["Radio", "disc_positions", "success_probability"]
