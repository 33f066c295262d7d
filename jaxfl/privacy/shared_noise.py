"""Gaussian noise that pairs of nodes share, as a mechanism (`jaxfl.privacy.shared` has what it is worth)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, Purpose, PyTree, check, purpose_key
from jaxfl.core.normals import normals
from jaxfl.core.tree import copied, scale
from jaxfl.privacy.grid_noise import grid_gaussian
from jaxfl.privacy.mechanisms import NoiseMechanism, add, gaussian, standard_noise
from jaxfl.privacy.shared import KeyGraph, Secrets, calibrated, check_colluding, check_ratio
from jaxfl.privacy.shared_grid_noise import shared_grid_gaussian


def shared_gaussian(
    noise_std: float | Array,
    *,
    key_graph: KeyGraph,
    ratio: float,
    colluding: int = 1,
    grid_bits: int | None = None,
) -> NoiseMechanism:
    """Gaussian noise of one's own and noise shared between pairs of nodes, which cancels in the sum over nodes.

    `noise_std` is the *effective* noise: what every node still has against an observer who sees all messages and knows
    data, noise and seeds of `colluding` other nodes. So the epsilon is that of `gaussian(noise_std)`, against this
    observer. With f the least effective noise at own noise 1 the own noise is s = noise_std / f, the shared noise of a
    pair ratio s. With scales per node s_i = r noise_std_i, and a pair shares r ratio min(noise_std_i, noise_std_v).

    A node's own model before mixing has the variance of all its shared parts. Steps must be equal and mixing must keep
    the sum over nodes; the algorithms refuse what does not.

    Args:
        noise_std: () or (n,), above 0 where it has one a node; a single one may be traced.
        key_graph: pairs that share noise, by `jaxfl.privacy.shared.key_graph` or `best_ratio`.
        ratio: of the shared to the own standard deviation, static, by `best_ratio`.
        colluding: nodes that share their secrets with the observer; with n - 1 of them nothing is left but a node's own
            noise.
        grid_bits: own and shared noise are integers times 2^-grid_bits s, one step for all nodes, and values are
            rounded to it. The ratio is then a power of two. None: noise in float32.

    Raises:
        ArgumentError: a traced ratio, traced scales per node, or scales of another number of nodes.

    Guarantees:
        - the covariance over nodes is that of `jaxfl.privacy.shared`, for every coordinate.
        - the sum over nodes has own noise only.
        - ratio 0 is `gaussian(noise_std)`, bit for bit.

    Examples:
        >>> import jax
        >>> from jaxfl.privacy.shared import key_graph
        >>> noise = shared_gaussian(1.0, key_graph=key_graph("complete", 4), ratio=10.0, colluding=0)
        >>> drawn = noise.draw(jax.random.key(0), jnp.zeros((4, 10_000)))
        >>> round(float(drawn.std()), 1), round(float(drawn.sum(axis=0).std()), 1)
        (8.7, 1.0)

    References:
        DECOR (arXiv:2405.01031) and GOPA; see `jaxfl.privacy.shared`.
    """
    n = key_graph.num_nodes
    check_ratio(ratio=ratio)
    check_colluding(n, colluding)
    if ratio == 0:
        return gaussian(noise_std) if grid_bits is None else grid_gaussian(noise_std, grid_bits)
    check.non_negative(noise_std=noise_std)
    check.in_float32(noise_std=noise_std)
    if grid_bits is not None:
        options = {"ratio": ratio, "colluding": colluding, "grid_bits": grid_bits}
        return shared_grid_gaussian(noise_std, key_graph=key_graph, **options)
    noise_std, parts = copied(noise_std), np.ones(n)
    if np.ndim(noise_std):
        if check.is_traced(noise_std):
            remedy = "Build the mechanism outside of jit and vmap, or pass one scale."
            raise ArgumentError("noise_std", "must be known where it differs by node", "got a traced one", remedy)
        check.per_node(n, noise_std=noise_std)
        check.positive(noise_std=noise_std)
        parts = np.asarray(noise_std, np.float64)
    factor, secrets = calibrated(key_graph, ratio=ratio, own=parts, colluding=colluding)
    own, shared = factor * parts, factor * ratio * key_graph.shared(parts)
    draw_unit = (_complete if key_graph.is_complete and np.ptp(parts) == 0 else _pairs)(own, shared)

    def draw(key, params):
        num_nodes = jax.tree.leaves(params)[0].shape[0]
        if num_nodes != n:
            found = f"got {num_nodes}"
            raise ArgumentError("params", f"must be of {n} nodes, as the key graph", found, "Make one for the network.")
        drawn = draw_unit(key, params)
        return drawn if np.ndim(noise_std) else scale(jnp.asarray(noise_std, jnp.float32), drawn)

    units = None if np.ndim(noise_std) else (own, shared)
    return NoiseMechanism("shared_gaussian", noise_std, draw, secrets=secrets, parts=units)


def summed_gaussian(noise_std: float | Array, *, num_clients: int, colluding: int = 1) -> NoiseMechanism:
    """Gaussian noise of clients whose server sees nothing but their sum, by secure aggregation.

    `noise_std` is the *effective* noise of one client: what m - colluding of m clients add to the sum together. Each
    draws noise_std / sqrt(m - colluding). What a client sends must be one noisy vector, a linear function of it and of
    what all clients know: one local step in a round, or an update that is clipped as a whole.

    Args:
        noise_std: (), at least 0; may be traced.
        num_clients: m, the active clients of every round.
        colluding: clients that share what they know with the server, fewer than m.

    Guarantees:
        - the sum of m - colluding clients has noise of standard deviation noise_std.

    Examples:
        >>> import jax
        >>> drawn = summed_gaussian(2.0, num_clients=5).draw(jax.random.key(0), jnp.zeros((5, 40_000)))
        >>> round(float(drawn[1:].sum(axis=0).std()), 1)
        2.0

    References:
        Goryczka, Xiong, "A Comprehensive Comparison of Multiparty Secure Additions with Differential Privacy", IEEE
        Transactions on Dependable and Secure Computing 14(5), 2017; the proof is that of `jaxfl.privacy.shared`.
    """
    check.at_least(2, num_clients=num_clients)
    check_colluding(num_clients, colluding)
    check.non_negative(noise_std=noise_std)
    check.in_float32(noise_std=noise_std)
    if np.ndim(noise_std):
        raise ArgumentError("noise_std", "must be one number in a sum", "got one a client", "Pass the largest.")
    factor, shape = (num_clients - colluding) ** -0.5, (num_clients, num_clients)
    drawn = gaussian(noise_std * factor)
    partners = (num_clients - 1,) * num_clients
    secrets = Secrets("complete", num_clients, colluding, "sum", partners)
    parts = np.full(num_clients, factor), np.zeros(shape)
    return NoiseMechanism("summed_gaussian", copied(noise_std), drawn.draw, secrets=secrets, parts=parts)


def covariance(noise: NoiseMechanism) -> np.ndarray | None:
    """Covariance over nodes of shared noise on one coordinate, (n, n); None for noise of a node's own.

    Examples:
        >>> from jaxfl.privacy.shared import key_graph
        >>> noise = shared_gaussian(1.0, key_graph=key_graph("complete", 3), ratio=1.0, colluding=0)
        >>> covariance(noise).round(2).tolist()  # own noise of variance 1/2, which is all of the sum's
        [[1.5, -0.5, -0.5], [-0.5, 1.5, -0.5], [-0.5, -0.5, 1.5]]
    """
    if noise.parts is None:
        return None
    own, squares = noise.parts[0], np.square(noise.parts[1])
    return float(noise.noise_scale) ** 2 * (np.diag(np.square(own) + squares.sum(axis=1)) - squares)


def views(covariance: np.ndarray | None) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Make two functions of what nodes release, (n, *leaf), where pairs of nodes share noise.

    The first gives what an outside observer finds of each node u beside its effective noise: with P the inverse of the
    covariance, (P y)_u / P_uu. The second makes noise independent, of the variance 1 / P_uu, which is that of node 0.
    Both are the identity without a covariance.
    """
    if covariance is None:
        return (lambda leaf: leaf), (lambda leaf: leaf)
    values, vectors = np.linalg.eigh(covariance)
    precision = (vectors / values) @ vectors.T
    roots = (vectors / np.sqrt(values)) @ vectors.T / np.sqrt(precision[0, 0])

    def times(matrix):
        matrix = jnp.asarray(matrix, jnp.float32)
        return lambda leaf: jnp.tensordot(matrix, leaf, axes=1, precision=jax.lax.Precision.HIGHEST)

    return times(precision / np.diag(precision)[:, None]), times(roots)


