"""Child process of test_resume.py: trains lanes of the toy problem, and ends itself at a given moment if asked.

    python run_until_killed.py OUT LINES SECONDS
    python run_until_killed.py OUT LINES SECONDS term
    python run_until_killed.py OUT OPERATION NUMBER
    python run_until_killed.py OUT count 0

It dies SECONDS after LINES lines have been added to the passes, by SIGKILL or by SIGTERM; or by SIGKILL just before
the operation of that number, counted from 1, that changes a file below OUT; with LINES = 0 it finishes. With count it
finishes, too, and prints how many operations of each kind there were, as JSON. Every chunk ends with a checkpoint.
"""

import collections
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import orbax.checkpoint
from run_files import run_bytes
from toy_problem import NUM_NODES, TOY_LEDGER, toy_case, toy_statements, toy_that_counts, train_toy

from jaxfl.training import Stopped, stop_at_sigterm
from jaxfl.training.signals import TERMINATED

SETTINGS = {
    "settings": {"step_size": 0.2},
    "evaluate_every": 5,
    "seeds": (0, 1),
    "chunk_rounds": 3,
    "privacy": toy_statements,
    "released": ("local_iterations",),
    "ledger": TOY_LEDGER,
}


def sweep(num_rounds: int = 63) -> dict:
    """Six lanes of one program: two diverge, two spend their budget, two go on to the end; and a lane by itself.

    Those of the program have statements of the local iterations that they made.
    """
    numbers, half = {"step_size": 0.2, "bad_round": 1e6}, num_rounds // 2
    fast = toy_case(toy_that_counts, numbers=numbers, num_rounds=num_rounds, **SETTINGS)
    budgets = {"gradient_evaluations": (half + 2) * NUM_NODES}
    return {
        "Toy (fast)": fast,
        "Wild": fast._replace(numbers={**numbers, "bad_round": float(half)}),
        "Poor": fast._replace(numbers={**numbers, "step_size": 0.1}, budgets=budgets),
        "Alone": toy_case(seeds=(4,), num_rounds=20),
    }


def train(out: str | Path, cases: dict | None = None, **settings) -> dict:
    """The run that is killed and resumed; also called in the test's own process for the uninterrupted one."""
    return train_toy(out, cases or sweep(), resume=True, checkpoint_every=2, **settings)


def _num_lines(path: Path) -> int:
    return run_bytes(path).count(b"\n")


def _die(path: Path, lines: int, seconds: float, number: int) -> None:
    # Counted from the end of what was there, less what a resumed run drops first.
    least = count = _num_lines(path)
    while count < least + lines:
        time.sleep(0.001)
        count = _num_lines(path)
        least = min(least, count)
    time.sleep(seconds)
    os.kill(os.getpid(), number)


def _watch_operations(out: str, kind: str, number: int) -> collections.Counter[str]:
    """Count what changes files below a directory, and die before the one of that kind and number."""
    counts: collections.Counter[str] = collections.Counter()

    def note(name: str) -> None:
        counts[name] += 1
        if name == kind and counts[name] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple) -> None:
        if not arguments or not str(arguments[0]).startswith(out):
            return
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            note("open")
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            note(event)

    def before(name: str, call):
        def noted(*args, **kwargs):
            note(name)
            return call(*args, **kwargs)

        return noted

    sys.addaudithook(audit)
    os.fsync = before("os.fsync", os.fsync)
    manager = orbax.checkpoint.CheckpointManager
    for name in ("save", "delete"):  # between two of our own operations
        setattr(manager, name, before(f"orbax.{name}", getattr(manager, name)))
    return counts


def _end(path: str, lines: str, seconds: str, number: int) -> None:
    """Come to an end at a moment, or to the end."""
    if int(lines):
        arguments = (Path(path), int(lines), float(seconds), number)
        threading.Thread(target=_die, args=arguments, daemon=True).start()


if __name__ == "__main__":
    out, what, amount, *how = sys.argv[1:]
    if how:
        with stop_at_sigterm(lambda: print("terminated at once")) as stop:
            _end(out, what, amount, signal.SIGTERM)
            try:
                train(out, checkpoint_minutes=None, stop=stop)
            except Stopped as error:
                print(error)
                sys.exit(TERMINATED)
    elif what.isdigit():
        _end(out, what, amount, signal.SIGKILL)
        train(out, checkpoint_minutes=0)
    else:
        counts = _watch_operations(out, what, int(amount))
        train(out, sweep(num_rounds=13), checkpoint_minutes=0)
        if what == "count":
            print(json.dumps(counts))
