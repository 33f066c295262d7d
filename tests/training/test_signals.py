"""Stopping on request, and SIGTERM: the chunk is finished, the state saved, and resumed equals uninterrupted."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from run_files import run_bytes
from run_until_killed import sweep
from toy_problem import toy_case, toy_with_numbers, train_toy

from jaxfl.training import Stop, Stopped, open_run, stop_at_sigterm
from jaxfl.training.lockstep import Lockstep
from jaxfl.training.progress import ProgressReport


@pytest.fixture(scope="module", params=["one lane", "a sweep"])
def whole(request, tmp_path_factory):
    """(lines, cases, rounds of each chunk) of an uninterrupted run."""
    cases = {"A": toy_case(seeds=(0,), chunk_rounds=4)} if request.param == "one lane" else sweep(num_rounds=13)
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        ran = _count_chunks(patch)
        train_toy(out, cases)
    return run_bytes(out), cases, ran


def _count_chunks(patch, stop: Stop | None = None, last=0):
    """Rounds of each chunk that runs from now on; while the last one runs, somebody asks to stop."""
    ran, dispatch = [], Lockstep._dispatch

    def counting(self):
        chunk = dispatch(self)
        ran.append(chunk.num_rounds)
        if stop is not None and len(ran) == last:
            stop.request()
        return chunk

    patch.setattr(Lockstep, "_dispatch", counting)
    return ran


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6])
@pytest.mark.quick_cases(4)
def test_train_finishes_the_chunk_saves_and_raises_stopped(whole, tmp_path, monkeypatch, chunks):
    """Also between two evaluations; and the resumed run has the same chunks and lines."""
    expected, cases, all_chunks = whole
    stop = Stop()
    with monkeypatch.context() as patch:
        ran = _count_chunks(patch, stop, chunks)
        with pytest.raises(Stopped) as caught:
            train_toy(tmp_path, cases, stop=stop, checkpoint_every=100, checkpoint_minutes=None)
    assert ran == all_chunks[:chunks]
    assert run_bytes(tmp_path) != expected
    assert list(tmp_path.glob(f"passes/*/checkpoints/{caught.value.round_index}"))
    with monkeypatch.context() as patch:
        ran = _count_chunks(patch)
        train_toy(tmp_path, cases, resume=True, stop=Stop())
    assert ran == all_chunks[chunks:]
    assert run_bytes(tmp_path) == expected


def test_a_lane_that_diverged_leaves_the_others_chunks_as_they_are(tmp_path):
    """It would have ended in a round of its own, in which a run that went through begins a chunk."""
    numbers = {"step_size": 0.2, "bad_round": 1e6}
    settings = {"numbers": numbers, "num_rounds": 10, "evaluate_every": 5, "chunk_rounds": 3, "seeds": (0,)}
    good = toy_case(toy_with_numbers, **settings)
    cases = {"Good": good, "Bad": good._replace(numbers={**numbers, "bad_round": 1.0}, max_rounds=4)}
    stop = Stop()
    with pytest.MonkeyPatch.context() as patch:
        ran = _count_chunks(patch, stop, 1)
        with pytest.raises(Stopped):
            train_toy(tmp_path, cases, stop=stop)
        train_toy(tmp_path, cases, resume=True)
    assert ran == [3, 1, 1, 3, 2]


def test_a_stop_that_is_asked_for_in_the_last_chunk_loses_nothing(whole, tmp_path, monkeypatch):
    expected, cases, _ = whole
    stop, advance = Stop(), ProgressReport.end
    monkeypatch.setattr(ProgressReport, "end", lambda self: (stop.request(), advance(self)))
    with pytest.raises(Stopped):
        train_toy(tmp_path, cases, stop=stop)
    while True:
        stop = Stop()
        try:
            train_toy(tmp_path, cases, resume=True, stop=stop)
        except Stopped:
            continue
        break
    assert run_bytes(tmp_path) == expected


def test_the_handler_of_before_is_restored():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with stop_at_sigterm(lambda: None) as stop:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        with stop.heeded():
            os.kill(os.getpid(), signal.SIGTERM)
            _wait_for(lambda: stop.requested)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(before) == before


def _wait_for(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 300
        time.sleep(0.001)


def test_a_process_with_a_handler_of_its_own_keeps_it():
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with stop_at_sigterm(lambda: None) as stop, stop.heeded():
            os.kill(os.getpid(), signal.SIGTERM)
            _wait_for(lambda: received)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_nothing_is_installed_outside_the_main_thread():
    handlers = []

    def enter():
        with stop_at_sigterm(lambda: None):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def test_train_installs_no_handler(tmp_path, monkeypatch):
    handlers = []
    dispatch = Lockstep._dispatch
    monkeypatch.setattr(
        Lockstep, "_dispatch", lambda self: (handlers.append(signal.getsignal(signal.SIGTERM)), dispatch(self))[1]
    )
    train_toy(tmp_path, {"A": toy_case(seeds=(0,), num_rounds=5, chunk_rounds=5)})
    assert handlers == [signal.SIG_DFL]


CHILD = """
import hashlib, sys, time
from pathlib import Path
from jaxfl.training import stop_at_sigterm
undone = Path(sys.argv[1])
work = lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as a compilation: Python handlers wait for its end
with stop_at_sigterm(lambda: print("last words", flush=True)) as stop:
    stop.undo_until_heeded(undone.touch)
    if sys.argv[2] == "heeded":
        with stop.heeded():
            print("ready", flush=True)
            while not stop.requested:
                time.sleep(0.01)
            print("requested", flush=True)
            work()
    print("ready", flush=True)
    work()
"""


@pytest.mark.parametrize("where", ["heeded", "elsewhere"])
@pytest.mark.quick_cases(1)
def test_elsewhere_and_the_second_time_the_process_ends_at_once(tmp_path, where):
    """With exit code 143 and its last words; what it had not begun is undone."""
    undone = tmp_path / "undone"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", CHILD, str(undone), where]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGTERM)
            if where == "heeded":
                assert child.stdout.readline() == "requested\n"
                assert child.poll() is None
                child.send_signal(signal.SIGTERM)
            assert child.communicate(timeout=300)[0] == "last words\n"
        finally:
            child.kill()
    assert child.returncode == 143
    assert undone.exists() == (where == "elsewhere")


def test_a_new_run_that_ends_before_its_first_round_leaves_nothing(tmp_path, monkeypatch):
    """As one that is refused; a run that has begun, or was there before, stays."""
    stop, undone = Stop(), []
    out = tmp_path / "run"
    cases = {"A": toy_case(seeds=(0,), num_rounds=5)}

    def ends(program):
        del program
        stop.request_if_heeded()
        undone.append(out.exists())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jaxfl.training.passes.Program.check", ends)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train_toy(out, cases, stop=stop, resume=True)
    assert undone == [False, False]
    assert not stop.begun
    run = open_run(out, {"step_size": 0.2}, experiment="toy")
    assert run.path.exists()
    train_toy(out, cases, resume=True)
    again = Stop()
    with monkeypatch.context() as patch:
        patch.setattr("jaxfl.training.passes.Program.check", ends)
        with pytest.raises(KeyboardInterrupt):
            train_toy(out, cases, stop=again, resume=True)
    assert undone[2]
    assert again.begun, "there is something to resume"
