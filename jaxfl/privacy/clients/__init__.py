"""What clients of a server release."""

from jaxfl.privacy.clients.local_iterations import (
    ORDERS,
    local_iterations_epsilon,
    max_local_iterations,
    renyi_divergences,
)

__all__ = ["ORDERS", "local_iterations_epsilon", "max_local_iterations", "renyi_divergences"]
