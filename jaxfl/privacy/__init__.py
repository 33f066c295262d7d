"""Noise mechanisms, what they cost (as published and as proven), and an audit of it."""

from jaxfl.privacy.accounting import (
    Release,
    Statement,
    calibrate_noise_std,
    epsilon,
    max_rounds,
    statements,
)
from jaxfl.privacy.mechanisms import NoiseMechanism, gaussian, laplace

__all__ = [
    "NoiseMechanism",
    "Release",
    "Statement",
    "calibrate_noise_std",
    "epsilon",
    "gaussian",
    "laplace",
    "max_rounds",
    "statements",
]
