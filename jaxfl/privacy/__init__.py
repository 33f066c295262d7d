"""Noise mechanisms."""

from jaxfl.privacy.mechanisms import NoiseMechanism, gaussian, laplace

__all__ = ["NoiseMechanism", "gaussian", "laplace"]
