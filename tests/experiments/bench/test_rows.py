"""Rows of a ratio compute the same, and each does what it is named after."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import clip, flax_rows, mix, peers, resnet, setting, tracking
from experiments.bench.setting import KEY, Network, Setting, layer_flops, node_batches, node_params, perceptron
from jaxfl import graphs
from jaxfl.core import Purpose, purpose_key
from jaxfl.core.tree import size
from jaxfl.models import cnn, resnet20

CNN = Network(cnn((8, 8, 1), channels=(2, 3), window=3, hidden=4, num_classes=3), "cnn", (8, 8, 1), 3)
THIN = Network(cnn((8, 8, 1), channels=(2,), window=3, hidden=3, num_classes=3), "CNN", (8, 8, 1), 3)
RESNET = Network(resnet20((6, 8, 3), 3, widths=(4, 6), blocks=(1, 2), shortcut="padding"), "ResNet-20", (6, 8, 3), 3)
PROJECTED = Network(resnet20((8, 8, 3), 3, widths=(4,), blocks=(1,), shortcut="projection"), "resnet", (8, 8, 3), 3)
FEW = Setting(CNN, 3, batch_size=6, samples=7, clip_norm=0.5, noise_std=0.0, step_size=0.1, num_local_steps=3)
WORKLOADS = {
    "w1": FEW._replace(network=perceptron(12, 4, 3), method="fed_avg", num_nodes=4, num_active=3),
    "w3_mlp": FEW._replace(network=perceptron(12, 4, 3), method="dp_sgd"),
    "w4": FEW._replace(network=perceptron(12, 4, 3), num_nodes=4, num_local_steps=1),
    "w2": FEW._replace(method="fed_avg", num_nodes=4, num_active=3),
    "w3_cnn": FEW._replace(method="dp_sgd"),
    "w5": FEW._replace(network=PROJECTED, method="fed_avg", num_nodes=2),
}
# torch.compile imports what PyTorch itself calls outdated.
FROM_TORCH = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script_method` is deprecated:DeprecationWarning")


def leaves(*trees):
    return zip(*map(jax.tree.leaves, trees), strict=True)


@pytest.mark.parametrize("network", [CNN, pytest.param(RESNET, marks=pytest.mark.slow)])
def test_flax_trains_the_same_network(network):
    """From the same parameters; batch statistics, where there are any, move with it."""
    shapes, rows = Setting(network, 2, batch_size=3, step_size=0.1), flax_rows.rows(network.model)
    start: dict[str, Any] = {name: node_params(row.init, 2) for name, row in rows.items()}
    assert jax.tree.map(jnp.shape, start["flax"][0]) == jax.tree.map(jnp.shape, start["jaxfl"][0])
    start["flax"] = (start["jaxfl"][0], start["flax"][1])
    rounds = {name: jax.jit(flax_rows.sgd_rounds(row, 2, shapes.step_size)) for name, row in rows.items()}
    ours, theirs = (rounds[name](start[name], *node_batches(shapes)) for name in ("jaxfl", "flax"))
    moved = [np.abs(new - old).max() > 0 for new, old in leaves(ours[1], start["jaxfl"][1])]
    assert all(moved)
    assert bool(moved) == (network is RESNET)
    assert jax.tree.structure(ours[0]) == jax.tree.structure(theirs[0])
    for mine, other, before in leaves(ours[0], theirs[0], start["jaxfl"][0]):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
        assert np.abs(mine - before).max() > 1e-5


def test_layer_flops_count_the_products_of_a_step():
    """Forward, and back to kernels and inputs; the images have no gradient."""
    counts = {name: flops for name, (_, flops) in layer_flops(CNN).items() if flops}
    convolutions = {"conv_1": 2 * 2 * 64 * 9 * 2, "conv_2": 2 * 3 * 16 * 9 * 2 * 3}
    assert counts == {**convolutions, "dense_1": 2 * 3 * 12 * 4, "dense_2": 2 * 3 * 4 * 3}
    first, large, small = 6 * 8 * 9 * 3 * 4, 6 * 8 * 9 * 4 * 4, 3 * 4 * 9 * 6 * 6
    assert [(part.name, part.input_shape, part.flops) for part in resnet.stages(RESNET)] == [
        ("stem", (6, 8, 3), 2 * 2 * first),
        ("stage_1", (6, 8, 4), 2 * 3 * 2 * large),
        ("stage_2", (6, 8, 4), 2 * 3 * (3 * 4 * 9 * 4 * 6 + 3 * small)),
    ]


@pytest.mark.slow
def test_the_bare_evaluations_are_those_of_the_iteration():
    """The same samples, parameters and clipping; the step that the bare row takes is the iteration's gradient."""
    shapes = Setting(perceptron(12, 3), 5, batch_size=3, samples=4, step_size=1.0, rounds=1)
    task, data = shapes.task(), setting.random_data(shapes)
    algorithm = tracking.tracking(shapes, task, clip_norm=0.5)
    state = jax.jit(algorithm.init)(KEY, data)
    after, infos = jax.jit(setting.loop(algorithm, 1, infos=True))((state, None), data)
    assert infos.gradient_evaluations.tolist() == [[3] * 5]
    assert infos.clipped_fraction.max() > 0
    step = jax.jit(tracking.evaluations(shapes, task, clip_norm=0.5))
    params, k = step((after.broadcast_params, jnp.int32(1)), data)
    assert int(k) == 2
    for old, new, slope in leaves(after.broadcast_params, params, after.gradient):
        np.testing.assert_allclose(old - new, slope, atol=1e-6)
        assert np.abs(slope).max() > 0


