"""SVCCA: what it is invariant to, NumPy's own canonical correlations, all pairs of many models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals

from jaxfl.analysis.svcca import svcca, svcca_of_pairs

SAMPLES, FEATURES = 60, 7


def normal(seed, shape=(SAMPLES, FEATURES)):
    """Outputs whose directions differ in size, so that the leading ones are well apart."""
    sizes = 0.7 ** np.arange(shape[-1])
    return (np.random.default_rng(seed).normal(size=shape) * sizes).astype(np.float32)


def orthogonal(seed, size=FEATURES):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0].astype(np.float32)


def canonical_correlations(first, second, num_directions):
    """From covariances, by whitening: eigenvalues of S11^-1 S12 S22^-1 S21 of the projected data, in float64."""
    projected = []
    for values in (first, second):
        centered = values.astype(np.float64) - values.mean(axis=0, dtype=np.float64)
        _, _, directions = np.linalg.svd(centered, full_matrices=False)
        projected.append(centered @ directions[:num_directions].T)
    x, y = projected
    squared = np.linalg.eigvals(np.linalg.solve(x.T @ x, x.T @ y) @ np.linalg.solve(y.T @ y, y.T @ x))
    return np.sqrt(np.clip(squared.real, 0, 1))


@pytest.mark.parametrize("num_directions", [1, 4])
def test_agrees_with_canonical_correlations_of_numpy(num_directions):
    first = normal(0)
    for second in (normal(1), 0.5 * first + 0.3 * normal(2), normal(3, (SAMPLES, 5))):
        expected = canonical_correlations(first, second, num_directions).mean()
        np.testing.assert_allclose(svcca(first, second, num_directions), expected, atol=2e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values @ orthogonal(5),
        lambda values: values[:, ::-1],
        lambda values: -1e-3 * values,
        lambda values: 1e25 * values,
        lambda values: 1e-25 * values,
        lambda values: values + np.linspace(-30.0, 30.0, FEATURES, dtype=np.float32),
    ],
    ids=["rotation", "permutation", "scaling", "large", "small", "translation"],
)
def test_invariant_to_orthogonal_transforms_isotropic_scaling_and_translation(change):
    first, second = normal(0), (normal(0) + normal(1)).astype(np.float32)
    expected = float(svcca(first, second))
    assert 0.3 < expected < 0.9
    np.testing.assert_allclose(svcca(first, change(second)), expected, atol=2e-5)
    np.testing.assert_allclose(svcca(change(first), second), expected, atol=2e-5)


def test_not_invariant_to_every_linear_transform():
    # Other than CCA of all directions: what is stretched comes first.
    stretched = normal(0) * (0.3 ** -np.arange(FEATURES, dtype=np.float32))
    assert svcca(normal(0), stretched) < 0.95


def test_rank_deficient_outputs_give_no_nan():
    dead = np.full((SAMPLES, FEATURES), 0.3, np.float32)
    rank_two = (normal(0)[:, :2] @ normal(1, (2, FEATURES))).astype(np.float32)
    assert svcca(dead, normal(0)) == svcca(dead, dead) == svcca(0 * dead, normal(0)) == 0
    np.testing.assert_allclose(svcca(rank_two, rank_two @ orthogonal(1)), 1.0, atol=1e-5)
    # The mean is over the two directions that there are.
    expected = np.linalg.svd(
        np.linalg.qr(rank_two[:, :2] - rank_two[:, :2].mean(axis=0))[0].T
        @ np.linalg.svd(normal(2) - normal(2).mean(axis=0), full_matrices=False)[0][:, :4]
    )[1].mean()
    np.testing.assert_allclose(svcca(rank_two, normal(2)), expected, atol=1e-5)
    assert svcca(normal(0)[:, :1], normal(1)) > 0  # one feature, four directions asked for


@pytest.mark.parametrize("num_samples", [SAMPLES, 6])
def test_small_directions_count_down_to_a_share_of_the_variance(num_samples):
    sizes = np.array([1.0, 0.1, 0.03, 0.01, 1e-3, 1e-3, 1e-3], np.float32)
    rng = np.random.default_rng(8)
    common = rng.normal(size=(SAMPLES, FEATURES))
    first, second = (
        ((common + 0.5 * rng.normal(size=(SAMPLES, FEATURES))) * sizes)[:num_samples].astype(np.float32)
        @ orthogonal(seed)
        for seed in (0, 1)
    )
    expected = canonical_correlations(first, second, 4).mean()
    np.testing.assert_allclose(svcca(first, second, 4), expected, atol=1e-3)
    # The fifth holds 1e-6 of the variance: five are no other than four.
    if num_samples > FEATURES:
        np.testing.assert_allclose(svcca(first, second, 5), svcca(first, second, 4), atol=1e-6)


def test_many_equal_outputs_are_no_direction():
    # The mean of 100,000 equal float32 numbers is not that number.
    dead = np.tile(np.array([0.1, 0.7, 1.0], np.float32), (100_000, 1))
    assert svcca(dead, np.arange(100_000, dtype=np.float32)[:, None]) == 0


def test_directions_of_few_per_mille_are_orthonormal():
    # Of rank four, so that rounding cannot lead out of the subspace, only to a basis that is not orthonormal.
    sizes = np.array([1.0, 5e-3, 5e-3, 5e-3], np.float32)
    first = (np.random.default_rng(9).normal(size=(SAMPLES, 4)) * sizes).astype(np.float32)
    np.testing.assert_allclose(svcca(first @ orthogonal(0)[:4], first @ orthogonal(1)[:4]), 1.0, atol=2e-5)


def test_not_finite_outputs_give_nan():
    bad = normal(0)
    bad[3, 2] = np.nan
    assert np.isnan(svcca(bad, normal(1)))
    assert np.isnan(svcca(bad[:6], normal(1)[:6]))  # fewer samples than features


def test_a_measurement_its_gradient_is_zero():
    gradient = jax.grad(lambda values: svcca(values, jnp.asarray(normal(1))))(jnp.asarray(normal(0)))
    np.testing.assert_array_equal(gradient, np.zeros((SAMPLES, FEATURES)))


def test_positions_of_convolutions_are_samples():
    images = normal(0, (6, 5, 2, FEATURES)), normal(1, (6, 5, 2, FEATURES))
    flat = [values.reshape(60, FEATURES) for values in images]
    assert svcca(*images) == svcca(*flat)
    np.testing.assert_array_equal(svcca_of_pairs(np.stack(images)), svcca_of_pairs(np.stack(flat)))


def test_pairs_equal_svcca_of_each_pair():
    models = np.stack([normal(0), normal(1), 0 * normal(2), normal(0) + normal(3), normal(0)])
    actual = np.asarray(svcca_of_pairs(models))
    pairs = list(itertools.combinations(range(5), 2))
    assert actual.shape == (10,)
    np.testing.assert_allclose(actual, [svcca(models[i], models[j]) for i, j in pairs], atol=1e-5)
    np.testing.assert_allclose(actual[pairs.index((0, 4))], 1.0, atol=1e-5)
    assert actual[pairs.index((1, 2))] == 0


def test_all_8128_pairs_of_128_models_in_one_call():
    models = normal(0, (128, 40, 6))
    models[77] = models[19] @ orthogonal(2, 6)
    actual = np.asarray(svcca_of_pairs(models))
    assert actual.shape == (8128,)
    first, second = np.triu_indices(128, 1)
    best = actual.argmax()
    assert (first[best], second[best]) == (19, 77)
    np.testing.assert_allclose(actual[best], 1.0, atol=1e-5)
    assert np.sort(actual)[-2] < 0.9


def test_half_precision_is_compared_in_float32():
    first, second = (jnp.asarray(normal(seed)).astype(jnp.bfloat16) for seed in (0, 1))
    actual = svcca(first, second)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, svcca(first.astype(jnp.float32), second.astype(jnp.float32)), atol=1e-6)


test_bad_arguments_are_named = refusals(
    [
        (lambda: svcca(normal(0), normal(1)[:-1]), "second"),
        (lambda: svcca(normal(0)[:, 0], normal(1)), "first"),
        (lambda: svcca(normal(0), normal(1).astype(np.int32)), "second"),
        (lambda: svcca(normal(0)[:, :0], normal(1)), "first"),
        (lambda: svcca(normal(0), normal(1), 0), "num_directions"),
        (lambda: svcca(normal(0)[:5], normal(1)[:5]), "num_directions"),
        (lambda: svcca_of_pairs(normal(0)), "activations"),
        (lambda: svcca_of_pairs(normal(0)[None]), "activations"),
    ]
)