def _normal(key: Array, params: PyTree, purpose: Purpose) -> PyTree:
    """Standard normal numbers like `params`. The round's key is folded only: never sampled from, nor by a node."""
    return standard_noise(purpose_key(key, purpose, 0), params, normals)


def _complete(own: np.ndarray, shared: np.ndarray):
    """sqrt(s^2 + n c^2) (z - mean z) + s mean z: the law of all n (n - 1) / 2 pairs, from n numbers."""
    apart, together = np.float32(np.sqrt(own[0] ** 2 + len(own) * shared[0, -1] ** 2)), np.float32(own[0])

    def draw(key, params):
        def spread(z):
            mean = z.mean(axis=0, keepdims=True)
            return apart * (z - mean) + together * mean

        return jax.tree.map(spread, _normal(key, params, Purpose.SHARED_NOISE))

    return draw


def _pairs(own: np.ndarray, shared: np.ndarray):
    """Own noise, and L^(1/2) z with L the Laplacian of the pairs' variances: the law of a number a pair, from n."""
    squares = np.square(shared)
    values, vectors = np.linalg.eigh(np.diag(squares.sum(axis=1)) - squares)
    root = jnp.asarray((vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T, jnp.float32)

    def draw(key, params):
        def share(z):
            return jnp.tensordot(root, z, axes=1, precision=jax.lax.Precision.HIGHEST)

        in_pairs = jax.tree.map(share, _normal(key, params, Purpose.SHARED_NOISE))
        return add(scale(jnp.asarray(own, jnp.float32), _normal(key, params, Purpose.NOISE)), in_pairs)

    return draw
