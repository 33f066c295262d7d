"""The benchmark harness on tiny shapes: it runs, names and writes what it should. Nothing here looks at a time."""

import itertools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, bench_conv, bench_tracking, timing
from experiments.timing import Measurement, compile_times, in_turns, ratio, runner
from jaxfl.core import ArgumentError
from jaxfl.models import classification, mlp

TINY = bench_conv.Setting(
    num_nodes=2,
    batch_size=2,
    sample_shape=(8, 8, 1),
    channels=(2, 3),
    window=3,
    hidden=4,
    num_classes=3,
    repeats=2,
    flax_repeats=1,
    scan_nodes=1,
    scan_repeats=1,
    gemm_size=8,
)
TINY_TRACKING = bench_tracking.Setting(
    sample_shape=(8, 8, 1),
    channels=(2,),
    window=3,
    num_classes=3,
    samples=4,
    batch_size=3,
    rounds=2,
    repeats=2,
)


@pytest.mark.bench
@pytest.mark.slow
def test_conv_suite_names_its_numbers_and_writes_them(tmp_path, monkeypatch, capsys):
    # Both rows a small MLP: the networks themselves take long to compile and are compared below.
    task = classification(mlp((64, 3)))
    monkeypatch.setattr(bench_conv, "tasks", lambda setting: {"jaxfl": task, "flax": task})
    tiny = types.ModuleType("tiny_suite")
    setattr(tiny, "suite", lambda: bench_conv.suite(TINY))  # noqa: B010
    monkeypatch.setitem(sys.modules, "tiny_suite", tiny)
    monkeypatch.setitem(bench.SUITES, "conv", "tiny_suite")
    bench.run("conv", tmp_path / "bench.json")
    written = json.loads((tmp_path / "bench.json").read_text())
    assert {"conv/speedup_vs_flax_vmap", "conv/share_of_gemm", "environment"} <= set(written)
    printed = capsys.readouterr().out
    for name in ("conv/compile_jaxfl", "conv/compile_flax"):
        assert written[name]["value"] > 0
        assert written[name]["unit"] == "s"
        assert name in printed
    assert written["environment"]["jax"] == jax.__version__
    for name in set(written) - {"environment"}:
        assert set(written[name]) == {"value", "unit", "spread", "against"}
        assert np.isfinite(written[name]["value"])
        assert written[name]["spread"][0] <= written[name]["value"] <= written[name]["spread"][1]


