"""Seconds of a command add up."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from toy_problem import toy_case, train_toy

from jaxfl.training.clock import Clock, of_process

PHASES = ("data", "tracing", "compiling", "first_states", "evaluations", "rounds", "saving", "tables")


def test_the_seconds_of_all_phases_add_up_to_the_time_since_the_beginning():
    times = iter([2.0, 3.0, 7.0, 15.0, 31.0, 63.0])
    clock = Clock("data", now=lambda: next(times), began=1.0)
    clock.enter("rounds")  # at 2
    with pytest.raises(KeyError), clock.phase("saving"):  # from 3 to 7
        raise KeyError
    clock.enter("data")  # at 15: a phase that was current before
    assert clock.seconds() == {"data": 17.0, "rounds": 9.0, "saving": 4.0}  # at 31
    assert sum(clock.seconds().values()) == 63.0 - 1.0


def test_training_charges_every_phase(tmp_path):
    ticks = iter(range(10**6))
    summary = train_toy(tmp_path, {"A": toy_case()}, clock=Clock("imports", now=lambda: float(next(ticks))))
    seconds = summary["seconds"]["command"]
    assert tuple(seconds) == ("imports", *PHASES)
    assert min(seconds.values()) >= 1.0
    assert sum(seconds.values()) == next(ticks) - 1
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"]["command"] == seconds


def test_a_clock_of_a_process_begins_with_it():
    code = "import time; time.sleep(0.3); from jaxfl.training.clock import of_process; c = of_process('imports')\n"
    began = time.time()
    text = subprocess.run(
        [sys.executable, "-c", code + "print(c.seconds()['imports'])"], capture_output=True, check=True
    )
    assert time.time() - began + 0.02 > float(text.stdout) > (0.3 if sys.platform == "linux" else -1)
    assert of_process("imports").seconds()["imports"] >= 0


def test_the_seconds_of_a_command_are_those_until_its_summary_is_written(tmp_path):
    words = ["--method", "PrivSGP", "--iterations", "4", "--noise-std", "0.2", "--target-epsilon", "inf", "--quiet"]
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "experiments.privsgp_vr", *words, "--out", str(tmp_path / "run")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    ended = time.time()
    path = tmp_path / "run" / "summary.json"
    seconds = json.loads(path.read_text())["seconds"]["command"]
    assert set(seconds) == {"imports", "options", *PHASES, "pictures"}
    total = sum(seconds.values())
    assert 0.9 * (path.stat().st_mtime - began) < total < ended - began + 0.02  # the system's clock ticks every 10 ms
