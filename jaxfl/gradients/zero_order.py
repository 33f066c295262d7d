"""Gradients from losses alone: differences along random directions, which are never stored.

    Phi = z / sqrt(d),  z_j = +1 or -1 with equal probability, or z_j ~ Normal(0, 1), independent
    Delta_r = f(x + gamma Phi_r) - f(x - gamma Phi_r),  the same batch both times
    g = d / (2 gamma) 1/q sum_{r=1}^q Delta_r Phi_r

| symbol | here |
|---|---|
| z of direction r | `Directions.numbers`, of one leaf |
| gamma, q | `smoothing`, `num_directions` |
| Delta_r | differences of what `losses_along` gives |
| d | parameters of one node |

E[Phi Phi^T] = I / d, so that E[g] is the gradient where f is quadratic. Elsewhere it is the gradient plus O(gamma^2);
with Gaussian directions it is the gradient of f smoothed, E f(x + gamma Phi). The variance grows with d / q.

A direction has as many numbers as the model. It is made from a key wherever it is used, by a kernel that adds it to the
parameters at once: a pass needs one moved copy of the parameters and no direction beside it.

References:
    Y. Nesterov, V. Spokoiny, "Random Gradient-Free Minimization of Convex Functions", Foundations of Computational
    Mathematics 17, 2017. J. Duchi, M. Jordan, M. Wainwright, A. Wibisono, "Optimal Rates for Zero-Order Convex
    Optimization: The Power of Two Function Evaluations", IEEE Transactions on Information Theory 61(5), 2015.
    S. Malladi, T. Gao, E. Nichani, A. Damian, J. Lee, D. Chen, S. Arora, "Fine-Tuning Language Models with Just Forward
    Passes", NeurIPS 2023, arXiv:2305.17333: directions from a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import (
    Array,
    Info,
    Key,
    Purpose,
    PyTree,
    check,
    leaf_key,
    node_keys,
    one_kernel,
    over_nodes,
    purpose_key,
)
from jaxfl.core.algorithm import at_round
from jaxfl.core.devices import varying_like
from jaxfl.core.info import Discarded
from jaxfl.core.platform import is_cpu
from jaxfl.core.tasks import check_sample_losses, check_task, sample_losses
from jaxfl.core.threefry import fold_in
from jaxfl.core.tree import size
from jaxfl.gradients.estimator import GradientEstimator, batch_info, gather
from jaxfl.gradients.samplers import Batch, Sampler, check_counts, draw_batch, uniform


class RademacherDirections(NamedTuple):
    """Directions of +1 and -1, made when a pass needs them: `numbers` gives one leaf's."""

    words: Array  # (2,), uint32, of a threefry key; or (n, 2), one key for each node

    def numbers(self, index: int | Array, leaf: int, like: Array) -> Array:
        """z of direction `index` in the leaf of that number in `jax.tree.leaves` order; shape and dtype of `like`."""
        bits = jax.random.bits(_key_of(self.words, index, leaf), (math.prod(like.shape),), jnp.uint32)
        return jnp.where(bits < np.uint32(2**31), 1, -1).astype(like.dtype).reshape(like.shape)


class GaussianDirections(NamedTuple):
    """Directions of standard normal numbers, else as `RademacherDirections`."""

    words: Array

    def numbers(self, index: int | Array, leaf: int, like: Array) -> Array:
        """As `RademacherDirections.numbers`."""
        # Flat: over a short last axis the compiler vectorizes nothing, and takes five times as long.
        flat = jax.random.normal(_key_of(self.words, index, leaf), (math.prod(like.shape),), like.dtype)
        return flat.reshape(like.shape)


class GivenDirections(NamedTuple):
    """Directions from another source, in place of those from a key."""

    values: PyTree  # z, leaves (q, *leaf); of all nodes (n, q, *leaf)

    def numbers(self, index: int | Array, leaf: int, like: Array) -> Array:
        """As `RademacherDirections.numbers`."""
        return jax.tree.leaves(self.values)[leaf][index].astype(like.dtype)