def test_both_rows_of_the_conv_suite_train_the_same_network():
    both = bench_conv.tasks(TINY)
    params = jax.jit(jax.vmap(both["jaxfl"].init))(jax.random.split(jax.random.key(0), 2))
    inputs = jax.random.uniform(jax.random.key(1), (2, 2, 8, 8, 1))
    labels = jnp.array([[0, 1], [2, 0]], jnp.int32)
    ours, theirs = (jax.jit(bench_conv.sgd_rounds(task, 1))(params, inputs, labels) for task in both.values())
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other, start in zip(*map(jax.tree.leaves, (ours, theirs, params)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
        assert np.abs(mine - start).max() > 1e-5


@pytest.mark.bench
@pytest.mark.slow
def test_tracking_suite_names_its_numbers(monkeypatch):
    monkeypatch.setattr(bench_tracking, "network", lambda setting: classification(mlp((64, 3))))
    report = bench_tracking.suite(TINY_TRACKING)
    rows = {"iteration", "gradients", "unclipped", "rest"}
    assert {f"tracking/{name}" for name in ("iteration_vs_gradients", "iteration_vs_unclipped", *rows)} <= set(report)
    assert {"tracking/temp_iteration", "tracking/temp_gradients"} <= set(report)
    assert {f"tracking/compile_{name}" for name in rows} <= set(report)
    for one in report.values():
        assert one.spread[0] <= one.value <= one.spread[1]
        assert np.isfinite(one.value)
    assert "195 parameters" in report["tracking/iteration"].against


@pytest.mark.slow
def test_the_bare_evaluations_are_those_of_the_iteration():
    """The same samples, parameters and clipping; the step that the bare row takes is the iteration's gradient."""
    setting = TINY_TRACKING._replace(rounds=1, clip_norm=0.5)
    task, data = classification(mlp((64, 3))), bench_tracking.random_data(setting)
    algorithm = bench_tracking.tracking(setting, task, clip_norm=0.5)
    state = jax.jit(algorithm.init)(bench_tracking.KEY, data)
    after, infos = jax.jit(bench_tracking.iterations(setting, algorithm))((state, None), data)
    assert infos.gradient_evaluations.tolist() == [[3] * 5]
    assert infos.clipped_fraction.max() > 0
    step = jax.jit(bench_tracking.evaluations(setting, task, clip_norm=0.5, step_size=1.0))
    params, k = step((after.broadcast_params, jnp.int32(1)), data)
    assert int(k) == 2
    for old, new, slope in zip(*map(jax.tree.leaves, (after.broadcast_params, params, after.gradient)), strict=True):
        np.testing.assert_allclose(old - new, slope, atol=1e-6)
        assert np.abs(slope).max() > 0


def test_the_network_of_the_tracking_suite_is_small():
    params = jax.eval_shape(bench_tracking.network(bench_tracking.Setting()).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 4266


def test_the_row_without_gradients_has_the_same_parameters():
    task = classification(mlp((64, 3)))
    free = bench_tracking.without_gradients(task)
    params = task.init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, free.init(jax.random.key(0))) == jax.tree.map(jnp.shape, params)
    slopes = jax.grad(lambda p: free.loss(p, jnp.ones((2, 64)), jnp.zeros(2, jnp.int32)).sum())(params)
    assert all((np.asarray(leaf) == 2).all() for leaf in jax.tree.leaves(slopes))


def test_step_flops_count_the_products_of_a_step():
    # By hand: 3x3 kernels on 8x8, 1 to 2 (two products); on 4x4, 2 to 3, dense 12 to 4 and 4 to 3 (three products).
    per_sample = 2 * (64 * 9 * 2 * 2 + 16 * 9 * 2 * 3 * 3 + 12 * 4 * 3 + 4 * 3 * 3)
    assert bench_conv.step_flops(TINY) == per_sample * 2 * 2


def test_compile_seconds_are_apart_from_the_first_run(monkeypatch):
    """One tick of the clock passes between any two looks at it, and whoever looks in between adds one."""
    looks = itertools.count()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: float(next(looks))))
    one = runner(lambda state: state + 1.0, jnp.zeros(3))
    assert (one.compile_seconds, one.call()) == (1.0, 1.0)
    (measured,) = compile_times("suite", {"row": one}, "3 numbers").items()
    assert measured == ("suite/compile_row", Measurement(1.0, "s", (1.0, 1.0), "tracing and compiling; 3 numbers"))


def test_runner_feeds_each_result_to_the_next_call_and_leaves_its_argument_usable():
    start = jnp.zeros(3)
    seen = []

    def step(state, increment):
        jax.debug.callback(lambda value: seen.append(float(value)), state[0])
        return state + increment

    one = runner(step, start, jnp.ones(()))
    assert one.call() > 0
    jax.effects_barrier()
    assert seen == [0.0, 1.0]
    np.testing.assert_array_equal(start, np.zeros(3))


def test_rivals_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or 1.0 for name in ("ours", "theirs")}
    seconds = in_turns(calls, {"ours": 4, "theirs": 2})
    assert order == ["ours", "ours", "theirs", "ours", "ours", "theirs"]
    assert [len(seconds[name]) for name in ("ours", "theirs")] == [4, 2]


def test_ratio_is_of_medians_with_the_extremes():
    assert ratio([4.0, 8.0, 6.0], [2.0, 1.0, 3.0]) == (3.0, (4 / 3, 8.0))


def test_an_unwritable_file_is_named_before_anything_runs(tmp_path):
    with pytest.raises(ArgumentError, match="--json: must name a file in an existing folder"):
        bench.run("conv", tmp_path / "missing" / "bench.json")


def test_an_unknown_suite_is_named():
    with pytest.raises(ArgumentError, match=r"suite: must be one of conv, .*saga, .*, scale, all; got 'cnov'"):
        bench.run("cnov")


def test_json_keeps_measurements_and_environment_apart():
    text = bench.as_json({"conv/x": Measurement(2.0, "x", (1.0, 3.0), "y")})
    assert json.loads(text)["conv/x"] == {"value": 2.0, "unit": "x", "spread": [1.0, 3.0], "against": "y"}
