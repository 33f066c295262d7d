"""The memory preflight: arrays that are too large are refused before anything is allocated."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import psutil

from jaxfl.core import ArgumentError
from jaxfl.core.check import bytes_text
from jaxfl.core.platform import is_cpu


def available_bytes() -> int:
    """Bytes that a new array on the default device may take.

    This is the free device memory; on a CPU the least of the machine's free memory and of the rests that the limits of
    this process and of its control groups leave.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return max(0, min([psutil.virtual_memory().available, *_bytes_within_limits(), *left_by_control_groups()]))


def resident_bytes() -> int:
    """Bytes of the default device's memory that this process holds besides arrays: all it holds on a CPU, else 0."""
    return psutil.Process().memory_info().rss if is_cpu() else 0


def _bytes_within_limits() -> list[int]:
    """Compute the bytes that `ulimit -v` and `ulimit -d` leave."""
    if sys.platform == "win32":
        return []
    import resource

    usage = psutil.Process().memory_info()
    limits = ((resource.RLIMIT_AS, usage.vms), (resource.RLIMIT_DATA, getattr(usage, "data", usage.rss)))
    soft = ((resource.getrlimit(limit)[0], size) for limit, size in limits)
    return [most - size for most, size in soft if most != resource.RLIM_INFINITY]


def left_by_control_groups(root: Path = Path("/")) -> list[int]:
    """Compute the bytes that the control groups of this process leave (containers, batch systems), of version 2 and 1.

    The list is empty without limits.

    Args:
        root: of the file system, for tests.
    """
    rest = []
    try:
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    forms = {
        "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for controllers, group in groups:
        if controllers not in forms:
            continue
        mount, most, used, cached = forms[controllers]
        home = Path(group.lstrip("/"))
        for folder in (home, *home.parents):  # limits of the parents hold as well
            try:
                limit, usage = ((root / mount / folder / name).read_text().strip() for name in (most, used))
                pages = dict(line.split() for line in (root / mount / folder / "memory.stat").read_text().splitlines())
            except OSError:  # of another name space, or the root, which has no limit
                continue
            if limit != "max" and int(limit) < psutil.virtual_memory().total:
                rest.append(int(limit) - int(usage) + int(pages.get(cached, 0)))  # caches of files give way
    return rest


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
    """Refuse an array that does not fit, naming the alternatives with their size.

    Args:
        argument: name of the argument that asks for the memory.
        needed: bytes it would take.
        alternatives: what to write instead -> bytes it would take; those that fit are named, all if none does.
        what: name of the thing that needs the memory.
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