@pytest.mark.parametrize("form", mix.FORMS)
def test_every_form_of_mixing_writes_the_product_of_the_round(form):
    graph, x = graphs.exponential(4), np.arange(20, dtype=np.float32).reshape(4, 5)
    result, after = jax.jit(mix.mixing(graph, form, 3))((jnp.zeros((4, 5)), jnp.asarray(x)))
    expected = x
    for k in range(3):
        expected = graph.mixing_matrix(k) @ x
        x[0, 0] = expected[0, 0]
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_allclose(after, x, rtol=1e-6)


@pytest.mark.parametrize("network", [perceptron(64, 4, 3), THIN])
@pytest.mark.quick_cases(1)
def test_clipping_with_and_without_per_sample_gradients_gives_the_same_steps(network):
    shapes = Setting(network, 2, batch_size=5, clip_norm=0.5)
    task = shapes.task()
    arguments = node_params(task.init, 2), *node_batches(shapes)
    rows = clip.gradients(shapes, task)
    steps = {name: jax.jit(clip.descent(row, task.node_loop, 2, 1.0))(*arguments) for name, row in rows.items()}
    plain = steps.pop("unclipped")
    assert len(steps) == (2 if task.node_loop == "vmap" else 3)
    for other in steps.values():
        for mine, theirs in leaves(steps["clipped"], other):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert max(np.abs(mine - other).max() for mine, other in leaves(steps["clipped"], plain)) > 1e-3


def pool_positions(method, data, draws):
    """(active, steps, batch) positions in the pool that a round's draws name."""
    indices = np.asarray(data.indices)
    if method == "push_sum":
        return np.take_along_axis(indices, np.asarray(draws.gradient.indices), axis=1)[:, None]
    return indices[np.asarray(draws.active)[:, None, None], np.asarray(draws.steps.batch_indices)]


@FROM_TORCH
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("w1", {"loop", "stacked", "vmap_compiled"}),
        ("w3_mlp", {"vmap_grad", "ghost"}),
        ("w4", {"loop", "stacked", "vmap_compiled"}),
        pytest.param("w2", {"loop"}, marks=pytest.mark.slow),
        pytest.param("w3_cnn", {"vmap_grad", "ghost"}, marks=pytest.mark.slow),
        pytest.param("w5", {"loop"}, marks=pytest.mark.slow),
    ],
)
def test_pytorch_does_the_same_rounds(name, rows):
    """Two rounds from the same parameters on the same batches; noise apart, which is off."""
    torch = pytest.importorskip("torch")
    from experiments.bench import torch_rows

    shapes = WORKLOADS[name]
    algorithm, data = peers.method(shapes), setting.random_data(shapes, np.float32)
    params = jax.jit(shapes.network.model.init)(purpose_key(KEY, Purpose.INIT))
    rivals = torch_rows.rivals(shapes, params, data)
    assert set(rivals) == rows
    draw, update = jax.jit(algorithm.draw), jax.jit(lambda *args: algorithm.update(*args)[0])
    state = jax.jit(algorithm.init)(KEY, data)
    for _ in range(2):
        draws = draw(KEY, state, data)
        positions = torch.from_numpy(pool_positions(shapes.method, data, draws)).long()
        for rival in rivals.values():
            rival.one_round(positions)
        state = update(state, data, draws)
    each = range(4) if name == "w4" else [...]
    nodes = [torch_rows.as_torch(jax.tree.map(lambda leaf, i=i: leaf[i], state.params)) for i in each]
    start = torch_rows.as_torch(params)
    for rival in rivals.values():
        result = rival.result()
        assert set(result) == set(start)
        for leaf, first in start.items():
            wanted = np.stack([np.asarray(node[leaf]) for node in nodes])
            np.testing.assert_allclose(np.asarray(result[leaf]).reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-6)
            assert np.abs(wanted - np.asarray(first)).max() > 1e-4


def test_pytorch_has_the_same_parameters():
    """By name and shape; another network is refused."""
    torch = pytest.importorskip("torch")
    from experiments.bench import torch_rows

    for shapes in peers.SETTINGS.values():
        model = shapes.network.model
        trees = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(model.init, KEY))
        zeros = torch_rows.as_torch(trees)
        module = torch_rows.network(model, zeros)
        assert sum(values.numel() for values in module.parameters()) == size(trees)
        assert torch.count_nonzero(next(module.parameters())) == 0
        with pytest.raises(AssertionError, match="another network"):
            torch_rows.network(model, {**zeros, "other": next(iter(zeros.values()))})


@FROM_TORCH
@pytest.mark.bench
def test_pytorch_rows_are_timed_beside_ours(monkeypatch):
    pytest.importorskip("torch")
    report = peers.suite({"w1": WORKLOADS["w1"]}, "torch")
    rows = ("torch_loop", "torch_stacked", "torch_vmap_compiled")
    rates = {row: report[f"peers/w1_{row}"].value for row in ("jaxfl", *rows)}
    best = max(rates[row] for row in rows)
    assert report["peers/w1_vs_torch"].value == pytest.approx(rates["jaxfl"] / best)
