"""The constants of a convergence bound, estimated after an aggregation: rho_i, beta_i and xi_i of every client.

With w_i client i's model before the aggregation, w the aggregate, F_i the mean loss of the client's data:

    rho_i = |F_i(w_i) - F_i(w)| / |w_i - w|                 Lipschitz constant of F_i
    beta_i = |grad F_i(w_i) - grad F_i(w)| / |w_i - w|      smoothness
    xi_i = |grad F_i(w) - grad F(w)|                        divergence, grad F the data-weighted mean of the grad F_i

`published_constants` computes these from the private data, without noise (ALI-DPFL, section IV-B). `private_constants`
releases three numbers for each client, with Gaussian noise. With l_s, g_s the loss and gradient of sample s, clip_C the
scaling of a gradient to L2 norm C at most, m the expected size of a Poisson sample, and v a public vector:

    a_i = (1/m) sum_s clip(l_s(w_i) - l_s(w), [-L, L])
    b_i = |(1/m) sum_s (clip_C g_s(w_i) - clip_C g_s(w))|
    c_i = |(1/m) sum_s clip_C g_s(w) - v|

w_i, w and v are functions of earlier releases with noise. Taking one sample away moves a_i by at most L / m, b_i by at
most 2 C / m and c_i by at most C / m, because a norm changes by no more than its vector. Each number gets noise of z
sqrt(3) times its own bound: together they are one Gaussian mechanism of noise multiplier z, on a Poisson sample of rate
m / J_i. The denominators are public. v is (x - w) / (gamma tau), the mean of the round's noisy gradients by plain SGD.
Its own noise has the expected squared norm d s^2 sum_i p_i^2 / tau, with d parameters and s the standard deviation of a
step's noise on one coordinate (s_i^2 within the sum, where clients have their own). This is subtracted from c_i^2.

Ling, Fu, Wang, Liu, Chen, "ALI-DPFL: Differentially Private Federated Learning with Adaptive Local Iterations",
arXiv:2308.10457, Definition 2 and section IV-B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import Array, FederatedData, Key, Purpose, PyTree, Task, check, node_keys, over_nodes, purpose_key
from jaxfl.core.devices import varying_like
from jaxfl.core.tree import add_exactly, copied, norm, size, weighted_sum
from jaxfl.gradients import fixed, per_example, poisson
from jaxfl.gradients.per_example import tree_norm
from jaxfl.gradients.samplers import Sampler, check_counts

# Samples whose gradients are summed at once.
_SAMPLES_AT_ONCE = 64


class ConstantsDraws(NamedTuple):
    """The random numbers of one round's estimates; c slots."""

    batch_indices: Array | None  # (n, c), int32, positions among the client's samples; an empty slot: its size or more
    batch_overflow: Array  # (n,), int32, samples drawn that had no slot; above 0 is an error
    noise: Array | None  # (n, 3), float32, standard normal, for a, b and c; None where there is none


class Constants(NamedTuple):
    """Constants of the bound, for every client."""

    rho: Array  # (n,), float32
    beta: Array  # (n,), float32
    xi: Array  # (n,), float32


class Aggregation(NamedTuple):
    """A round, as the estimates need it."""

    before: PyTree  # x, what the clients began with, leaves (*leaf)
    client_params: PyTree  # w_i, leaves (n, *leaf)
    after: PyTree  # w, leaves (*leaf)
    shares: Array  # p_i, (n,), float32
    received: Array  # the shares by which w is the mean of the w_i, (n,), float32; p_i where nothing is lost
    num_steps: Array  # tau, (), int32
    step_size: Array  # gamma, (), float32
    noise_std: Array  # s, () or (n,), float32


class BoundConstants(NamedTuple):
    """Estimator of the bound's constants, made by `published_constants` or `private_constants`.

    Attributes:
        is_private: whether the estimates have noise. Without noise a client sends a gradient, too, not only numbers.
        batch_size: samples of an estimate, expected ones of a private one; None: all of a client's.
        noise_multiplier: of the three numbers together; 0 without noise.
        check_data: data -> None; raises for clients with too few samples.
        draw: (key, round index, data) -> `ConstantsDraws`.
        estimate: (task, data, draws, `Aggregation`, `Constants` before) -> (`Constants`, gradients evaluated (n,)
            int32).
    """

    is_private: bool
    batch_size: int | None
    noise_multiplier: float | Array
    check_data: Callable[[FederatedData], None]
    draw: Callable[[Key, Array, FederatedData], ConstantsDraws]
    estimate: Callable[..., tuple[Constants, Array]]


