"""Step of every node along its noisy gradient: by a step size, or by an optax optimizer of the node's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from jaxfl.core import ArgumentError, Array, PyTree, check
from jaxfl.core.algorithm import at_round
from jaxfl.core.tree import descend

if TYPE_CHECKING:
    import optax

OfRound = Callable[[PyTree, Any, PyTree, Array], tuple[PyTree, Any, Callable[[PyTree, PyTree], PyTree]]]


def node_steps(
    step_size: float | Array | Callable[[Array], Array] | None, optimizer: optax.GradientTransformation | None
) -> tuple[Callable[[PyTree], Any], OfRound]:
    """Make the step start - gamma g, or start + u, with u the update of an optimizer for the noisy gradient g.

    An optimizer's state is its node's own: it is a function of the noisy gradients, never sent and never mixed.

    Args:
        step_size: gamma, a number, a traced scalar or a schedule of the round index.
        optimizer: in its place; it has a step size of its own.

    Returns:
        (params (n, *leaf) -> the optimizers' state, None without one; (noisy gradients (n, *leaf), state, params, round
        index) -> (direction (n, *leaf), new state, (start, direction) -> start after the step)).

    Raises:
        ArgumentError: both or neither, or a step size out of range.
    """
    if (step_size is None) == (optimizer is None):
        found = "got neither" if optimizer is None else "got both"
        remedy = "Pass step_size=0.1, or optimizer=optax.sgd(0.1, momentum=0.9)."
        raise ArgumentError("step_size", "must be given, or an optimizer in its place", found, remedy)
    if optimizer is not None:
        import optax  # imported on use: the import takes a third of a second

        update = jax.vmap(optimizer.update)
        return jax.vmap(optimizer.init), lambda noisy, memory, params, _: (
            *update(noisy, memory, params),
            optax.apply_updates,
        )
    check.scalar(step_size=step_size)
    check.positive(step_size=step_size)
    check.in_float32(step_size=step_size)

    def of_step_size(noisy, memory, params, round_index):
        return noisy, None, partial(_descend, at_round(step_size, round_index, params))  # pyright: ignore

    return lambda params: None, of_step_size


def _descend(gamma: Array, start: PyTree, direction: PyTree) -> PyTree:
    return descend(start, gamma, direction)
