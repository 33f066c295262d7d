"""Check of optimizers before any work."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.core.check import ArgumentError


def check_optimizer(name: str, optimizer: Any, *, by_round: bool = False) -> set[str]:
    """Names of the types in an optimizer's state; refuse what cannot update parameters from one gradient.

    Args:
        name: name of the argument.
        optimizer: optax optimizer. One made for a structure of parameters (`optax.masked`) is left to the first round.
        by_round: whether a function of the round index that gives one will do.

    Raises:
        ArgumentError: a number, a constructor that was not called, or an optimizer that asks for losses or samples.
    """
    import optax  # takes longer than the library

    rule, found, remedy = optimizer, f"got {optimizer!r}"[:60], "Pass optax.sgd(0.1), for instance, called."
    if hasattr(optimizer, "gradient_transformation"):  # optax.MultiSteps
        rule, remedy = optimizer.gradient_transformation() if by_round else None, "Pass its gradient_transformation()."
    elif callable(optimizer):
        is_constructor = next(iter(inspect.signature(optimizer).parameters), "") == "learning_rate"
        rule = optimizer(jnp.int32(0)) if by_round and not is_constructor else None
        found = "got a constructor" if is_constructor else "got a function"
    if not isinstance(rule, optax.GradientTransformation):
        requirement = "must be an optimizer of optax" + (", or a function from the round index to one" if by_round else "")
        raise ArgumentError(name, requirement, found, remedy)
    gradient, types = jax.ShapeDtypeStruct((3,), jnp.float32), []

    def trial(params):
        state = rule.init(params)
        jax.tree.leaves(state, is_leaf=lambda node: types.append(type(node)) is not None)
        return rule.update(params, state, params)[0]

    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            shape = getattr(jax.eval_shape(trial, gradient), "shape", None)
        reason = "" if shape == gradient.shape else f"its update of shape {gradient.shape} has shape {shape}"
    except (TypeError, AttributeError, ValueError) as error:
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        culprit = [one for one in frames if not one.startswith("jax.")][-1]
        is_structure = isinstance(error, ValueError) or not culprit.startswith(("optax.", __name__))
        reason = "" if is_structure else str(error).partition("\n")[0]
    if reason:
        requirement = "must update parameters from one gradient, without losses or samples"
        raise ArgumentError(name, requirement, f"got an optimizer that cannot: {reason}", remedy)
    return {kind.__name__ for kind in types}
