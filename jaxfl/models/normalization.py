"""Normalization that looks at one sample at a time, so that every sample keeps a gradient of its own."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.types import Array


def group_norm(inputs: Array, scale: Array, bias: Array, num_groups: int, eps: float = 1e-6) -> Array:
    """Each sample's groups of neighboring channels brought to mean 0 and variance 1, then scaled and shifted.

    Batch normalization mixes the samples of a batch, so a sample's gradient, and with it a bound on one sample's
    influence, does not exist; here statistics run over the positions and channels of one group of one sample.

    Args:
        inputs: (b, height, width, channels), float32.
        scale: (channels,), float32.
        bias: (channels,), float32.
        num_groups: groups of channels / num_groups neighboring channels each.
        eps: added to the variance.

    Returns:
        (b, height, width, channels), float32.

    Raises:
        ArgumentError: `num_groups` below 1 or no divisor of the number of channels.

    Guarantees:
        - equals flax GroupNorm in value and in every gradient.
        - a sample's output does not depend on other samples.
        - accurate where the mean is large against the deviation, unlike the mean of squares less the squared mean.

    Edge cases:
        A group whose numbers are all equal (as where it holds one number) becomes the bias, with gradients that stay
        finite.

    Example:
        >>> image = jnp.array([1.0, 3.0, 10.0, 30.0]).reshape(1, 1, 1, 4)
        >>> group_norm(image, jnp.ones(4), jnp.zeros(4), num_groups=2).round(3).reshape(-1).tolist()
        [-1.0, 1.0, -1.0, 1.0]

    References:
        Wu, He: "Group Normalization", ECCV 2018, arXiv:1803.08494.
    """
    check.at_least(1, num_groups=num_groups)
    batch, height, width, channels = inputs.shape
    if channels % num_groups:
        found = f"got {num_groups} for {channels} channels"
        raise ArgumentError("num_groups", "must divide the number of channels", found, "Choose a divisor.")
    group_size = channels // num_groups

    def group_mean(values):
        """(b, height, width, channels) -> (b, 1, 1, channels), the mean of its group at each channel."""
        # Positions first: sums over all but the innermost axis are vectorized on a CPU, which groups there would undo.
        sums = values.sum(axis=(1, 2)).reshape(batch, num_groups, group_size).sum(axis=2, keepdims=True)
        means = sums / (height * width * group_size)
        return jnp.broadcast_to(means, (batch, num_groups, group_size)).reshape(batch, 1, 1, channels)

    centered = inputs - group_mean(inputs)
    factor = lax.rsqrt(group_mean(centered**2) + eps) * scale[None, None, None, :]
    return centered * factor + bias[None, None, None, :]
