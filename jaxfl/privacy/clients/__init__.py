"""Releases of a server's clients, and their cost in privacy: samples of a client, and whole clients."""

from jaxfl.privacy.clients.accounting import (
    WITHOUT_NOISE,
    ClientRelease,
    calibrate_noise_multiplier,
    epsilon,
    max_iterations,
    statements,
)
from jaxfl.privacy.clients.client_level import (
    UpdateRelease,
    client_level_epsilon,
    client_level_statements,
    client_noise_multiplier,
)
from jaxfl.privacy.clients.local_iterations import (
    ORDERS,
    local_iterations_epsilon,
    renyi_divergences,
)
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon

__all__ = [
    "ORDERS",
    "WITHOUT_NOISE",
    "ClientRelease",
    "SampledReleases",
    "UpdateRelease",
    "calibrate_noise_multiplier",
    "client_level_epsilon",
    "client_level_statements",
    "client_noise_multiplier",
    "epsilon",
    "local_iterations_epsilon",
    "max_iterations",
    "renyi_divergences",
    "sampled_epsilon",
    "statements",
]
