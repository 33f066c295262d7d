"""One process at a time in a run directory."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from jaxfl.core import ArgumentError
from jaxfl.training.processes import is_first, on_first

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None

LOCK = "lock"

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # what such file systems answer


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a run directory while something is written to it; the operating system lets go when the process dies.

    The lock is `flock`'s, on the file `lock`, which holds the number of the process and is removed at the end. It keeps
    out processes of the same machine and, where the file system passes locks on, those of others. Where there are no
    locks, a warning says so.

    Args:
        directory: made if missing. Where several processes train together, process 0 holds it for all of them.

    Raises:
        ArgumentError: another process holds it, or another part of this one.

    Guarantees:
        - of two processes in a run directory the second is refused, and changes nothing.
        - a process that was killed keeps nobody out.
    """
    descriptor = on_first(_locked)(directory / LOCK)
    try:
        yield
    finally:
        if descriptor is not None and is_first():
            (directory / LOCK).unlink(missing_ok=True)  # before the lock is let go: nobody else's file is removed
            os.close(descriptor)


def _locked(path: Path) -> int | None:
    """The descriptor that holds the lock; None where there are no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while fcntl is not None:
        if path.is_symlink():
            raise ArgumentError("out", f"{path} must be a file", "it is a link", "Remove it.")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
            os.close(descriptor)  # its holder removed the file meanwhile
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "another one"
            os.close(descriptor)
            found, remedy = f"process {holder} is at work there", "Wait until it ends, or name another directory."
            raise ArgumentError("out", f"{path.parent} must be used by one process at a time", found, remedy) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _WITHOUT_LOCKS:
                raise
            text = f"{path.parent} cannot be locked ({error.strerror}): take care that no second process resumes it"
            warnings.warn(text, stacklevel=4)
            path.unlink(missing_ok=True)
            return None
    return None
