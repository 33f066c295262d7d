"""Clock of a command, which charges every second to the phase that is current."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class Clock:
    """Seconds of the phases of a command; one phase is current at any time.

    Args:
        phase: the first one.
        now: reads the time, in seconds.
        began: the time at which the first phase began; default: now.

    Guarantees:
        - the seconds of all phases add up to the time since the beginning.

    Examples:
        >>> times = iter([0.0, 1.0, 4.0, 6.0, 7.0])
        >>> clock = Clock("data", now=lambda: next(times))
        >>> with clock.phase("saving"):  # from 1 to 4
        ...     pass
        >>> clock.enter("tables")
        >>> clock.seconds()
        {'data': 3.0, 'saving': 3.0, 'tables': 1.0}
    """

    def __init__(self, phase: str, *, now: Callable[[], float] = time.perf_counter, began: float | None = None):
        self._now, self._current = now, phase
        self._since = now() if began is None else began
        self._seconds: dict[str, float] = {}
        self._earlier: dict[str, float] | None = None

    def enter(self, phase: str) -> None:
        """End the current phase, and begin another one, or the same one again."""
        now = self._now()
        self._seconds[self._current] = self._seconds.get(self._current, 0.0) + now - self._since
        self._current, self._since = phase, now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Make a phase current inside the context; then the one before it goes on."""
        before = self._current
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def repeat(self, seconds: dict[str, float] | None) -> None:
        """Tell the seconds of an earlier command, to whose run this one adds no round."""
        self._earlier = seconds

    def seconds(self) -> dict[str, float]:
        """Phase -> its seconds up to now, in the order in which phases first ended."""
        if self._earlier is not None:
            return dict(self._earlier)
        self.enter(self._current)
        return dict(self._seconds)


def of_process(phase: str) -> Clock:
    """A clock that began with this process; where the system does not say when that was (no Linux), it begins now."""
    now = time.perf_counter()
    with contextlib.suppress(OSError, AttributeError):
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(words[19]) / os.sysconf("SC_CLK_TCK")  # field 22, in ticks since the system booted
        return Clock(phase, began=now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started))
    return Clock(phase, began=now)
