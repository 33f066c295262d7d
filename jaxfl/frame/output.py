"""Standard output of a command: an odd character, a full disk or a closed pipe does not end a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Output:
    """A text stream that is given up with one warning when it cannot be written, while the run goes on.

    The results of a run lie in its directory, so that nothing is lost but its messages.

    Attributes:
        is_lost: whether it was given up.
    """

    def __init__(self, stream: Any):
        self._stream, self.is_lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or give up."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Write the buffer, or give up."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Put the null device in the place of the file, since Python flushes to it again at exit."""
        self.is_lost = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
        reason = (error.strerror or str(error)).lower()
        print(f"warning: standard output is lost ({reason}), and nothing more is shown", file=sys.stderr)


@contextlib.contextmanager
def steady_output() -> Iterator[Output]:
    """Standard output and error as a command uses them.

    Guarantees:
        - a character that the terminal cannot show is replaced.
        - an output that cannot be written is a warning, and the run goes on.
        - afterwards standard output is as before, but for what was lost.
    """
    before, error_stream = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        # None where the process was started with standard output closed.
        stream = stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if before is None else before
        stack.enter_context(_never_strict(stream, "replace"))
        stack.enter_context(_never_strict(error_stream, "backslashreplace"))
        output = Output(stream)
        sys.stdout = output
        try:
            yield output
            output.flush()
        finally:
            sys.stdout = before


@contextlib.contextmanager
def _never_strict(stream: Any, errors: str) -> Iterator[None]:
    """Set for a while how the stream treats characters that it cannot encode."""
    if not hasattr(stream, "reconfigure"):
        yield
        return
    was = stream.errors
    stream.reconfigure(errors=errors)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # what was not written is lost, or the stream is closed
            stream.reconfigure(errors=was)
