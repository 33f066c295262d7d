"""Process of a command in edge cases: interrupted from its first moment on, without its standard output.

Each experiment's `__main__.py` is alike; one that trains and one that does not stand for the others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import experiments

ROOT = str(Path(experiments.__path__[0]).parent)


def start(name, *arguments, cwd, **options):
    """A command as a user types it."""
    command = [sys.executable, "-m", f"experiments.{name}", *arguments]
    environment = {**os.environ, "PYTHONPATH": ROOT, **options.pop("env", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)


def start_with_hook(name, folder, statement):
    """A command that runs a statement when it first imports jax; its working directory is folder/here."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jax':\n"
        f"            {statement}\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    (folder / "here").mkdir()
    return start(name, cwd=folder / "here", env={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"})


def test_an_interrupt_is_not_lost_where_python_drops_exceptions(tmp_path):
    """JAX has a callback in every garbage collection, and some interrupts of a compiling run arrive there."""
    code = """
import gc, os, signal, sys
from experiments.dzofl import EXPERIMENT
from jaxfl.frame import command_line
lost = []
def begin(query):
    gc.callbacks.append(lambda phase, _: lost or (lost.append(phase), os.kill(os.getpid(), signal.SIGINT)))
    gc.collect()
    for _ in range(10**9):
        pass
handler = lambda signum, frame: None
handler.until_caught = True  # as the package's own
signal.signal(signal.SIGINT, handler)
sys.exit(command_line.main(EXPERIMENT._replace(run=begin), []))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr.startswith(b"interrupted: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("name", ["privsgp_vr", "spanning_tree"])
def test_an_interrupt_ends_an_import_at_once(name, tmp_path):
    """Sent by the first module that an experiment imports after the package."""
    process = start_with_hook(name, tmp_path, "os.kill(os.getpid(), signal.SIGINT)")
    assert (*process.communicate(timeout=60), process.returncode) == ("", "interrupted: nothing was begun\n", 130)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_program_that_imports_experiments_keeps_its_interrupts(tmp_path):
    code = "import experiments, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "reason"),
    [
        ("{} | true", "broken pipe"),
        ("{} >&-", None),
    ],
)
def test_a_run_goes_on_without_its_standard_output(shell, reason, tmp_path):
    words = "--iterations 4 --nodes 3 --hidden 4 --seeds 0 --method PrivSGP --batch-size 4 --out run".split()
    command = " ".join([sys.executable, "-m", "experiments.privsgp_vr", *words])
    text = "set -o pipefail; " + shell.replace("{}", command)
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    warning = f"warning: standard output is lost ({reason}), and nothing more is shown\n"
    assert (done.returncode, done.stderr) == (0, warning if reason else "")
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_help_that_cannot_be_shown_is_no_success(tmp_path):
    with open("/dev/full", "w") as full:
        process = start("privsgp_vr", "--help", cwd=tmp_path, stdout=full)
        _, message = process.communicate(timeout=120)
    assert (process.returncode, message.count("\n")) == (1, 1)
    assert "no space left on device" in message
