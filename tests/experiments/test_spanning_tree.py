"""Gradient tracking finds the optimum where graphs have only spanning trees; plain distributed SGD goes elsewhere."""

import re

import numpy as np
import pytest

from experiments import spanning_tree
from experiments.spanning_tree import EXPERIMENT, quadratics
from jaxfl.frame import main


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The errors that the command drew, the folder, and what it printed."""
    folder, drawn, printed = tmp_path_factory.mktemp("spanning_tree") / "run", {}, []
    draw = spanning_tree.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spanning_tree, "draw", lambda errors, path: (drawn.update(errors), draw(errors, path)))
        patch.setattr(spanning_tree.Console, "print", lambda self, text, **_: printed.append(text))
        assert main(EXPERIMENT, ["--num-rounds", "300", "--out", str(folder)]) == 0
    return drawn, folder, printed


def test_all_begin_with_the_same_gradient_step(finished):
    """From 0, where nothing is to be mixed, against the gradient 2 a_i (0 - c_i)."""
    problem = quadratics(5)
    first = 0.05 * 2 * problem.curvatures[:, None] * problem.centers
    expected = np.mean(np.sum((first - problem.optimum) ** 2, axis=1))
    for errors in finished[0].values():
        np.testing.assert_allclose(errors[0], expected, rtol=1e-5)


def test_gradient_tracking_finds_the_optimum(finished):
    errors = finished[0]["gradient tracking"]
    assert errors.shape == (300,)
    assert errors[-1] < 1e-10 * errors[0]


def test_plain_distributed_sgd_does_not(finished):
    for step in ("constant", "falling"):
        errors = finished[0][f"plain distributed SGD, {step} step"]
        assert errors.shape == (300,)
        assert errors.min() > 0.1 * errors[0]


def test_the_picture_and_what_is_printed(finished):
    errors, folder, printed = finished
    picture = folder / "spanning_tree.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000
    assert printed[-1] == f"Picture: {picture}"
    for line, (name, values) in zip(printed[:-1], errors.items(), strict=True):
        assert line.startswith(f"{name}: ")
        assert [float(text) for text in re.findall(r"(\S+) at", line)] == pytest.approx(values[[0, -1]], rel=1e-2)


def test_a_grid_gives_a_picture_a_line(tmp_path, capsys):
    assert main(EXPERIMENT, ["--grid", "num_rounds=1,2", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"spanning_tree-{count}-rounds.png" for count in (1, 2)}
