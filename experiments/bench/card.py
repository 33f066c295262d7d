"""Measurements that need a card, in 15 minutes of it: python -m experiments.bench.card CALL --out DIR.

A call runs boxes (groups of measurements), the most important first. Each box is a process with its own time limit, so
that a box that fails or hangs does not stop the others; a box may use what those before it left. Every number is a JSON
line of its box. DIR/card_CALL.json is written again after each number, with the versions of Python and JAX, the card's
state when its box began (`nvidia-smi`: driver, clocks, power) and its XLA_FLAGS. The process of the call does not use
the card itself.

| call | minutes | boxes |
|---|---|---|
| results | 9 | EmbracingFL's case 7 and PrivSGP-VR's figure 4 at full size, two methods each (`card_results`) |
| numbers | 6 | sweeps of 48, 480 and 4,800 lanes; rounds with and without infos; first kernels; tests; ceilings |
| harness | | a box that hangs and one that fails |

`--small` makes every box small enough for a CPU. A box by itself is `python -m experiments.bench.card BOX`.
"""

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tyro

from experiments.bench.card_results import RUNS, result
from experiments.bench.timing import Number
from jaxfl.core import ArgumentError

MARK = "NUMBER "  # begins a line of a box that is a number
_PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
_STATE = "driver_version,name,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


class Box(NamedTuple):
    """A process that measures one group of numbers."""

    name: str
    seconds: float


CALLS = {
    "results": tuple(map(Box, RUNS, (150, 130, 150, 110))),
    "numbers": (
        Box("sweeps", 120),
        Box("rounds", 85),
        Box("convolutions", 55),
        Box("tests", 65),
        Box("ceilings", 35),
    ),
    "harness": (Box("hangs", 20), Box("fails", 60), Box("ceilings", 60)),
}
NAMES = tuple(dict.fromkeys(box.name for boxes in CALLS.values() for box in boxes))


def version(package: str) -> str | None:
    """The version that is installed; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def card_state() -> str | None:
    """State of the card now, as nvidia-smi tells it; None where there is none."""
    try:
        query = ["nvidia-smi", f"--query-gpu={_STATE}", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def run_call(call: str, out: Path, *, small: bool, data_dir: Path | None = None) -> list[Number]:
    """Run the boxes of a call; what they print besides numbers goes to DIR/log_CALL.txt."""
    out.mkdir(parents=True, exist_ok=True)
    path, numbers, ends = out / f"card_{call}.json", [], time.monotonic()
    versions = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}

    def add(one: Number) -> None:
        numbers.append(one)
        path.with_suffix(".tmp").write_text(json.dumps(numbers, indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)
        text = one.get("error") or f"{one['value']} {one['unit']}"
        print(f"{one['name']}: {text}"[:150], flush=True)

    arguments = ["--out", str(out), *([] if data_dir is None else ["--data-dir", str(data_dir)])]
    for box in CALLS[call]:
        ends += box.seconds
        limit = ends - time.monotonic()
        facts = {"box": box.name, "card": card_state(), "xla_flags": os.environ.get("XLA_FLAGS", "")}
        facts["versions"] = versions
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-m", "experiments.bench.card", box.name, *arguments, *(["--small"] * small)]
        with (out / f"log_{call}.txt").open("a", buffering=1) as log:
            log.write(f"\n{box}\n")
            options: dict[str, Any] = {"stderr": log, "text": True, "env": environment, "start_new_session": True}
            with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
                timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))  # with what it has started
                timer.start()
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    if line.startswith(MARK):
                        add({**json.loads(line.removeprefix(MARK)), **facts})
                code = process.wait()
                timer.cancel()
        if code:
            why = f"stopped after {limit:.0f} s" if code == -signal.SIGKILL else f"exit code {code}, see {log.name}"
            add({"name": box.name, "error": why, **facts})
    return numbers


def card(
    call: tyro.conf.Positional[str], *, out: Path | None = None, data_dir: Path | None = None, small: bool = False
) -> None:
    """Measure on a card.

    Args:
        call: results (nine minutes), numbers (six), harness. Or the name of a box, which prints its numbers.
        out: folder of the results. Runs that can be resumed lie in runs/card of the current folder.
        data_dir: folder of CIFAR-10, for results.
        small: everything small enough for a CPU.
    """
    if call not in {*CALLS, *NAMES}:
        remedy = f"Boxes: {', '.join(NAMES)}."
        raise ArgumentError("call", f"must be {', '.join(CALLS)} or the name of a box", f"got {call!r}", remedy)
    if call in {*CALLS, *RUNS}:
        if out is None:
            raise ArgumentError("--out", "must be given", "got none", "Name a folder for the results.")
        if call in CALLS:
            jax.config.update("jax_platforms", "cpu")  # of this process only
            run_call(call, out, small=small, data_dir=data_dir)
            return
        numbers = result(call, out, data_dir, small=small)
    else:
        from experiments.bench.card_boxes import BOXES  # makes arrays, and so takes the card: in a box only

        numbers = BOXES[call](small)
    for one in numbers:
        print(MARK + json.dumps(one), flush=True)


if __name__ == "__main__":
    try:
        tyro.cli(card, description=__doc__)
    except ArgumentError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
