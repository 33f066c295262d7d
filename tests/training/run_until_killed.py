"""Child process of test_resume.py: trains the toy problem, and kills itself at a given moment if asked.

    python run_until_killed.py OUT LINES SECONDS

It dies SECONDS after LINES lines have been added to metrics.jsonl; with LINES = 0 it finishes.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from toy_problem import toy_algorithm, toy_task, train_toy

SETTINGS = {"num_rounds": 63, "evaluate_every": 5, "checkpoint_every": 2, "seeds": (0, 1), "chunk_rounds": 3}


def train(out: str | Path) -> dict:
    """The run that is killed and resumed; also called in the test's own process for the uninterrupted one."""
    return train_toy(out, resume=True, variants={"Toy (fast)": toy_algorithm(toy_task())}, **SETTINGS)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _die(path: Path, lines: int, seconds: float) -> None:
    # Counted from the end of what was there, less what a resumed run drops first.
    least = seen = _num_lines(path)
    while seen < least + lines:
        time.sleep(0.001)
        seen = _num_lines(path)
        least = min(least, seen)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    out, lines, seconds = sys.argv[1:]
    if int(lines):
        path = Path(out) / "metrics.jsonl"
        threading.Thread(target=_die, args=(path, int(lines), float(seconds)), daemon=True).start()
    train(out)
