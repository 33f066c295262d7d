"""Partial averaging: a plain loop, independent training as its end, what is shared and what is not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusals
from problems import linear_task, run, small_task, start, uneven_data, with_clients
from reference.network import add, loss_and_gradient, zeros_like
from reference.partial_averaging import partial_averaging as reference_partial_averaging
from reference.runs import by_node, client_batches, each, node_samples, one_by_one, relative_error, stacked

from jaxfl.algorithms.clients.local_steps import local_steps
from jaxfl.algorithms.partial_averaging import partial_averaging
from jaxfl.core import Variables
from jaxfl.models import classification, layers, sequential

KEY = jax.random.key(11)
SIZES = (7, 3, 9, 1)
BATCH = 4  # more than two of the nodes hold
ROUNDS = 8


def normalized(hidden=5):
    """Dense layers with batch normalization and dropout between them."""
    named = [
        ("dense_1", layers.dense(6, hidden)),
        ("norm", layers.batch_norm(hidden)),
        ("tanh", layers.tanh()),
        ("dropout", layers.dropout(0.3)),
        ("dense_2", layers.dense(hidden, 3)),
    ]
    return classification(sequential(named))


PARTS = {"output side": ("norm", "dense_2"), "channels": normalized(hidden=2), "nothing": (), "everything": "all"}


def learner(task=None, **changes):
    """Three steps at each of four nodes, which weigh alike."""
    steps = {"num_local_steps": 3, "batch_size": BATCH, "step_size": 0.2, "weighting": "uniform"}
    options = {"synchronized": ("dense_2",), **steps, **changes}
    return partial_averaging(small_task() if task is None else task, **with_clients(**options))


class Round:
    """One round with batch normalization from nodes that have parted, compiled once for all tests."""

    def __init__(self, part):
        self.algorithm = learner(normalized(), synchronized=PARTS[part], momentum=0.9, weight_decay=0.01)
        self.update = jax.jit(self.algorithm.update)


one_round = functools.cache(Round)


@functools.cache
def parted():
    """Data, a state whose nodes have nothing in common, and draws."""
    data, rng = uneven_data(SIZES), np.random.default_rng(1)
    algorithm = one_round("nothing").algorithm
    shapes = jax.eval_shape(algorithm.init, KEY, data)

    def moved(shape):
        return jnp.asarray(rng.uniform(0.2, 1.0, shape.shape), shape.dtype)

    state = shapes._replace(
        params=jax.tree.map(moved, shapes.params),
        model_state=jax.tree.map(moved, shapes.model_state),
        round_index=jnp.int32(3),
    )
    return data, state, jax.jit(algorithm.draw)(KEY, state, data)


def variables(state):
    return Variables(state.params, state.model_state)


def shared(tree):
    """Leaves (*leaf), bool: whether all nodes have the same number."""
    return jax.tree.map(lambda leaf: np.asarray((leaf == leaf[:1]).all(axis=0)), tree)


def variable_shapes(task):
    return Variables(jax.eval_shape(task.init, KEY), jax.eval_shape(task.init_state))


def blocks_mask(blocks):
    """Leaves (*leaf), bool: True in these blocks."""

    def of(tree):
        return {name: jax.tree.map(lambda leaf, n=name: np.full(leaf.shape, n in blocks), tree[name]) for name in tree}

    return Variables(*map(of, variable_shapes(normalized())))


def channels_mask():
    """Leaves (*leaf), bool: True where the first two hidden units are concerned, and nothing but them."""

    def box(wide, narrow):
        mask = np.zeros(wide.shape, bool)
        mask[tuple(map(slice, narrow.shape))] = True
        return mask

    return jax.tree.map(box, variable_shapes(normalized()), variable_shapes(PARTS["channels"]))


REFERENCE = {
    "output side": ("uniform", ("dense_2",), lambda name, part, position: name == "dense_2"),
    "channels": (
        "data",
        small_task(hidden=2),
        # The logits and the inputs are no channels: only hidden units count.
        lambda name, part, position: (position[-1] if name == "dense_1" else 0 if part == "bias" else position[0]) < 2,
    ),
}


@pytest.mark.parametrize("part", REFERENCE)
@pytest.mark.quick_cases(1)
def test_follows_the_plain_loop(part):
    weighting, synchronized, is_synchronized = REFERENCE[part]
    decay = optax.exponential_decay(0.2, 5, 0.5)
    options = {"momentum": 0.9, "weight_decay": 0.05, "weighting": weighting}
    algorithm = learner(synchronized=synchronized, step_size=decay, **options)
    data = uneven_data(SIZES)
    first = start(algorithm, KEY, data)
    state, infos = run(algorithm, KEY, data, ROUNDS, first)
    drawn = jax.jit(jax.vmap(lambda r: algorithm.draw(KEY, first._replace(round_index=r), data)))
    indices = np.asarray(drawn(jnp.arange(ROUNDS, dtype=jnp.int32)).steps.batch_indices)
    samples = node_samples(data)
    rounds = [
        [[[s for s in step if s < size] for step in steps] for steps, size in zip(one, SIZES, strict=True)]
        for one in indices
    ]
    models, losses = reference_partial_averaging(
        each(first.params),
        samples,
        rounds,
        is_synchronized,
        step_size=lambda r: 0.2 * 0.5 ** (r / 5),
        **options,
    )
    expected = stacked(models)
    np.testing.assert_allclose(by_node(state.params), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(infos.loss, losses, rtol=1e-4)
    used = [[sum(map(len, batches)) for batches in one] for one in rounds]
    np.testing.assert_array_equal(infos.gradient_evaluations, used)
    bits = 32 * sum(
        is_synchronized(name, part, position)
        for name, layer in models[0].items()
        for part, leaf in layer.items()
        for position in np.ndindex(leaf.shape)
    )
    assert 0 < bits < 32 * expected.shape[1]
    np.testing.assert_array_equal(infos.bits_sent, np.full((ROUNDS, 4), bits))
    np.testing.assert_array_equal(infos.bits_received, infos.bits_sent)


@pytest.mark.parametrize("part", ["output side", "channels"])
@pytest.mark.quick_cases(1)
def test_what_is_synchronized_is_equal_and_the_rest_is_the_nodes_own(part):
    data, state, draws = parted()
    own, _ = one_round("nothing").update(state, data, draws)
    new, info = one_round(part).update(state, data, draws)
    expected = channels_mask() if part == "channels" else blocks_mask(PARTS[part])
    jax.tree.map(np.testing.assert_array_equal, shared(variables(new)), expected)
    is_part = by_node(jax.tree.map(lambda leaf: leaf[None], expected))[0].astype(bool)
    assert not shared(by_node(variables(state))).any(), (
        "nodes must have nothing in common for this test to mean something"
    )
    alone, actual = by_node(variables(own)), by_node(variables(new))
    np.testing.assert_array_equal(actual[:, ~is_part], alone[:, ~is_part])
    np.testing.assert_allclose(
        actual[:, is_part], np.tile(alone[:, is_part].mean(axis=0), (4, 1)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(info.bits_sent, np.full(4, 32 * is_part.sum()))
    assert 0 < is_part.sum() < is_part.size


def test_independent_nodes_do_not_depend_on_each_other():
    """Each trains as if it were the only one: of other nodes neither model nor data matter, though they may be NaN."""
    data, state, draws = parted()
    update = one_round("nothing").update
    new, info = update(state, data, draws)
    np.testing.assert_array_equal(info.bits_sent, np.zeros(4))
    for node, size in enumerate(SIZES):
        own = np.isin(np.arange(sum(SIZES)), np.asarray(data.indices)[node, :size])
        strange = data._replace(
            inputs=jnp.where(own[:, None], data.inputs, jnp.nan),
            labels=jnp.where(own, data.labels, (data.labels + 1) % 3),
        )
        elsewhere = jax.tree.map(
            lambda leaf, n=node: leaf + (jnp.arange(4) != n).astype(leaf.dtype).reshape(4, *[1] * (leaf.ndim - 1)),
            variables(state),
        )
        moved, _ = update(state._replace(params=elsewhere.params, model_state=elsewhere.model_state), strange, draws)
        same = (by_node(variables(moved)) == by_node(variables(new))).all(axis=1)
        assert same.tolist() == [other == node for other in range(4)]


def test_a_task_without_blocks_is_averaged_as_a_whole():
    state, _ = run(learner(linear_task(), synchronized="all"), KEY, uneven_data(SIZES), 1)
    assert shared(state.params["w"]).all()


test_refusals = refusals(
    [
        (lambda: learner(linear_task(), synchronized=("w",)), "synchronized"),
        (lambda: learner(synchronized=("dense_3",)), "synchronized"),
        (lambda: learner(synchronized="dense_2"), "synchronized"),
        (lambda: learner(synchronized=small_task(hidden=6)), "synchronized"),
        (lambda: learner(axis_groups={"dense_1/kernel": {0: 2}}), "axis_groups"),
        (lambda: learner(synchronized=small_task(hidden=2), axis_groups={"dense_3/kernel": {0: 2}}), "axis_groups"),
    ]
)


def test_fed_rep_by_an_optimizer_of_two_parts():
    """Two steps of the head, then one of the body (arXiv:2102.07078, Algorithm 1), whose mean all nodes get."""

    def rows(first, last):
        return lambda step: jnp.where((step >= first) & (step < last), 0.2, 0.0)

    def parts_of(params):
        return {name: "head" if name == "dense_2" else "body" for name in params}

    phases: Any = {"head": optax.sgd(rows(0, 2)), "body": optax.sgd(rows(2, 3))}
    clients = local_steps(3, batch_size=3, optimizer=optax.multi_transform(phases, parts_of))
    algorithm = partial_averaging(small_task(), clients=clients, synchronized=["dense_1"])
    data = uneven_data()
    ours = one_by_one(algorithm, jax.random.key(3), data, 5)
    samples, sizes = node_samples(data), np.asarray(data.sizes)
    nodes = each(ours.states[0].params)
    for draws in ours.draws:
        for i, batches in client_batches(range(len(sizes)), np.asarray(draws.steps.batch_indices), sizes):
            for t, batch in enumerate(batches):
                total = zeros_like(nodes[i])
                for position in batch:
                    total = add(total, 1 / len(batch), loss_and_gradient(nodes[i], *samples[i][position])[1])
                part = "dense_2" if t < 2 else "dense_1"
                nodes[i] = {**nodes[i], part: add(nodes[i], -0.2, total)[part]}
        shares = sizes / sizes.sum()
        body = zeros_like(nodes[0])
        for share, x in zip(shares, nodes, strict=True):
            body = add(body, share, x)
        nodes = [{**x, "dense_1": body["dense_1"]} for x in nodes]
    assert relative_error(ours.states[-1].params, nodes) < 1e-5
