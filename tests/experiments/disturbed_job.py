"""The work of jobs; the first of them sends its own process a signal once, in the middle of its rounds.

From outside the signal would come at another round each time, and on a busy machine behind the last one.
"""

import os
import time
from pathlib import Path

from jaxfl.frame import run
from jaxfl.training import Stop

SIGNAL, CHECKS = "JAXFL_TESTS_SIGNAL", 20
_run_pass = run.run_pass  # in whose place the test puts what is below


class Disturbed(Stop):
    """Stop that training checks at the end of each chunk; checked often enough, it sends the signal."""

    checks = 0

    @property
    def requested(self):
        Disturbed.checks += 1
        if Disturbed.checks == CHECKS:
            os.kill(os.getpid(), int(os.environ[SIGNAL]))
            began = time.monotonic()
            while not self._requested:  # which the handler does, in another thread
                assert time.monotonic() - began < 100
                time.sleep(0.01)
        return self._requested


def run_pass(query, path, number, stop):
    """As `jaxfl.frame.run.run_pass`."""
    if number == 0 and not (Path(path) / "passes" / "0" / "metrics.jsonl").exists():
        stop.__class__ = Disturbed
    _run_pass(query, path, number, stop)
