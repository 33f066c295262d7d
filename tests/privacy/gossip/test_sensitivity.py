"""Releases of the estimators themselves never change by more with one sample than the accountant assumes.

Pairs of data sets that differ in one sample run on the same index sequence and on the same parameters in every round
(the transcript that adaptive composition conditions on), without noise. A pair is a node: 200 pairs are one program.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import small_task

from jaxfl import gradients
from jaxfl.core import Factors, FederatedData, Task
from jaxfl.models import classification, sequential
from jaxfl.models.layers import conv, dense, reshape, tanh
from jaxfl.privacy.gossip import Release, sensitivities

PAIRS, SAMPLES, ROUNDS, CLIP, FEATURES = 200, 7, 8, 0.5, 6
RELATIONS = ("replace_one", "zero_out")


class Case(NamedTuple):
    """One estimator, and how it is accounted for."""

    estimator: str
    sampler: gradients.Sampler
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def entry_size(self):
        return self.options.get("entry_size", 1)


CASES = {
    "mini_batch, poisson": Case("mini_batch", gradients.poisson(3)),
    "mini_batch, uniform": Case("mini_batch", gradients.uniform(1)),
    "dense, poisson": Case("saga", gradients.poisson(3)),
    "dense, uniform": Case("saga", gradients.uniform(1)),
    "dense, uniform with repeats": Case("saga", gradients.uniform(3)),
    "dense, bfloat16, fixed": Case("saga", gradients.fixed(3), {"storage": "bfloat16"}),
    "factored, fixed": Case("saga", gradients.fixed(3), {"table": "factored"}),
    "factored, bfloat16, poisson": Case("saga", gradients.poisson(3), {"table": "factored", "storage": "bfloat16"}),
    "factored convolution, fixed": Case("saga", gradients.fixed(3), {"table": "factored"}),
    "per_batch, poisson": Case("saga", gradients.poisson(2), {"table": "per_batch", "entry_size": 2}),
}


def small_convolution() -> Task:
    """As many inputs and classes as the dense task, the layer before the last a convolution."""
    layers = [("image", reshape((3, 2, 1))), ("conv", conv(1, 2, (2, 2))), ("tanh", tanh()), ("flat", reshape((12,)))]
    return classification(sequential([*layers, ("dense_1", dense(12, 3))]))


def weighted_task(base: Task) -> Task:
    """A classifier whose losses carry a weight, the last input, and a sign that the first bias decides.

    Weight 0 zeroes a sample's gradient, weight -1 turns it round; with the sign a transcript can turn all gradients
    round between two visits of an entry.
    """
    assert base.factors is not None
    base_factors = base.factors

    def weight(params, inputs):
        return inputs[:, -1] * jnp.sign(jax.lax.stop_gradient(params["dense_1"]["bias"][0]))

    def loss(params, inputs, labels):
        return weight(params, inputs) * base.loss(params, inputs[:, :-1], labels)

    def factors(params, inputs, labels):
        losses, actual = base_factors(params, inputs[:, :-1], labels)
        w = weight(params, inputs)
        return w * losses, Factors(
            inputs=actual.inputs, errors=tuple(jax.vmap(jnp.multiply)(w, error) for error in actual.errors)
        )

    return base._replace(loss=loss, factors=factors, metrics=lambda *args: {"loss": loss(*args)})


DENSE, CONVOLUTION = weighted_task(small_task(features=FEATURES)), weighted_task(small_convolution())


def task_of(name):
    return CONVOLUTION if "convolution" in name else DENSE


@functools.cache
def releases(name, clipped=True):
    """(key, data, params (K, n, *leaf)) -> estimates (K, n, d) and batches, leaves (K, n, c), compiled once a case."""
    case, task = CASES[name], task_of(name)
    options = {**case.options, **({"refresh_every": 3} if case.estimator == "saga" else {})}
    estimator = getattr(gradients, case.estimator)(sampler=case.sampler, clip_norm=CLIP if clipped else None, **options)

    def run(key, data, transcript):
        def one_round(state, at_round):
            index, params = at_round
            draws = estimator.draw(key, index, data)
            actual, state, _ = estimator.estimate(task, params, state, data, draws, index)
            flat = jnp.concatenate([leaf.reshape(PAIRS, -1) for leaf in jax.tree.leaves(actual)], axis=1)
            return state, (flat, draws if case.estimator == "mini_batch" else draws.batch)

        start = estimator.init(task, key, jax.tree.map(lambda leaf: leaf[0], transcript), data)
        return jax.lax.scan(one_round, start, (jnp.arange(ROUNDS, dtype=jnp.int32), transcript))[1]

    return jax.jit(run)


def as_data(inputs, labels):
    count = PAIRS * SAMPLES
    indices = jnp.arange(count, dtype=jnp.int32).reshape(PAIRS, SAMPLES)
    sizes = jnp.full(PAIRS, SAMPLES, jnp.int32)
    return FederatedData(jnp.asarray(inputs.reshape(count, -1)), jnp.asarray(labels.reshape(-1)), indices, sizes)


def random_pairs(relation, seed, task=DENSE):
    """(data, its neighbour, position of the changed sample (n,), transcript): moves so large that gradients turn."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(PAIRS, SAMPLES, FEATURES + 1)).astype(np.float32)
    inputs[..., -1] = np.exp(2 * rng.normal(size=(PAIRS, SAMPLES)))
    labels = rng.integers(0, 3, (PAIRS, SAMPLES)).astype(np.int32)
    changed, pair = rng.integers(0, SAMPLES, PAIRS), np.arange(PAIRS)
    other, other_labels = inputs.copy(), labels.copy()
    if relation == "zero_out":
        other[pair, changed, -1] = 0.0
    else:
        far = rng.choice([1.0, 30.0], (PAIRS, 1))
        other[pair, changed] = far * rng.normal(size=(PAIRS, FEATURES + 1))
        other_labels[pair, changed] = rng.integers(0, 3, PAIRS)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    transcript = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=(ROUNDS, PAIRS, *leaf.shape)), jnp.float32), shapes
    )
    return as_data(inputs, labels), as_data(other, other_labels), changed, transcript


