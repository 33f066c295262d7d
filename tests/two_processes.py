"""Run by `tests/training/test_processes.py` in two processes at once, or in one: prints its findings as JSON.

Arguments: port of process 0, number of processes, number of this one, folder, and the evaluation behind which all of
them are killed, 0 for none.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax


class Unsent(Exception):
    """One that other processes do not have."""

    def __init__(self, text, *, needed):
        super().__init__(text + needed)


def exchanged(index):
    """Results of calls that one process makes for both."""
    from jaxfl.core import ArgumentError
    from jaxfl.training import processes

    def fails(error):
        raise error

    def outcome(way, call):
        try:
            return way(call)()
        except Exception as error:
            return [type(error).__name__, str(error), processes.of_another_process(error)]

    refused = ArgumentError("out", "must be there", "it is not", "Make it.")
    large = list(range(100_000))  # in many blocks
    return {
        "first": [processes.is_multiprocess(), processes.is_first()],
        "value": processes.on_first(lambda: {"index": index, "nothing": None})(),
        "nothing": processes.on_first(lambda: None)(),
        "nested": processes.on_first(lambda: processes.on_first(lambda: processes.on_all(lambda: index)())())(),
        "large": processes.on_first(lambda: [number + index for number in large])() == large,
        "refused": outcome(processes.on_first, lambda: fails(refused)),
        "unsent": outcome(processes.on_first, lambda: fails(Unsent("a", needed="b"))),
        "no JSON": outcome(processes.on_first, lambda: {1, 2}),
        "missing": outcome(processes.on_first, lambda: Path("/no such file").read_text()),
        "own": processes.on_all(lambda: index)(),
        "on the second": outcome(processes.on_all, lambda: index and fails(refused)),
        "on both": outcome(processes.on_all, lambda: fails(OSError(f"of {index}"))),
        "any": [processes.any_process(index == 1), processes.any_process(False)],
        "least": processes.least(5.0 - index),
    }


def main(port, num_processes, index, out, killed_after):
    if num_processes > 1:
        jax.distributed.initialize(f"localhost:{port}", num_processes, index, initialization_timeout=60)
    from over_devices import trained  # looks at devices

    from jaxfl.training import Placement
    from jaxfl.training.pass_directory import PassDirectory

    append, evaluations = PassDirectory.append, iter(range(1, 100))

    def deadly(run, lines):
        append(run, lines)
        if next(evaluations) == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    mock.patch.object(PassDirectory, "append", deadly).start()
    message: dict[str, Any] = {"exchanged": exchanged(index)} if num_processes > 1 and not killed_after else {}
    for shard in ("nodes", "lanes"):
        placement = Placement(jax.device_count(), shard)
        message[shard] = trained(out / shard, placement=placement, seeds=(0, 1, 2), resume=True)
    try:
        trained(out / "none", seeds=(0,))
    except ValueError as error:
        message["without a placement"] = str(error)
    print(json.dumps(message))


if __name__ == "__main__":
    port, num_processes, index, killed_after = map(int, [*sys.argv[1:4], sys.argv[5]])
    main(port, num_processes, index, Path(sys.argv[4]), killed_after)
