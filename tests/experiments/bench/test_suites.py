"""The harness of benchmarks, and every suite on tiny shapes: it runs and names what is published, whatever the time."""

import importlib
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import nodes, peers, round, scale, suites, sweep, timing
from experiments.bench.setting import Network, Setting, perceptron
from experiments.bench.timing import Measurement, Report, Runner, in_turns, runner
from jaxfl.core import ArgumentError
from jaxfl.models import Model, cnn, dzofl_cnn, resnet20

MLP = perceptron(12, 4, 3)
CNN = Network(cnn((8, 8, 1), channels=(2, 3), window=3, hidden=4, num_classes=3), "CNN", (8, 8, 1), 3)
DZOFL_CNN = Network(dzofl_cnn((8, 8, 1), channels=(2, 3), window=3), "CNN", (8, 8, 1), 2)
SMALL = Setting(MLP, 4, batch_size=2, samples=6, repeats=2, slow_repeats=1, gemm_size=8)


def residual(*blocks, **options):
    return Network(resnet20((8, 8, 3), 3, widths=(4, 6, 8), blocks=blocks, **options), "ResNet-20", (8, 8, 3), 3)


# Suite -> what its `suite` gets, and patterns in published names -> what stands there for these shapes.
PADDED = SMALL._replace(network=residual(1, 1, 1, shortcut="padding"), num_nodes=2)
CASES = {
    "conv": ({"steps": SMALL._replace(network=CNN, slow_rounds=1), "scan": SMALL._replace(network=CNN)}, {}),
    "resnet": ({"whole": PADDED, "stages": PADDED._replace(num_nodes=1)}, {}),
    "embracing": (SMALL._replace(network=residual(1, 1, 1), num_nodes=3, samples=4, num_local_steps=2, rounds=1), {}),
    "saga": (
        {"short": SMALL._replace(batch_size=1, samples=2), "long": SMALL._replace(batch_size=1), "factored": SMALL},
        {"j100": "j2", "j2000": "j6"},
    ),
    "tracking": (SMALL._replace(num_nodes=5, samples=4, batch_size=3), {}),
    "mix": (SMALL._replace(network=Network(Model(()), "", (5,)), rounds=3), {}),
    "clip": ({"mlp32": SMALL, "cnn": SMALL._replace(network=CNN)}, {".*mlp128.*": ""}),
    "dp_clients": ({"cnn": SMALL._replace(num_local_steps=2)}, {".*small_cnn.*": ""}),
    "round": (SMALL, {}),
    "zero_order": ({"rows": SMALL._replace(network=DZOFL_CNN), "memory": SMALL}, {}),
    "sweep": (sweep.Sweep((0.1, 0.2), num_seeds=1, nodes=4, num_rounds=2, commands=1, repeats=1), {}),
    "peers": ({"w1": SMALL._replace(method="fed_avg", num_active=3)}, {".*w[2-5].*|.*torch.*": ""}),
    "scale": (
        {"n": [SMALL._replace(num_nodes=2), SMALL], "d": [SMALL, SMALL._replace(network=perceptron(12, 5, 3))]},
        {r"_[nd]\d+$": "_n4"},
    ),
    "nodes": (
        nodes.Sizes((5, 8), num_devices=2, hidden=3, rounds=2, calls=2),
        {r"_n10000_": "_n8_", r"_n10+(?=_|$)": "_n5", r"devices8": "devices2", r"distance_\d+": "distance_1"},
    ),
}
FAST = ("mix", "peers")


def is_sound(measurement):
    low, high = measurement.spread
    return np.isfinite(measurement.value) and low <= measurement.value <= high