def worst_pairs(relation, seed, task=DENSE):
    """Large gradients that are opposite in the two data sets (or zero in one), and turn round in every round."""
    data, _, changed, transcript = random_pairs(relation, seed, task)
    inputs, pair = np.array(data.inputs).reshape(PAIRS, SAMPLES, -1), np.arange(PAIRS)
    inputs[..., -1] = 1e3
    other = inputs.copy()
    other[pair, changed, -1] = 0.0 if relation == "zero_out" else -1e3
    constant = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), transcript)
    sign = jnp.asarray((-1.0) ** np.arange(ROUNDS), jnp.float32)[:, None]
    bias = constant["dense_1"]["bias"].at[:, :, 0].set(1e-3 * sign)
    constant["dense_1"]["bias"] = bias
    labels = np.asarray(data.labels)
    return as_data(inputs, labels), as_data(other, labels), changed, constant


def release(case):
    """The case as the accountant is told of it: a sample contributes clip_norm E / J to one of E entries."""
    entries = -(-SAMPLES // case.entry_size)
    share = CLIP if case.entry_size == 1 else CLIP * entries / SAMPLES
    return Release(
        estimator=case.estimator,
        sampler=case.sampler.name,
        batch_size=case.sampler.batch_size,
        num_entries=entries,
        clip_norm=share,
        noise_std=1.0,
        entry_size=case.entry_size,
    )


def ratios(name, relation, pairs, clipped=True):
    """(distance of the two releases over the accountant's bound, how often the batch holds the entry), each (K, n)."""
    case = CASES[name]
    data, other, changed, transcript = pairs
    run = releases(name, clipped)
    key = jax.random.key(0)
    (first, batches), (second, same) = run(key, data, transcript), run(key, other, transcript)
    assert all(map(np.array_equal, batches, same)), "the index sequence is given"
    entry = (changed // case.entry_size)[None, :, None]
    counts = np.sum((np.asarray(batches.indices) == entry) & np.asarray(batches.mask), axis=2)
    assert set(counts.flat) >= {0, 1}
    allowed = sensitivities(release(case), relation)
    # A repeated entry counts its fresh and its stored gradient as often, and the mean of the table once.
    bound = np.where(counts > 0, counts * allowed.present + (counts - 1) * allowed.absent, allowed.absent)
    distance = np.linalg.norm(np.asarray(first, np.float64) - np.asarray(second, np.float64), axis=2)
    rounding = 1e-6 * CLIP
    return np.where(distance <= rounding, 0.0, distance / np.maximum(bound, rounding)), counts


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", CASES)
def test_two_releases_never_differ_by_more_than_the_accountant_assumes(name, relation):
    actual, _ = ratios(name, relation, random_pairs(relation, 1, task_of(name)))
    assert actual.shape == (ROUNDS, PAIRS)
    assert actual.max() < 1 + 1e-4
    assert actual.max() > 0.4, "the pairs do change the release"


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_bounds_are_nearly_reached(name, relation):
    actual, counts = ratios(name, relation, worst_pairs(relation, 2, task_of(name)))
    assert actual.max() < 1 + 1e-4
    assert actual[counts == 1].max() > 0.99
    if CASES[name].estimator == "saga":
        assert actual[counts == 0].max() > 0.99


@pytest.mark.parametrize("name", ["mini_batch, poisson", "dense, poisson"])
def test_without_clipping_the_bounds_are_exceeded(name):
    for relation in RELATIONS:
        actual, counts = ratios(name, relation, random_pairs(relation, seed=1), clipped=False)
        assert actual[counts == 1].max() > 5
        if CASES[name].estimator == "saga":
            assert actual[counts == 0].max() > 5
