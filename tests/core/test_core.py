"""Keys, checks, trees, node loops and task adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxfl
from jaxfl import ArgumentError
from jaxfl.core import Purpose, check, node_keys, over_nodes, purpose_key, tree, update_over_nodes
from jaxfl.core.tasks import sample_metrics


def bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).reshape(-1).tolist())


def test_no_two_purposes_rounds_or_nodes_share_a_key():
    base = jax.random.key(0)
    keys = [purpose_key(base, purpose, k) for purpose in Purpose for k in range(8)]
    nodes = [key for parent in keys[:16] for key in node_keys(parent, 5)]
    everything = [bits(key) for key in [base, *keys, *nodes]]
    assert len(set(everything)) == len(everything)


def test_purposes_keep_their_numbers():
    """A number, once used, is part of published results."""
    numbers = {"INIT": 0, "BATCH": 1, "PARTICIPATION": 2, "NOISE": 3, "GRAPH": 4, "PARTITION": 5, "EVENT": 6}
    numbers |= {"ROUNDING": 7, "DROPOUT": 8, "PART": 9, "CALIBRATION": 10, "RUN": 11}
    numbers |= {"SERVER_NOISE": 12, "ESTIMATE": 13, "ESTIMATE_NOISE": 14}
    numbers |= {"DIRECTION": 15, "ARRIVAL": 16, "MESSAGE_ROUNDING": 17}
    assert {purpose.name: int(purpose) for purpose in Purpose} == numbers


def test_other_generators_are_refused():
    with pytest.raises(ArgumentError, match=r"^key: must be a threefry key; got a rbg key"):
        purpose_key(jax.random.key(0, impl="rbg"), Purpose.NOISE, 0)


def test_a_new_seed_changes_every_key():
    for purpose in Purpose:
        assert bits(purpose_key(jax.random.key(0), purpose)) != bits(purpose_key(jax.random.key(1), purpose))


def test_checks_name_the_offender_and_pass_traced_values():
    with pytest.raises(ArgumentError, match=r"noise_std: must be non-negative and finite; got -2\.0 at position 1\. "):
        check.non_negative(noise_std=np.array([1.0, -2.0]))
    for bad in (0, True, 1.5, "3"):
        with pytest.raises(ArgumentError, match=r"^batch_size: "):
            check.at_least(1, batch_size=bad)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=r"^step_size: must be positive and finite"):
            check.positive(step_size=value)
    for value in (1e-46, 1e39, 10**40):  # 0 and infinite in float32
        with pytest.raises(ArgumentError, match=r"^noise_std: must lie between 1\.2e-38 and 3\.4e\+38 in size; got"):
            check.in_float32(noise_std=np.array([0.0, value]))
    check.in_float32(noise_std=0.0, step_size=1e-37, clip_norm=10**30)
    check.positive(rounds=10**15, loss=1e-300)
    with pytest.raises(ArgumentError, match=r"^clip_norm: must be positive and finite"):
        check.positive(clip_norm=10**400)
    with pytest.raises(ArgumentError, match=r"^p: must lie in \[0, 1\]; got 1\.5"):
        check.probability(p=1.5)
    for value in (0.0, 1.0, float("nan")):
        with pytest.raises(ArgumentError, match=r"^dp_delta: must lie strictly between 0 and 1; got "):
            check.open_unit(dp_delta=value)
    check.open_unit(dp_delta=1e-30, significance=np.array([0.5]))
    with pytest.raises(ArgumentError, match=r"^noise: .* got shape \(3,\) for 4 nodes"):
        check.per_node(4, noise=np.ones(3))

    def traced(x):
        check.positive(x=x)
        check.non_negative(x=x)
        check.open_unit(x=x)
        return x

    assert float(jax.jit(traced)(-1.0)) == -1.0
    check.positive(step_size=lambda k: 0.1)
    with pytest.raises(ArgumentError, match=r"^n: must be a static integer"):
        jax.jit(lambda n: check.at_least(1, n=n))(3)


def test_trees():
    values = {"a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": jnp.ones((2, 2, 2), jnp.float32)}
    np.testing.assert_allclose(tree.squared_norm(values), [0 + 1 + 4 + 4, 9 + 16 + 25 + 4])
    np.testing.assert_allclose(tree.scale(jnp.array([0.0, 2.0]), values)["b"], [[[0, 0]] * 2, [[2, 2]] * 2])
    slope = jax.grad(lambda t: tree.norm(t).sum())(jax.tree.map(jnp.zeros_like, values))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(slope)), "the norm's derivative at 0 is 0"
    assert tree.size(values) == 14
    assert tree.num_bytes(values) == 56
    mean = np.concatenate([np.asarray(leaf).reshape(2, -1) for leaf in values.values()], 1).mean(0)
    flat = np.concatenate([np.asarray(leaf).reshape(2, -1) for leaf in values.values()], 1)
    np.testing.assert_allclose(tree.consensus_distance(values), ((flat - mean) ** 2).sum(1).mean(), rtol=1e-6)


def test_flattener_round_trip_behind_any_leading_axes():
    shapes = {"b": jax.ShapeDtypeStruct((), jnp.float32), "w": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    flatten, unflatten = tree.flattener(shapes)
    flat = jnp.arange(4 * 5 * 7.0).reshape(4, 5, 7)
    np.testing.assert_array_equal(flatten(unflatten(flat)), flat)
    assert unflatten(flat)["w"].shape == (4, 5, 3, 2)


@pytest.mark.parametrize("node_loop", ["vmap", "map", "chunk:2", "chunk:5"])
def test_node_loops_agree(node_loop):
    arguments = jnp.arange(12.0).reshape(4, 3), {"a": jnp.arange(4.0)}
    fn = over_nodes(lambda x, y: (x.sum() * y["a"], x), node_loop)
    expected = np.asarray(arguments[0]).sum(1) * np.arange(4.0)
    np.testing.assert_allclose(jax.jit(fn)(*arguments)[0], expected)


@pytest.mark.parametrize("node_loop", ["vmap", "map", "chunk:2", "chunk:3", "chunk:9"])
def test_updates_over_nodes_equal_over_nodes(node_loop):
    values, shifts = {"x": jnp.arange(20.0).reshape(5, 4), "y": jnp.arange(5.0)}, jnp.arange(5.0)

    def step(node, shift):
        return {"x": node["x"] * node["y"] + shift, "y": node["y"] + node["x"].sum()}

    updated = jax.jit(update_over_nodes(step, node_loop))(values, shifts)
    for ours, plain in zip(*map(jax.tree.leaves, (updated, jax.vmap(step)(values, shifts))), strict=True):
        np.testing.assert_allclose(ours, plain)


@pytest.mark.parametrize("node_loop", ["map", "chunk:2"])
def test_updates_over_nodes_make_no_copy_of_all_nodes(node_loop):
    def rounds(loop):
        one = loop(lambda x, shift: jnp.tanh(x) * x.sum() + shift, node_loop)
        return lambda x, shifts: jax.lax.scan(lambda held, _: (one(held, shifts), None), x, length=3)[0]

    arguments = jax.ShapeDtypeStruct((64, 10_000), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    whole = 4 * 64 * 10_000
    for loop, copies in ((update_over_nodes, False), (over_nodes, True)):
        memory = jax.jit(rounds(loop), donate_argnums=0).lower(*arguments).compile().memory_analysis()
        assert memory is not None
        assert (memory.temp_size_in_bytes > whole / 4) == copies


@pytest.mark.parametrize("bad", ["pmap", "chunk:0", "chunk:", "chunk:-1", "", "devices:", "devices:devices:map"])
def test_unknown_node_loops_are_refused(bad):
    with pytest.raises(
        ArgumentError, match=r'^node_loop: must be "vmap", "map" or "chunk:k", or one of these behind "devices:"'
    ):
        over_nodes(lambda x: x, bad)
    with pytest.raises(
        ArgumentError, match=r'^node_loop: must be "vmap", "map" or "chunk:k", or one of these behind "devices:"'
    ):
        update_over_nodes(lambda x: x, bad)


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.output = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.output(nnx.relu(self.norm(self.hidden(x))))


def test_a_flax_module_trains_like_the_module_itself():
    task = jaxfl.from_flax(TwoLayers)
    params = task.init(jax.random.key(3))
    module = TwoLayers(nnx.Rngs(jax.random.key(3)))
    inputs = jax.random.normal(jax.random.key(0), (5, 4), jnp.float32)
    labels = jnp.array([0, 1, 2, 1, 0], jnp.int32)
    loss, images = jax.jit(task.loss), jnp.full((5, 4), 255, jnp.uint8)
    expected = jaxfl.core.cross_entropy(module(inputs), labels)
    np.testing.assert_allclose(loss(params, inputs, labels), expected, rtol=1e-6)
    assert set(jax.eval_shape(task.metrics, params, inputs, labels)) == {"loss", "accuracy"}
    np.testing.assert_allclose(loss(params, images, labels), loss(params, jnp.ones((5, 4), jnp.float32), labels))
    data = jaxfl.federate(np.asarray(inputs), np.asarray(labels), [[0, 1], [2, 3, 4]])
    learner = jaxfl.push_sum(
        task, graph=jaxfl.graphs.directed_ring(2), step_size=0.5, gradient=jaxfl.mini_batch(clip_norm=1.0)
    )
    key = jax.random.key(0)
    rounds = jax.jit(lambda s: jax.lax.scan(lambda s, _: learner.round(key, s, data), s, length=60))
    _, info = rounds(jax.jit(lambda key: learner.init(key, data))(key))
    losses = np.asarray(info.loss).mean(axis=1)
    assert losses[-10:].mean() < 0.3 * losses[:10].mean()


def test_a_module_with_batch_statistics_is_refused():
    with pytest.raises(ArgumentError, match=r"^make_module: must hold nnx\.Param variables only; found .*BatchStat"):
        jaxfl.from_flax(lambda rngs: nnx.BatchNorm(3, rngs=rngs))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_gives_nan(label):
    """JAX counts -1 from the end: training took it for the last class."""
    losses = jaxfl.core.cross_entropy(jnp.ones((2, 3)), jnp.array([2, label], jnp.int32))
    np.testing.assert_array_equal(np.isnan(losses), [False, True])


MEANS = {
    "loss": {"loss": lambda w, x, y: ((x @ w - y) ** 2).mean()},
    "metrics": {"loss": lambda w, x, y: (x @ w - y) ** 2, "metrics": lambda w, x, y: {"error": jnp.abs(x @ w).sum()}},
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_over_the_batch_is_refused(kind):
    """It would train on padding, and count it."""
    task = jaxfl.from_functions(lambda key: jnp.zeros(2), **MEANS[kind])
    with pytest.raises(ArgumentError, match=rf"^{kind}.*: must return one number .*got shape \(\) for 3 s"):
        task.metrics(jnp.zeros(2), jnp.ones((3, 2)), jnp.ones(3))
    data = jaxfl.federate(np.ones((4, 2), np.float32), np.ones(4, np.float32), [[0, 1], [2, 3]])
    learner = jaxfl.push_sum(task, graph=jaxfl.graphs.directed_ring(2), step_size=0.5)
    state = jax.jit(learner.init)(jax.random.key(0), data)
    if kind == "loss":
        with pytest.raises(ArgumentError, match=r"^loss: must return one number for each sample"):
            learner.round(jax.random.key(0), state, data)


MEAN_TASK = jaxfl.Task(
    init=lambda key: jnp.zeros(2),
    loss=lambda params, inputs, labels: jnp.mean((inputs @ params - labels) ** 2),
    metrics=lambda params, inputs, labels: {"loss": jnp.zeros(len(inputs)), "bias": jnp.mean(inputs @ params)},
)


@pytest.mark.parametrize("node_loop", ["vmap", "map"])
def test_a_task_that_was_built_by_hand_is_checked_where_it_is_used(node_loop):
    data = jaxfl.federate(np.ones((4, 2), np.float32), np.ones(4, np.float32), [[0, 1], [2, 3]])
    task = MEAN_TASK._replace(node_loop=node_loop)
    for learner in (
        jaxfl.push_sum(task, graph=jaxfl.graphs.directed_ring(2), step_size=0.5),
        jaxfl.fed_avg(task, clients=jaxfl.local_steps(1, batch_size=1, optimizer=optax.sgd(0.1)), num_active=1),
        jaxfl.dzofl(task, step_size=0.1, smoothing=0.1, batch_size=1),
    ):
        with pytest.raises(
            ArgumentError, match=r"^task\.loss: must return one number for each sample, .*got shape \(\)"
        ):
            jax.eval_shape(lambda key, a=learner: a.round(key, a.init(key, data), data), jax.random.key(0))
    with pytest.raises(ArgumentError, match=r"^task\.metrics\['bias'\]: must return one number for each sample"):
        sample_metrics(task, jnp.zeros(2), jnp.ones((3, 2)), jnp.ones(3))


def test_a_flax_module_with_a_mean_loss_is_refused():
    task = jaxfl.from_flax(TwoLayers, loss=lambda outputs, labels: jaxfl.core.cross_entropy(outputs, labels).mean())
    with pytest.raises(ArgumentError, match=r"^loss: must return one number for each sample"):
        task.loss(task.init(jax.random.key(3)), jnp.ones((2, 4)), jnp.zeros(2, jnp.int32))
