"""Costs on the command line: what devices and links change, and what curves are drawn against."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from run_files import run_bytes, run_lines

from experiments import EXPERIMENTS
from jaxfl.analysis.plots import X_AXES, seeds_curve
from jaxfl.channel import count, ledger, node_work
from jaxfl.core import ArgumentError
from jaxfl.core.lines import Lines
from jaxfl.frame import main
from jaxfl.frame.run import with_ledgers
from jaxfl.models import mlp

FEW = "--num-train 300 --num-test 60 --evaluate-every 2 --quiet"
SMALL = {
    "privsgp_vr": f"{FEW} --method PrivSGP --iterations 4 --nodes 5 --noise-std 0.05 --batch-size 2 --hidden 4",
    "embracing_fl": f"{FEW} --method embracing --case 9 --nodes 16 --rounds 2 --hidden 6 5 --local-steps 2",
    "dp_gradient_tracking": f"{FEW} --scheme S2 --iterations 4 --smoothness 2 --batch-size 2",
}


def train(name, out, *arguments):
    return main(EXPERIMENTS[name], [*SMALL[name].split(), "--seeds", "0", "1", "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of PrivSGP: 5 nodes on an exponential graph."""
    out = tmp_path_factory.mktemp("privsgp_vr") / "run"
    assert train("privsgp_vr", out) == 0
    return out


@pytest.fixture
def drawn(monkeypatch):
    """File name -> the figure that was saved there last."""
    figures = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: figures.update({Path(path).name: self}))
    return figures


def test_curves_of_a_run_that_has_ended_are_drawn_again_against_a_cost(finished, tmp_path, drawn):
    x = "joules"
    shutil.copytree(finished, tmp_path / "run")
    assert train("privsgp_vr", tmp_path / "run", "--resume", "--x", x) == 0
    axes = {one.get_ylabel(): one for one in drawn["training.png"].axes}
    assert {one.get_xlabel() for one in axes.values()} == {X_AXES[x].label}
    curve = seeds_curve(Lines(run_lines(finished)), "test_accuracy", X_AXES[x].totals)
    (line,) = axes["test accuracy, mean over nodes"].lines
    np.testing.assert_allclose(np.asarray(line.get_xdata()), curve.x)
    assert len({*curve.x.tolist()}) == 3
    assert run_bytes(tmp_path / "run") == run_bytes(finished)


@pytest.mark.slow
def test_other_curves_of_an_experiment_are_drawn_against_it_too(tmp_path, drawn):
    assert train("dp_gradient_tracking", tmp_path / "run", "--x", "joules") == 0
    for file in ("training.png", "convergence.png"):
        assert {one.get_xlabel() for one in drawn[file].axes} == {"joules, all nodes"}


def test_totals_are_those_of_the_devices_and_links_of_the_options(finished, tmp_path, drawn):
    """Nothing else depends on them. A gradient of 64-4-10 takes 3 (256 + 4 + 4 + 40 + 10) operations."""
    link = {"operations_per_second": 1e6, "uplink_bits_per_second": 1e4, "downlink_bits_per_second": 2e4}
    options: dict[str, Any] = {**link, "slot_seconds": 0.0, "transmit_dbm": 30.0}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert train("privsgp_vr", tmp_path / "run", *words) == 0
    costs = [f"total_{name}" for name in ("simulated_seconds", "joules")]
    before, after = run_lines(finished), run_lines(tmp_path / "run")
    assert [{**line, **dict.fromkeys(costs)} for line in after] == [{**line, **dict.fromkeys(costs)} for line in before]
    book = ledger(node_work(count(mlp((64, 4, 10)), (8, 8))), batch_size=2, **options)
    for line in after:
        bits, gradients, rounds = line["total_bits_sent"], line["total_gradient_evaluations"], line["round"]
        assert line["total_operations"] == gradients * 3 * (256 + 4 + 4 + 40 + 10)
        np.testing.assert_allclose(line["total_joules"], gradients * book.gradient.joules + bits / 1e4, rtol=1e-9)
        air = bits / 5 * (1 / 1e4 + 1 / 2e4)  # all nodes send and receive as much
        computing = line["total_simulated_seconds"] - air
        seconds = book.gradient.simulated_seconds
        assert gradients / 5 * seconds <= computing + 1e-9 <= rounds * 2 * 5 * seconds + 1e-9, "that of the slowest"


def test_costs_that_nothing_counts_are_refused():
    """The point has no devices and links."""
    line = EXPERIMENTS["spanning_tree"].base
    lines, cases = {"A": type("Row", (), {"config": line})}, {"A": SimpleNamespace(ledger=None)}
    for x in ("seconds", "joules", "operations"):
        with pytest.raises(ArgumentError, match=rf"^x: must be what the run counts; got {x} without"):
            with_ledgers(cases, lines, x)  # pyright: ignore
    assert with_ledgers(cases, lines, "bits") == cases  # pyright: ignore
