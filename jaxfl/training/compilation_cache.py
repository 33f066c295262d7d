"""Compiled programs kept from run to run, by JAX's persistent compilation cache, in the user's cache folder.

A program that was compiled before is read instead: the same machine code, so the same bits, whether a run is new or
resumed. JAX's own variables are respected: JAX_ENABLE_COMPILATION_CACHE=false keeps nothing, JAX_COMPILATION_CACHE_DIR
names another folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxfl.core.platform import is_cpu

# Reading an entry saves next to nothing below this; most of a run's small programs compile in 0.02 to 0.1 s.
MIN_COMPILE_SECONDS = 0.1
MAX_BYTES = 2 * 10**9  # for one kind of machine; JAX deletes the entries that were used longest ago
# Earlier versions of jaxlib wrote to standard error, for every program that a CPU with AVX-512 read, that it might fail
# (https://github.com/jax-ml/jax/issues/38445).
_READS_QUIETLY_ON_CPU = (0, 10, 2)


@contextlib.contextmanager
def compilation_cache(where: str) -> Iterator[Path | None]:
    """Keep compiled programs within this context: in the user's cache ("default"), in a folder, or not ("off").

    A folder is made if missing. The context gives the folder in use, below the named one, which has one for each kind
    of machine. It gives None where nothing is kept, or where JAX's own variable names another folder.

    Guarantees:
        - a folder that cannot be written brings a warning, and nothing is kept.
        - JAX warns of an entry that it cannot read, and the program is compiled.
        - machines with other processors use folders of their own, because their programs may not run here.
        - JAX's settings are restored afterwards.
    """
    folder = None if where == "off" else _writable_folder(where)
    if folder is None and where != "off":
        yield None
        return
    settings: dict[str, Any] = {"jax_enable_compilation_cache": folder is not None}
    if folder is not None:
        settings["jax_compilation_cache_dir"] = str(folder)
        settings["jax_persistent_cache_min_compile_time_secs"] = MIN_COMPILE_SECONDS
        settings["jax_compilation_cache_max_size"] = MAX_BYTES
        _give_times(folder)
    before = {name: getattr(jax.config, name) for name in settings}
    _set(settings)
    try:
        yield folder
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()  # which otherwise keeps the first folder that it used


def _writable_folder(where: str) -> Path | None:
    """The folder for this kind of machine below the one that is asked for; None if nothing is to be kept there."""
    if where == "default":
        settings: Any = jax.config
        is_set = settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache
        if is_set or (jax.__version_info__ < _READS_QUIETLY_ON_CPU and is_cpu()):
            return None
        base = platformdirs.user_cache_path("jaxfl", appauthor=False) / "compilation"
    else:
        base = Path(where)
    folder = base / _machine()
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
        if os.name == "posix" and (owner.st_uid != os.getuid() or owner.st_mode & 0o022):
            raise OSError(errno.EPERM, "others can write there, and a program read from there is executed")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        remedy = "Name another folder by --compilation-cache, or write --compilation-cache off"
        warnings.warn(f"compiled programs are not kept: {folder}: {reason}. {remedy}.", stacklevel=4)
        return None
    return folder


def _machine() -> str:
    """A name that is the same for machines whose processors run each other's programs.

    XLA compiles for one processor. About a program for another one it only warns that the program may crash.
    """
    kept = ("model name", "flags", "Features", "CPU implementer", "CPU part")  # of x86, and of Arm
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processors = sorted({line for line in lines if line.partition(":")[0].strip() in kept})
    except OSError:
        processors = [platform.processor()]
    return f"{platform.machine()}-{zlib.crc32(chr(10).join(processors).encode()):08x}"


def _give_times(folder: Path) -> None:
    """Write the time of last use beside every entry without one: JAX would keep no further program in this folder.

    Such entries are left by a process that was killed, and by versions before 2026-11-25.
    """
    with contextlib.suppress(OSError):  # another process may delete, too
        for entry in folder.glob("*-cache"):
            time = entry.with_name(f"{entry.name.removesuffix('-cache')}-atime")
            if not time.exists():
                time.write_bytes(entry.stat().st_mtime_ns.to_bytes(8, "little"))
