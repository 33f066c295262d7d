"""Releases of nodes that exchange parameters after clipped, noisy gradient steps: PrivSGP(-VR), DP2-SGD, A(DP)2SGD."""

from jaxfl.privacy.gossip.accountant import C2_OF_THE_PAPER, Accountant, Published
from jaxfl.privacy.gossip.accounting import (
    calibrate_noise_std,
    epsilon,
    max_rounds,
    statements,
)
from jaxfl.privacy.gossip.compared import A_DP2_SGD, DP2_SGD
from jaxfl.privacy.gossip.privsgp import (
    CIFAR10_CONSTANTS,
    PRIVSGP,
    PRIVSGP_VR,
    ProblemConstants,
    optimal_iterations,
    optimal_utility_bound,
    utility_bound,
)
from jaxfl.privacy.gossip.proven import Release, sensitivities

__all__ = [
    "A_DP2_SGD",
    "C2_OF_THE_PAPER",
    "CIFAR10_CONSTANTS",
    "DP2_SGD",
    "PRIVSGP",
    "PRIVSGP_VR",
    "Accountant",
    "ProblemConstants",
    "Published",
    "Release",
    "calibrate_noise_std",
    "epsilon",
    "max_rounds",
    "optimal_iterations",
    "optimal_utility_bound",
    "sensitivities",
    "statements",
    "utility_bound",
]
