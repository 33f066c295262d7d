"""The suites on mixing, clipping, parts of a round and sizes: rows of a ratio compute the same."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, bench_clip, bench_mix, bench_round, bench_scale
from experiments.timing import Measurement, Runner
from jaxfl import gradients, graphs

TINY_MIX = bench_mix.Setting(num_nodes=4, num_params=5, rounds=3, repeats=2)
TINY_CLIP = bench_clip.Setting(
    mlp_hidden=(4,),
    mlp_nodes=2,
    mlp_rounds=2,
    cnn_nodes=2,
    sample_shape=(8, 8, 1),
    channels=(2,),
    window=3,
    hidden=3,
    num_classes=3,
    batch_size=5,
    clip_norm=1.5,
    repeats=2,
    per_sample_repeats=1,
)
TINY_ROUND = bench_round.Setting(num_nodes=4, widths=(12, 4, 3), samples=6, batch_size=2, rounds=2, repeats=2)
TINY_SCALE = bench_scale.Setting(
    num_features=4,
    num_classes=3,
    samples=4,
    batch_size=2,
    nodes=(2, 4),
    hidden_of_nodes=2,
    hidden=(2, 3),
    nodes_of_hidden=2,
    numbers=200,
    repeats=2,
)


def check_measurements(report):
    for one in report.values():
        assert np.isfinite(one.value)
        assert one.spread[0] <= one.value <= one.spread[1]


@pytest.mark.parametrize("form", ["dense", "circulant", "neighbors"])
def test_every_form_of_mixing_writes_the_product_of_the_round(form):
    graph, x = graphs.exponential(4), np.arange(20, dtype=np.float32).reshape(4, 5)
    result, after = jax.jit(bench_mix.mixing(graph, form, 3))((jnp.zeros((4, 5)), jnp.asarray(x)))
    expected = x
    for k in range(3):
        expected = graph.mixing_matrix(k) @ x
        x[0, 0] = expected[0, 0]
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_allclose(after, x, rtol=1e-6)


def test_the_rival_of_mixing_is_half_of_both():
    first, second = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    result = jax.jit(bench_mix.half_sums(12))(jnp.zeros((2, 3)), first, second)
    np.testing.assert_array_equal(result, 0.5 * first + 0.5 * second)


@pytest.mark.bench
def test_mix_suite_names_its_numbers():
    report = bench_mix.suite(TINY_MIX)
    assert {f"mix/{form}_vs_{rival}" for form in ("circulant", "neighbors") for rival in ("dense", "half_sum")} <= set(
        report
    )
    assert {f"mix/temp_{name}" for name in ("dense", "circulant", "neighbors", "half_sum")} <= set(report)
    check_measurements(report)


@pytest.mark.parametrize("name", ["mlp4", "cnn"])
def test_clipping_with_and_without_per_sample_gradients_gives_the_same_steps(name):
    network = bench_clip.networks(TINY_CLIP)[name]
    arguments = bench_clip.node_batches(TINY_CLIP, network)
    norm = TINY_CLIP.clip_norm if name == "mlp4" else 0.5
    functions = [
        bench_clip.as_jaxfl(network.task, norm),
        bench_clip.by_samples(network.task, norm),
        bench_clip.as_jaxfl(network.task, None),
    ]
    ours, theirs, unclipped = (
        jax.jit(bench_clip.descent(one, network.task.node_loop, 2, 1.0))(*arguments) for one in functions
    )
    differences = []
    for mine, other, plain in zip(*map(jax.tree.leaves, (ours, theirs, unclipped)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
        differences.append(np.abs(mine - plain).max())
    assert max(differences) > 1e-3


@pytest.mark.bench
def test_clip_suite_names_its_numbers(monkeypatch):
    small = {"mlp4": bench_clip.networks(TINY_CLIP)["mlp4"]}
    monkeypatch.setattr(bench_clip, "networks", lambda setting: small)
    report = bench_clip.suite(TINY_CLIP)
    ratios = {"vs_unclipped", "speedup_vs_per_sample", "temp_vs_unclipped"}
    rows = {"unclipped", "clipped", "per_sample"}
    assert {f"clip/mlp4_{name}" for name in ratios | rows | {f"temp_{row}" for row in rows}} <= set(report)
    check_measurements(report)
    temporaries = [report[f"clip/mlp4_temp_{row}"].value for row in ("clipped", "unclipped")]
    assert report["clip/mlp4_temp_vs_unclipped"].value == pytest.approx(temporaries[0] / temporaries[1])


@pytest.mark.slow
def test_dropping_the_infos_changes_no_iteration():
    algorithm = bench_round.learner(TINY_ROUND, gradients.fixed(2))
    data = bench_round.random_data(bench_round.DataSetting(widths=TINY_ROUND.widths), 4, 6)
    state = algorithm.init(bench_round.KEY, data)
    infos = bench_round.no_infos(algorithm, state, data, 2)
    kept, found = jax.jit(bench_round.iterations(algorithm, 2))((state, infos), data)
    dropped = jax.jit(bench_round.without_info(algorithm, 2))(state, data)
    assert int(dropped.round_index) == 2
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, infos)
    for one, other in zip(*map(jax.tree.leaves, (kept, dropped)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_the_bare_products_are_the_gradients_of_a_linear_network():
    rng = np.random.default_rng(0)
    x, first, second = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 5), (5, 4), (4, 2)))
    found = bench_round.linear_gradient(
        {"dense_1": {"kernel": jnp.asarray(first)}, "dense_2": {"kernel": jnp.asarray(second)}},
        jnp.asarray(x),
        jnp.zeros(3),
    )
    output = x @ first @ second
    np.testing.assert_allclose(found["dense_1"]["kernel"], x.T @ (output @ second.T), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["dense_2"]["kernel"], (x @ first).T @ output, rtol=1e-4, atol=1e-5)


def test_shares_of_a_round_are_those_of_its_parts():
    """Clocks that stand still: the share outside is what products, noise and drawing leave of the iteration."""
    seconds = {
        "iteration": 10.0,
        "iteration_poisson": 16.0,
        "iteration_plain": 4.0,
        "without_info": 9.0,
        "products": 2.0,
        "gradients": 3.0,
        "noise": 3.0,
        "drawing": 1.0,
        "gathering": 0.5,
        "mixing": 0.25,
    }
    rows = {name: Runner(lambda value=value: value, 0.0, 0) for name, value in seconds.items()}
    report = bench_round._report(TINY_ROUND, rows)  # pyright: ignore[reportPrivateUsage]
    assert report["round/share_outside"].value == pytest.approx(0.4)
    assert report["round/share_of_parts_outside"].value == pytest.approx(0.175)
    assert report["round/share_info"].value == pytest.approx(0.1)
    assert report["round/share_mixing"].value == pytest.approx(0.025)
    assert report["round/rate_iteration"].value == pytest.approx(0.2)
    assert report["round/noise"].value == pytest.approx(1500.0)
    check_measurements(report)


@pytest.mark.bench
@pytest.mark.slow
def test_round_suite_names_its_numbers():
    report = bench_round.suite(TINY_ROUND)
    assert {"round/share_outside", "round/rate_iteration", "round/iteration_poisson", "round/gathering"} <= set(report)
    check_measurements(report)


@pytest.mark.bench
@pytest.mark.slow
def test_scale_suite_names_its_numbers():
    report = bench_scale.suite(TINY_SCALE)
    assert bench_scale.series(report, "time", "n")[0] == [2, 4]
    assert bench_scale.series(report, "memory", "d")[0] == [19, 27]
    assert report["scale/memory_n4"].value > report["scale/memory_n2"].value
    check_measurements(report)


def test_the_largest_n_follows_from_the_bytes_of_one_more_node():
    fewer, more = (bench_scale.Row(n, 7, [1.0], 1000 + n * 2**20) for n in (4, 16))
    report = bench_scale._largest(fewer, more)  # pyright: ignore[reportPrivateUsage]
    assert report["scale/bytes_per_node"].value == 2**20
    assert report["scale/largest_n"].value == 24 * 2**10


def test_the_picture_lies_beside_the_numbers(tmp_path, monkeypatch):
    one = Measurement(2.0, "x", (1.0, 3.0), "y")
    names = [f"scale/{kind}_{axis}{size}" for kind in ("time", "memory") for axis in "nd" for size in (16, 4)]
    measurements = dict.fromkeys(["scale/largest_n", *names], one)
    module = types.ModuleType("tiny_suite")
    setattr(module, "suite", lambda: measurements)  # noqa: B010
    setattr(module, "plot", bench_scale.plot)  # noqa: B010
    monkeypatch.setitem(sys.modules, "tiny_suite", module)
    monkeypatch.setitem(bench.SUITES, "scale", "tiny_suite")
    bench.run("scale", tmp_path / "numbers.json")
    assert set(json.loads((tmp_path / "numbers.json").read_text())) == {*measurements, "environment"}
    assert (tmp_path / "numbers.png").read_bytes().startswith(b"\x89PNG")
    assert bench_scale.series(measurements, "time", "d") == ([4, 16], [2.0, 2.0])


@pytest.mark.slow
def test_each_part_of_a_round_does_what_it_is_named_after(monkeypatch):
    """The parts' functions, run once without compiling them for timing."""
    held = {}

    def one_call(fn, state, *args):
        held[len(held)] = jax.jit(fn)(state, *args)
        return Runner(lambda: 0.0, 0.0, 0)

    monkeypatch.setattr(bench_round, "runner", one_call)
    setting, sampler = TINY_ROUND._replace(rounds=1), gradients.fixed(2)
    data = bench_round.random_data(bench_round.DataSetting(widths=setting.widths), 4, 6)
    algorithm = bench_round.learner(setting, sampler)
    state = algorithm.init(bench_round.KEY, data)
    draws = algorithm.draw(bench_round.KEY, state, data)
    found = dict(zip(bench_round.parts(setting, sampler, data), held.values(), strict=True))
    noisy = jax.tree.map(jnp.add, state.params, draws.noise)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found["noise"], noisy)
    np.testing.assert_array_equal(found["drawing"].indices, draws.gradient.indices)
    np.testing.assert_array_equal(found["gathering"][0], bench_round.gather(data, draws.gradient.indices)[0])
    np.testing.assert_allclose(found["mixing"][1], np.ones(4), rtol=1e-6)
