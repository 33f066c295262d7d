"""Privacy of agents in gradient tracking with noise, and in the methods that it is compared with."""

from typing import TYPE_CHECKING

from jaxfl.on_use import import_on_use

if TYPE_CHECKING:
    from jaxfl.privacy.tracking.joint_bound import joint_shift
    from jaxfl.privacy.tracking.laplace_at_delta import laplace_epsilon_at_delta
    from jaxfl.privacy.tracking.perturbed_states import (
        cumulative_delta_curve,
        exhausted_at,
        output_sensitivities,
        perturbed_state_sensitivities,
        quantization_deltas,
        states_only,
    )
    from jaxfl.privacy.tracking.runs import NO_BOUND, TrackingRelease, least_noise
    from jaxfl.privacy.tracking.schedules import (
        SCHEMES,
        TrackingSchedule,
        exponential_budget,
        exponential_budget_turning_point,
        exponential_schedule,
        paper_schedule,
        polynomial_budget,
        polynomial_budget_turning_point,
        polynomial_schedule,
    )
    from jaxfl.privacy.tracking.sensitivities import (
        Sensitivities,
        TrackingAgent,
        cumulative_epsilon,
        cumulative_epsilon_curve,
        gaussian_shift,
        impulse_responses,
        participation_epsilon,
        proven_sensitivities,
        published_sensitivities,
        shifted_epsilon,
    )
    from jaxfl.privacy.tracking.statements import (
        gradient_tracking_statements,
        output_perturbation_statements,
        perturbed_state_statements,
        quantization_statements,
    )

__all__ = [
    "NO_BOUND",
    "SCHEMES",
    "Sensitivities",
    "TrackingAgent",
    "TrackingRelease",
    "TrackingSchedule",
    "cumulative_delta_curve",
    "cumulative_epsilon",
    "cumulative_epsilon_curve",
    "exhausted_at",
    "exponential_budget",
    "exponential_budget_turning_point",
    "exponential_schedule",
    "gaussian_shift",
    "gradient_tracking_statements",
    "impulse_responses",
    "joint_shift",
    "laplace_epsilon_at_delta",
    "least_noise",
    "output_perturbation_statements",
    "output_sensitivities",
    "paper_schedule",
    "participation_epsilon",
    "perturbed_state_sensitivities",
    "perturbed_state_statements",
    "polynomial_budget",
    "polynomial_budget_turning_point",
    "polynomial_schedule",
    "proven_sensitivities",
    "published_sensitivities",
    "quantization_deltas",
    "quantization_statements",
    "shifted_epsilon",
    "states_only",
]

import_on_use(
    __name__,
    {
        "jaxfl.privacy.tracking.joint_bound": "joint_shift",
        "jaxfl.privacy.tracking.laplace_at_delta": "laplace_epsilon_at_delta",
        "jaxfl.privacy.tracking.perturbed_states": (
            "cumulative_delta_curve exhausted_at output_sensitivities perturbed_state_sensitivities "
            "quantization_deltas states_only"
        ),
        "jaxfl.privacy.tracking.runs": "NO_BOUND TrackingRelease least_noise",
        "jaxfl.privacy.tracking.schedules": (
            "SCHEMES TrackingSchedule exponential_budget exponential_budget_turning_point exponential_schedule "
            "paper_schedule polynomial_budget polynomial_budget_turning_point polynomial_schedule"
        ),
        "jaxfl.privacy.tracking.sensitivities": (
            "Sensitivities TrackingAgent cumulative_epsilon cumulative_epsilon_curve gaussian_shift "
            "impulse_responses participation_epsilon proven_sensitivities published_sensitivities shifted_epsilon"
        ),
        "jaxfl.privacy.tracking.statements": (
            "gradient_tracking_statements output_perturbation_statements "
            "perturbed_state_statements quantization_statements"
        ),
    },
)
