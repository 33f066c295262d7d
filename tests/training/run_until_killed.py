"""Child process of test_resume.py: trains lanes of the toy problem, and kills itself at a given moment if asked.

    python run_until_killed.py OUT LINES SECONDS

It dies SECONDS after LINES lines have been added to metrics.jsonl; with LINES = 0 it finishes.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from toy_problem import NUM_NODES, TOY_LEDGER, toy_statements, toy_that_counts, toy_variant, train_toy

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
    fast = toy_variant(toy_that_counts, numbers=numbers, num_rounds=num_rounds, **SETTINGS)
    budgets = {"gradient_evaluations": (half + 2) * NUM_NODES}
    return {
        "Toy (fast)": fast,
        "Wild": fast._replace(numbers={**numbers, "bad_round": float(half)}),
        "Poor": fast._replace(numbers={**numbers, "step_size": 0.1}, budgets=budgets),
        "Alone": toy_variant(seeds=(4,), num_rounds=20),
    }


def train(out: str | Path) -> dict:
    """The run that is killed and resumed; also called in the test's own process for the uninterrupted one."""
    return train_toy(out, sweep(), resume=True, checkpoint_every=2)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _die(path: Path, lines: int, seconds: float) -> None:
    # Counted from the end of what was there, less what a resumed run drops first.
    least = count = _num_lines(path)
    while count < least + lines:
        time.sleep(0.001)
        count = _num_lines(path)
        least = min(least, count)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    out, lines, seconds = sys.argv[1:]
    if int(lines):
        path = Path(out) / "metrics.jsonl"
        threading.Thread(target=_die, args=(path, int(lines), float(seconds)), daemon=True).start()
    train(out)
