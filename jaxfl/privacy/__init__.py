"""Noise mechanisms, what they cost (as published and as proven), and an audit of it."""

from jaxfl.privacy.clients import (
    ClientRelease,
    UpdateRelease,
    client_level_epsilon,
    client_level_statements,
    client_noise_multiplier,
    max_iterations,
)
from jaxfl.privacy.gossip import (
    A_DP2_SGD,
    DP2_SGD,
    PRIVSGP,
    PRIVSGP_VR,
    Accountant,
    Release,
    calibrate_noise_std,
    epsilon,
    max_rounds,
    statements,
)
from jaxfl.privacy.grid_noise import Grid, grid_gaussian
from jaxfl.privacy.mechanisms import NoiseMechanism, gaussian, laplace
from jaxfl.privacy.statements import Statement

__all__ = [
    "A_DP2_SGD",
    "DP2_SGD",
    "PRIVSGP",
    "PRIVSGP_VR",
    "Accountant",
    "ClientRelease",
    "Grid",
    "NoiseMechanism",
    "Release",
    "Statement",
    "UpdateRelease",
    "calibrate_noise_std",
    "client_level_epsilon",
    "client_level_statements",
    "client_noise_multiplier",
    "epsilon",
    "gaussian",
    "grid_gaussian",
    "laplace",
    "max_iterations",
    "max_rounds",
    "statements",
]
