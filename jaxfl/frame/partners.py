"""One sentence where a partner process has died, in place of a page of C++.

JAX notices the death by the partner's heartbeat, or at once where the partner was process 0. Its own thread then prints
the state of its service and a stack, and aborts the process: Python is not asked (`missed_heartbeat_callback` throws
std::bad_cast where it is a Python function). So a small process of its own reads what this one writes to standard
error, and passes it on but for that. It runs this file, which therefore imports no package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from typing import BinaryIO, NoReturn

HEARTBEAT_SECONDS = 50
"""Seconds of silence after which a process counts as dead: half of JAX's default, so that nobody waits a minute."""
GONE = "stopped: another process is gone"
GOES_ON = "; the same commands with --resume go on from the last checkpoint"
_FATAL = re.compile(rb"F\d{4} .*JAX distributed service")  # the last line before a stack
_TROUBLE = re.compile(rb"[EW]\d{4} .* (coordination_service|preemption_sync)\w*\.cc")  # lines on the way there


def tell_of_partners() -> None:
    """Watch standard error from now on, until this process ends; the end by JAX then has an exit code, 6, and no core.

    Guarantees:
        - the death of a partner is one sentence.
        - everything else reaches standard error.
    """
    reading, writing = os.pipe()
    sys.stderr.flush()
    subprocess.Popen([sys.executable, "-I", "-S", __file__], stdin=reading)
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)
    with contextlib.suppress(AttributeError, OSError):  # where the library has other names
        library = ctypes.CDLL(None)
        library.signal(signal.SIGABRT, library._exit)


def leave(code: int) -> NoReturn:
    """End this process at once: JAX's own end would wait for the partner that is gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def pass_on(source: BinaryIO, target: BinaryIO) -> None:
    """Copy until the end, piece by piece, without what JAX says of a partner's death.

    Args:
        source: file without a buffer.
        target: file without a buffer.
    """
    held, rest, inside = [], b"", False  # inside a line whose beginning was passed on
    while chunk := source.read(2**16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not inside and (_FATAL.match(line) or line.startswith(GONE.encode())):
                target.write(f"{GONE}{GOES_ON}\n".encode() if _FATAL.match(line) else line + b"\n")
                while source.read(2**16):
                    pass
                return
            if held or (not inside and _TROUBLE.match(line)):
                held.append(line + b"\n")
            else:
                target.write(line + b"\n")
            inside = False
        if rest and not held and (inside or rest[:1] not in b"EWFs"):  # a prompt, or a bar of progress
            target.write(rest)
            rest, inside = b"", True
    target.write(b"".join(held) + rest)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the process that writes
        signal.signal(number, signal.SIG_IGN)
    with open(0, "rb", buffering=0) as source, open(2, "wb", buffering=0) as target:
        pass_on(source, target)
