"""The environment of a run: versions, device, revision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax

import jaxfl

# Besides the configuration, these decide the last bits of a run's numbers.
_BITS_DEPEND_ON = (
    "jax",
    "jaxlib",
    "platform",
    "device_kind",
    "platform_version",
    "driver",
    "cudnn",
    "num_processes",
    "vector_instructions",
    "xla_flags",
    "libtpu_flags",
    "x64",
    "matmul_precision",
    "git_revision",
)
# All random numbers depend on these, the last one on Gaussian noise only.
_DRAWS_DEPEND_ON = ("threefry_partitionable", "prng_impl", "noise_generator")
_VECTOR = re.compile(r"avx\w*|fma|f16c|amx\w*|sse4\w*|asimd\w*|sve\w*|bf16")  # of x86 and of ARM
_CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # wheels that JAX's CUDA plugins load
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")  # it changes no bit


def describe_environment() -> dict[str, Any]:
    """Collect library versions, the device, and the git revision of this package (None outside a checkout).

    The versions of a GPU's driver and of cuDNN are None without a GPU, and where the system does not tell them.
    """
    from jax.extend.backend import get_backend  # not at the top: jax.extend takes 0.2 s

    device, settings = jax.devices()[0], cast("Any", jax.config)  # types of its attributes are declared nowhere
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "jaxfl": jaxfl.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "platform": device.platform,
        "device_kind": device.device_kind,
        "platform_version": " ".join(get_backend().platform_version.split()),
        "driver": _driver() if device.platform == "gpu" else None,
        "cudnn": _cudnn() if device.platform == "gpu" else None,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "machine": f"{platform.system()} {platform.machine()}",
        "vector_instructions": _vector_instructions(),
        "xla_flags": " ".join(_DEVICE_COUNT.sub("", os.environ.get("XLA_FLAGS", "")).split()),
        "libtpu_flags": " ".join(os.environ.get("LIBTPU_INIT_ARGS", "").split()),
        "x64": settings.jax_enable_x64,
        "matmul_precision": settings.jax_default_matmul_precision,
        "threefry_partitionable": settings.jax_threefry_partitionable,
        "prng_impl": settings.jax_default_prng_impl,
        "noise_generator": "pairs",  # the default of `jaxfl.gaussian`; absent before it was chosen
        "git_revision": git_revision(Path(__file__).parents[1]),
    }


def warn_of_changes(recorded: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Warn where a run goes on in another environment than it began in.

    Rounds that are computed again may then differ. To whoever saw the first ones they are further releases.
    """
    changed = [name for name in (*_DRAWS_DEPEND_ON, *_BITS_DEPEND_ON) if recorded.get(name) != current[name]]
    if changed:
        pairs = ", ".join(f"{name} {recorded.get(name)} -> {current[name]}" for name in changed)
        what = "all random numbers" if set(changed) & {*_DRAWS_DEPEND_ON} else "the last bits"
        text = f"{path} was begun in another environment ({pairs}): {what} may differ from here on"
        warnings.warn(f"{text}, and rounds that run again count as further releases.", stacklevel=3)


def _driver() -> str | None:
    """Version of NVIDIA's kernel module."""
    try:
        text = _DRIVER.read_text()
    except OSError:
        return None
    numbers = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return numbers and numbers.group()


def _cudnn() -> str | None:
    """Version of the wheel; None where the system's own library is loaded."""
    for name in _CUDNN:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _vector_instructions() -> str:
    """Vector instructions that compilers choose among; the name of the processor where no list is kept."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))), "")
    return " ".join(sorted({flag for flag in flags.split() if _VECTOR.fullmatch(flag)}))


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
