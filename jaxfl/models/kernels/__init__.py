"""Products of layers in the forms that suit a processor, and norms of per-sample gradients, below all layers."""

from jaxfl.models.kernels import norms, position_sums
from jaxfl.models.kernels.convolution import convolve
from jaxfl.models.kernels.error_windows import suits_in_place
from jaxfl.models.kernels.forms import suits_gpu
from jaxfl.models.kernels.pooling import max_pool
from jaxfl.models.kernels.windows import geometry, patches

__all__ = ["convolve", "geometry", "max_pool", "norms", "patches", "position_sums", "suits_gpu", "suits_in_place"]