def published_constants(batch_size: int | None = None) -> BoundConstants:
    """Estimates without noise: no privacy guarantee covers them.

    Args:
        batch_size: samples of a client that an estimate uses, drawn anew in each round without repetition; a client
            with fewer samples uses all of them. None: all samples.

    Guarantees:
        - a client whose model equals the aggregate keeps its rho and beta.
    """
    sampler = None if batch_size is None else fixed(batch_size)

    def estimate(task, data, draws, aggregation, before):
        places, mask = _places(data, draws)

        def one_client(params, own_places, own_mask):
            divisor = own_mask.sum(dtype=jnp.float32)
            losses, gradient = _gradient_sum(task, params, data, own_places, own_mask, None)
            new_losses, new_gradient = _gradient_sum(task, aggregation.after, data, own_places, own_mask, None)
            change = jax.tree.map(lambda a, b: (a - b) / divisor, gradient, new_gradient)
            mean = jax.tree.map(lambda leaf: leaf / divisor, new_gradient)
            return jnp.sum(losses - new_losses) / divisor, tree_norm(change, 2), mean

        losses, changes, gradients = over_nodes(one_client, task.node_loop)(aggregation.client_params, places, mask)
        mean = weighted_sum(aggregation.shares, gradients)
        xi = norm(jax.tree.map(lambda leaf, centre: leaf - centre[None], gradients, mean))
        return _over_distance(aggregation, jnp.abs(losses), changes, xi, before), _evaluations(mask)

    return _constants(sampler, estimate, batch_size)


def private_constants(
    batch_size: int | None, *, clip_norm: float | Array, loss_bound: float | Array, noise_multiplier: float | Array
) -> BoundConstants:
    """Estimates with noise, which the privacy budget pays for.

    Args:
        batch_size: m, expected size of a client's Poisson batch, smaller than any client's data; None takes all
            samples.
        clip_norm: C, bound on the L2 norm of a sample's gradient; may be traced.
        loss_bound: L, bound on the change of a sample's loss; may be traced.
        noise_multiplier: z, standard deviation of the noise over the L2 sensitivity of the three numbers; may be
            traced.

    Raises:
        ArgumentError: a number that is not positive; from `check_data`, a client with too few samples.

    Guarantees:
        - one sample moves the three numbers by at most the stated bounds.
        - a client whose model equals the aggregate keeps its rho and beta.
    """
    check.clip_norm(clip_norm=clip_norm)
    check.scalar(loss_bound=loss_bound, noise_multiplier=noise_multiplier)
    check.positive(loss_bound=loss_bound, noise_multiplier=noise_multiplier)
    clip_norm, loss_bound, noise_multiplier = copied((clip_norm, loss_bound, noise_multiplier))
    sampler = None if batch_size is None else poisson(batch_size)

    def estimate(task, data, draws, aggregation, before):
        (places, mask), w = _places(data, draws), aggregation.after
        of_loss, of_gradient, multiplier = (
            jnp.full((), number, jnp.float32) for number in (loss_bound, clip_norm, noise_multiplier)
        )
        n, tau = data.num_nodes, jnp.maximum(aggregation.num_steps, 1).astype(jnp.float32)
        divisors = data.sizes.astype(jnp.float32) if batch_size is None else jnp.full(n, batch_size, jnp.float32)
        mean_gradient = jax.tree.map(
            lambda old, new: (old - new) / (aggregation.step_size * tau), aggregation.before, w
        )

        def one_client(params, divisor, own_places, own_mask):
            losses, gradient = _gradient_sum(task, params, data, own_places, own_mask, of_gradient)
            new_losses, new_gradient = _gradient_sum(task, w, data, own_places, own_mask, of_gradient)
            change = jax.tree.map(lambda a, b: (a - b) / divisor, gradient, new_gradient)
            apart = jax.tree.map(lambda total, v: total / divisor - v, new_gradient, mean_gradient)
            change_of_loss = losses - new_losses
            changes = jnp.where(jnp.isfinite(change_of_loss), jnp.clip(change_of_loss, -of_loss, of_loss), 0.0)
            return jnp.stack([changes.sum() / divisor, tree_norm(change, 2), tree_norm(apart, 2)])

        values = over_nodes(one_client, task.node_loop)(aggregation.client_params, divisors, places, mask)
        bounds = jnp.stack([of_loss, 2 * of_gradient, of_gradient])
        std = multiplier * math.sqrt(3) * bounds[None] / divisors[:, None]
        values = values + std * draws.noise
        variance, squares = jnp.square(aggregation.noise_std), jnp.square(aggregation.received)
        common, squares = (variance, squares) if variance.ndim == 0 else (1.0, variance * squares)
        noise_in_mean = size(w) * common * jnp.sum(squares) / tau
        change, apart = jnp.maximum(values[:, 1], 0.0), jnp.maximum(values[:, 2], 0.0)
        xi = jnp.sqrt(jnp.maximum(jnp.square(apart) - noise_in_mean, 0.0))
        return _over_distance(aggregation, jnp.abs(values[:, 0]), change, xi, before), _evaluations(mask)

    return _constants(sampler, estimate, batch_size, noise_multiplier)


