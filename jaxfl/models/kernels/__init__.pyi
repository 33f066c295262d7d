from jaxfl.models.kernels import norms as norms
from jaxfl.models.kernels import position_sums as position_sums
from jaxfl.models.kernels.convolution import convolve as convolve
from jaxfl.models.kernels.error_windows import suits_in_place as suits_in_place
from jaxfl.models.kernels.forms import suits_gpu as suits_gpu
from jaxfl.models.kernels.pooling import max_pool as max_pool
from jaxfl.models.kernels.windows import geometry as geometry
from jaxfl.models.kernels.windows import patches as patches
