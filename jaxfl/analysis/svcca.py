"""SVCCA: how alike the representations of two models are, from their outputs on the same samples.

For outputs A (samples, features) of one layer, each feature's mean over the samples is subtracted, and the k left
singular vectors of the largest singular values span the model's k-dimensional subspace of the samples' space. Two
models, whose subspaces have orthonormal bases U and V (samples, k), have the canonical correlations

    rho_1, ..., rho_k = the singular values of U^T V,      SVCCA = (rho_1 + ... + rho_k) / k,

1 for equal subspaces and 0 for orthogonal ones. Widths may differ.

Outputs of convolutions (samples, height, width, channels) are flattened to (samples * height * width, channels): every
position counts as a sample, and only channels are features, as in the tutorial of google/svcca for layers of equal
height and width. In outputs (samples, words, features) every word counts as a sample.

A direction that holds less than 1e-5 of a model's variance does not count, since rounding decides where it points. If
the two models then have unequal numbers of directions, the mean is over the smaller number.

References:
    M. Raghu, J. Gilmer, J. Yosinski, J. Sohl-Dickstein, "SVCCA: Singular Vector Canonical Correlation Analysis for Deep
    Learning Dynamics and Interpretability", NeurIPS 2017, arXiv:1706.05806; https://github.com/google/svcca.
    S. Lee, T. Zhang, S. Prakash, Y. Niu, S. Avestimehr, "Embracing Federated Learning: Enabling Weak Client
    Participation via Partial Model Training": section 6.3 (4 directions, mean of several validation batches), figures 1
    and 3 (maximum over all pairs of 128 clients).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, check

Outputs = Array | np.ndarray

# A share of the variance: directions come from squares, in float32, and are right to within 1e-4 down to here.
_LEAST_SHARE = 1e-5


class _Subspace(NamedTuple):
    """The leading directions of one model's outputs."""

    basis: Array  # (samples, k), float32, orthonormal columns; zeros behind the rank
    rank: Array  # (), int32, at most k


def svcca(first: Outputs, second: Outputs, num_directions: int = 4) -> Array:
    """Mean canonical correlation of the leading directions of two models' outputs on the same samples.

    Args:
        first: (samples, features), or (samples, ..., features) to be flattened; floating.
        second: the same of another model; only the number of features may differ.
        num_directions: k, at least 1, below samples - 1, since any two subspaces of samples - 1 directions are equal.
            A model with fewer features has fewer directions.

    Returns:
        (), float32, in [0, 1]. 0 where a model gives every sample the same output; NaN where an output is not finite.

    Raises:
        ArgumentError: shapes or types that do not fit, or too few samples.

    Guarantees:
        - invariant to orthogonal transforms and isotropic scaling of the features, and to translation.
        - 1 for equal subspaces.
        - rank deficient outputs give no NaN.
        - a measurement: its gradient is zero.

    Examples:
        >>> outputs = jax.random.normal(jax.random.key(0), (50, 3))
        >>> turned = outputs @ jnp.array([[0.0, 2.0, 0.0], [-2.0, 0.0, 0.0], [0.0, 0.0, 2.0]]) + 5.0
        >>> round(float(svcca(outputs, turned, num_directions=2)), 5)
        1.0
        >>> other = jax.random.normal(jax.random.key(1), (50, 3))
        >>> bool(svcca(outputs, other, num_directions=2) < 0.5)
        True
    """
    matrices = [_flatten(name, values, 1) for name, values in (("first", first), ("second", second))]
    if first.shape[:-1] != second.shape[:-1]:
        found = f"got shapes {first.shape} and {second.shape}"
        raise ArgumentError("second", "must come from the samples of first", found, "Pass outputs on one batch.")
    _check_directions(num_directions, matrices[0].shape[0])
    return _of_two(matrices[0], matrices[1], num_directions)


def svcca_of_pairs(activations: Outputs, num_directions: int = 4) -> Array:
    """`svcca` of all pairs of m models, in one compiled call.

    The singular vectors are computed once per model, one model after the other; a pair is then a problem of size
    (k, k). Memory, beside the outputs, holds m * samples * k + (m k)^2 numbers.

    Args:
        activations: (m, samples, features), or (m, samples, ..., features) to be flattened; floating; m at least 2.
        num_directions: k, see `svcca`.

    Returns:
        (m (m - 1) / 2,), float32: pairs (0, 1), (0, 2), ..., (m - 2, m - 1), the order of `numpy.triu_indices(m, 1)`.

    Raises:
        ArgumentError: shapes or types that do not fit, or too few models or samples.

    Guarantees:
        - equals `svcca` of each pair.

    Examples:
        >>> outputs = jax.random.normal(jax.random.key(0), (3, 50, 6)).at[2].set(0.0)
        >>> similarity = svcca_of_pairs(outputs.at[1].set(-outputs[0]))
        >>> similarity.round(5).tolist()  # 0 with 1, 0 with 2, 1 with 2
        [1.0, 0.0, 0.0]
    """
    matrices = _flatten("activations", activations, 2)
    if matrices.shape[0] < 2:
        raise ArgumentError("activations", "must hold at least two models", "got one", "Pass (m, samples, features).")
    _check_directions(num_directions, matrices.shape[1])
    return _of_pairs(matrices, num_directions)


