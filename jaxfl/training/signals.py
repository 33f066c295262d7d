"""Stopping on request. SIGTERM is such a request: batch systems send it before they kill a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

TERMINATED = 128 + int(signal.SIGTERM)  # the exit code that shells give a process that SIGTERM ended


class Stopped(Exception):
    """`train` stopped because it was asked to; the run can be resumed.

    Attributes:
        round_index: of the checkpoint from which the run can go on.
    """

    def __init__(self, round_index: int):
        self.round_index = round_index
        super().__init__(f"stopped on request after round {round_index}")


class Stop:
    """A request that `train` stops, made by a signal or by another thread.

    Guarantees:
        - train finishes the chunk, saves and raises Stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = self._heeded = False
        self.begun = False  # whether there is work to go on from, of this process or of one before it
        self._undo: Callable[[], object] | None = None

    @property
    def requested(self) -> bool:
        """True if a stop was requested."""
        return self._requested

    def request(self) -> None:
        """Request a stop; the rounds that run go on to the end of their chunk."""
        with self._lock:
            self._requested = True

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Enter a context in which `requested` is watched. The action of `undo_until_heeded` is dropped."""
        with self._lock:
            self._heeded, self.begun, self._undo = True, True, None
        try:
            yield
        finally:
            with self._lock:
                self._heeded = False

    def undo_until_heeded(self, undo: Callable[[], object], begun: bool = False) -> None:
        """Register an action that undoes the effects of a process which ends before its work, or an earlier one's, has
        `begun`."""
        with self._lock:
            self._undo, self.begun = undo, begun

    def request_if_heeded(self) -> bool:
        """Request a stop if this is watched and new. Otherwise return False, after the registered action is done."""
        with self._lock:
            if self._heeded and not self._requested:
                self._requested = True
                return True
            if self._undo is not None:
                with contextlib.suppress(OSError):
                    self._undo()
            return False


@contextlib.contextmanager
def stop_at_sigterm(last_words: Callable[[], object]) -> Iterator[Stop]:
    """SIGTERM requests a stop while `train` watches for it. Elsewhere, and a second time, it ends the process at once.

    A thread waits for the signal, so that neither a compilation nor a long chunk holds it up. Nothing is installed
    outside the main thread, or where the process has a handler of its own.

    Args:
        last_words: called before the process ends at once, with exit code 143.

    Returns:
        A context; in it the `Stop` to hand to `train`. After it, the earlier handler of the signal is back.

    Guarantees:
        - the earlier handler is restored.
        - a process with a handler of its own keeps it.
    """
    stop = Stop()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield stop
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(reader, stop, last_words), daemon=True)
    watcher.start()
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # without a handler the signal would not reach the descriptor
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(descriptor)
        writer.shutdown(socket.SHUT_RDWR)  # also for descriptors that forked processes hold
        writer.close()
        watcher.join()
        reader.close()


def _watch(reader: socket.socket, stop: Stop, last_words: Callable[[], object]) -> None:
    """Read the numbers of signals until the other end is closed."""
    while received := reader.recv(1):
        if received[0] == signal.SIGTERM and not stop.request_if_heeded():
            try:
                last_words()
            finally:
                os._exit(TERMINATED)  # without waiting for threads that compile
