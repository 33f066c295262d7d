"""SIGTERM to a command: the chunk is finished and saved, or, before the first round, nothing is left."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import experiments

ROOT = Path(next(iter(experiments.__path__))).parent
LONG = "--nodes 4 --iterations 40000 --evaluate-every 20000 --batch-size 2 --quiet --method PrivSGP --noise-std 0.1"


def start(options, out, *more):
    command = [sys.executable, "-m", "experiments.privsgp_vr", *options.split(), "--out", str(out), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def holds(condition):
    """False where a folder changes while it is looked through."""
    try:
        return condition()
    except FileNotFoundError:
        return False


def wait_for(child, condition):
    began = time.monotonic()
    while not holds(condition):
        assert child.poll() is None, child.communicate()
        assert time.monotonic() - began < 300
        time.sleep(0.01)


def ended(child):
    """(exit code, standard error) of a child that was told to end."""
    try:
        _, error = child.communicate(timeout=300)
    finally:
        child.kill()
        child.wait()
    return child.returncode, error


@pytest.mark.slow
def test_a_run_that_is_terminated_goes_on_from_the_round_that_it_names(tmp_path):
    """Between two evaluations, which are minutes apart."""
    with start(LONG, tmp_path / "run") as child:
        wait_for(child, (tmp_path / "run" / "passes" / "0" / "metrics.jsonl").exists)
        time.sleep(1)
        child.send_signal(signal.SIGTERM)
        code, error = ended(child)
    assert code == 143, error
    text = "terminated: the same command with --resume goes on from round "
    assert error.startswith(text)
    assert error.count("\n") == 1
    (saved,) = (path for path in (tmp_path / "run").glob("passes/0/checkpoints/[0-9]*") if path.is_dir())
    assert int(saved.name) == int(error.removeprefix(text)) > 0
    assert not (tmp_path / "run" / "summary.json").exists()


def children_seconds():
    """Processor time of the processes that have ended: a busy machine does not lengthen it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "signum", "said"), [(0.05, signal.SIGTERM, "terminated"), (1.5, signal.SIGINT, "interrupted")]
)
def test_before_the_first_round_it_ends_at_once_and_leaves_nothing(tmp_path, seconds, signum, said):
    """While the data are read, while it compiles."""
    before = children_seconds()
    with start(LONG, tmp_path / "run", "--compilation-cache", "off", "--hidden", *["32"] * 12) as child:
        wait_for(child, (tmp_path / "run" / "config.json").exists)
        time.sleep(seconds)
        began = sum(psutil.Process(child.pid).cpu_times()[:2])
        child.send_signal(signum)
        code, error = ended(child)
    assert children_seconds() - before - began < 20
    if "goes on from" in error:
        pytest.skip("it compiled faster than that")
    assert (code, error) == (128 + signum, f"{said}: nothing was kept\n")  # and no word of --resume
    assert not (tmp_path / "run").exists()
