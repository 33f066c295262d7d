"""1,000 command lines at random: each is refused in one sentence with exit code 2 and leaves nothing, or would train.

Parsing and all that comes before the first program are run as they are. Training is left out, and so are the probing
runs that estimate constants of a problem. A refusal later
than that is what `test_every_experiment.py` and the tests of `jaxfl.training` look at.
"""

import contextlib
import importlib.util
import io
import platform
import re
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from command_lines import FRAME, CommandLines

from experiments import EXPERIMENTS, spanning_tree
from experiments.audit import attack
from jaxfl.frame import main, run
from jaxfl.frame.options import flag, options
from jaxfl.privacy.gossip import ProblemConstants
from jaxfl.training import loop

if importlib.util.find_spec("submitit"):  # which logs to the streams that it meets: not to those of a line
    importlib.import_module("submitit")
LINES, CHUNKS = 1000, 2
SENTENCE = r"error: .+?: .+; .+[.?)] .+[.?]"
SECONDS, MEMORY = 120, 6 * 10**9  # that one line may take, and that a chunk may take beyond what is there
NAMES = list(EXPERIMENTS)


class Trained(BaseException):
    """Sign that the training, which is left out, would have begun."""


def _train(*args, **kwargs):
    raise Trained


class TooLong(BaseException):
    """The alarm; an OSError, as TimeoutError is, would be told as one."""


def _too_long(signum, frame):
    raise TooLong


@pytest.fixture
def bounded():
    """Less memory than there is, and an alarm."""
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, _too_long)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files that lines name, and where what they leave is looked for."""
    here = tmp_path / "home" / "here"
    (here / "hollow").mkdir(parents=True)
    np.save(here / "square.npy", np.full((5, 5), 0.2))
    np.save(here / "text.npy", np.full((5, 5), "a"))
    (here / "cut.npy").write_bytes((here / "square.npy").read_bytes()[:60])
    np.savez(here / "zip", np.eye(2))
    (here / "zip.npz").rename(here / "zip.npy")
    (here / "taken").touch()
    (here / "grid.csv").write_text("step_size,seed\n0.1,1\n1e400,2\n")
    (here / "grid.jsonl").write_text('{"seed": 12345678901234567890}\n{"seed": 1e400}\n')
    (here / "many.jsonl").write_text('{"iterations": "many"}\n{"iterations": [[[[]]]]}\n')
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(here)
    monkeypatch.setattr(loop, "prepare", _train)
    monkeypatch.setattr(run, "run_in_jobs", _train)
    monkeypatch.setattr(attack, "measured", _train)
    monkeypatch.setattr(spanning_tree, "compare", _train)
    constants = ProblemConstants(1.0, 1.0, 1.0, 1.0, 1.0, num_samples=9, num_params=9)
    for name in ("privsgp_vr", "dp_gradient_tracking"):  # probing is a short run of training
        module = importlib.import_module(f"experiments.{name}.prepare")
        monkeypatch.setattr(module, "estimate_constants", lambda *_, **__: constants)
    return tmp_path


def files(folder):
    """All paths below."""
    return set(folder.rglob("*"))


def is_cache(path):
    """True if compiled programs would lie there, which outlast every run."""
    near = (path, *path.parents, *path.rglob("*"))
    return any(folder.name.startswith(f"{platform.machine()}-") for folder in near)


def ending(name, words):
    """Exit code, or None where training would have begun, and what was told on standard error."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = main(EXPERIMENTS[name], words)
    except Trained:
        code = None
    finally:
        signal.alarm(0)
    streams[1].flush()
    return code, streams[1].buffer.getvalue().decode()


def complaint(name, words, folder):
    """Find the fault in how a line ends: (exit code, None) for none, or (code, text)."""
    before = files(folder)
    try:
        code, message = ending(name, words)
    except (Exception, SystemExit, TooLong) as error:
        return 1, f"{type(error).__name__}: {error}"
    made = {path for path in files(folder) - before if "--compilation-cache" not in words or not is_cache(path)}
    for path in sorted(files(folder) - before, reverse=True):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not code:
        return code, None
    sentences = [line for line in message.splitlines() if not line.startswith("warning: ")]
    if code != 2 or len(sentences) != 1 or not re.fullmatch(SENTENCE, sentences[0]):
        return code, message
    named = sentences[0].removeprefix("error: ").partition(": ")[0]
    known = {flag(option) for option in options(type(EXPERIMENTS[name].base))}
    if not {named} & {*known, *FRAME} and "there is none of that name" not in message:
        return code, f"names no option: {message}"
    return code, f"left {sorted(map(str, made))}: {message}" if made else None


def lines(name, count, seed=0):
    """Command lines of one experiment."""
    made = CommandLines(EXPERIMENTS[name], seed)
    return [made.next() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as a user has them
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("name", NAMES)
def test_each_is_refused_in_one_sentence_or_would_train(name, chunk, folder, bounded):
    share = lines(name, LINES // len(NAMES))[chunk::CHUNKS]
    endings = [complaint(name, words, folder) for words in share]
    assert [(words, text) for words, (_, text) in zip(share, endings, strict=True) if text] == []
    codes = [code for code, _ in endings]
    assert 2 in codes
    assert None in codes or 0 in codes
