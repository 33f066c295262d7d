"""SGD of clients, as an optax optimizer for each round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import optax

from jaxfl.core import Array, check
from jaxfl.core.algorithm import at_round


def client_sgd(
    step_size: float | Array | Callable[[Array], Array],
    *,
    momentum: float | Array | Callable[[Array], Array] = 0.0,
    weight_decay: float | Array | Callable[[Array], Array] = 0.0,
) -> Callable[[Array], optax.GradientTransformation]:
    """SGD with checked numbers, which may be traced or schedules of the round.

    For t = 1, ..., tau of a round: v <- mu v + g + lambda x, x <- x - gamma v, with v = 0 at the start of the round.

    Args:
        step_size: gamma, positive: a number, a traced scalar, or a schedule of the round index (any optax schedule).
        momentum: mu, at least 0; where it is known to be 0, no velocity is kept.
        weight_decay: lambda, at least 0.

    Returns:
        Round index () -> optax optimizer, as `local_steps` takes it.

    Raises:
        ArgumentError: a step size that is not positive, negative momentum or weight decay.

    Examples:
        >>> import jax.numpy as jnp
        >>> rule = client_sgd(optax.exponential_decay(1.0, 1, 0.5))(jnp.int32(2))
        >>> float(rule.update(jnp.float32(4.0), rule.init(jnp.float32(0.0)))[0])
        -1.0
    """
    check.scalar(step_size=step_size, momentum=momentum, weight_decay=weight_decay)
    check.positive(step_size=step_size)
    check.in_float32(step_size=step_size)
    check.non_negative(momentum=momentum, weight_decay=weight_decay)

    def at(round_index):
        def rule(tree):
            """SGD with numbers in the type of the parameters, or of their gradient."""
            velocity = at_round(momentum, round_index, tree) if _may_act(momentum) else None
            plain = optax.sgd(at_round(step_size, round_index, tree), velocity)  # pyright: ignore[reportArgumentType]
            if not _may_act(weight_decay):
                return plain
            return optax.chain(optax.add_decayed_weights(at_round(weight_decay, round_index, tree)), plain)

        return optax.GradientTransformation(
            init=lambda params: rule(params).init(params),
            update=lambda updates, state, params=None: rule(updates).update(updates, state, params),
        )

    return at


def _may_act(value: float | Array | Callable[[Array], Array]) -> bool:
    """Tell whether a hyper-parameter may differ from 0. One that is known to be 0 costs no memory."""
    # NumPy compares, because JAX would trace the comparison inside a round.
    return callable(value) or check.is_traced(value) or bool(np.asarray(value) != 0)
