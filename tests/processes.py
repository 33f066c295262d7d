"""Scripts that need a number of devices run in processes of their own, and runs that are interrupted."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
OPTIONS = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(TESTS.parent)}


def printed(script, *arguments, num_devices, seconds=600):
    """What a script of this folder prints last, as JSON, where the CPU has this number of devices."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(num_devices), **OPTIONS}
    command = [sys.executable, str(TESTS / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def interrupt(run, evaluation):
    """Make a run directory interrupt its run behind the lines of an evaluation, counted from 1."""
    append, evaluations = run.append_metrics, itertools.count(1)

    def interrupting(lines):
        append(lines)
        if next(evaluations) == evaluation:
            raise KeyboardInterrupt

    run.append_metrics = interrupting
