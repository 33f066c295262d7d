"""The gate notices what is gone: tests that are skipped, and settings of the caller that would change what it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {"jax_privacy": "privacy/test_audit.py", "submitit": "experiments/test_launcher.py"}


@pytest.mark.parametrize(("allowed", "red"), [("submitit", ["jax_privacy"]), ("1", list(EXTRAS))])
def test_tests_of_an_extra_that_is_gone_fail_under_no_skip(tmp_path, allowed, red):
    gone = "".join(f"sys.modules[{name!r}] = None\n" for name in EXTRAS)
    (tmp_path / "gone.py").write_text(f"import sys\n{gone}")
    files = [str(ROOT / "tests" / file) for file in EXTRAS.values()]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "gone", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "JAXFL_TESTS_NO_SKIP": allowed},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    said = [line for line in ended.stdout.splitlines() if line.startswith("skipped, and not for a reason")]
    assert len(said) == len(red)
    assert all(any(name in line for line in said) for name in red)


def test_the_callers_settings_do_not_reach_the_gate(tmp_path):
    """A checkout whose README's first command prints the environment and fails, so that the gate ends there."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "README.md").write_text("```sh\nenv; exit 7\n```\n```sh\ntrue\n```\n")
    author = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, env={**os.environ, **author}, check=True)
    reached = {"PIP_TIMEOUT": "99", "JAXFL_TESTS_CACHE": str(tmp_path / "cache")}
    held = ("PYTEST_ADDOPTS", "PYTHONPATH", "PYTHONOPTIMIZE", "JAXFL_TESTS_PIN", "JAXFL_TESTS_OPTIMIZED", "XLA_FLAGS",
            "JAX_PLATFORMS", "VIRTUAL_ENV", "BASH_ENV")  # fmt: skip
    ended = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={**os.environ, **dict.fromkeys(held, ""), **reached},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 7, ended.stderr
    seen = {name: value for name, _, value in (line.partition("=") for line in ended.stdout.splitlines())}
    assert {name: seen.get(name) for name in reached} == reached
    assert not set(held) & set(seen)
    assert seen["JAXFL_TESTS_NO_SKIP"] == "torch"
