"""Run by `tests/training/test_processes.py` in several processes at once: trains in a folder, and prints the lines.

Arguments: port of the first process (0 for a process alone), number of processes, number of this one, folder, what is
shared, and the evaluation behind which all are killed, 0 for none.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax


def main(port, num_processes, index, out, shard, killed_after):
    if num_processes > 1:
        jax.distributed.initialize(f"localhost:{port}", num_processes, index, initialization_timeout=60)
    from over_devices import trained  # looks at devices

    from jaxfl.training import Placement, RunDirectory

    append, evaluations = RunDirectory.append_metrics, iter(range(1, 100))

    def deadly(run, lines):
        append(run, lines)
        if next(evaluations) == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    RunDirectory.append_metrics = deadly
    lines = trained(out, placement=Placement(jax.device_count(), shard), seeds=(0, 1, 2), resume=True)
    if index == 0:
        print(json.dumps(lines))


if __name__ == "__main__":
    port, num_processes, index = map(int, sys.argv[1:4])
    main(port, num_processes, index, Path(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
