"""Factored gradients of the scale and bias that follow a normalization."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from jaxfl.core.types import Array, FactoredLayer
from jaxfl.models import position_sums


def factored_scale_and_bias(normalize: Callable[[Array], Array]) -> Callable[[str, bool], FactoredLayer]:
    """The factored form of outputs = normalize(inputs) * scale + bias, with one scale and bias for each channel.

    A sample's gradients are sums over positions, of normalized input times error and of the error. They are as small as
    one position, so that they are simply formed.

    Args:
        normalize: inputs (b, ..., channels) -> (b, ..., channels), without parameters, each sample by itself.

    Returns:
        (name, input_is_sample) -> FactoredLayer of parameters {"scale": (channels,), "bias": (channels,)}.

    Guarantees:
        - agrees with per-sample gradients.
        - no norm is below the gradient's where its terms cancel.

    Example:
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

    def rounded_up(inputs, errors):
        """At least the absolute values of the gradients, (b, channels) each."""
        return [
            jnp.abs(terms.sum(axis=1)) + position_sums.summation_error(jnp.abs(terms).sum(axis=1), terms.shape[1])
            for terms in terms_of(inputs, errors).values()
        ]

    def squared_norm(inputs, errors):
        scale, bias = rounded_up(inputs, errors)
        return jnp.sum(scale**2 + bias**2, axis=1)

    def absolute_norm(inputs, errors):
        scale, bias = rounded_up(inputs, errors)
        return jnp.sum(scale + bias, axis=1)

    def weighted_sum(inputs, errors, weight):
        rows = per_sample(inputs, errors)
        return {name: jnp.dot(weight, row, precision="highest") for name, row in rows.items()}

    def factored(name, input_is_sample):
        return FactoredLayer(
            name=name,
            input_is_sample=input_is_sample,
            is_outer_product=False,
            squared_norm=squared_norm,
            absolute_norm=absolute_norm,
            weighted_sum=weighted_sum,
            per_sample=per_sample,
        )

    return factored