@pytest.mark.bench
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_suite_measures_what_is_published(name, monkeypatch, tmp_path):
    monkeypatch.setattr(scale, "NUMBERS", 200)
    settings, names = CASES[name]
    report = importlib.import_module(f"experiments.bench.{name}").suite(settings)
    assert [key for key, one in report.items() if not is_sound(one)] == []
    published = set(json.loads((Path(suites.__file__).parents[1] / f"results/bench/{name}.json").read_text()))
    for pattern, replacement in names.items():
        published = {re.sub(pattern, replacement, key) for key in published}
    assert published - {"environment", ""} <= set(report)
    if name == "embracing":
        held = [report[f"embracing/step_memory_{kind}"].value for kind in ("weak", "moderate", "strong")]
        assert held[0] < held[1] < held[2] == 1
    if name == "nodes":
        for graph in nodes.GRAPHS:
            assert set(nodes.distances(report, graph)) == {5, 8}
            assert list(nodes.distances(report, graph)[5]) == [1, 2, 3, 4]
            assert report[f"nodes/{graph}_n8_devices2_off"].value < 1e-5
            assert 50 < report[f"nodes/{graph}_n5_memory"].value < 4000
        nodes.plot(report, tmp_path / "nodes.png")
        assert (tmp_path / "nodes.png").read_bytes().startswith(b"\x89PNG")
    if name == "clip":
        held = [report[f"clip/mlp32_temp_{row}"].value for row in ("clipped", "unclipped")]
        assert report["clip/mlp32_temp_vs_unclipped"].value == pytest.approx(held[0] / held[1])
    if name == "scale":
        assert [n for n, _ in timing.points(report, r"scale/time_n(\d+)")] == [2, 4]
        assert [d for d, _ in timing.points(report, r"scale/memory_d(\d+)")] == [67, 83]
        one_more = (report["scale/memory_n4"].value - report["scale/memory_n2"].value) / 2 * 1e6
        assert report["scale/bytes_per_node"].value == pytest.approx(one_more)
        assert report["scale/largest_n"].value == pytest.approx(24 * 2**30 / one_more, rel=1e-3)


def test_runs_are_written_drawn_and_printed(tmp_path, monkeypatch, capsys):
    """With what is wanted, and the picture beside the numbers."""
    names = [f"scale/{kind}_{axis}{size}" for kind in ("time", "memory") for axis in "nd" for size in (16, 4)]
    measurements = dict.fromkeys(["scale/largest_n", *names], Measurement(2.0, "x", (1.0, 3.0), "y"))
    monkeypatch.setattr(scale, "suite", lambda: measurements)
    monkeypatch.setattr(scale, "WANTED", {"scale/time_n4": 1.5, "scale/other": 1.0}, raising=False)
    suites.run("scale", tmp_path / "numbers.json")
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert set(written) == {*measurements, "environment"}
    assert written["environment"]["jax"] == jax.__version__
    assert written["scale/largest_n"] == {"value": 2.0, "unit": "x", "spread": [1.0, 3.0], "against": "y"}
    assert written["scale/time_n4"] == {**written["scale/largest_n"], "wanted": 1.5}
    assert (tmp_path / "numbers.png").read_bytes().startswith(b"\x89PNG")
    assert timing.points(measurements, r"scale/time_d(\d+)") == [(4, 2.0), (16, 2.0)]
    printed = capsys.readouterr().out
    assert all(name in printed for name in measurements)
    assert "1.5" in printed


def test_peers_run_beside_ours(monkeypatch):
    """The ratio is against the fastest of the peer's rows, and is what is wanted of."""
    monkeypatch.setattr(peers, "peer_calls", lambda *_: {"loop": (lambda: 1e3, 4), "stacked": (lambda: 1e3, 8)})
    monkeypatch.setattr(peers, "training", lambda *_: (Runner(lambda: 50.0, 3.0, 0), None))
    report = peers.suite({"w1": SMALL._replace(method="fed_avg", num_active=3)}, "torch")
    assert {name: one.value for name, one in report.items()} == {
        "peers/w1_jaxfl": 0.04,
        "peers/w1_torch_loop": 0.004,
        "peers/w1_torch_stacked": 0.008,
        "peers/w1_vs_torch": 5.0,
        "peers/compile_w1": 3.0,
    }
    assert "torch stacked" in report["peers/w1_vs_torch"].against
    assert peers.WANTED["peers/w1_vs_torch"] == 1.3