Directions = RademacherDirections | GaussianDirections | GivenDirections
_SOURCES = {"rademacher": RademacherDirections, "gaussian": GaussianDirections}


def check_directions(num_directions: int, direction: str, smoothing: Any) -> None:
    """Refuse a number of directions below 1, an unknown kind, or a smoothing that is not positive."""
    check.at_least(1, num_directions=num_directions)
    check.one_of(tuple(_SOURCES), direction=direction)
    check.scalar(smoothing=smoothing)
    check.positive(smoothing=smoothing)


def shared_directions(direction: str, key: Key, round_index: int | Array) -> Directions:
    """The directions of one round, the same at all nodes.

    Args:
        direction: "rademacher" or "gaussian".
        key: the run's base key.
        round_index: (), int32.
    """
    return _SOURCES[direction](jax.random.key_data(purpose_key(key, Purpose.DIRECTION, round_index)))


def node_directions(direction: str, key: Key, round_index: int | Array, num_nodes: int) -> Directions:
    """The directions of one round, different for each node: a source whose arrays have the node axis first."""
    keys = node_keys(purpose_key(key, Purpose.DIRECTION, round_index), num_nodes)
    return _SOURCES[direction](jax.random.key_data(keys))


def along(directions: Directions, coefficients: Array, params: PyTree) -> PyTree:
    """sum_r c_r Phi_r, a tree like the parameters.

    Args:
        directions: of one node.
        coefficients: c, (q,), float32.
        params: leaves (*leaf); their shapes and dtypes alone matter.
    """
    leaves, structure = jax.tree.flatten(params)
    scales = coefficients / math.sqrt(size(params))

    def of_direction(index):
        factor = scales[index]
        return [factor.astype(leaf.dtype) * directions.numbers(index, i, leaf) for i, leaf in enumerate(leaves)]

    if len(coefficients) == 1:
        return structure.unflatten(of_direction(0))

    def add(index, total):
        return [one + other for one, other in zip(total, of_direction(index), strict=True)]

    nothing = varying_like([jnp.zeros_like(leaf) for leaf in leaves], directions, coefficients)
    return structure.unflatten(jax.lax.fori_loop(0, len(coefficients), add, nothing))


def losses_along(
    losses: Callable[[PyTree], Array],
    params: PyTree,
    directions: Directions,
    num_directions: int,
    smoothing: float | Array,
) -> tuple[Array, Array]:
    """Losses at both sides of the parameters, direction after direction.

    Args:
        losses: parameters -> any array, (...), float32; run twice for each direction.
        params: leaves (*leaf).
        directions: of one node.
        num_directions: q.
        smoothing: gamma, how far to go, positive; may be traced.

    Returns:
        (at x + gamma Phi_r, at x - gamma Phi_r), each (q, ...).

    Guarantees:
        - one moved copy of the parameters, and no direction, is held at a time.
    """
    leaves, structure = jax.tree.flatten(params)
    step = smoothing / math.sqrt(size(params))

    def move(sign, index):
        factors = [jnp.asarray(sign * step, leaf.dtype) for leaf in leaves]
        return [
            leaf + factor * directions.numbers(index, number, leaf)
            for number, (leaf, factor) in enumerate(zip(leaves, factors, strict=True))
        ]

    def one_pass(carry, number):
        # One pass in a loop, its direction counted by the loop: written twice, or with a direction that the compiler
        # knows, it would hold both moved copies, or the direction that they share. And the result of a branch is
        # stored: else each activation would have its bias moved anew, which took as long as the passes themselves.
        if is_cpu():
            flat = jax.lax.cond(number & 1 == 0, lambda r: move(1.0, r), lambda r: move(-1.0, r), number >> 1)
        else:  # an accelerator's host would wait to choose a branch
            flat = jax.lax.optimization_barrier(move(jnp.where(number & 1 == 0, 1.0, -1.0), number >> 1))
        return carry, losses(structure.unflatten(flat))

    _, all_losses = jax.lax.scan(one_pass, None, jnp.arange(2 * num_directions, dtype=jnp.int32))
    return all_losses[0::2], all_losses[1::2]


