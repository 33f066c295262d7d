"""Group normalization, of groups of channels of one sample, and batch normalization, of channels over a batch.

With group normalization every sample has a gradient of its own. Batch normalization mixes the samples of a batch: there
is no gradient of a single sample, and so no bound on its influence.

Statistics are float32 whatever the inputs are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.types import Array, FactoredLayer, PyTree
from jaxfl.models.kernels import position_sums, suits_gpu


def group_norm(inputs: Array, scale: Array, bias: Array, num_groups: int, eps: float = 1e-6) -> Array:
    """Bring each sample's groups of neighboring channels to mean 0 and variance 1, then scale and shift them.

    Statistics run over the positions and channels of one group of one sample.

    Args:
        inputs: (b, height, width, channels), float32 or bfloat16.
        scale: (channels,), of the same type.
        bias: (channels,), of the same type.
        num_groups: groups of channels / num_groups neighboring channels each.
        eps: added to the variance.

    Returns:
        (b, height, width, channels), of the same type.

    Raises:
        ArgumentError: `num_groups` below 1 or no divisor of the number of channels.

    Guarantees:
        - equals flax GroupNorm in value and in every gradient.
        - a sample's output does not depend on other samples.
        - accurate even if the mean is large against the deviation, unlike the mean of squares minus the squared mean.

    Edge cases:
        A group whose numbers are all equal (or that holds one number) becomes the bias; its gradients stay finite.

    Examples:
        >>> image = jnp.array([1.0, 3.0, 10.0, 30.0]).reshape(1, 1, 1, 4)
        >>> group_norm(image, jnp.ones(4), jnp.zeros(4), num_groups=2).round(3).reshape(-1).tolist()
        [-1.0, 1.0, -1.0, 1.0]

    References:
        Wu, He: "Group Normalization", ECCV 2018, arXiv:1803.08494.
    """
    check.at_least(1, num_groups=num_groups)
    batch, channels = inputs.shape[0], inputs.shape[-1]
    if channels % num_groups:
        found = f"got {num_groups} for {channels} channels"
        raise ArgumentError("num_groups", "must divide the number of channels", found, "Choose a divisor.")
    group_size = channels // num_groups

    def group_mean(values):
        """(b, rows, columns, channels) -> (b, 1, 1, channels), the mean of its group at each channel."""
        # Positions first: a CPU vectorizes sums over all axes but the innermost, unless that is split into groups.
        sums = values.sum(axis=(1, 2)).reshape(batch, num_groups, group_size).sum(axis=2, keepdims=True)
        means = sums / (values.shape[1] * values.shape[2] * group_size)
        return jnp.broadcast_to(means, (batch, num_groups, group_size)).reshape(batch, 1, 1, channels)

    wide, scale, bias = (at_least_float32(values) for values in (inputs, scale, bias))
    if suits_gpu():
        center, variance = _in_one_pass(inputs, group_mean)
        deviations = wide - center
    else:
        deviations = wide - group_mean(wide)
        variance = group_mean(deviations**2)
    factor = lax.rsqrt(variance + eps) * scale[None, None, None, :]
    return (deviations * factor + bias[None, None, None, :]).astype(inputs.dtype)


def batch_statistics(inputs: Array, weights: Array, otherwise: PyTree) -> PyTree:
    """Mean and variance of each channel over samples and positions.

    Args:
        inputs: (b, ..., channels), float32 or bfloat16.
        weights: (b,), float32, at least 0: how much each sample counts; their sum does not matter.
        otherwise: what to return where all weights are 0, in the form of the result.

    Returns:
        {"mean": (channels,), "var": (channels,)}, float32. The variance is the biased one, the mean squared deviation,
        as in flax; PyTorch's running variance is larger by a factor count / (count - 1).

    Guarantees:
        - equals flax BatchNorm's statistics of the samples that count.
        - samples of weight 0 never count.
        - accurate even if the mean is large against the deviation.

    Examples:
        >>> zero_one = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
        >>> statistics = batch_statistics(jnp.array([[1.0], [3.0], [9.0]]), jnp.array([1.0, 1.0, 0.0]), zero_one)
        >>> statistics["mean"].tolist(), statistics["var"].tolist()
        ([2.0], [1.0])
    """
    total = weights.sum()
    any_counts = total > 0
    divisor = jnp.where(any_counts, total, 1.0)

    def mean(values):
        """(b, ..., channels) -> (channels,)."""
        return jnp.sum(weights[:, None] * values.mean(axis=tuple(range(1, values.ndim - 1))), axis=0) / divisor

    wide = at_least_float32(inputs)
    if wide.ndim > 2 and suits_gpu():
        center, variance = _in_one_pass(inputs, lambda values: _along_channels(mean(values), values))
        statistics = {"mean": center.reshape(-1), "var": variance.reshape(-1)}
    else:
        center = mean(wide)
        statistics = {"mean": center, "var": mean((wide - _along_channels(center, wide)) ** 2)}
    return {name: jnp.where(any_counts, values, otherwise[name]) for name, values in statistics.items()}


def _in_one_pass(inputs: Array, mean: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Mean and variance from one reading of all numbers, for a GPU, where memory traffic takes most of the time.

    `mean` gives an array that broadcasts against (b, rows, ..., channels). All numbers are shifted by the mean of the
    first rows. Its squared distance from the mean is at most the number of rows times the variance, so that rounding
    changes the variance by no more than a few times that number of units in the last place. The gradient reads less,
    too.
    """
    shift = lax.stop_gradient(mean(at_least_float32(inputs[:, :1])))
    differences = at_least_float32(inputs) - shift
    distance = mean(differences)
    return shift + distance, jnp.maximum(mean(differences**2) - distance**2, 0.0)


