"""The suite on other libraries' workloads: what it names, what it refuses, and that both sides do the same round."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, bench_peers
from experiments.bench_round import KEY, without_info
from experiments.timing import Runner
from jaxfl.core import ArgumentError, Purpose, purpose_key
from jaxfl.core.tree import size
from jaxfl.gradients import Batch
from jaxfl.models import classification

TINY = bench_peers.Setting(
    samples=7,
    num_clients=4,
    num_active=3,
    image_shape=(8, 8, 1),
    num_classes=3,
    mlp_hidden=4,
    channels=(2, 3),
    window=3,
    hidden=4,
    batch_size=5,
    dp_clients=3,
    dp_batch_size=6,
    clip_norm=0.5,
    noise_std=0.0,
    push_sum_nodes=(4,),
    push_sum_hidden=4,
    resnet_clients=2,
    resnet_shape=(8, 8, 3),
    resnet_widths=(4,),
    resnet_blocks=(1,),
    step_size=0.1,
    max_rounds=2,
    repeats=3,
)


def pool_positions(workload, data, draws):
    """(active, steps, batch) positions in the pool that a round's draws name."""
    indices = np.asarray(data.indices)
    if workload.method == "fed_avg":
        return indices[np.asarray(draws.active)[:, None, None], np.asarray(draws.batch_indices)]
    steps = draws.gradient.indices[None] if workload.method == "push_sum" else draws.batches.indices
    return np.stack([np.take_along_axis(indices, np.asarray(one), axis=1) for one in steps], axis=1)


def test_the_workloads_are_those_that_others_were_measured_on():
    found = bench_peers.workloads(bench_peers.Setting())
    parameters = {name: size(jax.eval_shape(one.model.init, KEY)) for name, one in found.items()}
    small = {"w4_n16": 25_450, "w4_n64": 25_450}
    large = {"w1": 101_770, "w2": 1_663_370, "w3_mlp": 101_770, "w3_cnn": 1_663_370, "w5": 272_474}
    assert parameters == {**small, **large}
    shapes = {name: (one.num_nodes, one.num_active, one.num_local_steps, one.batch_size) for name, one in found.items()}
    assert shapes == {
        "w1": (100, 10, 10, 32),
        "w2": (100, 10, 5, 32),
        "w3_mlp": (10, 10, 3, 75),
        "w3_cnn": (10, 10, 3, 75),
        "w4_n16": (16, 16, 1, 32),
        "w4_n64": (64, 64, 1, 32),
        "w5": (4, 4, 2, 32),
    }
    assert set(bench_peers.WANTED) == {f"peers/{name}_vs_torch" for name in found}
    assert min(one.rounds for one in found.values()) >= 2


def test_a_private_round_is_the_mean_of_noisy_clipped_steps():
    setting = TINY._replace(noise_std=0.1)
    workload = bench_peers.workloads(setting)["w3_mlp"]
    algorithm, data = bench_peers.learner(setting, workload), bench_peers.random_data(setting, workload)
    task, state, draw = classification(workload.model), jax.jit(algorithm.init)(KEY, data), jax.jit(algorithm.draw)
    draws = draw(KEY, state, data)
    noise = bench_peers.privacy.gaussian(setting.noise_std)

    @jax.jit
    def step(params, positions, noise_key):
        def one(values, sample, label):
            gradient = jax.grad(lambda tree: task.loss(tree, sample[None], label[None])[0])(values)
            norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
            return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, setting.clip_norm / norm), gradient)

        each = jax.vmap(jax.vmap(one, (None, 0, 0)))(params, data.inputs[positions], data.labels[positions])
        gradient = jax.tree.map(lambda leaf: leaf.mean(axis=1), each)
        noisy = jax.tree.map(jnp.add, gradient, noise.draw(noise_key, params))
        return jax.tree.map(lambda x, g: x - setting.step_size * g, params, noisy)

    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * workload.num_nodes), state.params)
    positions = pool_positions(workload, data, draws)
    for number in range(workload.num_local_steps):
        params = step(params, positions[:, number], purpose_key(KEY, Purpose.NOISE, number))
    found = jax.jit(without_info(algorithm, 1))(state, data)
    assert int(found.round_index) == 1
    for mine, wanted, start in zip(*map(jax.tree.leaves, (found.params, params, state.params)), strict=True):
        np.testing.assert_allclose(mine, wanted.mean(axis=0), rtol=1e-5, atol=1e-6)
        assert np.abs(mine - start).max() > 1e-3
    assert isinstance(draws.batches, Batch)
    later = draw(KEY, found, data)
    assert not np.array_equal(later.batches.indices, draws.batches.indices)


def test_rates_and_the_ratio_are_those_of_the_clocks():
    """Seconds that are given: the ratio is against the fastest of the peer's rows."""
    workload = bench_peers.workloads(TINY)["w1"]
    each = {"jaxfl": [0.1, 0.2, 0.4], "torch_loop": [0.8, 0.8, 0.8], "torch_stacked": [0.5, 0.6, 0.7]}
    report = bench_peers._report("w1", workload, Runner(lambda: 0.0, 3.0, 0), each)  # pyright: ignore[reportPrivateUsage]
    assert report["peers/w1_jaxfl"].value == 5.0
    assert report["peers/w1_jaxfl"].spread == (2.5, 10.0)
    assert report["peers/w1_torch_loop"].value == 1.25
    assert report["peers/w1_vs_torch"].value == pytest.approx(3.0)
    assert report["peers/w1_vs_torch"].spread == pytest.approx((0.5 / 0.4, 0.7 / 0.1))
    assert "torch stacked" in report["peers/w1_vs_torch"].against
    assert report["peers/compile_w1"].value == 3.0
    alone = bench_peers._report("w1", workload, Runner(lambda: 0.0, 3.0, 0), {"jaxfl": [1.0]})  # pyright: ignore[reportPrivateUsage]
    assert set(alone) == {"peers/w1_jaxfl", "peers/compile_w1"}