@pytest.mark.parametrize(
    ("first", "expected"), [("peers", ["cores", "import", "peer", "suite"]), ("clip", ["import", "suite"])]
)
def test_devices_are_asked_for_before_anything_looks_at_them(first, expected, monkeypatch):
    """JAX keeps the devices that it began with, and the import of a suite begins it."""
    done, module = [], importlib.import_module(f"experiments.bench.{first}")
    monkeypatch.setattr(suites, "use_all_cores", lambda: done.append("cores"))

    def imported(name):
        done.append("import")
        return module

    monkeypatch.setattr(suites, "importlib", types.SimpleNamespace(import_module=imported))
    monkeypatch.setattr(peers, "require_peer", lambda peer: done.append("peer"))
    monkeypatch.setattr(module, "suite", lambda **options: done.append("suite") or {})
    suites.run(first, against="torch" if first == "peers" else None)
    assert done == expected


@pytest.mark.parametrize(
    ("option", "request_", "is_installed", "backend"),
    [
        ("--json", {"suite": "conv", "json": Path("missing/bench.json")}, True, "cpu"),
        ("suite", {"suite": "cnov"}, True, "cpu"),
        ("--against", {"suite": "conv", "against": "torch"}, True, "cpu"),
        ("--against", {"suite": "peers", "against": "flower"}, True, "cpu"),
        ("--against", {"suite": "peers", "against": "torch"}, False, "cpu"),
        ("--against", {"suite": "peers", "against": "torch"}, True, "gpu"),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(option, request_, is_installed, backend, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(suites, "use_all_cores", lambda: None)
    with pytest.raises(ArgumentError, match=f"^{option}:"):
        suites.run(**request_)


def test_compile_seconds_are_apart_from_the_first_run(monkeypatch):
    """A tick of the clock passes between any two looks at it, and whoever looks in between adds another."""
    looks = itertools.count()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: float(next(looks))))
    row, report = runner(lambda state: state + 1.0, jnp.zeros(3)), Report("suite/", "3 numbers")
    assert (row.compile_seconds, row()) == (1.0, 1.0)
    report.compile_times({"row": row})
    expected = Measurement(1.0, "s", (1.0, 1.0), "tracing and compiling; 3 numbers")
    assert report.measurements == {"suite/compile_row": expected}


def test_runner_feeds_each_result_to_the_next_call_and_leaves_its_argument_usable():
    start, states = jnp.zeros(3), []

    def step(state, increment):
        jax.debug.callback(lambda value: states.append(float(value)), state[0])
        return state + increment

    row = runner(step, start, jnp.ones(()))
    assert row() > 0
    jax.effects_barrier()
    assert states == [0.0, 1.0]
    np.testing.assert_array_equal(start, np.zeros(3))


def test_rivals_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or 1.0 for name in ("ours", "theirs")}
    seconds = in_turns(calls, {"ours": 4, "theirs": 2}, {"ours": 1, "theirs": 2})
    assert order == ["ours", "ours", "theirs", "ours", "ours", "theirs"]
    assert {name: values.tolist() for name, values in seconds.items()} == {"ours": [1.0] * 4, "theirs": [0.5] * 2}


def test_ratio_is_of_medians_with_the_extremes():
    report = Report("", "")
    report.ratio("r", np.array([4.0, 8.0, 6.0]), np.array([2.0, 1.0, 3.0]), "text")
    assert report.measurements["r"][:3] == (3.0, "x", (4 / 3, 8.0))


def test_shares_of_a_round_are_those_of_its_parts():
    """Clocks that stand still: the share outside is what products, noise and drawing leave of the iteration."""
    seconds = {"iteration": 10.0, "iteration_poisson": 16.0, "iteration_plain": 4.0, "without_info": 9.0}
    seconds |= {"products": 2.0, "gradients": 3.0, "noise": 3.0, "drawing": 1.0, "gathering": 0.5, "mixing": 0.25}
    rows = {name: Runner(lambda value=value: value, 0.0, 0) for name, value in seconds.items()}
    report = round.shares(SMALL, rows)
    expected = {"share_outside": 0.4, "share_of_parts_outside": 0.175, "share_info": 0.1, "share_mixing": 0.025}
    expected |= {"rate_iteration": 0.2, "noise": 1500.0}
    assert {name: report[f"round/{name}"].value for name in expected} == pytest.approx(expected)
    assert all(map(is_sound, report.values()))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux, which counts the parent's memory")
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    held = np.ones(10**8)
    code = "from experiments.bench.nodes import peak_megabytes; print(peak_megabytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 50 < float(done.stdout) < 1e-6 * held.nbytes
