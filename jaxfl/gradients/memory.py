"""The memory preflight: what cannot fit is refused before anything is allocated."""

from __future__ import annotations

import jax
import psutil

from jaxfl.core import ArgumentError
from jaxfl.core.check import bytes_text


def available_bytes() -> int:
    """Bytes that a new array on the default device may take: free device memory, on a CPU the machine's free memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available


def total_bytes() -> int:
    """Bytes of the default device's memory that JAX may take, free or not; on a CPU all of the machine's."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats and "bytes_limit" in stats else psutil.virtual_memory().total


def require_fits(
    argument: str,
    needed: int,
    alternatives: dict[str, int],
    *,
    what: str = "it",
    remedy: str = "Take a smaller model, or fewer nodes.",
) -> None:
    """Refuse what does not fit, naming the alternatives with their size.

    Args:
        argument: name of the argument that asks for the memory.
        needed: bytes it would take.
        alternatives: what to write instead -> bytes it would take; those that fit are named, all if none does.
        what: that which needs the memory.
        remedy: said where there are no alternatives whose size is known.

    Raises:
        ArgumentError: `needed` exceeds `available_bytes()`.
    """
    available = available_bytes()
    if needed <= available:
        return
    fitting = {name: size for name, size in alternatives.items() if size <= available} or alternatives
    choices = "; ".join(f"{name} takes {bytes_text(size)}" for name, size in fitting.items())
    raise ArgumentError(
        argument,
        "must fit in memory",
        f"{what} needs {bytes_text(needed)} and {bytes_text(available)} are free",
        f"Alternatives: {choices}." if choices else remedy,
    )
