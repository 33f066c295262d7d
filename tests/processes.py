"""Scripts that need a number of devices run in processes of their own, and runs that are interrupted."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

from jaxfl.training.pass_directory import PassDirectory

TESTS = Path(__file__).parent
OPTIONS = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(TESTS.parent)}


def printed(script, *arguments, num_devices, seconds=600):
    """Last line that a script of this folder prints, as JSON, where the CPU has this number of devices."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(num_devices), **OPTIONS}
    # XLA ends a process that reads a program with several collectives of a CPU's devices ("id < num_threads").
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, str(TESTS / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def wrong_as_users_run(cases, seconds=1800):
    """Compute cases of tests/optimized/compute.py with the compiler's full optimization, many in one process.

    Args:
        cases: [(function, *arguments)].
        seconds: that a process may take.

    Returns:
        {case: what is wrong}. A process that dies names the case that it was at; the next process goes on behind it.
    """
    settings = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # of tests/conftest.py
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    environment["PYTHONPATH"] = str(TESTS.parent)
    command, outcomes = [sys.executable, str(TESTS / "optimized" / "compute.py")], []
    while len(outcomes) < len(cases):
        rest = json.dumps(cases[len(outcomes) :])
        done = subprocess.run(
            command, input=rest, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        outcomes += map(json.loads, done.stdout.splitlines())
        if done.returncode != 0:
            outcomes.append(f"the process died: {done.returncode} {done.stderr[-500:]}")
    return {case: wrong for case, wrong in zip(cases, outcomes, strict=True) if wrong is not None}


def free_port():
    """A port of this machine on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def at_once(commands, num_devices=2, seconds=300, meanwhile=None):
    """Python processes that run at once, each with devices of its own: [(exit code, standard output and error)].

    Args:
        commands: what follows `python` for each of them.
        meanwhile: called with them once they have begun.
    """
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(num_devices), **OPTIONS}
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        if meanwhile is not None:
            meanwhile(processes)
        texts = [process.communicate(timeout=seconds)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()


@contextlib.contextmanager
def interrupted(evaluation):
    """Runs are interrupted behind the lines of an evaluation, counted from 1; None interrupts none."""
    append, evaluations = PassDirectory.append, itertools.count(1)

    def interrupting(self, lines):
        append(self, lines)
        if next(evaluations) == evaluation:
            raise KeyboardInterrupt

    with mock.patch.object(PassDirectory, "append", interrupting):
        yield
