"""The constants of PrivSGP-VR's theory, estimated where they are known and where they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused
from problems import small_task, uneven_data

import jaxfl
from jaxfl.analysis.smoothness import estimate_constants
from jaxfl.core import Purpose, purpose_key
from jaxfl.models import classification, sequential
from jaxfl.models.layers import batch_norm

KEY = jax.random.key(3)
# Each node's Hessian, with the largest eigenvalue 8 at node 1 only; node 0 alone would give 5.
EIGENVALUES = np.array([[0.2, 0.5, 1.0, 2.0, 5.0], [0.1, 0.3, 1.0, 3.0, 8.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
STEP = 0.2


def _hessians():
    rng = np.random.default_rng(1)
    turned = [np.linalg.qr(rng.normal(size=(5, 5)))[0] for _ in EIGENVALUES]
    return np.stack([q @ np.diag(values) @ q.T for q, values in zip(turned, EIGENVALUES, strict=True)])


HESSIANS = _hessians()


def _quadratic_loss(params, inputs, labels):
    """(x - c)^T A (x - c) / 2 with the center c as sample and the node, which decides A, as label."""
    away = jnp.concatenate([params["a"], params["b"]])[None] - inputs
    return 0.5 * jnp.einsum("bi,bij,bj->b", away, jnp.asarray(HESSIANS, jnp.float32)[labels], away)


QUADRATIC = jaxfl.from_functions(
    lambda key: {"a": 2 * jax.random.normal(key, (2,), jnp.float32), "b": jnp.full((3,), 1.5, jnp.float32)},
    _quadratic_loss,
)
SIZES = (4, 6, 3)
CENTERS = np.random.default_rng(2).normal(size=(13, 5)).astype(np.float32)
NODES = np.repeat(np.arange(3), SIZES)
DATA = jaxfl.federate(CENTERS, NODES.astype(np.int32), np.split(np.arange(13), np.cumsum(SIZES)[:-1]))


def estimate(num_probes, data=DATA, task=QUADRATIC, step_size=STEP, key=KEY, **options):
    return estimate_constants(key, task, data, num_probes=num_probes, step_size=step_size, **options)


@functools.cache
def of_all():
    """Estimates from five probes of all samples."""
    return estimate(5)


def gradient_descent(num_probes):
    """The same run in float64, node by node: G, b^2, f(x^0), min f and |x^0|^2."""
    start = QUADRATIC.init(purpose_key(KEY, Purpose.INIT))
    x = np.concatenate([np.asarray(start["a"], np.float64), np.asarray(start["b"], np.float64)])
    norm_squared = x @ x
    of_nodes = [CENTERS[NODES == i].astype(np.float64) for i in range(3)]

    def loss(x):
        pairs = zip(HESSIANS, of_nodes, strict=True)
        return np.mean([np.mean([(x - c) @ hessian @ (x - c) / 2 for c in centers]) for hessian, centers in pairs])

    first, largest, heterogeneity = loss(x), 0.0, 0.0
    for _ in range(num_probes):
        samples = [[h @ (x - c) for c in cs] for h, cs in zip(HESSIANS, of_nodes, strict=True)]
        nodes = [np.mean(gradients, axis=0) for gradients in samples]
        mean = np.mean(nodes, axis=0)
        largest = max(largest, *(np.linalg.norm(g) for gradients in samples for g in gradients))
        heterogeneity = max(heterogeneity, *(np.sum((g - mean) ** 2) for g in nodes))
        x = x - STEP * mean
    linear = np.mean([h @ cs.mean(axis=0) for h, cs in zip(HESSIANS, of_nodes, strict=True)], axis=0)
    return largest, heterogeneity, first, loss(np.linalg.solve(HESSIANS.mean(axis=0), linear)), norm_squared


@pytest.mark.parametrize("num_probes", [1, 12, 400])
def test_on_a_quadratic_the_estimates_are_right(num_probes):
    """Also long after the run has converged, when its steps are rounding."""
    largest, heterogeneity, first, least, norm_squared = gradient_descent(num_probes)
    actual = estimate(num_probes, loss_lower_bound=least)
    np.testing.assert_allclose(actual.gradient_bound, largest, rtol=1e-4)
    np.testing.assert_allclose(actual.heterogeneity, heterogeneity, rtol=1e-4)
    np.testing.assert_allclose(actual.initial_gap, first - least, rtol=1e-4)
    np.testing.assert_allclose(actual.initial_norm_squared, norm_squared, rtol=1e-6)
    assert (actual.num_samples, actual.num_params) == (3, 5)
    assert actual.smoothness <= 8.0 * (1 + 1e-3)
    assert actual.smoothness >= (0.97 * 8.0 if num_probes >= 12 else 0.5), "the largest eigenvalue of any node"


def test_padding_never_counts():
    padded = np.arange(DATA.max_size)[None, :] >= np.asarray(DATA.sizes)[:, None]
    outlier = jnp.asarray(np.where(padded, 13, np.asarray(DATA.indices)).astype(np.int32))
    inputs = jnp.concatenate([DATA.inputs, jnp.full((1, 5), 1e3, jnp.float32)])
    labels = jnp.concatenate([DATA.labels, jnp.ones(1, jnp.int32)])
    assert estimate(5, DATA._replace(inputs=inputs, labels=labels, indices=outlier)) == of_all()


def test_a_node_looks_at_evenly_spaced_samples():
    assert estimate(5, max_samples_per_node=6) == of_all()
    actual = estimate(5, max_samples_per_node=3)
    chosen = [np.array([0, 1, 2]), np.array([4, 6, 8]), np.array([10, 11, 12])]
    expected = estimate(5, jaxfl.federate(CENTERS, NODES.astype(np.int32), chosen))
    assert actual == expected
    assert actual != of_all()


def test_factors_and_single_gradients_agree():
    """G from layers in factored form, and one sample at a time; n, J and L do not know the difference."""
    task, data = small_task(), uneven_data()
    plain = jaxfl.from_functions(task.init, task.loss)
    actual, expected = (estimate(6, data, task=one) for one in (task, plain))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    assert actual.num_samples == 4


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_probes": 0}, "num_probes"),
        ({"step_size": -0.1}, "step_size"),
        ({"max_samples_per_node": 0}, "max_samples_per_node"),
        ({"step_size": 1.5}, "step_size"),
        ({"step_size": 1e20}, "step_size"),
        ({"task": classification(sequential([("norm", batch_norm(5))]))}, "task"),
        ({"loss_lower_bound": 100.0}, "loss_lower_bound"),
    ],
)
def test_bad_arguments_are_named(options, argument):
    refused(lambda: estimate(**{"num_probes": 5, **options}), argument)
