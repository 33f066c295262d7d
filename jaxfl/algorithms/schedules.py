"""Checks and values of a `TrackingSchedule` for gradient tracking and the methods that it is compared with."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, check
from jaxfl.privacy import NoiseMechanism, gaussian, laplace
from jaxfl.privacy.mechanisms import require_float_noise, require_own_noise

_NOISE = {"laplace": (laplace, 1), "gaussian": (gaussian, 2)}  # mechanism, and the norm its privacy is measured in


def noise_of(distribution: str) -> tuple[NoiseMechanism, int]:
    """The mechanism of scale 1, and the norm that its privacy is measured in: 1 or 2."""
    missing = "how far one sample moves all later messages when each is rounded to a grid of its own step"
    require_float_noise(missing, distribution=distribution)
    require_own_noise("the bound of this method is for independent noise", distribution=distribution)
    check.one_of(tuple(_NOISE), distribution=distribution)
    mechanism, clip_order = _NOISE[distribution]
    return mechanism(1.0), clip_order


def check_steps(**steps: float | Array | Callable[[Array], Array]) -> None:
    """Refuse step sizes and mixing weights that are not single positive numbers."""
    check.scalar(**steps)
    check.positive(**steps)


def check_noise_scales(num_nodes: int, **noise_scales: np.ndarray | Array) -> None:
    """Refuse negative noise scales, and shapes other than (K + 1,) and (n, K + 1), one K for all."""
    check.non_negative(**noise_scales)
    shapes = {name: np.shape(value) for name, value in noise_scales.items()}
    length = next(iter(shapes.values()))[-1:]
    for name, shape in shapes.items():
        if not shape or shape[-1:] != length or shape[:-1] not in ((), (num_nodes,)):
            requirement = f"must hold K + 1 numbers, or K + 1 for each of {num_nodes} nodes"
            found = f"got shapes {' and '.join(map(str, shapes.values()))}"
            raise ArgumentError(name, requirement, found, "Make the schedule by jaxfl.privacy.tracking.")


def scale_at(noise_scale: np.ndarray | Array, k: int | Array) -> Array:
    """The noise scale of iteration k, () or (n,), float32; NaN after the last one.

    Examples:
        >>> [float(scale_at(np.array([1.0, 2.0]), k)) for k in (1, 2)]
        [2.0, nan]
    """
    return jnp.asarray(noise_scale, jnp.float32).at[..., k].get(mode="fill", fill_value=jnp.nan)
