"""Rows of a ratio compute the same, and each does what it is named after."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import clip, embracing, flax_rows, mix, peers, resnet, round, setting, tracking
from experiments.bench.setting import KEY, Network, Setting, layer_flops, node_batches, node_params, perceptron
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms.clients.steps import NoiseKeys
from jaxfl.core import Purpose, purpose_key
from jaxfl.core.tree import size
from jaxfl.models import cnn, resnet20

CNN = Network(cnn((8, 8, 1), channels=(2, 3), window=3, hidden=4, num_classes=3), "cnn", (8, 8, 1), 3)
THIN = Network(cnn((8, 8, 1), channels=(2,), window=3, hidden=3, num_classes=3), "CNN", (8, 8, 1), 3)
RESNET = Network(resnet20((6, 8, 3), 3, widths=(4, 6), blocks=(1, 2), shortcut="padding"), "ResNet-20", (6, 8, 3), 3)
PROJECTED = Network(resnet20((8, 8, 3), 3, widths=(4,), blocks=(1,), shortcut="projection"), "resnet", (8, 8, 3), 3)
TINY = Setting(perceptron(12, 4, 3), 4, batch_size=2, samples=6)
FEW = Setting(CNN, 3, batch_size=6, samples=7, clip_norm=0.5, noise_std=0.0, step_size=0.1, num_local_steps=3)
WORKLOADS = {
    "w1": FEW._replace(network=perceptron(12, 4, 3), method="fed_avg", num_nodes=4, num_active=3),
    "w3_mlp": FEW._replace(network=perceptron(12, 4, 3), method="dp_sgd"),
    "w4": FEW._replace(network=perceptron(12, 4, 3), num_nodes=4, num_local_steps=1),
    "w2": FEW._replace(method="fed_avg", num_nodes=4, num_active=3),
    "w3_cnn": FEW._replace(method="dp_sgd"),
    "w5": FEW._replace(network=PROJECTED, method="fed_avg", num_nodes=2),
}


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


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.quick_cases(1)
def test_a_stage_is_trained_and_its_inputs_get_a_gradient_but_for_the_images(number):
    part = resnet.stages(RESNET)[number]
    train, state, inputs = resnet.stage_rounds(Setting(RESNET, 1, batch_size=3), part)
    variables, pulled = jax.jit(train)(state, inputs)
    for new, old in zip(variables, state[0], strict=True):
        assert any(jnp.any(one != other) for one, other in leaves(new, old))
    assert bool(jnp.any(pulled != 0)) == (part.name != "stem")


@pytest.mark.slow
def test_clients_of_each_class_train_their_blocks(monkeypatch):
    """A weak client alone leaves the front as it was; a strong one moves all."""
    monkeypatch.setattr(setting, "runner", lambda fn, state, data: (state, jax.jit(fn)(state, data)))
    network = Network(resnet20((8, 8, 3), 3, widths=(4, 6, 8), blocks=(1, 1, 1)), "", (8, 8, 3), 3)
    shapes, trained = Setting(network, 1, batch_size=2, samples=4, num_local_steps=2, rounds=1), {}
    for name in embracing.FIRST_BLOCKS:
        before, after = cast(Any, embracing.rounds(shapes, shapes.task(), {name: 1}))
        moved = jax.tree.map(lambda new, old: bool(np.any(new != old)), after.params, before.params)
        trained[name] = sorted(layer for layer, changes in moved.items() if any(jax.tree.leaves(changes)))
        assert int(after.round_index) == 1
    blocks = ["block_1_1", "block_2_1", "block_3_1", "dense", "stem"]
    assert trained == {"strong": blocks, "moderate": blocks[1:4], "weak": blocks[2:4]}


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


def test_the_row_without_gradients_has_the_same_parameters():
    task = TINY.task()
    free, params = tracking.without_gradients(task), task.init(KEY)
    assert jax.tree.map(jnp.shape, free.init(KEY)) == jax.tree.map(jnp.shape, params)
    slopes = jax.grad(lambda p: free.loss(p, jnp.ones((2, 12)), jnp.zeros(2, jnp.int32)).sum())(params)
    assert all((np.asarray(leaf) == 2).all() for leaf in jax.tree.leaves(slopes))


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


def test_the_rival_of_mixing_is_half_of_both():
    first, second = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    result = jax.jit(mix.half_sums(12))(jnp.zeros((2, 3)), first, second)
    np.testing.assert_array_equal(result, 0.5 * first + 0.5 * second)


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


@pytest.mark.slow
def test_dropping_the_infos_changes_no_iteration():
    algorithm, data = round.private(TINY, gradients.fixed(2)), setting.random_data(TINY)
    state = jax.jit(algorithm.init)(KEY, data)
    kept, infos = jax.jit(setting.loop(algorithm, 2, infos=True))((state, None), data)
    dropped = jax.jit(setting.loop(algorithm, 2))(state, data)
    assert int(dropped.round_index) == 2
    assert {leaf.shape[0] for leaf in jax.tree.leaves(infos)} == {2}
    for one, other in leaves(kept, dropped):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_the_bare_products_are_the_gradients_of_a_linear_network():
    rng = np.random.default_rng(0)
    x, first, second = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 5), (5, 4), (4, 2)))
    kernels = {"dense_1": {"kernel": jnp.asarray(first)}, "dense_2": {"kernel": jnp.asarray(second)}}
    slopes, output = round.linear_gradient(kernels, jnp.asarray(x), jnp.zeros(3)), x @ first @ second
    np.testing.assert_allclose(slopes["dense_1"]["kernel"], x.T @ (output @ second.T), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slopes["dense_2"]["kernel"], (x @ first).T @ output, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_part_of_a_round_does_what_it_is_named_after(monkeypatch):
    """The parts' functions, run once without compiling them for timing."""
    monkeypatch.setattr(round, "runner", lambda fn, state, *args: jax.jit(fn)(state, *args))
    shapes, sampler = TINY._replace(rounds=1), gradients.fixed(2)
    algorithm, data = round.private(shapes, sampler), setting.random_data(shapes)
    state = jax.jit(algorithm.init)(KEY, data)
    draws, parts = algorithm.draw(KEY, state, data), cast(Any, round.parts(shapes, sampler, data, state.params))
    for one, other in leaves(parts["noise"], jax.tree.map(jnp.add, state.params, draws.noise)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(parts["drawing"].indices, draws.gradient.indices)
    np.testing.assert_array_equal(parts["gathering"][0], round.gather(data, draws.gradient.indices)[0])
    np.testing.assert_allclose(parts["mixing"][1], np.ones(4), rtol=1e-6)


def test_the_published_networks_and_workloads():
    numbers = {name: one.network.num_params() for name, one in peers.SETTINGS.items()}
    small = {"w4_n16": 25_450, "w4_n64": 25_450}
    large = {"w1": 101_770, "w2": 1_663_370, "w3_mlp": 101_770, "w3_cnn": 1_663_370, "w5": 272_474}
    assert numbers == {**small, **large}
    assert tracking.SETTING.network.num_params() == 4266
    shapes = {
        name: (one.num_nodes, one.active(), one.num_local_steps, one.batch_size) for name, one in peers.SETTINGS.items()
    }
    clients = {"w1": (100, 10, 10, 32), "w2": (100, 10, 5, 32), "w5": (4, 4, 2, 32)}
    private = dict.fromkeys(("w3_mlp", "w3_cnn"), (10, 10, 3, 75))
    assert shapes == {**clients, **private, "w4_n16": (16, 16, 1, 32), "w4_n64": (64, 64, 1, 32)}
    assert set(peers.WANTED) == {f"peers/{name}_vs_torch" for name in peers.SETTINGS}
    assert min(one.rounds for one in peers.SETTINGS.values()) >= 2


def pool_positions(method, data, draws):
    """(active, steps, batch) positions in the pool that a round's draws name."""
    indices = np.asarray(data.indices)
    if method == "push_sum":
        return np.take_along_axis(indices, np.asarray(draws.gradient.indices), axis=1)[:, None]
    return indices[np.asarray(draws.active)[:, None, None], np.asarray(draws.steps.batch_indices)]


@pytest.mark.slow
def test_a_private_round_is_the_mean_of_noisy_clipped_steps():
    shapes = WORKLOADS["w3_mlp"]._replace(noise_std=0.1)
    algorithm, data, task = peers.method(shapes), setting.random_data(shapes, np.float32), shapes.task()
    noise = privacy.gaussian(shapes.noise_std)
    state, draw = jax.jit(algorithm.init)(KEY, data), jax.jit(algorithm.draw)
    draws = draw(KEY, state, data)

    @jax.jit
    def step(params, positions, noise_keys):
        def one(values, sample, label):
            gradient = jax.grad(lambda tree: task.loss(tree, sample[None], label[None])[0])(values)
            norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
            return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, shapes.clip_norm / norm), gradient)

        each = jax.vmap(jax.vmap(one, (None, 0, 0)))(params, data.inputs[positions], data.labels[positions])
        gradient = jax.tree.map(lambda leaf: leaf.mean(axis=1), each)
        drawn = jax.vmap(lambda key, like: NoiseKeys(key).draw(noise, like))(noise_keys, params)
        noisy = jax.tree.map(jnp.add, gradient, drawn)
        return jax.tree.map(lambda x, g: x - shapes.step_size * g, params, noisy)

    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * shapes.num_nodes), state.params)
    positions = pool_positions(shapes.method, data, draws)
    for number in range(shapes.num_local_steps):
        params = step(params, positions[:, number], draws.steps.noise.keys[:, number])
    after = jax.jit(setting.loop(algorithm, 1))(state, data)
    assert int(after.round_index) == 1
    for mine, wanted, start in leaves(after.params, params, state.params):
        np.testing.assert_allclose(mine, wanted.mean(axis=0), rtol=1e-5, atol=1e-6)
        assert np.abs(mine - start).max() > 1e-3
    assert not np.array_equal(draw(KEY, after, data).steps.batch_indices, draws.steps.batch_indices)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("w1", {"loop", "stacked"}),
        ("w3_mlp", {"vmap_grad", "ghost"}),
        ("w4", {"loop", "stacked"}),
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


@pytest.mark.bench
def test_pytorch_rows_are_timed_beside_ours(monkeypatch):
    pytest.importorskip("torch")
    report = peers.suite({"w1": WORKLOADS["w1"]}, "torch")
    rates = {row: report[f"peers/w1_{row}"].value for row in ("jaxfl", "torch_loop", "torch_stacked")}
    best = max(rates["torch_loop"], rates["torch_stacked"])
    assert report["peers/w1_vs_torch"].value == pytest.approx(rates["jaxfl"] / best)
