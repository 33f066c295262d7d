"""On what a run was made: versions, device, revision."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax


def describe_environment() -> dict[str, Any]:
    """Versions of what computes, the device, and the git revision of this package (None outside a checkout).

    Example:
        >>> describe_environment()["jax"] == jax.__version__
        True
    """
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": jax.device_count(),
        "machine": f"{platform.system()} {platform.machine()}",
        "x64": bool(jax.config.read("jax_enable_x64")),
        "git_revision": git_revision(Path(__file__).parents[1]),
    }


def git_revision(folder: Path) -> str | None:
    """The commit that `folder`, a package, was checked out from, with "-dirty" after local changes; None without."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A package installed below somebody else's checkout is not part of that repository.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")
