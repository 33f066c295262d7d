"""Last words of a process that a compiled program ends: nothing of Python runs after a SIGSEGV but faulthandler."""

from __future__ import annotations

import contextlib
import faulthandler
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CRASH = "crash.txt"
# Nothing is done where nothing comes before the end of the file: the process has ended by itself.
_SCRIPT = """
IFS= read -r first || exit 0
printf "crashed: %s; %s\\n" "$first" "$1" >&2
{ printf "%s\\n" "$first"; cat; } >"$2"
"""
_WORDS = (
    "{file} says where. If a compiled program did this, the same command with --resume and with "
    "JAX_DISABLE_MOST_OPTIMIZATIONS=1 in the environment goes on in other machine code"
)


@contextlib.contextmanager
def last_words(directory: Path) -> Iterator[None]:
    """Leave a sentence on standard error and Python's stack in the run's `crash.txt` where the process crashes.

    A shell that waits for faulthandler's report writes both. Nothing is done where there is no shell.

    Guarantees:
        - the process ends by the same signal as without it.
        - a process that has turned on faulthandler by itself keeps its own report.
    """
    shell = shutil.which("sh")
    if shell is None or faulthandler.is_enabled():
        yield
        return
    file = directory.absolute() / CRASH
    command = [shell, "-c", _SCRIPT, shell, _WORDS.format(file=file), str(file)]
    # In a session of its own, so that an interrupt of the command does not end it first.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as listener:
        assert listener.stdin is not None
        faulthandler.enable(listener.stdin)
        try:
            yield
        finally:
            faulthandler.disable()
