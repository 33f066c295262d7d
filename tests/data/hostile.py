"""Files that were made to harm: what bounds the reading of them, and archives written by hand."""

from __future__ import annotations

import contextlib
import signal
import tarfile
import tracemalloc
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def peak_of(num_bytes: int) -> Iterator[None]:
    """Fails when more memory than this is held at any time inside."""
    tracemalloc.start()
    try:
        yield
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held <= num_bytes, f"{held:,} bytes were held"


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails when what is inside takes longer; a pipe that is waited for is left, too."""

    def late(signum, frame):
        pytest.fail(f"not at its end after {seconds} s")  # which no reader takes for an error of its file

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def member(name: str, content: bytes = b"good", *, size: int | None = None, kind: bytes = tarfile.REGTYPE) -> bytes:
    """One member of an archive: its header, which may tell any size, and its content."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(content) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)
