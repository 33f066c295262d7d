"""A disk that is full or cannot be read is an OSError with its number, and no checkpoint is lost by it."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from checkpoint_problem import OWNER, fill, raising, restore, toy_state
from run_files import content

from jaxfl.training.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (ValueError("PERMISSION_DENIED: Error opening: Permission denied [os_error_code='13']"), errno.EACCES),
        (ValueError("RESOURCE_EXHAUSTED: Error: Too many open files [os_error_code='24']"), errno.EMFILE),
        (jax.errors.JaxRuntimeError("INTERNAL: Input/output error [os_error_code='5']"), errno.EIO),
        (OSError(errno.EIO, "Input/output error"), errno.EIO),
    ],
)
def test_a_file_that_cannot_be_read_is_no_damage(tmp_path, error, number, monkeypatch):
    fill(tmp_path)
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.CheckpointManager.restore", raising(error))
        with pytest.raises(OSError) as caught:  # noqa: PT011, the number tells
            restore(tmp_path, toy_state(20))
    assert caught.value.errno == number
    assert content(tmp_path) == before
    assert restore(tmp_path, toy_state(20))[0] == 20


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("RESOURCE_EXHAUSTED: Error writing \"['a']/0\" in OCDBT database at local file: Failed writing: Failed to "
         "write 9 bytes to file 14: No space left on device [os_error_code='28']", errno.ENOSPC),
        ("OUT_OF_RANGE: Error writing \"['a']/0\" in OCDBT database: File too large [os_error_code='27']", errno.EFBIG),
    ],
)  # fmt: skip
def test_a_full_disk_is_an_oserror_with_its_number(tmp_path, text, number, monkeypatch):
    fill(tmp_path)
    checkpoints = Checkpoints(tmp_path, owner=OWNER)
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.CheckpointManager.save", raising(ValueError(text)))
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            checkpoints.save(30, toy_state(30))
    assert caught.value.errno == number
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.CheckpointManager.save", raising(ValueError("a mistake of ours")))
        with pytest.raises(ValueError, match="a mistake of ours"):
            checkpoints.save(30, toy_state(30))
    checkpoints.close()
    assert restore(tmp_path, toy_state(20))[0] == 20


LIMITED = """
import resource, sys
import jax.numpy as jnp
import numpy as np
from jaxfl.training.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
state = {"a": jnp.asarray(np.random.default_rng(0).normal(size=100_000).astype(np.float32))}
checkpoints.save(1, state)
checkpoints.wait()
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    checkpoints.save(2, state)
    checkpoints.wait()
except OSError as error:
    print(error.errno)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [100, 1000, 100_000])
def test_a_limit_on_file_sizes_is_an_oserror_and_leaves_nothing_in_the_way(tmp_path, limit):
    done = _limited(tmp_path, limit)
    assert (done.returncode, done.stdout) == (0, f"{errno.EFBIG}\n"), done.stderr
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.rounds() == [1]
    checkpoints.save(2, toy_state())
    checkpoints.wait()
    assert checkpoints.rounds() == [1, 2]
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["size=500k", "size=750k", "nr_inodes=36"])
def test_a_full_disk_leaves_nothing_in_the_way(tmp_path, options):
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        done = _limited(mounted / "run", 0)
        assert (done.returncode, done.stdout) == (0, f"{errno.ENOSPC}\n"), done.stderr
        subprocess.run([*mount[:4], "remount,size=9M,nr_inodes=999", *mount[5:]], capture_output=True, check=True)
        checkpoints = Checkpoints(mounted / "run")
        assert checkpoints.rounds() == [1]
        checkpoints.save(2, toy_state())
        checkpoints.wait()
        assert checkpoints.rounds() == [1, 2]
        checkpoints.close()
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def _limited(directory, limit):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", LIMITED, str(directory), str(limit)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
