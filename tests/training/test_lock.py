"""One process at a time in a run directory."""

import errno
import os
import signal
import subprocess
import sys

import filelock
import pytest
from run_files import content
from toy_problem import toy_case, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import open_run
from jaxfl.training.json_files import read_json, write_json
from jaxfl.training.run_directory import held

HOLDER = """
import pathlib, sys, time
from jaxfl.training.run_directory import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_process_is_refused_and_a_killed_one_keeps_nobody_out(tmp_path):
    cases = {"Toy": toy_case(num_rounds=10)}
    train_toy(tmp_path, cases)
    before = content(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(ArgumentError, match=rf"^out: .* one process at a time; process {child.pid} is at work there\."):
        train_toy(tmp_path, cases, resume=True)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert (tmp_path / "lock").exists()  # without its holder
    after = content(tmp_path)
    assert {path: after[path] for path in after if path.name != "lock"} == before
    train_toy(tmp_path, cases, resume=True)
    assert not (tmp_path / "lock").exists()


def test_a_run_that_begins_meanwhile_is_not_written_over(tmp_path):
    with held(tmp_path), pytest.raises(ArgumentError, match=rf"process {os.getpid()} is at work there"):
        open_run(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_removed_while_it_was_opened_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """Whoever opened the file of a holder that then left would hold a lock that nobody else looks at."""
    lock, tries = filelock.lock_descriptor, []

    def leaves(descriptor, **options):
        tries.append(options)
        if len(tries) == 1:
            (tmp_path / "lock").unlink()
        return lock(descriptor, **options)

    monkeypatch.setattr(filelock, "lock_descriptor", leaves)
    with held(tmp_path):
        assert len(tries) == 2
        monkeypatch.undo()
        with pytest.raises(ArgumentError), held(tmp_path):
            pass


def test_without_locks_a_warning_says_so(tmp_path, monkeypatch):
    def refuses(descriptor, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "lock_descriptor", refuses)
    with pytest.warns(UserWarning, match="cannot be locked .No locks available"), held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_followed(tmp_path):
    """In a folder that others can write to it would empty any file of this user."""
    mine = tmp_path / "mine.txt"
    mine.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(mine)
    with pytest.raises(ArgumentError, match=r"^out: .*lock must be a file; it is a link"), held(tmp_path / "run"):
        pass
    (tmp_path / "run" / "config.json.tmp").symlink_to(mine)
    write_json(tmp_path / "run" / "config.json", {"a": 1})
    assert mine.read_text() == "kept"
    assert read_json(tmp_path / "run" / "config.json") == {"a": 1}