@partial(jax.jit, static_argnums=2)
def _of_two(first: Outputs, second: Outputs, num_directions: int) -> Array:
    """`svcca` of two matrices."""
    one, other = (_leading_subspace(num_directions, jnp.asarray(outputs)) for outputs in (first, second))
    return _mean_correlation(_product(one.basis.T, other.basis), jnp.minimum(one.rank, other.rank))


@partial(jax.jit, static_argnums=1)
def _of_pairs(matrices: Outputs, num_directions: int) -> Array:
    """`svcca_of_pairs` of (m, samples, features)."""
    # One model after the other: a decomposition holds several copies of its matrix.
    subspaces = jax.lax.map(partial(_leading_subspace, num_directions), matrices)
    products = jnp.einsum("isk,jsl->ijkl", subspaces.basis, subspaces.basis, precision="highest")
    first, second = np.triu_indices(matrices.shape[0], 1)
    ranks = jnp.minimum(subspaces.rank[first], subspaces.rank[second])
    return jax.vmap(_mean_correlation)(products[first, second], ranks)


def _leading_subspace(num_directions: int, outputs: Array) -> _Subspace:
    """The directions of (samples, features) with the largest singular values."""
    # Singular vectors of equal values have no derivative, and the measurement needs none.
    values = jax.lax.stop_gradient(outputs if outputs.dtype == jnp.float64 else outputs.astype(jnp.float32))
    # Scale to numbers of at most 1, so that no square overflows; 0 stays 0.
    largest = jnp.max(jnp.abs(values))
    values = values / jnp.where(largest == 0, jnp.ones_like(largest), largest)
    # The rest that the rounded mean of equal numbers leaves must not look like a direction; it was up to 3 roundings.
    rounding = 8.0 * jnp.finfo(values.dtype).eps * jnp.linalg.norm(values)
    values = values - values.mean(axis=0, keepdims=True)
    # Eigenvectors of the smaller of A^T A and A A^T: singular vectors of A took 7 to 17 times as long on one core.
    is_tall = values.shape[0] > values.shape[1]
    square = _product(values.T, values) if is_tall else _product(values, values.T)
    variances, vectors = jnp.linalg.eigh(square)
    num_directions = min(num_directions, *values.shape)
    variances, vectors = variances[::-1][:num_directions], vectors[:, ::-1][:, :num_directions]
    least = jnp.maximum(_LEAST_SHARE * jnp.trace(square), rounding**2)
    counts = ~(variances <= least)  # NaN counts, and so stays
    basis = jnp.where(counts[None, :], vectors, jnp.zeros((), values.dtype))
    if is_tall:
        lengths = jnp.sqrt(jnp.where(counts, variances, jnp.ones_like(variances)))
        basis = _orthonormal(_product(values, basis / lengths[None, :]), counts)
    return _Subspace(basis=basis, rank=counts.sum(dtype=jnp.int32))


def _orthonormal(columns: Array, counts: Array) -> Array:
    """Orthonormal basis of the span of nearly orthonormal columns; a zero for each column that does not count."""
    # Rounding leaves the columns of small variances a little of the large ones.
    missing = jnp.diag((~counts).astype(columns.dtype))
    lengths, directions = jnp.linalg.eigh(_product(columns.T, columns) + missing)
    return _product(columns, directions / jnp.sqrt(lengths)[None, :])


def _product(left: Array, right: Array) -> Array:
    """Matrix product in full float32, also where an accelerator would round."""
    return jnp.matmul(left, right, precision="highest")


def _mean_correlation(product: Array, rank: Array) -> Array:
    """Mean of the singular values of U^T V (k, k), () float32, over `rank` directions; the others are zero."""
    correlations = jnp.clip(jnp.linalg.svd(product, compute_uv=False), 0.0, 1.0)
    return (correlations.sum() / jnp.maximum(rank, 1).astype(product.dtype)).astype(jnp.float32)


def _flatten(name: str, values: Outputs, leading: int) -> Outputs:
    """(..., samples, features): all axes but the last behind the models are samples."""
    if not jnp.issubdtype(values.dtype, jnp.floating) or values.ndim < leading + 1:
        text = "(m, samples, ..., features)" if leading == 2 else "(samples, ..., features)"
        found = f"got {values.dtype} of shape {values.shape}"
        raise ArgumentError(name, f"must be floating numbers {text}", found, "Pass the outputs of a layer.")
    if 0 in values.shape:
        raise ArgumentError(name, "must not be empty", f"got shape {values.shape}", "Pass at least one feature.")
    return values.reshape(*values.shape[: leading - 1], -1, values.shape[-1])


def _check_directions(num_directions: int, num_samples: int) -> None:
    """Refuse a number of directions at which any two models are equal."""
    check.at_least(1, num_directions=num_directions)
    if num_directions >= num_samples - 1:
        requirement = f"must be below the number of samples minus 1, which is {num_samples - 1}"
        remedy = "Pass fewer directions or more samples."
        raise ArgumentError("num_directions", requirement, f"got {num_directions}", remedy)