@pytest.mark.bench
def test_peers_suite_names_its_numbers_and_what_is_wanted(tmp_path, monkeypatch, capsys):
    only = {"w1": bench_peers.workloads(TINY)["w1"]}
    monkeypatch.setattr(bench_peers, "workloads", lambda setting: only)
    monkeypatch.setattr(bench_peers, "Setting", lambda: TINY)
    monkeypatch.setattr(bench_peers, "require_peer", lambda peer: None)
    monkeypatch.setattr(bench_peers, "_peer_calls", lambda *_: {"loop": (lambda: 1e3, 4)})
    bench.run("peers", tmp_path / "bench.json", "torch")
    written = json.loads((tmp_path / "bench.json").read_text())
    assert set(written) == {
        "peers/w1_jaxfl",
        "peers/w1_torch_loop",
        "peers/w1_vs_torch",
        "peers/compile_w1",
        "environment",
    }
    assert written["peers/w1_vs_torch"]["wanted"] == 1.3
    assert written["peers/w1_torch_loop"]["value"] == 4e-3
    assert "wanted" not in written["peers/w1_jaxfl"]
    assert "wanted" in capsys.readouterr().out


def test_a_peer_is_refused_before_anything_runs(monkeypatch):
    with pytest.raises(ArgumentError, match=r"--against: is an option of the suite peers; got it with conv\."):
        bench.run("conv", against="torch")
    with pytest.raises(ArgumentError, match=r"--against: must be one of torch; got 'flower'\."):
        bench.run("peers", against="flower")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"torch is not installed\. Install it \(pip install torch\)"):
        bench.run("all", against="torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ArgumentError, match=r"JAX runs on gpu\. Set JAX_PLATFORMS=cpu"):
        bench.run("peers", against="torch")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("w1", {"loop", "stacked"}),
        ("w3_mlp", {"vmap_grad", "ghost"}),
        ("w4_n4", {"loop", "stacked"}),
        pytest.param("w2", {"loop"}, marks=pytest.mark.slow),
        pytest.param("w3_cnn", {"vmap_grad", "ghost"}, marks=pytest.mark.slow),
        pytest.param("w5", {"loop"}, marks=pytest.mark.slow),
    ],
)
def test_pytorch_does_the_same_rounds(name, rows):
    """Two rounds from the same parameters on the same batches; noise apart, which is off."""
    torch = pytest.importorskip("torch")
    from experiments import bench_peers_torch

    workload = bench_peers.workloads(TINY)[name]
    algorithm, data = bench_peers.learner(TINY, workload), bench_peers.random_data(TINY, workload)
    params = jax.jit(workload.model.init)(purpose_key(KEY, Purpose.INIT))
    rivals = bench_peers_torch.rivals(TINY, workload, params, data)
    assert set(rivals) == rows
    draw, update = jax.jit(algorithm.draw), jax.jit(lambda *args: algorithm.update(*args)[0])
    state = jax.jit(algorithm.init)(KEY, data)
    for _ in range(2):
        draws = draw(KEY, state, data)
        positions = torch.from_numpy(pool_positions(workload, data, draws)).long()
        for rival in rivals.values():
            rival.one_round(positions)
        state = update(state, data, draws)
    nodes = [
        bench_peers_torch.as_torch(
            jax.tree.map(lambda leaf, i=i: leaf[i], state.params) if name == "w4_n4" else state.params
        )
        for i in range(4 if name == "w4_n4" else 1)
    ]
    start = bench_peers_torch.as_torch(params)
    for rival in rivals.values():
        found = rival.result()
        assert set(found) == set(start)
        for leaf, first in start.items():
            wanted = np.stack([np.asarray(node[leaf]) for node in nodes])
            np.testing.assert_allclose(np.asarray(found[leaf]).reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-6)
            assert np.abs(wanted - np.asarray(first)).max() > 1e-4


def test_both_sides_have_the_same_parameters():
    """By name and shape; a network of another width is refused."""
    torch = pytest.importorskip("torch")
    from experiments import bench_peers_torch

    setting = bench_peers.Setting()
    for workload in bench_peers.workloads(setting).values():
        shapes = jax.eval_shape(workload.model.init, KEY)
        module = bench_peers_torch.network(setting, workload)
        assert sum(values.numel() for values in module.parameters()) == size(shapes)
        zeros = bench_peers_torch.as_torch(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
        load = bench_peers_torch._load  # pyright: ignore[reportPrivateUsage]
        assert torch.count_nonzero(next(load(module, zeros).parameters())) == 0
        other = bench_peers_torch.network(setting._replace(num_classes=11), workload)
        with pytest.raises(AssertionError, match="another network"):
            load(other, zeros)


@pytest.mark.bench
def test_pytorch_rows_run_beside_ours():
    pytest.importorskip("torch")
    workload = bench_peers.workloads(TINY)["w1"]
    report = bench_peers._measure(TINY, "w1", workload, "torch")  # pyright: ignore[reportPrivateUsage]
    rows = {"w1_jaxfl", "w1_torch_loop", "w1_torch_stacked", "w1_vs_torch", "compile_w1"}
    assert set(report) == {f"peers/{row}" for row in rows}
    for one in report.values():
        assert np.isfinite(one.value)
        assert one.spread[0] <= one.value <= one.spread[1]
    best = max(report["peers/w1_torch_loop"].value, report["peers/w1_torch_stacked"].value)
    assert report["peers/w1_vs_torch"].value == pytest.approx(report["peers/w1_jaxfl"].value / best)