def _constants(
    sampler: Sampler | None,
    estimate: Callable[..., Any],
    batch_size: int | None,
    noise_multiplier: float | Array | None = None,
) -> BoundConstants:
    is_private = noise_multiplier is not None

    def check_data(data):
        if sampler is not None and is_private:
            check_counts(sampler, data.sizes, data.names)

    def draw(key, round_index, data):
        n, noise = data.num_nodes, None
        if is_private:
            keys = node_keys(purpose_key(key, Purpose.ESTIMATE_NOISE, round_index), n)
            noise = jax.vmap(lambda client: jax.random.normal(client, (3,), jnp.float32))(keys)
        if sampler is None:
            return ConstantsDraws(None, jnp.zeros(n, jnp.int32), noise)
        keys = node_keys(purpose_key(key, Purpose.ESTIMATE, round_index), n)
        indices, mask, overflow = jax.vmap(sampler.draw_node)(keys, data.sizes)
        return ConstantsDraws(jnp.where(mask, indices, data.sizes[:, None]), overflow, noise)

    multiplier = 0.0 if noise_multiplier is None else noise_multiplier  # which may be traced
    return BoundConstants(is_private, batch_size, multiplier, check_data, draw, estimate)


def _places(data: FederatedData, draws: ConstantsDraws) -> tuple[Array, Array]:
    """Places in the pool and mask, (n, groups, samples at once)."""
    n, longest = data.indices.shape
    positions = draws.batch_indices
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), (n, longest))
    at_once = min(_SAMPLES_AT_ONCE, positions.shape[1])
    padding = -positions.shape[1] % at_once
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=longest)
    mask = positions < data.sizes[:, None]
    return data.places(positions).reshape(n, -1, at_once), mask.reshape(n, -1, at_once)


def _gradient_sum(
    task: Task, params: PyTree, data: FederatedData, places: Array, mask: Array, clip_norm: float | Array | None
) -> tuple[Array, PyTree]:
    """Losses (groups, samples at once) and the sum of all (clipped) gradients of one client."""

    def group(carry, one):
        own_places, own_mask = one
        result = per_example.weighted_sum(
            task,
            params,
            data.inputs[own_places],
            data.labels[own_places],
            own_mask.astype(jnp.float32),
            clip_norm=clip_norm,
        )
        total, rounding = carry
        return add_exactly(total, rounding, result.gradient), jnp.where(own_mask, result.losses, 0.0)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    start = varying_like((nothing, nothing), params, places)
    (gradient, _), losses = jax.lax.scan(group, start, (places, mask))
    return losses, gradient


def _evaluations(mask: Array) -> Array:
    """Gradients of every client, at two points for each sample."""
    return 2 * mask.sum(axis=(1, 2), dtype=jnp.int32)


def _over_distance(aggregation: Aggregation, losses: Array, changes: Array, xi: Array, before: Constants) -> Constants:
    """Divide by each client's distance from the aggregate; at distance 0 keep the previous constants."""
    apart = jax.tree.map(lambda own, mean: own - mean[None], aggregation.client_params, aggregation.after)
    distance = norm(apart)
    is_apart = distance > 0
    divisor = jnp.where(is_apart, distance, 1.0)
    return Constants(
        rho=jnp.where(is_apart, (losses / divisor).astype(jnp.float32), before.rho),
        beta=jnp.where(is_apart, (changes / divisor).astype(jnp.float32), before.beta),
        xi=xi.astype(jnp.float32),
    )
