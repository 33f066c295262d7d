"""README's snippet runs as printed; its two commands have the form that .ci/run extracts and executes."""

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parent.parent / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.S)


def test_the_snippet_runs_and_learns(capsys):
    snippet, _ = blocks("python")
    lines = [line for line in snippet.splitlines() if line.strip()]
    assert len(lines) <= 12
    names = {}
    exec(compile(snippet, "README.md", "exec"), names)
    first, last = np.asarray(names["info"].loss.mean(axis=1))[[0, -1]]
    assert last < 0.5 * first
    assert "loss of round 1 and 200" in capsys.readouterr().out


def test_the_accountants_snippet_prints_statements_with_their_ground(capsys):
    exec(compile(blocks("python")[1], "README.md", "exec"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in printed][:2] == [["published", "replace_one"], ["proven", "zero_out"]]
    np.testing.assert_allclose(float(printed[1][2]), 3.0, rtol=0.01)  # z = 4.845 at K = 3120, q = 0.02048


def test_there_are_two_commands_each_complete_on_a_fresh_machine():
    run, test = blocks("sh")
    for command in (run, test):
        assert len(command.strip().splitlines()) == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert "-m experiments.privsgp_vr" in run
    assert "-m pytest" in test


def test_the_files_that_the_readme_names_exist():
    for path in re.findall(r"\]\(([^)]+)\)", README.read_text()) + re.findall(r"`(jaxfl/\w+)`", README.read_text()):
        assert (README.parent / path).exists(), path