class ZeroOrderDraws(NamedTuple):
    """The random numbers of one round's estimates."""

    batch: Batch  # which samples
    directions: Directions  # of each node: arrays have the node axis first


def zero_order(
    *,
    smoothing: float | Array | Callable[[Array], Array],
    num_directions: int = 1,
    direction: str = "rademacher",
    sampler: Sampler | None = None,
) -> GradientEstimator:
    """The two-point estimate of every node's gradient, along directions of its own.

        g_i = d / (2 gamma) 1/q sum_r (f_i(x_i + gamma Phi_ir) - f_i(x_i - gamma Phi_ir)) Phi_ir

    with f_i the mean loss of one batch, the same batch at all points of a round. Nothing is clipped, so that no privacy
    guarantee can rest on an estimate.

    Args:
        smoothing: gamma, the L2 length of a move (in expectation, for Gaussian directions): a number, a traced scalar,
            or a schedule of the round index. Choose it small against the scale on which the gradient changes, but not
            tiny: losses in float32 are off by about 6e-8, so the estimate is by about 6e-8 d / gamma in each direction.
        num_directions: q, at least 1, static.
        direction: "rademacher" or "gaussian".
        sampler: how the batch is drawn; default `uniform(1)`.

    Returns:
        An estimator without state. The loss of its `Info` is the mean of all passes.

    Raises:
        ArgumentError: a number out of range; from `init`, too large a batch, or a task with `train_loss`.

    Guarantees:
        - unbiased for the gradient of a quadratic under every sampler, for both kinds of directions.
        - the mean over directions has a variance that falls as 1 / num_directions.
        - a node's directions do not depend on the number of nodes.

    Examples:
        >>> import numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> gradient = zero_order(smoothing=0.01, num_directions=4)
        >>> learner = jaxfl.d_psgd(task, graph=jaxfl.graphs.complete(2), step_size=0.1, gradient=gradient)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist(), info.forward_evaluations.tolist()
        ([0, 0], [8, 8])
    """
    check_directions(num_directions, direction, smoothing)
    scheme = uniform(1) if sampler is None else sampler

    def init(task, key, params, data):
        check_sample_losses(task)
        check_task(task, data)
        check_counts(scheme, data.sizes, data.names)

    def draw(key, round_index, data):
        return ZeroOrderDraws(
            batch=draw_batch(scheme, key, round_index, data.sizes),
            directions=node_directions(direction, key, round_index, data.num_nodes),
        )

    def estimate(task, params, state, data, draws: ZeroOrderDraws, round_index):
        gamma = at_round(smoothing, round_index, params)

        def one_node(node_params, directions, inputs, labels, mask):
            def losses(values):
                return jnp.where(mask, sample_losses(task, values, inputs, labels), 0.0)

            above, below = losses_along(losses, node_params, directions, num_directions, gamma)
            differences = jnp.sum(above - below, axis=1) / scheme.batch_size
            slopes = differences * (size(node_params) / (2 * num_directions)) / gamma
            loss = jnp.sum(above + below) / (2 * num_directions * scheme.batch_size)
            return along(directions, slopes, node_params), loss

        inputs, labels = gather(data, draws.batch.indices)
        gradient, loss = over_nodes(one_node, task.node_loop)(
            params, draws.directions, inputs, labels, draws.batch.mask
        )
        none = jnp.zeros_like(draws.batch.overflow)
        info = batch_info(
            gradient,
            Info(loss).plus(clipped_fraction=jnp.zeros_like(loss), discarded_gradients=Discarded(none)),
            draws.batch,
            gradient_evaluations=none,
            forward_evaluations=2 * num_directions * draws.batch.mask.sum(axis=1, dtype=jnp.int32),
        )
        return gradient, state, info

    return GradientEstimator(init=init, draw=draw, estimate=estimate)


def _key_of(words: Array, index: int | Array, leaf: int) -> Array:
    """The key of one leaf of one direction, to be used at once."""
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return one_kernel(leaf_key(fold_in(key, index), leaf))
