"""Measurements that need a card, in three commands of nine minutes: python -m experiments.bench.card CALL --out DIR.

A call runs boxes (groups of measurements), the most important first. Each box is a process with its own time limit, so
that a box that fails or hangs does not stop the others. Every number is a JSON line of its box. DIR/card_CALL.json is
written again after each number, with the versions of Python and JAX, the card's state when its box began (`nvidia-smi`:
driver, clocks, power) and its XLA_FLAGS. The process of the call does not use the card itself.

| call | boxes |
|---|---|
| 1 | ceilings; push-sum, with command buffers as they are, without, and of loops; forms of the convolution; ResNet-20 |
| 2 | BlazeFL's two cases, and the first in PyTorch; sweeps of 48 and of 480 lanes |
| 3 | tests; rounds of the other systems; noise; 1,024 and 10,000 nodes; killed and resumed |
| 0 | the harness: a box that fails and one that hangs |

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

from experiments.bench.timing import BUFFERS, Number
from jaxfl.core import ArgumentError

SECONDS_A_CALL = 540
MARK = "NUMBER "  # begins a line of a box that is a number
_PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
_STATE = "driver_version,name,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


class Box(NamedTuple):
    """A process that measures one group of numbers."""

    name: str
    seconds: float
    tag: str = ""  # ends the names of its numbers
    xla_flags: str = ""


CALLS = {
    0: (Box("fails", 60), Box("hangs", 20), Box("ceilings", 60, "again")),
    1: (
        Box("ceilings", 60),
        Box("push_sum", 110),
        Box("push_sum", 60, "no_graphs", BUFFERS),
        Box("push_sum", 60, "graphs_of_loops", BUFFERS + "+WHILE,+CONDITIONAL"),
        Box("convolutions", 120),
        Box("resnet20", 110),
    ),
    2: (Box("blazefl_cnn", 120), Box("blazefl_torch", 120), Box("blazefl_resnet18", 150), Box("sweeps", 140)),
    3: (Box("tests", 120), Box("rounds", 130), Box("noise", 40), Box("nodes", 110), Box("resume", 120)),
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


def run_call(call: int, out: Path, *, small: bool) -> list[Number]:
    """Run the boxes of a call; what they print besides numbers goes to DIR/log_CALL.txt."""
    out.mkdir(parents=True, exist_ok=True)
    path, numbers, began = out / f"card_{call}.json", [], time.monotonic()
    versions = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}

    def add(one: Number) -> None:
        numbers.append(one)
        path.with_suffix(".tmp").write_text(json.dumps(numbers, indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)
        text = one.get("error") or f"{one['value']} {one['unit']}"
        print(f"{one['name']}: {text}"[:150], flush=True)

    for box in CALLS[call]:
        limit = min(box.seconds, SECONDS_A_CALL - (time.monotonic() - began))
        flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), box.xla_flags)))
        facts = {"box": box.name, "card": card_state(), "xla_flags": flags, "versions": versions}
        if limit < 15:
            add({"name": box.name, "error": "no time was left", **facts})
            continue
        environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-m", "experiments.bench.card", box.name, *(["--small"] if small else [])]
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
                        one = json.loads(line.removeprefix(MARK))
                        add({**one, "name": "/".join(filter(None, (one["name"], box.tag))), **facts})
                code = process.wait()
                timer.cancel()
        if code:
            why = f"stopped after {limit:.0f} s" if code == -signal.SIGKILL else f"exit code {code}, see {log.name}"
            add({"name": box.name, "error": why, **facts})
    return numbers


def card(call: tyro.conf.Positional[str], *, out: Path | None = None, small: bool = False) -> None:
    """Measure on a card.

    Args:
        call: 1, 2 or 3, each of nine minutes; 0 tries the harness. Or the name of a box, which prints its numbers.
        out: folder of the results.
        small: everything small enough for a CPU.
    """
    if call in NAMES:
        from experiments.bench.card_boxes import BOXES  # makes arrays, and so takes the card: in a box only

        for one in BOXES[call](small):
            print(MARK + json.dumps(one), flush=True)
        return
    if call not in map(str, CALLS):
        remedy = f"Boxes: {', '.join(NAMES)}."
        raise ArgumentError("call", "must be 0, 1, 2, 3 or the name of a box", f"got {call!r}", remedy)
    if out is None:
        raise ArgumentError("--out", "must be given", "got none", "Name a folder for the results.")
    jax.config.update("jax_platforms", "cpu")  # of this process only
    run_call(int(call), out, small=small)


if __name__ == "__main__":
    try:
        tyro.cli(card, description=__doc__)
    except ArgumentError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
