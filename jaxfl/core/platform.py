"""The platform that programs are traced for; code that depends on the platform asks here.

Some work has a form that is fast on a CPU and another that is fast on accelerators. `platform()` decides which is
traced. It is the platform of JAX's default device, unless `tracing_for` says otherwise: a round that is exported for an
accelerator on a machine without one carries the accelerator's form.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

from jaxfl.core import check

PLATFORMS = ("cpu", "gpu", "tpu")

# A user context is part of JAX's cache keys: no function that was traced for one platform serves for another.
_traced_for = jax.make_user_context(None)


def platform() -> str:
    """The platform that programs are traced for: "cpu", "gpu", "tpu", or the name of another backend of JAX.

    Examples:
        >>> with tracing_for("gpu"):
        ...     platform()
        'gpu'
    """
    return _traced_for.value or _default_platform()


def is_cpu() -> bool:
    """True where programs are traced for a CPU."""
    return platform() == "cpu"


def tracing_for(platform: str) -> AbstractContextManager[None]:
    """A context in which programs are traced for a platform that this machine need not have.

    Tasks choose how they run over nodes when they are built: build them inside, too. Programs traced inside run on
    every platform, with the same numbers to rounding.

    Args:
        platform: "cpu", "gpu" or "tpu".

    Raises:
        ArgumentError: an unknown name.

    Guarantees:
        - a function that was traced for another platform is traced anew.

    Examples:
        >>> with tracing_for("tpu"):
        ...     is_cpu()
        False
    """
    check.one_of(PLATFORMS, platform=platform)
    return _traced_for(platform)


def _default_platform() -> str:
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform
