"""Multilayer perceptrons."""

from __future__ import annotations

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.models import layers
from jaxfl.models.classification import Model, sequential


def mlp(widths: tuple[int, ...] = (784, 32, 10), activation: str = "relu") -> Model:
    """Dense layers "dense_1", "dense_2", ... with an activation between them; flattens its input first.

    Kernels start LeCun normal, biases at zero, as in flax.

    Args:
        widths: numbers in a sample, units of each hidden layer, classes.
        activation: "relu" or "tanh".

    Returns:
        A model for `jaxfl.models.classification`.

    Raises:
        ArgumentError: fewer than two widths, a width below 1 or an unknown activation.

    Example:
        >>> import jax
        >>> params = jax.eval_shape(mlp((784, 32, 10)).init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        25450
    """
    if len(widths) < 2:
        requirement = "must hold the input size and the number of classes"
        raise ArgumentError("widths", requirement, f"got {widths}", "Pass at least two numbers.")
    check.one_of(("relu", "tanh"), activation=activation)
    for position, width in enumerate(widths):
        check.at_least(1, **{f"widths[{position}]": width})
    named = [("flatten", layers.reshape((widths[0],)))]
    for position in range(1, len(widths)):
        if position > 1:
            named.append((f"{activation}_{position - 1}", layers.activation(activation)))
        named.append((f"dense_{position}", layers.dense(widths[position - 1], widths[position])))
    return sequential(named)
