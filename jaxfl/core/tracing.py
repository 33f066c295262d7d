"""Support for counting on traced programs: the arrays that layers mark, and the form that is traced.

On a CPU some layers compute the same numbers in another form, which is faster there: with channels of zeros, or with
several columns of an image for channels of one. Layers ask `suits_cpu` whether to take such a form. Whoever counts
operations traces inside `canonical_form`, where the answer is no on every platform.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxfl.core.platform import is_cpu
from jaxfl.core.types import Array

ACTIVATION = "activation"  # the name under which `mark_activation` puts an array into the traced program

# A user context is part of JAX's cache keys: no function that was traced in one form serves for the other.
_canonical = jax.make_user_context(False)


def mark_activation(outputs: Array) -> Array:
    """`outputs`, marked as what `jaxfl.channel.count` takes for activations; costs nothing when run."""
    return checkpoint_name(outputs, ACTIVATION)


def canonical_form() -> AbstractContextManager[None]:
    """A context in which models are traced in the form that is the same on all platforms, to be counted and not run.

    Guarantees:
        - a function that was traced before is traced anew.

    Examples:
        >>> with canonical_form():
        ...     print(is_canonical(), suits_cpu())
        True False
    """
    return _canonical(True)


def is_canonical() -> bool:
    """True where the canonical form is traced."""
    return bool(_canonical.value)


def suits_cpu() -> bool:
    """True where a layer should take the form that is fast on a CPU."""
    return is_cpu() and not is_canonical()
