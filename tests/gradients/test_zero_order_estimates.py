"""Gradients from differences of losses: directions, the definition, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import crossed, refusals
from problems import linear_task, small_task, uneven_data
from reference.dzofl import estimate
from reference.gossip import d_psgd as reference_d_psgd
from reference.network import norm
from reference.runs import (
    assert_same,
    by_node,
    check_info,
    each,
    entries,
    node_samples,
    one_by_one,
    relative_error,
    stacked,
)

import jaxfl
from jaxfl import gradients, graphs
from jaxfl.core import Purpose, node_keys, purpose_key
from jaxfl.core.tree import size
from jaxfl.gradients.zero_order import (
    GaussianDirections,
    GivenDirections,
    along,
    losses_along,
    node_directions,
    shared_directions,
)
from jaxfl.models import classification, layers, sequential

KEY = jax.random.key(3)
LIKE = {"a": jnp.zeros((50, 40)), "b": jnp.zeros(3000)}


def numbers(directions, index=0, like=LIKE):
    """z of one direction, leaf by leaf, flat."""
    leaves = jax.tree.leaves(like)
    return [np.asarray(directions.numbers(index, i, leaf)).reshape(-1) for i, leaf in enumerate(leaves)]


@pytest.mark.statistical
@pytest.mark.parametrize("direction", ["rademacher", "gaussian"])
def test_numbers_have_mean_0_and_variance_1_and_are_independent(direction):
    """Over leaves, directions, rounds, nodes and keys; within 4 standard errors."""
    sources = [shared_directions(direction, key, k) for key in (KEY, jax.random.key(4)) for k in (0, 1)]
    of_nodes = node_directions(direction, KEY, 0, 3)
    sources += [jax.tree.map(lambda leaf, i=i: leaf[i], of_nodes) for i in range(3)]
    rows = [part[:2000] for source in sources for index in (0, 1) for part in numbers(source, index)]
    z = np.stack(rows).astype(np.float64)
    assert np.all(np.abs(z.mean(axis=1)) < 4 / math.sqrt(z.shape[1]))
    assert np.abs(np.corrcoef(z) - np.eye(len(z))).max() < 4.5 / math.sqrt(z.shape[1])
    if direction == "rademacher":
        assert set(z.reshape(-1)) == {-1.0, 1.0}
    else:
        assert np.all(np.abs((z**2).mean(axis=1) - 1) < 4 * math.sqrt(2 / z.shape[1]))
        assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / z.size)


def test_a_nodes_directions_do_not_depend_on_the_number_of_nodes():
    few, many = (jax.tree.leaves(node_directions("rademacher", KEY, 7, count))[0] for count in (3, 8))
    np.testing.assert_array_equal(few, many[:3])
    np.testing.assert_array_equal(few, jax.random.key_data(node_keys(purpose_key(KEY, Purpose.DIRECTION, 7), 3)))
    assert len(np.unique(many, axis=0)) == 8


def test_a_sum_along_directions_and_losses_on_both_sides_of_them():
    directions, c = GaussianDirections(jax.random.key_data(KEY)), jnp.array([0.5, -2.0, 3.0])
    d = size(LIKE)
    z = [np.concatenate(numbers(directions, r)) for r in range(3)]
    expected = sum(float(one) * row for one, row in zip(c, z, strict=True)) / math.sqrt(d)
    total = along(directions, c, LIKE)
    np.testing.assert_allclose(by_node(jax.tree.map(lambda leaf: leaf[None], total))[0], expected, atol=1e-6)
    single = along(directions, c[:1], LIKE)
    np.testing.assert_allclose(
        np.concatenate([single["a"].reshape(-1), single["b"]]), 0.5 * z[0] / math.sqrt(d), atol=1e-6
    )

    start = jax.tree.map(lambda leaf: leaf + 2.0, LIKE)
    above, below = losses_along(lambda x: x["b"][:5], start, directions, 3, 0.3)
    moved = 0.3 / math.sqrt(d) * np.stack([row[2000:2005] for row in z])
    np.testing.assert_allclose(above, 2 + moved, rtol=1e-6)
    np.testing.assert_allclose(below, 2 - moved, rtol=1e-6)


class ZeroOrderGradient:
    """The reference's estimate at one node, whose directions stand beside the batch's entries."""

    def __init__(self, samples, smoothing, batch_size):
        self.samples, self.options = samples, {"smoothing": smoothing, "batch_size": batch_size}

    def __call__(self, z, entries_and_directions):
        batch, directions = entries_and_directions
        total, self.loss = estimate(z, self.samples, batch, directions, **self.options)
        self.norm = norm(total)
        return total


FOLLOWED = {
    "one direction": ("rademacher", 1, gradients.poisson(2)),
    "three directions": ("gaussian", 3, gradients.fixed(3)),
}


@pytest.mark.parametrize(("followed", "node_loop"), crossed(FOLLOWED, ["vmap", "map"]))
@pytest.mark.quick_cases(1)
def test_d_psgd_follows_the_definition(followed, node_loop):
    direction, num_directions, sampler = FOLLOWED[followed]
    data, graph, rounds = uneven_data(), graphs.star(5, weights="metropolis"), 10
    gradient = gradients.zero_order(smoothing=0.5, num_directions=num_directions, direction=direction, sampler=sampler)
    task = small_task()._replace(node_loop=node_loop)
    run = one_by_one(jaxfl.d_psgd(task, graph=graph, step_size=0.02, gradient=gradient), KEY, data, rounds)
    x0, drawn = each(run.states[0].params), []

    @jax.jit
    def phi(directions):
        """Leaves (q, n, *leaf)."""
        one = jax.eval_shape(task.init, KEY)
        leaves, structure = jax.tree.flatten(one)

        def of_node(own):
            scaled = [[own.numbers(r, i, leaf) / math.sqrt(size(one)) for i, leaf in enumerate(leaves)] for r in steps]
            return [structure.unflatten(part) for part in scaled]

        return jax.vmap(of_node)(directions)

    steps = range(num_directions)
    for draws in run.draws:
        by_direction = [each(one) for one in phi(draws.gradient.directions)]
        drawn.append(list(zip(entries(draws.gradient), zip(*by_direction, strict=True), strict=True)))
    references = [ZeroOrderGradient(samples, 0.5, sampler.batch_size) for samples in node_samples(data)]
    x = reference_d_psgd(x0, graph.mixing_matrices, references, 0.02, [(used, None) for used in drawn])
    assert relative_error(run.states[-1].params, x) < 1e-5
    assert np.abs(stacked(x) - stacked(x0)).max() > 0.05
    check_info(run.infos[-1], references)
    np.testing.assert_array_equal(run.infos[-1].gradient_evaluations, np.zeros(5))
    counts = [2 * num_directions * len(batch) for batch, _ in drawn[-1]]
    np.testing.assert_array_equal(run.infos[-1].forward_evaluations, counts)


@pytest.mark.slow
def test_smoothing_may_be_a_schedule():
    task, data = linear_task(), uneven_data()
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), task.init(KEY))

    def at(smoothing, k):
        gradient = gradients.zero_order(smoothing=smoothing)
        return gradient.estimate(task, params, None, data, gradient.draw(KEY, k, data), k)

    k = jnp.int32(3)
    decaying, constant = at(lambda k: 1.0 / (1 + k.astype(jnp.float32)), k), at(0.25, k)
    assert_same(decaying, constant)
    assert float(jnp.abs(at(1.0, k)[2].loss - constant[2].loss).max()) > 1e-3


def test_directions_from_elsewhere_take_the_place_of_keys():
    task, data, k = linear_task(), uneven_data(), jnp.int32(0)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), task.init(KEY))
    gradient = gradients.zero_order(smoothing=0.5, num_directions=2)
    draws = jax.jit(lambda: gradient.draw(KEY, k, data))()

    def of_node(directions):
        leaves, structure = jax.tree.flatten(task.init(KEY))
        values = [jnp.stack([directions.numbers(r, i, leaf) for r in range(2)]) for i, leaf in enumerate(leaves)]
        return GivenDirections(structure.unflatten(values))

    given = draws._replace(directions=jax.jit(jax.vmap(of_node))(draws.directions))
    actual, expected = (
        jax.jit(lambda one: gradient.estimate(task, params, None, data, one, k))(one) for one in (given, draws)
    )
    assert_same(actual, expected, rtol=1e-5, atol=1e-6)


BATCH_NORM = classification(sequential([("norm", layers.batch_norm(6)), ("dense", layers.dense(6, 3))]))
GRADIENT = gradients.zero_order(smoothing=0.1, sampler=gradients.fixed(5))
test_refusals = refusals(
    [
        (lambda: gradients.zero_order(smoothing=0.0), "smoothing"),
        (lambda: gradients.zero_order(smoothing=jnp.ones(5)), "smoothing"),
        (lambda: gradients.zero_order(smoothing=0.1, num_directions=0), "num_directions"),
        (lambda: gradients.zero_order(smoothing=0.1, direction="sphere"), "direction"),
        (lambda: GRADIENT.init(BATCH_NORM, KEY, BATCH_NORM.init(KEY), uneven_data()), "task"),
        (lambda: GRADIENT.init(linear_task(), KEY, linear_task().init(KEY), uneven_data()), "batch_size"),
    ]
)