def batch_norm(inputs: Array, scale: Array, bias: Array, statistics: PyTree, eps: float = 1e-5) -> Array:
    """(inputs - mean) / sqrt(var + eps) * scale + bias, at each channel.

    Args:
        inputs: (b, ..., channels), float32 or bfloat16.
        scale: (channels,), of the same type.
        bias: (channels,), of the same type.
        statistics: {"mean": (channels,), "var": (channels,)}, float32: the batch's in training, running ones in
            evaluation.
        eps: added to the variance.

    Returns:
        In the shape and type of the inputs.

    Guarantees:
        - equals flax BatchNorm in value and in every gradient.

    Edge cases:
        A channel whose numbers are all equal becomes the bias, with gradients that stay finite.

    Examples:
        >>> statistics = {"mean": jnp.array([2.0]), "var": jnp.array([4.0])}
        >>> batch_norm(jnp.array([[8.0]]), jnp.ones(1), jnp.ones(1), statistics, eps=0.0).tolist()
        [[4.0]]
    """
    wide, scale, bias = (at_least_float32(values) for values in (inputs, scale, bias))
    factor = lax.rsqrt(statistics["var"] + eps) * scale
    deviations = wide - _along_channels(statistics["mean"], wide)
    return (deviations * _along_channels(factor, wide) + _along_channels(bias, wide)).astype(inputs.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def normalize_batch(
    inputs: Array, weights: Array, scale: Array, bias: Array, otherwise: PyTree, eps: float = 1e-5
) -> tuple[Array, PyTree]:
    """`batch_norm` with the batch's own statistics: training.

    Its gradient is written out, because JAX's own passes over the batch more than twice as often: 1.1 ms instead of 1.7
    for forward and backward pass (32 images of 32x32x16, one core). `jax.jvp` therefore does not work.

    Args:
        inputs: (b, ..., channels), float32 or bfloat16.
        weights: (b,), as for `batch_statistics`; they count as constants, with gradient zero.
        scale: (channels,), of the inputs' type.
        bias: (channels,), of the inputs' type.
        otherwise: statistics if all weights are 0; constants, too.
        eps: added to the variance.

    Returns:
        (outputs, in the shape and type of the inputs; the statistics that were used).

    Guarantees:
        - equals flax BatchNorm in values and in every gradient.
    """
    statistics = batch_statistics(inputs, weights, otherwise)
    return batch_norm(inputs, scale, bias, statistics, eps), statistics


def _normalize_batch_forward(inputs, weights, scale, bias, otherwise, eps):
    statistics = batch_statistics(inputs, weights, otherwise)
    outputs = batch_norm(inputs, scale, bias, statistics, eps)
    return (outputs, statistics), (inputs, weights, scale, bias, statistics)


def _normalize_batch_backward(eps, residuals, errors):
    inputs, weights, scale, bias, statistics = residuals
    error, statistics_error = at_least_float32(errors[0]), errors[1]
    wide, shares, ones = at_least_float32(inputs), _shares(inputs, weights), jnp.ones_like(weights)
    inverse = lax.rsqrt(statistics["var"] + eps)
    factor = inverse * at_least_float32(scale)
    deviations = wide - _along_channels(statistics["mean"], wide)
    bias_error = _sum_by_channel(error, ones)
    scale_error = inverse * _sum_by_channel(error * deviations, ones)
    # Errors at the mean and the variance. The mean has no effect on the variance: deviations from it sum to zero.
    mean_error = statistics_error["mean"] - factor * bias_error
    var_error = statistics_error["var"] - 0.5 * factor * inverse * scale_error
    through_statistics = _along_channels(mean_error, wide) + 2.0 * deviations * _along_channels(var_error, wide)
    by_sample = shares.reshape(-1, *[1] * (wide.ndim - 1))
    inputs_error = error * _along_channels(factor, wide) + by_sample * through_statistics
    return (
        inputs_error.astype(inputs.dtype),
        jnp.zeros_like(weights),
        scale_error.astype(scale.dtype),
        bias_error.astype(bias.dtype),
        jax.tree.map(jnp.zeros_like, statistics),
    )


normalize_batch.defvjp(_normalize_batch_forward, _normalize_batch_backward)


def factored_scale_and_bias(normalize: Callable[[Array], Array]) -> Callable[[str, bool], FactoredLayer]:
    """The factored form of outputs = normalize(inputs) * scale + bias, with one scale and bias for each channel.

    A sample's gradients are sums over positions: of normalized input times error, and of the error. They have one
    number for each channel, so that they are simply formed.

    Args:
        normalize: inputs (b, ..., channels) -> (b, ..., channels), without parameters, each sample by itself.

    Returns:
        (name, input_is_sample) -> FactoredLayer of parameters {"scale": (channels,), "bias": (channels,)}.

    Guarantees:
        - agrees with per-sample gradients.
        - no norm is below the gradient's where its terms cancel.

    Examples:
        >>> factored = factored_scale_and_bias(lambda inputs: inputs)("norm", False)
        >>> inputs, errors = jnp.array([[[1.0], [3.0]]]), jnp.array([[[2.0], [1.0]]])
        >>> {name: leaf.tolist() for name, leaf in factored.per_sample(inputs, errors).items()}
        {'scale': [[5.0]], 'bias': [[3.0]]}
        >>> factored.squared_norm(inputs, errors).round(4).tolist()
        [34.0]
    """

    def terms_of(inputs, errors):
        """Compute the terms that are summed over positions, each (b, p, channels)."""
        batch, channels = errors.shape[0], errors.shape[-1]
        scale_terms = normalize(inputs) * errors
        return {"scale": scale_terms.reshape(batch, -1, channels), "bias": errors.reshape(batch, -1, channels)}

    def per_sample(inputs, errors):
        return {name: terms.sum(axis=1) for name, terms in terms_of(inputs, errors).items()}

    def upper_bounds(inputs, errors):
        """Upper bounds of the gradients' absolute values, (b, channels) each."""
        return [
            jnp.abs(terms.sum(axis=1)) + position_sums.summation_error(jnp.abs(terms).sum(axis=1), terms.shape[1])
            for terms in terms_of(inputs, errors).values()
        ]

    def squared_norm(inputs, errors):
        scale, bias = upper_bounds(inputs, errors)
        return jnp.sum(scale**2 + bias**2, axis=1)

    def absolute_norm(inputs, errors):
        scale, bias = upper_bounds(inputs, errors)
        return jnp.sum(scale + bias, axis=1)

    def weighted_sum(inputs, errors, weight):
        rows = per_sample(inputs, errors)
        return {name: jnp.dot(weight, row, precision="highest") for name, row in rows.items()}

    return functools.partial(
        FactoredLayer,
        is_outer_product=False,
        squared_norm=squared_norm,
        absolute_norm=absolute_norm,
        weighted_sum=weighted_sum,
        per_sample=per_sample,
    )


def _shares(inputs: Array, weights: Array) -> Array:
    """Compute the weight of a sample's position in a mean over all positions, (b,), float32; 0 if all weights are 0."""
    total = weights.sum()
    positions = math.prod(inputs.shape[1:-1])
    return weights / (jnp.where(total > 0, total, 1.0) * positions)


def _sum_by_channel(values: Array, sample_weights: Array) -> Array:
    """(b, ..., channels) -> (channels,), float32, positions first: a CPU vectorizes this order."""
    by_sample = values.sum(axis=tuple(range(1, values.ndim - 1)))
    return jnp.sum(sample_weights[:, None] * by_sample, axis=0)


def at_least_float32(values: Array) -> Array:
    """bfloat16 as float32; anything else unchanged."""
    return values.astype(jnp.float32) if values.dtype == jnp.bfloat16 else values


def _along_channels(values: Array, like: Array) -> Array:
    """(channels,) -> (1, ..., channels), with as many axes as `like`."""
    return values.reshape((1,) * (like.ndim - 1) + values.shape)
