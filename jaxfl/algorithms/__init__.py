"""The algorithms, one file each."""

from typing import TYPE_CHECKING

from jaxfl.on_use import import_on_use

if TYPE_CHECKING:
    from jaxfl.algorithms.a_dp2_sgd import a_dp2_sgd
    from jaxfl.algorithms.ali_dpfl import ali_dpfl
    from jaxfl.algorithms.clients.blocks import first_half, output_side
    from jaxfl.algorithms.clients.bound_constants import private_constants, published_constants
    from jaxfl.algorithms.clients.capacity import capacity, training_bytes
    from jaxfl.algorithms.clients.client_sgd import client_sgd
    from jaxfl.algorithms.clients.local_steps import local_steps
    from jaxfl.algorithms.clients.private_updates import private_updates
    from jaxfl.algorithms.clients.uplink import uplink
    from jaxfl.algorithms.d_psgd import d_psgd, dp2_sgd
    from jaxfl.algorithms.dzofl import decaying_schedules, dzofl
    from jaxfl.algorithms.embracing import embracing, embracing_fl
    from jaxfl.algorithms.export import register_for_export
    from jaxfl.algorithms.fed_avg import fed_avg
    from jaxfl.algorithms.gradient_tracking import gradient_tracking
    from jaxfl.algorithms.output_perturbation import output_perturbation
    from jaxfl.algorithms.partial_averaging import partial_averaging
    from jaxfl.algorithms.perturbed_gossip import perturbed_gossip
    from jaxfl.algorithms.push_sum import debiased_params, push_sum, theory_step_size
    from jaxfl.algorithms.width_reduction import fjord, heterofl, width_reduction

__all__ = [
    "a_dp2_sgd",
    "ali_dpfl",
    "capacity",
    "client_sgd",
    "d_psgd",
    "debiased_params",
    "decaying_schedules",
    "dp2_sgd",
    "dzofl",
    "embracing",
    "embracing_fl",
    "fed_avg",
    "first_half",
    "fjord",
    "gradient_tracking",
    "heterofl",
    "local_steps",
    "output_perturbation",
    "output_side",
    "partial_averaging",
    "perturbed_gossip",
    "private_constants",
    "private_updates",
    "published_constants",
    "push_sum",
    "register_for_export",
    "theory_step_size",
    "training_bytes",
    "uplink",
    "width_reduction",
]

import_on_use(
    __name__,
    {
        "jaxfl.algorithms.a_dp2_sgd": "a_dp2_sgd",
        "jaxfl.algorithms.ali_dpfl": "ali_dpfl",
        "jaxfl.algorithms.clients.blocks": "first_half output_side",
        "jaxfl.algorithms.clients.bound_constants": "private_constants published_constants",
        "jaxfl.algorithms.clients.capacity": "capacity training_bytes",
        "jaxfl.algorithms.clients.client_sgd": "client_sgd",
        "jaxfl.algorithms.clients.local_steps": "local_steps",
        "jaxfl.algorithms.clients.private_updates": "private_updates",
        "jaxfl.algorithms.clients.uplink": "uplink",
        "jaxfl.algorithms.d_psgd": "d_psgd dp2_sgd",
        "jaxfl.algorithms.dzofl": "decaying_schedules dzofl",
        "jaxfl.algorithms.embracing": "embracing embracing_fl",
        "jaxfl.algorithms.export": "register_for_export",
        "jaxfl.algorithms.fed_avg": "fed_avg",
        "jaxfl.algorithms.gradient_tracking": "gradient_tracking",
        "jaxfl.algorithms.output_perturbation": "output_perturbation",
        "jaxfl.algorithms.partial_averaging": "partial_averaging",
        "jaxfl.algorithms.perturbed_gossip": "perturbed_gossip",
        "jaxfl.algorithms.push_sum": "debiased_params push_sum theory_step_size",
        "jaxfl.algorithms.width_reduction": "fjord heterofl width_reduction",
    },
    "clients",
)
