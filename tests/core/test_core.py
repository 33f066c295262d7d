"""Keys, checks, trees, node loops and task adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refusals, refused

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
    numbers |= {"DIRECTION": 15, "ARRIVAL": 16, "MESSAGE_ROUNDING": 17, "STREAM": 18, "SHARED_NOISE": 19, "ATTACK": 20}
    numbers |= {"ATTACKERS": 21}
    assert {purpose.name: int(purpose) for purpose in Purpose} == numbers


def test_a_new_seed_changes_every_key():
    for purpose in Purpose:
        assert bits(purpose_key(jax.random.key(0), purpose)) != bits(purpose_key(jax.random.key(1), purpose))


BAD = [
    (check.positive, (0.0, -1.0, float("nan"), float("inf"), 10**400, np.array([1.0, 0.0]))),
    (check.non_negative, (-1e-9, float("nan"), float("inf"), np.array([1.0, -2.0]))),
    (check.in_float32, (1e-46, 1e39, 10**40, np.array([0.0, 1e-46]))),  # 0 and infinite in float32
    (check.probability, (1.5, -0.1, float("nan"))),
    (check.open_unit, (0.0, 1.0, float("nan"))),
    (check.whole, (0.5, np.array([1.0, 1.5]))),
    (functools.partial(check.at_least, 1), (0, True, 1.5, "3")),
    (functools.partial(check.per_node, 4), (np.ones(3), np.ones((4, 1)))),
    (check.scalar, (np.ones(1),)),
    (check.integers, ([0.5], [True], [[1]], 3, ["a"])),
    (functools.partial(check.below, 3), ([0, 3], [-1], 3)),
    (functools.partial(check.one_of, ("a", "b")), ("c", None)),
]
GOOD = [
    (check.positive, (0.1, 10**15, 1e-300, lambda k: 0.1, None)),
    (check.in_float32, (0.0, 1e-37, 10**30)),
    (check.open_unit, (1e-30, np.array([0.5]))),
    (functools.partial(check.at_least, 1), (1, np.int64(3))),
    (functools.partial(check.per_node, 4), (1.0, np.ones(4), None)),
    (check.integers, ([1, 2], np.zeros(0, int))),
    (functools.partial(check.below, 3), ([0, 2],)),
]
test_checks_refuse = refusals(
    [(lambda one=one, value=value: one(value=value), "value") for one, values in BAD for value in values]
    + [
        (lambda: jax.jit(lambda n: check.at_least(1, n=n))(3), "n"),
        (lambda: purpose_key(jax.random.key(0, impl="rbg"), Purpose.NOISE, 0), "key"),
    ]
)


def test_checks_say_where_and_pass_what_is_good_or_traced():
    refused(lambda: check.non_negative(noise_std=np.array([1.0, -2.0])), "noise_std", "-2.0 at position 1")
    for one, values in GOOD:
        for value in values:
            one(value=value)

    def traced(x):
        check.positive(x=x)
        check.non_negative(x=x)
        check.open_unit(x=x)
        return x

    assert float(jax.jit(traced)(-1.0)) == -1.0


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


test_unknown_node_loops_are_refused = refusals(
    [
        (lambda loop=loop, bad=bad: loop(lambda x: x, bad), "node_loop")
        for loop in (over_nodes, update_over_nodes)
        for bad in ("pmap", "chunk:0", "chunk:", "chunk:-1", "", "devices:", "devices:devices:map")
    ]
)


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

    @nnx.grad
    def slope(module):
        return jaxfl.core.cross_entropy(module(inputs), labels).mean()

    actual = jax.jit(jax.grad(lambda params: task.loss(params, inputs, labels).mean()))(params)
    for ours, theirs in zip(*map(jax.tree.leaves, (actual, nnx.to_pure_dict(slope(module)))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_module_with_statistics_of_its_own_is_refused():
    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.seen = nnx.BatchNorm(3, rngs=rngs), nnx.BatchStat(jnp.zeros(3))

    refused(lambda: jaxfl.from_flax(Counting), "make_module", "BatchStat at seen. Use GroupNorm")


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
    with pytest.raises(ArgumentError, match=f"^{kind}"):
        task.metrics(jnp.zeros(2), jnp.ones((3, 2)), jnp.ones(3))
    data = jaxfl.federate(np.ones((4, 2), np.float32), np.ones(4, np.float32), [[0, 1], [2, 3]])
    learner = jaxfl.push_sum(task, graph=jaxfl.graphs.directed_ring(2), step_size=0.5)
    state = jax.jit(learner.init)(jax.random.key(0), data)
    if kind == "loss":
        refused(lambda: learner.round(jax.random.key(0), state, data), "loss")


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
        round_of = functools.partial(lambda a, key: a.round(key, a.init(key, data), data), learner)
        refused(functools.partial(jax.eval_shape, round_of, jax.random.key(0)), "task.loss")
    metrics = functools.partial(sample_metrics, task, jnp.zeros(2), jnp.ones((3, 2)), jnp.ones(3))
    refused(metrics, "task.metrics['bias']")


def test_a_flax_module_with_a_mean_loss_is_refused():
    task = jaxfl.from_flax(TwoLayers, loss=lambda outputs, labels: jaxfl.core.cross_entropy(outputs, labels).mean())
    refused(lambda: task.loss(task.init(jax.random.key(3)), jnp.ones((2, 4)), jnp.zeros(2, jnp.int32)), "loss")
