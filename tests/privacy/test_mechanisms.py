"""Noise: distribution, scale per node, keys."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import refusals

import jaxfl


def tree(nodes=3, size=40_000):
    return {"a": jnp.zeros((nodes, size)), "b": jnp.zeros((nodes, 10, size // 10))}


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("make", "distribution"),
    [
        (jaxfl.gaussian, lambda s: scipy.stats.norm(scale=s)),
        (partial(jaxfl.gaussian, generator="inverse"), lambda s: scipy.stats.norm(scale=s)),
        (jaxfl.laplace, lambda s: scipy.stats.laplace(scale=s)),
    ],
)
def test_every_coordinate_has_the_scale_of_its_node(make, distribution):
    scales = np.array([0.5, 1.0, 3.0], np.float32)
    noise = make(jnp.asarray(scales)).draw(jax.random.key(0), tree())
    for leaf in jax.tree.leaves(noise):
        values = np.asarray(leaf, np.float64).reshape(3, -1)
        for node, scale in enumerate(scales):
            assert scipy.stats.kstest(values[node], distribution(scale).cdf).pvalue > 1e-4
            assert scipy.stats.kstest(values[node], distribution(1.08 * scale).cdf).pvalue < 1e-4, "8 % off is seen"


@pytest.mark.statistical
def test_nodes_leaves_and_keys_are_independent():
    draw = jaxfl.gaussian(1.0).draw
    noise, other = draw(jax.random.key(0), tree()), draw(jax.random.key(1), tree())
    flat = [np.asarray(leaf).reshape(3, -1)[node] for t in (noise, other) for leaf in t.values() for node in range(3)]
    correlation = np.corrcoef(np.stack(flat)) - np.eye(len(flat))
    assert np.abs(correlation).max() < 5 / np.sqrt(40_000)


def test_noise_of_a_node_does_not_depend_on_the_number_of_nodes():
    draw = jaxfl.gaussian(1.0).draw
    few, many = draw(jax.random.key(0), tree(2, 100)), draw(jax.random.key(0), tree(5, 100))
    np.testing.assert_array_equal(few["a"], many["a"][:2])


def test_the_inverse_generator_draws_as_jax_random_does():
    """The numbers of earlier versions, with another scale as well."""
    noise = jaxfl.gaussian(1.0, generator="inverse")
    assert noise.rescaled is not None
    for mechanism, scale in ((noise, 1.0), (noise.rescaled(jnp.float32(2.0)), 2.0)):
        drawn = mechanism.draw(jax.random.key(0), {"a": jnp.zeros((3, 10))})["a"]
        expected = [jax.random.normal(jax.random.fold_in(jax.random.key(0), node), (10,)) for node in range(3)]
        np.testing.assert_array_equal(drawn, np.float32(scale) * np.stack(expected))


def test_zero_scale_adds_exactly_zero():
    for make in (jaxfl.gaussian, jaxfl.laplace):
        noise = make(0.0).draw(jax.random.key(0), tree(2, 100))
        assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(noise))


def drawn_for_bfloat16(make):
    """Noise drawn in bfloat16 takes 128 values."""
    mixed = {"a": jnp.zeros((2, 5)), "b": {"c": jnp.zeros((2, 5), jnp.bfloat16)}}
    return lambda: make(1.0).draw(jax.random.key(0), mixed)


def learned_in_bfloat16():
    """An algorithm refuses it before its first round."""
    task = jaxfl.from_functions(
        lambda key: jnp.zeros(3, jnp.bfloat16),
        lambda w, x, y: (x.astype(jnp.bfloat16) @ w - y.astype(jnp.bfloat16)) ** 2,
    )
    data = jaxfl.federate(np.eye(4, 3, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
    options = {"gradient": jaxfl.mini_batch(clip_norm=1.0), "noise": jaxfl.gaussian(1.0), "step_size": 0.1}
    learner = jaxfl.push_sum(task, graph=jaxfl.graphs.complete(2), **options)
    key = jax.random.key(0)
    return learner.round(key, learner.init(key, data), data)


test_refusals = refusals(
    [
        *((lambda bad=bad: jaxfl.gaussian(bad), "noise_std") for bad in (-1.0, np.nan, np.inf, jnp.array([0.1, -0.1]))),
        # 0 and infinite in float32: they would state an epsilon for no noise.
        *((lambda scale=scale: jaxfl.gaussian(scale), "noise_std") for scale in (1e-46, 1e39)),
        *((lambda scale=scale: jaxfl.laplace(scale), "noise_scale") for scale in (1e-46, 1e39)),
        (lambda: jaxfl.gaussian(1.0, generator="ziggurat"), "generator"),
        *((drawn_for_bfloat16(make), "params") for make in (jaxfl.gaussian, jaxfl.laplace)),
        (learned_in_bfloat16, "params"),
    ]
)
