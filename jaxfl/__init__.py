"""JAX engine for decentralised and federated learning under limits of privacy, resources and communication."""

from typing import TYPE_CHECKING

from jaxfl.on_use import import_on_use

if TYPE_CHECKING:
    from jaxfl import algorithms, analysis, channel, core, data, frame, gradients, graphs, models, privacy, training
    from jaxfl.algorithms import (
        a_dp2_sgd,
        ali_dpfl,
        client_sgd,
        d_psgd,
        dp2_sgd,
        dzofl,
        embracing,
        embracing_fl,
        fed_avg,
        fjord,
        gradient_tracking,
        heterofl,
        local_steps,
        output_perturbation,
        partial_averaging,
        perturbed_gossip,
        private_constants,
        private_updates,
        published_constants,
        push_sum,
        register_for_export,
        uplink,
        width_reduction,
    )
    from jaxfl.channel.links import links
    from jaxfl.core import Algorithm, ArgumentError, FederatedData, Info, Task, from_flax, from_functions, run_key
    from jaxfl.core.info import check_info
    from jaxfl.data import federate
    from jaxfl.gradients import mini_batch, saga
    from jaxfl.privacy import gaussian, grid_gaussian, laplace

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "ArgumentError",
    "FederatedData",
    "Info",
    "Task",
    "a_dp2_sgd",
    "algorithms",
    "ali_dpfl",
    "analysis",
    "channel",
    "check_info",
    "client_sgd",
    "core",
    "d_psgd",
    "data",
    "dp2_sgd",
    "dzofl",
    "embracing",
    "embracing_fl",
    "fed_avg",
    "federate",
    "fjord",
    "frame",
    "from_flax",
    "from_functions",
    "gaussian",
    "gradient_tracking",
    "gradients",
    "graphs",
    "grid_gaussian",
    "heterofl",
    "laplace",
    "links",
    "local_steps",
    "mini_batch",
    "models",
    "output_perturbation",
    "partial_averaging",
    "perturbed_gossip",
    "privacy",
    "private_constants",
    "private_updates",
    "published_constants",
    "push_sum",
    "register_for_export",
    "run_key",
    "saga",
    "training",
    "uplink",
    "width_reduction",
]

_ALGORITHMS = """
    a_dp2_sgd ali_dpfl client_sgd d_psgd dp2_sgd dzofl embracing embracing_fl fed_avg fjord gradient_tracking heterofl
    local_steps output_perturbation partial_averaging perturbed_gossip private_constants private_updates
    published_constants push_sum register_for_export uplink width_reduction
"""
import_on_use(
    __name__,
    {
        "jaxfl.algorithms": _ALGORITHMS,
        "jaxfl.channel.links": "links",
        "jaxfl.core": "Algorithm ArgumentError FederatedData Info Task from_flax from_functions run_key",
        "jaxfl.core.info": "check_info",
        "jaxfl.data": "federate",
        "jaxfl.gradients": "mini_batch saga",
        "jaxfl.privacy": "gaussian grid_gaussian laplace",
    },
    "algorithms analysis channel core data frame gradients graphs models privacy training",
)
