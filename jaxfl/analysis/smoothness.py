"""Estimates of the constants that the theory of PrivSGP-VR needs: L, G, b^2, F0, |x^0|^2.

A probing run of gradient descent on f = (1/n) sum_i f_i, x^{t+1} = x^t - gamma grad f(x^t), from the start of the real
run takes the largest value seen of

    L    |grad f_i(y) - grad f_i(x)| / |y - x|    between successive x^t, and between x^t and x^t + r u_i^t
    G    |grad f_i(x^t; j)|                       over samples j
    b^2  |grad f_i(x^t) - grad f(x^t)|^2          over nodes i: Assumption 5 bounds every node, not their mean

The directions u_i start at random and follow the change of the gradient that they caused, u_i^{t+1} parallel to
grad f_i(x^t + r u_i^t) - grad f_i(x^t): power iteration on the Hessian of f_i, which finds its largest curvature where
random directions see the average one. The secants of f never exceed the largest of the f_i, so they are not taken.

Zhu, Huang, Wang, Xu, "PrivSGP-VR: Differentially Private Variance-Reduced Stochastic Gradient Push with Tight Utility
Bounds", IJCAI 2024, arXiv:2405.02638, Assumptions 3 and 5 and section 5.1, which takes its L and b^2 from the method of
Wang et al. 2019, arXiv:1804.05271: differences of gradients along a run, as here.

Does not claim: upper bounds. The estimates are too small, L above all: Assumption 3 asks for the L of every sample's
loss, and a node's mean is smoother. Nor privacy: the data are read without noise.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import (
    ArgumentError,
    Array,
    FederatedData,
    Purpose,
    PyTree,
    Task,
    check,
    node_keys,
    one_kernel,
    over_nodes,
    purpose_key,
)
from jaxfl.core.tasks import check_sample_losses
from jaxfl.core.tree import flattener, norm, replicate, scale, size, squared_norm
from jaxfl.data.pool import SomeSamples, some_samples
from jaxfl.gradients import per_example
from jaxfl.privacy.gossip import ProblemConstants

# r, relative to |x|: the curvature at the scale of x rather than at a kink of the activations, far above rounding.
_RADIUS = 0.01
# Shorter steps, relative to |x|, divide the gradient's float32 rounding by almost 0, and do not show L.
_SHORTEST_STEP = 1e-4
_SLACK = 1e-3  # relative growth of a loss that still counts as rounding


class _Probing(NamedTuple):
    """Current state of the run, with the extremes so far."""

    params: PyTree  # x^t, leaves (n, *leaf), the same at every node
    previous: PyTree  # x^{t-1}, likewise
    gradients: PyTree  # grad f_i(x^{t-1}), leaves (n, *leaf)
    directions: PyTree  # u_i, leaves (n, *leaf), of norm 1
    initial_loss: Array  # (), float32, f(x^0)
    loss: Array  # (), float32, f(x^{t-1})
    smoothness: Array  # (), float32
    gradient_bound: Array  # (), float32
    heterogeneity: Array  # (), float32


def estimate_constants(
    key: Array,
    task: Task,
    data: FederatedData,
    *,
    num_probes: int,
    step_size: float,
    max_samples_per_node: int | None = None,
    loss_lower_bound: float = 0.0,
) -> ProblemConstants:
    """The constants of Theorem 1 and Corollary 1 for a task on these data, by a probing run.

    A probe costs two passes of gradients over the samples, and one more for the norms. All probes are one compiled
    program, whatever their number.

    Args:
        key: the run's base key: x^0 is the start of every algorithm with this key.
        task: the learning task.
        data: the nodes' samples.
        num_probes: points of the probing run, at least 1.
        step_size: of the probing run; below 2 / L, or it diverges.
        max_samples_per_node: samples that a node reads, evenly spaced; None for all. With m samples b^2 grows by up to
            (variance of a sample's gradient) / m, and G misses the samples left out.
        loss_lower_bound: used in place of min f, which is not computed; 0 fits the losses of classification.

    Returns:
        `smoothness`, `gradient_bound` and `heterogeneity` as above; `initial_gap` f(x^0) - loss_lower_bound;
        `initial_norm_squared`; `num_samples` J of the smallest node, the one with the largest noise; `num_params`.

    Raises:
        ArgumentError: a task with `train_loss`, an argument out of range, or a probing run that does not descend.

    Guarantees:
        - on a quadratic the estimates are right, and L is never above the largest eigenvalue, float32 rounding apart.
        - more probes never give a smaller maximum.
        - padding never counts.

    Examples:
        >>> import jaxfl
        >>> task = jaxfl.from_functions(
        ...     lambda key: jnp.zeros(2, jnp.float32), lambda w, x, y: jnp.sum((w[None] - x) ** 2, axis=1)
        ... )
        >>> data = jaxfl.federate(np.eye(2, dtype="float32"), np.zeros(2, "float32"), [[0], [1]])
        >>> theory = estimate_constants(jax.random.key(0), task, data, num_probes=3, step_size=0.1)
        >>> round(theory.smoothness, 3), round(theory.gradient_bound, 3), round(theory.heterogeneity, 3)
        (2.0, 2.0, 2.0)
    """
    check_sample_losses(task)
    check.at_least(1, num_probes=num_probes)
    check.scalar(step_size=step_size)
    check.positive(step_size=step_size)
    if max_samples_per_node is not None:
        check.at_least(1, max_samples_per_node=max_samples_per_node)
    samples = some_samples(data, max_samples_per_node or data.max_size)
    params, end = _probe(task, key, samples, jnp.int32(num_probes), jnp.float32(step_size))
    constants = ProblemConstants(
        smoothness=float(end.smoothness),
        gradient_bound=float(end.gradient_bound),
        initial_gap=float(end.initial_loss) - loss_lower_bound,
        heterogeneity=float(end.heterogeneity),
        initial_norm_squared=sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(params)),
        num_samples=int(np.min(data.sizes)),
        num_params=size(params),
    )
    first, last = float(end.initial_loss), float(end.loss)
    if not (all(map(math.isfinite, constants)) and last <= first + _SLACK * abs(first)):
        requirement = "must be small enough for the probing run to descend"
        found = f"got {step_size}, which leads from a loss of {first:.6g} to {last:.6g}"
        raise ArgumentError("step_size", requirement, found, "Pass a smaller step, and data that are finite.")
    if last < loss_lower_bound:
        found = f"got {loss_lower_bound}, and saw a loss of {last:.6g}"
        raise ArgumentError("loss_lower_bound", "must be below every loss", found, "Pass a lower bound.")
    return constants


@partial(jax.jit, static_argnums=0)
def _probe(
    task: Task, key: Array, samples: SomeSamples, num_probes: Array, step_size: Array
) -> tuple[PyTree, _Probing]:
    """(x^0 of one node, the end of the probing run). The length is traced: one program, so that maxima are nested."""
    num_nodes = samples.weights.shape[0]
    start = task.init(purpose_key(key, Purpose.INIT))
    _, unflatten = flattener(start)
    # Round 0 of this purpose is x^0, and no run has another.
    keys = node_keys(purpose_key(key, Purpose.INIT, 1), num_nodes)
    directions = unflatten(jax.vmap(lambda one: jax.random.normal(one_kernel(one), (size(start),), jnp.float32))(keys))
    gradient_at = over_nodes(partial(_gradient, task), task.node_loop)
    largest_norm_at = over_nodes(partial(_largest_norm, task), task.node_loop)

    def probe(index, run: _Probing) -> _Probing:
        losses, gradients = gradient_at(run.params, samples)
        loss = losses.mean()
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0, keepdims=True), gradients)
        away = jax.tree.map(jnp.subtract, gradients, mean)

        radius = _RADIUS * norm(run.params)
        step = scale(jnp.where(radius > 0, radius, _RADIUS), run.directions)
        beside = jax.tree.map(jnp.add, run.params, step)
        _, there = gradient_at(beside, samples)
        change = jax.tree.map(jnp.subtract, there, gradients)
        secants = jnp.maximum(
            _secants(run.params, gradients, beside, there), _secants(run.previous, run.gradients, run.params, gradients)
        )
        return _Probing(
            params=jax.tree.map(lambda x, g: x - step_size * g, run.params, mean),
            previous=run.params,
            gradients=gradients,
            directions=_unit(change, otherwise=run.directions),
            initial_loss=jnp.where(index == 0, loss, run.initial_loss),
            loss=loss,
            smoothness=jnp.maximum(run.smoothness, secants.max()),
            gradient_bound=jnp.maximum(run.gradient_bound, largest_norm_at(run.params, samples).max()),
            heterogeneity=jnp.maximum(run.heterogeneity, squared_norm(away).max()),
        )

    params = replicate(start, num_nodes)
    zero = jnp.float32(0.0)
    begin = _Probing(
        params=params,
        previous=params,  # a secant of length 0, which counts for nothing
        gradients=jax.tree.map(jnp.zeros_like, params),
        directions=_unit(directions, otherwise=directions),
        initial_loss=zero,
        loss=zero,
        smoothness=zero,
        gradient_bound=zero,
        heterogeneity=zero,
    )
    return start, jax.lax.fori_loop(0, num_probes, probe, begin)


def _gradient(task: Task, params: PyTree, samples: SomeSamples) -> tuple[Array, PyTree]:
    """Loss and gradient of one node."""
    total = per_example.weighted_sum(task, params, samples.inputs, samples.labels, samples.weights)
    return jnp.sum(samples.weights * total.losses), total.gradient


def _largest_norm(task: Task, params: PyTree, samples: SomeSamples) -> Array:
    """Largest norm of a sample's gradient at one node, (); no gradients held where layers have factors."""
    if task.factors is not None:
        _, factors = task.factors(params, samples.inputs, samples.labels)
        norms = per_example.factor_norms(task, factors, 2)
    else:

        def one(sample):
            def single(values):
                return task.loss(values, sample[0][None], sample[1][None])[0]

            return per_example.tree_norm(jax.grad(single)(params), 2)

        norms = jax.lax.map(one, (samples.inputs, samples.labels))
    return jnp.max(norms)


def _secants(before: PyTree, gradients_before: PyTree, after: PyTree, gradients_after: PyTree) -> Array:
    """Change of each node's gradient over the length of its step, (n,); 0 for a step too short to tell."""
    step = norm(jax.tree.map(jnp.subtract, after, before))
    change = norm(jax.tree.map(jnp.subtract, gradients_after, gradients_before))
    counts = step > _SHORTEST_STEP * norm(after)
    return jnp.where(counts, change / jnp.where(counts, step, 1.0), 0.0)


def _unit(tree: PyTree, *, otherwise: PyTree) -> PyTree:
    """Each node's part divided by its norm; `otherwise` where that is 0."""
    length = norm(tree)
    positive = length > 0
    inverse = 1.0 / jnp.where(positive, length, 1.0)
    rest = scale(jnp.where(positive, 0.0, 1.0), otherwise)
    return jax.tree.map(jnp.add, scale(inverse, tree), rest)
