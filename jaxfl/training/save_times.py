"""When a checkpoint is due beside those that evaluations bring."""

from __future__ import annotations

import math
import time

from jaxfl.training.processes import any_process
from jaxfl.training.signals import Stop


class SaveTimes:
    """The clock that all programs and passes of a run share, and all processes.

    It decides when a state is saved, never what is computed.

    Args:
        minutes: between checkpoints, at least 0, where every chunk ends with one; None leaves them to evaluations.
        stop: where it is requested, a checkpoint is due as well.
    """

    def __init__(self, minutes: float | None, stop: Stop):
        self.stop = stop
        self._seconds = math.inf if minutes is None else 60.0 * minutes
        self._saved = time.monotonic()

    def due(self) -> bool:
        """Whether to save at the end of this chunk: the clock of any process says so."""
        return any_process(time.monotonic() - self._saved >= self._seconds)

    def stops(self) -> bool:
        """Whether to save at the end of this chunk, and to leave: any process was asked to."""
        return any_process(self.stop.requested)

    def saved(self) -> None:
        """A state has just been saved."""
        self._saved = time.monotonic()
