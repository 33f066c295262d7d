"""README's snippet runs as printed; its two commands have the form that .ci/run extracts and executes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import EXPERIMENTS
from jaxfl.frame.command_line import parse

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXTS = [
    README,
    ROOT / "BUILD_NOTES.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("experiments/*/__init__.py")),
]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.S)


def test_the_snippet_runs_and_learns(capsys):
    (snippet,) = blocks("python")
    lines = [line for line in snippet.splitlines() if line.strip()]
    assert len(lines) <= 15
    names = {}
    exec(compile(snippet, "README.md", "exec"), names)
    first, last = np.asarray(names["info"].loss.mean(axis=1))[[0, -1]]
    assert last < 0.5 * first
    heading, *statements = capsys.readouterr().out.splitlines()
    assert "loss of round 1 and 200" in heading
    shown = [re.match(r"ε = ([\d.]+) (\w+) against all other nodes \((\w+ \w+)", line) for line in statements]
    assert [one and one.groups()[1:] for one in shown][:2] == [("published", "replace one"), ("proven", "zero out")]
    assert "refuted at this noise" in statements[0]
    assert 5 < float(statements[1].split()[2]) < 12  # z = 4 at K = 200, q = 80 / 179


def test_there_are_two_commands_each_complete_on_a_fresh_machine():
    run, test = blocks("sh")
    for command in (run, test):
        assert len(command.strip().splitlines()) == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert "-m experiments.privsgp_vr" in run
    assert "-m pytest" in test


@pytest.mark.slow
def test_pytest_alone_takes_the_experiments_for_themselves():
    """`pytest` does not have the current directory on the path, as `python -m pytest` does; -P leaves it out."""
    command = "-P -m pytest -q -n 0 --collect-only tests/experiments/test_process.py".split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("accuracy", "status", "exits"), [(0.9, "finished", 0), (0.1, "finished", 1), (0.9, "diverged", 1)]
)
def test_the_gate_tells_a_run_that_learned_nothing(accuracy, status, exits, tmp_path):
    summary = {"experiment": "any", "status": status, "cases": {"case": {"test_accuracy": {"mean": accuracy}}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    command = [sys.executable, ROOT / ".ci" / "learned.py", tmp_path, "0.5"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == exits


def test_the_files_that_the_readme_names_exist():
    for path in re.findall(r"\]\(([^)]+)\)", README.read_text()) + re.findall(r"`(jaxfl/\w+)`", README.read_text()):
        assert (README.parent / path).exists(), path


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_texts_are_understood(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cases.csv").write_text("step_size,nodes\n0.1,8\n0.2,16\n")
    Path("patients.csv").write_text("age,hospital,ill\n" + "1,Oslo,yes\n2,Lund,no\n" * 9)
    whole_lines = path.read_text().replace("\\\n", " ")  # a backslash continues a command on the next line
    for name, arguments in re.findall(r"python -m experiments\.(\w+)([^`#\n]*)", whole_lines):
        if name in EXPERIMENTS and "--help" not in arguments:
            assert parse(EXPERIMENTS[name], shlex.split(arguments.replace("<name>", "x")))[0].rows
