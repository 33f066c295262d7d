"""Noise mechanisms, the epsilon that they cost (as published and as proven), and audits of that epsilon."""

from typing import TYPE_CHECKING

from jaxfl.on_use import import_on_use

if TYPE_CHECKING:
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
    from jaxfl.privacy.grid import Grid
    from jaxfl.privacy.grid_noise import grid_gaussian
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

import_on_use(
    __name__,
    {
        "jaxfl.privacy.clients": (
            "ClientRelease UpdateRelease client_level_epsilon client_level_statements client_noise_multiplier "
            "max_iterations"
        ),
        "jaxfl.privacy.gossip": (
            "A_DP2_SGD DP2_SGD PRIVSGP PRIVSGP_VR Accountant Release calibrate_noise_std epsilon max_rounds statements"
        ),
        "jaxfl.privacy.grid": "Grid",
        "jaxfl.privacy.grid_noise": "grid_gaussian",
        "jaxfl.privacy.mechanisms": "NoiseMechanism gaussian laplace",
        "jaxfl.privacy.statements": "Statement",
    },
)
